"""Requests of consumer groups: of consumers and tools to a coordinator.

World-generic.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from google.protobuf.message import Message

from pk import errors
from pk.server.broker.hold_keeper import HoldKeeper
from pk.server.groups.coordinator import GroupCoordinators
from pk.server.groups.hold_reports import HoldReports
from pk.server.handlers.appends import Appends
from pk.server.replica.context import MetadataProgress
from pk.transactional_ids import is_transactional
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Handler


class GroupRequests:
    """Answers the requests of groups for one broker."""

    def __init__(
        self,
        coordinators: GroupCoordinators,
        progress: MetadataProgress,
        appends: Appends,
        holds: HoldKeeper,
        reports: HoldReports,
    ) -> None:
        self._holds = holds
        self._reports = reports
        self._coordinators = coordinators
        self._progress = progress
        self._appends = appends

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by the names of their requests."""
        groups, progress = self._coordinators, self._progress
        return {
            "join_group": _handler(groups.join),
            "sync_group": _handler(lambda request: groups.sync(request, progress)),
            "group_heartbeat": _handler(groups.heartbeat),
            "leave_group": _handler(groups.leave),
            "offset_commit": _handler(lambda request: groups.commit(request, progress)),
            "txn_offset_commit": _handler(self.commit_in_transaction),
            "offset_fetch": _handler(groups.fetch),
            "list_coordinated": _handler(groups.list_coordinated),
            "read_offsets": _handler(groups.read_offsets),
            "list_groups": _handler(groups.list),
            "describe_groups": _handler(self.describe),
            "delete_groups": _handler(groups.delete),
            "delete_offsets": _handler(groups.delete_offsets),
        }

    def between_brokers(self) -> dict[str, Handler]:
        """Return the handlers of requests that only brokers send, by name."""
        return {"report_holds": _handler(self.report_holds)}

    async def report_holds(self, request: wire.ReportHoldsRequest) -> wire.ReportHoldsReply:
        """Take over the retention holds of a coordinator (S1)."""
        return self._holds.report(request)

    async def describe(self, request: wire.DescribeGroupsRequest) -> wire.DescribeGroupsReply:
        """Describe groups, with the holds that have fallen."""
        reply = await self._coordinators.describe(request)
        for each in reply.groups:
            if each.holds_retention:
                each.fallen.extend(self._reports.fallen(each.group_id))
        return reply

    async def commit_in_transaction(
        self, request: wire.TxnOffsetCommitRequest
    ) -> wire.TxnOffsetCommitReply:
        """Store offsets that count when the producer's transaction commits (X2)."""
        if (
            not is_transactional(request.producer_id)
            or min(request.producer_epoch, request.base_sequence) < 0
        ):
            raise errors.InvalidRequest(
                f"producer id {request.producer_id}, epoch {request.producer_epoch}, sequence "
                f"{request.base_sequence} name no transaction: call init_transactions first"
            )
        return await self._coordinators.commit_in_transaction(
            request, self._progress, partial(self._register, request)
        )

    async def _register(self, request: wire.TxnOffsetCommitRequest, key: PartitionKey) -> None:
        """Make a partition one of the transaction, unless the log shows that it is (X6)."""
        producer = (request.producer_id, request.producer_epoch)
        if self._appends.unverified(key, *producer):
            await self._appends.register(*producer, key)


def _handler(answer: Callable[[Any], Awaitable[Message]]) -> Handler:
    async def handle(request: Any, _: Any) -> Message:
        return await answer(request)

    return handle
