"""Markers of transactions that a leader appends: rules X1, X5, L2, L5, L11."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from pk import errors, transactional_ids
from pk.log import batch as batches
from pk.log.control_rows import Marker, decode_markers
from pk.log.plan import Now
from pk.server.replica.markers import MARKERS_MAX, Refusals, write_markers
from pk.server.replica.partition import Partition
from pk.types import NONE
from pk.world import StreamKind

ONE, TWO = transactional_ids.TRANSACTIONAL, transactional_ids.TRANSACTIONAL + 1


def write(
    rig: Any, partition: Partition, *markers: Marker, epoch: int = NONE
) -> asyncio.Future[Refusals]:
    clock = rig.mine.clock
    now = Now(clock.wall_ms(), clock.wall_ms())
    return write_markers(partition, markers, epoch, now, clock.monotonic_ms() + 1_000)


async def begin(rig: Any, kit: Any, *producers: int, epoch: int = 0) -> None:
    """Append one transactional batch of three records for each producer."""
    stream = await rig.stream(StreamKind.PRODUCE)
    for index, producer_id in enumerate(producers):
        raw = kit.batch(
            producer_id=producer_id, producer_epoch=epoch, base_sequence=0, transactional=True
        )
        await stream.send(kit.produce((0, raw), acks=-1, correlation_id=index + 1))
    await rig.mine.clock.sleep_ms(50)
    stream.close()


async def failure(written: Awaitable[Any]) -> type[errors.PkError]:
    with pytest.raises(errors.PkError) as caught:
        await written
    return type(caught.value)


def control_rows_of(partition: Partition) -> list[list[Marker]]:
    read = partition.log.read(0, bound=partition.log.written_end, max_bytes=1 << 20)
    return [
        decode_markers(raw) for header, raw in batches.iter_batches(read.data) if header.control
    ]


def test_markers_of_one_call_are_one_batch_and_end_their_transactions(rig: Any, kit: Any) -> None:
    # rules X5, L11
    partition = rig.partition()
    markers = [Marker(ONE, 1, False, 7), Marker(TWO, 1, True, 7)]

    async def story() -> None:
        await begin(rig, kit, ONE, TWO)
        assert (partition.high_watermark, partition.last_stable_offset) == (6, 0)
        assert await write(rig, partition, *markers) == [None, None]
        assert control_rows_of(partition) == [markers]
        assert partition.last_stable_offset == partition.high_watermark == 8
        aborted = partition.log.aborted_in(0, 8).transactions
        assert [(each.producer_id, each.first_offset) for each in aborted] == [(ONE, 0)]

    rig.run(story)


def test_a_marker_is_written_where_nothing_is_open_and_once(rig: Any, kit: Any) -> None:
    """Rules X1, X6: its epoch refuses a late batch; a repeated marker appends nothing."""
    partition = rig.partition()

    async def story() -> None:
        marker = Marker(ONE, 1, True, 7)
        for coordinator_epoch in (7, 7, 8):
            repeated = marker._replace(coordinator_epoch=coordinator_epoch)
            assert await write(rig, partition, repeated) == [None]
        assert control_rows_of(partition) == [[marker]]
        late = kit.batch(producer_id=ONE, producer_epoch=0, base_sequence=0, transactional=True)
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, late)))
        (answer,) = await kit.results(stream, 1)
        assert answer.error.code == errors.InvalidProducerEpoch.code

    rig.run(story)


def test_a_repeated_marker_does_not_end_the_next_transaction(rig: Any, kit: Any) -> None:
    """Rule X1: the reply to the first write was lost, and the next transaction has begun."""
    partition = rig.partition()

    async def story() -> None:
        await begin(rig, kit, ONE)
        marker = Marker(ONE, 1, True, 7)
        assert await write(rig, partition, marker) == [None]
        await begin(rig, kit, ONE, epoch=1)
        assert partition.last_stable_offset == 4
        assert await write(rig, partition, marker, Marker(TWO, 3, False, 7)) == [None, None]
        assert control_rows_of(partition) == [[marker], [Marker(TWO, 3, False, 7)]]
        assert partition.log.producers.open_transactions == {ONE: 4}
        assert partition.last_stable_offset == 4

    rig.run(story)


def test_a_former_coordinator_is_refused_alone(rig: Any) -> None:
    partition = rig.partition()

    async def story() -> None:
        assert await write(rig, partition, Marker(ONE, 1, True, 7)) == [None]
        old, fine = Marker(ONE, 2, False, 6), Marker(TWO, 1, False, 6)
        refused, written = await write(rig, partition, old, fine)
        assert isinstance(refused, errors.InvalidProducerEpoch)
        assert written is None
        assert control_rows_of(partition)[1:] == [[fine]]
        (alone,) = await write(rig, partition, old)
        assert isinstance(alone, errors.InvalidProducerEpoch)
        assert partition.log.producers.get(ONE).epoch == 1

    rig.run(story)


def test_both_a_marker_and_its_repetition_wait_for_the_high_watermark(rig: Any) -> None:
    partition = rig.partition(replicas=(1, 2))

    async def story() -> None:
        first = write(rig, partition, Marker(ONE, 1, True, 7))
        again = write(rig, partition, Marker(ONE, 1, True, 7))  # before it is written
        await partition.writer.idle()
        parked = write(rig, partition, Marker(ONE, 1, True, 7))
        await rig.mine.clock.sleep_ms(10)
        assert not any(each.done() for each in (first, again, parked))
        assert partition.log.written_end == 1
        partition.leader.on_follower_end(2, 1)
        partition.watermark_moved()
        assert [await each for each in (first, again, parked)] == [[None]] * 3
        assert write(rig, partition, Marker(ONE, 1, True, 7)).done()

    rig.run(story)


def test_the_end_of_the_epoch_and_of_the_time_fail_what_waits(rig: Any) -> None:
    # rule L5
    partition = rig.partition(replicas=(1, 2))

    async def story() -> None:
        first = write(rig, partition, Marker(ONE, 1, True, 7))
        await partition.writer.idle()
        repeated = write(rig, partition, Marker(ONE, 1, True, 7))
        rig.lead(partition, 1, replicas=(1, 2))
        assert await failure(first) is errors.NotLeaderOrFollower
        assert await failure(repeated) is errors.NotLeaderOrFollower
        late = write(rig, partition, Marker(ONE, 1, True, 7))
        assert await failure(late) is errors.RequestTimedOut
        old = write(rig, partition, Marker(ONE, 2, True, 7), epoch=0)
        assert await failure(old) is errors.FencedLeaderEpoch
        partition.step_down(2)
        refused = write(rig, partition, Marker(ONE, 2, True, 7))
        assert await failure(refused) is errors.NotLeaderOrFollower
        assert control_rows_of(partition) == [[Marker(ONE, 1, True, 7)]]

    rig.run(story)


def test_a_failed_write_fails_the_marker_and_its_repetition(rig: Any, kit: Any) -> None:
    """Rule L2: neither was written, and the transaction is open again."""
    partition = rig.partition()

    async def story() -> None:
        await begin(rig, kit, ONE)
        rig.storage.capacity = rig.storage.used_bytes() + 20
        first = write(rig, partition, Marker(ONE, 1, True, 7))
        again = write(rig, partition, Marker(ONE, 1, True, 7))
        assert await failure(first) is errors.StorageFull
        assert await failure(again) is errors.StorageFull
        assert partition.last_stable_offset == 0
        rig.storage.capacity = None
        assert await write(rig, partition, Marker(ONE, 1, True, 7)) == [None]
        assert partition.last_stable_offset == 4

    rig.run(story)


def test_a_marker_may_use_the_reserve(rig: Any, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # rule L16
    partition = rig.partition()
    full = errors.StorageFull("less than the reserve is left")
    monkeypatch.setattr(type(partition.writer.space), "refusal", lambda self, size: full)

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, kit.batch())))
        (refused,) = await kit.results(stream, 1)
        assert refused.error.code == errors.StorageFull.code
        assert await write(rig, partition, Marker(ONE, 1, True, 7)) == [None]

    rig.run(story)


def test_too_few_in_sync_or_too_many_markers(rig: Any) -> None:
    partition = rig.partition(replicas=(1, 2), min_insync_replicas=2)
    partition.leader.isr = (1,)

    async def story() -> None:
        few = write(rig, partition, Marker(ONE, 1, True, 7))
        assert await failure(few) is errors.NotEnoughReplicas
        many = write(rig, partition, *[Marker(ONE, 1, True, 7)] * (MARKERS_MAX + 1))
        assert await failure(many) is errors.InvalidRequest
        assert partition.log.log_end == 0
        assert await write(rig, partition) == []

    rig.run(story)
