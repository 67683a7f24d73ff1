"""A compaction of a table against a naive oracle, without Spark (design/0018, C1 to C21)."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pk import errors
from pk.compaction.plan import CompactionLimits
from pk.sparkconnector.maintenance import compaction_plan, compaction_rows
from pk.sparkconnector.maintenance.compaction_plan import TopicLimits
from pk.sparkconnector.maintenance.compaction_rows import FirstPass, ScannedFile
from pk.tiering import layout
from pk.tiering.data_files import held_by
from pk.tiering.plan import new_file
from pk.tiering.table import Commit
from pk.wire import pk_pb2 as wire
from tests.unit.sparkconnector.maintenance.compaction_bench import (
    LIMITS,
    RETENTION_MS,
    SECRET,
    Bench,
    Killed,
)

K, L, M = b"k", b"l", b"m"
EVERYTHING = 2**62


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def offsets(bench: Bench) -> list[int]:
    return [row.offset for row in bench.rows()]


def compact(bench: Bench, **more: Any) -> None:
    bench.compact(**more)
    bench.check_cleaned()


def test_the_newest_record_of_each_key_stays(bench: Bench) -> None:
    bench.append([(K, b"1"), (L, b"2"), (K, b"3")], group=2)
    bench.append([(None, b"4"), (L, b"5")])
    compact(bench)
    assert offsets(bench) == [2, 4]
    counters = bench.snapshot.partition(0)
    assert (counters.rows, counters.removed, counters.cleaned) == (5, 3, 5)
    version = bench.snapshot.version
    assert bench.compact() == 0
    assert bench.snapshot.version == version


def test_only_files_that_change_are_written_again(bench: Bench) -> None:
    bench.append([(K, b"1"), (L, b"2")])
    bench.append([(M, b"3")])
    bench.append([(K, b"4")])
    before = [file.path for file in bench.snapshot.files_of(0)]
    compact(bench)
    after = [file.path for file in bench.snapshot.files_of(0)]
    assert after[1:] == before[1:]
    assert layout.parse_job_path(after[0]) is not None


def test_a_file_without_a_row_takes_a_neighbour_with_it(bench: Bench) -> None:
    """Offsets in no file would look like rows that another engine deleted (T17)."""
    for key in (K, L, K, M, K):
        bench.append([(key, b"v")])
    compact(bench)
    bounds = [held_by(file) for file in bench.snapshot.files_of(0)]
    assert sorted(bounds) == [(0, 3), (3, 4), (4, 5)]
    assert offsets(bench) == [1, 3, 4]


def test_a_partition_may_lose_every_row(bench: Bench) -> None:
    bench.settled_end = EVERYTHING
    bench.append([(K, b"v"), (K, None)])
    compact(bench)
    bench.now_ms += 2 * RETENTION_MS
    compact(bench)
    assert (bench.rows(), dict(bench.snapshot.files)) == ([], {})
    assert bench.snapshot.partition(0).forgotten == 2
    bench.append([(K, b"w")])
    compact(bench)
    assert offsets(bench) == [2]


def test_a_tombstone_ages_only_below_every_local_log(bench: Bench) -> None:
    bench.append([(K, b"v"), (K, None), (L, b"v")])
    compact(bench)
    assert [row.horizon for row in bench.rows()] == [None, None]
    bench.settled_end = 2
    compact(bench)
    horizon = bench.now_ms + 5 + RETENTION_MS
    assert [row.horizon for row in bench.rows()] == [horizon, None]
    bench.now_ms = horizon
    assert bench.compact() == 0
    bench.now_ms += 1
    bench.settled_end = 1  # a replica lost its disk
    assert bench.compact() == 0
    bench.settled_end = 2
    compact(bench)
    assert offsets(bench) == [2]


def test_without_a_trusted_time_nothing_ages(bench: Bench) -> None:
    bench.settled_end = EVERYTHING
    bench.append([(K, b"v"), (K, None)])
    compact(bench, clock=False)
    assert (offsets(bench), bench.rows()[0].horizon) == ([1], None)


def test_young_records_stay(tmp_path: Path) -> None:
    bench = Bench(tmp_path, TopicLimits(CompactionLimits(0.0, 50, 100), RETENTION_MS))
    bench.append([(K, b"1")])
    bench.append([(K, b"2")])
    bench.now_ms += 50
    bench.append([(K, b"3")])
    compact(bench)
    assert offsets(bench) == [1, 2]
    assert bench.snapshot.partition(0).cleaned == 2


def test_offsets_without_rows_at_the_end_are_cleaned(bench: Bench) -> None:
    """Their records were aborted; otherwise the whole table would be dirty again."""
    bench.append([(K, b"1"), (K, b"2")], tail=3)
    compact(bench)
    assert bench.snapshot.partition(0).cleaned == 5
    bench.append([(L, b"3")])
    cleaning = compaction_plan.clean_partition(
        bench.snapshot, 0, LIMITS, now_ms=None, deadline_ms=None, settled_end=0, hold=None
    )
    assert cleaning.plan.first_dirty == 5


def many(bench: Bench) -> None:
    """Five files: each has a row that is superseded, and a tombstone that may age."""
    bench.settled_end = EVERYTHING
    for number in range(5):
        bench.append([(b"a%d" % number, b"v"), (b"t%d" % number, None), (b"f%d" % number, b"v")])
    bench.append([(b"a%d" % number, b"w") for number in range(5)])


@pytest.mark.parametrize("kill_after", range(6))
def test_horizons_follow_the_removal_of_older_rows(bench: Bench, kill_after: int) -> None:
    """C2, C3: a partition that needs several versions; the job dies between any two of them."""
    many(bench)
    before = bench.rows()
    with pytest.raises(Killed):
        bench.compact(target_bytes=1, actions_max=4, kill_after=kill_after)
    bench.check_version()
    assert bench.snapshot.partition(0).cleaned == 0
    if kill_after < 3:
        assert all(row.horizon is None for row in bench.rows())
    if not kill_after:
        assert bench.rows() == before
    compact(bench, target_bytes=1, actions_max=4)
    assert len(offsets(bench)) == 15
    assert sum(row.horizon is not None for row in bench.rows()) == 5


def test_the_job_plans_again_when_a_file_is_gone(bench: Bench) -> None:
    """C8: retention passes a file between plan and hand-over."""
    many(bench)
    starts = iter([4])
    compact(bench, beside=lambda: bench.move_start(next(starts, 0)))
    assert offsets(bench)[0] == 4
    bench.check_version()


def test_a_file_of_another_engine_is_read_in_offset_order(bench: Bench) -> None:
    bench.append([(K, b"1"), (L, b"2"), (M, b"3")])
    bench.append([(K, b"4"), (L, b"5")])
    rows = pa.Table.from_batches([b for f in bench.snapshot.files_of(0) for b in _stored(bench, f)])
    for number, order in enumerate(([3, 0, 4], [2, 1])):
        _put_foreign(bench, f"partition=0/part-{number}.parquet", rows.take(pa.array(order)))
    old = [f.path for f in bench.snapshot.files_of(0) if "part-" not in f.path]
    commit = Commit(bench.snapshot, (), tuple(old), {}, data_change=False)
    bench.snapshot = bench.snapshot.after(commit, bench.snapshot.version + 1)
    compact(bench)
    assert offsets(bench) == [2, 3, 4]
    assert len(bench.snapshot.files) == 1


def _stored(bench: Bench, file: Any) -> Sequence[pa.RecordBatch]:
    from pk.sparkconnector.maintenance import tables

    return list(tables.rows_of(bench.place, file))


def _put_foreign(bench: Bench, path: str, rows: pa.Table) -> None:
    import pyarrow.parquet as pq

    target = Path(bench.place.uri.removeprefix("file://")) / path
    pq.write_table(rows, target)
    found = rows.column("offset").to_pylist()
    add = wire.AddFile(
        path=path, size=target.stat().st_size, rows=len(found), min_offset=min(found),
        max_offset=max(found), min_timestamp_ms=1000, max_timestamp_ms=1000,
    )  # fmt: skip
    commit = Commit(bench.snapshot, (new_file(add, False),), (), {}, data_change=False)
    bench.snapshot = bench.snapshot.after(commit, bench.snapshot.version + 1)


def test_a_damaged_file_ends_the_job_and_changes_nothing(bench: Bench, tmp_path: Path) -> None:
    bench.append([(K, b"1"), (K, b"2")])
    (file,) = bench.snapshot.files.values()
    whole = (tmp_path / file.path).read_bytes()
    (tmp_path / file.path).write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    given = FirstPass(
        bench.place, (ScannedFile(file, True),),
        {0: (0, bench._cleaning(None, True).cleaning)}, 1, SECRET, {0: 0},
    )  # fmt: skip
    numbers = pa.RecordBatch.from_arrays([pa.array([0])], ["id"])
    (scanned,) = compaction_rows.scan(given, [numbers])
    (decided,) = compaction_rows.decide(given, [scanned])
    assert isinstance(pickle.loads(decided.column("error")[0].as_py()), errors.DamagedTierFile)


def test_keys_that_do_not_fit_are_a_typed_error(bench: Bench, monkeypatch: Any) -> None:
    bench.append([(b"x" * 60, b"1"), (b"y" * 60, b"2")])
    monkeypatch.setattr(compaction_rows, "KEY_BYTES_MAX", 100)
    bench.buckets = 1
    with pytest.raises(errors.InvalidOption, match="rows_per_bucket"):
        bench.compact()


def test_a_decision_without_its_row_is_an_error(bench: Bench, monkeypatch: Any) -> None:
    """maintenance/compaction_rows N2: a result of the first pass that does not fit the files."""
    bench.append([(K, b"1"), (K, b"2"), (L, b"3")])
    kept = bench._first_pass

    def altered(cleaning: Any) -> Any:
        decisions, changes = kept(cleaning)
        ((path, ((named, codes),)),) = decisions.items()
        return {path: [(named + 9, codes)]}, changes

    monkeypatch.setattr(bench, "_first_pass", altered)
    with pytest.raises(errors.InternalError):
        bench.compact()


def test_rows_that_are_missing_stop_the_job(bench: Bench) -> None:
    """T17: a file that is written again would hide where they were."""
    bench.append([(K, b"1")])
    bench.append([(L, b"2")])
    commit = Commit(bench.snapshot, (), (bench.snapshot.files_of(0)[0].path,), {})
    bench.snapshot = bench.snapshot.after(commit, 9)
    bench.snapshot._missing = {}
    with pytest.raises(errors.InvalidRequest, match="pk tier accept"):
        bench.compact()


KEYS = st.sampled_from([None, b"a", b"b", b"c", b"d", b"e"])
ROWS = st.lists(st.tuples(KEYS, st.sampled_from([None, b"v", b"w"])), min_size=1, max_size=9)
STEPS = st.one_of(
    st.tuples(st.just("append"), ROWS, st.integers(0, 2), st.integers(0, 3)),
    st.tuples(st.just("wait"), st.sampled_from([1, RETENTION_MS, 2 * RETENTION_MS])),
    st.tuples(st.just("drop local"), st.integers(0, 12)),
    st.tuples(st.just("start"), st.integers(0, 6)),
    st.tuples(
        st.just("compact"),
        st.booleans(),
        st.sampled_from([1, 2_000, 1 << 20]),
        st.sampled_from([2, 3, 5, 950]),
        st.none() | st.integers(0, 3),
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, max_size=14))
def test_every_version_serves_every_reader(steps: list[tuple[Any, ...]]) -> None:
    """Whatever happens beside it, and wherever it dies."""
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(Path(root))
        for kind, *rest in [*steps, ("compact", True, 1 << 20, 950, None)]:
            counters = bench.snapshot.partition(0)
            match kind:
                case "append":
                    bench.append(rest[0], tail=rest[1], group=rest[2])
                case "wait":
                    bench.now_ms += rest[0]
                case "drop local":
                    bench.settled_end = min(counters.end, bench.settled_end + rest[0])
                case "start":
                    bench.move_start(min(counters.end, counters.start + rest[0]))
                case "compact":
                    clock, target, actions, kill_after = rest
                    try:
                        bench.compact(
                            target_bytes=target,
                            actions_max=actions,
                            clock=clock,
                            kill_after=kill_after,
                        )
                        bench.check_cleaned()
                    except Killed:
                        pass
            bench.check_version()
