"""The calls of `AdminClient` that concern schedules of maintenance jobs."""

from __future__ import annotations

from typing import NamedTuple

from pk import schedules
from pk.client import arguments
from pk.client.admin.connection import AdminConnection
from pk.schedules import Entry, NotedRun, Schedule
from pk.wire import pk_pb2 as wire


class ScheduleListings(NamedTuple):
    """Schedules with their last runs, and the time of the controller that answered.

    An entry whose schedule has neither interval nor cron line is a run without a schedule.
    """

    now_ms: int
    entries: tuple[Entry, ...]

    @property
    def scheduled(self) -> tuple[Entry, ...]:
        """The entries that have a schedule of a job that this build has."""
        return tuple(
            each
            for each in self.entries
            if each.schedule.is_set and each.schedule.job in schedules.JOBS
        )


class ScheduleCalls:
    """The calls that concern schedules; `AdminClient` documents their arguments."""

    def __init__(self, connection: AdminConnection) -> None:
        self._connection = connection

    def set_schedule(
        self, topic: str, job: str, every_ms: int, cron: str, timeout_s: float
    ) -> Schedule | None:
        request = wire.SetScheduleRequest(
            topic=arguments.topic(topic),
            job=arguments.text(job, "job"),
            every_ms=arguments.whole(every_ms, "every_ms"),
            cron=arguments.text(cron, "cron"),
        )
        reply = self._connection.ask(request, wire.SetScheduleReply, timeout_s)
        return _schedule(reply.before) if reply.HasField("before") else None

    def delete_schedule(self, topic: str, job: str, timeout_s: float) -> bool:
        request = wire.DeleteScheduleRequest(
            topic=arguments.topic(topic), job=arguments.text(job, "job")
        )
        return self._connection.ask(request, wire.DeleteScheduleReply, timeout_s).found

    def list_schedules(self, topic: str | None, timeout_s: float) -> ScheduleListings:
        name = "" if topic is None else arguments.topic(topic)
        request = wire.ListSchedulesRequest(topic=name)
        reply = self._connection.ask(request, wire.ListSchedulesReply, timeout_s)
        return ScheduleListings(reply.now_ms, tuple(_entry(each) for each in reply.schedules))


def _schedule(found: wire.MaintenanceSchedule) -> Schedule:
    return Schedule(
        found.topic, found.topic_id, found.job, found.every_ms, found.cron, found.since_ms
    )


def _entry(found: wire.ScheduleListing) -> Entry:
    last = None
    if found.HasField("last"):
        run = found.last
        last = NotedRun(
            run.started_ms, run.ended_ms, run.outcome, run.detail, run.runner, run.failures,
            run.token,
        )  # fmt: skip
    return Entry(_schedule(found.schedule), last, found.running)
