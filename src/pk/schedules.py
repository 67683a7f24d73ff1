"""Schedules of maintenance jobs, and which of them are due.  Pure.

The controller stores a schedule for each topic and job, and the last run of each.  A runner asks
for both and for the controller's wall clock, and decides here.  It uses no clock of its own.

A schedule is an interval or a cron line (five fields, UTC).  An interval counts from the start of
the last run; a job that has never run is due at once.  A cron line is due at its first time after
the last run, or after the schedule was set.  Missed times of a cron line are one run.

Invariants
  N1  A schedule that has just run is not due.  An interval has `EVERY_MIN_MS` before the next run.
  N2  A schedule that is due stays due until it has run.
  N3  After a failure the next attempt waits for `RETRY_MS`, doubled with each failure in a row, but
      no longer than until the regular time.
  N4  A run or a schedule that is dated more than CLOCK_STEP_MS into the future was dated by a wrong
      clock.  It does not put a run off: at worst a job runs once too often.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from typing import NamedTuple

from cronsim import CronSim, CronSimError

from pk import errors
from pk.backoff import exponential_ms

#: The jobs of this build, and what they do.
JOBS = {
    "optimize": "merge small files",
    "compaction": "remove superseded records from the table of a compacted topic",
    "audit": "compare the table with its counters and the local log",
    "sweep": "remove uploads that no version names",
    "retention": "apply retention now",
    "vacuum": "delete files that the table dropped long enough ago, now",
    "snapshot": "bring the latest value of each key to a Delta table",
}
EVERY_MIN_MS, EVERY_MAX_MS = 10_000, 366 * 86_400_000
CRON_FIELDS = 5
CRON_CHARACTERS_MAX = 100
#: First and longest wait after a failed run.
RETRY_MS = (60_000, 3_600_000)
#: A time that is this far ahead of the controller's clock shows that a clock was wrong.
CLOCK_STEP_MS = 60_000
#: Most schedules of a cluster: a reply that lists all of them fits into one control message.
SCHEDULES_MAX = 5_000
DETAIL_CHARACTERS_MAX = 300

DONE, FAILED, DAMAGED = OUTCOMES = ("done", "failed", "damaged")

_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"([0-9]{1,9})([smhd])")


class Schedule(NamedTuple):
    """When a job of a topic is to run; `every_ms` or `cron` is set."""

    topic: str
    topic_id: str
    job: str
    every_ms: int = 0
    cron: str = ""
    since_ms: int = 0  #: when it was set, by the controller's clock

    @property
    def is_set(self) -> bool:
        """Whether there is a schedule; False = only a run is known."""
        return bool(self.every_ms or self.cron)

    def text(self) -> str:
        """Return the schedule for people."""
        if not self.is_set:
            return ""
        return f"cron {self.cron}" if self.cron else f"every {duration_text(self.every_ms)}"


class NotedRun(NamedTuple):
    """The last run of a job; times are the controller's."""

    started_ms: int
    ended_ms: int
    outcome: str
    detail: str = ""
    runner: str = ""
    failures: int = 0  #: in a row, this run included
    token: int = 0  #: of the lease under which it ran


class Entry(NamedTuple):
    """A schedule and its last run; `running`: who runs the job now."""

    schedule: Schedule
    last: NotedRun | None = None
    running: str = ""


class DueSchedules(NamedTuple):
    """What is due, the longest overdue first, and when the next other schedule is."""

    due: tuple[Entry, ...]
    next_ms: int | None  #: None = there is no other schedule


# -- what is due -----------------------------------------------------------------------------------


def plan(entries: Iterable[Entry], now_ms: int) -> DueSchedules:
    """Return which schedules are due at `now_ms` of the controller's clock."""
    at = [(due_ms(each.schedule, each.last, now_ms), each) for each in entries]
    due = [(ms, each.schedule.topic, each.schedule.job, each) for ms, each in at if ms <= now_ms]
    due.sort(key=lambda item: item[:3])
    later = [ms for ms, _ in at if ms > now_ms]
    return DueSchedules(tuple(each for *_, each in due), min(later, default=None))


def due_ms(schedule: Schedule, last: NotedRun | None, now_ms: int) -> int:
    """Return when the schedule is due next; a time in the past = since then."""
    latest_ms = now_ms + CLOCK_STEP_MS
    since_ms = schedule.since_ms if schedule.since_ms <= latest_ms else None  # N4
    if last is None or last.started_ms > latest_ms:  # N4
        if schedule.every_ms or since_ms is None:
            return now_ms if since_ms is None else min(since_ms, now_ms)
        return next_cron_ms(schedule.cron, since_ms)
    if schedule.every_ms:
        regular_ms = last.started_ms + schedule.every_ms
    else:
        regular_ms = next_cron_ms(schedule.cron, max(since_ms or 0, last.started_ms))
    if last.outcome != FAILED:
        return regular_ms
    retry_ms = exponential_ms(*RETRY_MS, max(1, last.failures))
    return min(regular_ms, max(last.started_ms, last.ended_ms) + retry_ms)  # N3


def next_cron_ms(cron: str, after_ms: int) -> int:
    """Return the first time of a cron line that is after `after_ms`.  Raises `InvalidRequest`."""
    try:
        begin = datetime.datetime.fromtimestamp(after_ms / 1000, datetime.UTC)
        return round(next(CronSim(cron, begin)).timestamp() * 1000)
    except CronSimError as cause:
        raise errors.InvalidRequest(f"{cron!r} is no cron line: {cause}") from None
    except (StopIteration, ValueError, OverflowError):
        raise errors.InvalidRequest(f"the cron line {cron!r} never comes") from None


# -- input -----------------------------------------------------------------------------------------


def check(job: str, every_ms: int, cron: str, now_ms: int) -> None:
    """Raise `InvalidRequest` for an unknown job, a broken cron line or a bad interval."""
    check_job(job)
    if bool(every_ms) == bool(cron):
        raise errors.InvalidRequest("a schedule has an interval or a cron line: give one of them")
    if cron:
        if len(cron) > CRON_CHARACTERS_MAX or len(cron.split()) != CRON_FIELDS:
            raise errors.InvalidRequest(
                f"{cron[:CRON_CHARACTERS_MAX]!r} is no cron line: it has {CRON_FIELDS} fields "
                "(minute, hour, day, month, weekday), in UTC"
            )
        next_cron_ms(cron, now_ms)
    elif not EVERY_MIN_MS <= every_ms <= EVERY_MAX_MS:
        raise errors.InvalidRequest(
            f"a schedule runs every {duration_text(EVERY_MIN_MS)} to "
            f"{duration_text(EVERY_MAX_MS)}, not every {duration_text(every_ms)}"
        )


def check_job(job: str) -> None:
    """Raise `InvalidRequest` unless this build has the job."""
    if job not in JOBS:
        raise errors.InvalidRequest(f"there is no job {job[:40]!r}: there are {', '.join(JOBS)}")


def duration_ms(text: str) -> int:
    """Return `90s`, `15m`, `1h` or `7d` as milliseconds.  Raises `InvalidRequest`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise errors.InvalidRequest(f"{text[:40]!r} is no interval: write 90s, 15m, 1h or 7d")
    return int(found[1]) * _UNITS_MS[found[2]]


def duration_text(duration: int) -> str:
    """Return milliseconds in the largest unit that divides them."""
    for unit in ("d", "h", "m", "s"):
        if duration and duration % _UNITS_MS[unit] == 0:
            return f"{duration // _UNITS_MS[unit]}{unit}"
    return f"{duration} ms"
