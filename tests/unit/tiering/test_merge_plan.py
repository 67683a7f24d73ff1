"""Which small files a tier process merges, and how often a byte is rewritten."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pk.tiering import layout
from pk.tiering.data_files import DataFile
from pk.tiering.layout import DataName, PartitionCounters
from pk.tiering.merge_plan import (
    GENERATIONS,
    RUN_FILES,
    SmallFileRun,
    attempt_of,
    generation_of,
    plan,
)
from pk.tiering.table import Snapshot

SMALL, LARGE = 1_000, 10_000


def data(start: int, end: int, size: int = 10, attempt: str = "a", epoch: int = 0) -> DataFile:
    path = layout.data_path(DataName(0, start, end, epoch, attempt, 0, 0))
    return DataFile(path, 0, start, end - 1, 0, 0, end - start, size)


def table(files: list[DataFile], **counters: int) -> Snapshot:
    return Snapshot(1, "id", {f.path: f for f in files}, {0: PartitionCounters(**counters)})


def row(count: int, size: int = 10) -> list[DataFile]:
    return [data(10 * n, 10 * n + 10, size) for n in range(count)]


def planned(files: list[DataFile], **counters: int) -> SmallFileRun | None:
    return plan(table(files, **counters), 0, SMALL, LARGE)


def test_a_run_of_adjoining_files_is_merged() -> None:
    run = planned(row(RUN_FILES + 3))
    assert run is not None
    assert (run.start, run.end, len(run.files)) == (0, 10 * RUN_FILES, RUN_FILES)
    assert planned(row(RUN_FILES - 1)) is None


def test_the_newest_epoch_is_in_the_name() -> None:
    """An older leader's repair of the file is then refused like that of the newest one."""
    files = [data(10 * n, 10 * n + 10, epoch=n % 5) for n in range(RUN_FILES)]
    run = planned(files)
    assert run is not None
    assert run.epoch == 4


@pytest.mark.parametrize(
    ("at", "other"),
    [
        (8, data(81, 90)),  # a gap before it: rows may be missing there (T17)
        (8, data(80, 90, SMALL)),
        (8, data(80, 90, attempt=attempt_of(1, "0"))),
        (8, DataFile("partition=0/part-1.parquet", 0, 80, 89, 0, 0, 10, 10)),
        (8, DataFile(layout.job_path(DataName(0, 80, 90, -1, "a", 0, 0)), 0, 80, 89, 0, 0, 10, 10)),
    ],
    ids=["gap", "large", "merged before", "another engine's", "a job's"],
)
def test_a_run_ends_at_a_file_that_does_not_fit(at: int, other: DataFile) -> None:
    files = row(RUN_FILES)
    files[at] = other
    assert planned(files) is None


def test_files_below_the_start_are_left_to_retention() -> None:
    run = planned(row(RUN_FILES + 1), start=10)
    assert run is not None
    assert run.start == 10
    assert planned(row(RUN_FILES), start=10) is None


def test_nothing_is_merged_where_a_compaction_has_cleaned() -> None:
    """C6: the merged file would be copied again from a local log that has other rows."""
    assert planned(row(RUN_FILES), cleaned=5) is None


def test_a_run_ends_at_the_bytes_of_a_file() -> None:
    run = planned(row(RUN_FILES, 999))
    assert run is not None
    assert len(run.files) == 11


def test_the_generation_is_in_the_name() -> None:
    assert generation_of(attempt_of(2, "0123456789abcdef")) == 2
    assert generation_of("0123456789abcdef") == 0


@given(st.integers(0, 700), st.integers(1, 60))
def test_a_quiet_topic_ends_with_few_files_and_each_byte_is_rewritten_twice_at_most(
    count: int, size: int
) -> None:
    """300 k records at 2 s lag made 392 files of 7.7 KB; they end as fewer than 20, and 32 at
    most."""
    files: list[DataFile] = []
    rewritten = merges = 0
    for n in range(count):
        files.append(data(10 * n, 10 * n + 10, size))
        while (run := planned(files)) is not None:
            merges += 1
            merged = data(
                run.start, run.end, sum(f.size for f in run.files),
                attempt_of(run.generation, f"{merges:x}"),
            )  # fmt: skip
            rewritten += merged.size
            files = sorted([f for f in files if f not in run.files] + [merged],
                           key=lambda f: f.min_offset)  # fmt: skip
    assert rewritten <= GENERATIONS * count * size
    assert len(files) <= 2 * (RUN_FILES - 1) + count // RUN_FILES**2
    assert count != 392 or len(files) < 20
    assert sum(f.rows for f in files) == 10 * count
