"""Schedules and runs of maintenance jobs as metadata (0018)."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors, schedules
from pk.server.controller import commands as c
from pk.server.metadata.image import RUN_RESOURCE, SCHEDULE_RESOURCE, MetadataImage
from pk.server.metadata.leases import run_kind
from pk.server.metadata.schedules import entries_of, run_of, schedule_of
from pk.server.metadata.snapshot import rows_of
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench

HOUR = 3_600_000


def bench_of(*topics: str) -> Bench:
    bench = Bench()
    bench.up(1)
    for name in topics or ("t",):
        bench.topic(name)
    return bench


def set_(bench: Bench, now_ms: int = 1_000, topic: str = "t", **fields: Any) -> Any:
    given = {"job": "audit", "every_ms": HOUR, **fields}
    return bench.do(c.SetSchedule(wire.SetScheduleRequest(topic=topic, **given), now_ms))


def lease(bench: Bench, holder: str, *, live: bool = False, job: str = "audit") -> Any:
    request = wire.AcquireLeaseRequest(topic="t", holder=holder, kind=run_kind(job), ttl_ms=30_000)
    renewed = frozenset({(bench.image.topic_ids["t"], run_kind(job))} if live else ())
    return bench.do(c.AcquireLease(request, renewed, 5_000))


def note(bench: Bench, token: int, outcome: str = "done", now_ms: int = 9_000, **more: Any) -> Any:
    fields = {"job": "audit", "started_ms": 5_000, "runner": "host:1", **more}
    request = wire.NoteRunRequest(
        topic_id=bench.image.topic_ids["t"], token=token, outcome=outcome, **fields
    )
    return bench.do(c.NoteRun(request, now_ms))


def test_of_two_writers_the_later_one_wins_and_sees_what_it_replaced() -> None:
    bench = bench_of()
    assert not set_(bench).HasField("before")
    reply = set_(bench, 2_000, every_ms=0, cron=" 30  2 * * * ")
    assert (reply.before.every_ms, reply.before.since_ms) == (HOUR, 1_000)
    found = schedule_of(bench.image, bench.image.topic_ids["t"], "audit")
    assert found is not None
    assert (found.every_ms, found.cron, found.since_ms) == (0, "30 2 * * *", 2_000)


def test_an_equal_schedule_keeps_its_date_and_writes_nothing() -> None:
    """controller/schedules N3: the answer to the first request may have been lost."""
    bench = bench_of()
    set_(bench)
    before = len(bench.log)
    assert set_(bench, 7_000).before.since_ms == 1_000
    assert len(bench.log) == before


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"job": "polish"}, errors.InvalidRequest),
        ({"every_ms": 9_000}, errors.InvalidRequest),
        ({"every_ms": 0, "cron": "0 25 * * *"}, errors.InvalidRequest),
        ({"topic": "none"}, errors.UnknownTopicOrPartition),
    ],
)
def test_bad_schedules(fields: dict[str, Any], why: type[errors.PkError]) -> None:
    bench = bench_of()
    before = len(bench.log)
    with pytest.raises(why):
        set_(bench, **fields)
    assert len(bench.log) == before


def test_the_number_of_schedules_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of("t", "u")
    monkeypatch.setattr("pk.server.controller.schedules.SCHEDULES_MAX", 2)
    set_(bench)
    set_(bench, job="optimize")
    with pytest.raises(errors.InvalidRequest, match="delete some"):
        set_(bench, topic="u")
    set_(bench, every_ms=2 * HOUR)  # replaces one


def test_a_deleted_schedule_is_gone_and_its_last_run_stays() -> None:
    bench = bench_of()
    set_(bench)
    note(bench, lease(bench, "a").token)
    request = wire.DeleteScheduleRequest(topic="t", job="audit")
    assert bench.do(c.DeleteSchedule(request)).found
    assert not bench.do(c.DeleteSchedule(request)).found
    (entry,) = entries_of(bench.image)
    assert (entry.schedule.is_set, entry.last is not None) == (False, True)


def test_a_list_has_the_controllers_time_and_a_runner_that_lives() -> None:
    bench = bench_of("t", "u")
    set_(bench)
    set_(bench, topic="u", job="optimize")
    lease(bench, "a")
    topic_id = bench.image.topic_ids["t"]
    live = frozenset({(topic_id, "run:audit")})
    reply = bench.do(c.ListSchedules(wire.ListSchedulesRequest(), live, 77))
    assert reply.now_ms == 77
    found = [(each.schedule.topic, each.running) for each in reply.schedules]
    assert found == [("t", "a"), ("u", "")]
    dead = bench.do(c.ListSchedules(wire.ListSchedulesRequest(topic="t"), frozenset(), 78))
    assert [each.running for each in dead.schedules] == [""]
    with pytest.raises(errors.UnknownTopicOrPartition):
        bench.do(c.ListSchedules(wire.ListSchedulesRequest(topic="none"), frozenset(), 78))


def test_one_runner_at_a_time_runs_a_job() -> None:
    bench = bench_of()
    granted = lease(bench, "a")
    assert granted.now_ms == 5_000
    with pytest.raises(errors.LeaseHeld, match="run:audit"):
        lease(bench, "b", live=True)
    lease(bench, "b", live=True, job="optimize")  # another job: another lease


def test_a_run_is_noted_once_with_the_controllers_time() -> None:
    bench = bench_of()
    token = lease(bench, "a").token
    note(bench, token, "failed", detail="x" * 1_000)
    before = len(bench.log)
    note(bench, token, "failed")  # the answer was lost
    assert len(bench.log) == before
    run = run_of(bench.image, bench.image.topic_ids["t"], "audit")
    assert run is not None
    assert (run.started_ms, run.ended_ms, run.failures, run.runner) == (5_000, 9_000, 1, "host:1")
    assert len(run.detail) == schedules.DETAIL_CHARACTERS_MAX


def test_failures_are_counted_until_a_run_succeeds() -> None:
    bench = bench_of()
    topic_id = bench.image.topic_ids["t"]
    counts = []
    for n, outcome in enumerate(["failed", "failed", "damaged", "failed", "done"]):
        note(bench, lease(bench, f"runner {n}").token, outcome)
        run = run_of(bench.image, topic_id, "audit")
        counts.append(None if run is None else run.failures)
    assert counts == [1, 2, 0, 1, 0]


def test_a_runner_that_slept_does_not_replace_a_later_note() -> None:
    """controller/schedules N2: a note needs the newest lease."""
    bench = bench_of()
    slept = lease(bench, "a").token
    later = lease(bench, "b").token
    note(bench, later, "done")
    with pytest.raises(errors.LeaseHeld):
        note(bench, slept, "failed")
    run = run_of(bench.image, bench.image.topic_ids["t"], "audit")
    assert run is not None
    assert (run.outcome, run.token) == ("done", later)


def test_a_run_does_not_end_after_now() -> None:
    """A runner repeats the controller's time, and the controller's clock was set back."""
    bench = bench_of()
    note(bench, lease(bench, "a").token, started_ms=10**15, now_ms=9_000)
    run = run_of(bench.image, bench.image.topic_ids["t"], "audit")
    assert run is not None
    assert (run.started_ms, run.ended_ms) == (9_000, 9_000)


def test_bad_notes() -> None:
    bench = bench_of()
    token = lease(bench, "a").token
    with pytest.raises(errors.InvalidRequest):
        note(bench, token, "perfect")
    with pytest.raises(errors.InvalidRequest):
        note(bench, token, job="polish")
    request = wire.NoteRunRequest(topic_id="gone", job="audit", token=token, outcome="done")
    with pytest.raises(errors.UnknownTopicId):
        bench.do(c.NoteRun(request, 9_000))


def test_a_snapshot_has_schedules_and_runs_and_a_deleted_topic_has_none() -> None:
    bench = bench_of()
    set_(bench)
    note(bench, lease(bench, "a").token)
    again = MetadataImage()
    for offset, record in rows_of(bench.image):
        again.apply(offset, record)
    assert list(entries_of(again)) == list(entries_of(bench.image)) != []
    assert again.unknown_settings() == []
    bench.do(c.DeleteTopics(wire.DeleteTopicsRequest(names=["t"])))
    kinds = {kind for kind, _ in bench.image.configs}
    assert not kinds & {SCHEDULE_RESOURCE, RUN_RESOURCE}


def test_a_schedule_of_a_newer_build_is_listed() -> None:
    """Its fields and its job are not known here."""
    bench = bench_of()
    topic_id = bench.image.topic_ids["t"]
    bench.image.configs[(SCHEDULE_RESOURCE, topic_id)] = {"polish": '{"every_ms": 5, "new": 1}'}
    (entry,) = entries_of(bench.image)
    assert (entry.schedule.job, entry.schedule.every_ms) == ("polish", 5)
