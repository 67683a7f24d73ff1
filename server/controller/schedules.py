"""Decisions about schedules of maintenance jobs, and about the notes of their runs (0018).

The controller stores and dates; it runs nothing.  A runner decides with `pk.schedules` which
schedules are due, and holds the lease `run:JOB` of the topic while it runs one.

Invariants
  N1  All times are the wall clock of the active controller.  A runner's clock is never used.
  N2  A run is noted only under the newest lease of its job.  So a runner that has slept does not
      replace the note of a later run.
  N3  A repeated request changes nothing: an equal schedule keeps its date, a run is counted once.
"""

from __future__ import annotations

from pk import errors, schedules
from pk.schedules import FAILED, OUTCOMES, SCHEDULES_MAX, Entry, NotedRun, Schedule
from pk.server.controller.commands import (
    DeleteSchedule,
    ListSchedules,
    NoteRun,
    Out,
    Rules,
    SetSchedule,
    decision,
)
from pk.server.metadata.image import SCHEDULE_RESOURCE, MetadataImage, TopicState
from pk.server.metadata.leases import lease_of, lost, run_kind
from pk.server.metadata.schedules import (
    entries_of,
    run_of,
    run_record,
    schedule_of,
    schedule_record,
)
from pk.wire import pk_pb2 as wire


def set_schedule(image: MetadataImage, _rules: Rules, command: SetSchedule) -> Out:
    """Set the schedule of a topic's job; of two writers the later one wins.

    The reply has the schedule before, so that the later writer sees what it replaced.
    """
    request = command.request
    topic = _topic(image, request.topic)
    schedules.check(request.job, request.every_ms, request.cron, command.now_ms)
    if topic.internal:
        raise errors.InvalidRequest(f"{topic.name} is a topic of pk's own: it has no table")
    before = schedule_of(image, topic.topic_id, request.job)
    cron = " ".join(request.cron.split())
    after = Schedule(
        topic.name, topic.topic_id, request.job, request.every_ms, cron, command.now_ms
    )
    reply = wire.SetScheduleReply(before=None if before is None else _schedule(before))
    if before is not None and before._replace(since_ms=0) == after._replace(since_ms=0):
        reply.metadata_offset = image.offset  # N3
        return decision(reply)
    stored = sum(
        len(jobs) for (kind, _), jobs in image.configs.items() if kind == SCHEDULE_RESOURCE
    )
    if before is None and stored >= SCHEDULES_MAX:
        raise errors.InvalidRequest(
            f"the cluster has {stored} schedules, the most that it stores: delete some, or use the "
            "scheduler of your platform with `pk maintenance run`"
        )
    reply.metadata_offset = image.offset + 1
    return decision(reply, [schedule_record(after)])


def delete_schedule(image: MetadataImage, _rules: Rules, command: DeleteSchedule) -> Out:
    """Delete a schedule; the note of the last run stays."""
    request = command.request
    topic = _topic(image, request.topic)
    if request.job not in image.configs.get((SCHEDULE_RESOURCE, topic.topic_id), {}):
        return decision(wire.DeleteScheduleReply(metadata_offset=image.offset))
    record = wire.ConfigRecord(
        resource_type=SCHEDULE_RESOURCE, resource_name=topic.topic_id, name=request.job
    )
    return decision(
        wire.DeleteScheduleReply(found=True, metadata_offset=image.offset + 1), [record]
    )


def list_schedules(image: MetadataImage, _rules: Rules, command: ListSchedules) -> Out:
    """List the schedules and the last runs, with the controller's time (N1)."""
    topic = command.request.topic
    if topic:
        _topic(image, topic)
    reply = wire.ListSchedulesReply(now_ms=command.now_ms)
    for each in entries_of(image, topic):
        live = (each.schedule.topic_id, run_kind(each.schedule.job)) in command.renewed
        reply.schedules.append(_listing(each, running=each.running if live else ""))
    return decision(reply)


def note_run(image: MetadataImage, _rules: Rules, command: NoteRun) -> Out:
    """Note the outcome of a run.  Raises `LeaseHeld` if a later runner got the lease (N2)."""
    request = command.request
    if request.topic_id not in image.topics:
        raise errors.UnknownTopicId(f"topic id {request.topic_id[:40]} is gone, with its schedules")
    schedules.check_job(request.job)
    if request.outcome not in OUTCOMES:
        raise errors.InvalidRequest(
            f"{request.outcome[:40]!r} is no outcome: {', '.join(OUTCOMES)}"
        )
    lease = lease_of(image, request.topic_id, run_kind(request.job))
    before = run_of(image, request.topic_id, request.job)
    if before is not None and before.token == request.token:
        return decision(wire.NoteRunReply(metadata_offset=image.offset))  # N3
    if lease is None or lease.token != request.token:
        raise lost(lease, request.token)
    failed = request.outcome == FAILED
    run = NotedRun(
        min(request.started_ms, command.now_ms),
        command.now_ms,
        request.outcome,
        request.detail[: schedules.DETAIL_CHARACTERS_MAX],
        request.runner[: schedules.DETAIL_CHARACTERS_MAX],
        (0 if before is None else before.failures) + 1 if failed else 0,
        request.token,
    )
    record = run_record(request.topic_id, request.job, run)
    return decision(wire.NoteRunReply(metadata_offset=image.offset + 1), [record])


def _topic(image: MetadataImage, name: str) -> TopicState:
    topic = image.topic(name)
    if topic is None:
        raise errors.UnknownTopicOrPartition(f"topic {name[:300]!r} does not exist")
    return topic


def _schedule(schedule: Schedule) -> wire.MaintenanceSchedule:
    return wire.MaintenanceSchedule(**schedule._asdict())


def _listing(entry: Entry, *, running: str) -> wire.ScheduleListing:
    last = None if entry.last is None else wire.MaintenanceRun(**entry.last._asdict())
    return wire.ScheduleListing(schedule=_schedule(entry.schedule), last=last, running=running)
