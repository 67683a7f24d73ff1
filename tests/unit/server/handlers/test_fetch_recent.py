"""Readers at the end of a log are answered from memory, with the result that the read lane would
give.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from pk import errors
from pk.log import batch as batches
from pk.log import columns
from pk.log.batch_cache import APPEND_BYTES_MAX
from pk.world import Stream, StreamKind

T = TypeVar("T")


@pytest.fixture
def reads(rig: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list with one entry for each job of the read lane."""
    found: list[str] = []
    ask = rig.disk.read

    async def read(work: Callable[[], T]) -> T:
        found.append("read")
        answer: T = await ask(work)
        return answer

    monkeypatch.setattr(rig.disk, "read", read)
    return found


async def append(
    producer: Stream, kit: Any, partition: int, *, size: int = 10, acks: int = -1, records: int = 1
) -> None:
    await producer.send(kit.produce((partition, kit.batch(records, size=size)), acks=acks))
    assert not (await kit.results(producer, 1))[0].HasField("error")


def offsets(payload: memoryview) -> list[int]:
    return [header.base_offset for _, header in batches.iter_headers(payload)]


def test_a_reader_at_the_end_needs_no_read_lane(rig: Any, kit: Any, reads: list[str]) -> None:
    rig.partition()

    async def story() -> None:
        producer, stream = await rig.stream(StreamKind.PRODUCE), await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position()))
        await kit.fetched(stream)  # the bounds
        for turn in range(4):
            await append(producer, kit, 0)
            reply, payload = await kit.fetched(stream)
            assert offsets(payload) == [turn]
            assert reply.partitions[0].next_offset == turn + 1
        assert reads == ["read"]  # the first after the position was set: it is verified (L9)

    rig.run(story)


def test_what_is_not_in_memory_comes_through_the_lane(rig: Any, kit: Any, reads: list[str]) -> None:
    rig.partition()

    async def story() -> None:
        producer, stream = await rig.stream(StreamKind.PRODUCE), await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position()))
        await kit.fetched(stream)
        for turn in range(3):
            await append(producer, kit, 0, size=APPEND_BYTES_MAX)
            _, payload = await kit.fetched(stream)
            assert offsets(payload) == [turn]
        assert len(reads) == 3

    rig.run(story)


def test_the_first_batch_of_a_position_is_verified_where_it_lies(rig: Any, kit: Any) -> None:
    """L9: memory may have the batch undamaged while the disk does not.  A reader that found damage
    reports it by setting its position again.
    """
    partition = rig.partition()

    rig.core.metadata.image.elsewhere = (2,)

    async def story() -> None:
        producer = await rig.stream(StreamKind.PRODUCE)
        await append(producer, kit, 0)
        file = rig.storage.open("topics/t-0/00000000000000000000.log")
        file.write_at(file.size() - 1, bytes([file.read(file.size() - 1, 1)[0] ^ 0xFF]))
        assert partition.log.read_recent(0, bound=1, max_bytes=1_000) is not None
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position()))
        reply, payload = await kit.fetched(stream)
        assert (reply.partitions[0].error.code, len(payload)) == (errors.CorruptLog.code, 0)

    rig.run(story)


def test_memory_gives_nothing_above_the_bound(rig: Any, kit: Any, reads: list[str]) -> None:
    """handlers/fetch E1: records that are written and not committed are in memory, too."""
    partition = rig.partition(replicas=(1, 2))

    def committed(end: int) -> None:
        partition.leader.on_follower_end(2, end)
        partition.watermark_moved()

    async def story() -> None:
        producer, stream = await rig.stream(StreamKind.PRODUCE), await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position()))
        await kit.fetched(stream)
        for _ in range(3):
            await append(producer, kit, 0, acks=1)
        for end in (1, 2):
            committed(end)
            reply, payload = await kit.fetched(stream)
            assert offsets(payload) == [end - 1]
            assert reply.partitions[0].next_offset == end
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await kit.fetched(stream)
        assert reads == ["read"]

    rig.run(story)


def test_the_bytes_of_a_frame_and_of_a_position_hold_for_memory(
    rig: Any, kit: Any, reads: list[str]
) -> None:
    """handlers/fetch E3, E4: as with the disk, a credit of one batch brings one batch, and the rest
    keeps its turn.
    """
    rig.partition()
    size = len(kit.batch(1, size=100))

    async def story() -> None:
        producer, stream = await rig.stream(StreamKind.PRODUCE), await rig.stream(StreamKind.FETCH)
        position = kit.position(partition_max_bytes=2 * size)
        await stream.send(kit.fetch(position, credit=size))
        await kit.fetched(stream)
        await append(producer, kit, 0, size=100)
        await kit.fetched(stream)
        for _ in range(5):
            await append(producer, kit, 0, size=100)
        await stream.send(kit.fetch(credit=1, max_bytes=0))
        # alone, larger than the remaining credit
        assert offsets((await kit.fetched(stream))[1]) == [1]
        await stream.send(kit.fetch(credit=10 * size, max_bytes=0))
        assert offsets((await kit.fetched(stream))[1]) == [2, 3]
        assert offsets((await kit.fetched(stream))[1]) == [4, 5]
        assert reads == ["read"]

    rig.run(story)


