"""A control stream: a table of handlers by the name of the request in the protocol.

World-generic.  A typed error that a handler raises becomes the error of the reply.  Any other
exception is a bug and is reported as InternalError.  Each handler bounds the cost of one request.

A stream makes and keeps only the handlers that its peer uses.  A member of a group uses four of
some 80.  All 80 would take 30 KB, as much as the rest of its stream.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from pk.server.handlers.admin import AdminRequests, ProducerIds
from pk.server.handlers.coordinators import CoordinatorRequests
from pk.server.handlers.groups import GroupRequests
from pk.server.handlers.metadata import MetadataRequests, MetadataSubscription
from pk.server.handlers.offsets import OffsetRequests
from pk.server.handlers.partition_descriptions import PartitionDescriptions
from pk.server.handlers.peers import Peer, between_brokers
from pk.server.handlers.tier import TierRequests
from pk.server.handlers.transactions import TransactionRequests
from pk.server.replica.context import Environment, MetadataProgress
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Handler, serve_control
from pk.world import Stream


class ControlStream:
    """One accepted control stream.

    `between`: the requests that only other brokers may send, by name.
    """

    def __init__(
        self,
        env: Environment,
        metadata: MetadataRequests,
        progress: MetadataProgress,
        admin: AdminRequests,
        ids: ProducerIds,
        transactions: TransactionRequests,
        offsets: OffsetRequests,
        descriptions: PartitionDescriptions,
        tier: TierRequests,
        coordinators: CoordinatorRequests,
        groups: GroupRequests,
        between: Mapping[str, Handler],
        stream: Stream,
        peer: Peer,
    ) -> None:
        self._env = env
        self._requests = metadata
        self._admin = admin
        self._ids = ids
        self._transactions = transactions
        self._offsets = offsets
        self._descriptions = descriptions
        self._tier = tier
        self._coordinators = coordinators
        self._groups = groups
        self._between = between
        self._stream = stream
        self._peer = peer
        self._subscription = MetadataSubscription(metadata, progress, stream)
        self._used: dict[str, Handler] = {}

    async def serve(self) -> None:
        """Serve requests until the stream ends."""
        try:
            await serve_control(self._stream, self, on_error=self._env.bug)
        finally:
            await self._subscription.close()

    def get(self, name: str, /) -> Handler | None:
        """Return the handler of a request; None = there is none."""
        found = self._used.get(name)
        if found is None:
            handler = self._table().get(name)
            if handler is None:
                return None
            found = self._used[name] = self._counted(name, handler)
        return found

    def _table(self) -> dict[str, Handler]:
        """Return all handlers, by the names of their requests."""
        admin, offsets, tier = self._admin, self._offsets, self._tier
        table: dict[str, Handler] = {
            "metadata": self._metadata,
            "list_offsets": lambda request, _: offsets.list_offsets(request),
            "byte_offsets": lambda request, _: offsets.byte_offsets(request),
            "delete_records": lambda request, _: offsets.delete_records(request),
            "init_producer_id": self._init_producer_id,
            "end_txn": lambda request, _: self._transactions.end(request),
            "join_transaction": lambda request, _: self._transactions.join(request),
            "participant_heartbeat": lambda request, _: self._transactions.heartbeat(request),
            "commit_participants": lambda request, _: self._transactions.commit_participants(
                request
            ),
            "prepare_participants": lambda request, _: self._transactions.prepare_participants(
                request
            ),
            "abort_participants": lambda request, _: self._transactions.abort_participants(request),
            "list_transactions": lambda request, _: self._transactions.list(request),
            "describe_transactions": lambda request, _: self._transactions.describe(request),
            "abort_transaction": lambda request, _: self._transactions.abort(request),
            "forget_transaction": lambda request, _: self._transactions.forget(request),
            "describe_partitions": self._describe_partitions,
            "describe_producers": self._describe_producers,
            "describe_tier": lambda request, _: tier.describe_tier(request),
            "tier_rows": lambda request, _: tier.tier_rows(request),
            "tier_now": lambda request, _: tier.tier_now(request),
            "tier_partitions": lambda request, _: tier.tier_partitions(request),
            "tier_progress": self._tier_progress,
            "create_topics": admin.create,
            "create_partitions": admin.create,
            "delete_topics": admin.delete,
            "describe_configs": admin.forward,
            "alter_configs": admin.forward,
            "describe_quorum": admin.forward,
            "add_voter": admin.forward,
            "remove_voter": admin.forward,
            "alter_reassignments": admin.forward,
            "list_reassignments": admin.forward,
            "elect_leaders": admin.forward,
            "unregister_broker": admin.forward,
            "list_brokers": admin.forward,
            "describe_cluster": admin.forward,
            "upgrade_cluster": admin.forward,
            "acquire_lease": admin.forward,
            "renew_lease": admin.forward,
            "release_lease": admin.forward,
            "set_schedule": admin.forward,
            "delete_schedule": admin.forward,
            "list_schedules": admin.forward,
            "note_run": admin.forward,
            "commit_to_table": lambda request, _: tier.commit_to_table(request),
            "confirm_clock": self._confirm_clock,
            "find_coordinator": self._coordinators.find,
        }
        table.update(self._groups.handlers())
        for name, handler in self._between.items():
            table[name] = between_brokers(self._peer, name, handler)
        return table

    def _counted(
        self, name: str, handler: Callable[[Any, frames.Frame], Awaitable[Any]]
    ) -> Handler:
        counter = self._env.metrics.calls.labels(name)

        async def answer(request: Any, frame: frames.Frame) -> Any:
            counter.inc()
            return await handler(request, frame)

        return answer

    async def _metadata(self, request: wire.MetadataRequest, _: frames.Frame) -> Message:
        if self._env.server["auto_create_topics_enable"]:
            await self._requests.create_missing(request)
        reply = self._requests.reply(request)
        if request.watch:
            self._subscription.begin(request, reply)
        return reply

    async def _init_producer_id(
        self, request: wire.InitProducerIdRequest, _: frames.Frame
    ) -> Message:
        if request.transactional_id:
            return await self._transactions.init_producer(request)
        return await self._ids.init(request)

    async def _tier_progress(self, request: wire.TierProgressRequest, _: frames.Frame) -> Message:
        return self._tier.tier_progress(request)

    async def _confirm_clock(
        self, request: wire.ConfirmClockRequest, _: frames.Frame
    ) -> wire.ConfirmClockReply:
        return self._admin.confirm_clock(request)

    async def _describe_partitions(
        self, request: wire.DescribePartitionsRequest, _: frames.Frame
    ) -> Message:
        return self._descriptions.reply(request)

    async def _describe_producers(
        self, request: wire.DescribeProducersRequest, _: frames.Frame
    ) -> Message:
        return self._descriptions.producers(request)
