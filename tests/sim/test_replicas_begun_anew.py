"""A replica that starts again at a later offset knows the producers: if its leader takes it for
complete it may lead next, and a retry is still stored once (rules R5, L6).
"""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.server.broker.metadata_publisher import POLL_WAIT_MS
from pk.server.handlers.fetch import _read_all
from pk.types import NodeId, Offset
from pk.wire import pk_pb2 as wire
from tests.kit.cluster import Kit, Ledger, written

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def _same_producers(kit: Kit, topic: str) -> None:
    """Check that every replica would refuse the same duplicates."""
    known = []
    for n in kit.state(topic).replicas:
        producers = kit.replica(n, topic).log.producers
        known.append({each: state.batches for each, state in producers.items()})
    assert known[0]
    assert known.count(known[0]) == len(known)


async def drop(kit: Kit, n: NodeId, before: Offset) -> None:
    """Run retention at broker `n`."""
    partition = kit.replica(n, "t")
    log = partition.log
    log.advance_log_start(before)
    plan = log.retention_plan(None)
    gone = tuple(each.base_offset for each in log.segments if each.base_offset < before)
    rename, _ = log.drop_segments(plan._replace(drop=gone, log_start=before))
    await partition.writer.disk.write(rename)


def test_a_segment_that_goes_while_its_snapshot_is_read_is_not_where_to_begin(make: Any) -> None:
    """The producer snapshot is deleted with its segment; an empty answer would mean that no
    producer wrote.
    """
    kit = make(3, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2, segment_bytes=20_000)
    written(kit, "t", 3_500)
    leader, _, n = kit.state("t").replicas
    log, writer = kit.replica(leader, "t").log, kit.replica(leader, "t").writer
    bases = [each.base_offset for each in log.segments]
    assert len(bases) == 3
    read, asked = writer.disk.read, []

    async def reading(work: Any) -> Any:
        if getattr(work, "func", None) == log.snapshot_at:
            asked.extend(work.args)
            if len(asked) == 1:
                await drop(kit, leader, bases[2])
        return await read(work)

    kit.empty_disk(n)
    task = kit.sim.spawn(f"b{leader}", drop(kit, leader, bases[1]))
    kit.until(task.done)
    writer.disk.read = reading
    kit.boot(n)
    kit.until(lambda: len(kit.state("t").isr) == 3 and kit.in_sync("t"))
    assert asked == [bases[1], bases[2]]
    assert kit.events("log_begun_anew") == 1
    _same_producers(kit, "t")


def test_retention_passes_a_replica_that_is_being_filled(make: Any) -> None:
    """Rule R5: the segment that the replica is to read next is dropped, after its log was
    compared.
    """
    kit = make(3, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2, segment_bytes=20_000)
    written(kit, "t", 3_500)
    leader, _, n = kit.state("t").replicas
    log, disk = kit.replica(leader, "t").log, kit.replica(leader, "t").writer.disk
    bases = [each.base_offset for each in log.segments]
    read, reads = disk.read, []

    async def reading(work: Any) -> Any:
        if getattr(work, "func", None) is _read_all:
            reads.append(work)
            if len(reads) == 1:
                await drop(kit, leader, bases[2])
        return await read(work)

    kit.empty_disk(n)
    disk.read = reading
    kit.boot(n)
    kit.until(lambda: len(kit.state("t").isr) == 3 and kit.in_sync("t"))
    assert len(reads) > 1
    assert kit.replica(n, "t").log.segments[0].base_offset == bases[2]
    _same_producers(kit, "t")


def test_a_snapshot_of_who_leads_no_more_is_not_where_to_begin(make: Any) -> None:
    """The log and its producer snapshots are removed while a snapshot is read; the replica does not
    know of the new leader yet.
    """
    kit = make(3, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2, segment_bytes=20_000)
    written(kit, "t", 100)
    written(kit, "t", 3_500)
    leader, second, n = kit.state("t").replicas
    partition = kit.replica(leader, "t")
    log, writer = partition.log, partition.writer
    read, asked = writer.disk.read, []

    async def reading(work: Any) -> Any:
        if getattr(work, "func", None) == log.snapshot_at:
            asked.append(work)
            while asked:
                await kit.brokers[leader].core.env.clock.sleep_ms(1)
        return await read(work)

    kit.empty_disk(n)
    task = kit.sim.spawn(f"b{leader}", drop(kit, leader, log.segments[1].base_offset))
    kit.until(task.done)
    writer.disk.read = reading
    kit.boot(n)
    kit.until(lambda: bool(asked))
    release = kit.hold_metadata(n)
    kit.wait(POLL_WAIT_MS)  # the replica has already fetched from there
    kit.sim.network.cut(f"b{leader}", f"b{second}")  # it comes back with an empty log
    kit.brokers[leader].core.failures.storage_failed(partition, errors.CorruptLog("damaged"))
    kit.until(lambda: kit.events("replica_made_anew") == 1)
    kit.wait(1_000)
    asked.clear()
    kit.wait(100)
    release()
    kit.sim.network.heal(f"b{leader}", f"b{second}")
    kit.until(lambda: len(kit.state("t").isr) == 3 and kit.in_sync("t"))
    _same_producers(kit, "t")


@pytest.mark.parametrize("more", [0, 50])
@pytest.mark.parametrize("bounced", [False, True])
def test_who_lost_what_was_deleted_hears_of_the_producers(
    make: Any, bounced: bool, more: int
) -> None:
    """log/loading O2: after a power loss the log ends below its start.  The start may lie within
    one of its leader's batches.
    """
    kit = make(5, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 300)
    leader, _, n = kit.state("t").replicas
    before = kit.replica(leader, "t").log.written_end - 1
    request = wire.DeleteRecordsRequest()
    topic_id = kit.replica(leader, "t").key.topic_id
    request.items.add(topic_id=topic_id, partition=0, before_offset=before)
    asked = kit.spawn_ask(request, leader)
    kit.until(asked.done)
    assert not asked.result().results[0].HasField("error"), asked.result()
    kit.until(lambda: kit.replica(n, "t").log.log_start == before)
    kit.power_loss(n)
    files = kit.storages[n].files()
    kit.storages[n].open(next(each for each in files if each.endswith("00.log"))).truncate(0)
    if more:
        ledger = Ledger(kit, "t")
        ledger.more(more)
        ledger.stop()
    kit.sim.network.cut(f"b{leader}", f"b{n}")
    kit.boot(n)
    kit.until(lambda: kit.serves(n))
    log = kit.replica(n, "t").log
    assert (log.log_start, log.written_end, log.blank) == (before, before, True)
    if bounced:  # nothing was learnt meanwhile
        kit.drain(n)
        kit.boot(n)
        kit.until(lambda: kit.serves(n))
    kit.sim.network.heal(f"b{leader}", f"b{n}")
    kit.until(lambda: len(kit.state("t").isr) == 3 and kit.in_sync("t"))
    kit.until(lambda: kit.replica(n, "t").log.log_start == before)
    assert not kit.replica(n, "t").log.blank
    _same_producers(kit, "t")
