"""Missing or damaged data files of a table: how an error names them, and which are known.

A file is known as damaged from the read that finds it until the table no longer names it (it was
repaired, or retention removed it) or a later check finds it whole (an operator restored it).  The
list lives as long as its process; after a restart, the next read of the file finds the damage
again.

Invariants
  J1  The list is bounded; a file that does not fit is found again once there is room.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from pk import errors
from pk.tiering.data_files import DataFile
from pk.tiering.footers import Listed
from pk.tiering.layout import parse_data_path, parse_written_path
from pk.types import Offset
from pk.wire import pk_pb2 as wire

#: Maximum number of damaged files that are remembered per table (J1).
KNOWN_MAX = 1_000


def range_of(file: Listed) -> tuple[Offset, Offset]:
    """Returns the offsets that a file is responsible for: from its name, or else from its
    statistics."""
    name = parse_written_path(file.path)
    if name is not None:
        return name.start, name.end
    return file.min_offset, file.max_offset + 1


def damaged(uri: str, file: Listed, partition: int, why: str) -> errors.DamagedTierFile:
    """Returns the error that names a file of the table at `uri`, its offsets, and who must act."""
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
    """Returns whether a file made from the local log has the rows of the file that it replaces."""
    name = parse_data_path(lost.path)
    return name is not None and (lost.rows or add.rows, name.row_sum) == (add.rows, add.row_sum)


class DamagedFile(NamedTuple):
    """A file of a snapshot, and the error found in it."""

    file: DataFile
    error: errors.DamagedTierFile


class DamagedFiles:
    """The known damaged files of one topic's table."""

    def __init__(self) -> None:
        self._known: dict[str, DamagedFile] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, path: str) -> bool:
        return path in self._known

    def note(self, file: DataFile, error: errors.DamagedTierFile) -> None:
        """Notes a file that a read found damaged."""
        if len(self._known) < KNOWN_MAX or file.path in self._known:
            # the stack frames of the cause must not be kept in memory
            error.__cause__ = error.__context__ = None
            self._known.pop(file.path, None)  # move it to the end of the order of `next`
            self._known[file.path] = DamagedFile(file, error.with_traceback(None))

    def whole(self, file: DataFile) -> None:
        """Removes a file that a later check found whole."""
        self._known.pop(file.path, None)

    def keep(self, named: Container[str]) -> list[int]:
        """Forgets files that the table does not name; returns the partitions of the forgotten
        files."""
        gone = [file for file, _ in self._known.values() if file.path not in named]
        for file in gone:
            del self._known[file.path]
        return sorted({file.partition for file in gone})

    def of(self, partition: int) -> list[DamagedFile]:
        """Returns the damaged files of a partition in the order of their paths, which is the order
        of their offsets."""
        return [each for each in self.all() if each.file.partition == partition]

    def next(self, count: int) -> list[DamagedFile]:
        """Returns the files that were noted longest ago."""
        return list(self._known.values())[:count]

    def all(self) -> list[DamagedFile]:
        return [self._known[path] for path in sorted(self._known)]
