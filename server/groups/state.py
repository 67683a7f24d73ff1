"""The state of one consumer group, and the steps from one state to the next.

    EMPTY ──> PREPARING_REBALANCE ──> COMPLETING_REBALANCE ──> STABLE

A join, a departure or an expiry leads back to PREPARING_REBALANCE; the departure of the last member
leads to EMPTY.

A `GroupMetadata`, a `Member` and an `Assigned` are immutable.  Each step returns another one, and
asserts that `STEPS` has it.

Invariants
  D1  EMPTY groups have no members; the other states have at least one.
  D2  The generation only grows.  It grows when a join phase ends, and when the last member goes.
  D3  The members of a STABLE group are those of its generation's assignment, except static members
      that have taken the place of their predecessors, which have its partitions.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pk.types import NONE, Epoch, Offset, PartitionKey
from pk.wire import pk_pb2 as wire

#: The tags and lengths of a member in the reply to its leader.
MEMBER_OVERHEAD_BYTES = 24


class GroupState(enum.IntEnum):
    """The states of a group; the numbers are those of `GroupStateRecord`."""

    EMPTY = 1
    PREPARING_REBALANCE = 2  #: members join
    COMPLETING_REBALANCE = 3  #: the leader computes the assignment
    STABLE = 4

    @property
    def label(self) -> str:
        """Kafka's name of the state."""
        return "".join(word.capitalize() for word in self.name.split("_"))


_S = GroupState
#: From each state to the ones that may follow it.
STEPS: Mapping[GroupState, frozenset[GroupState]] = {
    _S.EMPTY: frozenset({_S.EMPTY, _S.PREPARING_REBALANCE}),
    _S.PREPARING_REBALANCE: frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.COMPLETING_REBALANCE}),
    _S.COMPLETING_REBALANCE: frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.STABLE}),
    _S.STABLE: frozenset({_S.EMPTY, _S.PREPARING_REBALANCE, _S.STABLE}),
}


@dataclass(slots=True, frozen=True)
class GroupMetadata:
    """A group without its members and offsets."""

    group_id: str
    state: GroupState = GroupState.EMPTY
    generation: int = 0
    assignor: str = ""  #: of the generation; "" = the group had no generation yet
    leader: str = ""  #: the member that computes the assignment
    initial: bool = False  #: the rebalance began in an empty group and waits for further members
    empty_since_ms: int = 0  #: when the group became empty, by the wall clock; 0 = it has members
    query_run: str = ""  #: the run of a streaming query that commits here (S1); "" = consumers
    holds_retention: bool = False  #: what the query has not processed is kept, within bounds (S1)

    @property
    def kind(self) -> str:
        """Who uses the group: "query" or "consumer"."""
        return "query" if self.query_run else "consumer"


@dataclass(slots=True, frozen=True)
class Member:
    """A member of a group."""

    member_id: str
    instance_id: str  #: of a static member; "" = the member is dynamic
    client_id: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    assignors: tuple[str, ...]  #: the preferred one first
    subscription: wire.GroupSubscription  #: never changed
    joined: int = NONE  #: the generation after which it has joined

    @property
    def size(self) -> int:
        """Bytes of the member in the reply that the leader gets."""
        ids = len(self.member_id.encode()) + len(self.instance_id.encode())
        return ids + self.subscription.ByteSize() + MEMBER_OVERHEAD_BYTES

    def same(self, other: Member) -> bool:
        """Whether both subscribe to the same topics with the same assignors."""
        return (
            self.assignors == other.assignors
            and self.subscription.topics == other.subscription.topics
            and self.subscription.user_data == other.subscription.user_data
        )


@dataclass(slots=True, frozen=True)
class Assigned:
    """What a member has in a generation."""

    partitions: tuple[PartitionKey, ...] = ()
    #: Partitions that it had before, and that no member got since (KIP-1251).
    released: tuple[PartitionKey, ...] = ()


class CommittedOffset(NamedTuple):
    """A committed offset: the offset of the next record to process."""

    offset: Offset
    leader_epoch: Epoch  #: of the record before it; NONE = the client did not say
    metadata: str
    committed_ms: int
    #: The offset of its record in `__consumer_offsets`: of two commits the higher one counts.
    at: Offset = NONE
    committer: int = 0  #: drawn by the consumer that has committed; 0 = a tool
    sequence: int = 0  #: of its commits


def _step(known: GroupMetadata, to: GroupState, **changes: Any) -> GroupMetadata:
    assert to in STEPS[known.state], f"no step {known.state.name} -> {to.name}: {known}"
    return replace(known, state=to, **changes)


def preparing(known: GroupMetadata, *, initial: bool = False) -> GroupMetadata:
    """Return the group as its members have to join."""
    already = known.state is GroupState.PREPARING_REBALANCE
    return _step(
        known,
        GroupState.PREPARING_REBALANCE,
        initial=known.initial if already else initial,
        empty_since_ms=0,
    )


def completing(known: GroupMetadata, leader: str, assignor: str) -> GroupMetadata:
    """Return the group with its next generation, whose assignment `leader` computes."""
    return _step(
        known,
        GroupState.COMPLETING_REBALANCE,
        generation=known.generation + 1,
        leader=leader,
        assignor=assignor,
        initial=False,
    )


def stable(known: GroupMetadata) -> GroupMetadata:
    """Return the group whose assignment is known."""
    return _step(known, GroupState.STABLE)


def emptied(known: GroupMetadata, now_ms: int) -> GroupMetadata:
    """Return the group after its last member went: requests of that generation are refused."""
    return _step(
        known,
        GroupState.EMPTY,
        generation=known.generation + 1,
        leader="",
        initial=False,
        empty_since_ms=now_ms,
    )


def keys_of(
    topics: Iterable[wire.TopicPartitions | wire.CommitTopic],
) -> tuple[PartitionKey, ...]:
    """Return the partitions of topics, in their order."""
    return tuple(
        PartitionKey(topic.topic_id, partition)
        for topic in topics
        for partition in topic.partitions
    )


def topics_of(keys: Iterable[PartitionKey]) -> list[wire.TopicPartitions]:
    """Return partitions by topic, sorted."""
    found: dict[str, wire.TopicPartitions] = {}
    for key in sorted(keys):
        topic = found.setdefault(key.topic_id, wire.TopicPartitions(topic_id=key.topic_id))
        topic.partitions.append(key.partition)
    return list(found.values())
