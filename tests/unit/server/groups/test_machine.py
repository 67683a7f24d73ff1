"""Decisions of the group coordinator about members and generations (docs/design/0017)."""

from __future__ import annotations

import pytest

from pk import errors, limits
from pk.server.groups.state import GroupState
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.groups.group_bench import (
    ID,
    KEYS,
    OTHER_ID,
    RULES,
    TOPIC_ID,
    Bench,
    image_of,
)

S = GroupState


def test_the_first_member_leads_a_generation_and_assigns() -> None:
    bench = Bench()
    reply = bench.join("a")
    assert (reply.pending, reply.generation, reply.leader) == (False, 1, "a")
    assert reply.assignor == "range"
    assert [each.member_id for each in reply.members] == ["a"]
    assert list(bench.sync("a", 1, {"a": KEYS}).partitions[0].partitions) == [0, 1, 2, 3]
    assert bench.group.state is S.STABLE


def test_a_second_member_waits_until_the_first_has_joined_again() -> None:
    bench = Bench()
    generation = bench.stable("a")
    assert bench.join("b").pending
    assert bench.group.state is S.PREPARING_REBALANCE
    assert not bench.join("a", generation).pending
    reply = bench.join("b")
    assert (reply.generation, reply.leader, list(reply.members)) == (2, "a", [])


def test_followers_wait_for_the_assignment_of_the_leader() -> None:
    bench = Bench(RULES._replace(initial_rebalance_delay_ms=1))
    bench.join("a")
    bench.join("b")
    bench.end_join()
    assert bench.sync("b", 1).pending
    bench.sync("a", 1, {"a": KEYS[:1], "b": KEYS[1:]})
    assert [list(t.partitions) for t in bench.sync("b", 1).partitions] == [[1, 2, 3]]


def test_a_member_that_is_no_leader_brings_no_assignment() -> None:
    bench = Bench(RULES._replace(initial_rebalance_delay_ms=1))
    bench.join("a")
    bench.join("b")
    bench.end_join()
    assert bench.sync("b", 1, {"b": KEYS}).pending
    assert bench.group.state is S.COMPLETING_REBALANCE


def test_the_first_rebalance_waits_for_further_members() -> None:
    bench = Bench(RULES._replace(initial_rebalance_delay_ms=3_000))
    assert bench.join("a").pending
    assert bench.join("b").pending
    bench.end_join()
    assert bench.join("a").generation == 1
    assert set(bench.group.members) == {"a", "b"}


def test_a_repeated_join_gets_the_generation_that_it_has_joined() -> None:
    """The reply to the join was lost; the group is stable meanwhile."""
    bench = Bench()
    generation = bench.stable("a", "b")
    before = len(bench.log)
    reply = bench.join("b", generation - 1)
    assert (reply.generation, reply.pending) == (generation, False)
    assert len(bench.log) == before, "nothing changes"
    leader = bench.join("a", generation - 1)
    assert leader.skip_assignment, "the assignment is known: the leader computes nothing"


def test_a_join_with_the_current_generation_begins_a_rebalance() -> None:
    bench = Bench()
    generation = bench.stable("a", "b")
    assert bench.join("b", generation).pending
    assert bench.group.state is S.PREPARING_REBALANCE
    assert bench.changed == [ID]


def test_a_join_with_another_subscription_begins_a_rebalance() -> None:
    bench = Bench()
    generation = bench.stable("a", "b")
    assert bench.join("b", generation - 1, topics=("t", "u")).pending


def test_a_removed_member_must_begin_without_a_generation() -> None:
    bench = Bench()
    generation = bench.stable("a", "b")
    assert bench.expire("b") == 1
    with pytest.raises(errors.UnknownMemberId, match="joins again without a generation"):
        bench.join("b", generation)
    assert bench.join("b").pending


def test_members_that_do_not_join_in_time_are_removed() -> None:
    bench = Bench()
    generation = bench.stable("a", "b")
    bench.join("c")
    bench.join("b", generation)
    bench.end_join(generation)
    assert set(bench.group.members) == {"b", "c"}
    assert bench.group.metadata.leader == "b", "the old leader did not join"


def test_a_late_timeout_of_an_older_rebalance_changes_nothing() -> None:
    bench = Bench()
    generation = bench.stable("a", "b")
    bench.join("b", generation)
    bench.end_join(generation - 1)
    assert set(bench.group.members) == {"a", "b"}
    assert bench.changed == []


def test_the_others_go_on_when_a_member_leaves() -> None:
    bench = Bench()
    bench.stable("a", "b")
    assert bench.leave("b", "unknown") == [0, errors.UnknownMemberId.code]
    assert bench.group.state is S.PREPARING_REBALANCE
    assert not bench.join("a", bench.group.generation).pending


def test_the_last_departure_empties_the_group_and_fences_its_generation() -> None:
    bench = Bench()
    generation = bench.stable("a")
    assert bench.leave("a") == [0]
    assert bench.group.state is S.EMPTY
    assert bench.group.generation == generation + 1
    assert bench.group.owners == {}
    assert bench.group.metadata.empty_since_ms == bench.now
    assert bench.join("a").generation == generation + 2


