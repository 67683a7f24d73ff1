"""Runs the maintenance jobs that are due, one at a time (docs/design/0018-maintenance.md).

A runner asks the controller for schedules, last runs and the time, and `pk.schedules` decides what
is due.  Any number of runners may run; none has a state of its own that matters.

    lease `run:JOB` of the topic ─► still due? ─► the job ─► note its outcome ─► release

Invariants
  N1  A job runs only under the lease `run:JOB`, and only if the schedule is still due once the
      lease is held: another runner may have run it meanwhile.
  N2  A run is noted before its lease is released.  A runner that dies before the note leaves a
      schedule that is due, and the next runner repeats the run.  Every job can be repeated.
  N3  A run whose outcome is not the job's (another job holds the table, the runner stops) is not
      noted.
  N4  After a run that could not be noted, and after a lease that was held, this runner leaves the
      schedule alone for REST_S.  So no controller failure makes it run a job in a loop.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from os import getpid
from typing import TYPE_CHECKING

from pk import errors, schedules
from pk.backoff import Backoff, equal_jitter
from pk.clock import monotonic_s
from pk.schedules import FAILED, DueSchedules, Entry, Schedule
from pk.sparkconnector.maintenance.jobs import JobReport, SparkHolder, run_job

if TYPE_CHECKING:
    from pk.client.admin import AdminClient

#: A changed schedule is noticed after this time.
POLL_S = 5.0
REST_S = 30.0
#: First and longest wait while no controller answers.
AWAY_MS = (500, 15_000)

HELD, SKIPPED, STOPPED = "held", "skipped", "stopped"


@dataclass(slots=True, frozen=True)
class Turn:
    """One attempt of a runner; outcome: of the job, or held, skipped or stopped."""

    topic: str
    job: str
    outcome: str
    detail: str = ""
    report: JobReport | None = None
    error: Exception | None = None


def runner_name() -> str:
    """Return the name under which this process notes its runs."""
    return f"{socket.gethostname()}:{getpid()}"


class Runner:
    """Runs due jobs of a cluster.

    only: a schedule that is not stored; then the stored ones are not run.
    on_turn: receives each attempt.  stop: once it is set, no further job begins.
    """

    def __init__(
        self,
        admin: AdminClient,
        bootstrap: str,
        spark: SparkHolder,
        *,
        only: Schedule | None = None,
        on_turn: Callable[[Turn], None] = lambda turn: None,
        on_away: Callable[[errors.PkError], None] = lambda error: None,
        stop: threading.Event | None = None,
        work: Callable[[SparkHolder, str, str, str], JobReport] = run_job,
    ) -> None:
        self._admin = admin
        self._bootstrap = bootstrap
        self._spark = spark
        self._only = only
        self._on_turn = on_turn
        self._on_away = on_away
        self._stop = threading.Event() if stop is None else stop
        self._work = work
        self._name = runner_name()
        self._rests: dict[tuple[str, str], float] = {}  #: N4: until when, by topic and job

    # -- what is due -------------------------------------------------------------------------------

    def plan(self, topic: str | None = None) -> tuple[DueSchedules, int]:
        """Return what is due, and the controller's time."""
        if self._only is not None:
            topic = self._only.topic
        found = self._admin.list_schedules(topic)
        entries = found.scheduled
        if self._only is not None:
            last = [e.last for e in found.entries if e.schedule.job == self._only.job]
            entries = (Entry(self._only, last[0] if last else None),)
        return schedules.plan(entries, found.now_ms), found.now_ms

    def run_due(self) -> list[Turn]:
        """Run what is due now, each schedule once."""
        turns = []
        for entry in self.plan()[0].due:
            if self._stop.is_set():
                break
            turns.append(self.run(entry))
        return turns

    def serve(self) -> None:
        """Run what becomes due until `stop` is set.

        Raises the errors that no later attempt can mend, for example `UnknownTopicOrPartition` of
        the only schedule.
        """
        away = Backoff(AWAY_MS, equal_jitter(random.Random()))
        while not self._stop.is_set():
            try:
                plan, now_ms = self.plan()
            except errors.PkError as error:
                if not error.retriable or isinstance(error, errors.UnknownTopicOrPartition):
                    raise
                if not away.attempts:
                    self._on_away(error)
                self._stop.wait(away.next_ms() / 1000)
                continue
            away.reset()
            due = [each for each in plan.due if not self._rests_now(each.schedule)]
            if due:
                self.run(due[0])
                continue
            wait_s = POLL_S if plan.next_ms is None else (plan.next_ms - now_ms) / 1000
            self._stop.wait(min(POLL_S, wait_s))

    def _rests_now(self, schedule: Schedule) -> bool:
        until_s = self._rests.get((schedule.topic_id, schedule.job))
        return until_s is not None and monotonic_s() < until_s

    def _rest(self, schedule: Schedule) -> None:
        now_s = monotonic_s()
        self._rests = {key: until for key, until in self._rests.items() if until > now_s}
        self._rests[schedule.topic_id, schedule.job] = now_s + REST_S

    # -- one run -----------------------------------------------------------------------------------

    def run(self, entry: Entry) -> Turn:
        """Run one schedule if it is still due under the lease of its job (N1)."""
        schedule = entry.schedule
        try:
            turn, noted = self._run(schedule)
        except errors.LeaseHeld as error:
            turn, noted = (
                Turn(schedule.topic, schedule.job, HELD, error.message, None, error),
                False,
            )
        except errors.PkError as error:  # of the lease or the list: the controller is away
            turn, noted = _failed(schedule, error), False
        if not noted:
            self._rest(schedule)  # N4
        self._on_turn(turn)
        return turn

    def _run(self, schedule: Schedule) -> tuple[Turn, bool]:
        """Return the attempt, and whether the schedule now tells when the next one is due."""
        from pk.client.maintenance_lease import MaintenanceLease

        with MaintenanceLease(self._bootstrap, schedule.topic, schedule.job, kind="run") as lease:
            due = [
                each
                for each in self.plan(schedule.topic)[0].due
                if each.schedule.job == schedule.job
                and each.schedule.topic_id in ("", lease.topic_id)
            ]
            if not due:
                why = "another runner ran it, or the schedule was changed"
                return Turn(schedule.topic, schedule.job, SKIPPED, why), True
            turn = self._turn(due[0].schedule)
            if turn.outcome not in schedules.OUTCOMES:  # N3
                return turn, False
            try:
                lease.note(turn.outcome, turn.detail, self._name)  # N2
            except errors.PkError as error:
                self._on_away(error)
                return turn, False
            return turn, True

    def _turn(self, schedule: Schedule) -> Turn:
        topic, job = schedule.topic, schedule.job
        try:
            report = self._work(self._spark, self._bootstrap, topic, job)
        except errors.LeaseHeld as error:
            return Turn(topic, job, HELD, error.message, None, error)
        except Exception as error:  # of Spark as well: the next schedule runs all the same
            if self._stop.is_set():
                return Turn(topic, job, STOPPED, "the runner was asked to stop")
            return _failed(schedule, error)
        return Turn(topic, job, report.outcome, report.summary(), report)


def _failed(schedule: Schedule, error: Exception) -> Turn:
    return Turn(schedule.topic, schedule.job, FAILED, failure_text(error), None, error)


def failure_text(error: Exception) -> str:
    """Return the error as one line."""
    text = error.message if isinstance(error, errors.PkError) else str(error)
    line = next((each.strip() for each in text.splitlines() if each.strip()), "")
    return f"{type(error).__name__}: {line}"
