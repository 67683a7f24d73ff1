"""What the outside of the cluster knows: records handed over, acknowledgements, what was asked to
be deleted, when data could be lost.

The oracle never looks into a broker; the checkers compare what it knows with what readers see.

Words
  life     of a topic name: from its creation to its deletion; the next topic of that name is
           another life (rule L8)
  era      of a partition: ends when as many of its replicas are hit at once as may cost what was
           acknowledged (loss_model.py), or when it elects a leader uncleanly by permission.
           Replies of the last era may be heard for a while after its end: what is acknowledged then
           may belong to either
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from pk.sim.options import TopicPlan
from pk.types import NONE, Offset


class RecordId(NamedTuple):
    """Who sent a record, and which it was."""

    producer: str
    number: int


class Outcome(enum.Enum):
    PENDING = "pending"
    ACKNOWLEDGED = "acknowledged"
    UNKNOWN = "unknown"  #: it failed, or nobody is left to hear of it: stored zero or one times


@dataclass(slots=True)
class Sent:
    """One record handed to a producer."""

    id: RecordId
    topic: str
    life: int  #: of the topic, when it was handed over
    ordered: bool  #: its producer keeps send order (idempotent)
    digest: int
    outcome: Outcome = Outcome.PENDING
    partition: int = NONE
    offset: Offset = NONE
    acked_life: int = NONE  #: NONE: acknowledged while its topic was going
    acked_era: int = NONE  #: it is of this era or a later one, up to `acked_era_max`
    acked_era_max: int = NONE
    error: str = ""


@dataclass(slots=True)
class Topic:
    """One name."""

    name: str
    tiered: bool
    expires: bool
    life: int = 0  #: 0 = never created
    going: bool = True  #: not there, or its deletion has been asked for
    topic_id: str = ""
    former: list[str] = field(default_factory=list)  #: the ids of its earlier lives
    partitions: int = 0
    #: partition → the largest offset below which deletion was asked for, in this life
    deletions: dict[int, Offset] = field(default_factory=dict)
    deleted: dict[int, Offset] = field(default_factory=dict)  #: the same, of those that were done


def digest_of(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> int:
    """Equal content, equal number."""
    rest = zlib.crc32(repr((key, headers, value is None)).encode())
    return zlib.crc32(value or b"", rest)


def value_of(name: RecordId, size: int) -> bytes:
    """A value that names its record, of about `size` bytes."""
    head = f"{name.producer}/{name.number}/".encode()
    return head + b"%03d" % (name.number % 1000) * max(0, (size - len(head)) // 3)


def id_of(value: bytes) -> RecordId:
    """The record a value names."""
    producer, number, _ = value.split(b"/", 2)
    return RecordId(producer.decode(), int(number))


class Oracle:
    """See the module."""

    def __init__(self, plans: Iterable[TopicPlan]) -> None:
        self.sent: dict[RecordId, Sent] = {}
        self.topics = {plan.name: Topic(plan.name, plan.tiered, plan.expires) for plan in plans}
        self.now_ms: Callable[[], float] = lambda: 0.0
        self.acknowledgements = 0
        self.ahead = False  #: more was acknowledged than the run asks for by now
        self.rotten: dict[tuple[str, int], None] = {}  #: a copy of the partition was damaged once
        #: A rotten copy may be the last one that ISR and ELR know.
        self.stranded: dict[tuple[str, int], None] = {}
        self.rotten_files: dict[str, None] = {}  #: data files of tables, by their tables' paths
        self.rotten_tables: dict[str, None] = {}  #: paths of tables whose log rotted once
        #: (topic id, partition) → `[start, end)` of rows that another engine deleted once
        self._deleted_rows: dict[tuple[str, int], list[tuple[Offset, Offset]]] = {}
        #: Topics whose durability was changed → the least copies since then, and nothing of them
        #: counts as flushed.  For good: a change may be carried out late, on the topic's next life.
        self.weak: dict[str, int] = {}
        self.on_weakened: Callable[[str], None] = lambda _topic: None
        self._next: dict[str, int] = {}
        #: (topic id, partition) → until when replies of each era that ended may be heard
        self._ended: dict[tuple[str, int], list[float]] = {}

    # -- topics ------------------------------------------------------------------------------------

    def created(self, name: str, topic_id: str, partitions: int) -> None:
        topic = self.topics[name]
        topic.life += 1
        topic.former.append(topic.topic_id)
        topic.topic_id, topic.partitions, topic.going = topic_id, partitions, False
        topic.deletions, topic.deleted = {}, {}

    def deleting(self, name: str) -> None:
        self.topics[name].going = True

    def grown(self, name: str, partitions: int) -> None:
        topic = self.topics[name]
        topic.partitions = max(topic.partitions, partitions)

    def weakening(self, name: str, copies: int) -> None:
        """Settings are about to change: what is acknowledged from now on may be kept by `copies`
        only, and not be flushed (whatever is asked for later: flights overlap).
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
        """How many eras of the partition are over."""
        return len(self._ended.get((topic_id, partition), ()))

    def era_ends(self, topic_id: str, partition: int, settled_ms: float) -> None:
        """What was acknowledged so far may be lost; replies may be heard until `settled_ms`."""
        self._ended.setdefault((topic_id, partition), []).append(settled_ms)

    def may_be_cut(self, topic: str, partition: int) -> bool:
        """Whether a reader may have seen what is gone: in the topic's present life, or in a former
        one, as with `may_be_damaged`.
        """
        known = self.topics[topic]
        return any(self.era(life, partition) for life in (known.topic_id, *known.former))

    @property
    def lossy(self) -> bool:
        """Whether anything that was acknowledged may be gone."""
        return bool(self._ended)

    def may_be_damaged(self, topic: str, partition: int) -> bool:
        """Whether a copy of the partition has rotted, in the topic's present or coming life; or in
        a former one, which a broker that has not heard of its end may still serve.
        """
        known = self.topics[topic]
        lives = (known.topic_id, *known.former)
        return known.going or any((life, partition) in self.rotten for life in lives)

    def may_be_lost(self, topic: str, partition: int) -> bool:
        """Whether a range may be told as lost (rule L9): a copy has rotted, and it may be the only
        one that ISR and ELR know, because the promise permits that (loss_model.py).
        """
        known = self.topics[topic]
        lives = [(life, partition) for life in (known.topic_id, *known.former)]
        only = (*self._ended, *self.stranded)
        return known.going or any(life in self.rotten and life in only for life in lives)

    def may_have_changed(self, uri: str) -> bool:
        """Whether the Delta log of the table at `uri` rotted once (rule T8)."""
        return any(uri.endswith(f"/{home}") for home in self.rotten_tables)

    def rows_deleted(self, topic_id: str, partition: int, start: Offset, end: Offset) -> None:
        """Another engine deleted the rows of `[start, end)` from a table."""
        self._deleted_rows.setdefault((topic_id, partition), []).append((start, end))

    def may_be_missing(self, topic: str, partition: int, start: Offset, end: Offset) -> bool:
        """Whether a table may lack all rows of `[start, end)` (rule T17): others deleted them once,
        in the topic's present life or, as with `may_be_damaged`, in a former one.
        """
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
        """The client died: nobody hears what became of what is under way."""
        for sent in self.sent.values():
            self.failed(sent, why)

    def pending(self) -> list[Sent]:
        return [sent for sent in self.sent.values() if sent.outcome is Outcome.PENDING]


def _covers(ranges: Iterable[tuple[Offset, Offset]], start: Offset, end: Offset) -> bool:
    """Whether `ranges` together hold all of `[start, end)`."""
    at = start
    for low, high in sorted(ranges):
        if low > at:
            break
        at = max(at, high)
    return at >= end
