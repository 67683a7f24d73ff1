"""The quorum machine step by step; whole histories are in test_machine_histories.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.effects import Effect, Level, Publish, Respond, Send, SetTimer, Write
from pk.log.divergence import EpochEnd
from pk.server.raft import messages as say
from pk.server.raft.machine import ELECTION, FETCH, TICK, Quorum, Role
from pk.server.raft.messages import (
    BeginEpoch,
    Fetch,
    FetchReply,
    FetchStatus,
    Leadership,
    LogState,
    ReplyReceived,
    RequestReceived,
    SaveVote,
    SelfVoted,
    Started,
    Synced,
    TimerFired,
    Vote,
    Voter,
    VoteReply,
    VoteRequest,
    VotersAt,
)
from pk.server.raft.snapshot_id import SnapshotId
from pk.server.raft.timing import Timing
from pk.types import NONE, EpochStart

ME, B, C = Voter(1, "d1"), Voter(2, "d2"), Voter(3, "d3")
TIMING = Timing()


def log_of(
    end: int, *epochs: tuple[int, int], voters: tuple[Voter, ...] = (ME, B, C), **more: Any
) -> LogState:
    starts = tuple(EpochStart(*each) for each in epochs)
    return LogState(end, starts, (VotersAt(NONE, voters),), **more)


def started(log: LogState, saved: Vote | None = None) -> tuple[Quorum, Sequence[Effect]]:
    quorum = Quorum(ME, TIMING, random.Random(1))
    return quorum, quorum.step(Started(saved or Vote(), log), 0)


def flat(effects: Sequence[Effect]) -> list[Effect]:
    """Return the effects, including those that follow on writes."""
    found: list[Effect] = []
    for effect in effects:
        found.append(effect)
        if isinstance(effect, Write):
            found += flat(effect.then)
    return found


def published(effects: Sequence[Effect], name: str) -> list[Any]:
    return [e.value for e in flat(effects) if isinstance(e, Publish) and e.name == name]


def sent(effects: Sequence[Effect], kind: type) -> list[Any]:
    return [e.message for e in flat(effects) if isinstance(e, Send) and isinstance(e.message, kind)]


def answers(effects: Sequence[Effect]) -> list[Any]:
    return [e.reply for e in flat(effects) if isinstance(e, Respond)]


def granted(quorum: Quorum, voter: Voter, *, pre_vote: bool) -> Sequence[Effect]:
    reply = VoteReply(voter, quorum.epoch, None, True, pre_vote, quorum.epoch)
    return quorum.step(ReplyReceived(reply), 0)


def leading(log: LogState) -> Quorum:
    quorum, _ = started(log)
    quorum.step(TimerFired(ELECTION), 0)
    granted(quorum, B, pre_vote=True)
    quorum.step(SelfVoted(quorum.epoch), 0)
    granted(quorum, B, pre_vote=False)
    assert quorum.role is Role.LEADER
    return quorum


def test_one_voter_elects_itself_at_once_by_the_general_case() -> None:
    """Q4, raft/machine U1: its vote is SYNCED before it counts."""
    quorum, effects = started(log_of(10, (7, 3), voters=(ME,)), Vote(7, 1, "d1"))
    (write,) = [e for e in effects if isinstance(e, Write)]
    assert write.ops == [SaveVote(Vote(8, 1, "d1"))]
    assert write.level is Level.SYNCED
    assert quorum.role is Role.CANDIDATE
    (vote,) = published(effects, say.SELF)
    effects = quorum.step(vote, 0)
    assert published(effects, say.LEADERSHIP) == [Leadership(8, ME, 10)]
    (begin,) = [e for e in effects if isinstance(e, Write)]
    assert begin.ops == [BeginEpoch(ME, 8, (ME,))]


@pytest.mark.parametrize(("saved", "last", "epoch"), [(0, 0, 1), (3, 9, 10), (9, 3, 10)])
def test_an_epoch_is_never_used_twice(saved: int, last: int, epoch: int) -> None:
    epochs = [(last, 0)] if last else []
    quorum, _ = started(log_of(5, *epochs, voters=(ME,)), Vote(saved))
    assert quorum.epoch == epoch


def test_an_election_is_tried_out_before_an_epoch_is_spent_on_it() -> None:
    """KIP-996: pre-votes come before an election."""
    quorum, _ = started(log_of(0))
    effects = quorum.step(TimerFired(ELECTION), 5_000)
    assert [(ask.pre_vote, ask.epoch) for ask in sent(effects, VoteRequest)] == [(True, 0)] * 2
    assert not [e for e in effects if isinstance(e, Write)]
    stranger = Voter(2, "another directory")
    assert not sent(granted(quorum, stranger, pre_vote=True), VoteRequest)  # raft/machine U4
    effects = granted(quorum, B, pre_vote=True)
    assert [(ask.pre_vote, ask.epoch) for ask in sent(effects, VoteRequest)] == [(False, 1)] * 2
    assert quorum.role is Role.CANDIDATE
    assert granted(quorum, C, pre_vote=True) == []  # late: of the round before
    assert quorum.role is Role.CANDIDATE


def vote_for(voter: Voter, epoch: int, **more: Any) -> RequestReceived:
    ask = {"last_epoch": 9, "log_end": 99, "to": ME, **more}
    return RequestReceived("request", VoteRequest(voter, epoch, **ask))


def test_one_vote_an_epoch_and_it_is_synced_first() -> None:
    quorum, _ = started(log_of(0))
    effects = quorum.step(vote_for(B, 3), 0)
    writes = [e for e in effects if isinstance(e, Write) and e.then]
    assert writes[-1].ops == [SaveVote(Vote(3, 2, "d2"))]
    assert answers(writes[-1].then)[0].granted
    assert not answers(quorum.step(vote_for(C, 3), 0))[0].granted
    (again,) = [e for e in quorum.step(vote_for(B, 3), 0) if isinstance(e, Write)]
    assert answers(again.then)[0].granted, "behind the write of the vote it repeats"


@pytest.mark.parametrize(
    ("last_epoch", "log_end", "expected"),
    [(4, 20, True), (4, 21, True), (5, 3, True), (4, 19, False), (3, 99, False)],
)
def test_a_vote_wants_a_log_as_long(last_epoch: int, log_end: int, expected: bool) -> None:
    """Raft §5.4.1, for votes and pre-votes alike."""
    for pre_vote in (False, True):
        quorum, _ = started(log_of(20, (1, 0), (4, 10)))
        ask = vote_for(B, 6, last_epoch=last_epoch, log_end=log_end, pre_vote=pre_vote)
        (reply,) = answers(quorum.step(ask, 0))
        assert (reply.granted, reply.pre_vote) == (expected, pre_vote)


def test_a_vote_for_the_directory_that_was_here_is_refused() -> None:
    """Q1: a node with an empty disk must not vote in the name of the lost disk."""
    quorum, _ = started(log_of(0))
    (reply,) = answers(quorum.step(vote_for(B, 3, to=Voter(1, "lost")), 0))
    assert not reply.granted


def following(now_ms: int = 0) -> Quorum:
    quorum, _ = started(log_of(20, (1, 0), (4, 10)))
    quorum.step(RequestReceived("r", say.BeginQuorumEpoch(B, 6, ME)), now_ms)
    assert quorum.role is Role.FOLLOWER
    return quorum


def test_who_hears_a_leader_wants_no_election() -> None:
    """raft/machine U7: it refuses pre-votes only as long as it is in contact with the leader."""
    quorum = following(1_000)
    (reply,) = answers(quorum.step(vote_for(C, 6, pre_vote=True), 2_000))
    assert (reply.granted, reply.leader) == (False, B)
    (reply,) = answers(quorum.step(vote_for(C, 6, pre_vote=True), 1_000 + TIMING.fetch_ms))
    assert (reply.granted, reply.leader) == (True, None)


def fetched(quorum: Quorum, status: FetchStatus, **more: Any) -> ReplyReceived:
    asked = quorum._fetching
    assert asked is not None
    more = {"end": asked.offset, **more}
    reply = FetchReply(B, quorum.epoch, B, status, asked.number, asked.offset, **more)
    return ReplyReceived(reply)


def test_a_follower_writes_before_it_says_that_it_holds() -> None:
    """raft/machine U6, U1: nothing is fetched or confirmed while the log is written."""
    quorum = following()
    effects = quorum.step(fetched(quorum, FetchStatus.DATA, end=25, high_watermark=24), 10)
    (write,) = [e for e in effects if isinstance(e, Write)]
    assert isinstance(write.ops[0], say.AppendFetched)
    assert not sent(effects, Fetch)
    quorum.step(TimerFired(FETCH), 9_000)
    assert quorum.role is Role.UNATTACHED, "it may not stand now"
    assert not sent(quorum.step(TimerFired(ELECTION), 9_500), VoteRequest)
    log = log_of(25, (1, 0), (4, 10), (6, 20))
    quorum.step(Synced(log, write.ops[0].job), 9_600)
    assert sent(quorum.step(TimerFired(ELECTION), 12_000), VoteRequest)


def test_a_follower_commits_what_it_holds_of_what_is_committed() -> None:
    quorum = following()
    effects = quorum.step(fetched(quorum, FetchStatus.DATA, end=25, high_watermark=30), 10)
    job = next(e.ops[0].job for e in effects if isinstance(e, Write))
    effects = quorum.step(Synced(log_of(25, (1, 0), (4, 10), (6, 20)), job), 20)
    assert published(effects, say.HIGH_WATERMARK) == [25]
    (fetch,) = sent(effects, Fetch)
    assert (fetch.offset, fetch.last_epoch) == (25, 6)


@pytest.mark.parametrize(
    ("diverging", "to"),
    [((4, 15), 15), ((2, 14), 10), ((1, 5), 5), ((4, 40), 20)],
)
def test_a_follower_goes_back_to_where_both_logs_agree(diverging: tuple[int, int], to: int) -> None:
    quorum = following()
    told = fetched(quorum, FetchStatus.DIVERGING, diverging=EpochEnd(*diverging))
    (write,) = [e for e in quorum.step(told, 10) if isinstance(e, Write)]
    assert isinstance(write.ops[0], say.TruncateTo)
    assert write.ops[0].end == to


def test_never_below_the_high_watermark() -> None:
    # raft/machine U5
    quorum = following()
    quorum.step(fetched(quorum, FetchStatus.DATA, high_watermark=12), 10)
    assert quorum.high_watermark == 12
    with pytest.raises(AssertionError):
        quorum.step(fetched(quorum, FetchStatus.DIVERGING, diverging=EpochEnd(1, 5)), 20)


def test_only_the_answer_to_the_last_fetch_counts() -> None:
    """A doubled answer would be appended twice, or start a second sequence of fetches."""
    quorum = following()
    old = fetched(quorum, FetchStatus.DATA, high_watermark=5)
    assert sent(quorum.step(old, 10), Fetch)
    assert quorum.step(old, 11) == []


def test_who_is_told_of_no_leader_by_its_leader_looks_for_another() -> None:
    quorum = following()
    asked = quorum._fetching
    assert asked is not None
    gone = FetchReply(B, 6, None, FetchStatus.NOT_LEADER, asked.number, asked.offset)
    quorum.step(ReplyReceived(gone), 10)
    assert quorum.role is Role.UNATTACHED
    rumour = VoteReply(C, 6, B, False, True, 6)  # a voter that does not know the leader yet
    quorum.step(ReplyReceived(rumour), 20)
    assert quorum._live_leader(21) is None, "a rumour is no sign of life"


def fetch_of(
    voter: Voter, epoch: int, offset: int, last_epoch: int, number: int = 1
) -> RequestReceived:
    return RequestReceived(voter, Fetch(voter, epoch, offset, last_epoch, 0, number))


def test_nothing_of_older_epochs_is_committed_alone() -> None:
    """raft/machine U3 (Raft §5.4.2, figure 8): a majority has the records, and they may still be
    overwritten.
    """
    quorum = leading(log_of(20, (1, 0), (4, 10)))
    epoch = quorum.epoch
    quorum.step(fetch_of(B, epoch, 20, 4), 0)
    quorum.step(fetch_of(C, epoch, 20, 4), 0)
    assert quorum.high_watermark == 0
    quorum.step(Synced(log_of(22, (1, 0), (4, 10), (epoch, 20))), 0)
    assert quorum.high_watermark == 0
    effects = quorum.step(fetch_of(C, epoch, 22, epoch, 2), 0)
    assert published(effects, say.HIGH_WATERMARK) == [22]


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(21, 40)), max_size=30))
def test_the_high_watermark_is_what_a_majority_holds(steps: list[tuple[int, int]]) -> None:
    """raft/machine U2, compared with the naive definition."""
    quorum = leading(log_of(20, (1, 0), (4, 10)))
    epoch = quorum.epoch
    quorum.step(Synced(log_of(40, (1, 0), (4, 10), (epoch, 20))), 0)
    ends = {ME: 40, B: 0, C: 0}
    for number, (who, offset) in enumerate(steps, 2):
        voter = (B, C)[who]
        offset = max(offset, ends[voter])
        before = quorum.high_watermark
        quorum.step(fetch_of(voter, epoch, offset, epoch, number), 0)
        ends[voter] = offset
        held = max(o for o in range(41) if sum(e >= o for e in ends.values()) >= 2)
        assert quorum.high_watermark == (held if held > 20 else 0) >= before


@pytest.mark.parametrize(
    ("offset", "last_epoch", "expected"),
    [
        (20, 4, None),
        (15, 4, None),
        (10, 1, None),
        (25, 4, EpochEnd(4, 20)),
        (12, 1, EpochEnd(1, 10)),
        (22, 5, EpochEnd(4, 20)),
        (12, 3, EpochEnd(1, 10)),
    ],
)
def test_a_fetch_learns_where_the_logs_diverge(
    offset: int, last_epoch: int, expected: EpochEnd | None
) -> None:
    quorum = leading(log_of(20, (1, 0), (4, 10)))
    effects = quorum.step(fetch_of(B, quorum.epoch, offset, last_epoch), 0)
    found = [r.diverging for r in answers(effects) if r.status is FetchStatus.DIVERGING]
    assert found == ([] if expected is None else [expected])


@pytest.mark.parametrize(
    ("offset", "last_epoch", "snapshot"),
    [(5, 1, True), (10, 1, False), (10, 0, True), (10, 3, True), (12, 4, False)],
)
def test_what_only_a_snapshot_holds_is_had_from_there(
    offset: int, last_epoch: int, snapshot: bool
) -> None:
    base = SnapshotId(10, 1)
    quorum = leading(log_of(20, (4, 10), base=base, snapshot=base))
    effects = quorum.step(fetch_of(B, quorum.epoch, offset, last_epoch), 0)
    found = [r.snapshot for r in answers(effects) if r.status is FetchStatus.SNAPSHOT]
    assert found == ([base] if snapshot else [])


def test_a_leader_without_a_majority_steps_down() -> None:
    quorum = leading(log_of(0))
    assert quorum.step(TimerFired(TICK), 2_999)
    assert quorum.role is Role.LEADER
    effects = quorum.step(TimerFired(TICK), 3_001)
    assert quorum.role is Role.UNATTACHED
    assert published(effects, say.LEADERSHIP) == [Leadership(1, None)]
    assert [op for e in effects if isinstance(e, Write) for op in e.ops] == [say.StopLeading(1)]


def test_a_fetch_waits_for_news_and_not_for_ever() -> None:
    quorum = leading(log_of(0))
    effects = quorum.step(fetch_of(B, 1, 0, 0), 100)
    assert not answers(effects)
    due = [e.at_ms for e in effects if isinstance(e, SetTimer) and e.key == "waiting"]
    assert due == [100 + TIMING.wait_ms]
    (reply,) = answers(quorum.step(TimerFired("waiting"), 100 + TIMING.wait_ms))
    assert (reply.status, reply.end) == (FetchStatus.DATA, 0)
    quorum.step(fetch_of(B, 1, 0, 0, 2), 700)
    (reply,) = answers(quorum.step(Synced(log_of(2, (1, 0))), 800))
    assert (reply.number, reply.end) == (2, 2)


def test_voters_change_one_at_a_time_and_not_before_the_epoch_has_committed() -> None:
    """KIP-853: without the second rule two majorities without a common voter could exist."""
    quorum = leading(log_of(0))
    four = (ME, B, C, Voter(4, "d4"))
    change = say.VotersChange("ask", four)
    (refusal,) = answers(quorum.step(change, 0))
    assert isinstance(refusal, errors.ControllerUnavailable)
    quorum.step(Synced(log_of(2, (1, 0))), 0)
    quorum.step(fetch_of(B, 1, 2, 1), 0)
    (refusal,) = answers(quorum.step(say.VotersChange("two", (ME,)), 0))
    assert isinstance(refusal, errors.InvalidRequest)
    effects = quorum.step(change, 0)
    assert [op for e in effects if isinstance(e, Write) for op in e.ops] == [
        say.AppendVoters(1, four)
    ]
    (refusal,) = answers(quorum.step(say.VotersChange("too soon", (ME, B)), 0))
    assert isinstance(refusal, errors.ControllerUnavailable)
    log = LogState(3, (EpochStart(1, 0),), (VotersAt(NONE, (ME, B, C)), VotersAt(2, four)))
    quorum.step(Synced(log), 0)
    assert quorum.majority == 3
    assert not answers(quorum.step(fetch_of(B, 1, 3, 1, 2), 0))[1:]
    assert quorum.high_watermark == 2, "three of four must hold it"
    assert None in answers(quorum.step(fetch_of(C, 1, 3, 1, 2), 0))


def test_other_voters_are_confirmed_when_their_own_record_is_committed() -> None:
    """KIP-853: records that were decided before it may still be on their way to the disk."""
    quorum = leading(log_of(0))
    quorum.step(Synced(log_of(2, (1, 0))), 0)
    quorum.step(fetch_of(B, 1, 2, 1), 0)
    two = (ME, B)
    quorum.step(say.VotersChange("ask", two), 0)
    quorum.step(Synced(log_of(5, (1, 0))), 0)
    effects = [*quorum.step(fetch_of(B, 1, 5, 1, 2), 0)]
    assert quorum.high_watermark == 5
    assert None not in answers(effects), "its record is not even written"
    (refusal,) = answers(quorum.step(say.VotersChange("too soon", (ME, C)), 0))
    assert isinstance(refusal, errors.ControllerUnavailable), "from the same voters: two at once"
    log = LogState(6, (EpochStart(1, 0),), (VotersAt(NONE, (ME, B, C)), VotersAt(5, two)))
    quorum.step(Synced(log), 0)
    assert None in answers(quorum.step(fetch_of(B, 1, 6, 1, 3), 0))


def test_who_is_out_by_a_record_that_nobody_else_has_leads_until_it_is_committed() -> None:
    """Raft §4.2.2: B is the only voter, and with its shorter log it can never win an election."""
    voters = (VotersAt(NONE, (ME, B)), VotersAt(3, (B,)))
    log = LogState(4, (EpochStart(1, 0),), voters)
    quorum, _ = started(log)
    (ask,) = sent(quorum.step(TimerFired(ELECTION), 0), VoteRequest)
    assert (ask.to, ask.pre_vote) == (B, True)
    granted(quorum, B, pre_vote=True)
    quorum.step(SelfVoted(quorum.epoch), 0)
    assert quorum.role is Role.CANDIDATE, "its own vote does not count"
    granted(quorum, B, pre_vote=False)
    assert quorum.role is Role.LEADER
    begun = (*log.epochs, EpochStart(2, 4))
    quorum.step(Synced(LogState(6, begun, (*voters, VotersAt(5, (B,))))), 0)
    effects = quorum.step(fetch_of(B, 2, 6, 2), 0)
    assert (quorum.high_watermark, quorum.role) == (6, Role.UNATTACHED)
    assert sent(effects, say.EndQuorumEpoch)
    assert not sent(quorum.step(TimerFired(ELECTION), 0), VoteRequest)


@pytest.mark.parametrize(("committed", "stands"), [(3, True), (4, False)])
def test_who_is_out_by_a_record_that_is_committed_never_stands(
    committed: int, stands: bool
) -> None:
    voters = (VotersAt(NONE, (ME, B, C)), VotersAt(3, (B, C)))
    snapshot = SnapshotId(committed, 1)
    quorum, _ = started(LogState(4, (EpochStart(1, 0),), voters, snapshot=snapshot))
    assert bool(sent(quorum.step(TimerFired(ELECTION), 0), VoteRequest)) == stands


def test_what_a_snapshot_was_made_of_is_known_to_be_committed() -> None:
    """This also holds if the log begins below the snapshot: it begins at the older of two."""
    older, newest = SnapshotId(5, 1), SnapshotId(8, 2)
    quorum, _ = started(log_of(10, (1, 0), (2, 6), base=older, snapshot=newest))
    assert quorum.high_watermark == 8
    effects = quorum.step(
        Synced(log_of(10, (1, 0), (2, 6), base=newest, snapshot=SnapshotId(9, 2))), 1
    )
    assert quorum.high_watermark == 9
    assert Publish(say.HIGH_WATERMARK, 9) in effects


def test_who_fetches_in_vain_is_heard() -> None:
    """The leader is also in touch with a voter whose fetch it answers with a snapshot id."""
    base = SnapshotId(5, 1)
    quorum, _ = started(log_of(7, (1, 5), base=base, snapshot=base))
    quorum.step(TimerFired(ELECTION), 0)
    quorum.step(ReplyReceived(VoteReply(B, 1, None, True, True, 1)), 0)
    quorum.step(SelfVoted(2), 0)
    quorum.step(ReplyReceived(VoteReply(B, 2, None, True, False, 2)), 0)
    assert quorum.role is Role.LEADER
    for now_ms in range(0, 20_000, 500):
        effects = quorum.step(RequestReceived("r", Fetch(B, 2, 2, 1, 0, now_ms)), now_ms)
        (reply,) = (each.reply for each in effects if isinstance(each, Respond))
        assert reply.status is FetchStatus.SNAPSHOT
        quorum.step(TimerFired(TICK), now_ms)
    assert quorum.role is Role.LEADER
    quorum.step(TimerFired(TICK), 25_000)
    assert quorum.role is Role.UNATTACHED
