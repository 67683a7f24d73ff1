"""The values that a partition log returns: decisions, write plans, reads.  Data only.

A plan is made on the loop, performed once on the directory's write lane, and completed on the loop
again.  Its holder uses only the fields marked public.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pk import errors
from pk.log.storage import Buffer
from pk.types import NONE


class Now(NamedTuple):
    """The times of one append (rule L10)."""

    #: the broker's clock: LogAppendTime, and the clock that clients' timestamps are compared with
    wall_ms: int
    #: when its producer was active; a clock that was set back must not make it look idle
    activity_ms: int


@dataclass(slots=True, frozen=True)
class LogConfig:
    """The topic settings that a log uses; times in ms, sizes in bytes; -1 = no limit, -2 (local) =
    the topic's value.
    """

    cleanup_policy: str
    retention_ms: int
    retention_bytes: int
    local_retention_ms: int
    local_retention_bytes: int
    segment_bytes: int
    segment_ms: int
    index_interval_bytes: int
    max_message_bytes: int
    decoded_bytes_max: int
    message_timestamp_type: str
    message_timestamp_after_max_ms: int
    message_timestamp_before_max_ms: int
    flush_messages: int
    flush_ms: int
    flush_on_ack: bool
    file_delete_delay_ms: int

    @classmethod
    def of(cls, resolved: Mapping[str, Any]) -> LogConfig:
        """Make the settings from a topic's resolved ones (`settings.TOPIC.resolve`)."""
        return cls(**{name: resolved[name] for name in cls.__dataclass_fields__})

    @property
    def compacted(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def deletes(self) -> bool:
        return "delete" in self.cleanup_policy

    @property
    def log_append_time(self) -> bool:
        return self.message_timestamp_type == "LogAppendTime"


class Appended(NamedTuple):
    """A batch that was given offsets.  It counts as appended only once a completed plan covers
    `last_offset`.
    """

    base_offset: int
    last_offset: int
    max_timestamp: int
    log_append_time_ms: int  #: -1 unless the topic stamps records
    leader_epoch: int
    size: int
    first_of_epoch: bool = False


class Duplicate(NamedTuple):
    """A batch that the log already has or is writing.  It gets the original's answer, and not
    before the original (rule L4).
    """

    base_offset: int
    last_offset: int
    log_append_time_ms: int = NONE


class AppendOp(NamedTuple):
    """Write `buffers` at `position`, which must be the end of the segment."""

    segment: Any
    position: int
    buffers: list[Buffer]


class RollOp(NamedTuple):
    """Seal `old`, create `new`; `snapshot` is the producer state at its base."""

    old: Any
    new: Any
    snapshot: bytes


class EpochOp(NamedTuple):
    """Replace the leader-epoch checkpoint; done before the epoch's first batch is written."""

    content: bytes


class RepairOp(NamedTuple):
    """Repair after a failed write: cut `segment` back to `size` and remove later segments
    (rule L2).  `epochs` are those of the records that are left.
    """

    segment: Any
    size: int
    epochs: bytes


@dataclass(slots=True)
class WritePlan:
    """Everything decided since the last plan.  The public fields are those from `start` to `sync`,
    and `appended`.
    """

    generation: int
    start: int  #: the log end before the plan
    end: int  #: the log end after the plan
    size: int = 0  #: size of the batches
    records: int = 0
    sync: bool = False  #: fdatasync before the plan completes
    epochs_synced: bool = False  #: the epoch that the plan begins with is in its file (epoch_files)
    ops: list[AppendOp | RollOp | EpochOp | RepairOp] = field(default_factory=list)
    appended: list[Appended] = field(default_factory=list)
    extents: dict[Any, Any] = field(
        default_factory=dict
    )  #: segment → the extent that becomes valid when the plan completes


@dataclass(slots=True)
class Completion:
    """What completing a plan changed."""

    written_end: int
    synced_end: int
    failed: tuple[
        Appended, ...
    ] = ()  #: decided appends that are undone; the duplicates of these batches fail with them
    error: errors.PkError | None = None
    rolled: bool = False


class Read(NamedTuple):
    """Whole batches that were read; the first may begin below the requested offset."""

    data: bytes
    next_offset: int  #: where the next read starts: at or above the end of the data (rule L12)
    base_offset: int  #: base offset of the first batch; = next_offset if there is no data
    last_epoch: int  #: leader epoch of the last batch, -1 without data

    @property
    def empty(self) -> bool:
        return not self.data


class TimeOffset(NamedTuple):
    """The first offset whose timestamp is at least the requested one."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


class RetentionPlan(NamedTuple):
    """What retention may remove now.  The log start is moved first and durably (rule T9), then the
    segments are dropped.
    """

    log_start: int  #: the log start after the plan
    drop: tuple[int, ...]  #: base offsets of the segments to drop, oldest first
    roll: bool  #: the whole active segment expired: roll it first (rule L10), then plan again
    reason: str = ""

    @property
    def empty(self) -> bool:
        return not self.drop and not self.roll
