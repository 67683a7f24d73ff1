"""Shows the progress of a streaming query as the offsets of a group (rule S1).

Spark's checkpoint alone decides where a query continues.  The group only makes the progress visible
to `pk groups` and to metrics, so no failure here ever ends the query.

Invariants
  K1  What is published is the `start` of latestOffset: everything below it has been processed.
  K2  `publish` waits for nothing.  One request is under way at a time; of the positions that come
      meanwhile, the newest is sent next.
  K3  Equal positions are sent again only after AGAIN_S, so that they do not expire, nor their
      retention hold.
  K4  A run whose group another run has taken over publishes nothing more.
"""

from __future__ import annotations

from collections.abc import Callable

from pk import clock, errors
from pk.client.coordinator_calls import GROUP, CoordinatorCalls
from pk.client.network_client import NetworkClient
from pk.sparkconnector.offsets import SourceProgress
from pk.tasks import TaskRegistry
from pk.types import NONE
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.world import World

AGAIN_S = 60.0
TIMEOUT_MS = 10_000

#: Another run, or the consumers of an application, have the group (K4).
_TAKEN = (errors.FencedInstanceId, errors.InconsistentGroupProtocol, errors.NonEmptyGroup)


class QueryProgress:
    """Publishes the progress of one run of a query, on the clients' loop.

    warn: called once for each kind of failure in a row
    holds_retention: what the query has not processed is kept, within bounds
    """

    def __init__(
        self,
        world: World,
        network: NetworkClient,
        group_id: str,
        warn: Callable[[str], None],
        *,
        holds_retention: bool = False,
    ) -> None:
        self._holds_retention = holds_retention
        self._network = network
        self._group_id = group_id
        self._run_id = world.new_id()
        self._warn = warn
        self._calls = CoordinatorCalls(world, network, group_id, TIMEOUT_MS, GROUP)
        self._tasks = TaskRegistry()
        self._next: SourceProgress | None = None
        self._sent: SourceProgress | None = None
        self._sent_s = 0.0
        self._warned: type[errors.PkError] | None = None
        self._taken = False

    def publish(self, progress: SourceProgress) -> None:
        """Publish the next offsets to process (K2)."""
        same = progress == self._sent and clock.monotonic_s() - self._sent_s < AGAIN_S
        if same or self._taken or not progress:
            return
        busy = self._next is not None
        self._next = progress
        if not busy:
            self._tasks.spawn(self._send_all())

    async def _send_all(self) -> None:
        while self._next is not None and not self._taken:
            progress = self._next
            try:
                await self._send(progress)
            except errors.PkError as failure:
                self._failed(failure)
            else:
                self._sent, self._sent_s = progress, clock.monotonic_s()
                self._warned = None
            if self._next is progress:
                self._next = None

    async def _send(self, progress: SourceProgress) -> None:
        request = wire.OffsetCommitRequest(
            member=wire.GroupMember(group_id=self._group_id, generation=NONE),
            metadata_offset=max(0, self._network.metadata.offset),
            query=wire.QueryRun(
                run_id=self._run_id,
                first=self._sent is None,
                holds_retention=self._holds_retention,
            ),
        )
        for name in sorted(progress):
            topic = progress[name]
            offsets = sorted(topic.offsets.items())
            request.topics.add(
                topic_id=topic.topic_id,
                partitions=[number for number, _ in offsets],
                offsets=[offset for _, offset in offsets],
                leader_epochs=[topic.epochs.get(number, NONE) for number, _ in offsets],
            )
        reply = await self._calls.call(request, TIMEOUT_MS)
        for refused in reply.refused:
            error = frames.raise_error(refused.error)
            if not isinstance(error, errors.UnknownTopicId):  # it was deleted meanwhile
                raise error

    def _failed(self, failure: errors.PkError) -> None:
        """Warn once for each kind of failure in a row."""
        self._taken = isinstance(failure, _TAKEN)
        if self._warned is not type(failure):
            self._warned = type(failure)
            end = ". This query publishes nothing more" if self._taken else ""
            self._warn(
                f"the progress of group {self._group_id!r} is not published: {failure.message}{end}"
            )
