"""One partition of `__consumer_offsets` that a broker coordinates, in one leader epoch.

World-generic.  It has the host of the machine, the sessions of the members, and the requests that
wait: joins and syncs for the next phase of their group, heartbeats for news.  The decisions are the
machine's, the invariants those of server/groups/coordinator.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from pk import errors
from pk.server.groups import records
from pk.server.groups.groups import ConsumerGroup
from pk.server.groups.sessions import MemberSessions
from pk.server.groups.state import GroupState, keys_of
from pk.server.groups.waiting_heartbeats import WaitingHeartbeats
from pk.server.replica.replay_log import PartitionReplayLog
from pk.server.runtime.replayed_host import ReplayedHost
from pk.types import Epoch, Offset, PartitionKey, TopicId
from pk.wire import pk_pb2 as wire


class _PhaseChange(asyncio.Event):
    """Set when a group has left the phase in which requests began to wait."""

    def __init__(self, phase: tuple[GroupState, int] | None) -> None:
        super().__init__()
        self.phase = phase


class HostedGroups:
    """One partition that this broker coordinates, in one leader epoch."""

    def __init__(
        self,
        number: int,
        epoch: Epoch,
        host: ReplayedHost[Any, Any],
        log: PartitionReplayLog[records.GroupLogRecord | records.EndedTransaction],
        sessions: MemberSessions,
        key: PartitionKey,
    ) -> None:
        self.number = number
        self.key = key
        self.epoch = epoch
        self.host = host
        self._log = log
        self.sessions = sessions
        self.heartbeats = WaitingHeartbeats()
        self.loading = True  # groups/coordinator N2
        self.resumed: Any = None  #: the machine whose sessions were begun (groups/coordinator N3)
        self.expire_at_ms = 0  #: when offsets are looked at next
        self.absent: frozenset[TopicId] = frozenset()  #: of the last look
        #: By group: the partitions of commits that wait for a transaction's coordinator
        #: (groups/coordinator N7).
        self.parked: dict[str, Counter[PartitionKey]] = {}
        #: By group; only those that a request waits for.
        self._changes: WeakValueDictionary[str, _PhaseChange] = WeakValueDictionary()
        self._dirty: dict[str, None] = {}  #: groups whose changes are not followed yet

    def check_parked(self, asked: wire.OffsetFetchGroup) -> None:
        """Raise `UnstableOffsetCommit` if a commit that is parked has one of the partitions
        (groups/coordinator N7).

        No partitions = all of the group.
        """
        found = self.parked.get(asked.group_id)
        if found and (not asked.topics or not found.keys().isdisjoint(keys_of(asked.topics))):
            raise errors.UnstableOffsetCommit(
                f"group {asked.group_id!r}: a transaction commits offsets now: ask again"
            )

    @property
    def groups(self) -> Mapping[str, ConsumerGroup]:
        """The groups of the machine; the newest decisions may not be committed yet."""
        machine: Any = self.host.machine
        found: Mapping[str, ConsumerGroup] = machine.groups
        return found

    @property
    def reading(self) -> bool:
        """Whether the log is being replayed (groups/coordinator N2)."""
        return self.loading or self.host.replaying

    @property
    def committed(self) -> Offset:
        """The high watermark of the partition in this leader epoch; NONE = it is over."""
        return self._log.committed

    def phase(self, group_id: str) -> tuple[GroupState, int] | None:
        """Return state and generation of a group; None = there is no such group."""
        group = self.groups.get(group_id)
        return None if group is None else (group.state, group.generation)

    def change(self, group_id: str) -> asyncio.Event:
        """Return the event that the next change of the group's phase sets
        (groups/coordinator N9).
        """
        found = self._changes.get(group_id)
        if found is None:
            found = self._changes[group_id] = _PhaseChange(self.phase(group_id))
        return found

    def changed(self, group_id: str, now_ms: Callable[[], int]) -> None:
        """Follow a change of a group soon: the decisions of one round are followed together."""
        if not self._dirty:
            asyncio.get_running_loop().call_soon(self._follow, now_ms)
        self._dirty[group_id] = None

    def _follow(self, now_ms: Callable[[], int]) -> None:
        """Update the sessions of changed groups, and wake the requests that wait for a phase."""
        dirty, self._dirty = self._dirty, {}
        for group_id in dirty:
            self.sessions.update(group_id, self.groups.get(group_id), now_ms())
            self.heartbeats.compare(self.groups, group_id)
            event = self._changes.get(group_id)
            if event is not None and event.phase != self.phase(group_id):
                del self._changes[group_id]
                event.set()

    async def close(self) -> None:
        """End the host; what waits asks it once more, and is refused."""
        await self.host.close()
        self._log.close()
        self.heartbeats.close()
        for event in list(self._changes.values()):
            event.set()
