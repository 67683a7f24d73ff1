"""The state machine of the metadata quorum on one node: leader, epoch, and committed records.

This is Raft with Kafka's choices.  Followers pull records (KIP-595).  A pre-vote precedes an
election (KIP-996).  Voters are (node id, directory id); they change one at a time, by a record that
counts from its append on (KIP-853).  A node that is not a voter is an observer: it fetches and
knows the leader, but it neither stands for election nor counts for majorities.  A voter that an
uncommitted record removes may still stand, because it may be the only node with that record (Raft
§4.2.2).  No code path depends on the number of voters: a single voter elects itself by its own
saved vote and commits by its own synced end (rule Q4).

    UNATTACHED ──election──► PROSPECTIVE ──majority would──► CANDIDATE ──majority did──► LEADER
        ▲  │                      ▲                              │                          │
        │  └─ a leader is known ─►│ FOLLOWER ◄── a leader is known ◄──────────────────────────┘
        │                         └── no fetch succeeded for fetch_ms            a later epoch
        └──── a later epoch without a known leader (from anywhere)

Invariants
  U1  A vote is SYNCED before it is sent.  A node votes once in an epoch, and a candidate never uses
      an epoch twice.  An epoch without a vote is written too, but the machine does not wait for
      that write.  Nothing is committed with the help of this node before it has SYNCED a record of
      the epoch, and that record names the epoch as well (U3).
  U2  The high watermark never moves back, and never passes the offset that a majority has SYNCED.
  U3  A leader commits nothing before a record of its own epoch is committed (Raft §5.4.2).
  U4  A voter is (node id, directory id): another directory is another voter (rule Q1).
  U5  A node never truncates its log below the high watermark.
  U6  A follower has at most one write to its log under way.  Meanwhile it neither fetches nor
      stands for election, because its messages would describe the log before the write.
  U7  A node that had recent contact with a live leader grants no pre-vote, so that a node which was
      cut off cannot depose the leader.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from typing import Any

from pk import errors
from pk.effects import Effect, Level, Publish, Respond, Send, SetTimer, Write
from pk.log.divergence import EpochEnd
from pk.log.epochs import LeaderEpochs
from pk.server.raft.divergence import common_end, find_divergence
from pk.server.raft.leader_state import LeaderState, Waiting
from pk.server.raft.messages import (
    HIGH_WATERMARK,
    LEADERSHIP,
    SELF,
    AppendFetched,
    AppendVoters,
    BeginEpoch,
    BeginQuorumEpoch,
    EndQuorumEpoch,
    Fetch,
    FetchReply,
    FetchStatus,
    Leadership,
    LoadSnapshot,
    LogState,
    QuorumEpochReply,
    RaftEvent,
    ReplyReceived,
    RequestReceived,
    Resign,
    SaveVote,
    SelfVoted,
    Started,
    StopLeading,
    Synced,
    TimerFired,
    TruncateTo,
    Unreachable,
    Vote,
    Voter,
    VoteReply,
    VoteRequest,
    VotersChange,
)
from pk.server.raft.snapshot_id import SnapshotId
from pk.server.raft.timing import Timing
from pk.server.raft.voting import Verdict, may_become_candidate, verdict

ELECTION, FETCH, AGAIN, TICK, WAITING = "election", "fetch", "again", "tick", "waiting"


class Role(enum.Enum):
    UNATTACHED = "unattached"
    PROSPECTIVE = "prospective"
    CANDIDATE = "candidate"
    FOLLOWER = "follower"
    LEADER = "leader"


class Quorum:
    """See the module."""

    def __init__(self, me: Voter, timing: Timing, rng: random.Random) -> None:
        self.me = me
        self.timing = timing
        self.role = Role.UNATTACHED
        self.vote = Vote()
        self.leader: Voter | None = None
        self.high_watermark = 0
        self.log = LogState()
        self.leader_state: LeaderState | None = None  #: while this node leads
        self._rng = rng
        self._epochs = LeaderEpochs()
        self._granted: dict[Voter, None] = {}
        self._started = False
        self._job = 0  #: the last write to the log that this machine requested
        self._writing = False  #: U6
        self._fetches = 0
        self._fetching: Fetch | None = None  #: the fetch under way
        self._leader_contact_ms = 0  #: follower: last answer of a leader that may live
        self._any_contact_ms: int | None = None  #: last answer of any leader; None = this node
        self._promised = 0  #: the leader's high watermark, behind records that are being written
        self._effects: list[Effect] = []

    # -- what others ask ---------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.vote.epoch

    @property
    def voters(self) -> tuple[Voter, ...]:
        """The voters of the last voters record in the log, committed or not."""
        return self.log.voters[-1].voters if self.log.voters else ()

    @property
    def majority(self) -> int:
        return len(self.voters) // 2 + 1

    def step(self, event: RaftEvent, now_ms: int) -> Sequence[Effect]:
        """Handle one event and return the effects.  Nothing else changes the state."""
        if isinstance(event, Started):
            self._start(event, now_ms)
        elif not self._started:
            return ()
        elif isinstance(event, RequestReceived):
            self._request_received(event, now_ms)
        elif isinstance(event, ReplyReceived):
            self._reply_received(event.message, now_ms)
        elif isinstance(event, Synced):
            self._synced(event, now_ms)
        elif isinstance(event, SelfVoted):
            if self.role is Role.CANDIDATE and event.epoch == self.epoch:
                self._grant(self.me, now_ms)
        elif isinstance(event, TimerFired):
            self._fired(event.key, now_ms)
        elif isinstance(event, Unreachable):
            self._unreachable(event, now_ms)
        elif isinstance(event, VotersChange):
            self._change_voters(event, now_ms)
        elif isinstance(event, Resign):
            self._resign(now_ms)
        effects, self._effects = self._effects, []
        return effects

    # -- roles -------------------------------------------------------------------------------------

    def _start(self, event: Started, now_ms: int) -> None:
        assert not self._started, "started twice"
        self._started = True
        self._know(event.log)
        self.high_watermark = self._sure_end()
        self.vote = event.saved
        if event.log.last_epoch > event.saved.epoch:
            self._enter(event.log.last_epoch)
        if self.voters == (self.me,):
            self._become_candidate(now_ms)  # no other node can lead
        else:
            self._arm(ELECTION, now_ms, self.timing.election_ms)
            self._look_for_leader()

    def _know(self, log: LogState) -> None:
        self.log = log
        self._epochs = LeaderEpochs(list(log.epochs))

    def _enter(self, epoch: int, then: Sequence[Effect] = (), vote: Voter | None = None) -> None:
        """Enter `epoch` with `vote`; perform `then` once both are SYNCED (U1)."""
        assert epoch >= self.epoch, (epoch, self.epoch)
        if vote is None:
            self.vote = Vote(epoch)
        else:
            self.vote = Vote(epoch, vote.node_id, vote.directory_id)
        self._effects.append(Write([SaveVote(self.vote)], Level.SYNCED, then))

    def _leave(self) -> None:
        """End the present role: cancel its timers and refuse its waiting requests."""
        state, self.leader_state = self.leader_state, None
        if state is not None:
            for each in state.waiting.values():
                self._respond(each.request, self._not_leader(each.fetch, None))
            if state.change is not None:
                refusal = errors.ControllerUnavailable("the leader changed meanwhile")
                self._effects.append(Respond(state.change[0], refusal))
            self._write(StopLeading(self._next_job()))
        self._granted = {}
        self._fetching = None
        self._promised = 0
        for key in (ELECTION, FETCH, AGAIN, TICK, WAITING):
            self._effects.append(SetTimer(key, None))

    def _detach(self, epoch: int, now_ms: int) -> None:
        """Become unattached: no leader is known in `epoch`."""
        led = self.role is Role.LEADER
        knew = self.leader
        self._leave()
        if epoch > self.epoch:
            self._enter(epoch)
        self.role, self.leader = Role.UNATTACHED, None
        if led or knew is not None:
            self._publish_leadership()
        self._arm(ELECTION, now_ms, self.timing.election_ms)
        self._look_for_leader()

    def _follow(self, epoch: int, leader: Voter, now_ms: int, *, from_leader: bool = False) -> None:
        """Follow the leader of `epoch`.  `from_leader`: the leader itself sent the message."""
        if leader == self.me or (epoch, leader) == (self.epoch, self.leader):
            return
        assert self.leader is None or epoch > self.epoch, "two leaders in one epoch"
        self._leave()
        if epoch > self.epoch:
            self._enter(epoch)
        self.role, self.leader = Role.FOLLOWER, leader
        self._leader_contact_ms = now_ms if from_leader else now_ms - self.timing.fetch_ms
        self._any_contact_ms = now_ms if from_leader else self._any_contact_ms
        self._publish_leadership()
        self._arm(FETCH, now_ms, self.timing.fetch_ms)
        self._fetch(now_ms)

    def _publish_leadership(self) -> None:
        self._effects.append(Publish(LEADERSHIP, Leadership(self.epoch, self.leader)))

    def _arm(self, key: str, now_ms: int, wait_ms: int) -> None:
        most = 1.25 if key == FETCH else 2.0
        self._effects.append(SetTimer(key, now_ms + int(wait_ms * self._rng.uniform(1.0, most))))

    # -- elections ---------------------------------------------------------------------------------

    def _become_candidate(self, now_ms: int) -> None:
        """Become prospective: ask the voters for pre-votes (KIP-996).

        It waits while the log is written, because the log state in the request must stay true (U6).
        """
        if self._writing or not may_become_candidate(self.me, self.log, self.high_watermark):
            self._detach(self.epoch, now_ms)
            return
        knew = self.leader
        self._leave()
        self._arm(ELECTION, now_ms, self.timing.election_ms)
        self.role, self.leader = Role.PROSPECTIVE, None
        if knew is not None:
            self._publish_leadership()
        for voter in self._others():
            self._effects.append(Send(voter, self._vote_request(voter, pre_vote=True)))
        self._grant(self.me, now_ms)

    def _vote_request(self, voter: Voter, *, pre_vote: bool) -> VoteRequest:
        log = self.log
        return VoteRequest(self.me, self.epoch, log.last_epoch, log.end, voter, pre_vote)

    def _grant(self, voter: Voter, now_ms: int) -> None:
        """Count the vote, or pre-vote, of `voter`."""
        if voter not in self.voters:
            return
        self._granted[voter] = None
        if len(self._granted) < self.majority:
            return
        if self.role is Role.PROSPECTIVE:
            self._run(now_ms)
        else:
            self._lead(now_ms)

    def _run(self, now_ms: int) -> None:
        """Become a candidate in a new epoch."""
        self.role, self._granted = Role.CANDIDATE, {}
        self._arm(ELECTION, now_ms, self.timing.election_ms)
        asks: list[Effect] = [Publish(SELF, SelfVoted(self.epoch + 1))]
        self.vote = Vote(self.epoch + 1, self.me.node_id, self.me.directory_id)
        asks += [Send(voter, self._vote_request(voter, pre_vote=False)) for voter in self._others()]
        self._enter(self.epoch, asks, self.me)

    def _lead(self, now_ms: int) -> None:
        assert not self._writing, "U6"
        self._leave()
        self.role, self.leader = Role.LEADER, self.me
        self.leader_state = LeaderState(self.me, self.log.end, now_ms)
        contact_ms, self._any_contact_ms = self._any_contact_ms, None
        until_ms = None if contact_ms is None else self.timing.answered_until_ms(contact_ms, now_ms)
        self._effects += [
            Publish(LEADERSHIP, Leadership(self.epoch, self.me, self.log.end, until_ms)),
            Write([BeginEpoch(self.me, self.epoch, self.voters)], Level.SYNCED),
        ]
        self._tick(now_ms)

    def _vote_requested(self, request: Any, ask: VoteRequest, now_ms: int) -> None:
        live = self._live_leader(now_ms)
        found = verdict(ask, self.me, self.vote, self.log, self.leader, live)
        if found is not Verdict.NEW_VOTE:
            self._answer_vote(request, ask, now_ms, granted=found is Verdict.GRANTED)
            return
        self._leave()
        self.role = Role.UNATTACHED
        self._arm(ELECTION, now_ms, self.timing.election_ms)
        answer = Respond(request, self._vote_reply(ask, True, now_ms))
        self._enter(self.epoch, [answer], ask.sender)

    def _answer_vote(self, request: Any, ask: VoteRequest, now_ms: int, *, granted: bool) -> None:
        """Answer a vote request.  A granted vote is sent after its write, in write order (U1)."""
        answer = Respond(request, self._vote_reply(ask, granted, now_ms))
        if granted and not ask.pre_vote:
            self._effects.append(Write([], Level.SYNCED, [answer]))
        else:
            self._effects.append(answer)

    def _vote_reply(self, ask: VoteRequest, granted: bool, now_ms: int) -> VoteReply:
        leader = self._live_leader(now_ms)
        return VoteReply(self.me, self.epoch, leader, granted, ask.pre_vote, ask.epoch)

    def _live_leader(self, now_ms: int) -> Voter | None:
        """The leader if it answered recently (U7); hearsay of other nodes does not count."""
        if self.role is Role.FOLLOWER and now_ms - self._leader_contact_ms >= self.timing.fetch_ms:
            return None
        return self.leader

    def _vote_replied(self, reply: VoteReply, now_ms: int) -> None:
        wanted = Role.PROSPECTIVE if reply.pre_vote else Role.CANDIDATE
        if self.role is wanted and reply.asked_epoch == self.epoch and reply.granted:
            self._grant(reply.sender, now_ms)

    def _others(self) -> list[Voter]:
        return [voter for voter in self.voters if voter != self.me]

    # -- messages ----------------------------------------------------------------------------------

    def _request_received(self, event: RequestReceived, now_ms: int) -> None:
        message = event.message
        if message.epoch > self.epoch:
            self._detach(message.epoch, now_ms)
        if isinstance(message, VoteRequest):
            self._vote_requested(event.request, message, now_ms)
        elif isinstance(message, Fetch):
            self._fetch_requested(event.request, message, now_ms)
        else:
            if message.epoch == self.epoch:
                if isinstance(message, EndQuorumEpoch):
                    self._leader_ended(message, now_ms)
                elif message.to == self.me:  # U4
                    self._follow(message.epoch, message.sender, now_ms, from_leader=True)
            self._respond(
                event.request, QuorumEpochReply(self.me, self.epoch, self._live_leader(now_ms))
            )

    def _leader_ended(self, message: EndQuorumEpoch, now_ms: int) -> None:
        if self.leader != message.sender:
            return
        self._detach(self.epoch, now_ms)
        if self.me in message.successors:
            rank = message.successors.index(self.me)
            at_ms = now_ms + rank * self.timing.election_ms // 2
            self._effects.append(SetTimer(ELECTION, at_ms))

    def _reply_received(self, message: Any, now_ms: int) -> None:
        if message.leader is not None and message.epoch >= self.epoch:
            self._follow(message.epoch, message.leader, now_ms)
        elif message.epoch > self.epoch:
            self._detach(message.epoch, now_ms)
        if isinstance(message, VoteReply):
            self._vote_replied(message, now_ms)
        elif isinstance(message, FetchReply):
            self._fetch_replied(message, now_ms)

    def _respond(self, request: Any, reply: Any) -> None:
        self._effects.append(Respond(request, reply))

    def _unreachable(self, event: Unreachable, now_ms: int) -> None:
        if self.role is not Role.FOLLOWER or event.peer != self.leader:
            return
        self._fetching = None
        self._effects.append(SetTimer(AGAIN, now_ms + self.timing.again_ms))
        if event.refused and self._live_leader(now_ms) is not None:  # R7
            self._leader_contact_ms = now_ms - self.timing.fetch_ms
            self._arm(FETCH, now_ms, self.timing.again_ms)

    def _fired(self, key: str, now_ms: int) -> None:
        if key in (ELECTION, FETCH) and self.role is not Role.LEADER:
            self._become_candidate(now_ms)
        elif key == AGAIN:
            self._fetch(now_ms)
        elif key == TICK and self.role is Role.LEADER:
            self._tick(now_ms)
        elif key == WAITING and self.leader_state is not None:
            self._release(now_ms)

    # -- following ---------------------------------------------------------------------------------

    def _look_for_leader(self) -> None:
        """Ask a voter for the leader; never this node's own lost directory."""
        others = [voter for voter in self.voters if voter.node_id != self.me.node_id]
        if others and not self._writing:
            self._send_fetch(self._rng.choice(others))

    def _fetch(self, now_ms: int) -> None:
        if self.role is Role.FOLLOWER and not self._writing and self._fetching is None:
            assert self.leader is not None
            self._send_fetch(self.leader)

    def _send_fetch(self, peer: Voter) -> None:
        log = self.log
        self._fetches += 1
        self._fetching = Fetch(
            self.me, self.epoch, log.end, log.last_epoch, self.high_watermark, self._fetches
        )
        self._effects.append(Send(peer, self._fetching))

    def _fetch_replied(self, reply: FetchReply, now_ms: int) -> None:
        asked = self._fetching
        if self.role is not Role.FOLLOWER or reply.sender != self.leader or asked is None:
            return
        if reply.epoch != self.epoch or reply.number != asked.number:
            return
        self._fetching = None
        if reply.status is FetchStatus.NOT_LEADER:  # no longer: its EndQuorumEpoch was lost
            self._detach(self.epoch, now_ms)
            return
        self._leader_contact_ms = self._any_contact_ms = now_ms
        self._arm(FETCH, now_ms, self.timing.fetch_ms)
        if reply.status is FetchStatus.DIVERGING:
            assert reply.diverging is not None
            to = common_end(self.log, self._epochs, reply.diverging)
            assert to >= self.high_watermark, (to, self.high_watermark)  # U5
            self._write(TruncateTo(self._next_job(), to))
        elif reply.status is FetchStatus.SNAPSHOT:
            assert reply.snapshot is not None
            self._write(LoadSnapshot(self._next_job(), reply.sender, reply.snapshot))
        elif reply.end > reply.offset:
            self._promised = reply.high_watermark
            self._write(AppendFetched(self._next_job(), reply))
        else:
            self._commit_to(min(reply.high_watermark, self.log.end))
            self._fetch(now_ms)

    def _next_job(self) -> int:
        self._job += 1
        return self._job

    def _write(self, op: Any) -> None:
        """Request a write to the log (U6).  The shell answers with `Synced(job=…)`."""
        self._writing = True
        self._effects.append(Write([op], Level.SYNCED))

    def _synced(self, event: Synced, now_ms: int) -> None:
        self._know(event.log)
        if event.job == self._job:
            self._writing = False
        self._commit_to(self._sure_end())
        if self.leader_state is not None:
            self._advance(now_ms)
            self._release(now_ms)
        elif self.role is Role.FOLLOWER:
            self._commit_to(min(self._promised, self.log.end))
            self._fetch(now_ms)
        elif self.role is Role.UNATTACHED and event.job and not self._writing:
            self._look_for_leader()

    def _sure_end(self) -> int:
        """The end that is certainly committed: a snapshot holds only committed records."""
        snapshot = self.log.snapshot
        return self.log.base.end if snapshot is None else max(self.log.base.end, snapshot.end)

    def _commit_to(self, offset: int) -> None:
        if offset > self.high_watermark:  # U2
            self.high_watermark = offset
            self._effects.append(Publish(HIGH_WATERMARK, offset))

    # -- leading -----------------------------------------------------------------------------------

    def _tick(self, now_ms: int) -> None:
        """Send BeginQuorumEpoch to silent voters; step down without contact to a majority."""
        state = self.leader_state
        assert state is not None
        if not state.in_touch(self.voters, now_ms - 3 * self.timing.fetch_ms // 2):
            self._detach(self.epoch, now_ms)
            return
        for voter in state.silent(self.voters, now_ms - self.timing.fetch_ms):
            self._effects.append(Send(voter, BeginQuorumEpoch(self.me, self.epoch, voter)))
        self._effects.append(SetTimer(TICK, now_ms + self.timing.fetch_ms // 4))

    def _fetch_requested(self, request: Any, fetch: Fetch, now_ms: int) -> None:
        state = self.leader_state
        if state is None or fetch.epoch != self.epoch:
            self._respond(request, self._not_leader(fetch, self._live_leader(now_ms)))
            return
        earlier = state.waiting.pop(fetch.sender, None)
        if earlier is not None:
            self._respond(earlier.request, self._data(earlier.fetch))
        state.last_fetch_ms[fetch.sender] = now_ms  # also while the node loads a snapshot
        apart = find_divergence(self.log, self._epochs, fetch)
        if apart is not None:
            self._respond(request, self._part(fetch, apart))
            return
        state.note(fetch, self.log.end, now_ms)
        state.waiting[fetch.sender] = Waiting(request, fetch, now_ms + self.timing.wait_ms)
        self._advance(now_ms)
        self._release(now_ms)

    def _not_leader(self, fetch: Fetch, leader: Voter | None) -> FetchReply:
        status = FetchStatus.NOT_LEADER
        return FetchReply(self.me, self.epoch, leader, status, fetch.number, fetch.offset)

    def _data(self, fetch: Fetch) -> FetchReply:
        end = max(fetch.offset, self.log.end)
        return FetchReply(
            self.me, self.epoch, self.leader, FetchStatus.DATA, fetch.number, fetch.offset, end,
            self.high_watermark,
        )  # fmt: skip

    def _part(self, fetch: Fetch, apart: SnapshotId | EpochEnd) -> FetchReply:
        number, offset = fetch.number, fetch.offset
        if isinstance(apart, SnapshotId):
            status = FetchStatus.SNAPSHOT
            return FetchReply(self.me, self.epoch, self.me, status, number, offset, snapshot=apart)
        status = FetchStatus.DIVERGING
        return FetchReply(self.me, self.epoch, self.me, status, number, offset, diverging=apart)

    def _advance(self, now_ms: int) -> None:
        """Advance the high watermark to what a majority holds (U2, U3)."""
        state = self.leader_state
        assert state is not None
        committed = state.committed(self.voters, self.log.end)
        if committed > state.start:
            self._commit_to(committed)
        change = state.change
        if change is not None and self.voters == change[1] and self._settled(state):
            self._effects.append(Respond(change[0], None))
            state.change = None
        if self.me not in self.voters and self._settled(state):
            self._effects += self._end_quorum_epoch(state)
            self._detach(self.epoch, now_ms)

    def _settled(self, state: LeaderState) -> bool:
        """Whether the voters record and a record of this epoch are committed."""
        return self.high_watermark > max(state.start, self.log.voters[-1].offset)

    def _release(self, now_ms: int) -> None:
        """Answer the waiting fetches that have news or have waited their time."""
        state = self.leader_state
        if state is None:
            return
        for sender, each in list(state.waiting.items()):
            fetch = each.fetch
            news = self.log.end > fetch.offset or self.high_watermark > fetch.high_watermark
            if news or each.until_ms <= now_ms:
                del state.waiting[sender]
                self._respond(each.request, self._data(fetch))
        self._effects.append(SetTimer(WAITING, state.next_due_ms()))

    def _change_voters(self, event: VotersChange, now_ms: int) -> None:
        """Begin a voter change, one at a time, once this epoch has committed a record (KIP-853)."""
        state = self.leader_state
        if state is None:
            self._respond(event.request, errors.ControllerUnavailable("this node does not lead"))
            return
        if len(set(event.voters) ^ set(self.voters)) != 1 or not event.voters:
            self._respond(event.request, errors.InvalidRequest("voters change one at a time"))
        elif state.change is not None or not self._settled(state):
            self._respond(event.request, errors.ControllerUnavailable("another change is pending"))
        else:
            state.change = (event.request, tuple(event.voters))  # other records may go before it
            self._effects.append(
                Write([AppendVoters(self.epoch, tuple(event.voters))], Level.SYNCED)
            )

    def _end_quorum_epoch(self, state: LeaderState) -> list[Effect]:
        successors = state.successors(self.voters)
        ends = EndQuorumEpoch(self.me, self.epoch, successors)
        return [Send(voter, ends) for voter in successors]

    def _resign(self, now_ms: int) -> None:
        if self.leader_state is not None:
            self._effects += self._end_quorum_epoch(self.leader_state)
            self._detach(self.epoch, now_ms)
