"""The log of a node has one line for each change of state: topics, settings, leaders, the tier."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import until

from pk import AdminClient, Producer
from pk.cli.embedded import EmbeddedServer

pytestmark = pytest.mark.integration

SETTINGS = {"tier_retry_backoff_ms": 50, "broker_heartbeat_interval_ms": 200}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(tmp_path, tier_url=(tmp_path / "tier").as_uri(), settings=SETTINGS) as it:
        yield it


def lines(server: EmbeddedServer, event: str) -> list[str]:
    """Return the lines of `event` so far."""
    text = server.log.read_text(errors="replace")
    return [line for line in text.splitlines() if re.search(rf"Z [A-Z]+ \w+ {event}( |$)", line)]


def test_each_change_of_a_topic_has_a_line(server: EmbeddedServer) -> None:
    with AdminClient(server.address) as admin:
        admin.create_topic("flights", 3)
        admin.alter_configs("flights", {"retention_ms": 60_000})
        admin.delete_topic("flights")
    (created,) = until(lambda: lines(server, "topic_created"))
    assert "topic=flights" in created
    assert "partitions=3" in created
    (altered,) = until(lambda: lines(server, "config_changed"))
    assert "retention_ms=60000" in altered
    (deleted,) = until(lambda: lines(server, "topic_deleted"))
    assert "topic=flights" in deleted
    assert len(lines(server, "registered")) == 1
    assert len(lines(server, "unfenced")) == 1


def test_a_store_that_fails_and_works_again_has_two_lines(
    server: EmbeddedServer, tmp_path: Path
) -> None:
    """However often the store is tried meanwhile."""
    quick = {"tier_max_lag_ms": 50, "tier_file_bytes": 4_096}
    tier, away = tmp_path / "tier", tmp_path / "away"
    with AdminClient(server.address) as admin, Producer(server.address) as producer:
        for topic in ("a", "b"):
            admin.create_topic(topic, 1, quick)
            producer.send(topic, b"first").result(30)
        until(lambda: all(each.tiered_end == 1 for each in admin.describe_topics()))
        shutil.move(tier, away)
        tier.write_text("a file where the store's directory was")
        for topic in ("a", "b"):
            producer.send(topic, b"second").result(30)
        until(lambda: lines(server, "tier_failing"))
        tier.unlink()
        shutil.move(away, tier)
        until(lambda: lines(server, "tier_recovered"))
        until(lambda: all(each.tiered_end == 2 for each in admin.describe_topics()))
    failing = lines(server, "tier_failing")
    kinds = [line.split(" error=")[1].split()[0] for line in failing]
    assert len(kinds) == len(set(kinds)), "one line a minute for each kind of error"
    assert not any("<" in line for line in failing), "one sentence, without XML"
