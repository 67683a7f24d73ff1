"""Snapshots on real Spark: the latest value of each key as of X, and a consumer from there on."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from deltalake import DeltaTable

from pk import Consumer, Producer, TopicPartition, errors
from pk.sparkconnector.maintenance import read_snapshot, snapshot, snapshot_plan, snapshot_version


def tiered(cluster, topic: str) -> None:
    cluster.wait(
        "all is tiered",
        lambda: all(each.lag == 0 for each in cluster.admin.describe_tier(topic).partitions),
    )


def produce(cluster, topic: str, rows: dict[bytes, bytes | None]) -> None:
    with Producer(cluster.address) as producer:
        sent = [
            producer.send(topic, key=key, value=value, headers=[("h", b"x")])
            for key, value in rows.items()
        ]
        producer.flush(60)
    for future in sent:
        future.result(0)
    tiered(cluster, topic)


def latest(cluster, topic: str) -> dict[tuple[int, bytes], tuple[int, bytes]]:
    """What a plain consumer finds: (partition, key) → (offset, value), without tombstones."""
    found = {}
    for partition, offset, key, value, *_ in cluster.consumed(topic):
        found[partition, key] = (offset, value)
    return {key: row for key, row in found.items() if row[1] is not None}


def in_snapshot(spark, cluster, topic: str) -> dict[tuple[int, bytes], tuple[int, bytes]]:
    rows = read_snapshot(spark, topic, cluster.address).collect()
    found = {(r.partition, bytes(r.key)): (r.offset, bytes(r.value)) for r in rows}
    assert len(found) == len(rows), "a key is twice in the snapshot"  # C3
    return found


def home_of(uri: str) -> Path:
    return Path(unquote(urlsplit(uri).path))


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_plan, "BUCKET_BYTES", 700)


@pytest.mark.usefixtures("small_buckets")
def test_snapshots_and_a_consumer_that_goes_on_from_one(spark, cluster) -> None:
    topic = cluster.topic(2, tier_max_lag_ms=200)
    keys = [b"key %d" % n for n in range(300)]
    produce(cluster, topic, dict.fromkeys(keys, b"first"))
    with pytest.raises(errors.SnapshotUnusable, match="there is none"):
        snapshot_version(cluster.address, topic)
    produce(cluster, topic, {key: None if n % 5 == 0 else b"second" for n, key in enumerate(keys)})
    first = snapshot(spark, cluster.address, topic)
    assert (first.kind, first.rows) == ("whole", 240)
    assert in_snapshot(spark, cluster, topic) == latest(cluster, topic)
    assert first.written_files > 4, "there are several buckets"

    again = snapshot(spark, cluster.address, topic)
    assert (again.kind, again.version) == ("unchanged", first.version)

    changed: dict[bytes, bytes | None] = {keys[1]: b"third", keys[2]: None, keys[5]: b"back"}
    produce(cluster, topic, changed)
    second = snapshot(spark, cluster.address, topic)
    assert (second.kind, second.rows) == ("increment", 240)
    assert 0 < second.removed_files <= 3 < first.written_files, "other buckets stay"
    assert in_snapshot(spark, cluster, topic) == latest(cluster, topic)

    produce(cluster, topic, {keys[3]: b"behind X", keys[4]: None, b"new": b"behind X"})
    ends = cluster.admin.offsets(topic)
    with Consumer(cluster.address, auto_offset_reset="none") as consumer:
        consumer.assign(list(ends))
        position = consumer.seek_to_snapshot(topic)
        assert position.version == second.version
        assert {p.partition: x for p, x in position.offsets.items()} == second.positions
        state = {
            (place.partition, row["key"]): (row["offset"], row["value"])
            for place, rows in position.batches()
            for row in rows.to_pylist()
        }
        assert len(state) == position.rows == 240
        seen = 0
        while any(consumer.position(place) < end for place, end in ends.items()):
            for record in consumer.poll(0.5):
                seen += 1
                assert record.offset >= position.offsets[TopicPartition(topic, record.partition)]
                state[record.partition, record.key] = (record.offset, record.value)
        assert seen == 3
    assert {key: row for key, row in state.items() if row[1] is not None} == latest(cluster, topic)

    gone = max(ends, key=lambda place: ends[place] - position.offsets[place])
    cluster.admin.delete_records({gone: ends[gone] - 1})
    cluster.wait(
        "retention moved the start of the table",
        lambda: (
            cluster.admin.describe_tier(topic).partitions[gone.partition].start == ends[gone] - 1
        ),
    )
    with Consumer(cluster.address) as consumer:
        consumer.assign(list(ends))
        with pytest.raises(errors.SnapshotUnusable, match="the log begins at"):
            consumer.seek_to_snapshot(topic)
    third = snapshot(spark, cluster.address, topic)
    assert in_snapshot(spark, cluster, topic) == latest(cluster, topic), third


def test_a_damaged_or_altered_snapshot_is_a_typed_error_and_is_rebuilt(spark, cluster) -> None:
    topic = cluster.topic(1, tier_max_lag_ms=200)
    produce(cluster, topic, {b"key %d" % n: b"value" for n in range(50)})
    report = snapshot(spark, cluster.address, topic)
    place = TopicPartition(topic, 0)
    (file,) = home_of(report.uri).glob("partition=0/*.parquet")
    whole = file.read_bytes()
    for at in (100, len(whole) - 9):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with Consumer(cluster.address) as consumer:
            consumer.assign([place])
            position = consumer.seek_to_snapshot(topic)
            with pytest.raises(errors.SnapshotUnusable, match="is damaged"):
                list(position.batches())
    with pytest.raises(Exception, match="SnapshotUnusable"):
        read_snapshot(spark, topic, cluster.address).collect()
    file.unlink()
    with Consumer(cluster.address) as consumer:
        consumer.assign([place])
        with pytest.raises(errors.SnapshotUnusable, match="is not in the store"):
            list(consumer.seek_to_snapshot(topic).batches())
    healed = snapshot(spark, cluster.address, topic, whole=True)
    assert in_snapshot(spark, cluster, topic) == latest(cluster, topic)

    DeltaTable(healed.uri).delete("offset = 7")
    with pytest.raises(errors.SnapshotUnusable, match="another engine changed it"):
        snapshot_version(cluster.address, topic)
    again = snapshot(spark, cluster.address, topic)
    assert (again.kind, again.why) == ("whole", "there is no usable snapshot")
    assert in_snapshot(spark, cluster, topic) == latest(cluster, topic)


def test_a_record_without_a_key_is_refused_by_name(spark, cluster) -> None:
    topic = cluster.topic(1, tier_max_lag_ms=200)
    produce(cluster, topic, {b"key": b"value"})
    cluster.fill_one(topic, b"no key")
    tiered(cluster, topic)
    with pytest.raises(errors.InvalidRequest, match=r"without a key \(partition 0, offset 1"):
        snapshot(spark, cluster.address, topic)


def test_sparks_hash_gives_each_key_the_same_bucket_in_every_version(spark) -> None:
    """An increment looks for a key in the bucket that an earlier run gave it."""
    row = spark.sql("SELECT xxhash64(CAST('key 1' AS BINARY)) AS a, xxhash64(X'') AS b").first()
    assert (row.a, row.b) == (911313546284094928, -7444071767201028348)
