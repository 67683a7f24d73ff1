"""L16: unfit leaders hand over, and get the lead back; a partition moves at most once a minute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pk.server.controller import commands as c
from pk.server.controller import leader_rebalancer, leaders
from pk.server.controller.leader_rebalancer import (
    DWELL_MS,
    RETRY_MAX_MS,
    RETRY_MS,
    LeaderRebalancer,
)
from pk.server.controller.reports import STORAGE_FULL, Unfit
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench, alter_isr, item

KEY = PartitionKey("id0", 0)


def unfit(reason: str = STORAGE_FULL, *keys: PartitionKey, gives_up: bool = True) -> Any:
    replicas = [wire.FetchPartition(topic_id=k.topic_id, partition=k.partition) for k in keys]
    said = wire.Unfit(reason=reason, all=not keys, replicas=replicas, gives_up=gives_up)
    return {"unfit": [said]}


def led_by_one(partitions: int = 1, copies: int = 3) -> Bench:
    bench = Bench()
    bench.up(1, 2, 3)
    bench.topic("t", partitions, copies)
    for number in range(partitions):
        key = PartitionKey("id0", number)
        while bench.state("t", number).leader != 1:
            bench.beat(bench.state("t", number).leader, **unfit("test"))
            hand_over(bench, key)
    for broker in (1, 2, 3):
        bench.beat(broker)
    return bench


def hand_over(bench: Bench, *keys: PartitionKey) -> tuple[PartitionKey, ...]:
    moved: tuple[PartitionKey, ...] = bench.do(c.HandOver(keys, dict(bench.reports)))
    return moved


def test_a_leader_that_gives_up_hands_over_to_a_fit_replica_in_sync() -> None:
    bench = led_by_one()
    epoch = bench.state("t").leader_epoch
    assert hand_over(bench, KEY) == (), "nothing is wrong with it"
    bench.beat(1, **unfit(gives_up=False))
    assert hand_over(bench, KEY) == (), "it keeps what it has"
    bench.beat(1, **unfit())
    others = [each for each in bench.state("t").replicas if each != 1]
    bench.beat(others[0], **unfit(gives_up=False))
    assert hand_over(bench, KEY, PartitionKey("gone", 0)) == (KEY,)
    state = bench.state("t")
    assert (state.leader, set(state.isr), state.leader_epoch) == (others[1], {1, 2, 3}, epoch + 1)
    assert hand_over(bench, KEY) == ()


def test_nobody_takes_over_who_could_lose_or_is_unfit_or_unheard() -> None:
    bench = led_by_one()
    bench.beat(1, **unfit())
    bench.beat(2, offline=(KEY,))  # leaves the ISR
    bench.beat(3, **unfit(STORAGE_FULL, KEY, gives_up=False))
    assert hand_over(bench, KEY) == ()
    del bench.reports[3]
    assert hand_over(bench, KEY) == (), "of whom nothing is known"
    bench.beat(3, **unfit(STORAGE_FULL, PartitionKey("id0", 7)))
    assert hand_over(bench, KEY) == (KEY,), "another replica of its is unfit"


def test_reasons_are_those_of_whoever_gives_them() -> None:
    """The mechanism knows who gives up, not why; this includes a reason that the controller found
    itself.
    """
    bench = led_by_one()
    bench.reports[1] = replace(bench.reports[1], unfit=(Unfit("clock", gives_up=True),))
    wanted = LeaderRebalancer()
    wanted.report_changed(None, bench.reports[1])
    assert list(wanted.wanted(bench.image, bench.reports, 1)) == [(1, "clock")]
    assert hand_over(bench, KEY) == (KEY,)


def test_an_unfit_preferred_leader_does_not_come_back() -> None:
    bench = led_by_one()
    first = bench.state("t").replicas[0]
    if first == 1:
        bench.beat(1, **unfit())
        hand_over(bench, KEY)
    bench.beat(first, **unfit(gives_up=False))
    assert list(leaders.imbalanced(bench.image)) == [KEY]
    assert bench.do(c.Prefer((KEY,), dict(bench.reports))) == 0
    bench.beat(first)
    assert bench.do(c.Prefer((KEY,), dict(bench.reports))) == 1


def test_elections_prefer_the_fit_and_take_the_unfit_if_need_be() -> None:
    bench = led_by_one()
    others = [each for each in bench.state("t").replicas if each != 1]
    bench.beat(others[0], **unfit())
    bench.fence(1)
    assert bench.state("t").leader == others[1]
    bench.fence(others[1])
    assert bench.state("t").leader == others[0]


def test_an_unclean_leader_recovers_before_it_hands_over() -> None:
    # rule T4
    bench = Bench()
    bench.up(1, 2)
    bench.topic("t", 1, 2)
    bench.fence(1)
    bench.register(2, "again", boot_id="x")
    bench.beat(2, **unfit())
    bench.beat(1)
    alter_isr(bench, 2, item(bench, "t", [2, 1]))
    assert bench.state("t").unclean
    assert hand_over(bench, KEY) == ()
    alter_isr(bench, 2, item(bench, "t", [2, 1], recovered=True))
    assert hand_over(bench, KEY) == (KEY,)


def test_one_move_per_partition_and_minute_the_way_back_included() -> None:
    # controller/leader_rebalancer H1
    bench, soft = led_by_one(), LeaderRebalancer()
    first = bench.state("t").replicas[0]
    bench.beat(1, **unfit())
    assert soft.report_changed(None, bench.reports[1])
    assert soft.wanted(bench.image, bench.reports, 1_000) == {(1, STORAGE_FULL): [KEY]}
    soft.handed_over(bench.image, hand_over(bench, KEY), 1_000)
    bench.beat(1)
    taker = bench.state("t").leader
    bench.beat(taker, **unfit())
    assert soft.report_changed(None, bench.reports[taker])
    assert soft.rests(KEY, 1_000 + DWELL_MS - 1)
    assert soft.wanted(bench.image, bench.reports, 1_000 + DWELL_MS - 1) == {}
    assert soft.rest_ends_ms(2_000) == 1_000 + DWELL_MS
    later = 1_000 + DWELL_MS + RETRY_MAX_MS
    assert soft.wanted(bench.image, bench.reports, later) == {(taker, STORAGE_FULL): [KEY]}
    assert soft.rest_ends_ms(later) is None
    soft.handed_over(bench.image, hand_over(bench, KEY), later)
    soft.came_back(bench.image, [KEY], later + DWELL_MS)
    came = bench.state("t").leader == first
    assert soft.rests(KEY, later + DWELL_MS) == came, "the first leads again, and rests"


def test_a_preferred_leader_that_came_back_rests_others_do_not() -> None:
    bench, soft = led_by_one(), LeaderRebalancer()
    soft.came_back(bench.image, [KEY], 5)
    assert not soft.rests(KEY, 5), "it was not handed over"


def test_partitions_are_looked_at_on_news_and_seldom_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # controller/leader_rebalancer H2
    bench, soft = led_by_one(), LeaderRebalancer()
    assert soft.wanted(bench.image, bench.reports, 0) == {}
    for broker in (1, 2, 3):
        bench.beat(broker, **unfit())
    assert soft.report_changed(None, bench.reports[1])
    assert not soft.report_changed(bench.reports[1], bench.reports[1])
    looks: list[int] = []
    look = type(bench.image).partitions_of

    def counted(self: Any, who: int) -> Any:
        looks.append(who)
        return look(self, who)

    monkeypatch.setattr(type(bench.image), "partitions_of", counted)
    for now_ms in range(0, 60_000, 100):
        assert soft.wanted(bench.image, bench.reports, now_ms) == {}
    assert len(looks) <= 3 * (60_000 // RETRY_MAX_MS + 3)
    looks.clear()
    before = bench.reports[2]
    bench.beat(2)
    assert soft.report_changed(before, bench.reports[2])
    assert soft.wanted(bench.image, bench.reports, 60_000) != {}
    assert RETRY_MS < RETRY_MAX_MS


def test_many_partitions_move_in_bounded_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_rebalancer, "MOVES_MAX", 4)
    monkeypatch.setattr(leaders, "MOVES_MAX", 4)
    bench, soft = led_by_one(partitions=6), LeaderRebalancer()
    bench.beat(1, **unfit())
    soft.report_changed(None, bench.reports[1])
    moved = []
    for now_ms in (0, 100):
        for keys in soft.wanted(bench.image, bench.reports, now_ms).values():
            assert len(keys) <= 4
            moved += hand_over(bench, *keys)
            soft.handed_over(bench.image, keys, now_ms)
    assert len(moved) == 6
    assert all(bench.state("t", number).leader != 1 for number in range(6))
