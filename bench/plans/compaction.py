"""The cleaners of compacted logs: how fast each cleans, and what pk's costs the broker's clients.

Each round makes a log of its own, of one partition in segments of 64 MiB, and keeps it dirty until
the measurement begins (`min_compaction_lag_ms`).
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import cold_client, compaction, processes, runs
from bench.kafka.broker import HERE, KafkaBroker
from bench.kafka.side import KafkaSide
from bench.plans import Base
from bench.runs import RunFailed, Sample
from bench.sides import Party, Side
from pk.sparkconnector import jars

RECORDS_OF_A_KEY = 10
_DAY_MS = "86400000"
_SEGMENT_MS = 100
_WAIT_S = 600.0
_SEND_S = 4.0
#: log4j's binding to the slf4j API, for the lines of the cleaner.
_LOGGER = "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3"
_CLEANED = re.compile(
    r"cleaned log (\S+)-0 \(dirty section = \[0, (\d+)\]\)\s+[\d.,]+ MB of log processed in "
    r"([\d.,]+) seconds"
)


class _LoggingBroker(KafkaBroker):
    """A broker whose cleaner says how long it worked."""

    def command(self, jvm: str, program: str, *arguments: str) -> list[str]:
        command = super().command(jvm, program, *arguments)
        path = command[command.index("-cp") + 1]
        more = jars.resolve((_LOGGER,))
        command[command.index("-cp") + 1] = ":".join([path, *map(str, more)])
        config = f"-Dlog4j2.configurationFile={HERE / 'cleaner.log4j2.properties'}"
        return [command[0], config, *command[1:]]


class CleanerSide(KafkaSide):
    """One Kafka broker of the benchmark's settings."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "kafka's cleaner"
        self.broker = _LoggingBroker()

    def cleaned(self, topic: str) -> tuple[int, float] | None:
        """Return the end of a topic's first cleaning, and its seconds; None = not yet."""
        return cleaned((self._folder / "kafka.out").read_text(errors="replace"), topic)


def cleaned(text: str, topic: str) -> tuple[int, float] | None:
    """Return what Kafka's log says of a topic's first cleaning: its end, and its seconds."""
    for name, end, seconds in _CLEANED.findall(text):
        if name == topic:
            return int(end), float(seconds.replace(",", ""))
    return None


class Cleaning(Base):
    """The work of pk's cleaner process, and Kafka's log cleaner in its broker."""

    def side(self, role: str) -> Any:
        return self.bench.party("cleaner", CleanerSide)

    def parties(self, role: str) -> tuple[Party, ...]:
        return (self.side(role),) if role == "peer" else ()

    def round(self, role: str, mode: str) -> Sample:
        count = self.counts[role]
        if role == "peer":
            return self._kafka(count, count // RECORDS_OF_A_KEY)
        command = [sys.executable, "-m", "bench.compaction", "--only", "local"]
        command += ["--records", str(count), "--keys", str(count // RECORDS_OF_A_KEY)]
        return runs.watch(command, runs.read_line, ())

    def _kafka(self, count: int, keys: int) -> Sample:
        side, topic = self.side("peer"), self.bench.fresh("cleaning")
        configs = {"cleanup.policy": "compact", "min.compaction.lag.ms": _DAY_MS}
        configs["segment.bytes"] = str(compaction.SEGMENT_BYTES)
        side.create_topic(topic, partitions=1, configs=configs)
        try:
            _send_keyed(side.address, topic, count, keys)
            side.alter_topic(topic, {"segment.ms": str(_SEGMENT_MS)})
            time.sleep(2 * _SEGMENT_MS / 1000)
            _send_keyed(side.address, topic, 1, 1)  # it closes the last segment
            used_s = processes.cpu_s(side.pids())
            side.alter_topic(topic, {"min.compaction.lag.ms": "0"})
            end, seconds = _until(lambda: side.cleaned(topic), f"{topic} is not cleaned")
            used_s = processes.cpu_s(side.pids()) - used_s
        finally:
            side.delete_topic(topic)
        if end != count:
            raise RunFailed(f"Kafka cleaned {topic} up to {end}, not {count}")
        size = count * (compaction.KEY_BYTES + compaction.VALUE_BYTES)
        return Sample(size / seconds / 1e6, count, 0, used_s, 0, 0, {"seconds": seconds})


def _until(found: Callable[[], Any], words: str) -> Any:
    """Return what `found` finds first.  Raises `RunFailed` after ten minutes."""
    deadline = time.monotonic() + _WAIT_S
    while (what := found()) is None:
        if time.monotonic() > deadline:
            raise RunFailed(f"{words} after {_WAIT_S:g} s")
        time.sleep(0.2)
    return what


def _send_keyed(address: str, topic: str, count: int, keys: int) -> None:
    from confluent_kafka import Producer

    settings: dict[str, Any] = {"bootstrap.servers": address, "acks": "all", "linger.ms": 10}
    settings |= {"batch.size": 1 << 20, "queue.buffering.max.messages": 1_000_000}
    producer = Producer({**settings, "log_level": 0})
    for some, values in compaction.records(count, keys):
        for key, value in zip(some, values, strict=True):
            while True:
                try:
                    producer.produce(topic, value, key=key, partition=0)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.poll(0)
    if left := producer.flush(_WAIT_S):
        raise RunFailed(f"Kafka did not take {left} records of {topic}")


class CleaningIsolation(Base):
    """The mode says whether the broker cleans a log meanwhile."""

    def side(self, role: str) -> Side:
        return self.bench.pk

    def round(self, role: str, mode: str) -> Sample:
        side, hot, dirty = self.side(role), self.bench.fresh("hot"), self.bench.fresh("dirty")
        configs = {"cleanup_policy": "compact", "min_compaction_lag_ms": _DAY_MS}
        configs["segment_bytes"] = str(compaction.SEGMENT_BYTES)
        side.create_topic(hot, partitions=1)
        side.create_topic(dirty, partitions=1, configs=configs)
        try:
            _send_batches(side.address, dirty, self.counts[role])
            if mode == "cleaning":
                side.alter_topic(dirty, {"min_compaction_lag_ms": "0"})
                _until(lambda: _written(side, dirty) or None, f"{dirty} is not cleaned")
            command = cold_client.command(side.address, "", hot, 0, [0], _SEND_S)
            sample = runs.watch(command, runs.read_line, side.pids())
            if mode == "cleaning" and not _written(side, dirty):
                raise RunFailed(f"{dirty} was clean before the measurement ended: more records")
            return sample
        finally:
            side.delete_topic(hot)
            side.delete_topic(dirty)


def _written(side: Side, topic: str) -> list[Path]:
    """Return the files that a cleaning has written and the broker has not taken yet."""
    return [path for path in side.segment_files(topic) if path.name.endswith(".cleaned")]


def _send_batches(address: str, topic: str, count: int) -> None:
    import pyarrow as pa

    from pk import Producer

    with Producer(address, acks="all") as producer:
        for keys, values in compaction.records(count, count // RECORDS_OF_A_KEY):
            columns = {"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}
            producer.send_batch(topic, pa.RecordBatch.from_pydict(columns))
        producer.flush(_WAIT_S)
