"""Apache Kafka as a `Side`: topics and probes through confluent-kafka, load through Java tools."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
)

from bench import runs, small_client
from bench.kafka.broker import VERSION, KafkaBroker, options, properties
from bench.kafka.readers import ConsumerReader, ProducerReader, latency_reader
from bench.sides import PARTITIONS, PROBE_TOPIC, SideFailed
from bench.values import VALUE_BYTES

WARM_UP = 1_000_000
_CALL_S = 10.0
_CREATE_S = 60.0  #: a thousand partitions on a busy machine
_ENDLESS = 10**9
#: ProducerPerformance ends a transaction by time: about 10,000 records at its rate with them.
TRANSACTION_MS = 20
_PRODUCER_PROGRAM = "org.apache.kafka.tools.ProducerPerformance"
_LATENCY_PROGRAM = "org.apache.kafka.tools.EndToEndLatency"
_CONSUMER_PROGRAM = "org.apache.kafka.tools.ConsumerPerformance"


class KafkaSide:
    """One Apache Kafka broker and its Java clients."""

    name = "kafka"
    kind = "kafka"
    replication = 1

    def __init__(self) -> None:
        self.broker: KafkaBroker = KafkaBroker()
        self.address = ""
        self._admin: Any = None
        self._folder = Path()

    @property
    def description(self) -> str:
        tuned = ", ".join(
            f"{key}={value}" for key, value in properties("producer.properties").items()
        )
        read = ", ".join(
            f"{key}={value}" for key, value in properties("consumer.properties").items()
        )
        heap = " ".join(option for option in options("jvm.options") if option.startswith("-Xm"))
        return f"Apache Kafka {VERSION}, one KRaft node, {heap}; producer {tuned}; consumer {read}"

    def start(self, folder: Path) -> None:
        self._folder = folder
        self.broker.start(folder)
        self.address = self.broker.address
        self._admin = AdminClient({"bootstrap.servers": self.broker.address, "log_level": 0})
        self.wait_for_nodes()
        self.create_topic(PROBE_TOPIC)

    def wait_for_nodes(self) -> None:
        """Return when topics can be created: a single node's port opens at that time."""

    def stop(self) -> None:
        self._admin = None
        self.broker.stop()

    def pids(self) -> list[int]:
        return self.broker.pids()

    def create_topic(
        self, topic: str, partitions: int = PARTITIONS, configs: Mapping[str, str] | None = None
    ) -> None:
        new = NewTopic(topic, partitions, self.replication, config=dict(configs or {}))
        futures = self._admin.create_topics([new], operation_timeout=_CREATE_S)
        futures[topic].result(_CREATE_S)
        deadline = time.monotonic() + _CREATE_S
        while True:
            known = self._admin.list_topics(topic, timeout=_CALL_S).topics[topic].partitions
            if len(known) == partitions and all(one.leader >= 0 for one in known.values()):
                return
            if time.monotonic() > deadline:
                raise SideFailed(f"not all of {topic}'s {partitions} partitions have a leader")
            time.sleep(0.01)

    def grow_topic(self, topic: str, partitions: int) -> None:
        futures = self._admin.create_partitions([NewPartitions(topic, partitions)])
        futures[topic].result(_CREATE_S)

    def alter_topic(self, topic: str, configs: Mapping[str, str]) -> None:
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in configs.items()
        ]
        resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
        self._admin.incremental_alter_configs([resource])[resource].result(_CALL_S)

    def ends(self, topic: str) -> list[int]:
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": "bench-ends"})
        try:
            count = len(consumer.list_topics(topic, timeout=_CALL_S).topics[topic].partitions)
            places = (TopicPartition(topic, number) for number in range(count))
            return [consumer.get_watermark_offsets(each, timeout=_CALL_S)[1] for each in places]
        finally:
            consumer.close()

    def segment_files(self, topic: str) -> list[Path]:
        return sorted((self._folder / "data").glob(f"{topic}-*/*"))

    def delete_topic(self, topic: str) -> None:
        self._admin.delete_topics([topic], operation_timeout=_CALL_S)[topic].result(_CALL_S)

    def probe(self) -> dict[int, int]:
        known = self._admin.list_topics(PROBE_TOPIC, timeout=_CALL_S).topics[PROBE_TOPIC].partitions
        if any(known[number].leader < 0 for number in range(PARTITIONS)):
            raise SideFailed("a partition has no leader")
        token = uuid.uuid4().bytes
        offsets: dict[int, int] = {}

        def delivered(error: Any, message: Any) -> None:
            if error is None:
                offsets[message.partition()] = message.offset()

        producer = Producer(
            {
                "bootstrap.servers": self.broker.address,
                "acks": "all",
                "linger.ms": 0,
                "log_level": 0,
            }
        )
        for number in range(PARTITIONS):
            producer.produce(PROBE_TOPIC, token, partition=number, on_delivery=delivered)
        producer.flush(_CALL_S)
        if len(offsets) < PARTITIONS:
            raise SideFailed(f"records stored on {sorted(offsets)} only")
        return self._read_back(offsets, token)

    def _read_back(self, offsets: dict[int, int], token: bytes) -> dict[int, int]:
        settings = {
            "bootstrap.servers": self.broker.address,
            "group.id": "bench-probe",
            "log_level": 0,
        }
        consumer = Consumer({**settings, "enable.auto.commit": False})
        epochs: dict[int, int] = {}
        try:
            consumer.assign(
                [TopicPartition(PROBE_TOPIC, number, offset) for number, offset in offsets.items()]
            )
            for _ in range(20 * PARTITIONS):
                message: Any = consumer.poll(0.5)
                if message is not None and message.error() is None and message.value() == token:
                    epochs[message.partition()] = message.leader_epoch()
                if len(epochs) == PARTITIONS:
                    return epochs
        finally:
            consumer.close()
        raise SideFailed(f"records returned from {sorted(epochs)} only")

    def _confluent(
        self, mode: str, topic: str, records: int, *more: str, warm_up: int = WARM_UP
    ) -> runs.Sample:
        command = [sys.executable, "-m", "bench.kafka.confluent_client", mode]
        command += [
            "--bootstrap",
            self.broker.address,
            "--topic",
            topic,
            "--records",
            str(records),
            *more,
        ]
        return runs.watch([*command, "--warm-up", str(warm_up)], runs.read_line, self.pids())

    def produce(
        self,
        topic: str,
        values: Path,
        records: int,
        compression: str,
        mode: str,
        batch_bytes: int | None = None,
    ) -> runs.Sample:
        """Run ProducerPerformance, or confluent-kafka's producer, with the same values.

        `mode` fill: a run that is not timed.
        """
        if mode == "confluent":
            more = ("--values", str(values), "--compression", compression)
            return self._confluent("record", topic, records, *more)
        settings = {"compression.type": compression}
        if batch_bytes is not None:
            settings["batch.size"] = str(batch_bytes)
        command = self._producer(topic, values, records, -1, settings)
        if mode == "transactional":
            command += ["--transactional-id", topic]
            command += ["--transaction-duration-ms", str(TRANSACTION_MS)]
        warm_up = 0 if mode == "fill" else WARM_UP
        return runs.watch(command, ProducerReader(records, warm_up), self.pids())

    def fill_evenly(self, topic: str, partitions: int, each: int) -> None:
        settings = {"bootstrap.servers": self.broker.address, "acks": "all", "log_level": 0}
        producer = Producer(settings)
        for number in range(partitions):
            for _ in range(each):
                producer.produce(topic, bytes(VALUE_BYTES), partition=number)
        if left := producer.flush(60):
            raise SideFailed(f"{left} records were not stored in 60 s")

    def _producer(
        self, topic: str, values: Path, records: int, rate: int, more: Mapping[str, str]
    ) -> list[str]:
        settings = {**properties("producer.properties"), **more}
        arguments = ["--topic", topic, "--num-records", str(records)]
        arguments += ["--throughput", str(rate), "--payload-file", str(values)]
        arguments += ["--producer-props", f"bootstrap.servers={self.address}"]
        arguments += [f"{key}={value}" for key, value in settings.items()]
        return self.broker.command("client.options", _PRODUCER_PROGRAM, *arguments)

    def transaction_latency(self, topic: str, records: int, mode: str) -> runs.Sample:
        return self._confluent("transaction_latency", topic, records, warm_up=records // 6)

    def background(self, topic: str, values: Path, records_s: int) -> list[str]:
        return self._producer(topic, values, _ENDLESS, records_s, {})

    def small(self, topic: str, clients: int, seconds: float) -> runs.Sample:
        command = small_client.command("kafka", self.address, topic, clients, seconds)
        return runs.watch(command, runs.read_line, self.pids())

    def latency(self, topic: str, records: int) -> runs.Sample:
        """Run EndToEndLatency with its defaults: acks=all, values of 100 bytes."""
        arguments = [self.broker.address, topic, str(records), "all", str(VALUE_BYTES)]
        command = self.broker.command("client.options", _LATENCY_PROGRAM, *arguments)
        sample = runs.watch(command, latency_reader, self.pids(), whole_run=True)
        sample.records = records
        return sample

    def consume(
        self,
        topic: str,
        records: int,
        mode: str,
        partitions: int = PARTITIONS,
        starts: Sequence[int] = (),
    ) -> runs.Sample:
        """Run ConsumerPerformance, or confluent-kafka's consumer, from the beginning of the
        topic.
        """
        assert not starts, "Java's tool has no offsets to start from"
        if mode == "confluent":
            return self._confluent("records", topic, records, "--partitions", str(partitions))
        config = self._folder / "consumer.properties"
        config.write_text(
            "".join(f"{key}={value}\n" for key, value in properties("consumer.properties").items())
        )
        arguments = [
            "--bootstrap-server",
            self.broker.address,
            "--topic",
            topic,
            "--messages",
            str(records),
        ]
        arguments += [
            "--consumer.config",
            str(config),
            "--group",
            f"bench-{uuid.uuid4().hex}",
            "--fetch-size",
            "4194304",
        ]
        arguments += [
            "--show-detailed-stats",
            "--hide-header",
            "--reporting-interval",
            "100",
            "--timeout",
            "30000",
        ]
        command = self.broker.command("client.options", _CONSUMER_PROGRAM, *arguments)
        sample = runs.watch(command, ConsumerReader(WARM_UP), self.pids())
        if sample.figures.pop("seen") < records * 0.8:
            raise runs.RunFailed(f"ConsumerPerformance ended early: {sample}")
        return sample
