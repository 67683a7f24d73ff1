"""The lists of aborted transactions in replies are bounded (server/handlers/aborted_lists)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pk import errors, transactional_ids
from pk.log import batch as batches
from pk.log.aborted import AbortedRanges
from pk.log.control_rows import Marker
from pk.log.plan import Now
from pk.server.handlers import aborted_lists
from pk.server.replica.markers import write_markers
from pk.tiering.partition_views import aborted_end, aborted_of, stable_limit
from pk.wire import pk_pb2 as wire
from pk.world import StreamKind

FIRST = transactional_ids.TRANSACTIONAL


async def transactions(rig: Any, kit: Any, number: int, commits: Sequence[bool]) -> None:
    """Append a transaction of one record for each end, one after the other."""
    stream = await rig.stream(StreamKind.PRODUCE)
    clock = rig.mine.clock
    partition = next(p for key, p in rig.core.partitions.items() if key.partition == number)
    for index, commit in enumerate(commits):
        producer_id = FIRST + index
        fields = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": 0}
        raw = kit.batch(1, transactional=True, **fields)
        await stream.send(kit.produce((number, raw)))
        (result,) = await kit.results(stream, 1)
        assert not result.HasField("error")
        now, marker = Now(clock.wall_ms(), clock.wall_ms()), Marker(producer_id, 1, commit, 0)
        await write_markers(partition, [marker], -1, now, clock.monotonic_ms() + 5_000)
    stream.close()


def offsets(reply: wire.FetchReply, payload: memoryview) -> list[int]:
    """The offsets of the batches of a frame of one partition that a consumer keeps."""
    ranges = AbortedRanges(
        (a.producer_id, a.first_offset, a.last_offset) for a in reply.partitions[0].aborted
    )
    return [
        header.base_offset
        for header, _ in batches.iter_batches(payload)
        if not header.control and not ranges.contains(header)
    ]


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_a_frame_covers_what_it_can_name(
    rig: Any, kit: Any, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    rig.partition()
    monkeypatch.setattr(aborted_lists, "REPLY_MAX", limit)
    commits = [index % 3 == 0 for index in range(9)]

    async def story() -> None:
        await transactions(rig, kit, 0, commits)
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(), isolation=1))
        kept, next_offset, frames = [], 0, 0
        while next_offset < 18:
            reply, payload = await kit.fetched(stream)
            (entry,) = reply.partitions
            assert entry.next_offset > next_offset
            assert len(entry.aborted) <= limit
            frames, next_offset = frames + 1, entry.next_offset
            kept += offsets(reply, payload)
        assert kept == [0, 6, 12]
        assert frames == {1: 6, 2: 3, 5: 2, 100: 1}[limit]
        stream.close()

    rig.run(story)


def test_a_partition_without_room_is_in_the_next_frame(
    rig: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.partition(0)
    rig.partition(1)
    monkeypatch.setattr(aborted_lists, "REPLY_MAX", 2)

    async def story() -> None:
        for number in (0, 1):
            await transactions(rig, kit, number, [False, False])
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(0), kit.position(1), isolation=1))
        told = []
        while len(told) < 2:
            reply, _ = await kit.fetched(stream)
            told += [(one.partition, len(one.aborted)) for one in reply.partitions if one.aborted]
            assert len(reply.partitions) == 1
        assert sorted(told) == [(0, 2), (1, 2)]
        stream.close()

    rig.run(story)


async def described(caller: Any, session: str, generation: int) -> wire.TierPartitionsReply:
    request = wire.TierPartitionsRequest(
        session_id=session, generation=generation, max_wait_ms=2_000
    )
    answer = await caller.call(request, timeout_ms=10_000)
    reply: wire.TierPartitionsReply = answer.head.tier_partitions_reply
    return reply


def test_the_tier_gets_a_part_of_the_list_and_the_next_part_after_progress(
    rig: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = rig.partition(0, tiered=True)
    rig.core.feed.restore(partition.key)
    monkeypatch.setattr(aborted_lists, "PARTITION_MAX", 2)

    async def story() -> None:
        await transactions(rig, kit, 0, [True, False, False, False, True])
        caller = rig.caller()
        reply = await described(caller, "", 0)
        (one,) = reply.partitions
        assert one.last_stable_offset == 10
        assert ([a.first_offset for a in one.aborted], one.aborted_end) == ([2, 4], 6)
        assert aborted_end(one) == 6
        quiet = await described(caller, reply.session_id, reply.generation)
        assert not quiet.partitions, "nothing changed"
        report = wire.TierProgressRequest()
        report.partitions.add(
            topic_id=kit.topic_id, partition=0, leader_epoch=0, tiered_end=6, droppable_end=0
        )
        await caller.call(report, timeout_ms=1_000)
        reply = await described(caller, quiet.session_id, quiet.generation)
        (one,) = reply.partitions
        assert ([a.first_offset for a in one.aborted], aborted_end(one)) == ([6], 10)
        assert not one.HasField("aborted_end"), "the list is complete"
        await caller.call(report, timeout_ms=1_000)
        assert not (await described(caller, reply.session_id, reply.generation)).partitions
        await caller.close()

    rig.run(story)


def test_a_reply_without_room_names_the_rest_in_the_next_one(
    rig: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        rig.core.feed.restore(rig.partition(number, tiered=True).key)
    monkeypatch.setattr(aborted_lists, "REPLY_MAX", 4)

    async def story() -> None:
        for number in range(3):
            await transactions(rig, kit, number, [False, False, False])
        caller = rig.caller()
        session, generation, ends = "", 0, {}
        for _ in range(4):
            reply = await described(caller, session, generation)
            session, generation = reply.session_id, reply.generation
            assert sum(len(one.aborted) for one in reply.partitions) <= 4
            for one in reply.partitions:
                ends[one.partition] = max(aborted_end(one), ends.get(one.partition, 0))
                ranges = [(a.first_offset, a.last_offset) for a in aborted_of(one)]
                assert ranges == [(n, n + 1) for n in range(0, aborted_end(one), 2)]
        assert all(ends.values()), "each was described with a part of its list"
        await caller.close()

    rig.run(story)


def test_a_copy_ends_where_the_list_does() -> None:
    one = wire.TierPartition(last_stable_offset=50)
    assert stable_limit(one, 10, 40, whole=True) == 40
    one.aborted_end = 30
    assert stable_limit(one, 10, 40, whole=False) == 30
    assert stable_limit(one, 10, 30, whole=True) == 30
    for start, whole in ((10, True), (30, False)):
        with pytest.raises(errors.TierUnavailable, match="names the aborted transactions below 30"):
            stable_limit(one, start, 40, whole=whole)
