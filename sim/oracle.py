"""What is known outside the cluster: records sent, acknowledgements, deletions asked for, and when
data could be lost.

The oracle never looks into a broker.  The checkers compare what the oracle knows with the rows that
readers get.

Words
  life     of a topic name: from its creation to its deletion.  The next topic of that name is
           another life (rule L8).
  era      of a partition: it ends when so many of its replicas are hit at once that acknowledged
           records may be lost (loss_model.py), or when the partition elects a leader uncleanly by
           permission.  Replies of an era may arrive for a while after its end; a record that is
           acknowledged in that time may belong to either era.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pk.sim.options import TopicPlan
from pk.types import NONE, Offset, PartitionKey


class RecordId(NamedTuple):
    """The identity of a record: its producer and its number."""

    producer: str
    number: int


class Outcome(enum.Enum):
    PENDING = "pending"
    ACKNOWLEDGED = "acknowledged"
    UNKNOWN = "unknown"  #: it failed, or its client died: stored zero or one times


@dataclass(slots=True)
class Sent:
    """One record that a producer was asked to send."""

    id: RecordId
    topic: str
    life: int  #: life of the topic when the record was sent
    ordered: bool  #: its producer is idempotent and keeps send order
    digest: int
    outcome: Outcome = Outcome.PENDING
    partition: int = NONE
    offset: Offset = NONE
    acked_life: int = NONE  #: NONE: acknowledged during the deletion of its topic
    acked_era: int = NONE  #: the record is of this era or of a later one, up to `acked_era_max`
    acked_era_max: int = NONE
    error: str = ""


@dataclass(slots=True)
class Topic:
    """One topic name with its present and former lives."""

    name: str
    tiered: bool
    expires: bool
    life: int = 0  #: 0 = not created yet
    going: bool = True  #: the topic does not exist, or its deletion was requested
    topic_id: str = ""
    former: list[str] = field(default_factory=list)  #: topic ids of its earlier lives
    partitions: int = 0
    moved: bool = False  #: a move of one of its partitions was requested in this life
    #: partition → the largest offset below which a client asked to delete records, in this life
    deletions: dict[int, Offset] = field(default_factory=dict)
    deleted: dict[int, Offset] = field(default_factory=dict)  #: the same for completed deletions


def digest_of(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> int:
    """Return a checksum of key, value and headers; equal contents have equal checksums."""
    rest = zlib.crc32(repr((key, headers, value is None)).encode())
    return zlib.crc32(value or b"", rest)


def value_of(name: RecordId, size: int) -> bytes:
    """Return a value of about `size` bytes that contains the record's identity."""
    head = f"{name.producer}/{name.number}/".encode()
    return head + b"%03d" % (name.number % 1000) * max(0, (size - len(head)) // 3)


def id_of(value: bytes) -> RecordId:
    """Return the record identity that a value contains."""
    producer, number, _ = value.split(b"/", 2)
    return RecordId(producer.decode(), int(number))


class Oracle:
    """The records, topics and eras of a run, as known outside the cluster."""

    def __init__(self, plans: Iterable[TopicPlan]) -> None:
        self.sent: dict[RecordId, Sent] = {}
        self.topics = {plan.name: Topic(plan.name, plan.tiered, plan.expires) for plan in plans}
        self.now_ms: Callable[[], float] = lambda: 0.0
        self.acknowledgements = 0
        self.ahead = False  #: more records are acknowledged than the run needs by now
        #: partitions of which a copy was ever damaged
        self.rotten: dict[tuple[str, int], None] = {}
        #: Partitions whose last copy in ISR and ELR may be a rotten one.
        self.stranded: dict[tuple[str, int], None] = {}
        #: damaged data files of tables, by path in the store
        self.rotten_files: dict[str, None] = {}
        #: paths of tables whose Delta log was ever damaged
        self.rotten_tables: dict[str, None] = {}
        #: maintained topics of whose tables another engine deleted rows
        self.thinned_tables: dict[str, None] = {}
        #: (topic id, partition) → `[start, end)` of rows that another engine deleted
        self._deleted_rows: dict[tuple[str, int], list[tuple[Offset, Offset]]] = {}
        #: Topics whose durability settings were changed → the least number of copies since then.
        #: None of their records counts as flushed any more.  An entry stays: a late change may
        #: reach the topic's next life.
        self.weak: dict[str, int] = {}
        self.on_weakened: Callable[[str], None] = lambda _topic: None
        self._next: dict[str, int] = {}
        #: (topic id, partition) → for each ended era, the time until which its replies may arrive
        self._ended: dict[tuple[str, int], list[float]] = {}

    # -- topics ------------------------------------------------------------------------------------

    def created(self, name: str, topic_id: str, partitions: int) -> None:
        topic = self.topics[name]
        topic.life += 1
        topic.former.append(topic.topic_id)
        topic.topic_id, topic.partitions, topic.going = topic_id, partitions, False
        topic.deletions, topic.deleted, topic.moved = {}, {}, False

    def deleting(self, name: str) -> None:
        self.topics[name].going = True

    def deletes(self, key: PartitionKey) -> bool:
        """Return whether a client has asked to delete this topic, by its id."""
        current = (each.topic_id for each in self.topics.values() if not each.going)
        return key.topic_id not in current

    def grown(self, name: str, partitions: int) -> None:
        topic = self.topics[name]
        topic.partitions = max(topic.partitions, partitions)

    def moving(self, name: str) -> None:
        """Note that a client is about to ask for a move of a partition.

        The move gives the partition a second replica, even if the topic has one.  The second
        replica may become the leader while it lacks the newest records that the old leader
        acknowledged with acks=1.  It has all records that were acknowledged before the request.
        """
        self.topics[name].moved = True

    def weakening(self, name: str, copies: int) -> None:
        """Note that durability settings are about to change.

        Records acknowledged from now on may be on `copies` replicas only and may not be flushed.
        This stays so whatever is requested later, because requests in flight overlap.
        """
        self.weak[name] = min(copies, self.weak.get(name, copies))
        self.on_weakened(name)

    def deleting_records(self, name: str, partition: int, before: Offset) -> None:
        asked = self.topics[name].deletions
        asked[partition] = max(before, asked.get(partition, 0))

    def deleted_records(self, name: str, topic_id: str, partition: int, before: Offset) -> None:
        topic = self.topics[name]
        if topic.topic_id == topic_id:
            topic.deleted[partition] = max(before, topic.deleted.get(partition, 0))

    # -- eras --------------------------------------------------------------------------------------

    def era(self, topic_id: str, partition: int) -> int:
        """Return how many eras of the partition are over."""
        return len(self._ended.get((topic_id, partition), ()))

    def era_ends(self, topic_id: str, partition: int, settled_ms: float) -> None:
        """End an era, whose records may be lost; replies may arrive until `settled_ms`."""
        self._ended.setdefault((topic_id, partition), []).append(settled_ms)

    def lost_ms(self, topic_id: str, partition: int) -> float:
        """Return until when replies of the partition's last ended era may arrive; NONE = none
        ended."""
        return max(self._ended.get((topic_id, partition), ()), default=float(NONE))

    def may_be_cut(self, topic: str, partition: int) -> bool:
        """Return whether a reader may have seen records that were lost since.

        The topic's former lives count too, as with `may_be_damaged`.
        """
        known = self.topics[topic]
        return any(self.era(life, partition) for life in (known.topic_id, *known.former))

    @property
    def lossy(self) -> bool:
        """Whether any acknowledged record may be lost."""
        return bool(self._ended)

    def may_be_damaged(self, topic: str, partition: int) -> bool:
        """Return whether a copy of the partition has rotted in the topic's present or coming life.

        A former life counts too: a broker that does not know of the deletion may still serve it.
        """
        known = self.topics[topic]
        lives = (known.topic_id, *known.former)
        return known.going or any((life, partition) in self.rotten for life in lives)

    def may_be_lost(self, topic: str, partition: int) -> bool:
        """Return whether a reader may get the error of a lost range (rule L9).

        A copy has rotted, and it may be the only copy in ISR and ELR, because the promise permits
        this (loss_model.py).
        """
        known = self.topics[topic]
        lives = [(life, partition) for life in (known.topic_id, *known.former)]
        only = (*self._ended, *self.stranded)
        return known.going or any(life in self.rotten and life in only for life in lives)

    def may_have_changed(self, uri: str) -> bool:
        """Return whether the Delta log of the table at `uri` was ever damaged (rule T8)."""
        return any(uri.endswith(f"/{home}") for home in self.rotten_tables)

    def rows_deleted(self, topic_id: str, partition: int, start: Offset, end: Offset) -> None:
        """Note that another engine deleted the rows of `[start, end)` from a table."""
        self._deleted_rows.setdefault((topic_id, partition), []).append((start, end))

    def may_be_missing(self, topic: str, partition: int, start: Offset, end: Offset) -> bool:
        """Return whether a table may lack all rows of `[start, end)` (rule T17).

        Another engine deleted them in the topic's present life or, as with `may_be_damaged`, in a
        former one.
        """
        if topic in self.thinned_tables:
            return True
        known = self.topics[topic]
        lives = (known.topic_id, *known.former)
        deleted = [self._deleted_rows.get((life, partition), []) for life in lives]
        return known.going or any(_covers(ranges, start, end) for ranges in deleted)

    # -- records -----------------------------------------------------------------------------------

    def next_id(self, producer: str) -> RecordId:
        number = self._next.get(producer, 0)
        self._next[producer] = number + 1
        return RecordId(producer, number)

    def send(self, name: RecordId, topic: str, digest: int, *, ordered: bool) -> Sent:
        life = self.topics[topic].life
        sent = self.sent[name] = Sent(name, topic, life, ordered, digest)
        return sent

    def acknowledged(self, sent: Sent, partition: int, offset: Offset) -> None:
        topic = self.topics[sent.topic]
        sent.outcome = Outcome.ACKNOWLEDGED
        self.acknowledgements += 1
        sent.partition, sent.offset = partition, offset
        ended = self._ended.get((topic.topic_id, partition), [])
        sent.acked_era = sum(settled_ms <= self.now_ms() for settled_ms in ended)
        sent.acked_era_max = len(ended)
        if sent.life == topic.life and not topic.going:
            sent.acked_life = topic.life

    def failed(self, sent: Sent, error: str) -> None:
        if sent.outcome is Outcome.PENDING:
            sent.outcome, sent.error = Outcome.UNKNOWN, error

    def forget_pending(self, why: str) -> None:
        """Set the outcome of all pending records to unknown: their client died."""
        for sent in self.sent.values():
            self.failed(sent, why)

    def pending(self) -> list[Sent]:
        return [sent for sent in self.sent.values() if sent.outcome is Outcome.PENDING]


def _covers(ranges: Iterable[tuple[Offset, Offset]], start: Offset, end: Offset) -> bool:
    """Return whether `ranges` together contain all of `[start, end)`."""
    at = start
    for low, high in sorted(ranges):
        if low > at:
            break
        at = max(at, high)
    return at >= end
