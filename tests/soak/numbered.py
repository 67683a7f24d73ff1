"""Records with numbers at a few nanoseconds each, and what became of them.  Pure.

A value is 100 bytes, of which the first eight are the record's number.  Numbers and offsets go up
by one within a batch, so that a whole batch is one run: kept are `(offset, number, count)`, never
single records.

Demands
  N1  a consumer reads every partition without a gap and without going back; what retention removed
      before it came is no gap, but is counted
  N2  an acknowledged batch is read at the offsets that it was acknowledged for
  N3  no number is read twice
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

VALUE_BYTES = 100
NUMBER_BYTES = 8
KINDS = 16
#: Numbers of different producers do not meet.
APART = 1 << 40


class Run(NamedTuple):
    """Records of one partition whose offsets and numbers grow together."""

    offset: int
    number: int
    count: int


class Maker:
    """Makes batches of numbered values; the other bytes are random, so that they do not
    compress.
    """

    def __init__(self, records: int, first: int) -> None:
        rng = np.random.default_rng(1)
        shape = (records, VALUE_BYTES)
        self._kinds = [rng.integers(0, 256, shape, np.uint8) for _ in range(KINDS)]
        self._offsets = pa.py_buffer(np.arange(records + 1, dtype=np.int32) * VALUE_BYTES)
        self._records = records
        self.next = first

    def batch(self) -> pa.RecordBatch:
        """Return a batch with the next numbers, in memory of its own."""
        data = self._kinds[self.next // self._records % KINDS].copy()
        numbers = np.arange(self.next, self.next + self._records, dtype=">i8")
        data[:, :NUMBER_BYTES] = numbers.view(np.uint8).reshape(-1, NUMBER_BYTES)
        self.next += self._records
        buffers = [None, self._offsets, pa.py_buffer(data)]
        values = pa.Array.from_buffers(pa.binary(), self._records, buffers)
        return pa.RecordBatch.from_arrays([values], names=["value"])


def numbers_of(values: pa.Array) -> Any:
    """Return the numbers of these values as an array.  Raises ValueError if they are not
    numbered.
    """
    if not len(values):
        return np.empty(0, np.int64)
    values = values.cast(pa.binary())
    _, offsets, data = values.buffers()
    bounds = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1]
    if np.any(np.diff(bounds) != VALUE_BYTES):
        raise ValueError(f"a value is not {VALUE_BYTES} bytes long")
    raw = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]].reshape(-1, VALUE_BYTES)
    return raw[:, :NUMBER_BYTES].copy().view(">i8").reshape(-1).astype(np.int64)


def add_run(runs: list[Run], run: Run) -> None:
    """Append a run, joined with the last one if it continues that."""
    if runs:
        last = runs[-1]
        ends = (last.offset + last.count, last.number + last.count)
        if ends == (run.offset, run.number):
            runs[-1] = Run(last.offset, last.number, last.count + run.count)
            return
    runs.append(run)


def add_rows(runs: list[Run], offsets: Any, numbers: Any) -> None:
    """Append rows as they were read."""
    if not len(offsets):
        return
    breaks = np.flatnonzero((np.diff(offsets) != 1) | (np.diff(numbers) != 1)) + 1
    starts = [0, *breaks.tolist()]
    for start, end in zip(starts, [*starts[1:], len(offsets)], strict=True):
        add_run(runs, Run(int(offsets[start]), int(numbers[start]), end - start))


def acknowledged(stored: Iterable[Any], first: int) -> Iterable[tuple[int, Run]]:
    """Return `(partition, run)` of a batch that begins with number `first`, from
    `BatchMetadata`.
    """
    for part in stored:
        yield part.partition, Run(part.base_offset, first, part.record_count)
        first += part.record_count


def violations(
    acked: Mapping[int, Sequence[Run]],
    read: Mapping[int, Sequence[Run]],
    skipped: Mapping[int, Sequence[tuple[int, int]]],
) -> list[str]:
    """Return what breaks N1 to N3; `skipped` are the ranges that retention removed before the
    consumer.
    """
    found: list[str] = []
    for partition, runs in sorted(read.items()):
        gone = dict(skipped.get(partition, ()))
        expected = 0
        for run in runs:
            expected = gone.get(expected, expected)
            if run.offset != expected:
                found.append(f"partition {partition}: offset {run.offset} follows {expected - 1}")
            expected = run.offset + run.count
    for partition, runs in sorted(acked.items()):
        rows = read.get(partition, ())
        gone = skipped.get(partition, ())
        found += [
            f"partition {partition}: acknowledged and not read: {run}"
            for run in runs
            if not _holds(rows, run)
            and not any(begin < run.offset + run.count and run.offset < end for begin, end in gone)
        ]
    return found + _twice(read)


def _holds(runs: Sequence[Run], wanted: Run) -> bool:
    place = bisect_right(runs, wanted.offset, key=lambda run: run.offset) - 1
    if place < 0:
        return False
    run = runs[place]
    inside = wanted.offset + wanted.count <= run.offset + run.count
    return inside and run.number - run.offset == wanted.number - wanted.offset


def _twice(read: Mapping[int, Sequence[Run]]) -> list[str]:
    found: list[str] = []
    begun = sorted((run.number, run.count) for runs in read.values() for run in runs)
    end = -1
    for number, count in begun:
        if number < end:
            found.append(f"numbers from {number} on were read twice")
        end = max(end, number + count)
    return found


def count(runs: Mapping[int, Sequence[Run]]) -> int:
    """Return the number of records."""
    return sum(run.count for each in runs.values() for run in each)
