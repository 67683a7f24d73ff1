"""A store that is slow, then silent, behind a running node; it never closes a connection.

Produce and reads of the local log do not touch the store.  Tiering waits, and reports what it waits
for.  No segment leaves the local log before the table covers it.  Afterwards every record is there
once (T3, T5, T6).
"""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from real_cluster import run
from slow_proxy import SlowProxy
from versitygw import S3Server

from pk import AdminClient, Consumer, Producer, TopicPartition, errors, settings
from pk.cli.embedded import EmbeddedServer
from pk.clock import SystemClock, block_s, monotonic_s
from pk.tiering.delta import DeltaTables
from pk.tiering.fsspec_store import open_store
from pk.tiering.store_settings import StoreSettings
from pk.tiering.table import Commit, always

pytestmark = [pytest.mark.s3, pytest.mark.integration]

PATIENCE_S = 90
TOPIC = "flights"
TIMEOUT_MS = 5_000
#: Small everything, so that uploads, commits, confirmations and drops are always under way.
TOPIC_SETTINGS = {
    "retention_ms": -1,
    "segment_bytes": 65_536,
    "local_retention_bytes": 131_072,
    "tier_max_lag_ms": 200,
    "tier_file_bytes": 65_536,
    "local_drop_delay_ms": 100,
    "file_delete_delay_ms": 200,
}
PARTITIONS = 2
PADDING = bytes(500)


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[SlowProxy]:
    with SlowProxy(s3_server.port) as made:
        yield made


class Node:
    """A server whose store is behind the proxy, and the records stored in it."""

    def __init__(self, home: Path, store: S3Server, proxy: SlowProxy) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.metrics = f"127.0.0.1:{probe.getsockname()[1]}"
        chosen = store.server_settings(f"slow/{home.name}")
        self.url = str(chosen.pop("tier_url"))
        self.direct = StoreSettings.of(
            settings.SERVER.resolve({**chosen, "tier_url": self.url})
        ).for_deltalake()
        given = {
            **chosen,
            "tier_endpoint_url": proxy.endpoint,
            "tier_timeout_ms": TIMEOUT_MS,
            "tier_retry_backoff_ms": 50,
            "log_retention_check_interval_ms": 100,
            "remote_fetch_max_wait_ms": TIMEOUT_MS,
            "metrics": self.metrics,
        }
        self.server = EmbeddedServer(home / "pk", tier_url=self.url, settings=given)
        self.stored: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}

    def produce(self, producer: Producer, count: int) -> None:
        """Produce records; return once each is acknowledged, or raise."""
        futures = []
        for _ in range(count):
            for partition, values in self.stored.items():
                values.append(b"%06d" % len(values) + PADDING)
                futures.append(producer.send(TOPIC, values[-1], partition=partition))
        for future in futures:
            future.result(PATIENCE_S)

    def read(self, starts: dict[int, int]) -> dict[int, list[bytes]]:
        """Return every value from these offsets to the end of the stored records."""
        found: dict[int, list[bytes]] = {number: [] for number in self.stored}
        with Consumer(self.server.address, auto_offset_reset="none") as consumer:
            places = [TopicPartition(TOPIC, number) for number in starts]
            consumer.assign(places)
            for place in places:
                consumer.seek(place, starts[place.partition])
            deadline = monotonic_s() + PATIENCE_S
            while any(consumer.position(p) < len(self.stored[p.partition]) for p in places):
                assert monotonic_s() < deadline, self.server.tail()
                for place, rows in consumer.poll_batches(0.2):
                    found[place.partition] += rows.column("value").to_pylist()
        return found

    def table(self) -> Any:
        """Return the table as it is in the store, read without the proxy; None before the first
        one.
        """
        with AdminClient(self.server.address) as admin:
            uri = admin.describe_tier(TOPIC).uri
        return DeltaTable(uri, storage_options=self.direct) if uri else None

    def check_local_drops(self) -> dict[int, int]:
        """Check that every record that left the local log is in the table (T6); return where each
        local log begins now.
        """
        with AdminClient(self.server.address) as admin:
            starts = {each.partition: each.local_log_start for each in admin.describe_topics()}
        if any(starts.values()):
            rows = self.table().to_pyarrow_table(columns=["partition", "offset"])
            for number, start in starts.items():
                held = {
                    offset
                    for partition, offset in zip(
                        rows["partition"].to_pylist(), rows["offset"].to_pylist(), strict=True
                    )
                    if partition == number
                }
                assert held.issuperset(range(start)), f"partition {number} begins at {start}"
        return starts

    def tiered(self) -> int:
        with AdminClient(self.server.address) as admin:
            return sum(max(0, each.tiered_end) for each in admin.describe_topics())

    def metric(self, name: str) -> float:
        text = urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=10).read().decode()
        lines = [each for each in text.splitlines() if each.startswith(f"{name} ")]
        return sum(float(line.split()[-1]) for line in lines)  # 0 while the process starts

    def described(self) -> dict[str, Any]:
        """Return `pk tier describe`, as a user gets it."""
        text = run(["tier", "describe", TOPIC, "--json", "--bootstrap", self.server.address])
        found: dict[str, Any] = json.loads(text)
        return found


def until(holds: Callable[[], Any], node: Node) -> Any:
    deadline = monotonic_s() + PATIENCE_S
    while not (answer := holds()):
        assert monotonic_s() < deadline, node.server.tail()
        block_s(0.1)
    return answer


