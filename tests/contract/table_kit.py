"""What the suite of the tables needs: each kind of table, and an outsider who changes its log."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pk import settings
from pk.clock import SystemClock
from pk.tiering import layout
from pk.tiering.delta import DeltaTables
from pk.tiering.fsspec_store import open_store
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table import MemoryTables, Snapshot, Table, TableFactory

TOPIC, TOPIC_ID = "flights", "2f1c6a2e-55a0-4c87-9a6d-0d6f4f7f8f10"


@dataclass
class Kit:
    """A factory of tables, and what an outsider does to a table's directory."""

    factory: TableFactory
    drop: Callable[[], None]
    roll_back: Callable[[int], None]
    damage: Callable[[str], Callable[[], None]]  #: what the outsider alters → how it is repaired

    def table(self) -> Table:
        return self.factory.table(TOPIC, TOPIC_ID)


#: Changes of the newest commit's JSON: a pattern and its replacement.
DAMAGE = {
    "no add": (r'\{"add"', '{"aed"'),
    "bound": (r"(maxValues.*?offset.*?)\d(\d)", r"\g<1>0\2"),
    "end": (r'(:0:end","version":)\d', r"\g<1>9"),
    "row sum": (r'(:0:sum","version":)\d', r"\g<1>3"),
}


def _altered(newest: Snapshot, what: str) -> Snapshot:
    """Return the same damage for the fake."""
    files, counters = dict(newest.files), dict(newest.counters)
    path = max(files)
    if what == "no add":
        del files[path]
    elif what == "bound":
        files[path] = replace(files[path], max_offset=files[path].max_offset - 1)
    elif what == "end":
        counters[0] = counters[0]._replace(end=counters[0].end + 700)
    else:
        counters[0] = counters[0]._replace(sum=counters[0].sum ^ 1)
    return Snapshot(newest.version, newest.table_id, files, counters, newest.protocol)


def alone(tables: TableFactory) -> Kit:
    """Return tables that no outsider touches."""
    return Kit(tables, lambda: None, lambda _: None, lambda _: lambda: None)


Run = Callable[[Callable[[Kit], Awaitable[None]]], None]


def running(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Return what runs a test against tables of this kind: memory, file or s3."""
    given: dict[str, object] = {"tier_url": tmp_path.as_uri()}
    root = tmp_path
    if kind == "s3":
        gateway = request.getfixturevalue("s3_server")
        given = gateway.server_settings(f"tables/{tmp_path.name}")
        root = gateway.directory / "data" / gateway.bucket / "tables" / tmp_path.name
    home = root / layout.table_path(TOPIC, TOPIC_ID)

    def roll_back(versions: int) -> None:
        logs = sorted((home / "_delta_log").glob("*.json"))
        for path in logs[-versions:]:
            path.unlink()

    def damage(what: str) -> Callable[[], None]:
        path = max((home / "_delta_log").glob("*.json"))
        before = path.read_text()
        old, new = DAMAGE[what]
        path.write_text(re.sub(old, new, before, count=1))
        assert path.read_text() != before
        return lambda: path.write_text(before) and None

    def go(test: Callable[[Kit], Awaitable[None]]) -> None:
        async def whole() -> None:
            if kind == "memory":
                tables = MemoryTables()
                uri = tables.table(TOPIC, TOPIC_ID).uri

                def altered(what: str) -> Callable[[], None]:
                    tables.damage(uri, lambda newest: _altered(newest, what))
                    return lambda: tables.repair(uri)

                kit = Kit(
                    tables,
                    lambda: tables.drop(uri),
                    lambda n: tables.roll_back(uri, n),
                    altered,
                )
                await test(kit)
                return
            clock = SystemClock()
            chosen = StoreSettings.of(settings.SERVER.resolve(given))
            store = open_store(chosen, clock)
            real = DeltaTables(chosen, store, clock)
            try:
                await test(Kit(real, lambda: shutil.rmtree(home), roll_back, damage))
            finally:
                await real.close()
                await store.close()

        asyncio.run(whole())

    return go
