"""Runners over the real decisions of the controller: who runs what, and what a death leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pk import errors
from pk.client import maintenance_lease
from pk.client.admin.schedules import ScheduleListings
from pk.schedules import DONE, FAILED, NotedRun, Schedule
from pk.server.controller import commands as c
from pk.server.metadata.leases import lease_of, run_kind
from pk.server.metadata.schedules import entries_of, run_of
from pk.sparkconnector.maintenance import runner as runners
from pk.sparkconnector.maintenance.jobs import SparkHolder
from pk.sparkconnector.maintenance.runner import HELD, SKIPPED, STOPPED, Runner, Turn
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench

HOUR = 3_600_000


class JobReport:
    def __init__(self, outcome: str = DONE) -> None:
        self.outcome = outcome

    def summary(self) -> str:
        return "2 files became 1"


class Cluster:
    """A controller with schedules; as an `AdminClient` and as the maker of leases."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.bench.up(1)
        self.now_ms = 1_000_000
        self.live: set[tuple[str, str]] = set()
        self.away = False
        self.notes_fail = False

    def schedule(self, topic: str, job: str = "audit", every_ms: int = HOUR) -> None:
        if self.bench.image.topic(topic) is None:
            self.bench.topic(topic)
        request = wire.SetScheduleRequest(topic=topic, job=job, every_ms=every_ms)
        self.bench.do(c.SetSchedule(request, self.now_ms))

    def last(self, topic: str, job: str = "audit") -> NotedRun | None:
        return run_of(self.bench.image, self.bench.image.topic_ids[topic], job)

    def list_schedules(self, topic: str | None = None) -> ScheduleListings:
        if self.away:
            raise errors.BrokerUnavailable("no broker answers")
        if topic is not None and self.bench.image.topic(topic) is None:
            raise errors.UnknownTopicOrPartition(f"topic {topic} does not exist")
        return ScheduleListings(self.now_ms, tuple(entries_of(self.bench.image, topic or "")))


class Lease:
    """A `MaintenanceLease` whose connection is the controller itself."""

    cluster: Cluster

    def __init__(self, _bootstrap: str, topic: str, job: str, *, kind: str) -> None:
        assert kind == "run"
        bench = self.cluster.bench
        self._key = (bench.image.topic_ids.get(topic, ""), run_kind(job))
        request = wire.AcquireLeaseRequest(
            topic=topic, holder=f"{job}-{len(bench.log)}", kind=self._key[1], ttl_ms=30_000
        )
        live = frozenset(self.cluster.live)
        granted = bench.do(c.AcquireLease(request, live, self.cluster.now_ms))
        self.topic_id, self.token, self.job = granted.topic_id, granted.token, job
        self.granted_ms = granted.now_ms
        self.cluster.live.add(self._key)

    def note(self, outcome: str, detail: str, runner: str) -> None:
        if self.cluster.notes_fail:
            raise errors.BrokerUnavailable("no broker answers")
        request = wire.NoteRunRequest(
            topic_id=self.topic_id, job=self.job, token=self.token, outcome=outcome,
            detail=detail, runner=runner, started_ms=self.granted_ms,
        )  # fmt: skip
        self.cluster.bench.do(c.NoteRun(request, self.cluster.now_ms))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not Killed:
            request = wire.ReleaseLeaseRequest(topic_id=self.topic_id, token=self.token)
            self.cluster.bench.do(c.ReleaseLease(request))
            self.cluster.live.discard(self._key)


