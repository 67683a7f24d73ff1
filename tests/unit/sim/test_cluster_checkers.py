"""What the checkers between machines accept and refuse, and what the promise covers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pk.sim.checkers import Violation
from pk.sim.cluster_checkers import (
    Mark,
    Marks,
    QuorumCheck,
    QuorumSample,
    ReplicaCheck,
    ReplicaSample,
)
from pk.sim.loss_model import LossModel, PartitionFacts, Registration
from pk.sim.options import TopicPlan
from pk.sim.oracle import Oracle
from pk.types import PartitionKey

KEY = PartitionKey("id", 0)
TOPIC = TopicPlan("t", 1, {"min_insync_replicas": "2"}, 3)
FLUSHED = TopicPlan("t", 1, {"min_insync_replicas": "2", "flush_on_ack": "true"}, 3)
FACTS = PartitionFacts("t", KEY, (1, 2, 3), (1, 2, 3), 1, 0, (1, 2, 3))


def test_marks_know_what_contradicts_them() -> None:
    log = Marks()
    for mark in (Mark(0, 5, 0, 1), Mark(5, 9, 1, 2)):
        assert log.differs(mark) is None
        log.extend(mark)
    assert log.differs(Mark(5, 9, 1, 2)) is None
    assert log.differs(Mark(5, 9, 2, 2)) == Mark(5, 9, 1, 2)
    assert log.differs(Mark(3, 6, 0, 1)) == Mark(0, 5, 0, 1)
    log.cut(6)
    assert log.end == 5
    assert log.differs(Mark(5, 7, 3, 3)) is None


def controller(node: int, **given: Any) -> QuorumSample:
    known: dict[str, Any] = {
        "life": 1, "leads": False, "epoch": 1, "high_watermark": 0, "synced_end": 0,
        "voters": (1, 2, 3), "granted": (),
    }  # fmt: skip
    return QuorumSample(node=node, **{**known, **given})


def test_one_leader_and_one_vote_an_epoch() -> None:
    check = QuorumCheck()
    check.check(controller(1, leads=True, granted=(1, 2)))
    with pytest.raises(Violation, match="2 voted for 1 too"):
        check.check(controller(3, granted=(3, 2)))
    with pytest.raises(Violation, match="1 leads the epoch too"):
        check.check(controller(2, leads=True))
    check.check(controller(2, leads=True, epoch=2))
    with pytest.raises(Violation, match="voted or led in epoch 1"):
        check.check(controller(1, life=2, epoch=0))


def test_what_is_committed_is_on_a_majority_and_never_changes() -> None:
    check = QuorumCheck()
    check.check(controller(2, synced_end=4))
    check.check(controller(1, leads=True, high_watermark=4, synced_end=6))
    with pytest.raises(Violation, match="only"):
        check.check(controller(1, leads=True, high_watermark=6, synced_end=6))
    with pytest.raises(Violation, match="not SYNCED"):
        check.check(controller(2, high_watermark=5, synced_end=4))
    with pytest.raises(Violation, match="HW was"):
        check.check(controller(1, leads=True, high_watermark=3, synced_end=6))
    assert check.committed(1, [Mark(0, 4, 1, 7)]) == [Mark(0, 4, 1, 7)]
    assert check.committed(2, [Mark(0, 4, 1, 7)]) == []
    with pytest.raises(Violation, match="2 has committed"):
        check.committed(2, [Mark(0, 4, 1, 8)])


def test_what_a_lost_disk_had_confirmed_counts_until_its_voter_is_removed() -> None:
    check = QuorumCheck()
    check.check(controller(2, synced_end=6))
    check.forget(2)
    check.check(controller(1, leads=True, high_watermark=6, synced_end=9))
    with pytest.raises(Violation, match="only"):
        check.check(controller(1, leads=True, high_watermark=7, synced_end=9))


def replica(broker: int, **given: Any) -> ReplicaSample:
    known: dict[str, Any] = {
        "life": 1, "leader_epoch": 0, "leads": False, "current": True, "high_watermark": 0,
        "log_start": 0, "local_log_start": 0, "log_end": 10, "in_sync": 3, "required": 2,
        "hit": False,
    }  # fmt: skip
    return ReplicaSample(key=KEY, topic="t", broker=broker, **{**known, **given})


def led() -> tuple[Oracle, ReplicaCheck]:
    """Return a partition that broker 1 leads, with [0, 8) committed."""
    oracle = Oracle([TOPIC])
    check = ReplicaCheck(oracle)
    leader = replica(1, leads=True)
    check.check(leader)
    assert check.check(replace(leader, high_watermark=8)) == (0, 8)
    check.committed(KEY, 1, [Mark(0, 8, 0, 1)])
    return oracle, check


def test_a_watermark_stays_below_every_member_and_still_below_min_isr() -> None:
    _, check = led()
    leader = replica(1, leads=True, high_watermark=9)
    with pytest.raises(Violation, match="above the end 8 of 2"):
        check.check(replace(leader, isr_ends=((2, 8), (3, 9))))
    _, check = led()
    with pytest.raises(Violation, match="by too few"):
        check.check(replace(leader, in_sync=1))


def test_no_replica_differs_below_its_watermark_or_cuts_there() -> None:
    _, check = led()
    check.check(replica(2, high_watermark=8))
    with pytest.raises(Violation, match="broker 2 has"):
        check.committed(KEY, 2, [Mark(0, 8, 0, 2)])
    check.committed(KEY, 2, [Mark(0, 8, 0, 1)])
    with pytest.raises(Violation, match="cut below"):
        check.check(replica(2, log_end=7))
    check.check(replica(2, log_end=7, hit=True))


def test_a_leader_has_what_was_committed_unless_an_era_ended() -> None:
    oracle, check = led()
    shorter = replica(2, leads=True, leader_epoch=1, log_end=5)
    with pytest.raises(Violation, match="lacks what was committed"):
        check.check(shorter)
    oracle.era_ends(*KEY, 0.0)
    check.check(shorter)
    check.committed(KEY, 2, [Mark(0, 5, 0, 1)])
    with pytest.raises(Violation, match="lacks what was committed"):
        check.check(replica(3, leads=True, leader_epoch=2, log_end=4))


def test_a_leader_that_came_back_with_less_may_part_further_down_once() -> None:
    """V12: records of epoch 0 that were uncommitted then were committed in epoch 1 without this
    leader.
    """
    oracle, check = led()
    check.check(replica(1, leads=True, leader_epoch=1, log_end=12, high_watermark=12))
    check.committed(KEY, 1, [Mark(8, 10, 1, 5), Mark(10, 12, 1, 6)])
    oracle.era_ends(*KEY, 0.0)
    back = replica(2, leads=True, leader_epoch=2, log_end=10)
    check.check(back)
    check.committed(KEY, 2, [Mark(0, 8, 0, 1), Mark(8, 10, 0, 5)])
    check.check(replica(3, leader_epoch=2))
    with pytest.raises(Violation, match="broker 3 has"):
        check.committed(KEY, 3, [Mark(8, 10, 1, 5)])
    check.check(replace(back, leader_epoch=3))
    with pytest.raises(Violation, match="broker 2 has"):
        check.committed(KEY, 2, [Mark(8, 10, 1, 5)])


def test_what_a_leader_before_the_loss_told_is_committed_no_more() -> None:
    """A follower keeps the former high watermark until it hears from the leader that came back with
    less.
    """
    oracle, check = led()
    oracle.era_ends(*KEY, 0.0)
    leader = replica(2, leads=True, leader_epoch=1, log_end=5, high_watermark=5)
    check.check(leader)
    behind = replica(3, leader_epoch=1, high_watermark=8)
    assert check.check(behind) == (0, 5)
    check.check(replace(leader, log_end=7, high_watermark=7))
    assert check.check(behind) == (0, 7)
    check.committed(KEY, 2, [Mark(0, 7, 0, 1)])
    later = replace(leader, leader_epoch=2, log_end=7, high_watermark=7)
    check.check(later)
    died = replace(behind, leader_epoch=2)
    assert check.check(died) == (0, 7), "it began its log again, died, and found the old one"
    check.check(replace(later, log_end=9))
    assert check.check(died) == (0, 8)
    with pytest.raises(Violation, match="lacks what was committed"):
        check.check(replica(1, leads=True, leader_epoch=2, log_end=6))


def test_what_a_process_finds_on_its_disk_after_a_loss_was_told_before_it() -> None:
    """The leader's log passes the watermark of a replica that died while it began its log again."""
    oracle, check = led()
    check.check(replica(3, high_watermark=8))
    oracle.era_ends(*KEY, 0.0)
    leader = replica(2, leads=True, leader_epoch=1, log_end=5, high_watermark=5)
    check.check(leader)
    check.check(replace(leader, log_end=12, high_watermark=12))
    check.committed(KEY, 2, [Mark(0, 5, 0, 1), Mark(5, 12, 1, 2)])
    check.check(replace(leader, leader_epoch=2, log_end=12, high_watermark=12))
    check.given_up(3, KEY)
    died = replica(3, life=2, leader_epoch=2, high_watermark=8)
    assert check.check(died) == (0, 0)
    assert check.check(died) == (0, 0), "it has not heard from the leader yet"
    assert check.check(replace(died, high_watermark=5)) == (0, 5)
    assert check.check(replace(died, log_end=12, high_watermark=12)) == (0, 12)
    check.committed(KEY, 3, [Mark(0, 5, 0, 1)])
    with pytest.raises(Violation, match="broker 3 has"):
        check.committed(KEY, 3, [Mark(5, 8, 0, 1)])


