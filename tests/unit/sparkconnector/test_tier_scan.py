"""Cold ranges read from files: sparkconnector/tier_scan Y1 and sparkconnector/table_files K1."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from pk import errors
from pk.sparkconnector import options, rows, table_files, table_store, tier_scan
from pk.sparkconnector.connection import Tier
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.planner import PkWarning, Planner
from pk.sparkconnector.ranges import TierFile
from pk.sparkconnector.tier_scan import ColdRange
from pk.tiering import log_check
from pk.tiering.layout import FILE_SCHEMA, TABLE_SCHEMA, PartitionCounters, app_id

NAMES = ("offset", "value", "partition", "topic", "timestampType", "headers")


def table_of(offsets: list[int], schema: pa.Schema = FILE_SCHEMA, partition: int = 3) -> pa.Table:
    count = len(offsets)
    found = {
        "partition": [partition] * count, "offset": offsets,
        "timestamp": [o * 1000 for o in offsets],
        "timestamp_type": [0] * count, "key": [None] * count,
        "value": [str(o).encode() for o in offsets], "headers": [None] * count,
        "leader_epoch": [0] * count, "delete_horizon_ms": [None] * count,
    }  # fmt: skip
    return pa.table({f.name: pa.array(found[f.name], f.type) for f in schema}, schema=schema)


def write(root: Path, name: str, offsets: list[int], group_rows: int = 10) -> TierFile:
    path = root / name
    parquet.write_table(table_of(offsets), path, row_group_size=group_rows)
    return TierFile(name, min(offsets), max(offsets), path.stat().st_size, len(offsets))


def nothing_lost(part: Range) -> None:
    raise AssertionError(part)


def scan(root: Path, files: list[TierFile], start: int, end: int) -> list[int]:
    one = Range("flights", "id", 3, start, end)
    shape = rows.Shape(options.columns_of(NAMES))
    found: list[int] = []
    cold = ColdRange(root.as_uri(), {}, tuple(files))
    for batch in tier_scan.scan(one, cold, shape, nothing_lost):
        assert batch.schema.equals(shape.schema)
        offsets = batch.column("offset").to_pylist()
        assert batch.column("value").to_pylist() == [str(o).encode() for o in offsets]
        assert set(batch.column("partition").to_pylist()) == {3}
        found += offsets
    return found


def test_disjoint_sorted_files_with_gaps(tmp_path):
    """Offsets that were aborted or compacted away are simply not there."""
    files = [
        write(tmp_path, "a.parquet", [0, 1, 2, 5, 9, 10, 11, 30, 31]),
        write(tmp_path, "b.parquet", [40, 41, 60]),
        write(tmp_path, "c.parquet", [70]),
    ]
    assert scan(tmp_path, files, 0, 100) == [0, 1, 2, 5, 9, 10, 11, 30, 31, 40, 41, 60, 70]
    assert scan(tmp_path, files, 2, 41) == [2, 5, 9, 10, 11, 30, 31, 40]
    assert scan(tmp_path, files, 12, 30) == []


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.permutations(list(range(60))), st.integers(0, 59), st.integers(1, 60), st.integers(1, 3))
def test_scattered_rows_come_out_in_order_once(tmp_path, order, start, length, files):
    """As an outside Z-order may leave them; each merge narrowed far below a row group."""
    pieces = [order[at::files] for at in range(files)]
    listed = [write(tmp_path, f"{n}.parquet", piece, 7) for n, piece in enumerate(pieces)]
    before = tier_scan.MERGE_BYTES
    tier_scan.MERGE_BYTES = 300
    try:
        end = min(60, start + length)
        assert scan(tmp_path, listed, start, end) == list(range(start, end))
    finally:
        tier_scan.MERGE_BYTES = before


def test_an_offset_that_a_rewriter_stored_twice_comes_once(tmp_path):
    """As a cold read of the broker gives it (tiering/reader H1)."""
    within_one = [write(tmp_path, "a.parquet", [0, 1, 1, 2], 10)]
    assert scan(tmp_path, within_one, 0, 3) == [0, 1, 2]
    overlapping = [*within_one, write(tmp_path, "b.parquet", [3, 2, 4])]
    assert scan(tmp_path, overlapping, 0, 5) == [0, 1, 2, 3, 4]


def delta_table(tmp_path: Path, chunks: list[list[int]]) -> DeltaTable:
    for chunk in chunks:
        write_deltalake(
            str(tmp_path), table_of(chunk, TABLE_SCHEMA), mode="append", partition_by=["partition"]
        )
    rows, end = sum(map(len, chunks)), max(map(max, chunks)) + 1
    count(DeltaTable(str(tmp_path)), PartitionCounters(end=end, rows=rows))
    return DeltaTable(str(tmp_path))


def expire(table: DeltaTable, before: int) -> None:
    """The rows go, then the owner's commit says so."""
    table.delete(f"offset < {before}")
    count(table, PartitionCounters(start=before, end=8, rows=8, removed=before))


