"""Administrative requests: the controller decides, this broker answers once it has applied the
change.

World-generic.  The broker forwards a request to the controller.  The reply of the controller names
the metadata offset of its records.  The broker answers once it has reacted to that offset, so that
a client can produce to a topic as soon as its creation was answered (read your writes).

Invariants
  A1  A reply without error is sent only after `reacted >= metadata_offset`.
  A2  Producer ids come from blocks that the controller committed.  An id is given out once (Q4).
"""

from __future__ import annotations

import asyncio
from typing import Any

from google.protobuf.message import Message

from pk import errors, limits
from pk.server.broker.clock_watch import ClockWatch
from pk.server.broker.hosted_partitions import HostedPartitions
from pk.server.handlers.admission import Admission
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import ControllerChannel, Environment, MetadataProgress
from pk.server.replica.state import HostedReplicas
from pk.transactional_ids import is_transactional
from pk.types import NONE
from pk.wire import frames
from pk.wire import pk_pb2 as wire

ADMIN_TIMEOUT_MS = 30_000


class AdminRequests:
    """Forwards administrative requests to the controller."""

    def __init__(
        self,
        env: Environment,
        partitions: HostedPartitions,
        replicas: HostedReplicas,
        metadata: MetadataCache,
        controller: ControllerChannel,
        progress: MetadataProgress,
        clocks: ClockWatch,
    ) -> None:
        self._env = env
        self._clock = env.clock
        self._partitions = partitions
        self._replicas = replicas
        self._metadata = metadata
        self._controller = controller
        self._progress = progress
        self._clocks = clocks

    async def forward(self, request: Message, frame: frames.Frame) -> Message:
        """Forward an admin request to the controller, then wait for this broker's reaction (A1)."""
        timeout_ms = frame.head.timeout_ms or ADMIN_TIMEOUT_MS
        started_ms = self._clock.monotonic_ms()
        reply_frame = await self._controller.call(request, timeout_ms)
        body: Any = getattr(reply_frame.head, reply_frame.head.WhichOneof("body") or "error")
        offset = getattr(body, "metadata_offset", NONE)
        left_ms = max(100, timeout_ms - (self._clock.monotonic_ms() - started_ms))
        await self._progress.reached(offset, left_ms)
        message: Message = body
        return message

    async def create(self, request: Any, frame: frames.Frame) -> Message:
        """Handle create_topics and create_partitions.

        The reply is sent when the partitions led here are ready, or says why they are not.
        """
        reply: Any = await self.forward(request, frame)
        for result in reply.results:
            if result.HasField("error"):
                continue
            for key, problem in self._replicas.unopened().items():
                if key.topic_id == result.topic_id:
                    result.note = f"partition {key.partition} is offline: {problem.message}"
                    break
        message: Message = reply
        return message

    async def delete(self, request: wire.DeleteTopicsRequest, frame: frames.Frame) -> Message:
        """Handle delete_topics; the reply names the tier table that is kept (rule T7)."""
        uris = {
            partition.topic: partition.tier.uri
            for partition in self._partitions.all()
            if partition.tier.uri
        }
        ids = dict(self._metadata.image.topic_ids.items())
        reply: Any = await self.forward(request, frame)
        for result in reply.results:
            uri = uris.get(result.name)
            if not result.topic_id:
                result.topic_id = ids.get(result.name, "")
            if uri and not result.HasField("error") and not result.note:
                fate = "will be removed" if request.purge_tier else "stays"
                result.note = f"the tier's table {fate}: {uri}"
        message: Message = reply
        return message

    def confirm_clock(self, request: wire.ConfirmClockRequest) -> wire.ConfirmClockReply:
        """Trust this broker's wall clock, as an operator confirms (rule L10)."""
        if request.broker_id != self._env.node_id:
            raise errors.InvalidRequest(
                f"this is broker {self._env.node_id}, not {request.broker_id}: "
                "ask the broker itself"
            )
        return wire.ConfirmClockReply(doubt=self._clocks.confirm().value)


class ProducerIds:
    """Hands out producer ids from blocks of the controller (A2)."""

    def __init__(
        self, env: Environment, admission: Admission, controller: ControllerChannel
    ) -> None:
        self._node_id = env.node_id
        self._admission = admission
        self._controller = controller
        self._next = 0
        self._end = 0
        self._asking = asyncio.Lock()

    async def init(self, request: wire.InitProducerIdRequest) -> wire.InitProducerIdReply:
        """Return a new producer id, or the next epoch of the caller's id (KIP-360)."""
        if request.transactional_id:
            raise errors.UnsupportedFeature("transactions are not in this build")
        if is_transactional(request.producer_id):
            raise errors.InvalidRequest(
                f"producer id {request.producer_id} is one of transactions: "
                "name its transactional id"
            )
        self._admission.check_new_session()
        if request.producer_id >= 0 and 0 <= request.producer_epoch < limits.PRODUCER_EPOCH_LAST:
            if not (request.producer_id or request.producer_epoch):
                return (
                    await self._fresh()
                )  # proto3 cannot distinguish an absent id from 0, so 0 is never given out
            return wire.InitProducerIdReply(
                producer_id=request.producer_id, producer_epoch=request.producer_epoch + 1
            )
        return await self._fresh()

    async def _fresh(self) -> wire.InitProducerIdReply:
        async with self._asking:
            if self._next >= self._end:
                controller = self._controller
                request = wire.AllocateProducerIdsRequest(
                    broker_id=self._node_id, broker_epoch=controller.broker_epoch
                )
                reply = await controller.call(request, ADMIN_TIMEOUT_MS)
                block = reply.head.allocate_producer_ids_reply
                self._next, self._end = max(1, block.first), block.first + block.count
            given, self._next = self._next, self._next + 1
        return wire.InitProducerIdReply(producer_id=given, producer_epoch=0)
