"""The states of a local replica: every pair of state and event is checked with the table."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from pk import errors
from pk.server.replica import state as states
from pk.server.replica.state import (
    HISTORY_MAX,
    MEANINGS,
    ONLINE,
    OPEN,
    REASONS,
    TRANSITIONS,
    WITH_CAUSE,
    HostedReplica,
    HostedReplicas,
    IllegalTransition,
    ReplicaEvent,
    ReplicaState,
)
from pk.types import PartitionKey

KEY = PartitionKey("11111111-1111-4111-8111-111111111111", 3)
DAMAGED = errors.CorruptLog("a batch of t-3 is damaged")
PAIRS = [(state, event) for state in ReplicaState for event in ReplicaEvent]


def paths() -> dict[ReplicaState, list[ReplicaEvent]]:
    """Return a shortest path from ABSENT to each state."""
    found: dict[ReplicaState, list[ReplicaEvent]] = {ReplicaState.ABSENT: []}
    waiting = deque(found)
    while waiting:
        at = waiting.popleft()
        for (before, event), after in TRANSITIONS.items():
            if before is at and after not in found:
                found[after] = [*found[at], event]
                waiting.append(after)
    return found


def in_state(state: ReplicaState) -> HostedReplicas:
    """Return a broker whose replica of KEY is in `state`."""
    replicas = HostedReplicas()
    for event in paths()[state]:
        take(replicas, event)
    assert replicas.state(KEY) is state
    return replicas


def take(replicas: HostedReplicas, event: ReplicaEvent, key: PartitionKey = KEY) -> HostedReplica:
    after = TRANSITIONS[replicas.state(key), event]
    return replicas.on(key, event, DAMAGED if after in WITH_CAUSE else None)


@pytest.mark.parametrize(
    ("state", "event"), PAIRS, ids=[f"{state.name}-{event.name}" for state, event in PAIRS]
)
def test_every_event_in_every_state(state: ReplicaState, event: ReplicaEvent) -> None:
    """An edge of the table is taken; a missing edge raises an error that explains it, and changes
    nothing.
    """
    replicas = in_state(state)
    before = replicas.get(KEY)
    after = TRANSITIONS.get((state, event))
    if after is not None:
        taken = take(replicas, event)
        assert taken.state is replicas.state(KEY) is after
        assert (taken.cause is not None) == (after in WITH_CAUSE)
        assert (KEY in replicas.unopened()) == (after is ReplicaState.UNOPENED)
        assert (taken in list(replicas)) == (after is not ReplicaState.ABSENT)
        return
    with pytest.raises(IllegalTransition) as refused:
        replicas.on(KEY, event, DAMAGED)
    story = str(refused.value)
    assert f"of topic {KEY.topic_id} is {state.name}" in story
    assert f"no transition for {event.name}" in story
    assert REASONS[event] in story
    assert all(before.name in story for before, what in TRANSITIONS if what is event)
    assert (replicas.get(KEY), replicas.state(KEY)) == (before, state)


def test_the_story_tells_how_the_replica_came_there_and_its_cause() -> None:
    replicas = in_state(ReplicaState.LEADING)
    replicas.on(KEY, ReplicaEvent.FAILED, DAMAGED)
    with pytest.raises(IllegalTransition) as refused:
        replicas.on(KEY, ReplicaEvent.ELECTED)
    assert "is OFFLINE (CorruptLog: a batch of t-3 is damaged)" in str(refused.value)
    assert "needs UNATTACHED or LEADING" in str(refused.value)
    past = "ABSENT OPENED, UNATTACHED ELECTED, LEADING FAILED"
    assert f"Before: {past}." in str(refused.value)


def test_the_history_of_a_replica_is_bounded() -> None:
    replicas = in_state(ReplicaState.UNATTACHED)
    for _ in range(HISTORY_MAX):
        replicas.on(KEY, ReplicaEvent.FOLLOWED)
        replicas.on(KEY, ReplicaEvent.DETACHED)
    with pytest.raises(IllegalTransition) as refused:
        replicas.on(KEY, ReplicaEvent.OPENED)
    assert str(refused.value).count("FOLLOWED") == HISTORY_MAX // 2


def test_the_table_is_whole() -> None:
    """Every state can be reached and left for ABSENT, every event has an edge, and all have a
    text.
    """
    assert set(paths()) == set(ReplicaState)
    assert {event for _, event in TRANSITIONS} == set(ReplicaEvent)
    assert set(MEANINGS) == set(ReplicaState)
    assert set(REASONS) == set(ReplicaEvent)
    ends = {ReplicaState.ABSENT}
    while more := {before for (before, _), after in TRANSITIONS.items() if after in ends} - ends:
        ends |= more
    assert ends == set(ReplicaState)


def test_what_is_asked_of_a_state() -> None:
    """replica/state H2; a replica that is removed keeps the reason for its removal."""
    for state in ReplicaState:
        replica = in_state(state).get(KEY) or HostedReplica(KEY)
        assert replica.online == (state in ONLINE)
        assert replica.lost == (state in (ReplicaState.RECOVERING, ReplicaState.OFFLINE))
        assert replica.rebuildable == (state in WITH_CAUSE)
    replicas, gone = in_state(ReplicaState.LEADING), errors.UnknownTopicId("deleted")
    removed = replicas.on(KEY, ReplicaEvent.REMOVED, gone)
    assert (removed.state, removed.cause) == (ReplicaState.ABSENT, gone)
    assert not removed.online


@pytest.mark.parametrize(
    ("cause", "lost", "rebuildable"),
    [
        (errors.CorruptLog("damaged"), True, True),
        (errors.StorageFailed("gone"), True, False),
        (errors.LogMissing("missing"), False, True),
        (errors.StorageFull("full"), False, False),
        (errors.TierUnavailable("away"), False, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_cause_says(cause: errors.PkError, lost: bool, rebuildable: bool) -> None:
    """Rules L2, L9, L15: which causes are reported, and which another replica can mend."""
    replicas = in_state(ReplicaState.RECOVERING)
    failed = replicas.on(KEY, ReplicaEvent.RECOVERY_FAILED, cause)
    assert (failed.lost, failed.rebuildable) == (lost, rebuildable)


def test_a_state_with_a_cause_is_not_entered_without_one() -> None:
    for (before, event), after in TRANSITIONS.items():
        if after in WITH_CAUSE:
            with pytest.raises(AssertionError, match="needs a cause"):
                in_state(before).on(KEY, event)


@pytest.mark.parametrize("state", [each for each in OPEN if each not in ONLINE])
def test_the_next_log_has_a_state_of_its_own(state: ReplicaState) -> None:
    """replica/state H3: code that still holds the log that was set aside learns why it is not
    served.
    """
    replicas = in_state(state)
    old: Any = replicas.get(KEY)
    replicas.on(KEY, ReplicaEvent.SET_ASIDE)
    new = replicas.on(KEY, ReplicaEvent.OPENED)
    assert new is replicas.get(KEY)
    assert (old.state, old.cause, new.state, new.cause) == (
        state, DAMAGED, ReplicaState.UNATTACHED, None,
    )  # fmt: skip


def test_unopened_replicas_stand_in_the_order_of_their_failures() -> None:
    """They are tried again in that order; another failure of one of them does not change it."""
    replicas = HostedReplicas()
    keys = [PartitionKey(KEY.topic_id, number) for number in range(3)]
    for key in keys:
        replicas.on(key, ReplicaEvent.OPENED)
    for key in reversed(keys):
        replicas.on(key, ReplicaEvent.FAILED, DAMAGED)
        replicas.on(key, ReplicaEvent.SET_ASIDE)
        replicas.on(key, ReplicaEvent.OPEN_FAILED, DAMAGED)
    again = errors.StorageFull("full")
    replicas.on(keys[2], ReplicaEvent.OPEN_FAILED, again)
    assert list(replicas.unopened()) == keys[::-1]
    assert (replicas.why_unopened(keys[2]), replicas.why_unopened(keys[0])) == (again, DAMAGED)


def test_only_a_replica_without_an_open_log_is_forgotten() -> None:
    for state in ReplicaState:
        replicas = in_state(state)
        replicas.forget(KEY)
        assert (replicas.state(KEY) is ReplicaState.ABSENT) == (state not in OPEN)


def test_a_removed_replica_is_awaited_by_no_leader() -> None:
    """broker/metadata_publisher M8: the next replica of the partition begins with the next leader
    epoch; a replica that was compared is not awaited any more.
    """
    replicas = in_state(ReplicaState.FOLLOWING)
    replicas.uncompared[KEY] = 5
    assert (replicas.compared(KEY), replicas.compared(KEY)) == (True, False)
    replicas.uncompared[KEY] = 5
    replicas.on(KEY, ReplicaEvent.DETACHED)
    assert replicas.uncompared == {KEY: 5}
    replicas.on(KEY, ReplicaEvent.REMOVED)
    assert not replicas.uncompared


def test_a_log_that_was_replaced_changes_no_state(rig: Any) -> None:
    """replica/state H3: its tasks may still run, and the state is that of the next log."""
    old = rig.partition()
    rig.core.partitions.pop(old.key)
    old.fail(errors.UnknownTopicId("removed"), ReplicaEvent.REMOVED)
    new = rig.partition()
    with pytest.raises(IllegalTransition, match="t-0: FAILED of a log that was removed"):
        old.fail(DAMAGED)
    assert new.state is ReplicaState.LEADING


def test_an_absent_edge_raises_though_the_table_had_it_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The code runs on the table; the table is not only a description."""
    replicas = in_state(ReplicaState.UNATTACHED)
    monkeypatch.delitem(states.TRANSITIONS, (ReplicaState.UNATTACHED, ReplicaEvent.ELECTED))
    with pytest.raises(IllegalTransition):
        replicas.on(KEY, ReplicaEvent.ELECTED)
