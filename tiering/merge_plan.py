"""Chooses small files of a partition that its tier process merges.  Pure.

A quiet topic makes one file for each partition and `tier_max_lag_ms`.  The owner's process merges
them in two steps: RUN_FILES files of the copier become a file of generation 1, and RUN_FILES of
those become one of generation 2, which stays.  So n tiny files become n / RUN_FILES² and less than
2 · RUN_FILES, and each byte is rewritten at most twice.

Invariants
  N1  The files of a run adjoin, are whole, and are of one generation.  The copier or a merge wrote
      them; the name of the result is one of the copier's (layout N2), too, so that a lost one is
      copied again from the local log.
  N2  Nothing is merged in a partition that a compaction has cleaned: the local log has rows that
      the table no longer has (rule C6).
  N3  A byte is rewritten at most GENERATIONS times.
"""

from __future__ import annotations

from typing import NamedTuple

from pk.tiering.data_files import DataFile
from pk.tiering.layout import parse_data_path
from pk.tiering.table import Snapshot
from pk.types import Epoch, Offset

#: Files that become one.
RUN_FILES = 16
GENERATIONS = 2
#: The attempt in the name of a merged file begins with this and its generation; those of the
#: copier are hexadecimal.
_MARK = "m"


class SmallFileRun(NamedTuple):
    """Files to merge into one that holds `[start, end)`."""

    partition: int
    start: Offset
    end: Offset
    epoch: Epoch  #: the highest leader epoch in the files' names
    generation: int  #: of the result
    files: tuple[DataFile, ...]


def attempt_of(generation: int, fresh: str) -> str:
    """Returns the attempt in the name of a merged file; `fresh`: a new id without dashes."""
    return f"{_MARK}{generation}{fresh[:14]}"


def generation_of(attempt: str) -> int:
    """Returns how often the rows of a file were merged."""
    marked = attempt.startswith(_MARK) and attempt[1:2].isdigit()
    return int(attempt[1]) if marked else 0


def plan(
    snapshot: Snapshot,
    partition: int,
    small_bytes: int,
    file_bytes: int,
    run_files: int = RUN_FILES,
) -> SmallFileRun | None:
    """Returns the next run of a partition to merge; None = there is none.

    small_bytes: larger files are left alone; 0 = all are
    file_bytes: a run ends once it has this many bytes
    """
    counters = snapshot.partition(partition)
    if counters.cleaned:
        return None  # N2
    run: list[DataFile] = []
    size = 0
    at, generation, epoch = -1, -1, -1
    for file in snapshot.files_of(partition):
        name = parse_data_path(file.path)
        fits = name is not None and file.size < small_bytes and file.min_offset >= counters.start
        if name is None or not fits or generation_of(name.attempt) >= GENERATIONS:
            run, size = [], 0
            continue
        if name.start != at or generation_of(name.attempt) != generation:
            run, size, epoch = [], 0, -1
        generation, at = generation_of(name.attempt), name.end
        epoch = max(epoch, name.epoch)
        run.append(file)
        size += file.size
        if len(run) >= run_files or (len(run) > 1 and size >= file_bytes):
            first = parse_data_path(run[0].path)
            assert first is not None
            return SmallFileRun(partition, first.start, at, epoch, generation + 1, tuple(run))
    return None
