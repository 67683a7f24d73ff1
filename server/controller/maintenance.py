"""The requests of maintenance jobs to the active controller: leases, schedules, notes of runs.

World-generic.  It adds to each command what a pure core cannot know: the wall clock, and which
leases were renewed in time in this term.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pk.clock import Clock
from pk.server.controller import commands
from pk.server.controller.clocks import Clocks
from pk.server.controller.leases import RenewedLeases
from pk.server.controller.machine import Command
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.leases import LeaseKey, lease_with
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import Handler


class MaintenanceRequests:
    """Handles the requests of jobs and runners in one term of the active controller."""

    def __init__(
        self,
        clock: Clock,
        ask: Callable[[Command], Awaitable[Any]],
        image: Callable[[], MetadataImage],
        clocks: Clocks,
    ) -> None:
        self._clock = clock
        self._ask = ask
        self._image = image
        self._clocks = clocks
        self._leases = RenewedLeases()

    def begin(self) -> None:
        """Begin a term: the leases of the term before live one more TTL."""
        self._live()

    def handlers(self) -> Mapping[str, Handler]:
        """The requests and their handlers."""
        return {
            "acquire_lease": self._acquire_lease,
            "renew_lease": self._renew_lease,
            "release_lease": self._release_lease,
            "set_schedule": self._set_schedule,
            "delete_schedule": self._delete_schedule,
            "list_schedules": self._list_schedules,
            "note_run": self._note_run,
        }

    def _live(self) -> frozenset[LeaseKey]:
        return self._leases.live(self._image(), self._clock.monotonic_ms())

    async def _acquire_lease(self, request: wire.AcquireLeaseRequest, _: frames.Frame) -> Any:
        command = commands.AcquireLease(request, self._live(), self._clock.wall_ms())
        reply: wire.AcquireLeaseReply = await self._ask(command)
        now_ms = self._clock.monotonic_ms()
        self._leases.heard(reply.topic_id, request.kind, reply.token, now_ms)
        return reply

    async def _renew_lease(self, request: wire.RenewLeaseRequest, _: frames.Frame) -> Any:
        reply: wire.RenewLeaseReply = await self._ask(commands.RenewLease(request))
        found = lease_with(self._image(), request.topic_id, request.token)
        if found is not None:
            now_ms = self._clock.monotonic_ms()
            self._leases.heard(request.topic_id, found[0], request.token, now_ms)
        trusted = self._clocks.trusted_time(
            self._clock.wall_ms(), self._clock.boottime_ms(), len(self._image().brokers)
        )
        if trusted is not None:
            reply.now_ms, reply.latest_ms = trusted
        return reply

    async def _release_lease(self, request: wire.ReleaseLeaseRequest, _: frames.Frame) -> Any:
        return await self._ask(commands.ReleaseLease(request))

    async def _set_schedule(self, request: wire.SetScheduleRequest, _: frames.Frame) -> Any:
        return await self._ask(commands.SetSchedule(request, self._clock.wall_ms()))

    async def _delete_schedule(self, request: wire.DeleteScheduleRequest, _: frames.Frame) -> Any:
        return await self._ask(commands.DeleteSchedule(request))

    async def _list_schedules(self, request: wire.ListSchedulesRequest, _: frames.Frame) -> Any:
        command = commands.ListSchedules(request, self._live(), self._clock.wall_ms())
        return await self._ask(command)

    async def _note_run(self, request: wire.NoteRunRequest, _: frames.Frame) -> Any:
        return await self._ask(commands.NoteRun(request, self._clock.wall_ms()))
