"""Numbered records: made records are read back, and each demand is broken once."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import numbered
from numbered import Run

from pk.types import BatchMetadata


def test_numbers_are_read_back_from_any_slice() -> None:
    maker = numbered.Maker(100, first=7)
    first, second = maker.batch(), maker.batch()
    assert numbered.numbers_of(first.column(0)).tolist() == list(range(7, 107))
    assert numbered.numbers_of(second.column(0).slice(90)).tolist() == list(range(197, 207))
    assert numbered.numbers_of(first.column(0).slice(0, 0)).tolist() == []
    with pytest.raises(ValueError, match="100 bytes"):
        numbered.numbers_of(pa.array([b"short"], pa.binary()))


def test_rows_become_runs() -> None:
    runs: list[Run] = []
    numbered.add_rows(runs, np.arange(5), np.array([3, 4, 5, 20, 21]))
    numbered.add_rows(runs, np.arange(5, 7), np.array([22, 23]))
    numbered.add_rows(runs, np.arange(0), np.arange(0))
    assert runs == [Run(0, 3, 3), Run(3, 20, 4)]
    assert numbered.count({0: runs}) == 7


def test_a_batch_that_was_stored_in_parts_keeps_its_numbers() -> None:
    stored = [BatchMetadata("t", 2, 40, 60), BatchMetadata("t", 0, 8, 40)]
    found = list(numbered.acknowledged(stored, 1_000))
    assert found == [(2, Run(40, 1_000, 60)), (0, Run(8, 1_060, 40))]


def test_each_demand_is_told() -> None:
    read = {0: [Run(0, 100, 50), Run(50, 300, 50)], 1: [Run(0, 150, 50)]}
    acked = {0: [Run(0, 100, 50), Run(60, 310, 10)], 1: [Run(0, 150, 50)]}
    assert numbered.violations(acked, read, {}) == []
    assert "not read" in numbered.violations({0: [Run(95, 345, 10)]}, read, {})[0]
    assert "not read" in numbered.violations({0: [Run(0, 101, 5)]}, read, {})[0]
    assert "not read" in numbered.violations({2: [Run(0, 1, 5)]}, read, {})[0]
    assert "not read" in numbered.violations({0: [Run(40, 140, 20)]}, read, {})[0]
    gap = {0: [Run(0, 100, 50), Run(60, 310, 40)]}
    assert numbered.violations({}, gap, {}) == ["partition 0: offset 60 follows 49"]
    back = {0: [Run(0, 100, 50), Run(40, 140, 10)]}
    assert "offset 40 follows 49" in numbered.violations({}, back, {})[0]
    twice = {0: [Run(0, 100, 50)], 1: [Run(0, 149, 9)]}
    assert numbered.violations({}, twice, {}) == ["numbers from 149 on were read twice"]


def test_what_retention_took_is_no_gap() -> None:
    read, skipped = {0: [Run(0, 100, 50), Run(80, 180, 20)]}, {0: [(50, 80)]}
    assert numbered.violations({0: [Run(45, 145, 10)]}, read, skipped) == []
    assert numbered.violations({}, read, {0: [(50, 79)]}) != []
