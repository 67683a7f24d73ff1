"""Requests of consumer groups: of consumers and tools to a coordinator.

World-generic.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.message import Message

from pk.server.groups.coordinator import GroupCoordinators
from pk.server.replica.context import MetadataProgress
from pk.wire.calls import Handler


class GroupRequests:
    """Answers the requests of groups for one broker."""

    def __init__(self, coordinators: GroupCoordinators, progress: MetadataProgress) -> None:
        self._coordinators = coordinators
        self._progress = progress

    def handlers(self) -> dict[str, Handler]:
        """Return the handlers by the names of their requests."""
        groups, progress = self._coordinators, self._progress
        return {
            "join_group": _handler(groups.join),
            "sync_group": _handler(lambda request: groups.sync(request, progress)),
            "group_heartbeat": _handler(groups.heartbeat),
            "leave_group": _handler(groups.leave),
            "offset_commit": _handler(lambda request: groups.commit(request, progress)),
            "offset_fetch": _handler(groups.fetch),
            "list_groups": _handler(groups.list),
            "describe_groups": _handler(groups.describe),
            "delete_groups": _handler(groups.delete),
            "delete_offsets": _handler(groups.delete_offsets),
        }


def _handler(answer: Callable[[Any], Awaitable[Message]]) -> Handler:
    async def handle(request: Any, _: Any) -> Message:
        return await answer(request)

    return handle
