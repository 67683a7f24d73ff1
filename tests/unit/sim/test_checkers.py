"""What the checks of whole logs find, against what they mean spelled out."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest

from pk.sim.checkers import ReaderCheck, Row, Violation, _check_prefix, after_last_gap, require
from pk.sim.options import TopicPlan
from pk.sim.oracle import Oracle, Outcome, RecordId, Sent, Topic


def sent(number: int, partition: int, offset: int, era: int, era_max: int) -> Sent:
    return Sent(
        RecordId("p", number), "t", 1, True, 0, Outcome.ACKNOWLEDGED,
        partition, offset, acked_life=1, acked_era=era, acked_era_max=era_max,
    )  # fmt: skip


def outlives(lost: list[Sent], survivors: list[Sent]) -> bool:
    """V8 as it is written: some survivor stands above a lost record of its own era."""
    return any(
        kept.partition == gone.partition
        and kept.offset > gone.offset
        and kept.acked_era_max == gone.acked_era
        for gone in lost
        for kept in survivors
    )


def test_what_outlived_a_lost_record_is_found_wherever_it_stands() -> None:
    """V8."""
    topic, outcomes = Topic("t", False, False, life=1), []
    for seed in range(400):
        rng = random.Random(seed)
        mine = []
        for number in range(rng.randint(0, 8)):
            era = rng.randint(0, 3)
            place = rng.randint(0, 1), rng.randint(0, 5)
            mine.append(sent(number, *place, era, era + rng.randint(0, 1)))
        lost = [each for each in mine if rng.random() < 0.3]
        found = {each.id: (each.partition, each.offset) for each in mine if each not in lost}
        expected = outlives(lost, [each for each in mine if each.id in found])
        outcomes.append(expected)
        raises = pytest.raises(Violation, match=r"^V8: ") if expected else nullcontext()
        with raises:
            _check_prefix(topic, mine, lost, found)
    assert 50 < sum(outcomes) < 350


def test_words_are_made_of_what_failed_alone() -> None:
    class Silent:
        def __str__(self) -> str:
            raise AssertionError("nobody asked")

    require(True, "V1", "{} leads", Silent())
    with pytest.raises(Violation, match=r"^V1: 3 leads \{this\}$"):
        require(False, "V1", "{} leads {}", 3, "{this}")


def test_a_reader_that_retention_passes_is_judged_from_where_it_goes_on() -> None:
    """V5: that it had to is asked when it gets there."""
    rows = [Row(offset, RecordId("p", offset), offset) for offset in (3, 4, 7, 8, 12)]
    assert after_last_gap(rows) == rows[4:]
    assert after_last_gap(rows[:2]) == rows[:2]
    assert after_last_gap([]) == []
    oracle = Oracle([TopicPlan("t", 1, {"retention_bytes": "1"})])
    check = ReaderCheck("last", oracle)
    check.took("t", 0, rows[:2], 3)
    check.took("t", 0, rows[2:4], 7)
    with pytest.raises(Violation, match=r"^V5: .*a gap \(log_start 11\)"):
        check.took("t", 0, rows[4:], 11)