class Killed(BaseException):
    """The process dies here: nothing is noted or released."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    found = Cluster()
    monkeypatch.setattr(Lease, "cluster", found, raising=False)
    monkeypatch.setattr(maintenance_lease, "MaintenanceLease", Lease)
    return found


Work = Callable[[str, str], Any]


def runner_of(cluster: Cluster, work: Work, **more: Any) -> tuple[Runner, list[Turn]]:
    turns: list[Turn] = []
    given: Any = cluster
    found = Runner(
        given,
        "nowhere:1",
        SparkHolder("local[1]"),
        on_turn=turns.append,
        work=lambda spark, bootstrap, topic, job: work(topic, job),
        **more,
    )
    return found, turns


def outcomes(turns: list[Turn]) -> list[tuple[str, str]]:
    return [(each.topic, each.outcome) for each in turns]


def test_what_is_due_runs_once_and_is_noted(cluster: Cluster) -> None:
    cluster.schedule("t")
    cluster.schedule("u", "optimize")
    ran: list[tuple[str, str]] = []
    runner, turns = runner_of(cluster, lambda topic, job: ran.append((topic, job)) or JobReport())
    runner.run_due()
    runner.run_due()
    assert ran == [("t", "audit"), ("u", "optimize")]
    assert outcomes(turns) == [("t", DONE), ("u", DONE)]
    last = cluster.last("t")
    assert last is not None
    assert (last.outcome, last.detail, last.runner) == (
        DONE,
        "2 files became 1",
        runners.runner_name(),
    )
    cluster.now_ms += HOUR
    runner.run_due()
    assert len(ran) == 4


def test_a_second_runner_finds_the_lease_held_and_does_not_repeat_the_run(cluster: Cluster) -> None:
    """maintenance/runner N1.  The second one made its plan while the first one ran."""
    cluster.schedule("t")
    second, seen = runner_of(cluster, lambda topic, job: pytest.fail("it ran twice"))
    planned = second.plan()[0].due

    def work(topic: str, job: str) -> JobReport:
        second.run(planned[0])
        return JobReport()

    first, _ = runner_of(cluster, work)
    first.run_due()
    second.run(planned[0])
    assert outcomes(seen) == [("t", HELD), ("t", SKIPPED)]


def test_a_runner_that_died_before_its_note_is_repeated_after_the_ttl(cluster: Cluster) -> None:
    """maintenance/runner N2: the schedule is still due."""
    cluster.schedule("t")

    def dies(topic: str, job: str) -> JobReport:
        raise Killed

    first, _ = runner_of(cluster, dies)
    with pytest.raises(Killed):
        first.run_due()
    second, turns = runner_of(cluster, lambda topic, job: JobReport())
    second.run_due()
    cluster.live.clear()  # 30 s later
    second.run_due()
    assert outcomes(turns) == [("t", HELD), ("t", DONE)]


def test_a_runner_that_slept_through_its_lease_does_not_replace_the_later_note(
    cluster: Cluster,
) -> None:
    cluster.schedule("t")
    second, _ = runner_of(cluster, lambda topic, job: JobReport())

    def sleeps(topic: str, job: str) -> JobReport:
        cluster.live.clear()
        second.run_due()
        raise ValueError("Spark lost its executors\nand more")

    first, turns = runner_of(cluster, sleeps)
    first.run_due()
    assert outcomes(turns) == [("t", FAILED)]
    last = cluster.last("t")
    assert last is not None
    assert last.outcome == DONE


def test_a_schedule_that_is_deleted_after_the_plan_does_not_run(cluster: Cluster) -> None:
    cluster.schedule("t")
    runner, turns = runner_of(cluster, lambda topic, job: pytest.fail("it ran"))
    (entry,) = runner.plan()[0].due
    cluster.bench.do(c.DeleteSchedule(wire.DeleteScheduleRequest(topic="t", job="audit")))
    runner.run(entry)
    assert outcomes(turns) == [("t", SKIPPED)]


def test_a_failure_is_noted_and_the_next_schedule_runs_all_the_same(cluster: Cluster) -> None:
    cluster.schedule("a")
    cluster.schedule("b")

    def work(topic: str, job: str) -> JobReport:
        if topic == "a":
            raise errors.JavaMissing("there is no Java")
        return JobReport("damaged")

    runner, turns = runner_of(cluster, work)
    runner.run_due()
    assert outcomes(turns) == [("a", FAILED), ("b", "damaged")]
    last = cluster.last("a")
    assert last is not None
    assert (last.detail, last.failures) == ("JavaMissing: there is no Java", 1)
    cluster.now_ms += 59_000
    assert runner.plan()[0].due == ()
    cluster.now_ms += 1_000
    assert [each.schedule.topic for each in runner.plan()[0].due] == ["a"]


def test_a_table_that_another_job_holds_is_not_noted_as_a_failure(cluster: Cluster) -> None:
    """maintenance/runner N3: the runner tries again soon."""
    cluster.schedule("t", "optimize")

    def work(topic: str, job: str) -> JobReport:
        raise errors.LeaseHeld("another job holds the lease")

    runner, turns = runner_of(cluster, work)
    runner.run_due()
    assert outcomes(turns) == [("t", HELD)]
    assert cluster.last("t", "optimize") is None


def test_a_stop_in_the_middle_notes_nothing_and_releases_the_lease(cluster: Cluster) -> None:
    cluster.schedule("a")
    cluster.schedule("b")
    stop = threading.Event()

    def work(topic: str, job: str) -> JobReport:
        stop.set()
        raise RuntimeError("cancelled")  # as Spark's job does

    runner, turns = runner_of(cluster, work, stop=stop)
    runner.run_due()
    assert outcomes(turns) == [("a", STOPPED)]
    assert cluster.last("a") is None
    assert lease_of(cluster.bench.image, cluster.bench.image.topic_ids["a"], "run:audit") is None


def test_a_run_that_could_not_be_noted_is_not_repeated_at_once(cluster: Cluster) -> None:
    """maintenance/runner N4: it rests."""
    cluster.schedule("t")
    cluster.notes_fail = True
    stop = threading.Event()
    ran: list[str] = []

    def work(topic: str, job: str) -> JobReport:
        ran.append(topic)
        return JobReport()

    runner, _ = runner_of(cluster, work, stop=stop)
    waits = waiting(runner, stop, 3)
    runner.serve()
    assert ran == ["t"]
    assert waits == [runners.POLL_S] * 3


def test_a_loop_waits_until_the_next_schedule_by_the_controllers_clock(cluster: Cluster) -> None:
    cluster.schedule("t", every_ms=10_000)
    stop = threading.Event()
    runner, turns = runner_of(cluster, lambda topic, job: JobReport(), stop=stop)
    waits = waiting(
        runner, stop, 3, lambda seconds: setattr(cluster, "now_ms", cluster.now_ms + 4_000)
    )
    runner.serve()
    assert (len(turns), waits) == (1, [5.0, 5.0, 2.0])


def test_a_loop_waits_for_a_controller_that_is_away(cluster: Cluster) -> None:
    cluster.schedule("t")
    cluster.away = True
    stop = threading.Event()
    told: list[errors.PkError] = []
    runner, turns = runner_of(
        cluster, lambda topic, job: JobReport(), stop=stop, on_away=told.append
    )

    def back(_seconds: float) -> None:
        cluster.away = len(waits) < 3

    waits = waiting(runner, stop, 4, back)
    runner.serve()
    assert (len(turns), len(told)) == (1, 1)
    assert all(0 < each <= 15 for each in waits)


def test_one_job_again_and_again_needs_no_schedule(cluster: Cluster) -> None:
    cluster.bench.topic("t")
    cluster.schedule("other")
    only = Schedule("t", "", "optimize", HOUR)
    runner, turns = runner_of(cluster, lambda topic, job: JobReport(), only=only)
    runner.run_due()
    runner.run_due()
    assert outcomes(turns) == [("t", DONE)]
    cluster.now_ms += HOUR
    other, _ = runner_of(cluster, lambda topic, job: JobReport(), only=only)
    other.run_due()  # another process ran it: not repeated
    runner.run_due()
    assert len(turns) == 1
    lost, _ = runner_of(cluster, lambda t, j: JobReport(), only=only._replace(topic="none"))
    with pytest.raises(errors.UnknownTopicOrPartition):
        lost.serve()


def waiting(
    runner: Runner, stop: threading.Event, times: int, then: Callable[[float], None] | None = None
) -> list[float]:
    """Replace the waits of a loop by a list; the loop ends after `times`."""
    waits: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            if then is not None:
                then(timeout)
            if len(waits) >= times:
                self.set()
            return self.is_set()

    runner._stop = Stop()
    return waits
