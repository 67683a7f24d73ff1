"""Data files of a table that are missing or damaged: how an error names them, and which are known.

A file is known as damaged from the read that met it until the table does not name it any more (it
was repaired, or retention removed it) or a later look finds all of it whole (an operator restored
it).  What is known lives as long as its process; the next read of the file finds it again.

Invariants
  J1  the list is bounded; what does not fit is found again once there is room.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from pk import errors
from pk.tiering.data_files import DataFile
from pk.tiering.footers import Listed
from pk.tiering.layout import parse_data_path
from pk.types import Offset
from pk.wire import pk_pb2 as wire

#: Damaged files that are remembered of one table (J1).
KNOWN_MAX = 1_000


def range_of(file: Listed) -> tuple[Offset, Offset]:
    """The offsets that a file is responsible for: its name's, else those of its statistics."""
    name = parse_data_path(file.path)
    if name is not None:
        return name.start, name.end
    return file.min_offset, file.max_offset + 1


def damaged(uri: str, file: Listed, partition: int, why: str) -> errors.DamagedTierFile:
    """The error that names a file of the table at `uri`, its offsets, and who must act."""
    start, end = range_of(file)
    return errors.DamagedTierFile(
        f"{uri}/{file.path}: {why}; offsets [{start}, {end}) of partition {partition} cannot be "
        "read. pk uploads the file again where the local log still has its records; otherwise "
        "restore the file in the store",
        path=file.path,
        partition=str(partition),
        start=str(start),
        end=str(end),
    )


def holds_the_same(lost: DataFile, add: wire.AddFile) -> bool:
    """Whether a file made from the local log has the rows of the file that it replaces."""
    name = parse_data_path(lost.path)
    return name is not None and (lost.rows or add.rows, name.row_sum) == (add.rows, add.row_sum)


class DamagedFile(NamedTuple):
    """A file of a snapshot, and what was found."""

    file: DataFile
    error: errors.DamagedTierFile


class DamagedFiles:
    """What is known of one topic's table."""

    def __init__(self) -> None:
        self._known: dict[str, DamagedFile] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, path: str) -> bool:
        return path in self._known

    def note(self, file: DataFile, error: errors.DamagedTierFile) -> None:
        """A read met it."""
        if len(self._known) < KNOWN_MAX or file.path in self._known:
            error.__cause__ = error.__context__ = None  # what it was raised from must not stay
            self._known.pop(file.path, None)  # the last one of `next` from now on
            self._known[file.path] = DamagedFile(file, error.with_traceback(None))

    def whole(self, file: DataFile) -> None:
        """A later look found it whole."""
        self._known.pop(file.path, None)

    def keep(self, named: Container[str]) -> list[int]:
        """Forget what the table does not name; the partitions of what was forgotten."""
        gone = [file for file, _ in self._known.values() if file.path not in named]
        for file in gone:
            del self._known[file.path]
        return sorted({file.partition for file in gone})

    def of(self, partition: int) -> list[DamagedFile]:
        """Those of a partition, by path, hence by offset."""
        return [each for each in self.all() if each.file.partition == partition]

    def next(self, count: int) -> list[DamagedFile]:
        """Those that were noted longest ago."""
        return list(self._known.values())[:count]

    def all(self) -> list[DamagedFile]:
        return [self._known[path] for path in sorted(self._known)]
