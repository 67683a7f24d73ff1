"""Golden directories: what each format of pk wrote, kept so that later builds open it.

    python tests/golden/golden.py        write tests/data/golden/format-N.tar.xz of this build

An archive holds the data directory of one node, the tier with its Delta tables, the checkpoint of a
Spark query that stopped in the middle of its topic, and `expected.json`: the format, the rows of
each topic, and the committed offsets of a group.  The topics are plain ones of each codec, tiered
ones, one with committed, aborted and open transactions, and a compacted one that was cleaned.

The archive of a format is never written again: `make golden` refuses to.  (Format 0 was not kept.)
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

import pk
from pk import AdminClient, Consumer, Producer, TopicPartition
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s
from pk.log import directory

FOLDER = Path(__file__).resolve().parents[1] / "data" / "golden"
CODECS = ("none", "lz4", "zstd")
TIERED = "tiered"
QUERIED = "queried"
TRANSACTED = "transacted"
COMPACTED = "compacted"
GROUP = "golden"
TRANSACTIONAL_ID = "golden"
RECORDS = 400
QUERY_RECORDS = 150  #: records that the Spark query had read when it stopped
CONFIGS = {"retention_ms": -1, "segment_bytes": 64 * 1024}
COMPACT = {
    "cleanup_policy": "compact", "segment_bytes": 16 * 1024, "min_cleanable_dirty_ratio": "0.01",
    "delete_retention_ms": 10**15,
}  # fmt: skip
SETTINGS = {"log_cleaner_backoff_ms": 50}
KEYS = 7  #: of the compacted topic
PATIENCE_S = 120.0


def topics() -> list[str]:
    """The names of all topics of an archive."""
    return [*plain_topics(), TRANSACTED, COMPACTED]


def plain_topics() -> list[str]:
    """The topics that get the same records, in any codec."""
    return [*(f"local-{codec}" for codec in CODECS), TIERED, QUERIED]


def server(home: Path) -> EmbeddedServer:
    """The node of an archive that lies in `home`."""
    return EmbeddedServer(home, tier_url=(home / "tier").as_uri(), settings=SETTINGS)


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
            tiered = topic in (TIERED, TRANSACTED)
            own = COMPACT if topic == COMPACTED else {}
            admin.create_topic(topic, 2, {**CONFIGS, "tier_enable": tiered, **own})
    for topic in plain_topics():
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


def transact(address: str) -> None:
    """Write transactions that end in every way: two commit, one aborts, one stays open."""
    with Producer(address, transactional_id=TRANSACTIONAL_ID, compression="lz4") as producer:
        producer.init_transactions()
        for number, kept in enumerate([True, False, True]):
            producer.begin_transaction()
            for turn in range(30):
                value = b"%d.%d" % (number, turn)
                producer.send(TRANSACTED, value=value, key=b"t", partition=turn % 2)
            producer.commit_transaction() if kept else producer.abort_transaction()
    left = Producer(address, transactional_id=f"{TRANSACTIONAL_ID}-open")
    left.init_transactions()
    left.begin_transaction()
    left.send(TRANSACTED, value=b"open", partition=0).result(PATIENCE_S)
    left.close(0)  # nothing ends the transaction


def compact(address: str) -> None:
    """Overwrite a few keys, delete one, and wait until each partition has been cleaned."""
    deadline = monotonic_s() + PATIENCE_S
    with Producer(address) as producer:
        for number in range(900):
            gone = number % KEYS == 3 and number > 850
            producer.send(
                COMPACTED, key=b"k%d" % (number % KEYS), partition=number % 2,
                value=None if gone else b"%d" % number + bytes(200),
            )  # fmt: skip
            if number % 20 == 19:  # small batches, so that segments roll
                producer.flush(PATIENCE_S)
    while not all(cleaned(address, number) for number in range(2)):
        assert monotonic_s() < deadline, "the cleaner does not finish"
        block_s(0.2)


def cleaned(address: str, partition: int) -> bool:
    """Whether the older records of a partition of the compacted topic are gone."""
    left = [row for row in consumed(address, COMPACTED) if row[0] == partition]
    return len(left) < 200


def commit(address: str) -> dict[str, list[int]]:
    """Commit offsets of a group; returns them by topic, one for each partition."""
    places = [TopicPartition(topic, number) for topic in (TIERED, QUERIED) for number in range(2)]
    wanted = {place: 10 * (place.partition + 1) for place in places}
    with Consumer(address, group_id=GROUP, enable_auto_commit=False) as consumer:
        consumer.commit(wanted)
    return committed(address)


def committed(address: str) -> dict[str, list[int]]:
    """The committed offsets of the group, by topic."""
    with Consumer(address, group_id=GROUP, enable_auto_commit=False) as consumer:
        return {
            topic: [consumer.committed(TopicPartition(topic, number)) or 0 for number in range(2)]
            for topic in (TIERED, QUERIED)
        }


def wait_tiered(address: str) -> None:
    """Wait until the tables hold every stable record of the tiered topics."""
    deadline = monotonic_s() + PATIENCE_S
    with AdminClient(address) as admin:
        while any(
            one.tiered_end < one.last_stable_offset
            for one in admin.describe_topics([TIERED, TRANSACTED])
        ):
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
    """Write the archive of this build's format and return its path."""
    path = FOLDER / f"format-{directory.FORMAT}.tar.xz"
    if path.exists():
        raise SystemExit(f"{path} is there: the archive of a format is never written again")
    with tempfile.TemporaryDirectory(prefix="pk-golden-") as work:
        home = Path(work) / "home"
        (home / "tier").mkdir(parents=True)
        with server(home) as node:
            fill(node.address)
            transact(node.address)
            compact(node.address)
            wait_tiered(node.address)
            offsets = commit(node.address)
            expected = {topic: consumed(node.address, topic) for topic in topics()}
            query(node.address, home, maxOffsetsPerTrigger=str(QUERY_RECORDS))
        stop_the_query_half_way(home)
        first = json.loads((home / "checkpoint" / "offsets" / "0").read_text().splitlines()[-1])
        (home / "expected.json").write_text(
            json.dumps(
                {
                    "format": directory.FORMAT,
                    "build": pk.__version__,
                    "topics": expected,
                    "committed": offsets,
                    "checkpoint": first["topics"][QUERIED]["offsets"],
                }
            )
        )
        shutil.rmtree(home / "data" / "run")  # paths of this machine
        (home / "data" / "metadata" / "reserve").unlink()  # room for a full disk: random bytes
        shutil.rmtree(home / "rows")
        FOLDER.mkdir(parents=True, exist_ok=True)
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
