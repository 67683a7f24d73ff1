"""The load of the campaign: transactions over both topics, and what a reader must find of them.

A transaction has records of the plain topic and of the compacted one; three of ten are aborted
after their records were sent.  Every record has its own id, in its header, because a tombstone has
no value.  What a commit without an answer came to is asked until there is an answer.
"""

from __future__ import annotations

import random
import threading
from typing import NamedTuple

from pk import Producer, errors
from pk.clock import monotonic_s

PLAIN, COMPACTED = "plain", "compacted"
TOPICS = (PLAIN, COMPACTED)
PARTITIONS = 2
KEYS = 40  #: of each partition
ABORTED = 0.3
DELETED = 0.15
RECORDS = (4, 40)  #: of a transaction
PAUSE_S, SHORT_PAUSE_S = (0.02, 0.25), (0.2, 0.5)
FILL = bytes(80)
ID = "id"
TRANSACTION_TIMEOUT_MS = 15_000
PATIENCE_S = 240.0


class Sent(NamedTuple):
    """One record of a transaction."""

    topic: str
    partition: int
    id: bytes
    key: bytes
    value: bytes | None


class Load(threading.Thread):
    """Writes transactions until it is stopped; `committed` has their records in order."""

    def __init__(self, address: str, seed: int, *, short: bool) -> None:
        super().__init__(daemon=True)
        self.committed: list[Sent] = []
        self.transactions = self.aborted = 0
        self.failure: BaseException | None = None
        self._address = address
        self._rng = random.Random(seed)
        self._pause_s = SHORT_PAUSE_S if short else PAUSE_S
        self._number = 0
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            with Producer(
                self._address,
                transactional_id="audit-load",
                transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
                linger_ms=1,
            ) as producer:
                producer.init_transactions(120)
                while not self._ended.wait(self._rng.uniform(*self._pause_s)):
                    self._transaction(producer)
        except BaseException as failure:
            self.failure = failure

    def stop(self) -> None:
        """End after the transaction under way."""
        self._ended.set()
        self.join(PATIENCE_S)

    def _transaction(self, producer: Producer) -> None:
        producer.begin_transaction()
        sent = [self._drawn() for _ in range(self._rng.randint(*RECORDS))]
        try:
            for each in sent:
                producer.send(
                    each.topic, each.value, key=each.key, partition=each.partition,
                    headers=[(ID, each.id)],
                )  # fmt: skip
            if self._rng.random() < ABORTED:
                producer.flush(PATIENCE_S)
                producer.abort_transaction(120)
                self.aborted += 1
                return
            _commit(producer)
        except (errors.TransactionAborted, errors.DeliveryTimedOut):
            producer.abort_transaction(120)
            self.aborted += 1
            return
        self.transactions += 1
        self.committed += sent

    def _drawn(self) -> Sent:
        rng = self._rng
        self._number += 1
        topic, partition = rng.choice(TOPICS), rng.randrange(PARTITIONS)
        name = b"%08d" % self._number
        key = b"k%02d" % rng.randrange(KEYS)
        gone = topic == COMPACTED and rng.random() < DELETED
        return Sent(topic, partition, name, key, None if gone else name + FILL)

    # -- what a reader must find -------------------------------------------------------------------

    def of(self, topic: str, partition: int) -> list[Sent]:
        """Return the committed records of a partition in their order."""
        return [s for s in self.committed if (s.topic, s.partition) == (topic, partition)]

    def latest(self, partition: int) -> dict[bytes, bytes]:
        """Return the latest value of each key of the compacted topic that is not deleted."""
        found = {each.key: each.value for each in self.of(COMPACTED, partition)}
        return {key: value for key, value in found.items() if value is not None}


def _commit(producer: Producer) -> None:
    """Commit; a commit without an outcome is asked for again until there is one."""
    deadline = monotonic_s() + PATIENCE_S
    while True:
        try:
            producer.commit_transaction(30)
            return
        except errors.RequestTimedOut:
            if monotonic_s() > deadline:
                raise