def tail_of(node: Node, starts: dict[int, int]) -> dict[int, list[bytes]]:
    return {number: values[starts[number] :] for number, values in node.stored.items()}


def test_a_slow_and_then_silent_store_holds_up_nothing_but_the_tier(
    s3_server: S3Server, proxy: SlowProxy, tmp_path: Path
) -> None:
    node = Node(tmp_path, s3_server, proxy)
    with (
        node.server,
        AdminClient(node.server.address) as admin,
        Producer(node.server.address, batch_size=8_192) as producer,
    ):
        admin.create_topic(TOPIC, PARTITIONS, TOPIC_SETTINGS)
        node.produce(producer, 500)
        until(lambda: min(node.check_local_drops().values()) > 0, node)
        put = 'pk_tier_store_calls_total{role="tier",operation="put"}'
        until(lambda: node.metric(put) >= PARTITIONS, node)  # at least each partition's first file

        proxy.resume(delay_s=1.0)  # slow: a commit is many requests, one after the other
        before = node.tiered()
        for _ in range(5):
            node.produce(producer, 100)
            starts = node.check_local_drops()
            assert node.read(starts) == tail_of(node, starts)
        until(lambda: node.tiered() > before, node)

        proxy.stall()
        until(lambda: proxy.held, node)
        node.produce(producer, 300)
        problem = until(lambda: node.described()["problem"], node)
        assert problem["name"] == "TierUnavailable"
        assert "no answer within" in problem["message"] or "timed out" in problem["message"]
        until(lambda: node.metric("pk_tier_problems") == PARTITIONS, node)
        assert node.metric("pk_tier_lag") > 0
        answers = proxy.answers
        for _ in range(5):
            node.produce(producer, 100)
            starts = node.check_local_drops()
            assert node.read(starts) == tail_of(node, starts)
        with Consumer(
            node.server.address, auto_offset_reset="none", request_timeout_ms=TIMEOUT_MS
        ) as consumer:
            place = TopicPartition(TOPIC, 0)
            consumer.assign([place])
            consumer.seek(place, 0)
            with pytest.raises(errors.TierUnavailable):
                cold_until(consumer)
        assert proxy.answers == answers

        proxy.resume()
        total = sum(map(len, node.stored.values()))
        until(lambda: node.tiered() == total, node)
        until(lambda: node.described()["problem"] is None, node)
        node.check_local_drops()
        assert node.read(dict.fromkeys(node.stored, 0)) == node.stored
        rows = node.table().to_pyarrow_table(columns=["partition", "offset", "value"])
        rows = rows.sort_by([("partition", "ascending"), ("offset", "ascending")])
        assert list(zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True)) == [
            (number, offset, value)
            for number, values in node.stored.items()
            for offset, value in enumerate(values)
        ]
    assert "BUG" not in node.server.log.read_text(), node.server.tail()


def cold_until(consumer: Consumer) -> None:
    """Poll until it raises: the client may ask the tier more than once before it raises."""
    deadline = monotonic_s() + PATIENCE_S
    while monotonic_s() < deadline:
        assert not consumer.poll(0.5), "read from a store that does not answer"


async def answered(call: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result of a call on a store that answers, but on a busy machine perhaps too
    late.
    """
    deadline = monotonic_s() + PATIENCE_S
    while True:
        try:
            return await call()
        except errors.TierUnavailable:
            if monotonic_s() > deadline:
                raise


def test_every_call_on_a_silent_store_ends_by_itself(
    s3_server: S3Server, proxy: SlowProxy, tmp_path: Path
) -> None:
    """Calls that were made while it was silent do not disturb those after it answers again."""
    chosen = {
        **s3_server.server_settings(f"silent/{tmp_path.name}"),
        "tier_endpoint_url": proxy.endpoint,
        "tier_timeout_ms": 500,
        "tier_retry_backoff_ms": 20,
    }

    async def whole() -> None:
        clock = SystemClock()
        wanted = StoreSettings.of(settings.SERVER.resolve(chosen))
        store = open_store(wanted, clock)
        tables = DeltaTables(wanted, store, clock)
        table = tables.table("t", "id")
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "put": lambda: store.put("a", b"x"),
            "put_if_absent": lambda: store.put_if_absent("b", b"x"),
            "get_range": lambda: store.get_range("a", 0, 1),
            "head": lambda: store.head("a"),
            "list": lambda: store.list(""),
            "delete": lambda: store.delete("a"),
            "probe": lambda: tables.probe("p"),
            "load": lambda: table.load([0]),
            "create": table.create,
            "vacuum": lambda: table.vacuum(0, always),
        }
        try:
            snapshot = await answered(table.create)
            proxy.stall()
            with pytest.raises(errors.TierUnavailable):
                await table.commit(Commit(read=snapshot, counters={}, adds=(), removes=()))
            for _ in range(2):
                outcomes = await asyncio.gather(
                    *(call() for call in calls.values()), return_exceptions=True
                )
                told = dict(zip(calls, outcomes, strict=True))
                assert {name for name, each in told.items() if type(each)} == set(calls)
                for name, outcome in told.items():
                    assert isinstance(outcome, errors.TierUnavailable), (name, outcome)
            proxy.resume()
            assert await answered(lambda: table.load([0])) is not None
            await answered(calls["put"])
            assert await answered(calls["get_range"]) == b"x"
        finally:
            await tables.close()
            await store.close()

    asyncio.run(whole())
