"""The events of the table's owner, and the operations that it asks of the table (owner.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pk import errors
from pk.tiering.data_files import DataFile
from pk.tiering.plan import LogStart
from pk.tiering.table import Snapshot
from pk.types import Epoch
from pk.wire import pk_pb2 as wire

#: Name of the table as a peer in `Send` effects.
TABLE = "table"
#: Name under which new snapshots are published.
SNAPSHOT = "snapshot"
#: Name under which the table's problem (or None) is published.
PROBLEM = "problem"

# -- events ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Submit:
    """Event: a hand-over; answered by `CommitToTableReply` or an error."""

    request: Any
    change: wire.CommitToTableRequest


@dataclass(slots=True)
class ClaimPartition:
    """Event: a claim (rule T4); answered by `TierClaimReply` or an error."""

    request: Any
    partition: int
    epoch: Epoch
    commit: bool


@dataclass(slots=True)
class PartitionsSeen:
    """Event: changes in what the brokers report of the topic's partitions."""

    partitions: Mapping[int, LogStart]
    gone: Sequence[int] = ()
    lease_token: int = 0  #: of the maintenance lease of the topic; 0 = no job holds it (C5)


@dataclass(slots=True)
class TableLoaded:
    """Event: answer to `Load` or `Create`; None = there is no table."""

    snapshot: Snapshot | None


@dataclass(slots=True)
class Committed:
    snapshot: Snapshot


@dataclass(slots=True)
class Vacuumed:
    files: int
    put_off: bool = False  #: no file was looked for: the wall clock is not trusted (L10)


@dataclass(slots=True)
class RowsSummed:
    """Event: answer to `SumRows`: row sums by path (`accounting.UNREADABLE` for a damaged file)."""

    sums: Mapping[str, int]


@dataclass(slots=True)
class Failed:
    """Event: the operation under way raised an error; its outcome is unknown."""

    error: errors.PkError


@dataclass(slots=True)
class Close:
    """Event: the topic is gone; every waiting request is answered with an error."""


@dataclass(slots=True)
class Look:
    """Event: a reader needs the newest version; answered None once a look has ended, also one that
    failed."""

    request: Any


@dataclass(slots=True)
class Wake:
    """Event: the timer fired."""


#: Events of the owner.
OwnerEvent = (
    Submit
    | ClaimPartition
    | PartitionsSeen
    | TableLoaded
    | Committed
    | Vacuumed
    | RowsSummed
    | Failed
    | Close
    | Look
    | Wake
)


# -- what the table is asked to do -----------------------------------------------------------------


@dataclass(slots=True)
class Load:
    partitions: Sequence[int]


@dataclass(slots=True)
class Create:
    pass


@dataclass(slots=True)
class Vacuum:
    retention_ms: int


@dataclass(slots=True)
class SumRows:
    """Read these files and sum the hashes of their rows: they are to be removed, and their names do
    not state their sums (rule T2)."""

    files: Sequence[DataFile]
    snapshot: Snapshot
