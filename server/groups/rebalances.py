"""How a rebalance begins and ends: which records change the members of a group.

A `Rebalance` collects the changes of one decision, so that the decision has one record per key.

Invariants
  B1  The join phase ends once every member has joined, unless the rebalance began in an empty group
      and waits for further members.
  B2  The group keeps its leader while the leader joins.  Otherwise the member with the smallest id
      that has joined is the leader, so the choice does not depend on the order of records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from pk.server.groups import records
from pk.server.groups.groups import ConsumerGroup
from pk.server.groups.records import GroupLogRecord
from pk.server.groups.state import (
    Assigned,
    GroupMetadata,
    GroupState,
    Member,
    completing,
    emptied,
    preparing,
)


class Rebalance:
    """The changes of one decision to the members of a group."""

    def __init__(self, group: ConsumerGroup) -> None:
        self._group = group
        self.metadata: GroupMetadata = group.metadata
        self.members: dict[str, Member] = dict(group.members)
        self._changed: dict[str, Member | None] = {}
        self._assignment: dict[str, Assigned] | None = None

    @property
    def assignment(self) -> Mapping[str, Assigned]:
        """The newest assignment."""
        return self._group.assignment if self._assignment is None else self._assignment

    def put(self, member: Member) -> None:
        """Add or replace a member."""
        self.members[member.member_id] = self._changed[member.member_id] = member

    def remove(self, member_id: str) -> None:
        """Remove a member."""
        del self.members[member_id]
        self._changed[member_id] = None

    def rename(self, before: str, member: Member) -> None:
        """Put a static member in the place of its predecessor, with its partitions."""
        self.remove(before)
        self.put(member)
        assignment = dict(self._group.assignment)
        if before in assignment:
            assignment[member.member_id] = assignment.pop(before)
            self._assignment = assignment
        if self.metadata.leader == before:
            self.metadata = replace(self.metadata, leader=member.member_id)

    def begin(self, *, initial: bool = False) -> None:
        """Let all members join."""
        self.metadata = preparing(self.metadata, initial=initial)

    def removed(self, now_ms: int) -> None:
        """Continue after members were removed: an empty group, or a rebalance of the others."""
        if self.members:
            self.begin()
            self.maybe_complete()
        else:
            self._empty(now_ms)

    def _empty(self, now_ms: int) -> None:
        self.metadata = emptied(self.metadata, now_ms)
        self._assignment = {}

    def maybe_complete(self) -> None:
        """End the join phase if every member has joined (B1)."""
        generation = self.metadata.generation
        if not self.metadata.initial and all(
            each.joined == generation for each in self.members.values()
        ):
            self._complete(self.members)

    def end_join(self, now_ms: int) -> None:
        """End the join phase at its timeout.  Members that have not joined are removed; static
        members stay until their sessions end.
        """
        generation = self.metadata.generation
        for name, each in list(self.members.items()):
            if each.joined != generation and not each.instance_id:
                self.remove(name)
        here = {name: each for name, each in self.members.items() if each.joined == generation}
        if here:
            self._complete(here)
        elif not self.members:
            self._empty(now_ms)

    def _complete(self, here: Mapping[str, Member]) -> None:
        leader = self.metadata.leader if self.metadata.leader in here else min(here)
        assignor = chosen_assignor(self.members.values())
        self.metadata = completing(self.metadata, leader, assignor)

    def records(self) -> list[GroupLogRecord]:
        """Return the records of all changes."""
        group_id = self.metadata.group_id
        found = [
            records.removed(records.MEMBER, group_id, name.encode())
            if each is None
            else records.member_record(group_id, each)
            for name, each in self._changed.items()
        ]
        if self.metadata != self._group.metadata:
            found.append(records.group_record(self.metadata))
        if self._assignment == {}:
            if self._group.assignment:
                found.append(records.removed(records.ASSIGNMENT, group_id))
        elif self._assignment is not None:
            generation = self.metadata.generation
            found.append(records.assignment_record(group_id, generation, self._assignment))
        return found


def chosen_assignor(members: Iterable[Member]) -> str:
    """Return the assignor that most members prefer, among those that every member lists."""
    members = list(members)
    common = set.intersection(*[set(each.assignors) for each in members])
    assert common, "a join without a common assignor is refused"
    votes = Counter(next(name for name in each.assignors if name in common) for each in members)
    return min(votes, key=lambda name: (-votes[name], name))


def begins_initial(group: ConsumerGroup, delay_ms: int) -> bool:
    """Whether the rebalance that begins now waits for further members."""
    return group.state is GroupState.EMPTY and delay_ms > 0
