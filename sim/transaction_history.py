"""The transactions of a run, as their callers know them from outside the cluster.

Words
  instance  one producer with a transactional id.  The instances of an id are numbered in the order
            in which their init_transactions succeeded; each fences those before it.
  asked     a transaction is asked to commit from the call of commit_transaction on.  A transaction
            that was never asked cannot be committed, whatever became of its producer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pk.sim.oracle import RecordId, Topic
from pk.types import NONE

#: Returns until when replies of the last ended era of a partition may arrive; NONE = none ended.
LostMs = Callable[[str, int], float]


class TransactionEnd(enum.Enum):
    """The end of a transaction, as its caller heard it."""

    ABORTED = "aborted"  #: aborted, or never asked to commit
    COMMITTED = "committed"
    UNKNOWN = "unknown"  #: asked to commit, and no outcome was heard


class TransactionRecord(NamedTuple):
    """One record that was sent in a transaction."""

    id: RecordId
    topic: str
    partition: int
    digest: int
    sent_ms: float


@dataclass(slots=True)
class Transaction:
    """One transaction."""

    transactional_id: str
    instance: int
    pair: tuple[int, int]  #: producer id and epoch
    began_ms: float
    records: list[TransactionRecord] = field(default_factory=list)
    end: TransactionEnd = TransactionEnd.ABORTED
    asked_ms: float = NONE  #: when commit_transaction was called; NONE = never


class TransactionHistory:
    """All transactions and instances of a run.

    `topics`: the topics of transactions; `lost_ms`: see `LostMs`.  `coordinator_of`: returns the
    topic id and partition whose leader coordinates a transactional id.
    """

    def __init__(
        self,
        topics: Mapping[str, Topic],
        lost_ms: LostMs,
        coordinator_of: Callable[[str], tuple[str, int]],
    ) -> None:
        self.topics = topics
        self.transactions: list[Transaction] = []
        self.sent: dict[RecordId, tuple[Transaction, TransactionRecord]] = {}
        self.acknowledgements = 0  #: records of transactions whose commit was answered
        self._began: dict[str, list[float]] = {}  #: id → when each instance was initialized
        self._lost_ms = lost_ms
        self._coordinator_of = coordinator_of

    # -- what the producers do ---------------------------------------------------------------------

    def initialized(self, transactional_id: str, now_ms: float) -> int:
        """Return the number of an instance whose init_transactions succeeded now."""
        began = self._began.setdefault(transactional_id, [])
        began.append(now_ms)
        return len(began) - 1

    def fenced_ms(self, transaction: Transaction) -> float | None:
        """Return when the next instance of the transaction's id was initialized; None = never."""
        began = self._began[transaction.transactional_id]
        following = transaction.instance + 1
        return began[following] if following < len(began) else None

    def begin(self, transaction: Transaction) -> None:
        self.transactions.append(transaction)

    def committed(self, transaction: Transaction) -> None:
        transaction.end = TransactionEnd.COMMITTED
        self.acknowledgements += len(transaction.records)

    def send(self, transaction: Transaction, record: TransactionRecord) -> None:
        transaction.records.append(record)
        self.sent[record.id] = transaction, record

    # -- what may be lost --------------------------------------------------------------------------

    def may_be_torn(self, transaction: Transaction) -> bool:
        """Return whether records or decisions of the transaction may be lost (sim/loss_model).

        An era of one of its partitions, or of its coordinator's partition, ended after it began.
        """
        keys = {(self.topics[r.topic].topic_id, r.partition): None for r in transaction.records}
        keys[self._coordinator_of(transaction.transactional_id)] = None
        return any(self._lost_ms(*key) >= transaction.began_ms for key in keys)

    def may_be_cut(self, topic: str, partition: int) -> bool:
        """Return whether records of the partition may be lost, and others stand in their place."""
        return self._lost_ms(self.topics[topic].topic_id, partition) != NONE

    def coordinator_lost(self, transactional_id: str) -> bool:
        """Return whether decisions of the id's coordinator may be lost."""
        return self._lost_ms(*self._coordinator_of(transactional_id)) != NONE

    @property
    def lossy(self) -> bool:
        """Whether any record or decision may be lost."""
        ids = {each.transactional_id: None for each in self.transactions}
        return any(self.coordinator_lost(each) for each in ids) or any(
            self.may_be_cut(topic.name, partition) for topic, partition in self.partitions()
        )

    def partitions(self) -> Iterator[tuple[Topic, int]]:
        """Return every partition of the topics that exist."""
        for topic in self.topics.values():
            for partition in range(topic.partitions):
                yield topic, partition

    def ends(self) -> Iterable[TransactionEnd]:
        return [each.end for each in self.transactions if each.records]
