"""All transaction versions of a table in one pass over its log (tiering/app_transactions)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from pk.tiering.app_transactions import transaction_versions

ROWS = pa.table({"x": [1]})
APPS = [f"pk:t:{number}:{name}" for number in range(3) for name in ("start", "end", "check")]


class Counted:
    """A handle that counts the questions for one application."""

    def __init__(self, handle: DeltaTable) -> None:
        self._handle, self.asked = handle, 0
        self.table_uri = handle.table_uri

    def version(self) -> int:
        return self._handle.version()

    def transaction_version(self, app: str) -> int | None:
        self.asked += 1
        return self._handle.transaction_version(app)


def commit(path: Path, **versions: int) -> None:
    """Append a file with transactions; `a1=5`: the application APPS[1] is at version 5."""
    named = [Transaction(APPS[int(name[1:])], number) for name, number in versions.items()]
    write_deltalake(
        str(path), ROWS, mode="append", commit_properties=CommitProperties(app_transactions=named)
    )


def log(path: Path, name: str) -> Path:
    return path / "_delta_log" / name


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Six versions; version 3 is a checkpoint, and later ones alter what it has."""
    path = tmp_path / "table with a space"
    commit(path, a0=1, a1=1, a8=7)
    commit(path, a1=2)
    commit(path)
    commit(path, a2=9)
    DeltaTable(str(path)).create_checkpoint()
    commit(path, a1=3, a4=4)
    commit(path, a0=2)
    return path


def opened(path: Path, version: int | None = None) -> Counted:
    return Counted(DeltaTable(str(path), version=version))


def found(handle: Any) -> dict[str, int]:
    return transaction_versions(handle, None, APPS)


def expected(path: Path, version: int | None = None) -> dict[str, int]:
    handle = DeltaTable(str(path), version=version)
    asked = {app: handle.transaction_version(app) for app in APPS}
    return {app: number for app, number in asked.items() if number is not None}


@pytest.mark.parametrize("version", [None, 0, 1, 2, 3, 4])
def test_every_version_is_as_deltalake_says(table: Path, version: int | None) -> None:
    handle = opened(table, version)
    assert found(handle) == expected(table, version) != {}
    assert handle.asked == 0


def test_the_newest_version_is_right_after_old_commits_are_gone(table: Path) -> None:
    for number in range(4):
        log(table, f"{number:020d}.json").unlink()
    handle = opened(table)
    assert found(handle) == {APPS[0]: 2, APPS[1]: 3, APPS[2]: 9, APPS[4]: 4, APPS[8]: 7}
    assert handle.asked == 0


def test_a_table_without_transactions_has_none(tmp_path: Path) -> None:
    commit(tmp_path / "t")
    DeltaTable(str(tmp_path / "t")).create_checkpoint()
    assert found(opened(tmp_path / "t")) == {}


@pytest.mark.parametrize("told", [{"version": 3, "parts": 2}, {"version": 3, "v2Checkpoint": {}}])
def test_deltalake_reads_a_checkpoint_in_several_files(table: Path, told: dict[str, Any]) -> None:
    handle, right = opened(table), expected(table)
    log(table, "_last_checkpoint").write_text(json.dumps(told))
    assert found(handle) == right
    assert handle.asked == len(APPS)


@pytest.mark.parametrize("told", ["", "[]", '{"size": 1}', '{"version": "x"}', '{"version": null}'])
def test_deltalake_reads_the_log_where_the_last_checkpoint_is_unreadable(
    table: Path, told: str
) -> None:
    handle, right = opened(table), expected(table)
    log(table, "_last_checkpoint").write_text(told)
    assert found(handle) == right
    assert handle.asked == len(APPS)


def test_deltalake_says_what_is_wrong_with_a_damaged_log(table: Path) -> None:
    handle = opened(table)
    log(table, f"{3:020d}.checkpoint.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(Exception, match=r"(?i)parquet|checkpoint|EOF|range"):
        found(handle)
    assert handle.asked


def test_a_missing_commit_leaves_the_answer_to_deltalake(table: Path) -> None:
    handle = opened(table)
    log(table, f"{4:020d}.json").unlink()
    with pytest.raises(Exception, match=r"(?i)not found|no such file|object"):
        found(handle)
    assert handle.asked
