"""The judgement of the campaign: consumer, table and snapshot against what was committed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from campaign import Verdict, rows_of
from deltalake import DeltaTable
from judging import difference
from load import COMPACTED, ID, PARTITIONS, PLAIN, Load

from pk import AdminClient
from pk.tiering import snapshot_table

COLUMNS = ("offset", "key", "value", "headers")
Row = tuple[int, bytes, bytes | None, bytes]  #: offset, key, value, id


def identified(rows: Iterable[tuple[Any, ...]]) -> list[Row]:
    """Return the rows with the id of the header in place of the headers, by offset."""
    found = []
    for offset, key, value, headers in rows:
        names = {each["key"]: each["value"] for each in headers or ()}
        found.append((offset, key, value, names[ID]))
    return sorted(found)


def consumed(address: str, topic: str, patience_s: float) -> dict[int, list[Row]]:
    """Return what a read_committed consumer gets of each partition."""
    rows = rows_of(address, topic, PARTITIONS, patience_s, columns=COLUMNS)
    return {number: identified(found) for number, found in rows.items()}


def stored(uri: str, options: dict[str, str] | None) -> dict[int, list[Row]]:
    """Return the rows that any engine reads from the table."""
    table = DeltaTable(uri, storage_options=options)
    read = table.to_pyarrow_table(columns=["partition", *COLUMNS])
    cells = [read.column(name).to_pylist() for name in ("partition", *COLUMNS)]
    found: dict[int, list[Any]] = {number: [] for number in range(PARTITIONS)}
    for number, *row in zip(*cells, strict=True):
        found[number].append(tuple(row))
    return {number: identified(rows) for number, rows in found.items()}


def check_plain(verdict: Verdict, load: Load, who: str, rows: dict[int, list[Row]]) -> None:
    """Check that each committed record is there once, in its order, and nothing else."""
    for number, found in rows.items():
        wanted = [each.id for each in load.of(PLAIN, number)]
        ids = [row[3] for row in found]
        verdict.check(ids == wanted, difference(f"{who}, {PLAIN} {number}", wanted, ids))


def check_compacted(verdict: Verdict, load: Load, who: str, rows: dict[int, list[Row]]) -> None:
    """Check the latest value of each key, and that every row is a committed record, once."""
    for number, found in rows.items():
        what = f"{who}, {COMPACTED} {number}"
        known = {each.id: (each.key, each.value) for each in load.of(COMPACTED, number)}
        strange = [row for row in found if known.get(row[3]) != (row[1], row[2])]
        verdict.check(not strange, f"{what}: {len(strange)} rows of no commit: {strange[:2]}")
        ids = [row[3] for row in found]
        verdict.check(len(set(ids)) == len(ids), f"{what}: a record is there twice")
        latest = {key: value for _, key, value, _ in found}
        live = {key: value for key, value in latest.items() if value is not None}
        check_latest(verdict, load, what, number, live)


def check_latest(
    verdict: Verdict, load: Load, what: str, number: int, found: dict[bytes, bytes]
) -> None:
    """Compare the latest values of a partition with those of the commits."""
    wanted = load.latest(number)
    differ = [key for key in wanted.keys() | found.keys() if wanted.get(key) != found.get(key)]
    verdict.check(not differ, f"{what}: {len(differ)} keys have another value: {differ[:3]}")


def check_snapshot(
    verdict: Verdict, load: Load, uri: str, topic_id: str, options: dict[str, str] | None
) -> None:
    """Compare the snapshot of the compacted topic, which is as of the end, with the commits."""
    home = snapshot_table.snapshot_uri(uri, COMPACTED, topic_id)
    for number, rows in stored(home, options).items():
        found = {key: value for _, key, value, _ in rows if value is not None}
        check_latest(verdict, load, f"the snapshot, {number}", number, found)


def check_all(
    verdict: Verdict,
    load: Load,
    address: str,
    options: dict[str, str] | None,
    patience_s: float,
) -> int:
    """Compare everything; return how many rows the tables have."""
    rows = 0
    for topic, check in ((PLAIN, check_plain), (COMPACTED, check_compacted)):
        with AdminClient(address) as admin:
            tier = admin.describe_tier(topic, timeout_s=60)
        check(verdict, load, "the consumer", consumed(address, topic, patience_s))
        table = stored(tier.uri, options)
        check(verdict, load, "the table", table)
        rows += sum(map(len, table.values()))
        if topic == COMPACTED:
            check_snapshot(verdict, load, tier.uri, tier.topic_id, options)
    return rows
