"""A control stream: a table of handlers by the name of the request in the protocol.

World-generic.  A typed error that a handler raises becomes the error of the reply.  Any other
exception is a bug and is reported as InternalError.  Each handler bounds the cost of one request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from pk import errors
from pk.server.controller.elections import waits_for
from pk.server.handlers import admin, metadata, offsets
from pk.server.handlers import tier as tier_handler
from pk.server.replica.partition import Partition
from pk.types import NONE
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Handler, serve_control
from pk.world import Stream

if TYPE_CHECKING:
    from pk.server.broker.core import BrokerCore


class ControlStream:
    """One accepted control stream."""

    def __init__(self, core: BrokerCore, ids: admin.ProducerIds, stream: Stream) -> None:
        self._core = core
        self._ids = ids
        self._stream = stream
        self._subscription = metadata.MetadataSubscription(core, stream)

    async def serve(self) -> None:
        """Serve requests until the stream ends."""
        try:
            await serve_control(self._stream, self._table(), on_error=self._core.bug)
        finally:
            await self._subscription.close()

    def _table(self) -> dict[str, Handler]:
        core = self._core
        table: dict[str, Handler] = {
            "metadata": self._metadata,
            "list_offsets": lambda request, _: offsets.list_offsets(core, request),
            "byte_offsets": lambda request, _: offsets.byte_offsets(core, request),
            "delete_records": lambda request, _: offsets.delete_records(core, request),
            "init_producer_id": lambda request, _: self._ids.init(request),
            "describe_partitions": self._describe_partitions,
            "describe_tier": lambda request, _: tier_handler.describe_tier(core, request),
            "tier_rows": lambda request, _: tier_handler.tier_rows(core, request),
            "tier_partitions": lambda request, _: tier_handler.tier_partitions(core, request),
            "tier_progress": self._tier_progress,
            "create_topics": lambda request, frame: admin.create(core, request, frame),
            "create_partitions": lambda request, frame: admin.create(core, request, frame),
            "delete_topics": lambda request, frame: admin.delete(core, request, frame),
            "describe_configs": lambda request, frame: admin.forward(core, request, frame),
            "alter_configs": lambda request, frame: admin.forward(core, request, frame),
            "describe_quorum": lambda request, frame: admin.forward(core, request, frame),
            "add_voter": lambda request, frame: admin.forward(core, request, frame),
            "remove_voter": lambda request, frame: admin.forward(core, request, frame),
            "alter_reassignments": lambda request, frame: admin.forward(core, request, frame),
            "list_reassignments": lambda request, frame: admin.forward(core, request, frame),
            "elect_leaders": lambda request, frame: admin.forward(core, request, frame),
            "unregister_broker": lambda request, frame: admin.forward(core, request, frame),
            "list_brokers": lambda request, frame: admin.forward(core, request, frame),
            "describe_cluster": lambda request, frame: admin.forward(core, request, frame),
            "upgrade_cluster": lambda request, frame: admin.forward(core, request, frame),
            "confirm_clock": self._confirm_clock,
        }
        return {name: self._counted(name, handler) for name, handler in table.items()}

    def _counted(
        self, name: str, handler: Callable[[Any, frames.Frame], Awaitable[Any]]
    ) -> Handler:
        counter = self._core.metrics.calls.labels(name)

        async def answer(request: Any, frame: frames.Frame) -> Any:
            counter.inc()
            return await handler(request, frame)

        return answer

    async def _metadata(self, request: wire.MetadataRequest, _: frames.Frame) -> Message:
        if self._core.server["auto_create_topics_enable"]:
            await metadata.create_missing(self._core, request)
        reply = metadata.metadata(self._core, request)
        if request.watch:
            self._subscription.begin(request, reply)
        return reply

    async def _tier_progress(self, request: wire.TierProgressRequest, _: frames.Frame) -> Message:
        return tier_handler.tier_progress(self._core, request)

    async def _confirm_clock(
        self, request: wire.ConfirmClockRequest, _: frames.Frame
    ) -> wire.ConfirmClockReply:
        return admin.confirm_clock(self._core, request)

    async def _describe_partitions(
        self, request: wire.DescribePartitionsRequest, _: frames.Frame
    ) -> Message:
        return describe_partitions(self._core, request)


def describe_partitions(
    core: BrokerCore, request: wire.DescribePartitionsRequest
) -> wire.DescribePartitionsReply:
    """Return every offset of a partition, for operators and readiness checks."""
    image = core.publisher.image
    for name in request.topics:
        if image.topic(name) is None:
            raise errors.UnknownTopicOrPartition(f"topic {name!r} does not exist")
    wanted = dict.fromkeys(request.topics)
    reply = wire.DescribePartitionsReply()
    here = sorted(core.partitions.values(), key=lambda each: (each.topic, each.key.partition))
    for partition in here:
        if not wanted or partition.topic in wanted:
            _describe(core, partition, reply)
    for key, problem in sorted(core.replicas.unopened().items()):
        topic = image.topics.get(key.topic_id)
        if topic is not None and (not wanted or topic.name in wanted):
            reply.partitions.add(
                topic=topic.name,
                topic_id=key.topic_id,
                partition=key.partition,
                leader=NONE,
                error=frames.error_of(problem),
            )
    return reply


def _describe(core: BrokerCore, partition: Partition, reply: wire.DescribePartitionsReply) -> None:
    log, state = partition.log, core.publisher.image.partition(partition.key)
    described = reply.partitions.add(
        topic=partition.topic,
        topic_id=partition.key.topic_id,
        partition=partition.key.partition,
        leader=NONE if state is None else state.leader,
        leader_epoch=NONE if state is None else state.leader_epoch,
        log_start=log.log_start,
        local_log_start=log.local_log_start,
        tiered_end=partition.tiered_end,
        last_stable_offset=partition.last_stable_offset,
        high_watermark=partition.high_watermark,
        log_end=log.written_end,
        local_bytes=log.size_bytes,
        tier_bytes=partition.tier.tier_bytes,
        segments=log.segment_count,
        directory=partition.writer.disk.storage.root,
        isr=() if state is None else state.isr,
        replicas=() if state is None else state.replicas,
    )
    problem = partition.hosted.cause or core.corruption.problem_of(partition)
    if problem is None and state is not None and state.leader == NONE:
        names = ", ".join(map(str, waits_for(state, core.publisher.image.available)))
        awaited = f"brokers {names}" if names else "an election"
        problem = errors.EligibleLeadersNotAvailable(f"{partition} waits for {awaited} (rule R3)")
    if problem is not None:
        described.error.CopyFrom(frames.error_of(problem))
