"""Files that a task's threads open ahead: sparkconnector/opened_files O1 and O2."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import fs, parquet

from pk import errors
from pk.sparkconnector import opened_files, options, rows, table_store, tier_scan
from pk.sparkconnector.offsets import Range
from pk.sparkconnector.opened_files import AHEAD_FILES, FailedTierFile, TableFile, TaskFiles
from pk.sparkconnector.ranges import TierFile
from pk.tiering.layout import FILE_SCHEMA

FAR = "s3://bucket/table"
PATIENCE_S = 30


class Store:
    """A store whose files lie in a directory.  It counts, and can hold every opening back."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.opened: list[str] = []
        self.under_way = 0
        self.together_most = 0
        self.changed = threading.Condition()
        self.handles: list[Any] = []
        self.together_least = 1  #: an opening returns once so many were under way at once

    def open_input_file(self, path: str) -> Any:
        with self.changed:
            self.opened.append(Path(path).name)
            self.under_way += 1
            self.together_most = max(self.together_most, self.under_way)
            self.changed.notify_all()
            enough = self.changed.wait_for(
                lambda: self.together_most >= self.together_least, PATIENCE_S
            )
            self.under_way -= 1
        assert enough
        handle = fs.LocalFileSystem().open_input_file(path)
        self.handles.append(handle)
        return handle

    def await_opened(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.opened) >= count, PATIENCE_S)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store(tmp_path)
    monkeypatch.setattr(table_store, "file_system", lambda uri, options: (made, str(tmp_path)))
    return made


def write(root: Path, number: int, count: int = 10) -> TableFile:
    offsets = list(range(number * count, number * count + count))
    columns = {
        "partition": [3] * count, "offset": offsets, "timestamp": offsets,
        "timestamp_type": [0] * count, "key": [None] * count,
        "value": [str(each).encode() for each in offsets], "headers": [None] * count,
        "leader_epoch": [0] * count, "delete_horizon_ms": [None] * count,
    }  # fmt: skip
    found = {each.name: pa.array(columns[each.name], each.type) for each in FILE_SCHEMA}
    path = root / f"{number:04}.parquet"
    parquet.write_table(pa.table(found, schema=FILE_SCHEMA), path)
    file = TierFile(path.name, offsets[0], offsets[-1], path.stat().st_size, count)
    return TableFile(FAR, {}, file)


def names(places: list[TableFile]) -> list[str]:
    return [each.file.path for each in places]


def test_the_next_files_are_opened_side_by_side_while_the_first_is_read(store: Store) -> None:
    places = [write(store.root, number) for number in range(20)]
    store.together_least = AHEAD_FILES + 1  # what is asked for, and what is ahead
    task = TaskFiles(places)
    first = task.get(places[0])
    assert first.file is places[0].file
    assert sorted(store.opened) == names(places[: AHEAD_FILES + 1])
    assert store.together_most == AHEAD_FILES + 1
    second = task.get(places[1])
    assert second.file is places[1].file
    store.await_opened(AHEAD_FILES + 2)
    assert len(store.opened) == AHEAD_FILES + 2
    for each in places[2:]:
        assert task.get(each).file is each.file
    assert sorted(store.opened) == names(places)
    task.close()


def test_what_was_opened_ahead_is_closed_with_the_task(store: Store, monkeypatch) -> None:
    monkeypatch.setattr(opened_files, "WHOLE_BYTES", 0)
    places = [write(store.root, number) for number in range(4)]
    task = TaskFiles(places)
    task.get(places[0]).handle.close()
    store.await_opened(4)
    task.close()
    for each in threading.enumerate():
        if each.name.startswith("pk-open-ahead"):
            each.join(PATIENCE_S)
    assert [each.closed for each in store.handles] == [True] * 4


def test_a_missing_file_is_an_error_when_the_task_asks_for_it(store: Store) -> None:
    places = [write(store.root, number) for number in range(3)]
    (store.root / places[2].file.path).unlink()
    task = TaskFiles(places)
    task.get(places[0])
    store.await_opened(3)
    task.get(places[1])
    with pytest.raises(FailedTierFile) as raised:
        task.get(places[2])
    assert raised.value.missing
    task.close()


def test_files_that_the_task_passes_over_are_closed(store: Store, monkeypatch) -> None:
    monkeypatch.setattr(opened_files, "WHOLE_BYTES", 0)
    places = [write(store.root, number) for number in range(6)]
    task = TaskFiles(places)
    kept = [task.get(places[0]), task.get(places[5])]
    assert kept[1].file is places[5].file
    store.await_opened(6)
    task.close()
    for each in threading.enumerate():
        if each.name.startswith("pk-open-ahead"):
            each.join(PATIENCE_S)
    assert sum(not each.closed for each in store.handles) == 2


def test_a_file_that_was_not_announced_is_opened(store: Store) -> None:
    """A new plan names others (sparkconnector/tier_scan Y1)."""
    place = write(store.root, 0)
    assert TaskFiles().get(place).file is place.file
    assert store.opened == [place.file.path]


def test_files_of_a_local_directory_are_opened_when_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [write(tmp_path, n)._replace(uri=tmp_path.as_uri()) for n in range(3)]
    opened: list[str] = []
    really = opened_files.open_file

    def counted(source: Any, root: str, file: TierFile, **given: int) -> Any:
        opened.append(file.path)
        return really(source, root, file, **given)

    monkeypatch.setattr(opened_files, "open_file", counted)
    task = TaskFiles(places)
    task.get(places[0])
    task.close()
    assert opened == names(places[:1])


def test_a_small_file_is_fetched_whole(store: Store) -> None:
    place = write(store.root, 0)
    reads: list[str] = []

    class Counted:
        def __init__(self, handle: Any) -> None:
            self._handle = handle

        def __getattr__(self, name: str) -> Any:
            if name.startswith("read"):
                reads.append(name)
            return getattr(self._handle, name)

        def __enter__(self) -> Counted:
            return self

        def __exit__(self, *_: object) -> None:
            self._handle.close()

    source = SimpleNamespace(open_input_file=lambda path: Counted(store.open_input_file(path)))
    opened = opened_files.open_file(source, str(store.root), place.file, whole_bytes=1 << 20)
    assert opened.footer.groups
    opened.handle.read_at(opened.footer.groups[0].size, opened.footer.groups[0].start)
    assert reads == ["read_buffer"]


def test_the_ranges_of_a_task_share_what_is_opened_ahead(store: Store) -> None:
    """Rows come in order, and each file is opened once."""
    places = [write(store.root, number) for number in range(12)]
    cold = [
        tier_scan.ColdRange(FAR, {}, tuple(each.file for each in places[at : at + 3]))
        for at in range(0, 12, 3)
    ]
    ranges = [(Range("t", "id", 3, at * 30, at * 30 + 30), place) for at, place in enumerate(cold)]
    shape = rows.Shape(options.columns_of(("offset",)))
    store.together_least = AHEAD_FILES + 1
    found: list[int] = []
    task = TaskFiles(tier_scan.files_of(ranges))
    for one, place in ranges:
        for batch in tier_scan.scan(one, place, shape, found.append, task_files=task):
            found += batch.column("offset").to_pylist()
    task.close()
    assert found == list(range(120))
    assert sorted(store.opened) == names(places)


def test_a_store_that_fails_is_unavailable(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    place = write(store.root, 0)

    def fail(path: str) -> Any:
        raise OSError("503 SlowDown")

    monkeypatch.setattr(store, "open_input_file", fail)
    with pytest.raises(errors.TierUnavailable, match="SlowDown"):
        TaskFiles().get(place)
