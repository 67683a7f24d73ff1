"""What the quorum's log and the generator of its snapshots know of each other (KIP-630).

The log keeps snapshots and is made shorter behind them; what a snapshot says is the state
machine's to know.  So a generator is handed to the log.
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
    """What a generator asks of the log."""

    @property
    def committed(self) -> int: ...

    def epoch_at(self, offset: int) -> int:
        """The leader epoch of a record that is there."""
        ...

    async def note_synced(self) -> None:
        """Say for the next opening how far the log is SYNCED.  Raises `StorageFull`."""
        ...

    async def begin_at(self, made: SnapshotId) -> None:
        """`made` is SYNCED: keep it, and make the log shorter.

        Raises `SnapshotNotFound` if a later one was loaded meanwhile.
        """
        ...


class SnapshotGenerator(Protocol):
    """Makes snapshots of committed records, one after another."""

    async def run(self) -> None:
        """Look whether one is due, for ever.  Raises what is no passing trouble."""
        ...


MakeGenerator = Callable[
    [SnapshotSource, LogReader[R], SnapshotFiles, Clock, SnapshotRules, Say], SnapshotGenerator
]
