"""The schedules of maintenance jobs and their last runs, as the metadata image has them.

Both are values of a resource of their own: by topic id, one value for each job.  So they need no
level of `pk.format` (rule Q7).  A value of a newer build may have more fields; this build ignores
them here and keeps them in the log and in snapshots.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pk.schedules import Entry, NotedRun, Schedule
from pk.server.metadata.image import RUN_RESOURCE, SCHEDULE_RESOURCE, MetadataImage
from pk.server.metadata.leases import lease_of, run_kind
from pk.types import TopicId
from pk.wire import pk_pb2 as wire


def schedule_of(image: MetadataImage, topic_id: TopicId, job: str) -> Schedule | None:
    """Return the schedule of a topic's job."""
    text = image.configs.get((SCHEDULE_RESOURCE, topic_id), {}).get(job)
    topic = image.topics.get(topic_id)
    if text is None or topic is None:
        return None
    found: dict[str, Any] = json.loads(text)
    return Schedule(
        topic.name,
        topic_id,
        job,
        int(found.get("every_ms", 0)),
        str(found.get("cron", "")),
        int(found.get("since_ms", 0)),
    )


def run_of(image: MetadataImage, topic_id: TopicId, job: str) -> NotedRun | None:
    """Return the last noted run of a topic's job."""
    text = image.configs.get((RUN_RESOURCE, topic_id), {}).get(job)
    if text is None:
        return None
    found: dict[str, Any] = json.loads(text)
    return NotedRun(
        int(found["started_ms"]),
        int(found["ended_ms"]),
        str(found["outcome"]),
        str(found.get("detail", "")),
        str(found.get("runner", "")),
        int(found.get("failures", 0)),
        int(found.get("token", 0)),
    )


def entries_of(image: MetadataImage, topic: str = "") -> Iterator[Entry]:
    """Yield every schedule and every run without a schedule, by topic and job.

    topic: only of this topic.  `running` names the holder of the lease, which may have died.
    """
    names = [topic] if topic else sorted(image.topic_ids)
    for name in names:
        topic_id = image.topic_ids.get(name, "")
        jobs = {
            *image.configs.get((SCHEDULE_RESOURCE, topic_id), {}),
            *image.configs.get((RUN_RESOURCE, topic_id), {}),
        }
        for job in sorted(jobs):
            schedule = schedule_of(image, topic_id, job) or Schedule(name, topic_id, job)
            lease = lease_of(image, topic_id, run_kind(job))
            holder = "" if lease is None else lease.holder
            yield Entry(schedule, run_of(image, topic_id, job), holder)


def schedule_record(schedule: Schedule) -> wire.ConfigRecord:
    """Return the record that sets a schedule."""
    value = {"every_ms": schedule.every_ms, "cron": schedule.cron, "since_ms": schedule.since_ms}
    return wire.ConfigRecord(
        resource_type=SCHEDULE_RESOURCE,
        resource_name=schedule.topic_id,
        name=schedule.job,
        value=json.dumps(value),
    )


def run_record(topic_id: TopicId, job: str, run: NotedRun) -> wire.ConfigRecord:
    """Return the record that notes a run."""
    return wire.ConfigRecord(
        resource_type=RUN_RESOURCE,
        resource_name=topic_id,
        name=job,
        value=json.dumps(run._asdict()),
    )
