"""The live files of a version of a table, in blocks of columns.

An owner keeps every live file of its tables in memory, and a reader keeps those of the version
that it reads.  As a `DataFile` with its numbers, its path and its place in a dict, a file takes 460
bytes, and a table whose files are never merged soon has 100,000 of them.  Therefore the files are
kept as columns of numbers and one text of all paths, in less than 200 bytes each.  A `DataFile` is
made when one is asked for.

The files of a partition are cut into blocks.  A version shares all blocks with the version before
it except those that its commit touches.

Invariants
  B1  A block never changes.  It has files of one partition, at least one and at most BLOCK_FILES.
  B2  The files of a partition are in the order of `by_offset`, within its blocks and across them.
  B3  A version has a path at most once.
"""

from __future__ import annotations

import bisect
import itertools
import re
import zlib
from collections.abc import Collection, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from types import MappingProxyType
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from pk.tiering.data_files import OFFSET_MAX, DataFile, by_offset, span_of
from pk.types import Offset

#: A commit rebuilds the blocks that it touches, which takes about 5 µs a file.
BLOCK_FILES = 256
#: The columns: the fields of `DataFile` behind `partition` in their order, and what follows from
#: them.
COLUMNS = np.dtype(
    [
        ("min_offset", "i8"),
        ("max_offset", "i8"),
        ("min_timestamp_ms", "i8"),
        ("max_timestamp_ms", "i8"),
        ("rows", "i8"),
        ("size", "i8"),
        ("stats", "?"),
        ("path_end", "u4"),  # where the path ends in the text of the block's paths
        ("path_crc", "u4"),  # by which the file is found
        ("start", "i8"),  # of `span_of`
        ("end", "i8"),
        ("whole", "?"),
    ]
)
_FIELDS = 7  #: those of `DataFile`; `path_end` is the next one
_DIRECTORY = re.compile(r"partition=(\d{1,10})/")

Columns = npt.NDArray[np.void]


class FileBlock:
    """Some files of one partition (B1).

    high: no file holds a later offset, by its statistics
    strange: whether a path does not begin with the Hive directory of the partition
    """

    __slots__ = ("columns", "high", "partition", "paths", "strange")

    def __init__(self, files: Sequence[DataFile]) -> None:
        self.partition = files[0].partition
        texts = [file.path.encode() for file in files]
        ends = itertools.accumulate(map(len, texts))
        rows = [_row(*each) for each in zip(files, texts, ends, strict=True)]
        self.columns: Columns = np.array(rows, COLUMNS)
        self.paths = b"".join(texts)
        self.high = max(file.max_offset for file in files)
        directory = f"partition={self.partition}/".encode()
        self.strange = not all(text.startswith(directory) for text in texts)

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[DataFile]:
        at = 0
        for row in self.columns.tolist():
            end = row[_FIELDS]
            yield DataFile(self.paths[at:end].decode(), self.partition, *row[:_FIELDS])
            at = end

    def __getitem__(self, row: int) -> DataFile:
        ends = self.columns["path_end"]
        path = self.paths[int(ends[row - 1]) if row else 0 : int(ends[row])]
        return DataFile(path.decode(), self.partition, *self.columns[row].item()[:_FIELDS])


def _row(file: DataFile, path: bytes, path_end: int) -> tuple[Any, ...]:
    start, end, whole = span_of(file)
    return (
        file.min_offset,
        file.max_offset,
        file.min_timestamp_ms,
        file.max_timestamp_ms,
        file.rows,
        file.size,
        file.stats,
        path_end,
        zlib.crc32(path),
        min(start, OFFSET_MAX),  # a damaged name may state more
        min(end, OFFSET_MAX),
        whole,
    )


