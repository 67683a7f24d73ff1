"""A query with holdRetention on real processes: its rows stay, within bounds (rule S1)."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from real_cluster import run, until

from pk import AdminClient, Producer, TopicPartition
from pk.cli.embedded import EmbeddedServer
from pk.client.connection import acquire, release
from pk.client.network_client import NetworkClient
from pk.sparkconnector.offsets import SourceProgress, TopicProgress
from pk.sparkconnector.query_progress import QueryProgress

pytestmark = pytest.mark.integration

#: The query is silent for longer than HOLD_MS only where the test wants it.
HOLD_MS = 30_000
SETTINGS = {
    "log_retention_check_interval_ms": "500",
    "hold_max_ms": str(HOLD_MS),
    "hold_grace_ms": "10000",
    "tier_max_lag_ms": "500",
    "local_drop_delay_ms": "0",
}
#: Whatever is older than a second expires, in the log and in the table.
SHORT = {
    "retention_ms": "1000",
    "segment_ms": "500",
    "local_retention_ms": "1000",
    "file_delete_delay_ms": "0",
}
GROUP = "held"
PLACE = TopicPartition("t", 0)


class Query:
    """What the driver of a streaming query publishes, without Spark."""

    def __init__(self, address: str, topic_id: str) -> None:
        self._held = acquire()
        self._topic_id = topic_id
        self._network = NetworkClient(self._held.world, address)
        self.warnings: list[str] = []
        self._progress = QueryProgress(
            self._held.world, self._network, GROUP, self.warnings.append, holds_retention=True
        )

    def says(self, offset: int) -> None:
        """Publish the position of the query."""
        progress: SourceProgress = {"t": TopicProgress(self._topic_id, {0: offset}, {})}

        async def publish() -> None:
            self._progress.publish(progress)

        self._held.run(publish())

    def close(self) -> None:
        self._held.run(self._network.close())
        release(self._held)


def test_rows_that_a_query_has_not_processed_stay_until_its_hold_falls(tmp_path: Path) -> None:
    """One server has a tier and one has none.  Most of the time is waiting: they run at once."""
    urls = {"local": "", "tiered": f"file://{tmp_path}/tier"}
    with ExitStack() as running, ThreadPoolExecutor(len(urls)) as pool:
        servers = [
            running.enter_context(EmbeddedServer(tmp_path / name, tier_url=url, settings=SETTINGS))
            for name, url in urls.items()
        ]
        list(pool.map(_rows_stay_until_the_hold_falls, servers))


def _rows_stay_until_the_hold_falls(server: EmbeddedServer) -> None:
    where = ["--bootstrap", server.address]
    with AdminClient(server.address) as admin:
        admin.create_topic("t", partitions=1, configs=SHORT)
        topic_id = admin.describe_topics(["t"])[0].topic_id

        def start() -> int:
            return admin.list_offsets({PLACE: "earliest"})[PLACE][0]

        query = Query(server.address, topic_id)
        query.says(0)
        time.sleep(6)  # a report of the coordinator
        with Producer(server.address) as producer:
            for _ in range(6):
                for number in range(100):
                    producer.send("t", b"%d" % number)
                producer.flush()
                time.sleep(0.6)
        time.sleep(4)
        assert start() == 0, "all of it is older than retention_ms"
        query.says(300)
        said_s = time.monotonic()
        until(lambda: start() == 300, "what the query has processed expires")
        assert "holds retention" in run(["groups", "describe", GROUP, *where])
        time.sleep(max(0.0, said_s + HOLD_MS / 1000 - 8 - time.monotonic()))
        assert start() == 300
        until(lambda: start() > 500, "the hold falls, and the rest expires")
        fallen = "has fallen: its query has not committed"
        until(lambda: fallen in run(["groups", "describe", GROUP, *where]))
        assert not query.warnings
        query.close()
    assert "retention_hold_fell" in (server.directory / "server.log").read_text()
