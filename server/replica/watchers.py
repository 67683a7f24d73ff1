"""Interfaces that a partition notifies: fetch streams that read it, and the replica's fetcher."""

from __future__ import annotations

from typing import Protocol

from pk import errors
from pk.types import PartitionKey


class Watcher(Protocol):
    """A fetch stream that holds a position here."""

    def moved(self, key: PartitionKey, *, urgent: bool = False) -> None:
        """The read bound moved; `urgent`: the epoch or the log's end may have, so check the
        position.
        """
        ...


class EndWatcher(Watcher, Protocol):
    """A follower's stream, which reads to the log's end; new high watermarks are sent with
    delay.
    """

    def watermark_moved(self, key: PartitionKey) -> None: ...


class Follows(Protocol):
    """This broker's replica while another broker leads (fetcher.py)."""

    def stored(self, size: int) -> None:
        """`size` fetched bytes are WRITTEN, or SYNCED where the topic asks for that."""
        ...

    def log_start_moved(self) -> None:
        """This replica's log start moved, durably."""
        ...

    def not_stored(self, error: errors.PkError) -> None:
        """Appends that were decided and not written are undone: fetch them again."""
        ...
