"""Producers that send one record to a partition and say when it is acknowledged, of both sides.

Both wait for acks=all with linger 0, give up a silent leader after REQUEST_MS, and send a record
again until DELIVERY_MS are over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from bench.growth.nodes import PATIENCE_S
from bench.sides import SideFailed
from bench.values import VALUE_BYTES
from pk import Producer

#: As in the case `failover`: a silent leader answers nothing.
REQUEST_MS = 3_000
DELIVERY_MS = 300_000
_VALUE = bytes(VALUE_BYTES)


class SteadyClient(Protocol):
    """A producer of one record a partition."""

    def send(self, topic: str, partition: int, done: Callable[[Any], None]) -> None:
        """Send a record; `done` is called with None or an error, on another thread."""
        ...

    def flush(self) -> None:
        """Return when every record has an outcome.  Raises `SideFailed`."""
        ...

    def close(self) -> None: ...


class PkClient:
    """pk's producer."""

    def __init__(self, address: str) -> None:
        options: dict[str, Any] = {
            "request_timeout_ms": REQUEST_MS,
            "delivery_timeout_ms": DELIVERY_MS,
        }
        self._producer = Producer(address, acks="all", linger_ms=0, **options)

    def send(self, topic: str, partition: int, done: Callable[[Any], None]) -> None:
        self._producer.send(
            topic, _VALUE, partition=partition, on_delivery=lambda _, error: done(error)
        )

    def flush(self) -> None:
        self._producer.flush(timeout_s=PATIENCE_S)

    def close(self) -> None:
        self._producer.close()


class KafkaClient:
    """confluent-kafka's producer, with a thread that polls for its outcomes."""

    def __init__(self, address: str) -> None:
        from confluent_kafka import Producer as Confluent

        self._producer = Confluent(
            {
                "bootstrap.servers": address,
                "acks": "all",
                "enable.idempotence": True,
                "linger.ms": 0,
                "request.timeout.ms": REQUEST_MS,
                "socket.timeout.ms": REQUEST_MS,
                "delivery.timeout.ms": DELIVERY_MS,
                "log_level": 0,
            }
        )
        self._closed = threading.Event()
        self._poller = threading.Thread(target=self._poll, daemon=True)
        self._poller.start()

    def _poll(self) -> None:
        while not self._closed.is_set():
            self._producer.poll(0.1)

    def send(self, topic: str, partition: int, done: Callable[[Any], None]) -> None:
        self._producer.produce(
            topic, _VALUE, partition=partition, on_delivery=lambda error, _: done(error)
        )

    def flush(self) -> None:
        if left := self._producer.flush(PATIENCE_S):
            raise SideFailed(f"{left} records have no outcome")

    def close(self) -> None:
        self._closed.set()
        self._poller.join()
