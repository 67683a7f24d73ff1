"""A record flipped on the disk of a topic without a tier: only a reader can find it (rule L9)."""

from __future__ import annotations

from pathlib import Path

import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.clock import monotonic_s

pytestmark = pytest.mark.integration

PATIENCE_S = 60
TOPIC = "flights"
BATCHES = 10
FLIPPED = 4  #: the batch that is damaged; each holds one record of this size
SIZE = 20_000


def values(consumer: Consumer, count: int) -> list[int]:
    """The numbers of the next records, until `count` or an error."""
    found: list[int] = []
    deadline = monotonic_s() + PATIENCE_S
    while len(found) < count:
        assert monotonic_s() < deadline, found
        found += [int((record.value or b"")[:3]) for record in consumer.poll(0.5)]
    return found


def flip(directory: Path) -> Path:
    """One bit of the value of record FLIPPED of partition 0."""
    (path,) = (directory / "data" / "topics" / f"{TOPIC}-0").glob("*.log")
    raw = path.read_bytes()
    place = raw.index(b"%03d" % FLIPPED + bytes(1_000)) + 500
    with path.open("r+b") as out:
        out.seek(place)
        out.write(bytes([raw[place] ^ 0x10]))
    return path


def refused(consumer: Consumer, kind: type[errors.PkError], says: str) -> errors.PkError:
    with pytest.raises(kind, match=says) as told:
        values(consumer, BATCHES)
    assert told.type is kind
    return told.value


def test_the_reader_names_the_place_and_the_broker_takes_the_partition_offline(
    tmp_path: Path,
) -> None:
    """First partition and offset from the reader, then, when it asks there again, the file from the
    broker; nothing is skipped, other partitions go on, and a restart does not hide it.
    """
    with EmbeddedServer(tmp_path) as server, AdminClient(server.address) as admin:
        admin.create_topic(TOPIC, 2, {"retention_ms": -1})
        with Producer(server.address, linger_ms=0) as producer:
            for number in range(BATCHES):
                for partition in (0, 1):
                    value = b"%03d" % number + bytes(SIZE)
                    producer.send(TOPIC, value, partition=partition).result(PATIENCE_S)
        path = flip(tmp_path)
        damage = rf"offsets \[{FLIPPED}, {FLIPPED + 1}\) are damaged: checksum"
        with Consumer(server.address, auto_offset_reset="earliest", max_poll_records=1) as consumer:
            consumer.assign([TopicPartition(TOPIC, 0)])
            assert values(consumer, FLIPPED) == list(range(FLIPPED))
            refused(consumer, errors.CorruptBatch, rf"{TOPIC}-0 at offset {FLIPPED}: checksum")
            told = refused(consumer, errors.CorruptLog, damage)
            assert path.name in told.message
            assert told.acts == "operator"
        described = {each.partition: each.error for each in admin.describe_topics([TOPIC])}
        assert isinstance(described[0], errors.CorruptLog)
        assert described[1] is None
        (line,) = [
            each for each in server.log.read_text().splitlines() if "partition_offline" in each
        ]
        assert f"{TOPIC}-0" in line
        with Consumer(server.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([TopicPartition(TOPIC, 1)])
            assert values(consumer, BATCHES) == list(range(BATCHES))
        with Producer(server.address) as producer:
            with pytest.raises(errors.CorruptLog):
                producer.send(TOPIC, b"x", partition=0).result(PATIENCE_S)
            assert producer.send(TOPIC, b"x", partition=1).result(PATIENCE_S).offset == BATCHES
        server.kill("broker")
        with Consumer(server.address, auto_offset_reset="none") as consumer:
            place = TopicPartition(TOPIC, 0)
            consumer.assign([place])
            consumer.seek(place, FLIPPED)
            refused(consumer, errors.CorruptLog, "checksum")  # recovery met it, or this reader
