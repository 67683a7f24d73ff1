"""Where rows that another engine removed may be missing (rule T17)."""

from __future__ import annotations

import pytest

from pk.tiering import accounting
from pk.tiering.data_files import DataFile
from pk.tiering.layout import DataName, PartitionCounters, data_path
from pk.tiering.table import Snapshot
from pk.types import NONE


def copied(start: int, end: int) -> DataFile:
    """Return a file made by the copier."""
    path = data_path(DataName(0, start, end, 0, "a" * 8, 0, 0))
    return DataFile(path, 0, start, end - 1, 0, 0, end - start, 100)


def rewritten(low: int, high: int, rows: int) -> DataFile:
    """Return a file made by another engine, with the bounds `[low, high]`."""
    return DataFile(f"partition=0/part-{low}-{high}.parquet", 0, low, high, 0, 0, rows, 100)


def table(files: list[DataFile], *, start: int = 0, end: int = 40) -> Snapshot:
    counters = PartitionCounters(start=start, end=end, rows=end, removed=start)
    return Snapshot(1, "id", {each.path: each for each in files}, {0: counters})


@pytest.mark.parametrize(
    ("files", "first"),
    [
        ([copied(0, 20), copied(20, 40)], NONE),
        ([copied(20, 40)], 0),
        ([copied(0, 20)], 20),
        ([copied(0, 10), copied(30, 40)], 10),
        ([copied(0, 10), rewritten(10, 29, 15), copied(30, 40)], 10),
        ([rewritten(0, 19, 20), copied(25, 40)], 20),
        ([rewritten(0, 39, 39)], 0),
        # A whole file answers for the first offsets of one that lacks rows.
        ([copied(0, 15), rewritten(10, 30, 11), copied(31, 40)], 15),
    ],
)
def test_no_row_is_missing_below_the_first(files: list[DataFile], first: int) -> None:
    assert accounting.first_missing(table(files), 0) == first


def test_what_left_with_retention_is_not_missing() -> None:
    """tiering/accounting N1, N4: the first file has rows below and above `:start`."""
    assert accounting.first_missing(table([copied(5, 20), copied(20, 40)], start=10), 0) == NONE
    assert accounting.first_missing(table([copied(5, 20), copied(30, 40)], start=10), 0) == 20
