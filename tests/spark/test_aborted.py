"""Aborted records reach no reader: 100,000 records in transactions, 30 % of them aborted.

A read_committed consumer, Spark's batch and streaming reads and the topic's Delta table have
exactly the records of the committed transactions, in order (rules L11, L12, T12).  The older
part of the topic is in the table, and the newer part only in the broker's log.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable
from real_cluster import until

from pk import AdminClient, Consumer, Producer, TopicPartition
from pk.cli.embedded import EmbeddedServer

SEED = 20
RECORDS = 100_000
HOT = 20_000  #: the last of them; the table lacks at least their end
COLD_END = 5_000  #: the table has more offsets than this of each partition
ABORTED_SHARE = 0.3
PARTITIONS = 4
COLUMNS = ("partition", "offset", "value")
PLACES = [TopicPartition("t", number) for number in range(PARTITIONS)]
PAD = b":" + bytes(60)
CONFIGS = {
    "retention_ms": -1,
    "segment_bytes": 256 << 10,
    "local_drop_delay_ms": 0,
    "tier_max_lag_ms": 3_600_000,
    "tier_file_bytes": 128 << 10,
}


@dataclass
class Log:
    """The values that a producer wrote to each partition, in order."""

    rng: random.Random
    written: dict[int, list[bytes]] = field(
        default_factory=lambda: {n: [] for n in range(PARTITIONS)}
    )
    committed: dict[int, list[bytes]] = field(
        default_factory=lambda: {n: [] for n in range(PARTITIONS)}
    )
    count: int = 0

    def write(self, producer: Producer, until: int) -> None:
        """Write transactions of about 500 records, and abort some of them."""
        while self.count < until:
            end = min(until, self.count + self.rng.randint(400, 600))
            values = [b"%06d" % number + PAD for number in range(self.count, end)]
            places = [self.rng.randrange(PARTITIONS) for _ in values]
            aborted = self.rng.random() < ABORTED_SHARE
            producer.begin_transaction()
            rows = {"value": values, "partition": pa.array(places, pa.int32())}
            producer.send_batch("t", pa.record_batch(rows))
            producer.flush()
            if aborted:
                producer.abort_transaction()
            else:
                producer.commit_transaction()
            for place, value in zip(places, values, strict=True):
                self.written[place].append(value)
                if not aborted:
                    self.committed[place].append(value)
            self.count = end

    def aborted_in(self, first: int, end: int) -> int:
        """Return how many records with numbers in `[first, end)` were aborted."""
        kept = {int(value[:6]) for values in self.committed.values() for value in values}
        return sum(number not in kept for number in range(first, end))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tuple[str, AdminClient, Log]]:
    """Topic t: the table has a part of the first 80,000 records and none of the last 20,000."""
    server = EmbeddedServer(
        tmp_path / "pk",
        tier_url=(tmp_path / "tier").as_uri(),
        settings={"log_retention_check_interval_ms": 200},
    )
    with server, AdminClient(server.address) as admin:
        made = Log(random.Random(SEED))
        admin.create_topic("t", PARTITIONS, CONFIGS)
        with Producer(server.address, transactional_id="writer", compression="none") as producer:
            producer.init_transactions()
            made.write(producer, RECORDS - HOT)
            until(lambda: min(table_ends(admin)) > COLD_END, "the table grows")
            admin.alter_configs("t", {"tier_file_bytes": 1 << 30})
            made.write(producer, RECORDS)

        def stable() -> bool:
            states = admin.describe_topics(["t"])
            return all(e.last_stable_offset == e.high_watermark == e.log_end for e in states)

        until(stable, "every marker is written")
        yield server.address, admin, made


def table_ends(admin: AdminClient) -> list[int]:
    """Return the first offset of each partition that the table does not have."""
    return [each.end for each in admin.describe_tier("t").partitions] or [0]


def consumed(address: str, isolation_level: str) -> pa.Table:
    """Return the rows that a consumer gets from the earliest offset on."""
    found: list[pa.RecordBatch] = []
    with Consumer(
        address, isolation_level=isolation_level, auto_offset_reset="earliest"
    ) as consumer:
        consumer.assign(PLACES)
        ends = consumer.end_offsets(PLACES)

        def read() -> bool:
            for place, rows in consumer.poll_batches(0.2):
                columns = [
                    pa.array([place.partition] * rows.num_rows, pa.int32()),
                    rows.column("offset"),
                    rows.column("value"),
                ]
                found.append(pa.record_batch(columns, names=list(COLUMNS)))
            return all(consumer.position(place) >= end for place, end in ends.items())

        until(read, f"a {isolation_level} consumer has read everything")
    return pa.Table.from_batches(found)


def rows_of(table: pa.Table) -> list[tuple[int, int, bytes]]:
    """Return partition, offset and value of every row, sorted."""
    return sorted(zip(*(table.column(name).to_pylist() for name in COLUMNS), strict=True))


def values_of(table: pa.Table) -> dict[int, list[bytes]]:
    """Return the values of each partition, in the order of the rows."""
    return {
        number: table.filter(pc.field("partition") == number).column("value").to_pylist()
        for number in range(PARTITIONS)
    }


def assert_same(found: Sequence[object], expected: Sequence[object], reader: str) -> None:
    """Fail at the first row that differs; a diff of so many rows takes minutes."""
    for number, (one, other) in enumerate(zip(found, expected, strict=False)):
        assert one == other, f"{reader}: row {number} of {len(found)}"
    assert len(found) == len(expected), reader


def streamed(spark: Any, frame: Any, folder: Path, run_available: Any) -> pa.Table:
    """Return the rows of a streaming query that ends with what is present now."""
    query = run_available(frame, folder / "checkpoint", folder / "out")
    assert query.exception() is None
    rows = spark.read.parquet(str(folder / "out"))
    return rows.selectExpr("partition", "offset", "CAST(value AS BINARY) AS value").toArrow()


def test_no_reader_gets_an_aborted_record(
    spark: Any, log: tuple[str, AdminClient, Log], tmp_path: Path, run_available: Any
) -> None:
    address, admin, expected = log
    tier = admin.describe_tier("t")
    ends = {each.partition: each.end for each in tier.partitions}
    assert expected.aborted_in(0, COLD_END * PARTITIONS) > 1_000
    assert expected.aborted_in(RECORDS - HOT, RECORDS) > 1_000

    # consumers: all of it is still in the log of the broker
    every = values_of(consumed(address, "read_uncommitted"))
    committed = consumed(address, "read_committed")
    kept = values_of(committed)
    for number in range(PARTITIONS):
        assert_same(every[number], expected.written[number], "a read_uncommitted consumer")
        assert_same(kept[number], expected.committed[number], "a read_committed consumer")
    rows = rows_of(committed)
    cold = [row for row in rows if row[1] < ends[row[0]]]
    assert 0 < len(cold) < len(rows)

    # the table, without pk
    table = DeltaTable(tier.uri, version=tier.version).to_pyarrow_table()
    assert_same(rows_of(table), cold, "the table")

    # Spark: a part comes from the table, and the rest from the broker
    options = {
        "pk.bootstrap.servers": address, "subscribe": "t", "startingOffsets": "earliest",
        "isolation.level": "read_committed",
    }  # fmt: skip
    loaded = spark.read.format("pk").options(**options).load()
    assert_same(rows_of(loaded.select(*COLUMNS).toArrow()), rows, "a batch read of Spark")
    frame = spark.readStream.format("pk").options(**options).load()
    found = rows_of(streamed(spark, frame, tmp_path, run_available))
    assert_same(found, rows, "a streaming read of Spark")

    # consumers again: the broker has the older part in the table only
    admin.alter_configs("t", {"local_retention_bytes": 0})

    def dropped() -> bool:
        return all(e.local_log_start > COLD_END for e in admin.describe_topics(["t"]))

    until(dropped, "the broker drops what the table has")
    assert_same(rows_of(consumed(address, "read_committed")), rows, "a consumer of the table")
    # The table may have got more files meanwhile, and never the end of the log.
    newest = {each.partition: each.end for each in admin.describe_tier("t").partitions}
    assert any(row[1] >= newest[row[0]] for row in rows), "no reader read from the broker"
