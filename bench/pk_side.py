"""pk as a `Side`: `pk server start` on loopback, measured through its public Python client."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from bench import processes, runs, small_client
from bench.runs import Sample
from bench.sides import PARTITIONS, PROBE_TOPIC, SideFailed
from bench.values import VALUE_BYTES

WARM_UP = 1_000_000
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30
TIER_TIMEOUT_S = 300
#: A deleted topic's files go at once, as on the other side.
SETTINGS = {"file_delete_delay_ms": 1000}


class PkSide:
    """One pk node (supervisor, controller, broker) and its Python clients; `tiered`: with a tier
    in the same folder."""

    kind = "pk"

    def __init__(self, tiered: bool = False) -> None:
        self.tiered = tiered
        self.name = "pk with a tier" if tiered else "pk"
        tier = "with a file:// tier" if tiered else "without a tier"
        self.description = f"pk, one node {tier}, default settings, its Python client"
        self._folder = Path()
        self._server: Any = None
        self._admin: Any = None
        self.address = ""

    def start(self, folder: Path) -> None:
        from pk import AdminClient, errors
        from pk.cli.embedded import EmbeddedServer

        self._folder = folder
        tier, settings = self._tier()
        self._server = EmbeddedServer(folder, tier_url=tier, settings=SETTINGS | settings)
        try:
            self._server.start(START_TIMEOUT_S)
        except errors.PkError as problem:
            raise SideFailed(f"pk did not start: {problem}") from problem
        self.address = self._server.address
        self._admin = AdminClient(self.address)
        self._make_probe()

    def _tier(self) -> tuple[str, dict[str, Any]]:
        """Return the URL of the tier, and settings for it."""
        return (self._folder / "tier").as_uri() if self.tiered else "", {}

    def _make_probe(self) -> None:
        self.create_topic(PROBE_TOPIC)

    def stop(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        if self._server is None:
            return
        processes.thaw(self.pids())
        self._server.stop(STOP_TIMEOUT_S)
        self._server = None

    def pids(self) -> list[int]:
        running = self._server is not None and self._server.running
        return processes.children(self._server.pid) if running else []

    def create_topic(
        self, topic: str, partitions: int = PARTITIONS, configs: Mapping[str, str] | None = None
    ) -> None:
        self._admin.create_topic(topic, partitions=partitions, configs=configs)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._has_leaders(topic, partitions):
            if time.monotonic() > deadline:
                raise SideFailed(f"not all of {topic}'s {partitions} partitions have a leader")
            time.sleep(0.01)

    def grow_topic(self, topic: str, partitions: int) -> None:
        result = self._admin.create_partitions(topic, partitions)
        if result.error is not None:
            raise result.error

    def _has_leaders(self, topic: str, partitions: int) -> bool:
        from pk import errors

        try:
            states = self._admin.describe_topics([topic])
        except errors.UnknownTopicOrPartition:
            # another broker of the cluster was asked, which does not know the topic yet
            return False
        return len(states) == partitions and all(state.leader >= 0 for state in states)

    def alter_topic(self, topic: str, configs: Mapping[str, str]) -> None:
        self._admin.alter_configs(topic, configs)

    def ends(self, topic: str) -> list[int]:
        """Return where each partition ends."""
        return self._offsets(topic, "latest")

    def local_starts(self, topic: str) -> list[int]:
        """Return where each partition's local log begins."""
        return self._offsets(topic, "earliest_local")

    def _offsets(self, topic: str, at: str) -> list[int]:
        found = self._admin.offsets(topic, at)
        return [found[place] for place in sorted(found, key=lambda place: place.partition)]

    def tier(self, topic: str) -> Path:
        """Return the folder of the topic's table, once it holds the whole log."""
        self.await_tiered(topic)
        return Path(unquote(urlsplit(self._admin.describe_tier(topic).uri).path))

    def await_tiered(self, topic: str) -> None:
        """Wait until the tier holds the whole log."""
        deadline = time.monotonic() + TIER_TIMEOUT_S
        while True:
            states = self._admin.describe_topics([topic])
            if all(state.tiered_end == state.log_end for state in states):
                return
            if time.monotonic() > deadline:
                raise SideFailed(f"{topic} is not tiered: {states}")
            time.sleep(0.05)

    def segment_files(self, topic: str) -> list[Path]:
        return sorted((self._folder / "data" / "topics").glob(f"{topic}-*/*"))

    def delete_topic(self, topic: str) -> None:
        self._admin.delete_topic(topic)

    def probe(self) -> dict[int, int]:
        from pk import Consumer, Producer, TopicPartition

        states = self._admin.describe_topics([PROBE_TOPIC])
        token = uuid.uuid4().bytes
        with Producer(self.address, acks="all", linger_ms=0) as producer:
            futures = [
                producer.send(PROBE_TOPIC, token, partition=number) for number in range(PARTITIONS)
            ]
            offsets = {
                number: future.result(timeout=10).offset for number, future in enumerate(futures)
            }
        consumer = Consumer(self.address)
        seen: set[int] = set()
        try:
            consumer.assign([TopicPartition(PROBE_TOPIC, number) for number in offsets])
            for number, offset in offsets.items():
                consumer.seek(TopicPartition(PROBE_TOPIC, number), offset)
            for _ in range(20 * PARTITIONS):
                seen.update(
                    record.partition
                    for record in consumer.poll(timeout_s=0.5)
                    if record.value == token
                )
                if len(seen) == PARTITIONS:
                    return _epochs(states)
        finally:
            consumer.close()
        raise SideFailed(f"records returned from {sorted(seen)} only")

    def _client(
        self, mode: str, topic: str, records: int, *more: str, warm_up: int = WARM_UP
    ) -> Sample:
        command = [
            sys.executable,
            "-m",
            "bench.pk_client",
            mode,
            "--bootstrap",
            self.address,
            "--topic",
            topic,
        ]
        command += ["--records", str(records), "--warm-up", str(warm_up), *more]
        return runs.watch(command, runs.read_line, self.pids())

    def produce(
        self,
        topic: str,
        values: Path,
        records: int,
        compression: str,
        mode: str,
        batch_bytes: int | None = None,
    ) -> Sample:
        more = ["--values", str(values), "--compression", compression]
        more += ["--partitions", str(len(self._admin.describe_topics([topic])))]
        if batch_bytes is not None:
            more += ["--batch-bytes", str(batch_bytes)]
        warm_up = 0 if mode == "random" else WARM_UP
        return self._client(mode, topic, records, *more, warm_up=warm_up)

    def fill_evenly(self, topic: str, partitions: int, each: int) -> None:
        from pk import Producer

        with Producer(self.address, acks="all") as producer:
            sent = [
                producer.send(topic, bytes(VALUE_BYTES), partition=number)
                for number in range(partitions)
                for _ in range(each)
            ]
            for future in sent:
                future.result(timeout=60)

    def latency(self, topic: str, records: int) -> Sample:
        return self._client("latency", topic, records, warm_up=1_000)

    def transaction_latency(self, topic: str, records: int, mode: str) -> Sample:
        return self._client("transaction_latency", topic, records, warm_up=records // 6)

    def background(self, topic: str, values: Path, records_s: int) -> list[str]:
        command = [sys.executable, "-m", "bench.pk_client", "paced", "--bootstrap", self.address]
        return [*command, "--topic", topic, "--values", str(values), "--rate", str(records_s)]

    def small(self, topic: str, clients: int, seconds: float) -> Sample:
        command = small_client.command("pk", self.address, topic, clients, seconds)
        return runs.watch(command, runs.read_line, self.pids())

    def consume(
        self,
        topic: str,
        records: int,
        mode: str,
        partitions: int = PARTITIONS,
        starts: Sequence[int] = (),
    ) -> Sample:
        more = ["--partitions", str(partitions)]
        if starts:
            more += ["--starts", ",".join(map(str, starts))]
        return self._client(mode, topic, records, *more)


def table_files(folder: Path) -> list[Path]:
    """Return the files that the newest version of a table lists: its folder may hold others."""
    from deltalake import DeltaTable

    return [Path(unquote(urlsplit(uri).path)) for uri in DeltaTable(folder).file_uris()]


def _epochs(states: Any) -> dict[int, int]:
    return {each.partition: each.leader_epoch for each in states}