def test_the_leader_dies_before_its_sync() -> None:
    bench = Bench()
    bench.stable("a", "b")
    bench.join("a", bench.group.generation)
    generation = bench.group.generation
    bench.join("b", generation)
    assert bench.group.state is S.COMPLETING_REBALANCE
    bench.expire("a")
    reply = bench.join("b", bench.group.generation)
    assert [each.member_id for each in reply.members] == ["b"]


def test_a_sync_during_the_next_join_phase_is_refused() -> None:
    bench = Bench()
    generation = bench.stable("a", "b")
    bench.join("c")
    with pytest.raises(errors.RebalanceInProgress):
        bench.sync("a", generation)


def test_old_generations_and_strangers_are_refused() -> None:
    bench = Bench()
    generation = bench.stable("a")
    with pytest.raises(errors.IllegalGeneration) as illegal:
        bench.sync("a", generation - 1)
    assert illegal.value.details == {"generation": str(generation)}
    with pytest.raises(errors.UnknownMemberId):
        bench.sync("b", generation)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"a": KEYS[:2], "b": KEYS[1:]}, "to 'a' and to 'b'"),
        ({"a": KEYS, "x": []}, "'x', which is no member"),
        ({"a": [PartitionKey(TOPIC_ID, 9)]}, "does not exist"),
        ({"a": [KEYS[0], KEYS[0]]}, "one twice"),
    ],
)
def test_a_wrong_assignment_is_refused_and_the_group_waits(
    given: dict[str, list[PartitionKey]], words: str
) -> None:
    bench = Bench(RULES._replace(initial_rebalance_delay_ms=1))
    bench.join("a")
    bench.join("b")
    bench.end_join()
    with pytest.raises(errors.InvalidRequest, match=words):
        bench.sync("a", 1, given)
    assert bench.group.state is S.COMPLETING_REBALANCE
    bench.sync("a", 1, {"a": KEYS})
    assert bench.sync("b", 1).partitions == []


def test_the_group_uses_the_assignor_that_most_members_prefer() -> None:
    bench = Bench(RULES._replace(initial_rebalance_delay_ms=1))
    bench.join("a", assignors=("range", "cooperative-sticky"))
    bench.join("b", assignors=("cooperative-sticky", "range"))
    bench.join("c", assignors=("cooperative-sticky", "mine", "range"))
    with pytest.raises(errors.InconsistentGroupProtocol, match="mine"):
        bench.join("d", assignors=("mine",))
    bench.end_join()
    assert bench.group.metadata.assignor == "cooperative-sticky"
    assert set(bench.group.members) == {"a", "b", "c"}


def test_a_full_group_refuses_a_further_member_but_no_old_one() -> None:
    bench = Bench(RULES._replace(max_size=2))
    generation = bench.stable("a", "b")
    with pytest.raises(errors.GroupMaxSizeReached):
        bench.join("c")
    assert bench.join("b", generation).pending


@pytest.mark.parametrize("session_ms", [99, 60_001])
def test_a_session_timeout_out_of_bounds_is_refused(session_ms: int) -> None:
    with pytest.raises(errors.InvalidSessionTimeout, match="100 to 60000"):
        Bench().join("a", session_ms=session_ms)


