"""The files of a table, as a snapshot lists them and as a commit adds them."""

from __future__ import annotations

from dataclasses import dataclass

from pk.tiering.layout import parse_written_path
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


def by_offset(file: DataFile) -> tuple[Offset, Offset, str]:
    """Returns the key by which the files of a partition are ordered."""
    return file.min_offset, file.max_offset, file.path


def span_of(file: DataFile) -> tuple[Offset, Offset, bool]:
    """Returns the range of offsets `[start, end)` that a file is responsible for, and whether it
    holds every row between its bounds."""
    name = parse_written_path(file.path)
    if name is not None:
        return name.start, name.end, True
    whole = file.rows == file.max_offset - file.min_offset + 1
    return file.min_offset, file.max_offset + 1, whole


def held_by(file: DataFile) -> tuple[Offset, Offset]:
    """Returns the range of offsets `[start, end)` that a file is responsible for."""
    return span_of(file)[:2]


def is_whole(file: DataFile) -> bool:
    """Returns whether the file holds every row between its bounds."""
    return span_of(file)[2]
