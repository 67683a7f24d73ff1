"""Rounds of the client libraries: produce, consume, latency, many small requests."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench.kafka.readers import window_rate
from bench.plans import Base
from bench.runs import ROOT, RunFailed, Sample
from bench.values import VALUE_BYTES

#: Other clients' load while latency is measured.
LOAD_BYTES_S = 20_000_000
#: It must have printed this many windows (5 s each) before anything is timed.
_LOAD_WINDOWS = 2
_LOAD_TIMEOUT_S = 60.0
_SMALL_CLIENTS = 64
_SMALL_S = 8.0


class Produce(Base):
    """bench M5: every round has a topic of its own."""

    def round(self, role: str, mode: str) -> Sample:
        side, bench = self.side(role), self.bench
        topic = bench.fresh(f"{self.case.name}-{mode}")
        side.create_topic(topic)
        try:
            return side.produce(topic, bench.values, self.counts[role], self.variant.codec, mode)
        finally:
            side.delete_topic(topic)


class ProduceOwn(Produce):
    """pk in another mode is the peer, on the same server."""

    def side(self, role: str) -> Any:
        return self.bench.pk


class Filled(Base):
    """bench M5: one topic on each side, filled before with the same records."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.topics: dict[str, str] = {}

    def fill_roles(self) -> tuple[tuple[str, str], ...]:
        """Return the roles to fill, each with the mode of its producer."""
        return (("pk", "prebuilt"), ("peer", "fill"))

    def prepare(self) -> None:
        for role, mode in self.fill_roles():
            side = self.side(role)
            self.bench.wake(side)
            topic = self.bench.fresh(f"{self.case.name}-{self.variant.name}")
            self.bench.say(f"filling {topic} of {side.name}")
            side.create_topic(topic, configs=self.configs(role))
            self.topics[role] = topic
            side.produce(topic, self.bench.values, self.counts[role], self.variant.codec, mode)

    def configs(self, role: str) -> dict[str, str]:
        """Return the settings of a topic that differ from the defaults."""
        return {}

    def close(self) -> None:
        for role, topic in self.topics.items():
            self.bench.wake(self.side(role))
            self.side(role).delete_topic(topic)


class Consume(Filled):
    def round(self, role: str, mode: str) -> Sample:
        return self.side(role).consume(self.topics[role], self.counts[role], mode)


class Latency(Base):
    """One record in flight; variant `20 MB/s`: while another client produces to another topic."""

    def round(self, role: str, mode: str) -> Sample:
        side, bench = self.side(role), self.bench
        topic, load = bench.fresh("latency"), bench.fresh("latency-load")
        side.create_topic(topic)
        side.create_topic(load)
        try:
            if self.variant.name == "idle":
                return side.latency(topic, self.counts[role])
            command = side.background(load, bench.values, LOAD_BYTES_S // VALUE_BYTES)
            with _background(command) as rates:
                sample = side.latency(topic, self.counts[role])
            sample.figures["load_mb_s"] = statistics.median(rates) * VALUE_BYTES / 1e6
            return sample
        finally:
            side.delete_topic(topic)
            side.delete_topic(load)


class TransactionLatency(Base):
    """One transaction of one record at a time."""

    def round(self, role: str, mode: str) -> Sample:
        side = self.side(role)
        topic = self.bench.fresh("transaction-latency")
        side.create_topic(topic)
        try:
            return side.transaction_latency(topic, self.counts[role], mode)
        finally:
            side.delete_topic(topic)


@contextmanager
def _background(command: list[str]) -> Iterator[list[float]]:
    """Run a client at its rate; yields the rates of its windows, complete after the block."""
    rates: list[float] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        os.set_blocking(descriptor, False)
        rest = b""

        def read() -> None:
            nonlocal rest
            while chunk := process.stdout.read(65536):  # type: ignore[union-attr]
                *lines, rest = (rest + chunk).split(b"\n")
                rates.extend(r for line in lines if (r := window_rate(line.decode())) is not None)

        try:
            deadline = time.monotonic() + _LOAD_TIMEOUT_S
            while len(rates) < _LOAD_WINDOWS:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RunFailed(f"the background load stands still: {command[:6]} …")
                time.sleep(0.1)
                read()
            warm = len(rates)
            yield rates
            if process.poll() is not None:
                raise RunFailed("the background load ended early")
            read()
            del rates[: warm if len(rates) > warm else warm - 1]
        finally:
            process.kill()


class Small(Base):
    """Many clients, one record in flight each."""

    def round(self, role: str, mode: str) -> Sample:
        side = self.side(role)
        topic = self.bench.fresh("small")
        side.create_topic(topic, partitions=1)
        try:
            return side.small(topic, _SMALL_CLIENTS, _SMALL_S)
        finally:
            side.delete_topic(topic)
