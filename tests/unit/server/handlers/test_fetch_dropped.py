"""Segments that are dropped while a reader's bytes come from the disk (handlers/fetch E8)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pk.log.aborted import AbortedPage
from pk.log.plan import RetentionPlan
from pk.types import AbortedTransaction
from pk.world import StreamKind
from tests.unit.server.handlers.test_fetch import fill, offsets


def test_an_aborted_record_is_never_shown_because_its_segment_was_dropped(
    rig: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of aborted transactions is made after the read, and goes with the segment."""
    partition = rig.partition(0, tiered=True, segment_bytes=14 * 1024)
    reading, gate = asyncio.Event(), asyncio.Event()
    read = rig.disk.read

    async def slow(work: Any) -> Any:
        found = await read(work)
        reading.set()
        await gate.wait()
        return found

    def aborted_in(start: int, end: int, limit: int) -> AbortedPage:
        """As the segments' own lists: the first record was aborted, in the first segment."""
        first = partition.log.local_log_start == 0
        return AbortedPage([AbortedTransaction(9, 0, 0)] if first and start == 0 else [], end)

    async def story() -> None:
        await fill(rig, kit, 0, 2, records=1, size=12_000)
        log = partition.log
        assert log.segment_count == 2
        monkeypatch.setattr(log, "aborted_in", aborted_in)
        monkeypatch.setattr(rig.disk, "read", slow)
        rig.tier.batches = lambda offset: (b"", 1)  # the table has no aborted record
        stream = await rig.stream(StreamKind.FETCH)
        await stream.send(kit.fetch(kit.position(0), isolation=1))
        await reading.wait()
        log.tiered_end = log.droppable_end = 1
        log.drop_segments(RetentionPlan(0, (0,), False))
        gate.set()
        shown: list[int] = []
        position = 0
        async with asyncio.timeout(5):
            while position < 2:
                reply, payload = await kit.fetched(stream)
                position = reply.partitions[-1].next_offset
                hidden = {a.first_offset for entry in reply.partitions for a in entry.aborted}
                shown += [each for each in offsets(payload) if each not in hidden]
        assert shown == [1]

    rig.run(story)