def count(table: DeltaTable, counters: PartitionCounters) -> None:
    """What the owner does: only its commits hold pk's counters."""
    versions = {app_id("id", 3, name): v for name, v in counters._asdict().items() if v >= 0}
    versions[app_id("id", 3, "check")] = log_check.counters_check(counters)
    said = log_check.expected_actions([], [], True, 0, versions, {})
    properties = CommitProperties(
        app_transactions=[Transaction(app, version) for app, version in versions.items()],
        custom_metadata={log_check.CHECK: log_check.of_actions(said)},
    )
    table.create_write_transaction(
        [], mode="append", schema=table.schema(), commit_properties=properties
    )


def test_files_are_listed_with_their_offsets(tmp_path):
    delta_table(tmp_path, [[0, 1, 2], [3, 4]])
    write_deltalake(str(tmp_path), table_of([7], TABLE_SCHEMA, partition=4), mode="append")
    listed = table_files.list_files(tmp_path.as_uri(), {}, "id", [3]).files
    assert sorted((f.min_offset, f.max_offset, f.rows) for f in listed[3]) == [(0, 2, 3), (3, 4, 2)]
    assert scan(tmp_path, listed[3], 0, 5) == [0, 1, 2, 3, 4]


def test_a_file_that_was_rewritten_and_deleted_is_planned_anew(tmp_path):
    """OPTIMIZE and VACUUM between planning and reading (rule T10)."""
    table = delta_table(tmp_path, [[0, 1, 2], [3, 4], [5, 6, 7]])
    listed = table_files.list_files(tmp_path.as_uri(), {}, "id", [3]).files[3]
    table.optimize.compact()
    table.vacuum(0, enforce_retention_duration=False, dry_run=False)
    assert not any((tmp_path / file.path).exists() for file in listed)
    assert scan(tmp_path, listed, 1, 8) == [1, 2, 3, 4, 5, 6, 7]


def test_a_replan_goes_on_where_it_stopped(tmp_path, monkeypatch):
    table = delta_table(tmp_path, [[0, 1, 2], [3, 4], [5, 6, 7]])
    listed = sorted(
        table_files.list_files(tmp_path.as_uri(), {}, "id", [3]).files[3],
        key=lambda f: f.min_offset,
    )
    shape = rows.Shape(options.columns_of(NAMES))
    cold = ColdRange(tmp_path.as_uri(), {}, tuple(listed))
    reading = tier_scan.scan(Range("flights", "id", 3, 0, 8), cold, shape, nothing_lost)
    assert next(reading).column("offset").to_pylist() == [0, 1, 2]
    table.optimize.compact()
    table.vacuum(0, enforce_retention_duration=False, dry_run=False)
    assert [o for one in reading for o in one.column("offset").to_pylist()] == [3, 4, 5, 6, 7]


def test_what_was_deleted_before_a_replan_is_told(tmp_path):
    """Retention and VACUUM while the range is read: no row is left out in silence."""
    table = delta_table(tmp_path, [[0, 1, 2], [3, 4], [5, 6, 7]])
    listed = sorted(
        table_files.list_files(tmp_path.as_uri(), {}, "id", [3]).files[3],
        key=lambda f: f.min_offset,
    )
    shape = rows.Shape(options.columns_of(NAMES))
    cold, told = ColdRange(tmp_path.as_uri(), {}, tuple(listed)), []
    reading = tier_scan.scan(Range("flights", "id", 3, 0, 8), cold, shape, told.append)
    assert next(reading).column("offset").to_pylist() == [0, 1, 2]
    expire(table, 5)
    table.vacuum(0, enforce_retention_duration=False, dry_run=False)
    assert [o for one in reading for o in one.column("offset").to_pylist()] == [5, 6, 7]
    assert told == [Range("flights", "id", 3, 3, 5)]


