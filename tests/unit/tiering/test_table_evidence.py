"""What real Delta tables say of a batch (rule X11)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from pk import errors
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table_evidence import RETENTION_PROPERTY, ApplicationState, DeltaEvidence, state_of

ROWS = pa.table({"x": [1]})


def write(path: Path, *versions: int, app: str = "app", **more: Any) -> str:
    for version in versions:
        transactions = [Transaction(app, version)]
        properties = CommitProperties(app_transactions=transactions)
        write_deltalake(path, ROWS, mode="append", commit_properties=properties, **more)
    return f"file://{path}"


def test_the_newest_version_of_the_application_is_read(tmp_path: Path) -> None:
    url = write(tmp_path / "a b", 0, 1)
    write(tmp_path / "a b", 9, app="other")
    url = url.replace(" ", "%20")
    table_id = str(DeltaTable(tmp_path / "a b").metadata().id)
    assert state_of(url, "app") == ApplicationState(table_id, 1, "")
    assert state_of(url, "none") == ApplicationState(table_id, None, "")

    async def read() -> ApplicationState:
        evidence = DeltaEvidence(StoreSettings("file:///tier"))
        try:
            return await evidence.read(url, "other")
        finally:
            await evidence.close()

    assert asyncio.run(read()).version == 9


def test_a_retention_of_txns_is_named(tmp_path: Path) -> None:
    url = write(tmp_path / "t", 3, configuration={RETENTION_PROPERTY: "interval 7 days"})
    assert state_of(url, "app").retention == "interval 7 days"


def test_a_missing_table_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(errors.TierUnavailable, match="no Delta table"):
        state_of(f"file://{tmp_path}/none", "app")


def test_a_table_of_another_protocol_is_refused(tmp_path: Path) -> None:
    url = write(tmp_path / "t", 0, configuration={"delta.enableDeletionVectors": "true"})
    with pytest.raises(errors.TierTableChanged, match="T8"):
        state_of(url, "app")


def test_a_damaged_log_is_unreadable(tmp_path: Path) -> None:
    url = write(tmp_path / "t", 0)
    (tmp_path / "t" / "_delta_log" / f"{0:020d}.json").write_text("{")
    with pytest.raises(errors.PkError):
        state_of(url, "app")
