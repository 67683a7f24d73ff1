"""A compacted topic on a real broker: cleaned while it is written, and killed meanwhile."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer
from pk.client.admin import NewTopic
from pk.clock import block_s, monotonic_s

pytestmark = pytest.mark.integration

PATIENCE_S = 60
TOPIC = "state"
PLACE = TopicPartition(TOPIC, 0)
KEYS = 40
CONFIGS = {
    "cleanup_policy": "compact", "segment_bytes": "65536", "min_cleanable_dirty_ratio": "0.1",
}  # fmt: skip
SETTINGS = {"log_cleaner_backoff_ms": 50}


def overwrite(server: EmbeddedServer, latest: dict[bytes, bytes], start: int, count: int) -> None:
    """Write `count` values, in batches of ten records."""
    rng = random.Random(start)
    with Producer(server.address, linger_ms=5) as producer:
        futures = []
        for number in range(start, start + count):
            key = b"k%03d" % rng.randrange(KEYS)
            latest[key] = b"%06d" % number + bytes(500)
            futures.append(producer.send(TOPIC, latest[key], key=key, partition=0))
        for future in futures:
            future.result(PATIENCE_S)


def read(server: EmbeddedServer, start: int = 0) -> tuple[list[int], dict[bytes, bytes]]:
    """Read from `start` to the end: the offsets, and the latest value of each key."""
    offsets: list[int] = []
    latest: dict[bytes, bytes] = {}
    deadline = monotonic_s() + PATIENCE_S
    with Consumer(server.address) as consumer:
        consumer.assign([PLACE])
        end = consumer.end_offsets([PLACE])[PLACE]
        consumer.seek(PLACE, start)
        while consumer.position(PLACE, timeout_s=PATIENCE_S) < end:
            assert monotonic_s() < deadline, server.tail()
            for each in consumer.poll(0.5):
                offsets.append(each.offset)
                latest[each.key or b""] = each.value or b""
    return offsets, latest


def kill_in_a_cleaning(server: EmbeddedServer, latest: dict[bytes, bytes], written: int) -> int:
    """Write until a cleaning has written a file, and kill the node; return how much was written."""
    folder = Path(server.data) / "topics" / f"{TOPIC}-0"
    deadline = monotonic_s() + PATIENCE_S
    while True:
        assert monotonic_s() < deadline, server.tail()
        overwrite(server, latest, written, 600)
        written += 600
        for _ in range(500):
            if any(folder.glob("*.cleaned")):
                server.kill()
                return written
            block_s(0.001)


def test_every_reader_gets_the_latest_value_while_the_log_is_cleaned(tmp_path: Path) -> None:
    """And after a SIGKILL in the middle of cleanings."""
    latest: dict[bytes, bytes] = {}
    with EmbeddedServer(tmp_path, settings=SETTINGS) as server:
        with AdminClient(server.address) as admin:
            admin.create_topics([NewTopic(TOPIC, 1, configs=CONFIGS)])
        written = 0
        for turn in range(4):
            overwrite(server, latest, written, 600)
            written += 600
            offsets, found = read(server)
            assert found == latest
            if turn == 1:
                written = kill_in_a_cleaning(server, latest, written)
                server.start()
                assert read(server)[1] == latest
        overwrite(server, latest, written, 600)
        written += 600
        deadline = monotonic_s() + PATIENCE_S
        while len(offsets) > written // 2:
            assert monotonic_s() < deadline, server.tail()
            offsets, found = read(server)
            assert found == latest
        for start in (0, offsets[len(offsets) // 2] - 1):
            some, _ = read(server, start)
            assert some == sorted(some)
            assert set(some) <= set(range(start, written))
        server.kill()
        server.start()
        assert read(server)[1] == latest


def test_a_null_key_is_refused(tmp_path: Path) -> None:
    # rule L14
    with EmbeddedServer(tmp_path, settings=SETTINGS) as server:
        with AdminClient(server.address) as admin:
            admin.create_topics([NewTopic(TOPIC, 1, configs=CONFIGS)])
        with Producer(server.address, linger_ms=0) as producer:
            with pytest.raises(errors.InvalidRecord, match="null key"):
                producer.send(TOPIC, b"value", partition=0).result(PATIENCE_S)
            producer.send(TOPIC, b"value", key=b"k", partition=0).result(PATIENCE_S)


def test_a_topic_with_a_tier_is_accepted(tmp_path: Path) -> None:
    """Rule C2: a Spark job compacts its table."""
    tier_url = (tmp_path / "tier").as_uri()
    with (
        EmbeddedServer(tmp_path, settings=SETTINGS, tier_url=tier_url) as server,
        AdminClient(server.address) as admin,
    ):
        (created,) = admin.create_topics([NewTopic(TOPIC, 1, configs=CONFIGS)])
        assert created.error is None
        local = {**CONFIGS, "tier_enable": "false"}
        (created,) = admin.create_topics([NewTopic(f"{TOPIC}2", 1, configs=local)])
        assert created.error is None
