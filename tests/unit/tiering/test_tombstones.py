"""Which files are deleted, and when the log must be read for that (tiering/tombstones.py)."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from pk.tiering import tombstones
from pk.tiering.tombstones import RemovalDates, Tombstones


def test_own_removals_need_no_look_at_the_log() -> None:
    it = Tombstones(0)
    assert it.must_look(0)
    assert it.looked(["a"], 1) == ["a"]
    it.deleted(["a"], 0)
    assert not it.must_look(0)
    it.removed(["b"], 5)
    assert it.expired(10, 14) == []
    assert it.expired(10, 15) == ["b"]
    assert it.expired(10, 15) == []


def test_what_is_gone_is_not_deleted_again_while_the_log_names_it() -> None:
    it = Tombstones(0)
    assert it.looked(["a"], 10) == ["a"]
    it.deleted(["a"], 100)
    # tiering/tombstones M2: files removed before the start may not have been old enough
    assert it.must_look(100)
    assert it.looked(["a", "b"], 50) == ["b"]
    it.deleted(["b"], 100)
    assert it.looked(["b"], 100) == []
    assert not it.must_look(100)


def test_too_many_are_left_to_the_log() -> None:
    it = Tombstones(0)
    it.looked([], 0)
    it.removed([str(n) for n in range(tombstones.PATHS_MAX + 1)], 7)
    assert it.must_look(0)
    assert it.expired(0, 8) == []


@given(
    st.integers(0, 20),
    st.lists(st.tuples(st.sampled_from(["ours", "theirs", "vacuum"]), st.integers(1, 10))),
)
def test_every_removal_is_deleted_in_time_and_once(
    retention: int, steps: list[tuple[str, int]]
) -> None:
    """tiering/tombstones M1: the first vacuum after its retention deletes it."""
    now, it, number = 0, Tombstones(0), 0
    log: dict[str, int] = {"before": 0}  #: path → removed when
    deleted: dict[str, int] = {}
    for what, wait in [*steps, ("vacuum", 100)]:
        now += wait
        if what == "vacuum":
            pending_delete = it.expired(retention, now)
            if it.must_look(retention):
                named = [path for path, at in log.items() if at + retention <= now]
                pending_delete = list(dict.fromkeys([*pending_delete, *it.looked(named, now)]))
            it.deleted(pending_delete, retention)
            for path in pending_delete:
                assert log[path] + retention <= now
                deleted.setdefault(path, now)
            assert all(path in deleted for path, at in log.items() if at + retention <= now)
            continue
        number += 1
        log[f"{what}{number}"] = now
        if what == "ours":
            it.removed([f"{what}{number}"], now)
        else:
            it.foreign(now)


def test_the_log_does_not_say_how_old_an_own_removal_is() -> None:
    """tiering/tombstones M1: the wall clock that dated it in the log may have been behind."""
    it = Tombstones(0)
    it.removed(["a"], 5)
    assert it.looked(["a", "b"], 10) == ["b"]
    assert it.expired(10, 14) == []
    assert it.expired(10, 15) == ["a"]


def test_a_removal_is_dated_after_everything_that_is_known_to_be_before_it() -> None:
    """tiering/tombstones M4: this includes the store's clock and earlier dates."""
    it = RemovalDates()
    assert it.date(1_000, 0) == 1_000
    assert it.date(400, 50) == 1_050, "the clock was set back, and time went on"
    it.seen(3_000, 60)
    assert it.date(500, 70) == 3_010
    it.seen(2_000, 80)
    assert it.date(500, 90) == 3_030
    assert it.date(9_000, 100) == 9_000


def test_a_date_that_was_ahead_makes_later_removals_wait() -> None:
    it = RemovalDates()
    it.seen(5_000, 0)
    assert it.date(1_000, 10) == 5_010
