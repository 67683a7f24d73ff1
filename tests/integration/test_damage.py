"""Bits flipped in the only copy of a topic without a tier (rule L9)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.clock import monotonic_s
from pk.log import batch as batches

pytestmark = pytest.mark.integration

PK = Path(sys.executable).parent / "pk"
PATIENCE_S = 60
TOPIC = "flights"
BATCHES = 10
FLIPPED = 4  #: the batch that is damaged; each holds one record of this size
SIZE = 20_000


def values(consumer: Consumer, count: int) -> list[int]:
    """Return the numbers of the next records, until `count` of them or an error."""
    found: list[int] = []
    deadline = monotonic_s() + PATIENCE_S
    while len(found) < count:
        assert monotonic_s() < deadline, found
        found += [int((record.value or b"")[:3]) for record in consumer.poll(0.5)]
    return found


def repair(directory: Path, *options: str) -> Any:
    """Return the output of `pk log repair --json`."""
    command = [PK, "log", "repair", directory / "data", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return json.loads(done.stdout)


def segments(directory: Path, partition: int = 0) -> list[Path]:
    return sorted((directory / "data" / "topics" / f"{TOPIC}-{partition}").glob("*.log"))


def flip(directory: Path) -> Path:
    """Flip one bit of the value of record FLIPPED of partition 0."""
    wanted = b"%03d" % FLIPPED + bytes(1_000)
    (path,) = [each for each in segments(directory) if wanted in each.read_bytes()]
    raw = path.read_bytes()
    place = raw.index(wanted) + 500
    with path.open("r+b") as out:
        out.seek(place)
        out.write(bytes([raw[place] ^ 0x10]))
    return path


def refused(consumer: Consumer, kind: type[errors.PkError], says: str) -> errors.PkError:
    with pytest.raises(kind, match=says) as told:
        values(consumer, BATCHES)
    assert told.type is kind
    return told.value


def test_both_sides_of_a_damaged_batch_are_read_and_the_range_is_told_once(tmp_path: Path) -> None:
    """Rule L9 on the only copy: the reader gets the damaged range as an error once, and continues
    behind it.  The partition has a leader, takes appends, and reports its damage; a restart does
    not hide the damage.
    """
    with EmbeddedServer(tmp_path) as server, AdminClient(server.address) as admin:
        admin.create_topic(TOPIC, 2, {"retention_ms": -1, "segment_bytes": 65_536})
        with Producer(server.address, linger_ms=0) as producer:
            for number in range(BATCHES):
                for partition in (0, 1):
                    value = b"%03d" % number + bytes(SIZE)
                    producer.send(TOPIC, value, partition=partition).result(PATIENCE_S)
        assert len(segments(tmp_path)) > 2
        flip(tmp_path)
        place = TopicPartition(TOPIC, 0)
        whole = [number for number in range(BATCHES) if number != FLIPPED]
        with Consumer(server.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([place])
            assert values(consumer, FLIPPED) == whole[:FLIPPED]
            told = refused(consumer, errors.DataLoss, rf"offsets \[{FLIPPED}, {FLIPPED + 1}\)")
            assert told.details["offset"] == str(FLIPPED)
            assert told.details["next_offset"] == str(FLIPPED + 1)
            assert consumer.position(place) == FLIPPED + 1
            assert values(consumer, BATCHES - FLIPPED - 1) == whole[FLIPPED:]
            consumer.seek(place, FLIPPED)
            # a reader that starts in the range gets the error
            refused(consumer, errors.DataLoss, "checksum")
        described = {each.partition: each for each in admin.describe_topics([TOPIC])}
        assert isinstance(described[0].error, errors.CorruptLog)
        assert "pk log repair" in described[0].error.message
        assert described[0].leader == described[1].leader
        assert described[1].error is None
        (line,) = [each for each in server.log.read_text().splitlines() if "damaged_range" in each]
        assert f"{TOPIC}-0" in line
        with Producer(server.address) as producer:
            for partition in (0, 1):
                stored = producer.send(TOPIC, b"%03d" % BATCHES, partition=partition)
                assert stored.result(PATIENCE_S).offset == BATCHES
        server.kill("broker")
        with Consumer(server.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([place])
            assert values(consumer, FLIPPED) == whole[:FLIPPED]
            refused(consumer, errors.DataLoss, rf"offsets \[{FLIPPED}, {FLIPPED + 1}\)")
            assert values(consumer, BATCHES - FLIPPED) == [*whole[FLIPPED:], BATCHES]
        # The broker repairs nothing by itself, and the command refuses while a broker runs.
        (row,) = repair(tmp_path)["ranges"]
        assert (row["partition"], row["offset"], row["next_offset"]) == (
            f"{TOPIC}-0", FLIPPED, FLIPPED + 1,
        )  # fmt: skip
        refusal = subprocess.run(
            [PK, "log", "repair", tmp_path / "data", "--yes"],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert refusal.returncode == 1
        assert "is in use by process" in refusal.stderr
    assert repair(tmp_path)["ranges"] == [row]
    done = repair(tmp_path, "--yes", f"{TOPIC}-0")
    assert done["ranges"] == [row]
    assert repair(tmp_path)["ranges"] == []
    with EmbeddedServer(tmp_path) as server, AdminClient(server.address) as admin:
        assert [each.error for each in admin.describe_topics([TOPIC])] == [None, None]
        with Producer(server.address) as producer:
            stored = producer.send(TOPIC, b"%03d" % (BATCHES + 1), partition=0)
            assert stored.result(PATIENCE_S).offset == BATCHES + 1
        with Consumer(server.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([place])
            assert values(consumer, BATCHES + 1) == [*whole, BATCHES, BATCHES + 1]


def test_flipped_lengths_after_a_kill_cut_nothing(tmp_path: Path) -> None:
    """The first, a middle and the last batch of a partition announce more bytes than the file has.
    That is no torn tail: everything else is served, and no acknowledged offset is given again.
    """
    hits = (0, FLIPPED, BATCHES - 1)  #: of partition 0, 1, 2
    with EmbeddedServer(tmp_path) as server:
        with AdminClient(server.address) as admin:
            admin.create_topic(TOPIC, len(hits), {"retention_ms": -1})
        with Producer(server.address, linger_ms=0) as producer:
            for number in range(BATCHES):
                value = b"%03d" % number + bytes(SIZE)
                for partition in range(len(hits)):
                    producer.send(TOPIC, value, partition=partition).result(PATIENCE_S)
        for role in ("supervisor", "broker"):
            server.kill(role)
    for partition, hit in enumerate(hits):
        (path,) = segments(tmp_path, partition)
        raw = bytearray(path.read_bytes())
        (position,) = [
            at for at, header in batches.iter_headers(bytes(raw)) if header.base_offset == hit
        ]
        raw[position + 10] ^= 0x40  # of the length: 4 MiB
        path.write_bytes(raw)
    with EmbeddedServer(tmp_path) as server:
        for partition, hit in enumerate(hits):
            with Producer(server.address) as producer:
                stored = producer.send(TOPIC, b"%03d" % BATCHES, partition=partition)
                assert stored.result(PATIENCE_S).offset == BATCHES
            with Consumer(server.address, auto_offset_reset="earliest") as consumer:
                consumer.assign([TopicPartition(TOPIC, partition)])
                assert values(consumer, hit) == list(range(hit))
                refused(consumer, errors.DataLoss, rf"offsets \[{hit}, {hit + 1}\)")
                assert values(consumer, BATCHES - hit) == list(range(hit + 1, BATCHES + 1))
    rows = repair(tmp_path)["ranges"]
    assert {(row["partition"], row["offset"], row["next_offset"]) for row in rows} == {
        (f"{TOPIC}-{partition}", hit, hit + 1) for partition, hit in enumerate(hits)
    }
