"""A table on a local disk that is compacted without Spark, and the naive oracle of its readers.

The bench runs the functions that Spark's executors run, the hand-overs of the driver, and the
owner's plan of each commit.  The oracle keeps every record in a dictionary.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from pk.compaction.plan import CompactionLimits
from pk.sparkconnector.maintenance import compaction_plan, compaction_rows, tables
from pk.sparkconnector.maintenance.compaction import hand_over
from pk.sparkconnector.maintenance.compaction_plan import (
    FileChange,
    PartitionCleaning,
    Portion,
    TopicLimits,
)
from pk.sparkconnector.maintenance.compaction_rows import FirstPass, ScannedFile, SecondPass
from pk.sparkconnector.maintenance.tables import TablePlace
from pk.tiering import accounting, convert, layout
from pk.tiering.data_files import DataFile, held_by
from pk.tiering.layout import FILE_SCHEMA, SUM_MODULUS, PartitionCounters
from pk.tiering.plan import LogStart, Submission, new_file, plan
from pk.tiering.table import Commit, Snapshot
from pk.wire import pk_pb2 as wire

RETENTION_MS = 100
SECRET = bytes(range(32))
LIMITS = TopicLimits(CompactionLimits(0.0, 0, 2**63 - 1), RETENTION_MS)


class Killed(Exception):
    """The job died."""


class Row(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None
    horizon: int | None = None


class Bench:
    """One partition of a table."""

    def __init__(self, root: Path, limits: TopicLimits = LIMITS) -> None:
        self.place = TablePlace("t", "id", root.as_uri(), {})
        (root / "partition=0").mkdir(exist_ok=True)
        self.limits = limits
        self.snapshot = Snapshot(0, "id", {}, {0: PartitionCounters()})
        self.every: dict[int, Row] = {}
        self.now_ms = 1_000
        self.settled_end = 0
        self.may_go: dict[int, int] = {}  #: offset of a tombstone → its horizon
        self.buckets = 3
        self.emptied = 0  #: the end of the table when it had no file

    # -- the table ---------------------------------------------------------------------------------

    def append(
        self,
        rows: Sequence[tuple[bytes | None, bytes | None]],
        *,
        tail: int = 0,
        group: int = 0,
    ) -> None:
        """Append one file; `tail`: offsets behind its rows that have no row, as aborted ones;
        `group`: rows of a row group, 0 = any."""
        start = self.snapshot.partition(0).end
        given = [Row(start + n, *each) for n, each in enumerate(rows)]
        self.every |= {row.offset: row for row in given}
        builder = convert.FileBuilder()
        for at in range(0, len(given), group or len(given)):
            builder.add(_table(given[at : at + (group or len(given))], self.now_ms))
            if group:
                builder._flush()
        built = builder.finish()
        assert built is not None
        end = start + len(rows) + tail
        name = layout.DataName(0, start, end, 0, f"a{start}", built.footer_crc, built.row_sum)
        root = Path(self.place.uri.removeprefix("file://"))
        (root / layout.data_path(name)).write_bytes(built.data)
        add = wire.AddFile(
            path=layout.data_path(name), start=start, end=end, size=len(built.data),
            rows=built.rows, row_sum=built.row_sum, min_offset=built.min_offset,
            max_offset=built.max_offset, min_timestamp_ms=built.min_timestamp_ms,
            max_timestamp_ms=built.max_timestamp_ms,
        )  # fmt: skip
        counters = self.snapshot.partition(0)
        counters = counters._replace(
            end=end,
            rows=counters.rows + built.rows,
            sum=(counters.sum + built.row_sum) % SUM_MODULUS,
        )
        commit = Commit(self.snapshot, (new_file(add, True),), (), {0: counters})
        self.snapshot = self.snapshot.after(commit, self.snapshot.version + 1)

    def rows(self) -> list[Row]:
        """Return every row of the table, in offset order."""
        found: list[Row] = []
        for file in self.snapshot.files_of(0):
            for batch in tables.rows_of(self.place, file):
                names = ("offset", "key", "value", "delete_horizon_ms")
                found += [Row(*(row[name] for name in names)) for row in batch.to_pylist()]
        return sorted(found)

    # -- the job -----------------------------------------------------------------------------------

    def compact(
        self,
        *,
        target_bytes: int = 1 << 20,
        actions_max: int = compaction_plan.ACTIONS_MAX,
        clock: bool = True,
        kill_after: int | None = None,
        beside: Any = None,
    ) -> int:
        """Run the job; return the number of hand-overs.

        kill_after: hand-overs after which it dies.  beside: called before each hand-over
        """
        end: int | None = None
        landed = 0
        for _ in range(8):
            cleaning = self._cleaning(end, clock)
            end = cleaning.cleaning.end
            decisions, changes = self._first_pass(cleaning)
            counters = self.snapshot.partition(0)
            if not changes and end <= counters.cleaned:
                return landed
            for portion in compaction_plan.portions([cleaning], changes, target_bytes, actions_max):
                if landed == kill_after:
                    raise Killed
                change = self._second_pass(cleaning, portion, decisions)
                if beside is not None:
                    beside()
                if not self._land(change):
                    break
                landed += 1
                self.check_version()
                if portion.finished:
                    assert self.snapshot.partition(0).cleaned == end
                    return landed
        raise AssertionError("the job does not end")

    def _cleaning(self, end: int | None, clock: bool) -> PartitionCleaning:
        return compaction_plan.clean_partition(
            self.snapshot,
            0,
            self.limits,
            now_ms=self.now_ms if clock else None,
            deadline_ms=self.now_ms + 5 if clock else None,
            settled_end=self.settled_end,
            hold=None,
            end=end,
        )

    def _first_pass(
        self, cleaning: PartitionCleaning
    ) -> tuple[dict[str, list[Any]], dict[str, FileChange]]:
        files = tuple(ScannedFile(file, True) for file in cleaning.files)
        given = FirstPass(
            self.place,
            files,
            {0: (cleaning.plan.first_dirty, cleaning.cleaning)},
            self.buckets,
            SECRET,
            {0: self.snapshot.partition(0).start},
        )
        numbers = pa.RecordBatch.from_arrays([pa.array(range(len(files)), pa.int64())], ["id"])
        scanned = pa.Table.from_batches(list(compaction_rows.scan(given, [numbers])) or [
            compaction_rows._batch(compaction_rows.ROWS, 0)
        ])  # fmt: skip
        decisions: dict[str, list[Any]] = {}
        changes: dict[str, FileChange] = {}
        for bucket in range(self.buckets):
            mine = scanned.filter(pa.compute.equal(scanned.column("bucket"), bucket))
            for batch in compaction_rows.decide(given, mine.to_batches(max_chunksize=4)):
                for row in batch.to_pylist():
                    if row["error"] is not None:
                        raise pickle.loads(row["error"])
                    path = files[row["file"]].file.path
                    counts = (row[name] for name in FileChange._fields)
                    known = changes.get(path, FileChange())
                    changes[path] = FileChange(*map(sum, zip(known, counts, strict=True)))
                    both = (
                        np.frombuffer(row["offsets"], "<i8"),
                        np.frombuffer(row["codes"], np.uint8),
                    )
                    decisions.setdefault(path, []).append(both)
        return decisions, {path: each for path, each in changes.items() if any(each)}

    def _second_pass(
        self, cleaning: PartitionCleaning, portion: Portion, decisions: dict[str, list[Any]]
    ) -> wire.CommitToTableRequest:
        timed = portion.times and cleaning.cleaning.now_ms is not None
        horizons = {0: cleaning.cleaning.new_horizon} if timed else {}
        given = SecondPass(
            self.place, {run.number: run for run in portion.runs}, horizons, portion.times
        )
        results = [
            compaction_rows.rewrite_run(
                given, run, [each for f in run.files for each in decisions.get(f.path, ())]
            )
            for run in portion.runs
        ]
        version = tables.TableVersion(self.place, self.snapshot)
        change = hand_over(version, portion, results, cleaning.cleaning.deadline_ms)
        change.lease_token = 7
        return change

    def _land(self, change: wire.CommitToTableRequest) -> bool:
        """Commit a hand-over as the owner does.  Returns False if the job must plan again."""
        result = plan(self.snapshot, [Submission("job", change, 10**15)], {})
        if result.refused:
            assert type(result.refused[0][1]).__name__ == "UnknownTierRange", result.refused
            return False
        if result.commit is not None:
            self.snapshot = self.snapshot.after(result.commit, self.snapshot.version + 1)
        return True

    def move_start(self, start: int) -> None:
        """Delete the offsets below `start`, as retention does."""
        result = plan(self.snapshot, [], {0: LogStart(start)})
        if result.commit is not None:
            self.snapshot = self.snapshot.after(result.commit, self.snapshot.version + 1)

    # -- the oracle --------------------------------------------------------------------------------

    def check_version(self) -> None:
        """Check one version: whatever the job has done so far, no reader is misled."""
        rows, counters = self.rows(), self.snapshot.partition(0)
        start = counters.start
        assert all(self.every[r.offset][:3] == r[:3] for r in rows)
        assert len({row.offset for row in rows}) == len(rows)
        balance = accounting.account(self.snapshot.files_of(0), counters)
        assert balance is not None
        assert balance.missing == 0
        live = [f for f in self.snapshot.files_of(0) if f.max_offset >= start]
        sums = accounting.total_sum(live, {}) if live else 0
        assert (counters.sum - counters.removed_sum) % SUM_MODULUS == sums
        self._check_ranges(live, counters)
        left = {row.offset: row for row in rows if row.offset >= start}
        newest: dict[bytes, Row] = {}
        for row in self.every.values():
            if row.key is not None and row.offset >= start:
                newest[row.key] = row
        for key, row in newest.items():
            if row.offset in left:
                continue
            assert row.value is None, f"the latest record of {key!r} is lost"
            assert row.offset in self.may_go, f"the tombstone of {key!r} left too early"
            assert self.may_go[row.offset] < self.now_ms
            assert row.offset < counters.forgotten
            older = [each for each in left.values() if each.key == key]
            assert not older, f"the deleted key {key!r} has returned"
        for row in rows:
            if row.horizon is None:
                continue
            assert row.value is None
            assert self.may_go.setdefault(row.offset, row.horizon) == row.horizon
            assert row.offset < self.settled_end
            assert row.horizon >= self.now_ms + RETENTION_MS or row.offset in self.may_go
            older = [r for r in rows if r.key == row.key and r.offset < row.offset]
            assert not older, "a horizon is set while an older record is there"

    def _check_ranges(self, live: list[DataFile], counters: PartitionCounters) -> None:
        """Check that files hold every offset from the start, or from where there was no file."""
        self.emptied = self.emptied if live else counters.end
        begin = at = max(counters.start, self.emptied)
        for low, high in sorted(map(held_by, live)):
            # The start may have passed every row of a file, and not the offsets behind them, which
            # had no row or lost it to a compaction.
            rows = [offset for offset in range(at, low) if offset in self.every]
            passed = at == begin and all(row < counters.cleaned for row in rows)
            assert low <= at or passed, f"no file holds offsets [{at}, {low})"
            at = max(at, high)
        assert not live or at == counters.end

    def check_cleaned(self) -> None:
        """Check the table after a job that ended: one row of each key below `cleaned`."""
        cleaned = self.snapshot.partition(0).cleaned
        start = self.snapshot.partition(0).start
        below = [row for row in self.rows() if start <= row.offset < cleaned]
        keys = [row.key for row in below]
        assert None not in keys
        assert len(set(keys)) == len(keys)


def _table(rows: Sequence[Row], now_ms: int) -> pa.RecordBatch:
    count = len(rows)
    columns = {
        "offset": [row.offset for row in rows],
        "timestamp": [now_ms * 1000] * count,
        "timestamp_type": [0] * count,
        "key": [row.key for row in rows],
        "value": [row.value for row in rows],
        "headers": [None] * count,
        "leader_epoch": [0] * count,
        "delete_horizon_ms": [row.horizon for row in rows],
    }
    arrays = [pa.array(columns[field.name], field.type) for field in FILE_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=FILE_SCHEMA)
