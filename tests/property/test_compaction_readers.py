"""Readers that read slowly, from several copies, while the copies are cleaned (rule C4).

A reader that is at most `RETENTION_MS` behind when it reaches the end has the latest value of each
key: it has seen the tombstone of every key that it holds.  A cleaning takes time.  Until it is
done, the copy serves the older records.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pk.compaction import retain
from pk.compaction.offset_map import OffsetMap
from pk.compaction.retain import NO_HORIZON, Cleaning, LiveProducers
from pk.log import batch as batches
from pk.types import NONE
from tests.kit.compacted_log import HASH, RETENTION_MS, ROOMY, Batch, Record, cleaned, header

COPIES = 3
LIVE = LiveProducers.of([])


class Reader:
    """A consumer that keeps the newest value of each key."""

    def __init__(self) -> None:
        self.position = 0
        self.since_ms = 0  #: when it was at the end, or began, for the last time
        self.values: dict[bytes | None, bytes] = {}

    def begin(self, now_ms: int) -> None:
        self.position, self.values, self.since_ms = 0, {}, now_ms

    def take(self, records: list[Record], position: int) -> None:
        for record in records:
            if record.value is None:
                self.values.pop(record.key, None)
            else:
                self.values[record.key] = record.value
        self.position = position

    def check(self, every: list[Record], now_ms: int) -> None:
        if self.position < len(every):
            return
        if now_ms - self.since_ms > RETENTION_MS:
            self.begin(now_ms)  # it was too slow
            return
        latest = {record.key: record.value for record in every}
        assert self.values == {k: v for k, v in latest.items() if v is not None}
        self.since_ms = now_ms


class Cluster:
    """Records, the time, readers, and cleanings that are under way."""

    def __init__(self) -> None:
        self.every: list[Record] = []
        self.now_ms = 1000
        self.readers = [Reader() for _ in range(2)]
        self.running: dict[int, tuple[int, Any]] = {}  #: copy → when it is done, its result
        for reader in self.readers:
            reader.since_ms = self.now_ms

    def append(self, rows: list[tuple[bytes, bytes | None]]) -> None:
        raise NotImplementedError

    def clean(self, copy: int, delay_ms: int) -> Any:
        """Return the cleaned copy."""
        raise NotImplementedError

    def put_in_place(self, copy: int, result: Any) -> None:
        raise NotImplementedError

    def read(self, copy: int, reader: Reader, count: int) -> None:
        raise NotImplementedError

    def step(self, kind: str, first: Any, second: Any) -> None:
        """Do one step of a drawn history."""
        if kind == "append":
            self.append(first)
        elif kind == "wait":
            self.now_ms += first
        elif kind == "clean":
            if first not in self.running:
                delay, took = second
                result = self.clean(first, delay)
                self.running[first] = (self.now_ms + min(took, delay), result)
        elif kind == "begin":
            self.readers[second % len(self.readers)].begin(self.now_ms)
        else:
            reader = self.readers[second % len(self.readers)]
            self.read(first, reader, second)
            reader.check(self.every, self.now_ms)
        for copy, (done_ms, result) in list(self.running.items()):
            if done_ms <= self.now_ms:
                del self.running[copy]
                self.put_in_place(copy, result)


class Replicas(Cluster):
    """Three replicas, each of which cleans its own log and knows the cleaned ends of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[list[Batch]] = [[] for _ in range(COPIES)]
        self.cleaned_ends = [0] * COPIES

    def append(self, rows: list[tuple[bytes, bytes | None]]) -> None:
        base = len(self.every)
        records = tuple(Record(base + n, *row) for n, row in enumerate(rows))
        made = header(base, len(rows), batches.KEY | batches.VALUE, NONE, NONE, NONE)
        self.every += records
        for log in self.logs:
            log.append(Batch(made, records))

    def clean(self, copy: int, delay_ms: int) -> Any:
        others = [end for n, end in enumerate(self.cleaned_ends) if n != copy]
        wanted = Cleaning(
            len(self.every), min(others), RETENTION_MS, self.now_ms, self.now_ms + delay_ms
        )
        return cleaned(self.logs[copy], self.cleaned_ends[copy], wanted, LIVE, [], block=50)

    def put_in_place(self, copy: int, result: Any) -> None:
        log, cleaning = result
        tail = [b for b in self.logs[copy] if b.header.base_offset >= cleaning.end]
        self.logs[copy] = [*log, *tail]
        self.cleaned_ends[copy] = cleaning.end

    def read(self, copy: int, reader: Reader, count: int) -> None:
        behind = [b for b in self.logs[copy] if b.header.next_offset > reader.position]
        records = [r for b in behind[:count] for r in b.records if r.offset >= reader.position]
        position = behind[count - 1].header.next_offset if len(behind) >= count else None
        reader.take(records, len(self.every) if position is None else position)


