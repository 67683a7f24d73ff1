"""Replicas that only a further fault would move: each one stayed out of its ISR, or its leader was
not served.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from pk.log import batch as batches
from pk.log import columns
from pk.server.replica.delayed_produce import DelayedProduce
from pk.server.replica.leader import ACKS_ALL
from pk.types import NONE
from pk.wire import pk_pb2 as wire
from tests.kit.cluster import assign, written

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_a_stream_that_opens_under_a_registration_that_is_over_goes(make: Any) -> None:
    """KIP-903: offsets that are confirmed on the old stream let no replica join the ISR."""
    kit = make(5, brokers=4, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 50)
    leader, other, n = kit.state("t").replicas
    fourth = ({1, 2, 3, 4} - {leader, other, n}).pop()
    kit.sim.network.cut(f"b{n}", "controller")
    kit.until(lambda: n not in kit.state("t").isr)
    assign(kit, "t", leader, other, fourth)
    kit.until(lambda: kit.state("t").replicas == (leader, other, fourth))
    kit.ask(wire.UnregisterBrokerRequest(broker_id=n))
    fetcher = kit.replica(n, "t").replica.fetcher
    known = fetcher._session
    for ends in ((n, leader), (leader, n)):  # a connection takes four seconds
        kit.sim.network.link(f"b{ends[0]}", f"b{ends[1]}").delay_us = (1_000_000, 1_000_000)
    fetcher._stream.close()
    kit.until(lambda: fetcher._stream is None)
    kit.wait(300)
    kit.sim.network.heal(f"b{n}", "controller")
    kit.until(lambda: kit.brokers[n].core.lifecycle.broker_epoch > known[1])
    assign(kit, "t", leader, other, n)
    kit.until(lambda: fetcher._stream is not None and bool(fetcher._replicas))
    assert fetcher._session == fetcher._wanted_session() != known
    kit.until(lambda: n in kit.state("t").isr)


def test_who_stops_fetches_from_nobody_new(make: Any) -> None:
    """Data that arrive while the logs are closed would be written beside that."""
    kit = make(6, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=1)
    written(kit, "t", 50)
    leader, _, n = kit.state("t").replicas
    core = kit.brokers[n].core
    release = kit.hold_metadata(n)
    kit.wait(2_500)  # the poll under way ends
    kit.kill(leader)
    kit.until(lambda: kit.state("t").leader not in (-1, leader))
    close = core.fetchers.close

    async def close_and_hear() -> None:
        await close()
        release()  # from the next leader, from which nothing was fetched yet
        await core.env.clock.sleep_ms(100)

    core.fetchers.close = close_and_hear
    task = kit.sim.spawn(f"b{n}", kit.brokers[n].close())
    kit.until(task.done)
    task.result()
    assert {each.leader for each in core.fetchers._fetchers} == {leader}
    assert all(len(each._tasks) == 0 for each in core.fetchers._fetchers.values())


def test_what_an_older_stream_gives_up_is_followed_on_the_newer_one(make: Any) -> None:
    """handlers/replica_fetch F1: the message arrives late, and an idle log does not report a second
    time.
    """
    kit = make(7, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 50)
    at, _, n = kit.state("t").replicas
    leader, partition = kit.replica(at, "t").leader, kit.replica(n, "t")
    replica: Any = partition.replica
    fetcher, replicas = replica.fetcher, kit.brokers[n].core.fetchers
    state = kit.brokers[n].core.metadata.image.partition(partition.key)
    kit.sim.network.cut(f"b{n}", "controller")
    kit.until(lambda: n not in leader.isr)
    link = kit.sim.network.link(f"b{n}", f"b{at}")
    delay_us, link.delay_us = link.delay_us, (2_000_000, 2_000_000)
    older = fetcher._stream

    async def again() -> None:
        replicas.follow(partition, state)

    replicas.leave(partition)  # for example because no broker led
    kit.wait(100)
    link.delay_us = delay_us
    older.close()
    kit.until(kit.sim.spawn(f"b{n}", again()).done)
    kit.until(lambda: leader.end_of(n) == leader.log_end)
    assert fetcher._stream is not older
    kit.wait(3_000)
    assert n not in leader.isr
    kit.sim.network.heal(f"b{n}", "controller")
    kit.wait(10_000)
    assert n in leader.isr


def test_what_a_checkpoint_flushed_counts_when_flush_on_ack_is_switched_on(make: Any) -> None:
    """L2: a checkpoint does not report how far it flushed, and no further append may follow."""
    kit = make(8, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 20)
    at, *others = kit.state("t").replicas
    partition = kit.replica(at, "t")
    log, leader = partition.log, partition.leader
    assert leader is not None
    for n in others:
        kit.sim.network.cut(f"b{at}", f"b{n}")
    rows = pa.RecordBatch.from_pydict({"value": pa.array([b"last"], pa.binary())})
    ((header, raw),) = batches.iter_batches(b"".join(columns.encode(rows, default_timestamp=0)))

    async def appended() -> None:
        now = kit.brokers[at].core.clocks.now()
        partition.append(header, raw, NONE, now, DelayedProduce(None, 1, 0, ACKS_ALL, 0))
        await partition.writer.idle()

    kit.until(kit.sim.spawn(f"b{at}", appended()).done)
    kit.until(lambda: kit.state("t").isr == (at,))
    end = log.written_end
    assert leader.high_watermark == end - 1

    async def flushed_by_a_checkpoint() -> None:
        if log.roll():  # as a leader whose checkpointed watermark is old finds its log
            partition.writer.submit(partition, 0)
        await partition.writer.idle()
        await kit.brokers[at].core.manager.checkpoint()

    kit.until(kit.sim.spawn(f"b{at}", flushed_by_a_checkpoint()).done)
    assert leader._synced_end < log.synced_end == log.written_end
    request = wire.AlterConfigsRequest()
    resource = wire.ConfigResource(type="topic", name="t")
    request.changes.add(resource=resource).set["flush_on_ack"] = "true"
    reply = kit.ask(request)
    assert not reply.results[0].HasField("error"), reply
    for n in others:
        kit.sim.network.heal(f"b{at}", f"b{n}")
    kit.wait(5_000)
    assert leader.high_watermark == log.written_end == end, "without another append"
