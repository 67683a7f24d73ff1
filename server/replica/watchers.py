"""Who is told when a partition moves: sessions that read it, and the replica that follows."""

from __future__ import annotations

from typing import Protocol

from pk import errors
from pk.types import PartitionKey


class Watcher(Protocol):
    """A fetch stream that holds a position here."""

    def moved(self, key: PartitionKey, *, urgent: bool = False) -> None:
        """The bound moved; `urgent`: or an epoch or an end, so look at the position."""
        ...


class EndWatcher(Watcher, Protocol):
    """A follower's stream: it reads to the log's end, and is told the watermark without hurry."""

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
        """What was decided and not written is undone: fetch it again."""
        ...
