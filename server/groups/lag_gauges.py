"""The gauges of groups: how many this broker coordinates, and how far they are behind.

World-generic.  Every LOOK_MS the coordinator asks the leaders of the partitions for their last
stable offsets, with one request for each leader and QUERIES of its partitions.

Invariants
  Z1  A group has series at one broker: that which coordinates it, while it has contact to the
      controller.  A group that goes, or moves to another broker, loses its series at the next look.
  Z2  A leader that does not answer within ASK_MS leaves its partitions out of this look.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

from pk import errors
from pk.server.groups import lag
from pk.server.groups.groups import ConsumerGroup
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import ControllerContact, Environment, InterBrokerCalls
from pk.tasks import TaskRegistry
from pk.types import NONE, NodeId, Offset, PartitionKey
from pk.wire import pk_pb2 as wire

LOOK_MS = 15_000
ASK_MS = 5_000
#: Partitions of one request.
QUERIES = 1_000
#: The special time of the end, and the isolation of readers (client/offsets).
_LATEST, _READ_COMMITTED = -1, 1


class GroupGauges:
    """Sets the gauges of one broker.

    groups: returns the groups that the broker coordinates now
    own_end: returns the last stable offset of a partition that the broker leads, or None
    """

    def __init__(
        self,
        env: Environment,
        metadata: MetadataCache,
        contact: ControllerContact,
        calls: InterBrokerCalls,
        groups: Callable[[], Mapping[str, ConsumerGroup]],
        own_end: Callable[[PartitionKey], Offset | None],
    ) -> None:
        self._env = env
        self._metadata = metadata
        self._contact = contact
        self._calls = calls
        self._groups = groups
        self._own_end = own_end
        self._shown: set[str] = set()  #: groups that have series
        self._tasks = TaskRegistry(partial(env.bug, "the gauges of groups"))

    def start(self) -> None:
        """Begin to look."""
        self._tasks.spawn(self._looks())

    async def close(self) -> None:
        """Stop."""
        await self._tasks.close()

    async def _looks(self) -> None:
        while True:
            await self._env.clock.sleep_ms(LOOK_MS)
            await self.look()

    async def look(self) -> None:
        """Ask for the ends, and set the gauges."""
        ends = await self._ends(lag.wanted(self._here()))
        groups = self._here()
        metrics = self._env.metrics
        found = lag.lags(groups, ends)
        for gone in sorted(self._shown - {each.group_id for each in found}):
            metrics.group_lag.remove(gone)
            metrics.group_lag_max.remove(gone)
        for each in found:
            metrics.group_lag.labels(each.group_id).set(each.total)
            metrics.group_lag_max.labels(each.group_id).set(each.largest)
        self._shown = {each.group_id for each in found}
        states = Counter(group.state.label for group in groups.values())
        for label in sorted({*metrics.group_states, *states}):
            metrics.groups.labels(label).set(states[label])
        metrics.group_states.update(states)

    def _here(self) -> Mapping[str, ConsumerGroup]:
        return self._groups() if self._contact.in_contact() else {}  # Z1

    async def _ends(self, keys: list[PartitionKey]) -> dict[PartitionKey, Offset]:
        """Return the last stable offsets of the partitions whose leaders answer."""
        found: dict[PartitionKey, Offset] = {}
        asked: dict[NodeId, list[PartitionKey]] = {}
        for key in keys:
            leader = self._metadata.leader_of(key)
            if leader == self._env.node_id:
                end = self._own_end(key)
                if end is not None:
                    found[key] = end
            elif leader != NONE:
                asked.setdefault(leader, []).append(key)
        for leader, listed in sorted(asked.items()):
            for at in range(0, len(listed), QUERIES):
                try:
                    found.update(await self._ask(leader, listed[at : at + QUERIES]))
                except errors.PkError as failure:  # Z2
                    self._env.say("group_lag_unknown", broker=leader, error=failure.message)
                    break
        return found

    async def _ask(self, leader: NodeId, keys: list[PartitionKey]) -> dict[PartitionKey, Offset]:
        request = wire.ListOffsetsRequest(isolation=_READ_COMMITTED)
        for key in keys:
            request.queries.add(
                topic_id=key.topic_id,
                partition=key.partition,
                current_leader_epoch=NONE,
                timestamp_ms=_LATEST,
            )
        reply: wire.ListOffsetsReply = await self._calls.call(leader, request, ASK_MS)
        return {
            PartitionKey(each.topic_id, each.partition): each.offset
            for each in reply.answers
            if not each.HasField("error") and each.offset >= 0
        }
