"""Preferred leaders and elections that an operator asks for (KIP-460); decisions in steps."""

from __future__ import annotations

from typing import Any

import pytest

from pk.server.controller import batched_decision, leaders
from pk.server.controller import commands as c
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench, alter_isr, item

KEY = PartitionKey("id0", 0)


def moved() -> Bench:
    """Topic t prefers leader 1, which was away and is in sync again; 2 leads."""
    bench = Bench()
    bench.up(1, 2)
    bench.topic("t", 1, 2)
    bench.fence(1)
    bench.beat(1)
    alter_isr(bench, 2, item(bench, "t", [2, 1]))
    assert bench.state("t").leader == 2
    return bench


def prefer(bench: Bench, *keys: PartitionKey) -> int:
    count: int = bench.do(c.Prefer(keys, dict(bench.reports)))
    return count


def elect(bench: Bench, *keys: PartitionKey, unclean: bool = False) -> list[int]:
    request = wire.ElectLeadersRequest(unclean=unclean)
    for key in keys:
        request.partitions.add(topic_id=key.topic_id, partition=key.partition)
    reply = bench.do(c.ElectLeaders(request, dict(bench.reports)))
    return [result.error.code for result in reply.results]


def test_leadership_goes_back_to_the_first_replica() -> None:
    bench = moved()
    assert list(leaders.imbalanced(bench.image)) == [KEY]
    assert prefer(bench, KEY, PartitionKey("gone", 0)) == 1
    state = bench.state("t")
    assert (state.leader, set(state.isr), state.leader_epoch) == (1, {1, 2}, 2)
    assert list(leaders.imbalanced(bench.image)) == []
    assert prefer(bench, KEY) == 0


def test_it_goes_to_nobody_who_could_lose_or_leave() -> None:
    bench = moved()
    alter_isr(bench, 2, item(bench, "t", [2]))
    assert prefer(bench, KEY) == 0, "not in sync"
    bench = moved()
    bench.fence(1)
    assert prefer(bench, KEY) == 0, "fenced"
    bench = moved()
    bench.beat(1, want_shutdown=True)
    assert list(leaders.imbalanced(bench.image)) == []
    assert prefer(bench, KEY) == 0, "shutting down"
    bench = moved()
    bench.beat(1, offline=(KEY,))
    assert prefer(bench, KEY) == 0, "offline"


def test_an_unclean_leader_recovers_before_it_hands_over() -> None:
    """T4: it reads the tier's table first; otherwise its successor would start again empty."""
    bench = Bench()
    bench.up(1, 2)
    bench.topic("t", 1, 2)
    bench.fence(1)
    bench.register(2, "again", boot_id="x")
    bench.beat(2)
    bench.beat(1)
    alter_isr(bench, 2, item(bench, "t", [2, 1]))
    assert bench.state("t").unclean
    assert prefer(bench, KEY) == 0
    assert elect(bench, KEY) == [80]
    alter_isr(bench, 2, item(bench, "t", [2, 1], recovered=True))
    assert prefer(bench, KEY) == 1


def test_one_decision_moves_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaders, "MOVES_MAX", 5)
    bench = Bench()
    bench.up(1, 2)
    count = leaders.MOVES_MAX + 3
    bench.topic("t", 2 * count, 2)
    bench.fence(1)
    bench.beat(1)
    for number in range(2 * count):
        if bench.state("t", number).leader == 2 and 1 not in bench.state("t", number).isr:
            alter_isr(bench, 2, item(bench, "t", [2, 1], number))
    keys = tuple(leaders.imbalanced(bench.image))
    assert len(keys) == count
    assert prefer(bench, *keys) == leaders.MOVES_MAX
    assert prefer(bench, *keys) == 3


def test_preferred_leaders_asked_for_have_a_result_each() -> None:
    bench = moved()
    assert elect(bench, KEY, KEY, PartitionKey("id9", 0)) == [0, 42, 3]
    assert elect(bench, KEY) == [84]
    bench.fence(1)
    assert elect(bench, KEY) == [80]


