"""Heartbeats that wait for news of their groups: soft state of one partition (rule P5).

World-generic.  A heartbeat states what its member knows: its id, its instance and its generation.
`check` compares that with the group.  It is called when the heartbeat arrives, at every change of
the group, and at the end of the wait.  No change is remembered, so none is lost between an answer
and the next heartbeat.

Invariants
  W1  A member has one heartbeat that waits.  A second one takes its place, and the first is
      answered without news.
  W2  A change wakes only the heartbeats with news, at most WAKE_MAX in a turn of the event loop:
      thousands of answers must not delay the requests of others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from pk import errors
from pk.server.groups.groups import ConsumerGroup
from pk.server.groups.state import GroupState, Member
from pk.wire import pk_pb2 as wire

#: How many heartbeats are answered in a turn of the event loop (W2).
WAKE_MAX = 64


def check(group: ConsumerGroup, asked: wire.GroupMember) -> Member:
    """Return the member; raises what the group has that the member has not stated.

    `RebalanceInProgress`: it has to join.  `UnknownMemberId`, `FencedInstanceId` and
    `IllegalGeneration`: it is not in the group's generation.
    """
    member = group.member(asked)
    if group.state is GroupState.PREPARING_REBALANCE:
        raise errors.RebalanceInProgress(
            f"group {asked.group_id!r} is being rebalanced: join again"
        )
    return member


@dataclass(slots=True, eq=False)
class _Waiting:
    """One heartbeat.  over: True = something may be new; False = another one has its place."""

    asked: wire.GroupMember
    over: asyncio.Future[bool]


class WaitingHeartbeats:
    """The heartbeats that wait in one partition."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, _Waiting]] = {}  #: group id → member id →
        self._due: deque[_Waiting] = deque()  #: have news and are not woken yet (W2)

    def __len__(self) -> int:
        return sum(map(len, self._groups.values()))

    async def wait(self, asked: wire.GroupMember, wait_ms: int) -> bool:
        """Wait for news of the member's group, at most `wait_ms`.

        Returns False if another heartbeat of the member took the place of this one (W1).
        """
        waiting = _Waiting(asked, asyncio.get_running_loop().create_future())
        members = self._groups.setdefault(asked.group_id, {})
        before = members.get(asked.member_id)
        if before is not None and not before.over.done():
            before.over.set_result(False)
        members[asked.member_id] = waiting
        try:
            async with asyncio.timeout(wait_ms / 1000):
                return await waiting.over
        except TimeoutError:
            return True
        finally:
            if members.get(asked.member_id) is waiting:
                del members[asked.member_id]
                if not members and self._groups.get(asked.group_id) is members:
                    del self._groups[asked.group_id]

    def compare(self, groups: Mapping[str, ConsumerGroup], group_id: str) -> None:
        """Wake the heartbeats of a group that have news."""
        group = groups.get(group_id) or ConsumerGroup(group_id)
        found = []
        for waiting in self._groups.get(group_id, {}).values():
            try:
                check(group, waiting.asked)
            except errors.PkError:
                found.append(waiting)
        self._wake(found)

    def compare_all(self, groups: Mapping[str, ConsumerGroup]) -> None:
        """Do so for every group: after a replay, the state may be another one."""
        for group_id in list(self._groups):
            self.compare(groups, group_id)

    def close(self) -> None:
        """Wake all: the coordinator of the partition is another broker."""
        self._wake([each for members in self._groups.values() for each in members.values()])

    def _wake(self, found: list[_Waiting]) -> None:
        if found and not self._due:
            asyncio.get_running_loop().call_soon(self._wake_some)
        self._due.extend(found)

    def _wake_some(self) -> None:
        """Wake WAKE_MAX of the heartbeats that are due, and the others in the next turns (W2)."""
        for _ in range(min(WAKE_MAX, len(self._due))):
            waiting = self._due.popleft()
            if not waiting.over.done():
                waiting.over.set_result(True)
        if self._due:
            asyncio.get_running_loop().call_soon(self._wake_some)
