"""Replication in corner cases: facts that a leader learns once, reports that are not repeated, and
operations that stop half-way.
"""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log.divergence import EpochEnd
from pk.log.manager import LogManager
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.kit.cluster import Kit, Ledger, assign, written

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_what_a_replica_had_before_it_moved_away_counts_for_nothing(make: Any) -> None:
    """replica/isr M2: it comes back under the same registration with an empty log."""
    kit = make(1, brokers=4, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 100)
    leader, second, moved = kit.state("t").replicas
    (spare,) = {1, 2, 3, 4} - {leader, second, moved}
    assign(kit, "t", leader, second, spare)
    kit.until(lambda: set(kit.state("t").isr) == {leader, second, spare})
    kit.until(lambda: all(p.topic != "t" for p in kit.brokers[moved].core.partitions.values()))
    kit.sim.network.cut(f"b{leader}", f"b{moved}")
    assign(kit, "t", leader, second, spare, moved)
    kit.wait(4_000)
    assert moved not in kit.state("t").isr
    kit.sim.network.heal(f"b{leader}", f"b{moved}")
    kit.until(lambda: len(kit.state("t").isr) == 4)
    ledger.check()


def test_what_a_replica_had_before_it_was_made_anew_counts_for_nothing(make: Any) -> None:
    """The leader cannot learn what happened to the old log; the controller can."""
    kit = make(2, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 100)
    leader, _, n = kit.state("t").replicas
    kit.sim.network.cut(f"b{leader}", f"b{n}")
    kit.brokers[n].core.failures.storage_failed(kit.replica(n, "t"), errors.CorruptLog("damaged"))
    kit.until(lambda: kit.events("replica_made_anew") == 1)
    kit.wait(4_000)
    assert n not in kit.state("t").isr
    kit.sim.network.heal(f"b{leader}", f"b{n}")
    kit.until(lambda: len(kit.state("t").isr) == 3)
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()


def test_who_was_fenced_for_a_while_joins_again_without_a_new_record(make: Any) -> None:
    """The registration is the same, the log does not change, and the stream did not break."""
    kit = make(3, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 100)
    n = kit.state("t").replicas[2]
    kit.sim.network.cut(f"b{n}", "controller")
    kit.until(lambda: n not in kit.state("t").isr)
    kit.sim.network.heal(f"b{n}", "controller")
    kit.until(lambda: len(kit.state("t").isr) == 3)


def test_a_new_replica_that_comes_before_the_leader_knows_of_it(make: Any) -> None:
    """The replica does not repeat its position, so the leader must not ignore it."""
    kit = make(4, brokers=4, auto_leader_rebalance_enable=False, broker_session_timeout_ms=8_000)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 100)
    leader, second, third = kit.state("t").replicas
    (spare,) = {1, 2, 3, 4} - {leader, second, third}
    kit.sim.network.cut(f"b{leader}", "controller")
    request = wire.AlterReassignmentsRequest()
    request.reassignments.add(
        topic="t", topic_id=kit.topic_id("t"), partition=0, replicas=[leader, second, third, spare]
    )
    task = kit.spawn_ask(request, second)
    kit.until(lambda: any(p.topic == "t" for p in kit.brokers[spare].core.partitions.values()))
    kit.wait(1_000)
    kit.sim.network.heal(f"b{leader}", "controller")
    kit.until(task.done)
    kit.until(lambda: len(kit.state("t").isr) == 4)
    ledger.check()


