"""The metadata that a controller serves (server/raft/fetch_source.py): rule L9."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pk import errors
from pk.server.raft.fetch_source import FetchSource
from pk.server.raft.log_reader import LogReader
from pk.server.raft.snapshot_id import SnapshotId
from pk.types import NONE

OLD, NEW = SnapshotId(5, 1), SnapshotId(9, 1)


class Files:
    """Two snapshots; those in `bad` are damaged."""

    def __init__(self, *bad: SnapshotId) -> None:
        self.kept = [OLD, NEW]
        self.bad = bad

    @property
    def newest(self) -> SnapshotId | None:
        return self.kept[-1] if self.kept else None

    async def read(self, wanted: SnapshotId) -> bytes:
        if wanted in self.bad:
            raise errors.CorruptLog("a bit rotted")
        return b"whole"

    async def piece(self, wanted: SnapshotId, position: int, max_bytes: int) -> tuple[bytes, int]:
        if wanted not in self.kept:
            raise errors.SnapshotNotFound("gone")
        return b"whole"[position : position + max_bytes], 5

    def forget(self, damaged: SnapshotId) -> None:
        self.kept.remove(damaged)


class Rig:
    def __init__(self, *bad: SnapshotId) -> None:
        self.files = Files(*bad)
        self.said: list[str] = []

        def rebase() -> None:
            if not self.files.kept:
                raise errors.CorruptLog("nothing reaches back to 0")

        history: Any = SimpleNamespace(rebase=rebase)
        files: Any = self.files
        self.source = FetchSource(history, files, lambda event, **_: self.said.append(event))

    def piece(self, position: int = 0, end: int = NONE) -> bytes:
        asked = SimpleNamespace(end=end, epoch=1, position=position, max_bytes=100)
        _, piece = asyncio.run(self.source.piece(asked))
        return piece


def test_a_damaged_snapshot_is_not_begun_and_the_one_before_it_is_the_newest() -> None:
    rig = Rig(NEW)
    with pytest.raises(errors.SnapshotNotFound):
        rig.piece()
    assert (rig.files.newest, rig.said) == (OLD, ["metadata_snapshot_damaged"])
    assert rig.piece() == b"whole"


def test_without_any_snapshot_that_is_whole_there_is_nothing_to_stand_on() -> None:
    rig = Rig(OLD, NEW)
    with pytest.raises(errors.SnapshotNotFound):
        rig.piece()
    with pytest.raises(errors.CorruptLog):
        rig.piece()


def test_who_was_handed_the_first_piece_gets_the_rest() -> None:
    assert Rig(NEW).piece(position=2, end=NEW.end) == b"ole"


def test_without_a_snapshot_the_log_reaches_back_to_where_its_files_begin() -> None:
    """The log start has moved, but no file was dropped yet: a voter that is behind can still be
    served from the files.
    """
    log: Any = SimpleNamespace(segments=[SimpleNamespace(base_offset=0)], log_start=OLD.end)
    files: Any = SimpleNamespace(kept=(OLD, NEW))
    unused: Any = None
    history = LogReader(unused, unused, unused, files, log, lambda *_, **k: None)
    assert (history.base, log.log_start) == (OLD, OLD.end)
    files.kept = (OLD,)
    history.rebase()
    assert (history.base.end, log.log_start) == (0, 0)