def test_an_unclean_election_is_made_on_request_only_and_by_position() -> None:
    bench = Bench()
    bench.up(1, 2, 3)
    bench.topic("t", 1, 3, min_insync_replicas="2")
    assert elect(bench, KEY, unclean=True) == [84]
    for broker in (1, 2, 3):
        bench.fence(broker)
    alone = {2, 3}  # the ELR; neither broker returns
    assert set(bench.state("t").elr) == alone
    assert elect(bench, KEY, unclean=True) == [83]
    bench.beat(1)
    assert elect(bench, KEY, unclean=True) == [0]
    state = bench.state("t")
    assert (state.leader, state.isr, state.elr, state.unclean) == (1, (1,), (), True)
    assert set(state.last_known) == alone


def test_several_replicas_are_compared_before_an_unclean_election() -> None:
    bench = Bench()
    bench.up(1, 2, 3)
    bench.topic("t", 1, 3, min_insync_replicas="1")
    for broker in (1, 2, 3):
        bench.fence(broker)
    wanted = frozenset([KEY])
    for broker in (1, 2):
        assert len(bench.beat(broker, unclean=wanted).report_positions) == 1
    bench.beat(1, positions={KEY: (3, 8)})
    assert elect(bench, KEY, unclean=True) == [83], "2 has not said"
    bench.beat(2, positions={KEY: (3, 9)})
    assert elect(bench, KEY, unclean=True) == [0]
    assert bench.state("t").leader == 2


# -- steps -----------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_decision.BatchedDecision.__init__, "__defaults__", (4,))


def wide(**server: Any) -> Bench:
    bench = Bench(**server)
    bench.up(1, 2)
    bench.topic("t", 30, 2)
    return bench


@pytest.mark.usefixtures("small")
def test_a_large_fence_is_decided_in_steps_and_the_broker_changes_last() -> None:
    bench = wide()
    end = len(bench.log)
    assert bench.fence(1)
    assert bench.steps == 8
    kinds = [record.WhichOneof("record") for record in bench.log[end:]]
    assert kinds == ["partition_change"] * 30 + ["broker_change"]
    assert all(state.isr == (2,) for _, _, state in bench.image.partitions())


@pytest.mark.usefixtures("small")
def test_a_registration_that_lost_data_is_written_after_the_last_partition_was_told() -> None:
    bench = wide()
    end = len(bench.log)
    bench.register(1, "again", boot_id="x")
    kinds = [record.WhichOneof("record") for record in bench.log[end:]]
    last = kinds.index("register_broker")
    assert kinds[:last] == ["partition_change"] * 28, "the last step has two more behind it"
    assert bench.steps == 8
    assert all(state.isr == (2,) for _, _, state in bench.image.partitions())


@pytest.mark.usefixtures("small")
def test_a_shutdown_in_steps_is_granted_after_the_last() -> None:
    bench = wide()
    assert not bench.beat(1, want_shutdown=True).may_shut_down
    assert bench.steps == 8
    assert bench.beat(1, want_shutdown=True).may_shut_down
    assert all(state.leader == 2 for _, _, state in bench.image.partitions())


@pytest.mark.usefixtures("small")
def test_a_failover_between_two_steps_goes_on_from_there() -> None:
    bench = wide()
    decided = bench.machine.decide(c.Fence(1, bench.image.brokers[1].broker_epoch), 0)
    assert isinstance(decided.reply, batched_decision.More)
    for record in decided.records:
        bench.machine.apply(len(bench.log), record)
        bench.log.append(record)
        bench.image.check()
    assert not bench.image.brokers[1].fenced, "its session is the next term's to end"
    assert bench.fence(1)
    assert bench.steps == 7
    assert all(state.isr == (2,) for _, _, state in bench.image.partitions())


@pytest.mark.usefixtures("small")
def test_elections_without_room_in_the_decision_are_tried_again() -> None:
    bench = Bench()
    bench.up(1)
    bench.topic("t", 9)
    bench.fence(1)
    assert not bench.beat(1).fenced
    left = tuple(bench.machine.leaderless)
    assert 0 < len(left) < 9
    while left:
        assert bench.recover(*left)
        left = tuple(bench.machine.leaderless)
    assert all(state.leader == 1 != NONE for _, _, state in bench.image.partitions())
