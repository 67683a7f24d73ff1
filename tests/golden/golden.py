"""Golden directories: what each format of pk wrote, kept so that later builds open it.

    python tests/golden/golden.py        write tests/data/golden/format-N.tar.xz of this build

An archive holds the data directory of one node, the tier with its Delta table, the checkpoint of a
Spark query that stopped in the middle of its topic, and `expected.json`: the rows of each topic,
the format, and for format 0 the layout.

A format is frozen when its number rises (docs/SEMANTICS.md).  The archive of a frozen format is
never written again.  Format 0 is not frozen: its archive follows the layout of the build, and
`make golden` writes it again after a change of the layout.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from pk import AdminClient, Consumer, Producer, TopicPartition
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s
from pk.log import directory

FOLDER = Path(__file__).resolve().parents[1] / "data" / "golden"
CODECS = ("none", "lz4", "zstd")
TIERED = "tiered"
QUERIED = "queried"
RECORDS = 400
QUERY_RECORDS = 150  #: records that the Spark query had read when it stopped
CONFIGS = {"retention_ms": -1, "segment_bytes": 64 * 1024}
PATIENCE_S = 120.0


def topics() -> list[str]:
    """The names of all topics of an archive."""
    return [*(f"local-{codec}" for codec in CODECS), TIERED, QUERIED]


def server(home: Path) -> EmbeddedServer:
    """The node of an archive that lies in `home`."""
    return EmbeddedServer(home, tier_url=(home / "tier").as_uri())


def consumed(address: str, topic: str) -> list[list[Any]]:
    """Every record of a topic: partition, offset, key, value, timestamp, headers; as text."""
    found = []
    with AdminClient(address) as admin, Consumer(address, auto_offset_reset="earliest") as consumer:
        ends = admin.offsets(topic)
        consumer.assign([TopicPartition(topic, place.partition) for place in ends])
        deadline = monotonic_s() + PATIENCE_S
        while any(consumer.position(place) < end for place, end in ends.items()):
            assert monotonic_s() < deadline, f"{topic}: the consumer stands still"
            for record in consumer.poll(0.2):
                headers = [[key, _text(value)] for key, value in record.headers]
                found.append(
                    [record.partition, record.offset, _text(record.key), _text(record.value),
                     record.timestamp_ms, headers]
                )  # fmt: skip
    return sorted(found, key=lambda row: row[:2])


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def fill(address: str) -> None:
    """Write every kind of record: keys, nulls, headers, batches of one and of many, each codec."""
    with AdminClient(address) as admin:
        for topic in topics():
            tiered = topic == TIERED
            admin.create_topic(topic, 2, {**CONFIGS, "tier_enable": tiered})
    for topic in topics():
        codec = topic.removeprefix("local-") if topic.startswith("local-") else "lz4"
        with Producer(address, compression=codec) as producer:
            for number in range(RECORDS):
                producer.send(
                    topic,
                    value=None if number % 50 == 7 else b"%d" % number * (1 + number % 40),
                    key=None if number % 3 == 0 else b"k%d" % (number % 11),
                    headers=[("n", b"%d" % number), ("none", None)] if number % 5 == 0 else None,
                    timestamp_ms=1_700_000_000_000 + number,
                    partition=number % 2,
                )
                if number % 97 == 0:
                    producer.flush(PATIENCE_S)
            columns = {"value": [b"column"] * 10, "partition": [0] * 10}
            schema = pa.schema([("value", pa.binary()), ("partition", pa.int32())])
            producer.send_batch(topic, pa.RecordBatch.from_pydict(columns, schema)).result(60)
            producer.flush(PATIENCE_S)


def wait_tiered(address: str) -> None:
    """Wait until the table holds every record of the tiered topic."""
    deadline = monotonic_s() + PATIENCE_S
    with AdminClient(address) as admin:
        while any(one.tiered_end < one.log_end for one in admin.describe_topics([TIERED])):
            assert monotonic_s() < deadline, "the copier does not finish"
            block_s(0.2)


def query(address: str, home: Path, **options: str) -> Any:
    """Run the archive's Spark query until it has read what it may; returns the rows it wrote."""
    from pk.sparkconnector import session

    spark = session(app_name="pk golden", master="local[2]", spark_sql_shuffle_partitions=2)
    out = str(home / "rows")
    given = {"subscribe": QUERIED, "startingOffsets": "earliest", **options}
    reader = spark.readStream.format("pk").option("pk.bootstrap.servers", address)
    (
        reader.options(**given)
        .load()
        .selectExpr("partition", "offset")
        .writeStream.foreachBatch(lambda rows, _: rows.write.mode("append").parquet(out))
        .option("checkpointLocation", str(home / "checkpoint"))
        .trigger(availableNow=True)
        .start()
        .awaitTermination(400)
    )
    rows = spark.read.parquet(out).collect()
    return sorted((row["partition"], row["offset"]) for row in rows)


def stop_the_query_half_way(home: Path) -> None:
    """Leave the checkpoint as a query leaves it that died after its first batch."""
    checkpoint = home / "checkpoint"
    for folder in ("offsets", "commits"):
        for path in (checkpoint / folder).glob("[0-9]*"):
            if path.name != "0":
                path.unlink()
        for path in (checkpoint / folder).glob(".*.crc"):
            path.unlink()


def make() -> Path:
    """Write the archive of this build and return its path."""
    with tempfile.TemporaryDirectory(prefix="pk-golden-") as work:
        home = Path(work) / "home"
        (home / "tier").mkdir(parents=True)
        with server(home) as node:
            fill(node.address)
            wait_tiered(node.address)
            expected = {topic: consumed(node.address, topic) for topic in topics()}
            query(node.address, home, maxOffsetsPerTrigger=str(QUERY_RECORDS))
        stop_the_query_half_way(home)
        first = json.loads((home / "checkpoint" / "offsets" / "0").read_text().splitlines()[-1])
        (home / "expected.json").write_text(
            json.dumps(
                {
                    "format": directory.FORMAT,
                    "layout": directory.LAYOUT,
                    "topics": expected,
                    "checkpoint": first["topics"][QUERIED]["offsets"],
                }
            )
        )
        shutil.rmtree(home / "data" / "run")  # paths of this machine
        (home / "data" / "metadata" / "reserve").unlink()  # room for a full disk: random bytes
        shutil.rmtree(home / "rows")
        FOLDER.mkdir(parents=True, exist_ok=True)
        path = FOLDER / f"format-{directory.FORMAT}.tar.xz"
        with tarfile.open(path, "w:xz") as archive:
            for name in ("data", "tier", "checkpoint", "expected.json"):
                archive.add(home / name, name, filter=_anonymous)
        return path


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def unpacked(archive: Path, home: Path) -> dict[str, Any]:
    """Unpack an archive into `home` and return its `expected.json`."""
    home.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as stored:
        # Python before 3.11.4 has no filters; these archives are ours.
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
        stored.extractall(home, **safely)
    found: dict[str, Any] = json.loads((home / "expected.json").read_text())
    return found


def archives() -> list[Path]:
    """The archives of all formats."""
    return sorted(FOLDER.glob("format-*.tar.xz"))


if __name__ == "__main__":
    print(f"{make()}", file=sys.stdout)