class Table(Cluster):
    """A table with all records, and brokers whose local logs are never cleaned (rule C2).

    Copy 0 is the table; a `clean` of another number drops local records of a broker.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[Record, int]] = []  #: with the delete horizon
        self.local_starts = dict.fromkeys(range(1, COPIES), 0)  #: of the brokers
        self.cleaned_end = 0

    def append(self, rows: list[tuple[bytes, bytes | None]]) -> None:
        records = [Record(len(self.every) + n, *row) for n, row in enumerate(rows)]
        self.every += records
        self.rows += [(record, NO_HORIZON) for record in records]

    def clean(self, copy: int, delay_ms: int) -> Any:
        if copy:
            return self.local_starts[copy] + delay_ms % 7
        end = len(self.every)
        times = (self.now_ms, self.now_ms + delay_ms)
        cleaning = Cleaning(end, min(self.local_starts.values()), RETENTION_MS, *times)
        horizons = [None if horizon == NO_HORIZON else horizon for _, horizon in self.rows]
        table = pa.record_batch(
            {
                "offset": pa.array([r.offset for r, _ in self.rows], pa.int64()),
                "key": pa.array([r.key for r, _ in self.rows], pa.binary()),
                "tombstone": pa.array([r.value is None for r, _ in self.rows], pa.bool_()),
                "delete_horizon_ms": pa.array(horizons, pa.int64()),
            }
        )
        rows, offset_map = retain.rows_of_table(table, cleaning), OffsetMap(ROOMY, HASH)
        assert retain.add_dirty_rows(offset_map, rows, self.cleaned_end, end) is None
        kept = retain.retain_rows(rows, offset_map, cleaning)
        left = [
            (record, int(horizon))
            for (record, _), horizon, stays in zip(
                self.rows, kept.horizons, np.asarray(kept.keep), strict=True
            )
            if stays
        ]
        return left, end

    def put_in_place(self, copy: int, result: Any) -> None:
        if copy:
            self.local_starts[copy] = min(result, len(self.every))
            return
        left, end = result
        self.rows = [*left, *(row for row in self.rows if row[0].offset >= end)]
        self.cleaned_end = end

    def read(self, copy: int, reader: Reader, count: int) -> None:
        """Read from the local log of a broker, and below its start from the table."""
        start, position = self.local_starts[max(copy, 1)], reader.position
        end = len(self.every)
        if position >= start:
            records = self.every[position : position + count]
            reader.take(records, min(position + count, end))
            return
        cold = [r for r, _ in self.rows if position <= r.offset < start][:count]
        reader.take(cold, cold[-1].offset + 1 if len(cold) == count else start)


def steps_of(seed: int, count: int = 200) -> list[tuple[str, Any, Any]]:
    """Draw appends, cleanings that take a while, and reads; the time goes on in small steps."""
    rng = random.Random(seed)
    found: list[tuple[str, Any, Any]] = []
    for _ in range(count):
        kind = rng.choices(["append", "wait", "clean", "read", "begin"], [20, 25, 20, 33, 2])[0]
        first: Any = rng.randrange(COPIES)
        second: Any = rng.randint(1, 4)
        if kind == "append":
            first = [
                (rng.choice([b"a", b"b", b"c"]), rng.choice([b"1", b"2", None]))
                for _ in range(rng.randint(1, 3))
            ]
        elif kind == "wait":
            first = rng.choice([1, 10, 25, 40])
        elif kind == "clean":
            second = rng.choice([(0, 0), (40, 0), (40, 40), (90, 90)])
        found.append((kind, first, second))
    return found


@given(st.integers(0, 2**32))
def test_a_reader_of_replicas_sees_every_tombstone(seed: int) -> None:
    cluster = Replicas()
    for step in steps_of(seed):
        cluster.step(*step)


@given(st.integers(0, 2**32))
def test_a_reader_of_a_table_and_local_logs_sees_every_tombstone(seed: int) -> None:
    cluster = Table()
    for step in steps_of(seed):
        cluster.step(*step)
