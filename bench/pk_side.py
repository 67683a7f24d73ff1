"""pk as a `Side`: `pk server start` on loopback, measured through its public Python client."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from bench import processes, runs
from bench.runs import Sample
from bench.sides import PARTITIONS, PROBE_TOPIC, SideFailed

WARM_UP = 1_000_000
START_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30


class PkSide:
    """One pk node (supervisor, controller, broker) and its Python clients."""

    name = "pk"
    description = "pk, one node without a tier, default settings, its Python client"

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._admin: Any = None
        self.address = ""

    def start(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pk.cli",
            "server",
            "start",
            "--dir",
            str(folder / "data"),
            "--json",
        ]
        # a deleted topic's files go at once, as on the other side
        command += ["--listen", "127.0.0.1:0", "--set", "file_delete_delay_ms=1000"]
        with (folder / "pk.err").open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        first: list[str] = []
        assert self._process.stdout is not None
        reader = threading.Thread(
            target=lambda out=self._process.stdout: first.append(out.readline()), daemon=True
        )
        reader.start()
        reader.join(START_TIMEOUT_S)
        if not first or not first[0].strip():
            self.stop()
            raise SideFailed(f"pk did not start:\n{(folder / 'pk.err').read_text()[-2000:]}")
        self.address = json.loads(first[0])["address"]
        from pk import AdminClient

        self._admin = AdminClient(self.address)
        self.create_topic(PROBE_TOPIC)

    def stop(self) -> None:
        if self._admin is not None:
            self._admin.close()
            self._admin = None
        if self._process is None:
            return
        processes.thaw(self.pids())
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def pids(self) -> list[int]:
        return [] if self._process is None else processes.children(self._process.pid)

    def create_topic(self, topic: str, partitions: int = PARTITIONS) -> None:
        self._admin.create_topic(topic, partitions=partitions)

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
        self, topic: str, values: Path, records: int, compression: str, mode: str
    ) -> Sample:
        return self._client(
            mode, topic, records, "--values", str(values), "--compression", compression
        )

    def latency(self, topic: str, records: int) -> Sample:
        return self._client("latency", topic, records, warm_up=1_000)

    def consume(self, topic: str, records: int, mode: str) -> Sample:
        return self._client(mode, topic, records, "--partitions", str(PARTITIONS))


def _epochs(states: Any) -> dict[int, int]:
    return {each.partition: each.leader_epoch for each in states}