def test_a_replica_that_died_on_the_way_gives_up_once_more_what_its_era_cost() -> None:
    oracle, check = led()
    check.check(replica(2, high_watermark=8))
    check.committed(KEY, 2, [Mark(0, 8, 0, 1)])
    oracle.era_ends(*KEY, 0.0)
    check.given_up(2, KEY)
    check.check(replica(2, high_watermark=8, life=2))  # it died before any record was lost
    check.committed(KEY, 2, [Mark(0, 8, 0, 1)])
    check.check(replica(2, log_end=5, life=2))
    check.committed(KEY, 2, [Mark(5, 8, 1, 1)])
    with pytest.raises(Violation, match="cut below"):
        check.check(replica(2, log_end=5, life=2))


def test_a_log_may_be_found_empty_only_if_its_process_died_while_it_began_it_again() -> None:
    def begun() -> ReplicaCheck:
        _, check = led()
        check.check(replica(2, high_watermark=8))
        check.committed(KEY, 2, [Mark(0, 8, 0, 1)])
        check.begun_again(2, KEY, 9)
        return check

    empty = replica(2, log_end=0, current=False)
    begun().check(replace(empty, life=2))
    with pytest.raises(Violation, match="cut below"):
        begun().check(empty)
    check = begun()
    check.check(replica(2, local_log_start=9, log_end=9))
    with pytest.raises(Violation, match="cut below"):
        check.check(replace(empty, life=2))


