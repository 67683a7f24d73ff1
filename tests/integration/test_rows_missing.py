"""Rule T17 on a real server: rows that another engine deletes from a topic's table are reported.
They come back, or the loss is accepted, by a command only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s

pytestmark = pytest.mark.integration

PATIENCE_S = 90
TOPIC_SETTINGS = {
    "retention_ms": -1,
    "segment_bytes": 32_768,
    "local_retention_bytes": 0,
    "tier_max_lag_ms": 100,
    "tier_file_bytes": 32_768,
    "file_delete_delay_ms": 0,
}


class Cold:
    """A topic whose first records are in the table only, or in table and log."""

    def __init__(self, server: EmbeddedServer, admin: AdminClient, name: str, kept_ms: int) -> None:
        self.server, self.admin, self.name = server, admin, name
        admin.create_topic(name, 1, {**TOPIC_SETTINGS, "local_drop_delay_ms": kept_ms})
        self.produce(600)
        if not kept_ms:
            self.until(lambda: self.state().local_log_start >= 400)

    def produce(self, count: int) -> None:
        with Producer(self.server.address, batch_size=4_096) as producer:
            for _ in range(count):
                producer.send(self.name, b"x" * 400, partition=0)
            producer.flush()
        self.until(lambda: self.state().tiered_end == self.state().log_end)

    def state(self) -> Any:
        (found,) = self.admin.describe_topics([self.name])
        return found

    def until(self, holds: Callable[[], Any]) -> Any:
        deadline = monotonic_s() + PATIENCE_S
        while not (answer := holds()):
            assert monotonic_s() < deadline, self.server.tail()
            block_s(0.05)
        return answer

    def tier(self, status: str) -> Any:
        """Return the table's description once it has this status."""

        def there() -> Any:
            found = self.admin.describe_tier(self.name)
            return found if found.status == status else None

        return self.until(there)

    def table(self) -> DeltaTable:
        uri = self.admin.describe_tier(self.name).uri
        return DeltaTable(unquote(urlsplit(uri).path))

    def read(self, end: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Read from the beginning: the offsets, and the losses that the consumer reports."""
        offsets: list[int] = []
        losses: list[tuple[int, int]] = []
        place = TopicPartition(self.name, 0)
        with Consumer(self.server.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([place])

            def done() -> bool:
                try:
                    offsets.extend(record.offset for record in consumer.poll(0.5))
                except errors.DataLoss as loss:
                    losses.append((int(loss.details["offset"]), int(loss.details["next_offset"])))
                return bool(offsets) and offsets[-1] >= end - 1

            self.until(done)
        return offsets, losses


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[EmbeddedServer, AdminClient]]:
    tmp_path = tmp_path_factory.mktemp("rows")
    made = EmbeddedServer(
        tmp_path / "pk",
        tier_url=(tmp_path / "tier").as_uri(),
        settings={"log_retention_check_interval_ms": 100, "tier_retry_backoff_ms": 50},
    )
    with made, AdminClient(made.address) as admin:
        yield made, admin
    assert "BUG" not in made.log.read_text(), made.tail()


def test_an_outside_delete_is_told_and_settled(server: tuple[EmbeddedServer, AdminClient]) -> None:
    """No other copy of the rows exists, so they cannot be restored."""
    it = Cold(*server, "settled", kept_ms=0)
    it.table().delete('"offset" < 5 OR ("offset" >= 150 AND "offset" < 170)')
    found = it.tier("rows_missing")
    (missing,) = found.rows_missing
    assert missing.rows == 25
    assert missing.ranges[0] == (0, 5)
    offsets, losses = it.read(600)
    gone = {offset for start, end in losses for offset in range(start, end)}
    assert set(range(5)) <= gone <= {*range(5), *range(150, 170)}
    assert offsets == [offset for offset in range(5, 600) if not 150 <= offset < 170]
    assert it.server.log.read_text().count(" tier_rows_missing topic=settled ") == 1
    back = it.admin.repair_tier("settled")[0]
    assert (back.rows, back.missing) == (0, 25)
    settled = it.admin.accept_tier("settled")[0]
    assert (settled.rows, settled.missing) == (25, 0)
    assert it.tier("ok").partitions[0].removed == 25
    assert it.read(600) == (offsets, [])


def test_rows_come_back_by_command(server: tuple[EmbeddedServer, AdminClient]) -> None:
    """The local log still has the rows: after a DELETE, and after a RESTORE of an older version."""
    it = Cold(*server, "restored", kept_ms=3_600_000)
    whole = it.table().to_pyarrow_table(columns=["offset", "value"]).sort_by("offset")
    it.table().delete('"offset" < 5 OR ("offset" >= 150 AND "offset" < 170)')
    it.tier("rows_missing")
    back = it.admin.repair_tier("restored")[0]
    assert (back.rows, back.missing) == (25, 0)
    it.tier("ok")
    found = it.table().to_pyarrow_table(columns=["offset", "value"]).sort_by("offset")
    assert found.equals(whole)
    before = it.table().version()
    it.produce(100)
    it.table().restore(before)
    found = it.tier("rows_missing")
    assert [(each.rows, each.ranges) for each in found.rows_missing] == [(100, ((600, 700),))]
    assert it.admin.repair_tier("restored")[0].rows == 100
    it.produce(100)
    assert it.tier("ok").partitions[0].end == 800
    assert it.read(800) == (list(range(800)), [])


def uncounted(it: Cold, gone: frozenset[int] = frozenset()) -> int:
    """Write every file again as another engine does, without the rows `gone` and without statistics
    in the add actions (Delta's `stats` are optional); return the committed version.
    """
    table = it.table()
    home, version = Path(table.table_uri.removeprefix("file://")), table.version() + 1
    actions: list[dict[str, Any]] = [{"commitInfo": {"operation": "OPTIMIZE"}}]
    for number, old in enumerate(
        sorted(unquote(urlsplit(each).path) for each in table.file_uris())
    ):
        rows = pq.ParquetFile(old).read()
        kept = [offset not in gone for offset in rows.column("offset").to_pylist()]
        new = home / "partition=0" / f"part-{version:05d}-{number:05d}.snappy.parquet"
        pq.write_table(rows.filter(pa.array(kept)), new)
        actions += [
            {"remove": {
                "path": quote(str(Path(old).relative_to(home)), safe="/="), "dataChange": False,
                "deletionTimestamp": 1_700_000_000_000,
            }},
            {"add": {
                "path": str(new.relative_to(home)), "partitionValues": {"partition": "0"},
                "size": new.stat().st_size, "modificationTime": 1_700_000_000_000,
                "dataChange": False,
            }},
        ]  # fmt: skip
    with (home / "_delta_log" / f"{version:020d}.json").open("x") as commit:
        commit.writelines(json.dumps(action) + "\n" for action in actions)
    return version


def test_files_without_statistics_are_counted_from_their_footers(
    server: tuple[EmbeddedServer, AdminClient],
) -> None:
    """If all rows are there, none is reported missing; a missing row is still noticed."""
    it = Cold(*server, "uncounted", kept_ms=0)
    version = uncounted(it)
    assert it.table().version() == version
    assert it.table().get_add_actions(flatten=True).column("num_records").null_count > 0
    it.until(lambda: it.admin.describe_tier("uncounted").version >= version)
    assert it.tier("ok").rows_missing == ()
    assert it.read(600) == (list(range(600)), [])
    it.produce(100)  # a commit of pk's on top: its counters still fit
    assert it.tier("ok").partitions[0].end == 700
    assert " tier_rows_missing topic=uncounted " not in it.server.log.read_text()
    gone = frozenset((*range(5), 150, 151))
    uncounted(it, gone)
    (missing,) = it.tier("rows_missing").rows_missing
    assert missing.rows == len(gone)
    assert missing.ranges == ((0, 5),), "between a file's bounds nothing tells which are missing"
    offsets, losses = it.read(700)
    assert losses == [(0, 5)]
    assert offsets == [offset for offset in range(700) if offset not in gone]
    settled = it.admin.accept_tier("uncounted")[0]
    assert (settled.rows, settled.missing) == (len(gone), 0)
    assert it.tier("ok").rows_missing == ()
    assert it.read(700) == (offsets, [])


def test_rows_below_the_log_start_may_be_erased(server: tuple[EmbeddedServer, AdminClient]) -> None:
    """Deleted records share a file with later ones; another engine erases them, and no error is
    reported.  If a RESTORE brings them back, they are removed again.
    """
    it = Cold(*server, "erased", kept_ms=0)
    version = it.table().version()
    it.admin.delete_records({TopicPartition("erased", 0): 100})
    it.until(lambda: it.admin.describe_tier("erased").partitions[0].start == 100)
    it.table().delete('"offset" < 100')
    it.until(lambda: it.admin.describe_tier("erased").partitions[0].removed == 100)
    assert it.tier("ok").rows_missing == ()
    assert it.read(600) == (list(range(100, 600)), [])
    it.table().restore(version)
    it.produce(10)
    assert it.tier("ok").partitions[0].end == 610
    assert it.read(610) == (list(range(100, 610)), [])


@pytest.mark.parametrize("wanted", [{"retention_ms": 1}, {"retention_bytes": 1}])
def test_retention_stops_at_missing_rows_until_they_are_settled(
    server: tuple[EmbeddedServer, AdminClient], wanted: dict[str, int]
) -> None:
    """The age of missing rows is unknown: a reader that asks for them gets DataLoss."""
    (setting,) = wanted
    it = Cold(*server, setting.replace("_", "-"), kept_ms=0)
    files = it.table().get_add_actions(flatten=True)
    start, end = next(
        (low, high + 1)
        for low, high in zip(
            files.column("min.offset").to_pylist(), files.column("max.offset").to_pylist(),
            strict=True,
        )
        if low <= 150 <= high
    )  # fmt: skip
    it.table().delete(f'"offset" >= {start} AND "offset" < {end}')
    (missing,) = it.tier("rows_missing").rows_missing
    assert missing.ranges == ((start, end),)
    it.admin.alter_configs(it.name, wanted)
    it.until(lambda: it.state().log_start > 0)
    block_s(1)  # ten more visits
    assert it.state().log_start <= start
    offsets, losses = it.read(600)
    assert losses == [(start, end)]
    assert offsets[-1] == 599
    it.admin.accept_tier(it.name)
    it.until(lambda: it.state().log_start >= end)
    it.tier("ok")
