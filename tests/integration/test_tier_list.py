"""`pk tier list` and `pk tier list --orphans` on a real node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pk import AdminClient, Producer
from pk.cli.embedded import EmbeddedServer
from pk.cli.tier import app
from pk.clock import block_s, monotonic_s

pytestmark = pytest.mark.integration


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    tier = tmp_path / "tier"
    tier.mkdir()
    with EmbeddedServer(tmp_path / "node", tier_url=tier.as_uri()) as running:
        yield running


def fill(server: EmbeddedServer, topic: str) -> str:
    """Create a topic, write 10 records, wait until they are in its table, return its URI."""
    with AdminClient(server.address) as admin, Producer(server.address) as producer:
        admin.create_topic(topic, 1, {"tier_max_lag_ms": 50})
        for number in range(10):
            producer.send(topic, b"%d" % number)
        producer.flush(60)
        deadline = monotonic_s() + 60
        while admin.describe_tier(topic).partitions[0].rows < 10:
            assert monotonic_s() < deadline, "tiered"
            block_s(0.1)
        return admin.describe_tier(topic).uri


def ran(*arguments: str) -> Any:
    done = CliRunner().invoke(app, ["list", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_the_tables_of_all_topics_and_of_deleted_ones(server: EmbeddedServer) -> None:
    at = ("--bootstrap", server.address)
    refused = CliRunner().invoke(app, ["list", "--orphans", *at])
    assert "give the server's --tier-url" in str(refused.exception)
    uris = {topic: fill(server, topic) for topic in ("kept", "gone", "again")}
    found = {each["topic"]: each for each in ran(*at)["tables"]}
    assert {topic: each["uri"] for topic, each in found.items()} == uris
    assert [found["kept"][name] for name in ("rows", "lag", "status")] == [10, 0, "ok"]
    assert ran("--orphans", *at)["orphans"] == []

    with AdminClient(server.address) as admin:
        admin.delete_topics(["gone", "again"])
    renewed = fill(server, "again")
    orphans = {each["uri"]: each for each in ran("--orphans", *at)["orphans"]}
    assert set(orphans) == {uris["gone"], uris["again"]}
    assert renewed not in orphans
    files = [
        each for each in Path(uris["gone"].removeprefix("file://")).rglob("*") if each.is_file()
    ]
    assert orphans[uris["gone"]]["files"] == len(files)
    assert orphans[uris["gone"]]["bytes"] == sum(each.stat().st_size for each in files)
    shown = CliRunner().invoke(app, ["list", "--orphans", *at])
    assert uris["gone"] in shown.output.replace("\n", "")

    with AdminClient(server.address) as admin:
        admin.delete_topics(["kept", "again"])
    tier = uris["gone"].rsplit("/", 2)[0]
    assert len(ran("--orphans", "--tier-url", tier, *at)["orphans"]) == 4
