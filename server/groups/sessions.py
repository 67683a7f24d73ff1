"""When members were last heard, and when rebalances must end: soft state of one partition.

Times are monotonic.  Nothing of it is in the log: a new coordinator gives every member a whole
session and every rebalance a whole timeout.

Invariants
  A1  A session counts from the last request of its member, and from the end of one that waits: for
      other members, or for the high watermark.
  A2  `due` does work for what is due, plus one visit per session length for each member.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pk.server.groups.groups import ConsumerGroup
from pk.server.groups.state import GroupState, Member
from pk.types import NONE

#: When a deadline of members whose requests wait is looked at again.
AGAIN_MS = 1_000


class Due(NamedTuple):
    """What has to happen now."""

    expired: list[tuple[str, str]]  #: (group id, member id): the session or the sync is over
    joins: list[tuple[str, int]]  #: (group id, generation): the join phase is over


@dataclass(slots=True)
class _Live:
    """The liveness of one group."""

    heard_ms: dict[str, int] = field(default_factory=dict)  #: by member id
    timeout_ms: dict[str, int] = field(default_factory=dict)
    #: The state and generation for which the deadline was set.
    phase: tuple[GroupState, int] = (GroupState.EMPTY, NONE)
    began_ms: int = 0
    deadline_ms: int | None = None  #: of the phase
    #: Members of the generation that have not synced; static ones are not in it.
    unsynced: set[str] = field(default_factory=set)


class MemberSessions:
    """The liveness of the groups of one partition."""

    def __init__(self, initial_rebalance_delay_ms: int) -> None:
        self._delay_ms = initial_rebalance_delay_ms
        self._live: dict[str, _Live] = {}
        #: (time, group id, member id, or "" for the deadline of the phase)
        self._heap: list[tuple[int, str, str]] = []
        self._asking: dict[tuple[str, str], int] = {}  #: how many requests wait

    def restart(self, groups: Mapping[str, ConsumerGroup], now_ms: int) -> None:
        """Begin again after a replay."""
        self._live.clear()
        self._heap.clear()
        for group_id, group in groups.items():
            self.update(group_id, group, now_ms)

    def heard(self, group_id: str, member_id: str, now_ms: int) -> None:
        """Renew the session of a member (A1)."""
        live = self._live.get(group_id)
        if live is not None and member_id in live.heard_ms:
            live.heard_ms[member_id] = now_ms

    def asks(self, group_id: str, member_id: str, now_ms: int) -> None:
        """Note that a request of the member has come; `answered` follows (A1)."""
        name = (group_id, member_id)
        self._asking[name] = self._asking.get(name, 0) + 1
        self.heard(group_id, member_id, now_ms)

    def answered(self, group_id: str, member_id: str, now_ms: int) -> None:
        """Note that the request is answered."""
        name = (group_id, member_id)
        left = self._asking[name] - 1
        if left:
            self._asking[name] = left
        else:
            del self._asking[name]
        self.heard(group_id, member_id, now_ms)

    def synced(self, group_id: str, member_id: str) -> None:
        """Note that the member has asked for its assignment in this generation."""
        live = self._live.get(group_id)
        if live is not None:
            live.unsynced.discard(member_id)

    def last_heard(self, group_id: str, member_id: str) -> int | None:
        """Return when the member was last heard; None if this coordinator does not know it."""
        live = self._live.get(group_id)
        return None if live is None else live.heard_ms.get(member_id)

    def update(self, group_id: str, group: ConsumerGroup | None, now_ms: int) -> None:
        """Follow a change of the group: its members, its phase."""
        if group is None or not group.members:
            self._live.pop(group_id, None)
            return
        live = self._live.get(group_id)
        if live is None:
            live = self._live[group_id] = _Live()
        for name in live.heard_ms.keys() - group.members.keys():
            del live.heard_ms[name], live.timeout_ms[name]
            live.unsynced.discard(name)
        for name, member in group.members.items():
            if name not in live.heard_ms:
                live.heard_ms[name] = now_ms
                at_ms = now_ms + member.session_timeout_ms
                heapq.heappush(self._heap, (at_ms, group_id, name))
            live.timeout_ms[name] = member.session_timeout_ms
        self._phase(group_id, live, group, now_ms)

    def _phase(self, group_id: str, live: _Live, group: ConsumerGroup, now_ms: int) -> None:
        """Set the deadline of the group's phase."""
        before, live.phase = live.phase, (group.state, group.generation)
        if live.phase != before:
            live.began_ms = now_ms
        longest_ms = _longest(group.members)
        if group.state is GroupState.PREPARING_REBALANCE:
            live.unsynced.clear()
            at_ms = live.began_ms + longest_ms
            if group.metadata.initial:
                at_ms = min(at_ms, now_ms + self._delay_ms)
        elif group.state is GroupState.COMPLETING_REBALANCE:
            if live.phase != before:
                live.unsynced = {n for n, each in group.members.items() if not each.instance_id}
            at_ms = live.began_ms + longest_ms
        elif live.deadline_ms is not None and live.unsynced:
            return  # stable: those that have not synced keep the deadline
        else:
            live.deadline_ms = None
            return
        if at_ms != live.deadline_ms:
            live.deadline_ms = at_ms
            heapq.heappush(self._heap, (at_ms, group_id, ""))

    def due(self, now_ms: int) -> Due:
        """Return what is due, once (A2).  A caller that fails to act asks for `restart`."""
        found = Due([], [])
        while self._heap and self._heap[0][0] <= now_ms:
            at_ms, group_id, member_id = heapq.heappop(self._heap)
            live = self._live.get(group_id)
            if live is None:
                continue
            if not member_id:
                if live.deadline_ms == at_ms:
                    self._phase_over(group_id, live, found, now_ms)
            elif member_id in live.heard_ms:
                until_ms = live.heard_ms[member_id] + live.timeout_ms[member_id]
                if (group_id, member_id) in self._asking:
                    until_ms = now_ms + live.timeout_ms[member_id]
                if until_ms <= now_ms:
                    found.expired.append((group_id, member_id))
                    until_ms = now_ms + live.timeout_ms[member_id]
                heapq.heappush(self._heap, (until_ms, group_id, member_id))
        return found

    def _phase_over(self, group_id: str, live: _Live, found: Due, now_ms: int) -> None:
        state, generation = live.phase
        live.deadline_ms = None
        if state is GroupState.PREPARING_REBALANCE:
            found.joins.append((group_id, generation))
            return
        late = [name for name in sorted(live.unsynced) if (group_id, name) not in self._asking]
        found.expired.extend((group_id, name) for name in late)
        if len(late) < len(live.unsynced):
            live.deadline_ms = now_ms + AGAIN_MS
            heapq.heappush(self._heap, (live.deadline_ms, group_id, ""))


def _longest(members: Mapping[str, Member]) -> int:
    return max(each.rebalance_timeout_ms for each in members.values())
