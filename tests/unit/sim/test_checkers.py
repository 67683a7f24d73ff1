"""What the checks of whole logs find, compared with the written-out rules."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest

from pk.sim.checkers import (
    Invariants,
    PartitionSample,
    ReaderCheck,
    ReadRow,
    Violation,
    _check_prefix,
    after_last_gap,
    check_log,
    require,
)
from pk.sim.options import TopicPlan
from pk.sim.oracle import Oracle, Outcome, RecordId, Sent, Topic
from pk.types import PartitionKey


def sent(number: int, partition: int, offset: int, era: int, era_max: int) -> Sent:
    return Sent(
        RecordId("p", number), "t", 1, True, 0, Outcome.ACKNOWLEDGED,
        partition, offset, acked_life=1, acked_era=era, acked_era_max=era_max,
    )  # fmt: skip


def outlives(lost: list[Sent], survivors: list[Sent]) -> bool:
    """V8 word for word: some survivor is above a lost record of its own era."""
    return any(
        kept.partition == gone.partition
        and kept.offset > gone.offset
        and kept.acked_era_max == gone.acked_era
        for gone in lost
        for kept in survivors
    )


def test_what_outlived_a_lost_record_is_found_wherever_it_stands() -> None:
    # rule V8
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


def acknowledged(oracle: Oracle, *numbers: int) -> None:
    for offset, number in enumerate(numbers):
        oracle.acknowledged(oracle.sent[RecordId("p", number)], 0, offset)


def test_an_earlier_attempt_may_come_back_where_its_era_is_over() -> None:
    """V6, V8.  A leader held 3 and 1, and no replica had fetched them; its successor was sent 1, 2,
    3 and acknowledged them; then the former leader was elected uncleanly.
    """
    oracle = Oracle([TopicPlan("t", 1, {})])
    oracle.created("t", "id", 1)
    for number in (1, 2, 3):
        oracle.send(RecordId("p", number), "t", number, ordered=False)
    acknowledged(oracle, 1, 2, 3)
    back = {
        0: [ReadRow(offset, RecordId("p", number), number) for offset, number in enumerate((3, 1))]
    }
    with pytest.raises(Violation, match=r"^V6: acknowledged, and now at "):
        check_log(oracle, oracle.topics["t"], back, {0: 0})
    oracle.era_ends("id", 0, settled_ms=0)
    check_log(oracle, oracle.topics["t"], back, {0: 0})

    twice = {0: [*back[0], ReadRow(2, RecordId("p", 3), 3)]}
    with pytest.raises(Violation, match=r"^V6: .* is also at "):
        check_log(oracle, oracle.topics["t"], twice, {0: 0})
    elsewhere = {0: [], 1: [ReadRow(0, RecordId("p", 1), 1)]}
    with pytest.raises(Violation, match=r"^V6: acknowledged, and now at "):
        check_log(oracle, oracle.topics["t"], elsewhere, {0: 0, 1: 0})


def leads(broker: int, log_start: int, **given: Any) -> PartitionSample:
    known: dict[str, Any] = {
        "topic": "other", "leader_epoch": broker, "local_log_start": log_start, "log_end": 9,
        "last_stable_offset": 9, "high_watermark": 9, "synced_end": 9, "tiered": False,
        "flushed": False, "ready": True, "current": True,
    }  # fmt: skip
    key = PartitionKey("id", 0)
    return PartitionSample(key=key, broker=broker, log_start=log_start, **{**known, **given})


def test_a_table_may_follow_whoever_was_asked_to_delete() -> None:
    """V4: a leader was replaced, does not know it yet, and no reader compares with it."""
    oracle = Oracle([TopicPlan("t", 1, {})])
    oracle.created("t", "id", 1)
    checked = Invariants(oracle)
    oracle.deleting_records("t", 0, 3)
    told = {"topic": "t", "local_log_start": 7, "tiered": True, "table_end": 8}
    checked.check(leads(1, 2, **told, table_start=3))
    with pytest.raises(Violation, match=r"^V4: the table lacks what is not local from 3 on: "):
        checked.check(leads(1, 2, **told, table_start=4))
    with pytest.raises(Violation, match=r"^V4: the table lacks what is not local from 2 on: "):
        checked.check(leads(1, 2, **{**told, "topic": "other"}, table_start=3))


def test_a_new_leader_may_not_know_how_far_retention_had_come() -> None:
    """V5, V28: the leader before it answered a reader with its own log_start."""
    checked = Invariants(Oracle([TopicPlan("t", 1, {})]))
    for broker, log_start in ((1, 2), (1, 7), (2, 3)):
        checked.check(leads(broker, log_start))
    assert checked.log_start(PartitionKey("id", 0)) == 7
    assert checked.log_start(PartitionKey("id", 1)) == 0


def test_a_copy_made_anew_may_begin_before_the_one_that_is_gone() -> None:
    # rule V3
    key, checked = PartitionKey("id", 0), Invariants(Oracle([TopicPlan("t", 1, {})]))

    def led(broker: int, log_start: int) -> None:
        checked.check(leads(broker, log_start))

    led(1, 5)
    led(2, 5)
    checked.forget(1, PartitionKey("id", 1))
    with pytest.raises(Violation, match=r"^V3: log_start was 5: "):
        led(1, 3)
    checked.forget(1, key)
    led(1, 3)
    with pytest.raises(Violation, match=r"^V3: log_start was 5: "):
        led(2, 3)
    checked.forget(2)
    led(2, 3)


def test_a_former_life_may_be_cut_too() -> None:
    """V8: a broker that does not know of the deletion may still lead the old topic, and tell its
    readers.
    """
    oracle = Oracle([TopicPlan("t", 2, {})])
    oracle.created("t", "first", 2)
    oracle.era_ends("first", 1, settled_ms=0)
    oracle.created("t", "second", 2)
    assert oracle.may_be_cut("t", 1)
    assert not oracle.may_be_cut("t", 0)


def test_what_another_partition_lost_is_judged_beside_one_that_came_back() -> None:
    # rule V8
    topic = Topic("t", False, False, life=1)
    mine = [sent(0, 0, 1, 1, 1), sent(1, 0, 2, 1, 1), sent(2, 1, 1, 1, 1), sent(3, 1, 2, 1, 1)]
    moved = {mine[0].id: (0, 0), mine[1].id: (0, 2)}
    _check_prefix(topic, mine, [mine[0]], moved)
    with pytest.raises(Violation, match=r"^V8: "):
        _check_prefix(topic, mine, [mine[0], mine[2]], {**moved, mine[3].id: (1, 2)})


def test_words_are_made_of_what_failed_alone() -> None:
    class Silent:
        def __str__(self) -> str:
            raise AssertionError("nobody asked")

    require(True, "V1", "{} leads", Silent())
    with pytest.raises(Violation, match=r"^V1: 3 leads \{this\}$"):
        require(False, "V1", "{} leads {}", 3, "{this}")


def test_a_reader_that_retention_passes_is_judged_from_where_it_goes_on() -> None:
    """V5: whether it had to skip is checked at the offset where it continues."""
    rows = [ReadRow(offset, RecordId("p", offset), offset) for offset in (3, 4, 7, 8, 12)]
    assert after_last_gap(rows) == rows[4:]
    assert after_last_gap(rows[:2]) == rows[:2]
    assert after_last_gap([]) == []
    oracle = Oracle([TopicPlan("t", 1, {"retention_bytes": "1"})])
    check = ReaderCheck("last", oracle)
    check.took("t", 0, rows[:2], 3)
    check.took("t", 0, rows[2:4], 7)
    with pytest.raises(Violation, match=r"^V5: .*a gap \(log_start 11\)"):
        check.took("t", 0, rows[4:], 11)


@pytest.mark.parametrize("sent_before", [False, True])
def test_a_reader_that_begins_may_see_the_life_before(sent_before: bool) -> None:
    """V6: a broker that is cut off serves the topic that was deleted."""
    oracle = Oracle([TopicPlan("t", 1, {})])
    oracle.created("t", "id", 1)
    old, new = RecordId("p", 1), RecordId("p", 2)
    oracle.send(old, "t", 1, ordered=True)
    if sent_before:
        oracle.deleting("t")
        oracle.created("t", "again", 1)
    check = ReaderCheck("c", oracle)
    check.took("t", 0, [ReadRow(0, old, 1)], 0)
    oracle.send(new, "t", 2, ordered=True)
    log = {0: ReadRow(0, new, 2)}
    if sent_before:
        check.compare(oracle.topics["t"], 0, log)
        check.took("t", 0, [log[0]], 0)
        check.compare(oracle.topics["t"], 0, log)
        log[0] = ReadRow(0, old, 1)
    with pytest.raises(Violation, match=r"^V6: c saw"):
        check.compare(oracle.topics["t"], 0, log)
