"""A sweep removes what no version names, and nothing else."""

from __future__ import annotations

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.sparkconnector.maintenance import sweep_plan, tables
from pk.sparkconnector.maintenance.sweep_plan import StoredFile
from pk.sparkconnector.maintenance.tables import TablePlace, TableVersion
from pk.tiering import layout
from pk.tiering.layout import DataName
from pk.types import NONE

HOUR = 3_600_000
#: the package exports the function of this name
sweeping: Any = import_module("pk.sparkconnector.maintenance.sweep")


def name_of(number: int, *, job: bool = False) -> str:
    name = DataName(0, number, number + 1, NONE if job else 3, f"a{number}", 7, 9)
    return layout.job_path(name) if job else layout.data_path(name)


def test_only_old_files_of_pk_that_no_version_names_go() -> None:
    old, young = 10 * HOUR, 33 * HOUR + 1
    listed = [
        StoredFile(name_of(1), 5, old),
        StoredFile(name_of(2, job=True), 5, old),
        StoredFile(name_of(3), 5, young),
        StoredFile(name_of(4), 5, old),
        StoredFile("partition=0/part-00000-of-another-engine.parquet", 5, old),
        StoredFile("_delta_log/00000000000000000000.json", 5, old),
        StoredFile("partition=0/readme.txt", 5, old),
    ]
    found = sweep_plan.candidates(listed, {name_of(4)}, 34 * HOUR, HOUR)
    assert {each.path for each in found} == {name_of(1), name_of(2, job=True)}
    assert sweep_plan.candidates(listed, set(), 10 * HOUR + HOUR // 2, 0) == []


times = st.integers(0, 100 * HOUR)


@given(st.lists(st.tuples(st.integers(0, 9), times)), st.sets(st.integers(0, 9)), times, times)
def test_nothing_young_and_nothing_named_is_ever_chosen(
    stored: list[tuple[int, int]], named: set[int], now_ms: int, older_than_ms: int
) -> None:
    listed = [StoredFile(name_of(number), 1, at_ms) for number, at_ms in stored]
    names = {name_of(number) for number in named}
    for each in sweep_plan.candidates(listed, names, now_ms, older_than_ms):
        assert each.path not in names
        assert now_ms - each.modified_ms >= max(HOUR, older_than_ms)


def test_a_commit_that_does_not_parse_ends_the_sweep() -> None:
    good = b'{"add": {"path": "a"}}\n\n{"remove": {"path": "b"}}\n{"txn": {}}'
    assert list(sweep_plan.paths_in(good, "x")) == ["a", "b"]
    for bad in (b"{", b'{"add": {}}', b"[1]", b'{"add": 3}'):
        with pytest.raises(errors.TierTableChanged):
            list(sweep_plan.paths_in(bad, "x"))


class Lease:
    def __init__(self) -> None:
        self.checks = 0

    def check(self) -> None:
        self.checks += 1


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TablePlace:
    """A Delta table with a file under a name of pk for each version, and one that was replaced."""
    home = tmp_path / "t" / "id"
    rows = pa.table({"partition": pa.array([0], pa.int32()), "offset": pa.array([1], pa.int64())})
    for _ in range(3):
        write_deltalake(home, rows, mode="append", partition_by=["partition"])
    DeltaTable(home).optimize.compact(commit_properties=CommitProperties())
    DeltaTable(home).create_checkpoint()
    write_deltalake(home, rows, mode="append", partition_by=["partition"])

    def newest(place: TablePlace, _partitions: Any) -> TableVersion:
        class Snapshot:
            version = DeltaTable(home).version()
            files = dict.fromkeys(
                os.path.relpath(each.removeprefix("file://"), home)
                for each in DeltaTable(home).file_uris()
            )

        given: Any = Snapshot()
        return TableVersion(place, given)

    monkeypatch.setattr(tables, "newest", newest)
    return TablePlace("t", "id", home.as_uri(), {})


def age(path: Path, hours: float) -> None:
    stat = path.stat()
    os.utime(path, (stat.st_atime - hours * 3600, stat.st_mtime - hours * 3600))


def test_files_of_older_versions_stay_also_after_a_checkpoint(
    place: TablePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "t" / "id"
    for each in home.glob("partition=0/*"):
        age(each, 200)
    monkeypatch.setattr(sweep_plan, "parse_written_path", lambda path: path)  # deltalake's names
    upload, late = home / name_of(1), home / name_of(2, job=True)
    upload.write_bytes(b"x" * 10)
    late.write_bytes(b"y")
    age(upload, 25)
    age(late, 23)
    before = set(home.glob("partition=0/*"))
    lease: Any = Lease()
    report = sweeping._sweep(place, [0], lease, 24 * HOUR)
    assert (report.removed_files, report.removed_bytes, lease.checks) == (1, 10, 1)
    assert before - set(home.glob("partition=0/*")) == {upload}
    assert list((home / "_pk_sweep").iterdir()) == []
    for version in range(DeltaTable(home).version() + 1):
        DeltaTable(home, version=version).to_pyarrow_table()


def test_a_lost_lease_ends_the_sweep_before_a_delete(place: TablePlace, tmp_path: Path) -> None:
    upload = tmp_path / "t" / "id" / name_of(1)
    upload.write_bytes(b"x")
    age(upload, 25)

    class Lost(Lease):
        def check(self) -> None:
            raise errors.LeaseHeld("another job holds it")

    lease: Any = Lost()
    with pytest.raises(errors.LeaseHeld):
        sweeping._sweep(place, [0], lease, 24 * HOUR)
    assert upload.exists()


def test_a_store_that_is_away_and_an_age_below_an_hour() -> None:
    lease: Any = Lease()
    away = TablePlace("t", "id", "file:///proc/none", {})
    with pytest.raises(errors.TierUnavailable):
        sweeping._sweep(away, [0], lease, HOUR)
    with pytest.raises(errors.InvalidOption):
        sweeping.sweep("nowhere:1", "t", older_than_ms=HOUR - 1)


def test_the_log_of_a_table_names_every_path_once_it_was_committed(place: TablePlace) -> None:
    from pk.sparkconnector import table_store

    source, root = table_store.file_system(place.uri, {})
    named = sweeping._named(source, root)
    written = set()
    for path in Path(root).glob("_delta_log/*.json"):
        for line in path.read_text().splitlines():
            action = json.loads(line)
            written |= {action[kind]["path"] for kind in ("add", "remove") if kind in action}
    assert named == written
    for path in sorted(Path(root).glob("_delta_log/*.json"))[:-1]:
        path.unlink()  # the log was cleaned up: the checkpoint names its files
    assert sweeping._named(source, root) == written