@pytest.mark.parametrize("fail", [True, False], ids=["raised", "warned"])
def test_rows_that_another_engine_deleted_are_told(tmp_path, monkeypatch, fail):
    """Rule T17: nothing counted them as removed."""
    delta_table(tmp_path, [[0, 1, 2], [3, 4], [5, 6, 7]]).delete("offset > 2 AND offset < 5")
    wanted = Range("flights", "id", 3, 0, 9)
    known = SimpleNamespace(
        tier_bounds=lambda asked: {wanted: (8, 8)},
        tier=lambda topic: Tier(tmp_path.as_uri(), 3, {}, {3: 8}),
    )
    monkeypatch.setattr(Planner, "cluster", known)
    chosen = {"pk.bootstrap.servers": "x:1", "subscribe": "flights", "failOnDataLoss": str(fail)}
    planner = Planner(options.source(chosen, streaming=True))
    if fail:
        with pytest.raises(errors.DataLoss, match=r"flights-3 \[3, 5\) is gone"):
            planner.tasks([wanted], streaming=True)
        return
    with pytest.warns(PkWarning, match=r"flights-3 \[3, 5\) is gone"):
        cold, _ = planner.tasks([wanted], streaming=True)
    listed = table_files.list_files(tmp_path.as_uri(), {}, "id", [3]).files[3]
    found = scan(tmp_path, listed, cold.range.start, cold.range.end)
    assert found == [0, 1, 2, 5, 6, 7]


@pytest.mark.parametrize("fail", [True, False], ids=["raised", "warned"])
def test_what_was_deleted_before_the_files_were_listed_is_told(tmp_path, monkeypatch, fail):
    """Retention between the broker's bounds and the table's version: its files are not named, so no
    task would miss them."""
    table = delta_table(tmp_path, [[0, 1, 2], [3, 4], [5, 6, 7]])
    expire(table, 5)
    wanted = Range("flights", "id", 3, 0, 9)
    known = SimpleNamespace(
        tier_bounds=lambda asked: {wanted: (8, 8)},
        tier=lambda topic: Tier(tmp_path.as_uri(), 3, {}, {3: 8}),
    )
    monkeypatch.setattr(Planner, "cluster", known)
    chosen = {"pk.bootstrap.servers": "x:1", "subscribe": "flights", "failOnDataLoss": str(fail)}
    planner = Planner(options.source(chosen, streaming=True))
    if fail:
        with pytest.raises(errors.DataLoss, match=r"flights-3 \[0, 5\) is gone"):
            planner.tasks([wanted], streaming=True)
        return
    with pytest.warns(PkWarning, match=r"flights-3 \[0, 5\) is gone"):
        cold, hot = planner.tasks([wanted], streaming=True)
    assert (cold.range, hot.range) == (wanted._replace(start=5, end=8), wanted._replace(start=8))


def test_a_file_gone_on_every_version_is_an_error(tmp_path):
    delta_table(tmp_path, [[0, 1, 2]])
    listed = table_files.list_files(tmp_path.as_uri(), {}, "id", [3]).files[3]
    (tmp_path / listed[0].path).unlink()
    with pytest.raises(errors.DamagedTierFile, match="not in the store") as caught:
        scan(tmp_path, listed, 0, 3)
    assert caught.value.details["path"] == listed[0].path


def test_a_table_that_is_gone_is_named(tmp_path):
    with pytest.raises(errors.TierTableChanged, match="no table"):
        table_files.list_files((tmp_path / "nothing").as_uri(), {}, "id", [3])


@pytest.mark.parametrize(("version", "features"), [(3, ["deletionVectors"]), (2, ()), (1, ["x"])])
def test_a_table_with_features_is_refused(version, features):
    protocol = SimpleNamespace(
        min_reader_version=version,
        min_writer_version=2,
        reader_features=features,
        writer_features=None,
    )
    with pytest.raises(errors.TierTableChanged, match="pk accepts"):
        table_files.check_protocol(SimpleNamespace(protocol=lambda: protocol), "uri")


def test_file_systems(monkeypatch):
    assert table_store.file_system("file:///a%20b/c", {})[1] == "/a b/c"
    options = {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:7070", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
    }  # fmt: skip
    assert table_store.file_system("s3://bucket/t/x", options)[1] == "bucket/t/x"
    with pytest.raises(errors.StoreRefused, match="gs://"):
        table_store.file_system("gs://bucket/t", {})
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("PK_TIER_ACCESS_KEY_ID", "k")
    found = table_store.with_credentials({"AWS_REGION": "r"})
    assert found == {"AWS_REGION": "r", "AWS_ACCESS_KEY_ID": "k"}
