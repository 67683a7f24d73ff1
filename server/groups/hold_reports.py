"""The coordinators' reports of retention holds to the brokers that have the replicas (rule S1).

World-generic.  Every REPORT_MS a broker reports the holds of all groups that it coordinates to each
broker: those of partitions with a replica there.  A report without holds counts, too, because a new
leader waits for a report of every coordinator (replica/retention_holds H1).

Invariants
  W1  A broker without contact to the controller reports nothing: another one may coordinate its
      partitions by then.
  W2  A report has at most HOLDS_MAX holds; a group beyond them holds nothing, and the log says so.
  W3  A broker that does not answer within ASK_MS delays no other.  It keeps what it has heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

from pk import errors
from pk.server.groups.coordinator import GroupClock, GroupCoordinators
from pk.server.groups.groups import ConsumerGroup
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import ControllerContact, Environment, InterBrokerCalls
from pk.tasks import TaskRegistry
from pk.types import NodeId, PartitionKey
from pk.wire import pk_pb2 as wire

REPORT_MS = 5_000
ASK_MS = 5_000
#: Holds of one broker's groups.
HOLDS_MAX = 20_000

_Part = tuple[int, int, Mapping[str, ConsumerGroup]]  #: number, leader epoch, groups


class HoldReports:
    """Reports the holds of the groups of one coordinating broker, also to itself."""

    def __init__(
        self,
        env: Environment,
        metadata: MetadataCache,
        contact: ControllerContact,
        clocks: GroupClock,
        calls: InterBrokerCalls,
        groups: GroupCoordinators,
    ) -> None:
        self._env = env
        self._metadata = metadata
        self._contact = contact
        self._clocks = clocks
        self._calls = calls
        self._groups = groups
        self._fallen: dict[NodeId, list[wire.FallenHold]] = {}  #: as each broker said last
        self._silent: set[NodeId] = set()  #: brokers that did not answer, logged once
        self._tasks = TaskRegistry(partial(env.bug, "the reports of retention holds"))

    def start(self) -> None:
        """Begin to report."""
        self._tasks.spawn(self._reports())

    async def close(self) -> None:
        """Stop."""
        await self._tasks.close()

    def fallen(self, group_id: str) -> list[wire.FallenHold]:
        """Return the fallen holds of a group, as their leaders said last."""
        return [
            each for told in self._fallen.values() for each in told if each.group_id == group_id
        ]

    async def _reports(self) -> None:
        while True:
            await self._env.clock.sleep_ms(REPORT_MS)
            await self.report()

    async def report(self) -> None:
        """Report to every broker once."""
        parts = self._groups.coordinated()
        if not parts or not self._contact.in_contact():  # W1
            self._fallen.clear()
            return
        parts = self._bounded(parts)
        brokers = self._metadata.image.brokers
        nodes = [node for node in sorted(brokers) if not brokers[node].fenced]
        told = await asyncio.gather(*(self._report_to(node, parts) for node in nodes))
        self._fallen = {
            node: list(reply.fallen)
            for node, reply in zip(nodes, told, strict=True)
            if reply is not None
        }

    def _bounded(self, parts: list[_Part]) -> list[_Part]:
        """Return the groups that hold, at most HOLDS_MAX offsets of them (W2)."""
        room = HOLDS_MAX
        found: list[_Part] = []
        for number, epoch, groups in parts:
            held: dict[str, ConsumerGroup] = {}
            for group_id, group in sorted(groups.items()):
                if not group.metadata.holds_retention:
                    continue
                room -= len(group.offsets)
                if room < 0:
                    self._env.warn("retention_holds_beyond_bound", group=group_id, bound=HOLDS_MAX)
                    break
                held[group_id] = group
            found.append((number, epoch, held))
        return found

    async def _report_to(self, node: NodeId, parts: list[_Part]) -> wire.ReportHoldsReply | None:
        request = self._request(node, parts)
        try:
            reply: wire.ReportHoldsReply = await self._calls.call(node, request, ASK_MS)
        except errors.PkError as failure:  # W3
            if node not in self._silent:
                self._silent.add(node)
                self._env.say("retention_holds_not_heard", broker=node, error=failure.message)
            return None
        self._silent.discard(node)
        return reply

    def _request(self, node: NodeId, parts: list[_Part]) -> wire.ReportHoldsRequest:
        """Return the report to one broker."""
        request = wire.ReportHoldsRequest()
        now_ms = self._clocks.trusted_ms()
        for number, epoch, groups in parts:
            told = request.coordinators.add(coordinator_partition=number, leader_epoch=epoch)
            for group_id, group in groups.items():
                topics: dict[str, wire.TopicHolds] = {}
                for key, committed in sorted(group.offsets.items()):
                    if not self._has_replica(node, key):
                        continue
                    topic = topics.setdefault(key.topic_id, wire.TopicHolds(topic_id=key.topic_id))
                    topic.partitions.append(key.partition)
                    topic.offsets.append(committed.offset)
                    topic.commit_offsets.append(committed.at)
                    age_ms = 0 if now_ms is None else max(0, now_ms - committed.committed_ms)
                    topic.ages_ms.append(age_ms)
                told.groups.add(group_id=group_id, topics=topics.values())
        return request

    def _has_replica(self, node: NodeId, key: PartitionKey) -> bool:
        state = self._metadata.image.partition(key)
        return state is not None and node in state.replicas