def test_a_batch_from_memory_that_does_not_fit_leads_the_next_frame(rig: Any, kit: Any) -> None:
    """handlers/fetch E4: it is sent alone, not behind others."""
    for number in range(2):
        rig.partition(number)
    size = len(kit.batch(1, size=100))

    async def story() -> None:
        producer, stream = await rig.stream(StreamKind.PRODUCE), await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(0), kit.position(1), credit=1))
        await kit.fetched(stream)
        for partition in (0, 1):
            await append(producer, kit, partition, size=100)
            await kit.fetched(stream)
            await stream.send(kit.fetch(credit=size, max_bytes=0))  # one byte is left again
        await stream.send(kit.fetch(credit=size + 9, max_bytes=0))
        both = [(number, kit.batch(1, size=100 + number)) for number in range(2)]
        await producer.send(kit.produce(*both))
        await kit.results(producer, 2)
        assert [len((await kit.fetched(stream))[1]) for _ in both] == [size, size + 1]

    rig.run(story)


def test_readers_at_the_end_do_not_starve_one_on_the_disk(rig: Any, kit: Any) -> None:
    """Turns stay round robin: the partition that has waited longest begins the frame, wherever its
    bytes are.
    """
    for number in range(2):
        rig.partition(number)

    async def story() -> None:
        producer, stream = await rig.stream(StreamKind.PRODUCE), await rig.stream(StreamKind.FETCH)
        for _ in range(3):
            await append(producer, kit, 0, size=APPEND_BYTES_MAX)
        await append(producer, kit, 1)
        await stream.send(kit.fetch(kit.position(1), credit=1))  # each frame takes all there is
        reply, payload = await kit.fetched(stream)
        await stream.send(kit.fetch(kit.position(0), credit=0))
        seen: list[int] = []
        for _ in range(6):
            await append(producer, kit, 1)
            await stream.send(kit.fetch(credit=len(payload), max_bytes=0))
            reply, payload = await kit.fetched(stream)
            seen += [each.partition for each in reply.partitions if each.payload_bytes]
        assert seen.count(0) == 3

    rig.run(story)


def test_a_deleted_partition_is_not_read_from_memory(rig: Any, kit: Any) -> None:
    partition = rig.partition()

    async def story() -> None:
        producer, stream = await rig.stream(StreamKind.PRODUCE), await rig.stream(StreamKind.FETCH)
        await append(producer, kit, 0)
        await stream.send(kit.fetch(kit.position()))
        await kit.fetched(stream)
        partition.log.retire()
        del rig.core.partitions[partition.key]
        assert partition.writer.recent.bytes == 0
        await stream.send(kit.fetch(kit.position()))
        reply, payload = await kit.fetched(stream)
        assert (reply.partitions[0].error.code, len(payload)) == (errors.UnknownTopicId.code, 0)

    rig.run(story)


def test_a_failed_directory_answers_with_its_error(rig: Any, kit: Any) -> None:
    """broker/failures B3: this includes batches that memory still has."""
    partition = rig.partition()

    async def story() -> None:
        producer, stream = await rig.stream(StreamKind.PRODUCE), await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position()))
        await kit.fetched(stream)
        for _ in range(2):
            await append(producer, kit, 0)
            await kit.fetched(stream)
        rig.core.failures.storage_failed(partition, errors.StorageFailed("I/O error"))
        reply, payload = await kit.fetched(stream)
        assert (reply.partitions[0].error.code, len(payload)) == (errors.StorageFailed.code, 0)

    rig.run(story)


@pytest.mark.parametrize("cleanup_policy", ["delete", "compact"])
def test_an_answer_says_whether_its_batches_follow_each_other(
    rig: Any, kit: Any, cleanup_policy: str
) -> None:
    """Rule L9: readers then notice a batch that claims another place."""
    rig.partition(cleanup_policy=cleanup_policy)

    async def story() -> None:
        producer = await rig.stream(StreamKind.PRODUCE)
        raw = b"".join(columns.encode_lists([b"v"], [b"k"], default_timestamp=1000))
        await producer.send(kit.produce((0, raw), acks=1))
        assert not (await kit.results(producer, 1))[0].HasField("error")
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position()))
        reply, payload = await kit.fetched(stream)
        assert offsets(payload) == [0]
        assert reply.partitions[0].dense == (cleanup_policy == "delete")

    rig.run(story)
