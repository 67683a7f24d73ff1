"""When a snapshot of the metadata is due: what a start replays is proportionate to the cluster."""

from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from pk import limits
from pk.server.metadata.snapshot_generator import REST_MS, SnapshotGenerator
from pk.server.raft.recovery import SnapshotRules
from pk.server.raft.snapshot_id import SnapshotId

MIB = limits.MIB
#: In this history each offset stands for one byte of the log.
END = 60 * MIB


class History:
    """A log that grows, and a cluster whose snapshots have always `size` bytes."""

    def __init__(self, size: int, rules: SnapshotRules) -> None:
        self.size, self.committed, self.busy, self.looks = size, 0, False, 0
        self.newest: SnapshotId | None = None
        self.now_ms = 0
        clock: Any = SimpleNamespace(monotonic_ms=lambda: self.now_ms)
        parts: list[Any] = [self, self, self]
        self.generator = SnapshotGenerator(*parts, clock, rules, lambda event, **facts: None)

    async def bytes_between(self, start: int, end: int) -> int:
        return end - start

    async def piece(self, wanted: SnapshotId, position: int, max_bytes: int) -> tuple[bytes, int]:
        assert wanted == self.newest
        self.looks += 1
        return b"", self.size

    async def grow(self, step: int = MIB // 8, every_ms: int = REST_MS) -> list[int]:
        """Let the log grow; returns the ends of the snapshots."""
        made = []
        while self.committed < END:
            self.committed += step
            self.now_ms += every_ms
            if await self.generator._due():
                self.newest = SnapshotId(self.committed, 1)
                made.append(self.committed)
        return made


@pytest.mark.parametrize(
    ("size", "behind"),
    [(1_000, MIB), (MIB, 2 * MIB), (5 * MIB, 10 * MIB), (50 * MIB, 20 * MIB)],
)
def test_the_records_behind_a_snapshot_are_proportionate_to_it(size: int, behind: int) -> None:
    history = History(size, SnapshotRules(max_interval_ms=0))
    made = asyncio.run(history.grow())
    assert made[0] == MIB  # before there is one
    assert {later - one for one, later in itertools.pairwise(made)} == {behind}
    assert history.looks <= END // (MIB // 8)


def test_a_small_one_is_not_made_while_the_nodes_start() -> None:
    history = History(MIB, SnapshotRules(max_interval_ms=0))
    made = asyncio.run(history.grow(every_ms=1_000))
    assert made[0] == 60 * (MIB // 8)
    history = History(MIB, SnapshotRules(max_interval_ms=0))
    made = asyncio.run(history.grow(every_ms=1))
    assert made[0] == 20 * MIB


def test_the_setting_bounds_them() -> None:
    history = History(50 * MIB, SnapshotRules(MIB // 4, max_interval_ms=0))
    made = asyncio.run(history.grow())
    assert {later - one for one, later in itertools.pairwise(made)} == {MIB // 4}
