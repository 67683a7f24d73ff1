"""What a copier knows of its partition, the work that it asks for, and its events (copier.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pk import errors
from pk.tiering.damage import DamagedFile
from pk.tiering.data_files import OFFSET_MAX, DataFile
from pk.types import NONE, Epoch, Offset
from pk.wire import pk_pb2 as wire


@dataclass(slots=True, frozen=True)
class CopySettings:
    """The topic's options that concern copying, and the server's back-off."""

    enabled: bool = True
    max_lag_ms: int = 60_000
    file_bytes: int = 64 * 1024 * 1024
    drop_delay_ms: int = 60_000
    retry_backoff_ms: int = 500


@dataclass(slots=True, frozen=True)
class View:
    """The leader's state of the partition (`tier_partitions`)."""

    leader_epoch: Epoch
    ready: bool  #: whether the high watermark has caught up (T1)
    log_start: Offset
    local_log_start: Offset
    last_stable_offset: Offset  #: or the end of what the leader's list of aborted ones covers
    settings: CopySettings
    log_end: Offset = OFFSET_MAX
    epochs: tuple[tuple[Epoch, Offset], ...] = ()  #: of the leader's log: (epoch, its first offset)


@dataclass(slots=True, frozen=True, eq=False)
class Upload:
    """Effect: copy `[start, ≤ limit)` into a file of about `max_bytes`; a repair copies it all."""

    start: Offset
    limit: Offset
    max_bytes: int
    leader_epoch: Epoch
    replaces: DataFile | None = None


@dataclass(slots=True, frozen=True, eq=False)
class Measure:
    """Effect: measure how many log bytes lie in `[start, limit)`."""

    start: Offset
    limit: Offset


@dataclass(slots=True, frozen=True, eq=False)
class CommitToTable:
    """Effect: hand a change to the table's owner (`commit_to_table`)."""

    request: wire.CommitToTableRequest


@dataclass(slots=True, frozen=True, eq=False)
class Confirm:
    """Effect: HEAD every file that covers `[start, end)` (rule T6)."""

    start: Offset
    end: Offset


# -- events ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Viewed:
    view: View


@dataclass(slots=True)
class TableSeen:
    """Event: a snapshot in which the table covers `[start, end)` of this partition."""

    start: Offset
    end: Offset
    bytes: int
    version: int
    epoch: Epoch = NONE  #: leader epoch of the record at `end - 1`
    missing_from: Offset = NONE  #: rows may be missing from here on (T17); NONE = none


@dataclass(slots=True)
class Measured:
    asked: Measure
    bytes: int


@dataclass(slots=True)
class Built:
    """Event: the file of an upload is built, and on its way to the store."""

    asked: Upload
    end: Offset
    epoch: Epoch  #: leader epoch of the record at `end - 1`


@dataclass(slots=True)
class Uploaded:
    """Event: an upload has finished; `add` None = the range holds no rows (aborted, markers)."""

    asked: Upload
    end: Offset
    epoch: Epoch  #: leader epoch of the record at `end - 1`
    add: wire.AddFile | None


@dataclass(slots=True)
class HandedOver:
    """Event: the owner committed the change, or the table already contained it."""

    asked: CommitToTable


@dataclass(slots=True)
class Confirmed:
    """Event: files of the range do not answer a HEAD, or are known to be damaged (`missing`)."""

    asked: Confirm
    missing: Sequence[DamagedFile]


@dataclass(slots=True)
class Checked:
    """Event: a read or a check found files of this partition missing or damaged."""

    missing: Sequence[DamagedFile]


@dataclass(slots=True)
class OperationFailed:
    asked: Upload | Measure | CommitToTable | Confirm
    error: errors.PkError


@dataclass(slots=True)
class TableProblem:
    """Event: the owner reports a problem of the table; None = the problem is solved."""

    error: errors.PkError | None


@dataclass(slots=True)
class Wake:
    """Event: the timer fired."""


@dataclass(slots=True)
class SessionLost:
    """Event: the broker restarted; the copier reports its whole state again."""


CopierEvent = (
    Viewed
    | TableSeen
    | Measured
    | Built
    | Uploaded
    | HandedOver
    | Confirmed
    | Checked
    | OperationFailed
    | TableProblem
    | Wake
    | SessionLost
)
