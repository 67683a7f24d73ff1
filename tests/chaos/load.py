"""Records with ids, sent at a steady pace; every outcome goes into the ledger."""

from __future__ import annotations

import random
import threading
from typing import Any

from ledger import Ledger, Outcome, value_of

from pk import Producer, errors
from pk.clock import block_s, monotonic_s

TURN_S = 0.002


class Load:
    """Sends from its own thread until it is stopped.  `lock` guards the ledger."""

    def __init__(
        self,
        producer: Producer,
        ledger: Ledger,
        rng: random.Random,
        *,
        topic: str,
        partitions: int,
        records_per_s: int,
        padding: bytes = b"",
    ) -> None:
        self.producer = producer
        self.ledger = ledger
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.newest = dict.fromkeys(range(partitions), -1)  #: acknowledged id by partition
        self.errors: dict[str, int] = {}  #: failed deliveries by the error's name
        self.failure: BaseException | None = None
        self._rng = rng
        self._topic = topic
        self._records_per_s = records_per_s
        self._padding = padding

    def run(self) -> None:
        try:
            begin, sent = monotonic_s(), 0
            while not self.stop.is_set():
                due = int((monotonic_s() - begin) * self._records_per_s)
                for _ in range(min(due - sent, self._records_per_s // 20)):
                    self.send_one()
                    sent += 1
                block_s(TURN_S)
        except BaseException as failure:
            self.failure = failure

    @property
    def newest_acknowledged(self) -> int:
        """Return the newest acknowledged id of any partition."""
        return max(self.newest.values())

    def mark(self) -> int:
        """Return the id from which on records are sent after this moment."""
        with self.lock:
            return len(self.ledger)

    def served_since(self, mark: int, partitions: set[int] | None = None) -> bool:
        """Return whether each of these partitions (None = all) has acknowledged a record sent after
        `mark`.
        """
        return all(
            self.newest[each] >= mark
            for each in (self.newest if partitions is None else partitions)
        )

    def send_one(self) -> None:
        partition = self._rng.randrange(len(self.newest))
        with self.lock:
            number = self.ledger.send(partition)
        value = value_of(number, self._padding[: self._rng.randrange(len(self._padding) + 1)])

        def delivered(where: Any, error: Any) -> None:
            with self.lock:
                if error is None:
                    self.ledger.acknowledge(number, where.partition, where.offset)
                    self.newest[where.partition] = max(self.newest[where.partition], number)
                else:
                    self.ledger.settle(number, Outcome.UNKNOWN)
                    name = type(error).__name__
                    self.errors[name] = self.errors.get(name, 0) + 1

        try:
            self.producer.send(self._topic, value, partition=partition, on_delivery=delivered)
        except (errors.BufferExhausted, errors.RecordTooLarge) as refusal:
            with self.lock:
                self.ledger.settle(number, Outcome.REFUSED)
                name = type(refusal).__name__
                self.errors[name] = self.errors.get(name, 0) + 1
