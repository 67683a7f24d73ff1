"""The job `retention` waits until logs and table begin at the same offsets."""

from __future__ import annotations

from pk.sparkconnector.maintenance.owner_jobs import LOOKS, SETTLE_S, RetentionReport, settle

Starts = dict[int, int]


def looked(*seen: tuple[Starts, Starts]) -> tuple[Starts, bool, int]:
    """Settle over these views, the last one for ever; also the number of looks."""
    looks = iter(seen)
    count, now_s = 0, 0.0
    view = seen[0]

    def look() -> tuple[Starts, Starts]:
        nonlocal count, view
        count += 1
        view = next(looks, view)
        return view

    def wait(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    starts, settled = settle(look, wait, lambda: now_s)
    return starts, settled, count


def test_it_waits_until_starts_stay_and_the_table_has_followed() -> None:
    moved = {0: 7, 1: 5}
    found = looked(({0: 0, 1: 5}, {0: 0, 1: 5}), (moved, {0: 0, 1: 5}), (moved, moved))
    assert found == (moved, True, 1 + LOOKS)


def test_a_table_that_does_not_follow_is_left_to_its_owner() -> None:
    starts, settled, count = looked(({0: 7}, {0: 0}))
    assert (starts, settled, count) == ({0: 7}, False, int(SETTLE_S))
    report = RetentionReport("t", {0: 3, 1: 2}, {0: 7, 1: 2}, settled)
    assert report.summary() == "4 offsets left 1 partitions; the table follows"
