"""Which offsets of a compacted log are cleanable, and when the log is due (compaction/plan)."""

from __future__ import annotations

from typing import Any

import pytest

from pk.compaction.plan import CleanablePart, CompactionLimits, CompactionPlan, plan
from pk.log.index import NO_TIMESTAMP

NOW = 1_000_000
#: Offsets, bytes, and the first and newest timestamp of four sealed segments with a gap.
PARTS = [
    CleanablePart(0, 100, 1000, NOW - 900, NOW - 800),
    CleanablePart(100, 200, 1000, NOW - 700, NOW - 600),
    CleanablePart(250, 300, 500, NOW - 500, NOW - 400),
    CleanablePart(300, 400, 1500, NOW - 300, NOW - 200),
]
ACTIVE = CleanablePart(400, 450, 100, NOW - 100, NOW)


def planned(
    ratio: float = 0.5, min_lag: int = 0, max_lag: int = 2**63 - 1, **changed: Any
) -> CompactionPlan:
    given: dict[str, Any] = {
        "active": ACTIVE,
        "log_start": 0,
        "cleaned_end": 200,
        "last_stable_offset": 450,
        "hold": None,
        "now_ms": NOW,
    }
    parts = changed.pop("parts", PARTS)
    return plan(parts, CompactionLimits(ratio, min_lag, max_lag), **{**given, **changed})


def test_the_range_ends_at_the_active_segment() -> None:
    found = planned()
    assert (found.start, found.first_dirty, found.end) == (0, 200, 400)
    assert (found.clean_bytes, found.dirty_bytes) == (2000, 2000)
    assert found.dirty_ratio == 0.5
    assert found.due
    assert not found.roll


@pytest.mark.parametrize(
    ("changed", "end"),
    [
        ({"last_stable_offset": 320}, 320),  # A
        ({"hold": 270}, 270),  # C
        ({"hold": 100}, 200),  # a hold below the cleaned end leaves nothing
        ({"min_lag": 250}, 300),  # D: the last segment has a record that is 200 ms old
        ({"min_lag": 200}, 400),
        ({"min_lag": 10_000}, 250),
        ({"min_lag": 250, "last_stable_offset": 260}, 260),
        ({"active": None}, 450),
    ],
)
def test_the_range_ends_at_the_first_bound(changed: dict[str, Any], end: int) -> None:
    assert planned(**changed).end == end


def test_only_bytes_of_the_log_count() -> None:
    """Bytes below the log start, and parts behind the end, make the log neither clean nor dirty."""
    assert planned(log_start=100).clean_bytes == 1000
    found = planned(last_stable_offset=300)
    assert (found.clean_bytes, found.dirty_bytes) == (2000, 500)


def test_the_ratio_is_reached_or_not() -> None:
    assert planned(ratio=0.5).due
    assert not planned(ratio=0.51).due


def test_an_empty_range_is_never_due() -> None:
    found = planned(ratio=0.0, cleaned_end=400)
    assert (found.first_dirty, found.end, found.dirty_bytes, found.due) == (400, 400, 0, False)
    assert not planned(ratio=0.0, max_lag=1, last_stable_offset=200).due


def test_a_log_without_parts_is_not_due() -> None:
    found = planned(ratio=0.0, parts=[], active=None, cleaned_end=7, log_start=5)
    assert (found.first_dirty, found.due, found.dirty_ratio) == (5, False, 0.0)


def test_old_records_make_a_log_due() -> None:
    """KIP-354: whatever the dirty ratio is."""
    assert planned(ratio=1.0, max_lag=499).due
    assert not planned(ratio=1.0, max_lag=500).due
    assert not planned(ratio=1.0, max_lag=499, last_stable_offset=230).due  # not in the range


def test_an_old_record_rolls_the_active_segment() -> None:
    assert planned(max_lag=99).roll
    assert not planned(max_lag=100).roll
    assert not planned(max_lag=99, active=None).roll
    # An open transaction, a hold or the minimum lag would keep its records out of the range.
    assert not planned(max_lag=99, last_stable_offset=400).roll
    assert not planned(max_lag=99, hold=400).roll
    assert not planned(max_lag=99, min_lag=250).roll
    empty = CleanablePart(400, 400, 0, NO_TIMESTAMP, NO_TIMESTAMP)
    assert not planned(max_lag=1, active=empty).roll


def test_without_a_trusted_clock_no_age_counts() -> None:
    assert planned(now_ms=None, min_lag=1).end == 250
    assert planned(now_ms=None).end == 400
    found = planned(now_ms=None, ratio=1.0, max_lag=1)
    assert (found.due, found.roll) == (False, False)


def test_a_segment_of_headers_has_no_age() -> None:
    """Its records were removed: it ends no range, and is not overdue."""
    parts = [*PARTS[:2], CleanablePart(250, 300, 64, NO_TIMESTAMP, NO_TIMESTAMP), *PARTS[3:]]
    assert planned(parts=parts, min_lag=150).end == 400
    assert planned(parts=parts, min_lag=150, now_ms=None).end == 300
    assert not planned(parts=parts, ratio=1.0, max_lag=350).due


@pytest.mark.parametrize(
    ("cleaned_end", "log_start", "first_dirty"),
    [(200, 0, 200), (450, 0, 450), (451, 0, 0), (50, 100, 100), (100, 100, 100)],
)
def test_a_cleaned_end_outside_of_the_log_does_not_count(
    cleaned_end: int, log_start: int, first_dirty: int
) -> None:
    found = planned(cleaned_end=cleaned_end, log_start=log_start)
    assert found.first_dirty == first_dirty
    assert found.end >= found.first_dirty


def test_a_part_that_is_cleaned_in_part_is_dirty() -> None:
    found = planned(cleaned_end=150)
    assert (found.first_dirty, found.clean_bytes, found.dirty_bytes) == (150, 1000, 3000)
