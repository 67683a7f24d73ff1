"""The state that a tier process keeps of one topic, and its totals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pk import errors
from pk.tiering.accounting import RowsMissing
from pk.tiering.copier import Copier
from pk.tiering.damage import DamagedFiles
from pk.tiering.owner import Owner
from pk.tiering.table import Table
from pk.wire import pk_pb2 as wire


@dataclass(slots=True)
class Counts:
    """Totals since the start; the node turns them into metrics."""

    uploaded_files: int = 0
    uploaded_rows: int = 0
    uploaded_bytes: int = 0
    failed_uploads: int = 0
    commits: int = 0
    failed_commits: int = 0
    vacuumed_files: int = 0
    cold_fetches: int = 0
    cold_bytes: int = 0
    repaired_files: int = 0

    def uploaded(self, rows: int, size: int, *, repaired: bool) -> None:
        """Counts the upload of one file."""
        self.uploaded_files += 1
        self.uploaded_rows += rows
        self.uploaded_bytes += size
        self.repaired_files += repaired


@dataclass(slots=True)
class LedPartition:
    """A partition this node copies."""

    copier: Copier
    description: wire.TierPartition


@dataclass(slots=True)
class TopicTier:
    """One topic's table and the partitions copied into it."""

    topic: str
    topic_id: str
    home: str
    table: Table
    owner: Owner
    led: dict[int, LedPartition] = field(default_factory=dict)
    damaged: DamagedFiles = field(default_factory=DamagedFiles)
    #: of the partitions led on this node
    missing: dict[int, RowsMissing] = field(default_factory=dict)


def answer(request: Any, reply: Any) -> None:
    """Completes the future of a request with its reply or error."""
    if request.done():
        return  # the caller was cancelled
    if isinstance(reply, errors.PkError):
        request.set_exception(reply)
    else:
        request.set_result(reply)
