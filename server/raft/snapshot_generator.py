"""The interface between the quorum's log and the generator of its snapshots (KIP-630).

The log keeps snapshots and drops the records below them.  Only the state machine knows the content
of a snapshot.  So the log receives a generator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from pk.clock import Clock
from pk.server.raft.log_reader import LogReader, Say
from pk.server.raft.recovery import SnapshotRules
from pk.server.raft.snapshot_files import SnapshotFiles
from pk.server.raft.snapshot_id import SnapshotId

R = TypeVar("R")


class SnapshotSource(Protocol):
    """The calls that a generator makes to the log."""

    @property
    def committed(self) -> int: ...

    def epoch_at(self, offset: int) -> int:
        """The leader epoch of a record of the log."""
        ...

    async def note_synced(self) -> None:
        """Note the synced end for the next start.  Raises `StorageFull`."""
        ...

    async def begin_at(self, made: SnapshotId) -> None:
        """Keep the SYNCED snapshot `made`, and drop the log below the kept snapshots.

        Raises `SnapshotNotFound` if a later one was loaded meanwhile.
        """
        ...


class SnapshotGenerator(Protocol):
    """Makes snapshots of committed records, one after another."""

    async def run(self) -> None:
        """Make a snapshot whenever one is due.  Raises errors that a retry cannot cure."""
        ...


MakeGenerator = Callable[
    [SnapshotSource, LogReader[R], SnapshotFiles, Clock, SnapshotRules, Say], SnapshotGenerator
]
