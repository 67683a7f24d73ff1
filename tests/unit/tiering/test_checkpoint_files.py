"""Checkpoints whose files are carried over (tiering/checkpoint_files)."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from pk import settings
from pk.clock import SystemClock
from pk.tiering import checkpoint_files, delta_checkpoint, layout
from pk.tiering.data_files import DataFile, NewFile
from pk.tiering.delta import DeltaTables
from pk.tiering.delta_checkpoint import INTERVAL, Checkpoint, Sources
from pk.tiering.fsspec_store import open_store
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table import Commit, Snapshot

TOPIC, TOPIC_ID = "flights", "2f1c6a2e-55a0-4c87-9a6d-0d6f4f7f8f10"


def changed(read: Snapshot, adds: int, removes: list[str]) -> Commit:
    """Returns a commit that adds files behind the others and removes some."""
    counters, new = read.partition(0), []
    for _ in range(adds):
        start, end = counters.end, counters.end + 10
        path = layout.data_path(layout.DataName(0, start, end, 0, "a", start % 2**32, start * 7919))
        file = DataFile(path, 0, start, end - 1, 1_700_000_000_003, 1_700_000_000_999, 10, 10)
        new.append(NewFile(file, 1_700_000_001_000))
        counters = counters._replace(end=end, epoch=0, rows=counters.rows + 10)
    return Commit(read, tuple(new), tuple(removes), {0: counters})


def rows(checkpoint: bytes) -> list[str]:
    table = pq.read_table(pa.BufferReader(checkpoint))
    return sorted(json.dumps(row, sort_keys=True, default=str) for row in table.to_pylist())


def table_of(root: Path, versions: int, adds: int) -> Snapshot:
    """Makes a table of many commits, which add and remove files; returns it as a reader loads it
    from its last checkpoint alone."""
    rng = random.Random(versions)

    async def whole() -> Snapshot:
        chosen = StoreSettings.of(settings.SERVER.resolve({"tier_url": root.as_uri()}))
        store = open_store(chosen, SystemClock())
        tables = DeltaTables(chosen, store, SystemClock())
        try:
            table = tables.table(TOPIC, TOPIC_ID)
            await table.create()
            snapshot = await table.load([0])
            assert snapshot is not None
            for _ in range(versions):
                gone = rng.sample(sorted(snapshot.files), len(snapshot.files) // 10)
                snapshot = await table.commit(changed(snapshot, rng.randrange(adds), gone))
            log = root / layout.table_path(TOPIC, TOPIC_ID) / "_delta_log"
            made = max(log.glob("*.checkpoint.parquet"))
            for commit in log.glob("*.json"):
                if commit.name[:20] < made.name[:20]:
                    commit.unlink()
            seen = await tables.table(TOPIC, TOPIC_ID).load([0])
            assert seen is not None
            assert (seen.files, seen.counters) == (snapshot.files, snapshot.counters)
            return seen
        finally:
            await tables.close()
            await store.close()

    return asyncio.run(whole())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Carries the files of small tables over, too, a few at once."""
    monkeypatch.setattr(delta_checkpoint, "CARRIED_ROWS_LEAST", 0)
    monkeypatch.setattr(checkpoint_files, "ROWS_AT_ONCE", 7)


@pytest.mark.usefixtures("small")
def test_a_checkpoint_is_the_one_that_deltalake_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row, removals included, and with the sizes that `_last_checkpoint` states."""
    make, compared = delta_checkpoint.make, []

    def both(given: Sources, version: int) -> Checkpoint:
        made = make(given, version)
        wanted = delta_checkpoint._by_deltalake(given.previous, given.commits, version)
        assert rows(made.data) == rows(wanted.data)
        said, as_said = json.loads(made.told), json.loads(wanted.told)
        assert said.pop("sizeInBytes") == len(made.data)
        as_said.pop("sizeInBytes")
        assert said == as_said
        compared.append(given.previous is not None)
        return made

    monkeypatch.setattr(delta_checkpoint, "make", both)
    seen = table_of(tmp_path, 5 * INTERVAL, 30)
    assert any(compared)
    table = DeltaTable(str(tmp_path / layout.table_path(TOPIC, TOPIC_ID)))
    assert table.version() == seen.version
    assert len(table.file_uris()) == len(seen.files)


@pytest.mark.usefixtures("small")
def test_deltalake_does_not_see_the_files_that_no_commit_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes 1,600 bytes for each."""
    by_deltalake, seen = delta_checkpoint._by_deltalake, []

    def noted(before: Checkpoint | None, *more: Any) -> Checkpoint:
        if before is not None:
            table = pq.read_table(pa.BufferReader(before.data))
            seen.append(table["add"].length() - table["add"].null_count)
        return by_deltalake(before, *more)

    monkeypatch.setattr(delta_checkpoint, "_by_deltalake", noted)
    assert len(table_of(tmp_path, 4 * INTERVAL, 60).files) > 100
    assert seen
    assert not any(seen)


