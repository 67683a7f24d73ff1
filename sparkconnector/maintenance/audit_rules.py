"""Judges what an audit read of one partition.  Pure.

The audit reads every row group of one version, without pruning.  A partition is damaged if

    a file cannot be read, or its rows or row sum are not those that its name or the log states
    an offset is in the table twice, or lies at or above the table's end
    the rows of the live files are not rows - removed (rule T17)
    their row sums are not sum - removed_sum (rule T2)
    the local log has other committed rows in the range that both hold

A comparison that is not possible is a note, never damage: an earlier build did not sum the rows
that it removed, or the local log moved on during the audit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pk.tiering import accounting
from pk.tiering.data_files import DataFile
from pk.tiering.layout import SUM_MODULUS, PartitionCounters, parse_job_path, parse_written_path
from pk.tiering.live_files import PartitionFiles
from pk.types import Offset

#: Problems that a report names of one partition; the others are counted.
NAMED_MAX = 20


class FileFacts(NamedTuple):
    """What was read of one file; `error`: why it could not be read."""

    path: str
    rows: int = 0
    row_sum: int = 0
    least: Offset = 0
    most: Offset = -1
    error: str = ""


class ClusterFacts(NamedTuple):
    """What was read of files whose offsets overlap."""

    files: tuple[FileFacts, ...]
    repeated: int  #: rows beyond the first one of their offset
    common_rows: int = 0  #: rows in the range that is compared with the local log
    common_sum: int = 0


class LogFacts(NamedTuple):
    """What the local log holds in `[start, end)`; `error`: why that is unknown."""

    start: Offset
    end: Offset
    rows: int = 0
    row_sum: int = 0
    error: str = ""


class Judgement(NamedTuple):
    """The result for one partition."""

    partition: int
    files: int
    rows: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        return "damaged" if self.problems else "ok"


def live_files(files: Iterable[DataFile], counters: PartitionCounters) -> list[DataFile]:
    """Return the files whose rows count; those wholly below the start wait for their removal."""
    return [file for file in files if file.max_offset >= counters.start]


def common(
    counters: PartitionCounters,
    files: Sequence[DataFile],
    local_start: Offset | None,
    *,
    compacted: bool,
) -> tuple[Offset, Offset]:
    """Return the range in which table and local log have the same rows; empty if there is none.

    A compaction removes rows from the table only.  One that was killed may have removed rows above
    `cleaned`; its files say where.
    """
    if local_start is None:
        return 0, 0
    start = max(local_start, counters.start)
    if compacted or counters.cleaned:
        jobs = (parse_job_path(file.path) for file in files)
        start = max([start, counters.cleaned, *(name.end for name in jobs if name is not None)])
    return (start, counters.end) if start < counters.end else (0, 0)


def clusters(files: Sequence[DataFile]) -> list[list[DataFile]]:
    """Return lists of files whose offsets overlap, in order.  Usually each has one file."""
    found: list[list[DataFile]] = []
    most = -1
    for file in sorted(files, key=lambda f: (f.min_offset, f.max_offset, f.path)):
        if not found or file.min_offset > most:
            found.append([])
        found[-1].append(file)
        most = max(most, file.max_offset)
    return found


def judge(
    partition: int,
    counters: PartitionCounters,
    files: Sequence[DataFile],
    read: Sequence[ClusterFacts],
    log: LogFacts | None,
) -> Judgement:
    """Compare what was read of the live `files` with the log of the table and with the local log;
    `log` None = the two have no offset in common."""
    facts = {each.path: each for cluster in read for each in cluster.files}
    problems = [each for file in files for each in _of_file(file, facts.get(file.path))]
    notes: list[str] = []
    repeated = sum(cluster.repeated for cluster in read)
    if repeated:
        problems.append(f"{repeated} rows have an offset that another row has, too")
    above = [each.path for each in facts.values() if each.most >= counters.end]
    problems += [f"{path} has offsets at or above the end {counters.end}" for path in above]
    whole = not any(each.error for each in facts.values())
    _count(counters, files, problems, notes)
    if whole and not problems:
        _sum(counters, facts.values(), problems, notes)
    if log is not None and whole:
        _compare(log, read, problems, notes)
    rows = sum(each.rows for each in facts.values())
    return Judgement(partition, len(files), rows, _bounded(problems), tuple(notes))


def _of_file(file: DataFile, facts: FileFacts | None) -> list[str]:
    if facts is None:
        return [f"{file.path} was not read"]
    if facts.error:
        return [facts.error]
    found = []
    if file.rows and facts.rows != file.rows:
        found.append(f"{file.path} has {facts.rows} rows, the table's log says {file.rows}")
    name = parse_written_path(file.path)
    if name is not None and name.row_sum != facts.row_sum:
        found.append(f"{file.path} has the row sum {facts.row_sum:016x}")
    if not file.min_offset <= facts.least <= facts.most <= file.max_offset:
        found.append(
            f"{file.path} has offsets {facts.least} to {facts.most}, the table's log says "
            f"{file.min_offset} to {file.max_offset}"
        )
    return found


def _count(
    counters: PartitionCounters, files: Sequence[DataFile], problems: list[str], notes: list[str]
) -> None:
    balance = accounting.account(PartitionFiles.of(files), counters)
    if balance is None:
        notes.append("rows are not counted: the log does not state the rows of every file")
    elif balance.settles:
        notes.append(f"{-balance.missing} rows below the start are counted by the next commit")
    elif balance.missing > 0:
        problems.append(f"{balance.missing} rows are missing (pk tier describe)")
    elif balance.missing < 0:
        problems.append(f"{-balance.missing} rows more than pk has written")


def _sum(
    counters: PartitionCounters, facts: Iterable[FileFacts], problems: list[str], notes: list[str]
) -> None:
    if notes:
        return  # the rows are not settled yet
    if counters.removed and not counters.removed_sum:
        notes.append("row sums are not compared: an earlier build removed rows without their sum")
        return
    found = sum(each.row_sum for each in facts) % SUM_MODULUS
    wanted = (counters.sum - counters.removed_sum) % SUM_MODULUS
    if found != wanted:
        problems.append(f"the row sum is {found:016x}, the counters say {wanted:016x}")


def _compare(
    log: LogFacts, read: Sequence[ClusterFacts], problems: list[str], notes: list[str]
) -> None:
    if log.error:
        notes.append(f"the local log was not compared: {log.error}")
        return
    rows = sum(each.common_rows for each in read)
    total = sum(each.common_sum for each in read) % SUM_MODULUS
    if (rows, total) != (log.rows, log.row_sum):
        problems.append(
            f"offsets [{log.start}, {log.end}): the local log has {log.rows} rows with the sum "
            f"{log.row_sum:016x}, the table {rows} with {total:016x}"
        )


def _bounded(problems: Sequence[str]) -> tuple[str, ...]:
    more = len(problems) - NAMED_MAX
    return (*problems[:NAMED_MAX], *((f"and {more} more",) if more > 0 else ()))