def test_names_and_subscriptions_are_bounded() -> None:
    bench = Bench()
    with pytest.raises(errors.InvalidRequest, match="a group id"):
        bench.join("a", group="")
    with pytest.raises(errors.InvalidRequest, match="a member id"):
        bench.join("")
    with pytest.raises(errors.InvalidRequest, match="assignors"):
        bench.join("a", assignors=())
    topics = ["x" * 200] * (limits.SUBSCRIPTION_BYTES_MAX // 200)
    with pytest.raises(errors.InvalidRequest, match="fewer topics"):
        bench.join("a", topics=topics)
    with pytest.raises(errors.NotCoordinator):
        bench.join("a", group="another")
    assert bench.log == []


# -- static members --------------------------------------------------------------------------------


def static_group() -> tuple[Bench, int]:
    """A stable group of the static members a (instance 1) and b (instance 2)."""
    bench = Bench(RULES._replace(initial_rebalance_delay_ms=1))
    bench.join("a", instance="1")
    bench.join("b", instance="2")
    bench.end_join()
    bench.sync("a", 1, {"a": KEYS[:2], "b": KEYS[2:]}, instance="1")
    return bench, 1


def test_a_static_member_that_restarts_takes_its_place_without_a_rebalance() -> None:
    bench, generation = static_group()
    reply = bench.join("a2", instance="1")
    assert (reply.pending, reply.generation, reply.skip_assignment) == (False, generation, True)
    assert reply.leader == "a2"
    assert bench.group.state is S.STABLE
    assert len(bench.sync("a2", generation, instance="1").partitions[0].partitions) == 2
    assert bench.commit({KEYS[0]: 5}, "a2", generation, instance="1") == {}
    for ask in (
        lambda: bench.sync("a", generation, instance="1"),
        lambda: bench.commit({KEYS[0]: 6}, "a", generation, instance="1"),
        lambda: bench.join("a", generation, instance="1"),
    ):
        with pytest.raises(errors.FencedInstanceId, match="group_instance_id '1'"):
            ask()
    assert bench.fetched(KEYS[0]) == {KEYS[0]: 5}


def test_a_static_member_with_another_subscription_begins_a_rebalance() -> None:
    bench, _ = static_group()
    assert bench.join("a2", instance="1", topics=("u",)).pending
    assert set(bench.group.members) == {"a2", "b"}


def test_a_static_member_that_does_not_join_in_time_stays_until_its_session_ends() -> None:
    bench, generation = static_group()
    bench.join("c")
    bench.end_join()
    assert set(bench.group.members) == {"a", "b", "c"}
    assert bench.group.metadata.leader == "c"
    generation += 1
    bench.sync("c", generation, {"a": KEYS[:2], "c": KEYS[2:]})
    reply = bench.join("a", generation - 1, instance="1")
    assert (reply.generation, reply.pending) == (generation, False)
    bench.expire("a")
    assert set(bench.group.members) == {"b", "c"}


def test_a_rebalance_without_any_member_that_joined_waits_for_sessions() -> None:
    bench, _ = static_group()
    bench.expire("b")
    bench.end_join()
    assert bench.group.state is S.PREPARING_REBALANCE
    assert bench.changed == []
    bench.expire("a")
    assert bench.group.state is S.EMPTY


def test_a_member_id_with_another_instance_is_fenced() -> None:
    bench, generation = static_group()
    with pytest.raises(errors.FencedInstanceId):
        bench.sync("a", generation)
    with pytest.raises(errors.FencedInstanceId):
        bench.sync("a", generation, instance="2")


def test_an_operator_removes_a_static_member_by_its_instance() -> None:
    bench, _ = static_group()
    assert bench.leave("", instance="1") == [0]
    assert set(bench.group.members) == {"b"}
    assert bench.leave("", instance="1") == [errors.UnknownMemberId.code]


def test_a_static_leader_that_starts_again_gets_the_members_and_computes_nothing() -> None:
    """KIP-814: it goes on watching their topics, from what the assignment comprises."""
    bench = Bench()
    bench.join("a", instance="1")
    bench.join("b", topics=["t", "u"])
    bench.join("a", bench.group.generation, instance="1")
    assert bench.group.metadata.leader == "a"
    generation = bench.group.generation
    bench.sync("a", generation, {"a": KEYS[:2], "b": KEYS[2:3]}, instance="1")
    reply = bench.join("a2", instance="1")
    assert bench.group.state is GroupState.STABLE
    assert reply.leader == "a2"
    assert reply.skip_assignment
    assert {each.member_id: list(each.subscription.topics) for each in reply.members} == {
        "a2": ["t"],
        "b": ["t", "u"],
    }
    assert [(each.topic_id, each.partitions) for each in reply.assigned] == [(TOPIC_ID, 3)]
    assert bench.join("b", topics=["t", "u"]).members == []


def test_partitions_of_a_deleted_topic_are_left_out_of_an_assignment() -> None:
    """The leader saw the topic; it was deleted before the sync.  The group goes on."""
    bench = Bench()
    bench.join("a", topics=["t", "u"])
    generation = bench.group.generation
    bench.image = image_of(t=(TOPIC_ID, 4))
    gone = PartitionKey(OTHER_ID, 0)
    reply = bench.sync("a", generation, {"a": [*KEYS, gone]})
    assert [(each.topic_id, len(each.partitions)) for each in reply.partitions] == [(TOPIC_ID, 4)]
    assert bench.group.state is GroupState.STABLE
    assert gone not in bench.group.owners


def test_the_members_of_a_group_fit_into_the_reply_of_their_leader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "GROUP_MEMBERS_BYTES_MAX", 1_000)
    bench = Bench()
    topics = [f"topic-{number:03}" for number in range(30)]
    bench.join("a", topics=topics)
    bench.join("b", topics=topics)
    with pytest.raises(errors.GroupMaxSizeReached, match="subscriptions"):
        bench.join("c", topics=topics)
    sent = wire.JoinGroupReply()
    for name, each in bench.group.members.items():
        sent.members.add(member_id=name, subscription=each.subscription)
    assert sent.ByteSize() <= bench.group.members_bytes <= 1_000
    bench.leave(*bench.group.members)
    assert bench.group.members_bytes == 0
    assert not bench.group.assignors


def test_a_member_may_be_due_twice() -> None:
    """Its session and its time to sync ended in the same tick."""
    bench = Bench()
    bench.stable("a", "b")
    assert bench.expire("b", "b") == 1
    assert set(bench.group.members) == {"a"}
