"""What the outside of the cluster knows: records handed over, acknowledgements, what was asked to
be deleted, when power was lost.

The oracle never looks into a broker; the checkers compare what it knows with what readers see.

Words
  life     of a topic name: from its creation to its deletion; the next topic of that name is
           another life (rule L8)
  era      of the machine: ends with a power loss.  The era of an acknowledgement is the one it
           was heard in; the next begins when the broker is started again, when replies of the
           last one have long arrived or are lost
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Iterable
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
    era: int
    ordered: bool  #: its producer keeps send order (idempotent)
    digest: int
    outcome: Outcome = Outcome.PENDING
    partition: int = NONE
    offset: Offset = NONE
    acked_life: int = NONE  #: NONE: acknowledged while its topic was going
    acked_era: int = NONE
    error: str = ""


@dataclass(slots=True)
class Topic:
    """One name."""

    name: str
    flushed: bool
    tiered: bool
    expires: bool
    life: int = 0  #: 0 = never created
    going: bool = True  #: not there, or its deletion has been asked for
    topic_id: str = ""
    partitions: int = 0
    #: partition → the largest offset below which deletion was asked for, in this life
    deletions: dict[int, Offset] = field(default_factory=dict)


def digest_of(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> int:
    """Equal content, equal number."""
    return zlib.crc32(repr((key, value, headers)).encode())


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
        self.topics = {
            plan.name: Topic(plan.name, plan.flushed, plan.tiered, plan.expires) for plan in plans
        }
        self.era = 0
        self._next: dict[str, int] = {}

    # -- topics ------------------------------------------------------------------------------------

    def created(self, name: str, topic_id: str, partitions: int) -> None:
        topic = self.topics[name]
        topic.life += 1
        topic.topic_id, topic.partitions, topic.going = topic_id, partitions, False
        topic.deletions = {}

    def deleting(self, name: str) -> None:
        self.topics[name].going = True

    def grown(self, name: str, partitions: int) -> None:
        topic = self.topics[name]
        topic.partitions = max(topic.partitions, partitions)

    def deleting_records(self, name: str, partition: int, before: Offset) -> None:
        asked = self.topics[name].deletions
        asked[partition] = max(before, asked.get(partition, 0))

    # -- records -----------------------------------------------------------------------------------

    def next_id(self, producer: str) -> RecordId:
        number = self._next.get(producer, 0)
        self._next[producer] = number + 1
        return RecordId(producer, number)

    def send(self, name: RecordId, topic: str, digest: int, *, ordered: bool) -> Sent:
        life = self.topics[topic].life
        sent = self.sent[name] = Sent(name, topic, life, self.era, ordered, digest)
        return sent

    def acknowledged(self, sent: Sent, partition: int, offset: Offset) -> None:
        topic = self.topics[sent.topic]
        sent.outcome = Outcome.ACKNOWLEDGED
        sent.partition, sent.offset, sent.acked_era = partition, offset, self.era
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

    def power_restored(self) -> None:
        self.era += 1
