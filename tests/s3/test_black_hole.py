"""A store on a real S3 server that becomes a black hole under load, then refuses and loses answers.

Nothing that was acknowledged is lost, and no segment leaves a local log before the table covers it
(T6), whatever the store does.  Afterwards every record is in the table once (T3, T5).

`make black-hole` runs the long form, 30 s of silence while 150,000 records are written, and prints
its figures.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from slow_proxy import SlowProxy
from versitygw import S3Server

from pk import AdminClient, Consumer, Producer, TopicPartition, settings
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s
from pk.tiering.store_settings import StoreSettings

pytestmark = [pytest.mark.s3, pytest.mark.integration]

TOPIC, PARTITIONS, PATIENCE_S = "t", 2, 300
TOPIC_SETTINGS = {
    "retention_ms": -1,
    "segment_bytes": 16_384,
    "local_retention_bytes": 16_384,
    "tier_max_lag_ms": 200,
    "tier_file_bytes": 131_072,
    "local_drop_delay_ms": 100,
    "file_delete_delay_ms": 200,
}
PADDING = bytes(100)
#: A tier process that was refused asks again later and later: it may take so long until both an
#: answer was lost and a request was refused.
STORM_MAX_S = 40


@dataclass(slots=True, frozen=True)
class Form:
    """How long the store is silent, and how many records are written.

    A third of the `load` records is written before the silence, the others during it.  Meanwhile
    `single` records are written, each after the one before it was acknowledged.  `late` records
    follow the silence, and then come in portions of a tenth in a storm of errors.
    """

    outage_s: float
    load: int
    single: int
    late: int
    storm_s: float


#: Portions in which records are written during the silence.
PORTIONS = 10
SHORT = Form(1.0, 6_000, 20, 1_000, 1.0)
LONG = Form(30.0, 150_000, 500, 50_000, 20.0)


@dataclass(slots=True)
class Node:
    """A server whose store is behind the proxy, and the records that it has acknowledged."""

    server: EmbeddedServer
    direct: dict[str, str]
    acknowledged: dict[tuple[int, int], bytes] = field(default_factory=dict)
    uri: str = ""  #: of the table
    slowest_ms: float = 0.0  #: of the records that were written one by one
    _count: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def send(self, producer: Producer, count: int, *, singly: bool = False) -> None:
        """Write records; each is acknowledged when the call returns."""
        futures = []
        for _ in range(count):
            with self._lock:
                self._count += 1
                value = b"%d " % self._count + PADDING
                partition = self._count % PARTITIONS
            began_s = monotonic_s()
            future = producer.send(TOPIC, value, partition=partition)
            if singly:
                future.result(PATIENCE_S)
                self.slowest_ms = max(self.slowest_ms, 1_000 * (monotonic_s() - began_s))
            futures.append((future, partition, value))
        for future, partition, value in futures:
            offset = future.result(PATIENCE_S).offset
            with self._lock:
                assert (partition, offset) not in self.acknowledged
                self.acknowledged[partition, offset] = value

    def table(self) -> dict[tuple[int, int], bytes]:
        """Return every row of the table, read without the proxy; {} before there is a table."""
        if not self.uri:
            with AdminClient(self.server.address) as admin:
                self.uri = admin.describe_tier(TOPIC).uri
            if not self.uri:
                return {}
        try:
            read = DeltaTable(self.uri, storage_options=self.direct)
        except TableNotFoundError:
            return {}
        rows = read.to_pyarrow_table(columns=["partition", "offset", "value"])
        found = {}
        names = ("partition", "offset", "value")
        for number, offset, value in zip(*(rows[n].to_pylist() for n in names), strict=True):
            assert (number, offset) not in found, "a row is there twice"
            found[number, offset] = value
        return found

    def check_drops(self) -> int:
        """Check that every record that left a local log is in the table; return their number."""
        with AdminClient(self.server.address) as admin:
            starts = {each.partition: each.local_log_start for each in admin.describe_topics()}
        rows = self.table()
        gone = [(number, at) for number, start in starts.items() for at in range(start)]
        missing = [each for each in gone if each not in rows]
        assert not missing, f"pruned before they were in the table: {missing[:5]}"
        return len(gone)

    def tiered(self) -> int:
        with AdminClient(self.server.address) as admin:
            return sum(max(0, each.tiered_end) for each in admin.describe_topics())

    def read(self) -> dict[tuple[int, int], bytes]:
        """Return every record of the topic, as a consumer reads it."""
        found: dict[tuple[int, int], bytes] = {}
        with Consumer(self.server.address, auto_offset_reset="earliest") as consumer:
            places = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
            consumer.assign(places)
            deadline = monotonic_s() + PATIENCE_S
            while len(found) < len(self.acknowledged):
                assert monotonic_s() < deadline, self.server.tail()
                for place, rows in consumer.poll_batches(0.5):
                    offsets, values = rows.column("offset"), rows.column("value")
                    for offset, value in zip(offsets.to_pylist(), values.to_pylist(), strict=True):
                        found[place.partition, offset] = value
        return found

    def until(self, holds: Callable[[], Any]) -> float:
        """Wait; return for how many seconds."""
        began_s = monotonic_s()
        while not holds():
            assert monotonic_s() - began_s < PATIENCE_S, self.server.tail()
            block_s(0.1)
        return monotonic_s() - began_s


@pytest.fixture
def proxy(s3_server: S3Server) -> Iterator[SlowProxy]:
    with SlowProxy(s3_server.port) as made:
        yield made


@pytest.fixture
def node(s3_server: S3Server, proxy: SlowProxy, tmp_path: Path) -> Iterator[Node]:
    chosen = s3_server.server_settings(f"hole/{tmp_path.name}")
    url = str(chosen.pop("tier_url"))
    wanted = settings.SERVER.resolve({**chosen, "tier_url": url})
    given = {
        **chosen,
        "tier_endpoint_url": proxy.endpoint,
        "tier_timeout_ms": 2_000,
        "tier_retry_backoff_ms": 50,
        "log_retention_check_interval_ms": 100,
    }
    made = EmbeddedServer(tmp_path / "pk", tier_url=url, settings=given)
    with made:
        yield Node(made, StoreSettings.of(wanted).for_deltalake())


def silence(node: Node, proxy: SlowProxy, producer: Producer, form: Form) -> dict[str, Any]:
    """Write through the silence of the store; return what was measured."""
    node.send(producer, form.load // 3)
    node.until(lambda: node.check_drops() > 0)
    proxy.black_hole()
    left = form.load - form.load // 3

    def load() -> None:
        for portion in range(PORTIONS):
            node.send(producer, (left * (portion + 1)) // PORTIONS - (left * portion) // PORTIONS)
            block_s(form.outage_s / PORTIONS)

    tiered, writing = node.tiered(), threading.Thread(target=load)
    writing.start()
    began_s, sent = monotonic_s(), 0
    with Producer(node.server.address) as other:
        for portion in range(PORTIONS):
            due = form.single * (portion + 1) // PORTIONS
            node.send(other, due - sent, singly=True)
            sent = due
            node.check_drops()
            block_s(max(0.0, began_s + form.outage_s * (portion + 1) / PORTIONS - monotonic_s()))
    writing.join(PATIENCE_S)
    assert not writing.is_alive()
    pruned, acknowledged = node.check_drops(), len(node.acknowledged)
    assert acknowledged == form.load + form.single, "the store holds no acknowledgement up"
    proxy.resume()
    recovered_s = node.until(lambda: node.tiered() >= acknowledged)
    return {
        "tiered_before": tiered,
        "pruned_in_silence": pruned,
        "acknowledged_in_silence": acknowledged - tiered,
        "slowest_single_ms": round(node.slowest_ms),
        "recovered_s": round(recovered_s, 1),
    }


def storm(node: Node, proxy: SlowProxy, producer: Producer, form: Form) -> dict[str, Any]:
    """Write while the store refuses requests and loses answers."""
    refused, lost = proxy.refused, proxy.lost
    proxy.storm(refuses=0.4, loses=0.15)
    began_s = monotonic_s()
    while (passed_s := monotonic_s() - began_s) < STORM_MAX_S:
        if passed_s > form.storm_s and proxy.refused > refused and proxy.lost > lost:
            break
        node.send(producer, form.late // 10)
        node.check_drops()
        block_s(0.1)
    assert proxy.refused > refused
    proxy.resume()
    settled_s = node.until(lambda: node.tiered() >= len(node.acknowledged))
    return {
        "refused": proxy.refused - refused,
        "answers_lost": proxy.lost - lost,
        "recovered_from_storm_s": round(settled_s, 1),
    }


def test_a_store_that_swallows_refuses_and_forgets_costs_no_record(
    node: Node, proxy: SlowProxy
) -> None:
    form = LONG if os.environ.get("BLACK_HOLE") == "long" else SHORT
    with AdminClient(node.server.address) as admin:
        admin.create_topic(TOPIC, PARTITIONS, TOPIC_SETTINGS)
    with Producer(node.server.address) as producer:
        node.send(producer, 10)
        node.acknowledged, before = {}, node.acknowledged
        figures = silence(node, proxy, producer, form)
        node.acknowledged.update(before)
        node.send(producer, form.late)
        figures |= storm(node, proxy, producer, form)
    assert node.read() == node.acknowledged
    assert node.table() == node.acknowledged
    assert "BUG" not in node.server.log.read_text(), node.server.tail()
    print(json.dumps({"records": len(node.acknowledged), **figures}))