@pytest.mark.usefixtures("small")
def test_rows_of_other_columns_are_left_to_deltalake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tiering/checkpoint_files B1: Spark's checkpoints, for example."""

    def with_a_column(checkpoint: bytes) -> bytes:
        table = pq.read_table(pa.BufferReader(checkpoint))
        sink = pa.BufferOutputStream()
        pq.write_table(table.append_column("later", pa.nulls(len(table), pa.int32())), sink)
        return bytes(sink.getvalue().to_pybytes())

    rest, whole = checkpoint_files.without_files, checkpoint_files.with_files
    carried: list[bool] = []

    def noted(made: bytes, before: bytes, paths: list[str]) -> Any:
        found = whole(made, with_a_column(before), paths)
        carried.append(found is not None)
        return found

    monkeypatch.setattr(checkpoint_files, "without_files", lambda data: rest(with_a_column(data)))
    monkeypatch.setattr(checkpoint_files, "with_files", noted)
    table_of(tmp_path, 3 * INTERVAL, 20)
    assert carried
    assert not any(carried)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("cause", [pa.ArrowNotImplementedError, OSError, KeyError])
def test_a_checkpoint_that_arrow_does_not_read_is_left_to_deltalake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: type[Exception]
) -> None:
    """Otherwise no checkpoint would be made again, and each attempt would open the table."""

    def refused(checkpoint: bytes) -> bytes:
        raise cause("unknown")

    monkeypatch.setattr(checkpoint_files, "without_files", refused)
    assert table_of(tmp_path, 3 * INTERVAL, 10).files


def test_many_checkpoints_do_not_cut_the_rows_into_small_groups() -> None:
    """A row group has the footer entries of all columns."""
    schema = pa.schema([("add", pa.struct([("path", pa.string())])), ("txn", pa.int32())])

    def file_of(some: list[dict[str, Any]]) -> bytes:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(some, schema), sink)
        return bytes(sink.getvalue().to_pybytes())

    before = file_of([{"add": {"path": str(number)}} for number in range(20_000)])
    for version in range(8):
        new = [{"add": {"path": f"new-{version}-{number}"}} for number in range(10)]
        rest = file_of([{"txn": version}, *new])
        made = checkpoint_files.with_files(rest, before, [str(version), "unknown"])
        assert made is not None
        assert made.files == 20_000 + 9 * version - 1
        before = made.data
    count = checkpoint_files.rows_of(before)
    groups = pq.read_metadata(pa.BufferReader(before)).num_row_groups
    assert count == made.files + 11
    assert groups <= count // checkpoint_files.ROWS_AT_ONCE + 2


@pytest.mark.parametrize(
    ("commit", "paths"),
    [
        (b'{"commitInfo":{}}\n{"add":{"path":"a%20b"}}\n{"remove":{"path":"c"}}\n', ["a%20b", "c"]),
        (b'{"txn":{"appId":"x","version":1}}', []),
        (b"", []),
    ],
)
def test_paths_are_those_of_adds_and_removals(commit: bytes, paths: list[str]) -> None:
    assert checkpoint_files.paths_of([commit]) == paths


@pytest.mark.parametrize("broken", [b"{", b'{"add":{}}', b'{"add":3}', b"[]\n3"])
def test_what_is_no_commit_is_refused(broken: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        checkpoint_files.paths_of([broken])


@pytest.mark.parametrize(
    "read", [checkpoint_files.rows_of, checkpoint_files.without_files], ids=["rows", "rest"]
)
def test_a_damaged_checkpoint_is_refused(read: Callable[[bytes], object]) -> None:
    with pytest.raises(ValueError, match="Parquet"):
        read(b"no checkpoint")
