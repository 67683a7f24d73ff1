"""How old the oldest row is that a table lacks, as a real node's metrics say it.

The tier process is stopped, as a store would stop it that does not answer.  Records behind an open
transaction are not stable, so they do not age: `describe_topics` names who holds them back (L11).
"""

from __future__ import annotations

import os
import signal
import urllib.request
from pathlib import Path

import pytest
from real_cluster import until

from pk import AdminClient, Producer
from pk.cli.embedded import EmbeddedServer, ReservedPorts
from tests.integration.test_monitoring import value

pytestmark = [pytest.mark.integration, pytest.mark.long]

OLD_MS = 2_000


def age_ms(port: int, topic: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return value(reply.read().decode(), "pk_partition_tier_lag_ms", topic=topic, partition="0")


def test_the_age_of_what_a_table_lacks_grows_and_ends(tmp_path: Path) -> None:
    port = ReservedPorts().draw()
    settings = {
        "metrics": f"127.0.0.1:{port}",
        "tier_url": (tmp_path / "tier").as_uri(),
        "tier_max_lag_ms": 100,
    }
    with (
        EmbeddedServer(tmp_path / "node", settings=settings) as server,
        AdminClient(server.address) as admin,
        Producer(server.address) as producer,
    ):

        def stored() -> bool:
            return admin.describe_tier("flights").partitions[0].end == 1

        for topic in ("flights", "held"):
            admin.create_topic(topic, 1)
        producer.send("flights", b"0").result(30)
        until(stored, "the tier process runs")
        stopped = server.pids()["tier"]
        os.kill(stopped, signal.SIGSTOP)
        try:
            with Producer(server.address, transactional_id="id") as slow:
                slow.init_transactions()
                slow.begin_transaction()
                slow.send("held", b"1").result(30)
                producer.send("flights", b"1").result(30)
                until(lambda: age_ms(port, "flights") > OLD_MS, "the record ages")
                assert age_ms(port, "held") == 0
                (held,) = admin.describe_topics(["held"])
                assert held.oldest_transaction is not None
                assert held.oldest_transaction.producer_id == slow.identity[0]
                slow.abort_transaction()
        finally:
            os.kill(stopped, signal.SIGCONT)
        until(lambda: age_ms(port, "flights") == 0, "the table has it")