class PartitionFiles(Sequence[DataFile]):
    """The files of one partition, by smallest offset (B2)."""

    __slots__ = ("_before", "_blocks", "_index", "strange")

    def __init__(self, blocks: Iterable[FileBlock] = ()) -> None:
        self._blocks = tuple(blocks)
        #: how many files lie before each block, and in all
        self._before = [0, *itertools.accumulate(map(len, self._blocks))]
        self._index: tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]] | None = None
        #: whether a path does not begin with the Hive directory of the partition
        self.strange = any(block.strange for block in self._blocks)

    @classmethod
    def of(cls, files: Iterable[DataFile]) -> PartitionFiles:
        return cls(_cut(sorted(files, key=by_offset)))

    def __len__(self) -> int:
        return self._before[-1]

    def __iter__(self) -> Iterator[DataFile]:
        for block in self._blocks:
            yield from block

    @overload
    def __getitem__(self, index: int) -> DataFile: ...
    @overload
    def __getitem__(self, index: slice) -> list[DataFile]: ...
    def __getitem__(self, index: int | slice) -> DataFile | list[DataFile]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(index)
        number = self._block_at(at)
        return self._blocks[number][at - self._before[number]]

    def _block_at(self, index: int) -> int:
        return bisect.bisect_right(self._before, index) - 1

    def find(self, path: str) -> int | None:
        """Returns the index of the file with this path; None = it is not here."""
        if self._index is None:
            crcs = self.columns()["path_crc"]
            order = np.argsort(crcs, kind="stable")
            self._index = crcs[order], order
        crcs, order = self._index
        crc = np.uint32(zlib.crc32(path.encode()))
        first, last = (int(np.searchsorted(crcs, crc, side)) for side in ("left", "right"))
        for at in order[first:last].tolist():
            if self[at].path == path:
                return int(at)
        return None

    @property
    def bytes(self) -> int:
        return sum(int(block.columns["size"].sum()) for block in self._blocks)

    def columns(self, first: Offset | None = None) -> Columns:
        """Returns the columns of all files; with `first`, of those that may hold offsets from
        there on."""
        found = [block.columns for block in self._blocks]
        if first is not None:
            found = [_since(columns, first) for columns in found]
        # np.concatenate copies the fields of each row one by one, which takes five times as long
        return np.frombuffer(b"".join(each.data for each in found), COLUMNS)

    def covering(self, start: Offset, end: Offset) -> list[DataFile]:
        """Returns the files that may hold offsets of `[start, end)`."""
        found: list[DataFile] = []
        for block in self._blocks:
            columns = block.columns
            if columns["min_offset"][0] >= end:
                break  # B2
            if block.high >= start:
                fits = (columns["min_offset"] < end) & (columns["max_offset"] >= start)
                found += [block[row] for row in np.flatnonzero(fits).tolist()]
        return found

    def below(self, offset: Offset) -> Iterator[DataFile]:
        """Returns the files that hold no offset from `offset` on."""
        for block in self._blocks:
            for row in np.flatnonzero(block.columns["max_offset"] < offset).tolist():
                yield block[row]

    def live(self, start: Offset) -> Iterator[DataFile]:
        """Returns the files that may hold offsets from `start` on."""
        for block in self._blocks:
            if block.high >= start:
                yield from (file for file in block if file.max_offset >= start)

    def changed(self, gone: Collection[str], new: Iterable[DataFile]) -> PartitionFiles:
        """Returns these files without the paths of `gone`, all of which are here, and with `new`,
        none of whose paths is left."""
        more: dict[int, list[DataFile]] = {}
        for path in gone:
            index = self.find(path)
            assert index is not None, path
            more.setdefault(self._block_at(index), [])
        for file in new:
            at = bisect.bisect_right(self._blocks, by_offset(file), key=_first)
            more.setdefault(max(0, at - 1), []).append(file)
        blocks: list[FileBlock] = []
        for number, block in enumerate(self._blocks):
            if number in more:
                kept = [file for file in block if file.path not in gone]
                blocks += _cut(sorted(kept + more[number], key=by_offset))
            else:
                blocks.append(block)
        if not self._blocks:
            blocks += _cut(sorted(more.get(0, []), key=by_offset))
        return PartitionFiles(_joined(blocks))


def _since(columns: Columns, first: Offset) -> Columns:
    live = columns["max_offset"] >= first
    return columns if live.all() else columns[live]