def test_a_replica_that_moved_back_may_have_its_old_log() -> None:
    """The eras that ended while it was away may shorten it; a new log has seen none of them."""

    def back(log_end: int) -> ReplicaCheck:
        oracle, check = led()
        follower = replica(3)
        check.check(follower)
        check.moved_away(3, KEY)
        oracle.era_ends(*KEY, 0.0)
        check.check(replace(follower, log_end=log_end))
        check.check(follower)
        check.committed(KEY, 3, [Mark(0, 8, 0, 1)])
        return check

    check = back(10)
    check.check(replica(3, log_end=5))
    check.committed(KEY, 3, [Mark(5, 8, 0, 2)])
    with pytest.raises(Violation, match="cut below"):
        check.check(replica(3, log_end=5))
    with pytest.raises(Violation, match="cut below"):
        back(0).check(replica(3, log_end=5))


def strike(promise: LossModel, broker: int, *, disk: bool = False) -> None:
    promise.hit(
        broker,
        disk=disk,
        partitions=[FACTS],
        registered=Registration("old", ("d",)),
        now_ms=1_000,
    )


def test_one_loss_at_a_time_is_promised_two_are_not() -> None:
    oracle = Oracle([TOPIC])
    promise = LossModel(oracle, [TOPIC])
    strike(promise, 1)
    assert oracle.era(*KEY) == 0
    promise.seen(FACTS, {1: Registration("old", ("d",))})
    assert promise.is_hit(KEY, 1), "in the ISR, but of before the loss"
    promise.seen(FACTS._replace(isr=(2, 3)), {1: Registration("new", ("d",))})
    assert promise.is_hit(KEY, 1), "registered, not yet in sync"
    promise.seen(FACTS, {1: Registration("new", ("d",))})
    assert not promise.is_hit(KEY, 1)
    strike(promise, 2)
    assert oracle.era(*KEY) == 0, "the first was whole again"
    strike(promise, 3)
    assert oracle.era(*KEY) == 1