def test_credit_of_what_was_not_stored_comes_back(make: Any) -> None:
    """replica/fetcher F4: otherwise the stream would stop for every partition on it."""
    kit = make(5, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(50)
    n = kit.state("t").replicas[2]
    fetcher = kit.replica(n, "t").replica.fetcher
    log = kit.replica(n, "t").log
    perform = log.perform

    def full(plan: Any) -> None:
        writer = log._writer
        writer._failed, writer._error = plan.generation, errors.StorageFull("full")
        perform(plan)

    for _ in range(3):
        log.perform = full
        generation = log._appender.generation
        kit.until(lambda: log._appender.generation > generation)  # noqa: B023
        log.perform = perform
        ledger.more(50)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    assert fetcher.credit.unwritten == 0


def test_credit_of_a_partition_that_went_comes_back(make: Any) -> None:
    kit = make(6, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    kit.create("u", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(50)
    n = kit.state("t").replicas[2]
    replica = kit.replica(n, "t")
    fetcher = replica.replica.fetcher
    kit.until(lambda: replica.writer.queued_bytes > 0)
    kit.brokers[n].core.fetchers.leave(replica)
    kit.until(lambda: replica.writer.queued_bytes == 0)
    assert fetcher.credit.unwritten == 0


@pytest.mark.parametrize("back", [True, False])
def test_a_wish_that_was_lost_and_cannot_be_granted_any_more_is_no_end(
    make: Any, back: bool
) -> None:
    """replica/alter_partition A2: it held the watermark back for a member that will never join."""
    kit = make(7, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(50)
    leader, _, n = kit.state("t").replicas
    kit.kill(n)
    kit.until(lambda: n not in kit.state("t").isr)
    lifecycle = kit.brokers[leader].core.lifecycle
    call, lost = lifecycle.call, []

    async def loses(request: Any, timeout_ms: int) -> Any:
        if isinstance(request, wire.AlterPartitionRequest):
            lost.append(request)
            raise errors.ControllerUnavailable("lost")
        return await call(request, timeout_ms)

    lifecycle.call = loses
    kit.boot(n)
    kit.until(lambda: bool(lost))
    kit.kill(n)
    kit.until(lambda: not kit.controller.machine.image.available(n))
    lifecycle.call = call
    if back:
        kit.boot(n)
        kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.more(100)
    ledger.stop()
    ledger.check()


def test_what_an_unclean_leader_may_not_have_is_not_taken_for_committed(make: Any) -> None:
    """A watermark beyond the replica's own end says nothing about another leader's records."""
    kit = make(8, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=3)
    ledger = written(kit, "t", 100)
    leader, second, n = kit.state("t").replicas
    replica = kit.replica(n, "t")
    # a watermark of records that never arrived
    replica.update_high_watermark(replica.log.written_end + 1_000)
    kit.kill(leader)
    kit.until(lambda: kit.state("t").leader == second)
    more = Ledger(kit, "t", acks=1, enable_idempotence=False)
    more.more(50)
    more.stop()
    kit.until(lambda: replica.log.written_end == kit.replica(second, "t").log.written_end)
    kit.wait(100)
    assert kit.replica(second, "t").high_watermark < replica.log.written_end
    assert replica.high_watermark <= kit.replica(second, "t").high_watermark
    ledger.check()


def test_flush_on_ack_holds_for_what_was_written_before(make: Any) -> None:
    """L2: otherwise parked requests would wait for the next append, which may never come."""
    kit = make(9, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 100)
    replicas = [kit.replica(n, "t") for n in kit.state("t").replicas]
    assert any(each.log.synced_end < each.log.written_end for each in replicas)
    request = wire.AlterConfigsRequest()
    resource = wire.ConfigResource(type="topic", name="t")
    request.changes.add(resource=resource).set["flush_on_ack"] = "true"
    reply = kit.ask(request)
    assert not reply.results[0].HasField("error"), reply
    kit.wait(2_000)
    leader = kit.replica(kit.state("t").leader, "t").leader
    assert leader is not None
    for n, each in zip(kit.state("t").replicas, replicas, strict=True):
        assert each.log.synced_end == each.log.written_end == leader.end_of(n)


async def _visits(kit: Kit, n: int, key: PartitionKey) -> None:
    """Return the jobs of the wheel of broker `n` for one partition."""
    retention = kit.brokers[n].core.retention
    await retention.follow_log_start(key)
    await retention.retain(key)


def test_retention_keeps_off_a_log_that_is_being_cut(make: Any) -> None:
    """Changes of the segments in the lane and on the loop would not see each other."""
    kit = make(10, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2, segment_bytes=20_000)
    written(kit, "t", 3_500)
    n = kit.state("t").replicas[2]
    core, partition = kit.brokers[n].core, kit.replica(n, "t")
    log, replica = partition.log, partition.replica
    assert len(log.segments) > 2
    move, moves = core.manager.move_log_starts, []

    async def moving(wanted: Any) -> None:
        moves.append(wanted)
        if len(moves) == 2:  # the segments are to go now
            replica.unclean_epoch = 10
            cut = replica.fetcher._cut(replica, EpochEnd(0, log.written_end - 5))
            replica.fetcher._change(replica, cut)
            while not queued:
                await core.env.clock.sleep_ms(0.01)
        else:
            await move(wanted)

    disk, queued = partition.writer.disk, []
    write = disk.write

    async def writing(work: Any) -> Any:
        if getattr(work, "func", None) == log.truncate_to:
            queued.append(work)
        return await write(work)

    disk.write = writing
    core.manager.move_log_starts = moving
    partition.leader_log_start = log.segments[1].base_offset
    task = kit.sim.spawn(f"b{n}", _visits(kit, n, partition.key))
    kit.until(lambda: task.done() and not core.fetchers.changing)
    assert task.exception() is None
    assert len(moves) == 2
    files = [name for name in kit.storages[n].files() if name.endswith(".log") and "/t-0/" in name]
    assert len(files) == len(log.segments)


def test_retention_does_not_bring_back_a_log_start_that_was_cut(make: Any) -> None:
    """R4, T9: the truncation begins and ends while retention waits for a disk."""
    kit = make(10, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2, segment_bytes=20_000)
    written(kit, "t", 3_500)
    n = kit.state("t").replicas[2]
    core, partition = kit.brokers[n].core, kit.replica(n, "t")
    log, replica = partition.log, partition.replica
    start = log.segments[1].base_offset
    move, moves = core.manager.move_log_starts, []

    async def moving(wanted: Any) -> None:
        moves.append(wanted)
        await move(wanted)
        if len(moves) == 2:  # the segments are to go now
            replica.unclean_epoch = 10
            cut = replica.fetcher._cut(replica, EpochEnd(0, start - 100))
            replica.fetcher._change(replica, cut)
            while core.fetchers.changing:
                await core.env.clock.sleep_ms(0.01)

    core.manager.move_log_starts = moving
    partition.leader_log_start = start
    task = kit.sim.spawn(f"b{n}", _visits(kit, n, partition.key))
    kit.until(task.done)
    assert task.exception() is None
    assert len(moves) == 2
    assert log.log_start <= start - 100


def _stream_of(kit: Kit, topic: str, n: int) -> Any:
    """Return the leader's end of the stream of follower `n`."""
    followers: Any = kit.replica(kit.state(topic).leader, topic)._followers
    return next(each for each in followers if each._replica.replica == n)


def test_a_log_start_said_before_the_logs_were_compared_is_heard(make: Any) -> None:
    """It is not repeated: a deletion that waits for it (T9), or a replica that wants to join
    (replica/isr M2), would wait without an end.
    """
    kit = make(11, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 100)
    n = kit.state("t").replicas[2]
    partition, stream = kit.replica(kit.state("t").leader, "t"), _stream_of(kit, "t", n)
    leader, end = partition.leader, partition.log.written_end
    assert leader is not None
    where = {"topic_id": partition.key.topic_id, "partition": 0, "position_id": 99}
    request = wire.FetchRequest()
    request.positions.add(
        **where,
        current_leader_epoch=leader.leader_epoch,
        fetch_offset=end,
        last_fetched_epoch=partition.log.epochs.latest,
    )
    stream._session.apply(request, 0)
    request.confirmed.add(**where, log_end=end, log_start=7)
    stream._replica.confirmed(request)
    stream.moved(partition.key)
    kit.until(lambda: stream._replica._compared[partition.key].position_id == 99)
    assert leader._followers.log_start_of(n) == 7


def test_an_older_registration_is_not_heard_beside_a_newer_one(make: Any) -> None:
    """KIP-903: the later process of the broker may not have the records of the earlier one."""
    kit = make(12, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 100)
    n = kit.state("t").replicas[2]
    partition, stream = kit.replica(kit.state("t").leader, "t"), _stream_of(kit, "t", n)
    leader, end = partition.leader, partition.log.written_end
    assert leader is not None
    newer = stream._replica.broker_epoch + 1
    leader.on_follower_end(n, 5, 0, newer)  # its next life, on another stream
    request = wire.FetchRequest()
    position = stream._replica._compared[partition.key]
    key = partition.key
    request.confirmed.add(
        topic_id=key.topic_id, partition=0, position_id=position.position_id, log_end=end
    )
    stream._replica.confirmed(request)
    assert (leader.end_of(n), leader.broker_epoch_of(n)) == (5, newer)


def test_an_older_stream_is_not_heard_beside_a_newer_one(make: Any) -> None:
    """handlers/replica_fetch F1: a fetch that the replica sent on a stream that broke arrives late;
    its log was created again since, under the same registration.
    """
    kit = make(27, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 100)
    n = kit.state("t").replicas[2]
    partition, stream = kit.replica(kit.state("t").leader, "t"), _stream_of(kit, "t", n)
    leader, end, key = partition.leader, partition.log.written_end, partition.key
    assert leader is not None
    old: Any = stream._replica
    position = old._compared[key]
    kit.replica(n, "t").replica.fetcher._stream.close()
    kit.until(lambda: stream not in partition._followers and len(partition._followers) == 2)
    newer = _stream_of(kit, "t", n)
    kit.until(lambda: key in newer._replica._compared)
    leader.on_follower_end(n, 5, 0, old.broker_epoch)  # all it has now
    said = wire.FetchRequest()
    where = {"topic_id": key.topic_id, "partition": 0, "position_id": position.position_id}
    said.confirmed.add(**where, log_end=end)
    stream._session.positions[key] = position
    old.confirmed(said)
    assert leader.end_of(n) == 5
    old._compared.clear()
    with pytest.raises(errors.NotLeaderOrFollower):
        old.compare(position, wire.FetchReply())
    assert leader.end_of(n) == 5


def test_a_minimum_that_is_raised_holds_for_what_is_parked(make: Any) -> None:
    """R1: one delta brings the leader the new minimum and the smaller ISR.  The requests it has
    parked are not acknowledged, because the member that left may lead next.
    """
    kit = make(25, auto_leader_rebalance_enable=False, replica_lag_time_max_ms=60_000)
    kit.create("t", factor=2, min_insync_replicas=1)
    ledger = Ledger(kit, "t")
    ledger.more(100)
    leader, n = kit.state("t").replicas
    kit.sim.network.cut(f"b{leader}", f"b{n}")
    kit.wait(100)
    parked = len(ledger.acked)
    go_on = kit.hold_metadata(leader)
    kit.wait(3_000)  # the last one is over
    request = wire.AlterConfigsRequest()
    resource = wire.ConfigResource(type="topic", name="t")
    request.changes.add(resource=resource).set["min_insync_replicas"] = "2"
    task = kit.spawn_ask(request, next(each for each in (1, 2, 3) if each not in (leader, n)))
    kit.until(task.done)
    kit.kill(n)
    kit.until(lambda: kit.state("t").elr == (n,))
    go_on()
    known: Any = kit.replica(leader, "t").leader
    kit.until(lambda: known.isr == (leader,))
    kit.wait(500)
    assert len(ledger.acked) == parked
    assert known.log_end > known.high_watermark
    kit.kill(leader)
    kit.boot(n)
    kit.until(lambda: kit.state("t").leader == n)
    kit.boot(leader)
    kit.sim.network.heal(f"b{leader}", f"b{n}")
    ledger.more(100)
    ledger.stop()
    ledger.check()


def test_a_minimum_that_is_lowered_is_not_for_who_led_before(make: Any) -> None:
    """R1, R6: one delta says that another broker leads and that a single copy is enough now.  The
    old leader does not acknowledge the requests that it parked, because the new leader never had
    them.
    """
    kit = make(42, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(100)
    leader, m, n = kit.state("t").replicas
    kit.kill(m)
    kit.until(lambda: kit.state("t").isr == (leader, n))
    ledger.more(100)
    kit.kill(n)
    kit.until(lambda: kit.state("t").elr == (n,))
    known: Any = kit.replica(leader, "t").leader
    kit.until(lambda: known.isr == (leader,))
    kit.wait(500)
    partition, parked = kit.replica(leader, "t"), known.high_watermark
    assert known.log_end > parked
    core, go_on = kit.brokers[leader].core, kit.hold_metadata(leader)
    kit.sim.network.cut(f"b{leader}", "controller")
    kit.until(lambda: kit.state("t").leader == NONE)
    kit.boot(n)
    kit.until(lambda: kit.state("t").leader == n)
    request = wire.AlterConfigsRequest()
    resource = wire.ConfigResource(type="topic", name="t")
    request.changes.add(resource=resource).set["min_insync_replicas"] = "1"
    kit.until(kit.spawn_ask(request, n).done)
    kit.sim.network.heal(f"b{leader}", "controller")
    kit.until(lambda: leader not in kit.state("t").isr and not core.lifecycle.fenced)
    assert partition.leader is known
    go_on()
    kit.until(lambda: partition.leader is None)
    assert known.high_watermark == parked
    kit.boot(m)
    ledger.more(100)
    ledger.stop()
    ledger.check()


def test_a_leader_that_stops_with_a_full_lane(make: Any) -> None:
    """L5, replica/partition H5: requests that wait for room, for their write or for the watermark
    are refused, sent again to the next leader, and stored once.
    """
    kit = make(40, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t", linger_ms=0)
    ledger.more(200)
    leader = kit.state("t").leader
    partition, core = kit.replica(leader, "t"), kit.brokers[leader].core
    partition.writer._bytes_max = 500
    disk: Any = partition.writer.disk
    write = disk.write

    async def slow(work: Any) -> Any:
        await core.env.clock.sleep_ms(30)
        return await write(work)

    disk.write = slow
    kit.until(lambda: partition.writer.full)
    told: list[tuple[int, Any]] = []
    for each in partition._inflight:
        sink: Any = each.sink

        def answered(delayed: Any, error: Any, sink: Any = sink) -> None:
            told.append((delayed.last_offset, error))
            sink(delayed, error)

        each.sink = answered
    kit.drain(leader)
    heir = kit.replica(kit.state("t").leader, "t").log
    kept = heir.epochs.end_offset_for(0, heir.log_end).start_offset
    assert told
    assert all(error is not None or last < kept for last, error in told)
    kit.boot(leader)
    kit.until(lambda: kit.serves(leader) and len(kit.state("t").isr) == 3)
    ledger.more(100)
    ledger.stop()
    kit.until(lambda: kit.in_sync("t"))
    ledger.check()
    assert not ledger.failed
    assert kit.events("controlled_shutdown_timed_out") == 0
    assert len({kit.content(n, "t") for n in (1, 2, 3)}) == 1


@pytest.mark.parametrize("torn", [True, False])
def test_a_disk_that_is_full_when_a_log_is_cut_costs_no_other(
    make: Any, monkeypatch: pytest.MonkeyPatch, torn: bool
) -> None:
    """Rule L2: a log whose truncation stopped half-way is reported offline, and the other logs of
    the disk continue.  A log that was not touched yet is truncated once there is room.
    """
    kit = make(28, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=1)
    kit.create("u", min_insync_replicas=1)
    ledger = Ledger(kit, "t", acks="1", enable_idempotence=False)
    ledger.more(50)
    old = kit.state("t").leader
    others = [n for n in (1, 2, 3) if n != old]
    for n in others:
        kit.sim.network.cut(f"b{old}", f"b{n}")
    ledger.more(50)
    kit.kill(old)
    kit.until(lambda: kit.state("t").leader in others)
    for n in others:
        kit.sim.network.heal(f"b{old}", f"b{n}")
    ledger.more(50)
    ledger.stop()
    tried: list[int] = []
    cut = LogManager.cut

    async def full(self: LogManager, key: Any, offset: int) -> None:
        tried.append(offset)
        if len(tried) > 3:
            await cut(self, key, offset)
            return
        self._logs[key][0]._writer.torn = torn
        raise errors.StorageFull("full")

    monkeypatch.setattr(LogManager, "cut", full)
    kit.boot(old)
    kit.until(lambda: tried)
    core = kit.brokers[old].core
    kit.until(lambda: len(kit.state("u").isr) == 3)
    if torn:
        (lost,) = core.report.offline_replicas()
        assert lost.topic_id == kit.replica(old, "t").key.topic_id
        assert kit.replica(old, "u").online
        return
    kit.until(lambda: kit.in_sync("t"))
    assert not core.report.offline_replicas()
    assert len({kit.content(n, "t") for n in (1, 2, 3)}) == 1


def test_a_leader_whose_log_was_left_half_way_is_followed_by_another(make: Any) -> None:
    """Rule L2: the controller must learn that the replica is offline here."""
    kit = make(28, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 50)
    n = kit.state("t").leader
    core = kit.brokers[n].core
    core.failures.storage_failed(kit.replica(n, "t"), errors.StorageFull("full"))
    assert core.report.offline_replicas()
    kit.until(lambda: kit.state("t").leader != n)
    ledger.check()


@pytest.mark.parametrize("which", [1, -1], ids=["between others", "the last"])
def test_an_epoch_that_rotted_fences_nobody(make: Any, which: int) -> None:
    """L9: a follower that adopted the epoch could follow no later leader; the replica that has it
    is created again.
    """
    kit = make(12, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = Ledger(kit, "t")
    ledger.more(50)
    state = kit.state("t")
    n = state.replicas[2]
    kit.kill(n)
    kit.until(lambda: n not in kit.state("t").isr)
    end = kit.replica(state.leader, "t").log.written_end
    ledger.more(200)
    ledger.stop()
    log = kit.replica(state.leader, "t").log
    (segment,) = log._local.segments
    raw = log._local.storage.read_file(segment.path())
    later = [at for at, each in batches.iter_headers(raw) if each.base_offset > end]
    file = log._local.storage.open(segment.path(), write=True)
    file.write_at(later[which] + 12, (900).to_bytes(4, "little"))
    file.close()
    kit.boot(n)
    kit.until(lambda: kit.in_sync("t") and kit.state("t").leader != state.leader)
    assert kit.replica(n, "t").log.epochs.latest < 900
    ledger.check()


def test_the_first_record_after_a_pause_costs_no_member_its_place(make: Any) -> None:
    """replica/isr M1: the leader may look at its followers before they can confirm the record."""
    kit = make(51, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    written(kit, "t", 20)
    kit.wait(10_000)
    leader, *others = kit.state("t").replicas
    for n in others:
        kit.sim.network.link(f"b{leader}", f"b{n}").delay_us = (1_200_000, 1_200_000)
    epoch = kit.state("t").partition_epoch
    ledger = Ledger(kit, "t")
    ledger.more(1)
    ledger.stop()
    assert kit.state("t").partition_epoch == epoch