def _first(block: FileBlock) -> tuple[Offset, Offset, str]:
    return by_offset(block[0])


def _cut(files: Iterable[DataFile]) -> Iterator[FileBlock]:
    """Returns blocks of the files of one partition, which come in order (B2)."""
    left = iter(files)
    while some := list(itertools.islice(left, BLOCK_FILES)):
        yield FileBlock(some)


def _joined(blocks: Iterable[FileBlock]) -> Iterator[FileBlock]:
    """Joins neighbours that have few files: after many removals there would be a block a file."""
    last: FileBlock | None = None
    for block in blocks:
        if last is not None and len(last) + len(block) <= BLOCK_FILES // 2:
            last = FileBlock([*last, *block])
            continue
        if last is not None:
            yield last
        last = block
    if last is not None:
        yield last


class LiveFiles(Mapping[str, DataFile]):
    """The files of a version of a table by path; those of a partition come by smallest offset."""

    __slots__ = ("_count", "_strange", "partitions")

    def __init__(self, partitions: Mapping[int, PartitionFiles] = MappingProxyType({})) -> None:
        self.partitions = partitions  #: those that have files
        self._count = sum(map(len, partitions.values()))
        #: a path that begins with the directory of one partition may lie in these, too
        self._strange = tuple(each for each, files in partitions.items() if files.strange)

    @classmethod
    def of(cls, files: Iterable[DataFile]) -> LiveFiles:
        """Returns the files; of those with the same path the last one (B3)."""
        return LiveFiles().after((), files)

    @classmethod
    def ordered(cls, files: Iterable[DataFile]) -> LiveFiles:
        """Returns the files, which come by partition and then by `by_offset` (B2), each once
        (B3)."""
        groups = itertools.groupby(files, key=lambda file: file.partition)
        return cls({partition: PartitionFiles(_cut(some)) for partition, some in groups})

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return (file.path for file in self.values())

    def __getitem__(self, path: str) -> DataFile:
        found = self._find(path)
        if found is None:
            raise KeyError(path)
        return found

    def __contains__(self, path: object) -> bool:
        return isinstance(path, str) and self._find(path) is not None

    def values(self) -> ValuesView[DataFile]:
        return _Values(self)

    def items(self) -> ItemsView[str, DataFile]:
        return _Items(self)

    def _find(self, path: str) -> DataFile | None:
        match = _DIRECTORY.match(path)
        own = () if match is None else (int(match[1]),)
        for partition in (*own, *self._strange):
            files = self.partitions.get(partition)
            at = None if files is None else files.find(path)
            if files is not None and at is not None:
                return files[at]
        return None

    def after(self, removes: Iterable[str], adds: Iterable[DataFile]) -> LiveFiles:
        """Returns these files without the paths of `removes`, and with `adds`; an added file
        replaces one with the same path.  Raises `KeyError` for a path that is not here."""
        gone: dict[int, dict[str, None]] = {}
        new: dict[int, list[DataFile]] = {}
        for path in removes:
            gone.setdefault(self[path].partition, {})[path] = None
        for path, file in {file.path: file for file in adds}.items():
            before = self._find(path)
            if before is not None:
                gone.setdefault(before.partition, {})[path] = None
            new.setdefault(file.partition, []).append(file)
        partitions = dict(self.partitions)
        for partition in {**gone, **new}:
            files = partitions.get(partition, PartitionFiles())
            partitions[partition] = files.changed(gone.get(partition, {}), new.get(partition, ()))
            if not partitions[partition]:
                del partitions[partition]
        return LiveFiles(partitions)


class _Values(ValuesView[DataFile]):
    _mapping: LiveFiles

    def __iter__(self) -> Iterator[DataFile]:
        for files in self._mapping.partitions.values():
            yield from files


class _Items(ItemsView[str, DataFile]):
    _mapping: LiveFiles

    def __iter__(self) -> Iterator[tuple[str, DataFile]]:
        return ((file.path, file) for file in self._mapping.values())