def test_a_copy_whose_damage_was_dropped_may_still_be_made_anew() -> None:
    promise = LossModel(Oracle([TOPIC]), [TOPIC])
    there = [True]
    promise.rotted(FACTS, 1, lambda: there[0], 1_000)
    there[0] = False  # retention
    promise.seen(FACTS, {})
    assert not promise.is_hit(KEY, 1)
    promise.made_anew(KEY, 1)
    promise.made_anew(KEY, 2)
    promise.seen(FACTS._replace(isr=(2, 3)), {})
    assert (promise.is_hit(KEY, 1), promise.is_hit(KEY, 2)) == (True, False), "it met nothing bad"
    promise.seen(FACTS, {})
    assert not promise.is_hit(KEY, 1)


def test_with_flush_on_ack_only_lost_disks_count() -> None:
    oracle = Oracle([FLUSHED])
    promise = LossModel(oracle, [FLUSHED])
    for broker in (1, 2, 3):
        strike(promise, broker)
    assert oracle.era(*KEY) == 0
    strike(promise, 1, disk=True)
    assert oracle.era(*KEY) == 0
    strike(promise, 2, disk=True)
    assert oracle.era(*KEY) == 1


def test_an_unclean_election_ends_an_era_where_it_is_allowed() -> None:
    oracle = Oracle([TOPIC])
    LossModel(oracle, [TOPIC]).elected_uncleanly(FACTS, (), 0.0)
    assert oracle.era(*KEY) == 0, "a recovery election loses nothing"
    configs = {**TOPIC.configs, "unclean_leader_election_enable": "true"}
    LossModel(oracle, [replace(TOPIC, configs=configs)]).elected_uncleanly(FACTS, (), 0.0)
    assert oracle.era(*KEY) == 1


def test_an_acknowledgement_heard_while_an_era_settles_may_be_of_either() -> None:
    oracle = Oracle([TOPIC])
    oracle.created("t", "id", 1)
    oracle.era_ends(*KEY, 500.0)
    for now_ms, eras in ((100.0, (0, 1)), (600.0, (1, 1))):
        oracle.now_ms = lambda now_ms=now_ms: now_ms  # type: ignore[misc]
        sent = oracle.send(oracle.next_id("p"), "t", 0, ordered=True)
        oracle.acknowledged(sent, 0, 0)
        assert (sent.acked_era, sent.acked_era_max) == eras


def test_a_former_life_may_be_damaged_still() -> None:
    """A broker that is behind serves it under the topic's name."""
    oracle = Oracle([TOPIC])
    oracle.created(TOPIC.name, "one", 2)
    assert not oracle.may_be_damaged(TOPIC.name, 0)
    oracle.rotten["one", 0] = None
    assert oracle.may_be_damaged(TOPIC.name, 0)
    oracle.created(TOPIC.name, "two", 2)
    assert oracle.may_be_damaged(TOPIC.name, 0)
    assert not oracle.may_be_damaged(TOPIC.name, 1)
