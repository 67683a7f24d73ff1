"""The table of snapshots on real stores, without Spark: files, the exact commit, readers."""

from __future__ import annotations

import datetime
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pk import errors
from pk.sparkconnector.maintenance import snapshot_files
from pk.sparkconnector.maintenance.snapshot_files import SnapshotPlace, Written
from pk.sparkconnector.maintenance.tables import TablePlace
from pk.tiering import snapshot_table
from pk.tiering.layout import FILE_SCHEMA, TABLE_SCHEMA

pytestmark = pytest.mark.integration

TOPIC, TOPIC_ID = "accounts", "id-1"
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> SnapshotPlace:
    options: dict[str, str] = {}
    root = (tmp_path / "tier").as_uri()
    if request.param == "s3":
        server = request.getfixturevalue("s3_server")
        root = f"s3://{server.bucket}/{tmp_path.name}"
        options = {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }
    table = TablePlace(TOPIC, TOPIC_ID, f"{root}/{TOPIC}/{TOPIC_ID}", options)
    return SnapshotPlace(table, snapshot_table.snapshot_uri(table.uri, TOPIC, TOPIC_ID), options)


def rows_of(*rows: tuple[int, int, int, bytes]) -> pa.RecordBatch:
    """Rows as Spark hands them to the writer: (partition, bucket, offset, value)."""
    columns: dict[str, list[Any]] = {
        "partition": [row[0] for row in rows],
        "offset": [row[2] for row in rows],
        "timestamp": [NOW] * len(rows),
        "timestamp_type": [0] * len(rows),
        "key": [b"key %d" % row[2] for row in rows],
        "value": [row[3] for row in rows],
        "headers": [[{"key": "h", "value": b"x"}]] * len(rows),
        "leader_epoch": [3] * len(rows),
    }
    types = {field.name: field.type for field in TABLE_SCHEMA}
    arrays = [pa.array(values, types[name]) for name, values in columns.items()]
    arrays.append(pa.array([row[1] for row in rows], pa.int32()))
    arrays.append(pa.array([2] * len(rows), pa.int32()))
    return pa.RecordBatch.from_arrays(arrays, [*columns, "bucket", "buckets"])


def written(place: SnapshotPlace, *batches: pa.RecordBatch) -> list[Written]:
    found = snapshot_files.write(place, batches)
    return [pickle.loads(row) for each in found for row in each.column(0).to_pylist()]


def values(place: SnapshotPlace, version: snapshot_table.SnapshotVersion) -> dict[int, bytes]:
    found = {}
    for file in version.files.values():
        for batch in snapshot_table.rows_of(place.uri, place.options, TOPIC, file):
            assert batch.schema == FILE_SCHEMA
            for row in batch.to_pylist():
                assert row["offset"] not in found
                found[row["offset"]] = row["value"]
    return found


def load(place: SnapshotPlace) -> snapshot_table.SnapshotVersion:
    return snapshot_table.load(place.uri, place.options, TOPIC, TOPIC_ID, [0, 1])


def test_rows_and_positions_are_one_exact_commit(place: SnapshotPlace) -> None:
    with pytest.raises(errors.SnapshotUnusable, match="there is none"):
        load(place)
    handle = snapshot_table.created(place.uri, place.options, TOPIC_ID)
    with pytest.raises(errors.SnapshotUnusable, match="it has no positions"):
        load(place)
    # the rows of a bucket may come in several batches
    first = rows_of((0, 0, 1, b"a"), (0, 0, 4, b"b"), (0, 1, 2, b"c"))
    added = written(place, first, rows_of((0, 1, 9, b"d"), (1, 0, 3, b"e")))
    assert [(each.file.partition, each.file.rows) for each in added] == [(0, 2), (0, 2), (1, 1)]
    assert [snapshot_table.bucket_of(each.file.path) for each in added] == [(0, 2), (1, 2), (0, 2)]
    snapshot_files.commit(handle, place, {0: 10, 1: 5}, {}, added, [])
    version = load(place)
    assert (version.positions, version.rows) == ({0: 10, 1: 5}, 5)
    assert values(place, version) == {1: b"a", 4: b"b", 2: b"c", 9: b"d", 3: b"e"}

    slow = snapshot_table.opened(place.uri, place.options)
    quick = snapshot_table.opened(place.uri, place.options)
    old = [file for file in version.files.values() if file.partition == 1]
    more = written(place, rows_of((1, 0, 6, b"f")))
    snapshot_files.commit(quick, place, {0: 10, 1: 7}, version.files, more, old)
    other = written(place, rows_of((1, 0, 7, b"g")))
    with pytest.raises(errors.UnknownTierRange, match="run the job again"):
        snapshot_files.commit(slow, place, {0: 10, 1: 8}, version.files, other, old)
    now = load(place)
    assert (now.version, now.positions) == (version.version + 1, {0: 10, 1: 7})
    assert values(place, now) == {1: b"a", 4: b"b", 2: b"c", 9: b"d", 6: b"f"}
    assert values(place, version)[3] == b"e", "a reader of the older version goes on"


def test_a_commit_that_landed_and_whose_answer_was_lost_is_done(
    place: SnapshotPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = snapshot_table.created(place.uri, place.options, TOPIC_ID)

    class Lost:
        def version(self) -> int:
            return int(handle.version())

        def create_write_transaction(self, *arguments: Any, **options: Any) -> None:
            handle.create_write_transaction(*arguments, **options)
            raise OSError("the answer was lost")

    added = written(place, rows_of((0, 0, 1, b"a")))
    found = snapshot_files.commit(Lost(), place, {0: 2}, {}, added, [])
    assert found == load(place).version == 1
