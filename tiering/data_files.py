"""The files of a table, as a snapshot lists them and as a commit adds them."""

from __future__ import annotations

from dataclasses import dataclass

from pk.types import Offset

#: "no statistics": the file may hold any offset.
OFFSET_MAX = 2**63 - 1


@dataclass(slots=True, frozen=True)
class DataFile:
    """One live file of a snapshot.  Both ends of a range are included, as in Delta's statistics."""

    path: str
    partition: int
    min_offset: Offset
    max_offset: Offset
    min_timestamp_ms: int
    max_timestamp_ms: int
    rows: int
    size: int
    #: whether the log has its statistics; otherwise they were read from its footer
    stats: bool = True


@dataclass(slots=True, frozen=True)
class NewFile:
    """A file to be added, with the facts that the commit states of it."""

    file: DataFile
    modified_ms: int
    null_keys: int = 0
    null_values: int = 0
    data_change: bool = True
