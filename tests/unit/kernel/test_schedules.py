"""Which maintenance jobs are due: examples, and properties for any schedule, run and clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors, schedules
from pk.schedules import (
    CLOCK_STEP_MS,
    DAMAGED,
    DONE,
    EVERY_MIN_MS,
    FAILED,
    Entry,
    NotedRun,
    Schedule,
)

DAY_MS = 86_400_000
NOON = 1_767_268_800_000  #: 2026-01-01 12:00 UTC
CRONS = ["* * * * *", "*/7 3 * * *", "0 0 1 * *", "30 2 29 2 *", "0 12 * * 1-5"]

times = st.integers(NOON - 400 * DAY_MS, NOON + 400 * DAY_MS)
outcomes = st.sampled_from([DONE, FAILED, DAMAGED])


@st.composite
def plans(draw: st.DrawFn) -> Schedule:
    since_ms = draw(times)
    if draw(st.booleans()):
        return Schedule(
            "t", "id", "audit", draw(st.integers(EVERY_MIN_MS, 9 * DAY_MS)), "", since_ms
        )
    return Schedule("t", "id", "audit", 0, draw(st.sampled_from(CRONS)), since_ms)


@st.composite
def runs(draw: st.DrawFn) -> NotedRun:
    started_ms = draw(times)
    ended_ms = started_ms + draw(st.integers(-DAY_MS, DAY_MS))
    return NotedRun(started_ms, ended_ms, draw(outcomes), failures=draw(st.integers(0, 100)))


def every(duration: str, since_ms: int = NOON) -> Schedule:
    return Schedule("t", "id", "audit", schedules.duration_ms(duration), "", since_ms)


def at(hour: int, minute: int = 0, day: int = 1) -> int:
    return NOON + (day - 1) * DAY_MS + (hour - 12) * 3_600_000 + minute * 60_000


# -- examples --------------------------------------------------------------------------------------


def test_an_interval_is_due_at_once_and_then_counts_from_the_start_of_the_run() -> None:
    schedule = every("1h")
    assert schedules.due_ms(schedule, None, NOON + 5) == NOON
    last = NotedRun(at(13), at(13, 40), DONE)
    assert schedules.due_ms(schedule, last, at(13, 50)) == at(14)


def test_a_cron_line_is_due_at_its_first_time_after_it_was_set_or_after_the_run() -> None:
    schedule = Schedule("t", "id", "audit", 0, "30 2 * * *", at(12))
    assert schedules.due_ms(schedule, None, at(13)) == at(2, 30, day=2)
    late = NotedRun(at(9, day=5), at(10, day=5), DONE)  # missed times are one run
    assert schedules.due_ms(schedule, late, at(11, day=5)) == at(2, 30, day=6)


def test_a_schedule_that_was_set_later_counts_from_then() -> None:
    schedule = Schedule("t", "id", "audit", 0, "30 2 * * *", at(12, day=3))
    assert schedules.due_ms(schedule, NotedRun(at(1), at(1), DONE), at(13, day=3)) == at(
        2, 30, day=4
    )


def test_a_failed_run_is_tried_again_soon_and_then_less_often() -> None:
    schedule = every("1d")
    waits = [
        schedules.due_ms(schedule, NotedRun(at(13), at(13, 5), FAILED, failures=n), at(13, 6))
        - at(13, 5)
        for n in (1, 2, 3, 50)
    ]
    assert waits == [60_000, 120_000, 240_000, 3_600_000]
    soon = every("10s")
    assert (
        schedules.due_ms(soon, NotedRun(NOON, NOON + 1, FAILED, failures=9), NOON) == NOON + 10_000
    )


def test_damage_that_an_audit_found_is_no_failure() -> None:
    assert schedules.due_ms(every("1d"), NotedRun(at(13), at(14), DAMAGED), at(15)) == at(13, day=2)


def test_the_longest_overdue_comes_first() -> None:
    old = Entry(every("1h")._replace(topic="b"), NotedRun(at(1), at(2), DONE))
    new = Entry(every("1h")._replace(topic="a"), NotedRun(at(2), at(2), DONE))
    later = Entry(every("1h")._replace(topic="c"), NotedRun(at(3), at(3), DONE))
    plan = schedules.plan([new, later, old], at(3, 30))
    assert ([each.schedule.topic for each in plan.due], plan.next_ms) == (["b", "a"], at(4))
    assert schedules.plan([], NOON) == ((), None)


@pytest.mark.parametrize(
    ("job", "every_ms", "cron"),
    [
        ("polish", 60_000, ""),
        ("audit", 0, ""),
        ("audit", 60_000, "* * * * *"),
        ("audit", 9_999, ""),
        ("audit", -1, ""),
        ("audit", 367 * DAY_MS, ""),
        ("audit", 0, "* * * *"),
        ("audit", 0, "* * * * * *"),
        ("audit", 0, "61 * * * *"),
        ("audit", 0, "0 0 30 2 *"),
        ("audit", 0, "0 0 * * mon-"),
        ("audit", 0, "@daily"),
        ("audit", 0, "* " * 500),
        ("audit", 0, "ä * * * *"),
    ],
)
def test_bad_schedules(job: str, every_ms: int, cron: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        schedules.check(job, every_ms, cron, NOON)


@pytest.mark.parametrize("text", ["", "1", "h", "1.5h", "-1h", "1w", "1 h", "9" * 10 + "s", "١h"])
def test_bad_intervals(text: str) -> None:
    with pytest.raises(errors.InvalidRequest):
        schedules.duration_ms(text)


@given(st.integers(1, 10**9 - 1), st.sampled_from("smhd"))
def test_an_interval_is_shown_as_it_is_read(number: int, unit: str) -> None:
    found = schedules.duration_ms(f"{number}{unit}")
    assert schedules.duration_ms(schedules.duration_text(found)) == found


# -- properties ------------------------------------------------------------------------------------


@given(plans(), times)
def test_what_has_just_run_is_not_due(schedule: Schedule, now_ms: int) -> None:
    """No runner runs a job in a loop, whatever its outcome."""
    schedules.check(schedule.job, schedule.every_ms, schedule.cron, now_ms)
    done = NotedRun(now_ms, now_ms, DONE)
    next_ms = schedules.due_ms(schedule, done, now_ms)
    assert next_ms > now_ms
    assert schedule.cron or next_ms >= now_ms + EVERY_MIN_MS
    failed = NotedRun(now_ms, now_ms, FAILED, failures=1)
    assert schedules.due_ms(schedule, failed, now_ms) >= min(next_ms, now_ms + EVERY_MIN_MS)


def becomes_ordinary(dated_ms: int, now_ms: int, later_ms: int) -> bool:
    """Whether a time counts as wrong at `now_ms` and no longer at `later_ms`."""
    return now_ms < dated_ms - CLOCK_STEP_MS <= later_ms


@given(plans(), st.none() | runs(), times, st.integers(0, 400 * DAY_MS))
def test_what_is_due_stays_due(
    schedule: Schedule, last: NotedRun | None, now_ms: int, wait_ms: int
) -> None:
    """For a clock that moves forward.  The time at which it is due comes, too."""
    at_ms = max(now_ms, schedules.due_ms(schedule, last, now_ms))
    later_ms = at_ms + wait_ms
    dates = [schedule.since_ms, *([] if last is None else [last.started_ms])]
    if not any(becomes_ordinary(each, now_ms, later_ms) for each in dates):
        assert schedules.due_ms(schedule, last, at_ms) <= at_ms
        assert schedules.due_ms(schedule, last, later_ms) <= later_ms


def test_a_cron_line_that_was_set_under_a_wrong_clock_runs() -> None:
    """Its date is a year ahead; the first run gives it an ordinary date to count from."""
    schedule = Schedule("t", "id", "audit", 0, "30 2 * * *", NOON + 365 * DAY_MS)
    assert schedules.due_ms(schedule, None, NOON) == NOON
    assert schedules.due_ms(schedule, NotedRun(NOON, NOON, DONE), NOON + 1) == at(2, 30, day=2)


@given(plans(), runs(), times)
def test_no_wrong_clock_puts_a_run_off(schedule: Schedule, last: NotedRun, now_ms: int) -> None:
    """The next run is at most one period after now."""
    latest_ms = now_ms + CLOCK_STEP_MS
    period_ms = schedule.every_ms
    if schedule.cron:
        period_ms = schedules.next_cron_ms(schedule.cron, latest_ms) - latest_ms
    assert schedules.due_ms(schedule, last, now_ms) <= latest_ms + period_ms


@given(plans(), runs(), times)
def test_a_failure_never_delays_the_regular_run(
    schedule: Schedule, last: NotedRun, now_ms: int
) -> None:
    """It may only come sooner."""
    failed, done = last._replace(outcome=FAILED), last._replace(outcome=DONE)
    regular_ms = schedules.due_ms(schedule, done, now_ms)
    assert schedules.due_ms(schedule, failed, now_ms) <= regular_ms


@given(st.lists(st.tuples(plans(), st.none() | runs())), times)
def test_a_plan_names_every_schedule_once(
    given_: list[tuple[Schedule, NotedRun | None]], now_ms: int
) -> None:
    entries = [
        Entry(schedule._replace(topic=str(n)), last) for n, (schedule, last) in enumerate(given_)
    ]
    plan = schedules.plan(entries, now_ms)
    due = {each.schedule.topic for each in plan.due}
    when = {e.schedule.topic: schedules.due_ms(e.schedule, e.last, now_ms) for e in entries}
    assert due == {topic for topic, ms in when.items() if ms <= now_ms}
    assert len(plan.due) == len(due)
    assert plan.next_ms == min((ms for ms in when.values() if ms > now_ms), default=None)
