"""Interfaces that a partition notifies: fetch streams that read it, and the replica's fetcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pk import errors
from pk.log.control_rows import Marker
from pk.types import Offset, PartitionKey


class Watcher(Protocol):
    """A fetch stream that holds a position here."""

    def moved(self, key: PartitionKey, *, urgent: bool = False) -> None:
        """React to a new read bound.  `urgent`: the epoch or the log's end may have moved too, so
        the position must be checked.
        """
        ...


class MarkerListener(Protocol):
    """The log of a coordinator, whose records may belong to transactions (replay_log.py)."""

    def markers_appended(self, offset: Offset, markers: Sequence[Marker]) -> None:
        """React to a control batch that was decided at `offset`."""
        ...

    def appends_undone(self, written_end: Offset) -> None:
        """React to a failed write: everything from `written_end` on is undone."""
        ...


class EndWatcher(Watcher, Protocol):
    """A follower's stream, which reads to the log's end; new high watermarks are sent with
    delay.
    """

    def watermark_moved(self, key: PartitionKey) -> None: ...


class Credit(Protocol):
    """The credit of the stream on which batches were fetched (fetch_limits.py)."""

    def queued(self, size: int) -> None:
        """React to `size` received bytes that the log will write."""
        ...

    def written(self, size: int) -> None:
        """React to `size` queued bytes that are written or undone."""
        ...


class Follows(Protocol):
    """This broker's replica while another broker leads (fetcher.py)."""

    def stored(self) -> None:
        """React to fetched records that are WRITTEN, or SYNCED if the topic sets
        `flush_on_ack`.
        """
        ...

    def log_start_moved(self) -> None:
        """React to a new, durable log start of this replica."""
        ...

    def not_stored(self, error: errors.PkError) -> None:
        """React to decided appends that could not be written and were undone: fetch them again."""
        ...
