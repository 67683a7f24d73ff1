"""Damage in this broker's data: reported with its range, offline, never skipped (rule L9)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pk import errors
from pk.log.damage import missing_in_front
from pk.log.divergence import StartAt
from pk.server.replica.corruption import LATE_READS_MS
from pk.server.replica.tier_state import tier_has_what_left
from pk.types import NONE
from pk.wire import pk_pb2 as wire
from pk.world import StreamKind

LOG = "topics/t-0/00000000000000000000.log"
HEADER_MAGIC = 16


async def fill(rig: Any, kit: Any, *partitions: int) -> None:
    stream = await rig.stream(StreamKind.PRODUCE)
    for turn, partition in enumerate(partitions):
        raw = kit.batch(1, size=12_000)
        await stream.send(kit.produce((partition, raw), correlation_id=turn + 1))
        assert not (await kit.results(stream, 1))[0].HasField("error")
    stream.close()


def flip(rig: Any, position: int) -> None:
    file = rig.storage.open(LOG)
    (byte,) = file.read(position, 1)
    file.write_at(position, bytes([byte ^ 0xFF]))


async def tell(caller: Any, kit: Any, offset: int) -> None:
    """Report damage in the batch at `offset`, as the tier does."""
    request = wire.TierProgressRequest()
    told = request.partitions.add(
        topic_id=kit.topic_id, partition=0, leader_epoch=0, tiered_end=-1, droppable_end=-1
    )
    told.problem.code, told.problem.message = errors.CorruptLog.code, "t-0: damaged"
    told.problem.details["offset"] = str(offset)
    await caller.call(request, timeout_ms=1_000)


async def ask(rig: Any, kit: Any, partition: int) -> int:
    """Return the error code that a reader of offset 0 gets; 0 = records."""
    return await ask_at(rig, kit, 0, partition)


async def ask_at(rig: Any, kit: Any, offset: int, partition: int = 0) -> int:
    """Return the error code that a reader of `offset` gets; 0 = records."""
    stream = await rig.stream(StreamKind.FETCH)
    await stream.send(kit.fetch(kit.position(partition, offset=offset)))
    reply, payload = await kit.fetched(stream)
    stream.close()
    (entry,) = reply.partitions
    assert bool(entry.error.code) != bool(len(payload))
    return int(entry.error.code)


@pytest.fixture
def another(rig: Any) -> None:
    """Another replica is in sync: a damaged one goes offline, and is created again."""
    rig.core.metadata.image.elsewhere = (2,)


@pytest.fixture
def warnings(rig: Any) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    rig.core.env.warn = lambda event, **facts: found.append((event, facts))
    return found


def offline_once(rig: Any, warnings: list[tuple[str, dict[str, Any]]], says: str) -> None:
    ((event, facts),) = warnings
    assert (event, facts["partition"]) == ("partition_offline", "t-0")
    assert says in facts["error"]
    assert "pk_corrupt_logs_total 1.0" in rig.metrics.text().decode()


@pytest.mark.usefixtures("another")
def test_what_the_copier_found_takes_the_partition_offline(
    rig: Any, kit: Any, warnings: Any
) -> None:
    damaged = rig.partition(0, tiered=True, segment_bytes=14 * 1024)
    rig.core.feed.restore(damaged.key)
    rig.partition(1)

    async def story() -> None:
        await fill(rig, kit, 0, 0, 0, 1)
        flip(rig, 5_000)
        caller = rig.caller()
        await tell(caller, kit, 0)
        await tell(caller, kit, 0)
        await rig.mine.clock.sleep_ms(100)
        assert isinstance(damaged.hosted.cause, errors.CorruptLog)
        assert damaged.hosted.cause.details == {"offset": "0", "next_offset": "1"}
        offline_once(rig, warnings, "offsets [0, 1) are damaged: checksum")
        poll = wire.TierPartitionsRequest(session_id="", generation=0)
        frame = await caller.call(poll, timeout_ms=1_000)
        assert not frame.head.tier_partitions_reply.partitions  # the copier stops its work on it
        assert await ask(rig, kit, 0) == errors.CorruptLog.code
        assert await ask(rig, kit, 1) == 0
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, kit.batch()), (1, kit.batch())))
        answers = {a.index: a.error.code for a in await kit.results(stream, 2)}
        assert answers == {0: errors.CorruptLog.code, 1: 0}
        stream.close()
        await caller.close()

    rig.run(story)


def test_a_false_alarm_takes_nothing_offline(rig: Any, kit: Any, warnings: Any) -> None:
    """The broker checks its disk itself; this includes a named batch that was deleted or is not
    written yet.
    """
    partition = rig.partition(0, tiered=True)

    async def story() -> None:
        await fill(rig, kit, 0, 0)
        caller = rig.caller()
        for offset in (1, 99):
            await tell(caller, kit, offset)
            await rig.mine.clock.sleep_ms(100)
        assert isinstance(partition.tier.problem, errors.CorruptLog)  # readers still get the error
        assert await ask(rig, kit, 0) == 0
        await caller.close()

    rig.run(story)
    assert partition.online
    assert warnings == []


@pytest.mark.parametrize("who", ["reader", "by time", "copier"])
def test_a_log_that_is_cut_under_a_read_is_not_damaged(
    rig: Any, kit: Any, warnings: Any, who: str
) -> None:
    """When the disk read runs, another broker leads, and the files have become shorter (R4)."""
    partition = rig.partition(0, tiered=who == "copier")

    async def reading(work: Any) -> Any:
        partition.step_down(2)
        rig.storage.open(LOG).truncate(13_000)
        return work()

    async def story() -> None:
        await fill(rig, kit, 0, 0)
        rig.disk.read = reading
        code = errors.NotLeaderOrFollower.code
        caller = rig.caller()
        if who == "reader":
            assert await ask(rig, kit, 0) == code
        elif who == "copier":
            await tell(caller, kit, 1)
            await rig.mine.clock.sleep_ms(100)
            assert partition.leader is None
        else:
            request = wire.ListOffsetsRequest(isolation=1)
            request.queries.add(topic_id=kit.topic_id, current_leader_epoch=-1, timestamp_ms=1)
            frame = await caller.call(request, timeout_ms=1_000)
            (answer,) = frame.head.list_offsets_reply.answers
            assert answer.error.code == code
        await caller.close()

    rig.run(story)
    assert partition.online
    assert warnings == []


@pytest.mark.usefixtures("another")
@pytest.mark.parametrize("by_time", [False, True])
def test_what_a_reader_trips_over_takes_the_partition_offline(
    rig: Any, kit: Any, warnings: Any, by_time: bool
) -> None:
    damaged = rig.partition(0, segment_bytes=14 * 1024)
    rig.partition(1)

    async def story() -> None:
        await fill(rig, kit, 0, 0, 1)
        flip(rig, HEADER_MAGIC)
        watching = await rig.stream(StreamKind.FETCH)
        await watching.send(kit.fetch(kit.position(0, offset=2)))
        await kit.fetched(watching)
        if by_time:
            caller = rig.caller()
            request = wire.ListOffsetsRequest(isolation=1)
            request.queries.add(topic_id=kit.topic_id, current_leader_epoch=-1, timestamp_ms=1)
            frame = await caller.call(request, timeout_ms=1_000)
            (answer,) = frame.head.list_offsets_reply.answers
            assert answer.error.code == errors.CorruptLog.code
            await caller.close()
        assert await ask(rig, kit, 0) == errors.CorruptLog.code
        async with asyncio.timeout(5):  # a fetch that waits at the end is answered, too
            reply, _ = await kit.fetched(watching)
        assert reply.partitions[0].error.code == errors.CorruptLog.code
        watching.close()
        assert await ask(rig, kit, 1) == 0
        offline_once(rig, warnings, f"{LOG} at 0: offsets [0, 1) are damaged")

    rig.run(story)
    assert isinstance(damaged.hosted.cause, errors.CorruptLog)


@pytest.mark.usefixtures("another")
def test_a_reader_who_waits_for_many_bytes_trips_over_damage_too(
    rig: Any, kit: Any, warnings: Any
) -> None:
    """The available bytes are counted with an index, which may have to be rebuilt from damaged
    data.
    """
    damaged = rig.partition(0, segment_bytes=14 * 1024)

    async def story() -> None:
        await fill(rig, kit, 0, 0, 0)
        damaged.writer.recent.forget(damaged.log)
        second = LOG.replace("0.log", "1.log")
        rig.storage.open(second).write_at(HEADER_MAGIC, b"rot")
        rig.storage.remove(second.replace(".log", ".index"))
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(0), max_bytes=12_500, min_bytes=12_500))
        reply, payload = await kit.fetched(stream)
        assert len(payload) > 12_000
        reply, _ = await kit.fetched(stream)
        assert reply.partitions[0].error.code == errors.CorruptLog.code
        stream.close()

    rig.run(story)
    assert isinstance(damaged.hosted.cause, errors.CorruptLog)


@pytest.mark.usefixtures("another")
def test_a_reader_that_comes_back_to_a_damaged_batch_takes_the_partition_offline(
    rig: Any, kit: Any, warnings: Any
) -> None:
    """The broker does not verify bodies when it sends them: a reader finds the damage and sets its
    position there again.
    """
    damaged = rig.partition(0)

    async def story() -> None:
        await fill(rig, kit, 0, 0, 0)
        length = damaged.log.size_bytes // 3
        flip(rig, length + 5_000)
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(0)))
        reply, payload = await kit.fetched(stream)
        assert not reply.partitions[0].HasField("error")
        assert len(payload) == 3 * length  # the reader's checksums find it, and where
        assert damaged.online
        await stream.send(kit.fetch(kit.position(0, offset=1, position_id=2)))
        reply, _ = await kit.fetched(stream)
        (entry,) = reply.partitions
        assert (entry.position_id, entry.error.code) == (2, errors.CorruptLog.code)
        assert LOG in entry.error.message
        assert dict(entry.error.details) == {"offset": "1", "next_offset": "2"}
        stream.close()
        assert await ask(rig, kit, 0) == errors.CorruptLog.code
        offline_once(rig, warnings, "offsets [1, 2) are damaged: checksum")

    rig.run(story)
    assert isinstance(damaged.hosted.cause, errors.CorruptLog)


# -- the only copy ---------------------------------------------------------------------------------


async def entry_at(rig: Any, kit: Any, offset: int, says: int) -> Any:
    """Return what a reader of `offset` gets once the broker has surveyed the segment."""
    for _ in range(100):
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(0, offset=offset)))
        reply, payload = await kit.fetched(stream)
        stream.close()
        (entry,) = reply.partitions
        if entry.error.code != errors.OffsetNotAvailable.code:
            assert entry.error.code == says
            assert bool(len(payload)) == (says == 0)
            return entry
        await rig.mine.clock.sleep_ms(10)
    raise AssertionError("the range is looked for for ever")


def test_the_only_copy_is_served_around_its_damage(rig: Any, kit: Any, warnings: Any) -> None:
    damaged = rig.partition(0)

    async def story() -> None:
        await fill(rig, kit, 0, 0, 0)
        length = damaged.log.size_bytes // 3
        flip(rig, length + 5_000)
        for _ in range(2):
            entry = await entry_at(rig, kit, 1, errors.DataLoss.code)
            assert dict(entry.error.details) == {"offset": "1", "next_offset": "2"}
        assert (await entry_at(rig, kit, 0, 0)).next_offset == 1
        assert (await entry_at(rig, kit, 2, 0)).next_offset == 3
        await fill(rig, kit, 0)
        assert (await entry_at(rig, kit, 2, 0)).next_offset == 4

    rig.run(story)
    assert damaged.online
    ((event, facts),) = warnings
    assert (event, facts["offset"], facts["next_offset"]) == ("damaged_range", 1, 2)
    problem = rig.core.corruption.problem_of(damaged)
    assert "pk log repair" in problem.message


@pytest.mark.parametrize("joined", [False, True])
def test_a_leader_that_asked_for_a_member_calls_nothing_lost(
    rig: Any, kit: Any, warnings: Any, joined: bool
) -> None:
    """replica/corruption N5: the answer was lost, and the member may be in the ISR."""
    damaged = rig.partition(0)

    async def story() -> None:
        await fill(rig, kit, 0, 0, 0)
        leader = damaged.leader
        assert leader is not None
        asked = (*leader.isr, 2)
        leader.on_isr_proposed(asked)
        flip(rig, damaged.log.size_bytes // 3 + 5_000)
        for _ in range(5):
            assert await ask_at(rig, kit, 1) == errors.OffsetNotAvailable.code
            await rig.mine.clock.sleep_ms(100)
        assert warnings == []
        if joined:
            rig.core.metadata.image.elsewhere = (2,)
            assert await ask_at(rig, kit, 1) == errors.CorruptLog.code
            offline_once(rig, warnings, "offsets [1, 2) are damaged: checksum")
        else:
            leader.on_isr_refused(asked)
            await entry_at(rig, kit, 1, errors.DataLoss.code)

    rig.run(story)
    assert damaged.online is not joined


def test_a_read_that_a_survey_overtook_asks_again(rig: Any, kit: Any, warnings: Any) -> None:
    """Its error names a range that is known by now, and no second survey finds anything
    (replica/corruption N2).
    """
    damaged = rig.partition(0)

    async def story() -> None:
        await fill(rig, kit, 0, 0, 0)
        length = damaged.log.size_bytes // 3
        flip(rig, length + 5_000)
        with pytest.raises(errors.CorruptLog) as late:  # its answer comes after the survey
            damaged.log.read(1, bound=3, max_bytes=1, verify_first=True)
        await entry_at(rig, kit, 1, errors.DataLoss.code)
        damaged.storage_failed(late.value)
        told = rig.core.corruption.client_error(damaged, late.value)
        assert isinstance(told, errors.OffsetNotAvailable)
        await rig.mine.clock.sleep_ms(100)
        await entry_at(rig, kit, 1, errors.DataLoss.code)
        assert damaged.online
        await rig.mine.clock.sleep_ms(LATE_READS_MS + 1)
        damaged.storage_failed(late.value)  # no read takes so long: the survey missed something
        await rig.mine.clock.sleep_ms(100)
        assert not damaged.online

    rig.run(story)
    assert [event for event, _ in warnings] == ["damaged_range", "partition_offline"]


def test_what_the_copier_meets_again_is_looked_at_once(rig: Any, kit: Any, warnings: Any) -> None:
    damaged = rig.partition(0, tiered=True)
    rig.core.feed.restore(damaged.key)

    async def story() -> None:
        await fill(rig, kit, 0, 0)
        flip(rig, 5_000)
        caller = rig.caller()
        for _ in range(3):
            await tell(caller, kit, 0)
            await rig.mine.clock.sleep_ms(100)
        poll = wire.TierPartitionsRequest(session_id="", generation=0)
        frame = await caller.call(poll, timeout_ms=1_000)
        (told,) = frame.head.tier_partitions_reply.partitions  # the copier continues when it can
        assert told.tiered_end == 0
        await caller.close()

    rig.run(story)
    assert [event for event, _ in warnings] == ["damaged_range"]


def test_damage_without_a_range_takes_the_only_copy_offline(
    rig: Any, kit: Any, warnings: Any
) -> None:
    """replica/corruption N2: the surveys end."""
    damaged = rig.partition(0)

    async def story() -> None:
        await fill(rig, kit, 0)
        rig.core.failures.storage_failed(damaged, errors.CorruptLog("of no range", offset="0"))
        await rig.mine.clock.sleep_ms(100)

    rig.run(story)
    assert isinstance(damaged.hosted.cause, errors.CorruptLog)
    assert [event for event, _ in warnings] == ["partition_offline"]


def test_a_damaged_leader_goes_once_another_replica_is_in_sync(
    rig: Any, kit: Any, warnings: Any
) -> None:
    """replica/corruption N3: the replica in sync has the range."""
    damaged = rig.partition(0)

    async def story() -> None:
        await fill(rig, kit, 0, 0)
        flip(rig, 5_000)
        await entry_at(rig, kit, 0, errors.DataLoss.code)
        image = rig.core.metadata.image
        rig.core.corruption.settle(damaged, image.partition(damaged.key))
        assert damaged.online
        image.elsewhere = (2,)
        rig.core.corruption.settle(damaged, image.partition(damaged.key))

    rig.run(story)
    assert isinstance(damaged.hosted.cause, errors.CorruptLog)
    assert [event for event, _ in warnings] == ["damaged_range", "partition_offline"]


# -- what is missing in front ----------------------------------------------------------------------


async def without_its_first(rig: Any, kit: Any, **given: Any) -> Any:
    """A partition with three segments; the file of the first was removed while the broker was
    down.
    """
    partition = rig.partition(0, segment_bytes=14 * 1024, **given)
    await fill(rig, kit, 0, 0, 0)
    log = partition.log
    log._local.segments = log._local.segments[1:]
    log.absent = missing_in_front(0, 1)
    tier_has_what_left(log, tiered=partition.tiered)
    return partition


async def reported(rig: Any, kit: Any, tiered_end: int) -> None:
    """Report what the table covers, as the tier does."""
    caller = rig.caller()
    request = wire.TierProgressRequest()
    request.partitions.add(
        topic_id=kit.topic_id, leader_epoch=0, tiered_end=tiered_end, droppable_end=-1
    )
    await caller.call(request, timeout_ms=1_000)
    await caller.close()


def test_missing_files_in_front_of_the_only_copy_are_a_range(
    rig: Any, kit: Any, warnings: Any
) -> None:
    async def story() -> None:
        partition = await without_its_first(rig, kit)
        rig.core.corruption.opened(partition)
        entry = await entry_at(rig, kit, 0, errors.DataLoss.code)
        assert dict(entry.error.details) == {"offset": "0", "next_offset": "1"}
        assert (await entry_at(rig, kit, 1, 0)).next_offset == 2
        assert (await entry_at(rig, kit, 2, 0)).next_offset == 3
        problem = rig.core.corruption.problem_of(partition)
        assert "offsets [0, 1) are damaged: the segment file" in problem.message
        assert "pk log repair" in problem.message

    rig.run(story)
    assert [(e, f["offset"], f["next_offset"]) for e, f in warnings] == [("damaged_range", 0, 1)]
    assert rig.storage.exists(LOG)


@pytest.mark.parametrize("table_end", [0, 1, 3])
def test_the_table_is_asked_before_missing_files_are_called_lost(
    rig: Any, kit: Any, warnings: Any, table_end: int
) -> None:
    """replica/corruption N4: covered records are read from the table; until the tier has answered,
    readers of the range try again, and a follower without the range does not begin above it.
    """

    async def story() -> None:
        partition = await without_its_first(rig, kit, tiered=True)
        image = rig.core.metadata.image
        rig.core.corruption.settle(partition, image.partition(partition.key))
        assert (partition.log.absent, partition.log.damage) == (missing_in_front(0, 1), [])
        assert (partition.log.local_log_start, partition.log.tiered_end) == (1, 0)
        assert partition.violations() == []
        with pytest.raises(errors.OffsetNotAvailable, match=r"offsets \[0, 1\)"):
            partition.find_divergence(NONE, 0, None)
        assert partition.find_divergence(0, 2, None) is None
        await reported(rig, kit, table_end)
        assert partition.log.absent is None
        begin = partition.find_divergence(NONE, 0, None)
        assert begin == (None if table_end == 0 else StartAt(1))
        if table_end == 0:
            assert [each[:2] for each in partition.log.damage] == [(0, 1)]
            assert (partition.log.local_log_start, partition.log.tiered_end) == (0, 0)
            assert partition.violations() == []
            await entry_at(rig, kit, 0, errors.DataLoss.code)
        else:
            assert (partition.log.damage, partition.log.local_log_start) == ([], 1)
        assert partition.online

    rig.run(story)
    assert [event for event, _ in warnings] == ["damaged_range"] * (table_end == 0)


@pytest.mark.parametrize("tiered", [False, True])
def test_with_another_replica_in_sync_missing_files_make_this_one_anew(
    rig: Any, kit: Any, warnings: Any, another: None, tiered: bool
) -> None:
    """This is like any damage of sealed data; the table is not asked."""

    async def story() -> None:
        partition = await without_its_first(rig, kit, **({"tiered": True} if tiered else {}))
        rig.core.corruption.opened(partition)
        assert partition.log.damage == []
        image = rig.core.metadata.image
        rig.core.corruption.settle(partition, image.partition(partition.key))
        assert isinstance(partition.hosted.cause, errors.CorruptLog)
        assert partition.hosted.cause.details == {"offset": "0", "next_offset": "1"}

    rig.run(story)
    assert [event for event, _ in warnings] == ["partition_offline"]
