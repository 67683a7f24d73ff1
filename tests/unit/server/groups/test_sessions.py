"""Sessions of members and timeouts of rebalances (server/groups/sessions)."""

from __future__ import annotations

from pk.server.groups.groups import ConsumerGroup
from pk.server.groups.sessions import Due, MemberSessions
from pk.server.groups.state import GroupMetadata, GroupState, Member
from pk.wire import pk_pb2 as wire

S = GroupState


def member(name: str, instance: str = "", rebalance_ms: int = 5_000) -> Member:
    return Member(name, instance, "", 1_000, rebalance_ms, (), wire.GroupSubscription())


def group(
    state: GroupState, *members: Member, generation: int = 1, initial: bool = False
) -> ConsumerGroup:
    found = ConsumerGroup("g")
    found.metadata = GroupMetadata("g", state, generation, initial=initial)
    found.members = {each.member_id: each for each in members}
    return found


def test_a_session_counts_from_the_last_request() -> None:
    sessions = MemberSessions(0)
    sessions.update("g", group(S.STABLE, member("a"), member("b")), 0)
    sessions.heard("g", "a", 600)
    assert sessions.due(999) == Due([], [])
    assert sessions.due(1_000) == Due([("g", "b")], [])
    assert sessions.due(1_599) == Due([], [])
    assert sessions.due(1_600) == Due([("g", "a")], [])
    assert sessions.last_heard("g", "a") == 600


def test_a_member_that_is_still_there_is_due_again_later() -> None:
    """The command that removes it failed, for example with a full disk."""
    sessions = MemberSessions(0)
    sessions.update("g", group(S.STABLE, member("a")), 0)
    assert sessions.due(1_000).expired == [("g", "a")]
    assert sessions.due(1_999).expired == []
    assert sessions.due(2_000).expired == [("g", "a")]


def test_a_removed_member_is_forgotten() -> None:
    sessions = MemberSessions(0)
    sessions.update("g", group(S.STABLE, member("a"), member("b")), 0)
    sessions.update("g", group(S.STABLE, member("b")), 500)
    sessions.heard("g", "b", 500)
    assert sessions.due(1_200) == Due([], [])
    assert sessions.last_heard("g", "a") is None
    sessions.update("g", None, 1_200)
    assert sessions.due(9_000) == Due([], [])


def test_a_join_phase_ends_after_the_longest_rebalance_timeout() -> None:
    sessions = MemberSessions(0)
    waiting = group(S.PREPARING_REBALANCE, member("a"), member("b", rebalance_ms=7_000))
    sessions.update("g", waiting, 0)
    for at_ms in range(0, 7_000, 500):
        sessions.heard("g", "a", at_ms)
        sessions.heard("g", "b", at_ms)
        sessions.update("g", waiting, at_ms)
        assert sessions.due(at_ms) == Due([], [])
    assert sessions.due(7_000).joins == [("g", 1)]
    assert sessions.due(7_100).joins == []


def test_the_first_rebalance_waits_again_for_each_further_member() -> None:
    sessions = MemberSessions(300)
    waiting = group(S.PREPARING_REBALANCE, member("a", rebalance_ms=900), initial=True)
    sessions.update("g", waiting, 0)
    sessions.update("g", waiting, 200)
    assert sessions.due(499).joins == []
    assert sessions.due(500).joins == [("g", 1)]
    other = MemberSessions(300)
    for at_ms in range(0, 900, 100):
        other.update("g", waiting, at_ms)
        assert other.due(at_ms).joins == []
    assert other.due(900).joins == [("g", 1)], "at most the rebalance timeout"


def test_a_member_that_does_not_sync_is_due_at_the_rebalance_timeout() -> None:
    sessions = MemberSessions(0)
    here = (member("a"), member("b"), member("s", "static"))
    sessions.update("g", group(S.COMPLETING_REBALANCE, *here), 0)
    sessions.synced("g", "a")
    sessions.update("g", group(S.STABLE, *here), 100)
    for each in here:
        sessions.heard("g", each.member_id, 4_900)
    assert sessions.due(4_999) == Due([], [])
    assert sessions.due(5_000) == Due([("g", "b")], [])


def test_all_have_synced() -> None:
    sessions = MemberSessions(0)
    sessions.update("g", group(S.COMPLETING_REBALANCE, member("a")), 0)
    sessions.synced("g", "a")
    sessions.update("g", group(S.STABLE, member("a")), 100)
    sessions.heard("g", "a", 4_900)
    assert sessions.due(5_000) == Due([], [])


def test_after_a_replay_everything_has_its_whole_time() -> None:
    sessions = MemberSessions(0)
    waiting = group(S.PREPARING_REBALANCE, member("a", rebalance_ms=900))
    sessions.update("g", waiting, 0)
    sessions.restart({"g": waiting}, 800)
    assert sessions.due(1_699) == Due([], [])
    assert sessions.due(1_800) == Due([("g", "a")], [("g", 1)])


def test_a_member_whose_request_waits_keeps_its_session() -> None:
    """server/groups/sessions A1: the high watermark stands still for longer than the session."""
    sessions = MemberSessions(0)
    sessions.update("g", group(S.STABLE, member("a")), 0)
    sessions.asks("g", "a", 500)
    sessions.asks("g", "a", 600)
    assert sessions.due(5_000) == Due([], [])
    sessions.answered("g", "a", 5_100)
    assert sessions.due(6_200) == Due([], []), "the other one waits"
    sessions.answered("g", "a", 6_300)
    assert sessions.due(7_299) == Due([], [])
    assert sessions.due(8_300) == Due([("g", "a")], [])


def test_a_member_whose_sync_waits_is_not_late() -> None:
    sessions = MemberSessions(0)
    members = member("a", rebalance_ms=700), member("b", rebalance_ms=700)
    sessions.update("g", group(S.COMPLETING_REBALANCE, *members), 0)
    sessions.asks("g", "a", 600)
    sessions.heard("g", "b", 600)
    assert sessions.due(699) == Due([], [])
    assert sessions.due(700) == Due([("g", "b")], [])
    sessions.answered("g", "a", 1_000)
    sessions.heard("g", "a", 1_500)
    sessions.heard("g", "b", 1_500)
    assert sessions.due(1_700).expired == [("g", "a"), ("g", "b")], "they have no assignment"
