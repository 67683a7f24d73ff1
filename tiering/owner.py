"""The table owner: commits to a topic's table for the partitions that its broker leads (rule T3).

Sans-IO.  A tier process has one owner for each topic of which its broker leads partitions.  The
copiers and the broker send it uploaded files (`Submit`), claims (`ClaimPartition`) and moved log
starts (`PartitionsSeen`).  The owner commits all of them together.  All owners of a table commit
once a second on average (commit_pacing); claims and hand-overs of jobs do not wait for this.

The cycle starts from its beginning after any error:
  idle ─work→ loading ─snapshot→ check, plan ─┬─ nothing left → idle
                                              └─ committing ─landed→ answer, pause, idle
                                                     └─ failed or unknown → back off, loading

An owner that is alone at its table skips the loading: it knows what it committed, and a commit
lands only if that is still the newest version (tiering/table D1).  Reads of the store follow a
commit that failed, a question, and a pace that slows down while nothing happens (look_pacing).

Invariants
  W1  At most one operation on the table is under way.
  W2  Every commit is planned on the snapshot that it is exact about.  Nothing is carried over from
      a failed attempt; if it landed after all, the next snapshot shows it (rule T5).
  W3  A request is answered exactly once.  It is answered `done` only if a snapshot has its change.
  W4  A table that another engine or process altered (rule T8) is never written to.  All requests
      are refused until the table is restored; the broker keeps its data local meanwhile.
  W5  The owner deletes no object.  VACUUM deletes an object once the table no longer names it.
  W6  The owner plans and answers only with counters that it has read.  If a request or log start
      for a partition arrives during a load that did not ask for this partition, the owner loads
      again.
  W7  A request or log start that arrives after a load was requested waits for the next load,
      because another node may have committed since the first load.
  W8  Without a load the owner only commits, and says `done` of what it knows to be in the table.
      Claims and refusals follow a load that was requested after them: a known version may be old.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pk import errors
from pk.backoff import Backoff
from pk.effects import Effect, Publish, Respond, Send, SetTimer
from pk.tiering import accounting, commit_pacing
from pk.tiering.commit_pacing import OwnCommit
from pk.tiering.look_pacing import LookPace
from pk.tiering.owner_events import (
    PROBLEM,
    SNAPSHOT,
    TABLE,
    ClaimPartition,
    Close,
    Committed,
    Create,
    Failed,
    Load,
    Look,
    OwnerEvent,
    PartitionsSeen,
    RowsSummed,
    Submit,
    SumRows,
    TableLoaded,
    Vacuum,
    Vacuumed,
    Wake,
)
from pk.tiering.plan import (
    Claim,
    LogStart,
    Plan,
    Submission,
    is_urgent,
    plan,
    reply_of,
    start_is_due,
)
from pk.tiering.table import Commit, CommitConflict, Snapshot, check_successor
from pk.wire import pk_pb2 as wire

TIMER = "owner"

#: Maximum number of requests that wait for a commit; further ones get ThrottledError.  As many
#: readers wait for a look; further ones read the known version.
WAITING_MAX = 10_000
#: The number of files that are read at once for their row sums.
SUMMED_AT_ONCE = 8
#: The number of immediate retries after commit conflicts; further retries wait with back-off.
CONFLICTS_AT_ONCE = 3
BACKOFF_MAX_MS = 30_000


@dataclass(slots=True, frozen=True)
class OwnerSettings:
    """Intervals and timeouts of the owner."""

    name: str = ""  #: of this owner among those of the table
    commit_interval_ms: int = 1_000
    retry_backoff_ms: int = 500
    #: a request not committed after this time is answered TierUnavailable
    request_timeout_ms: int = 30_000
    #: the shortest time between two looks at a table without a request; readers get no version
    #: that was looked at longer ago
    refresh_interval_ms: int = 5_000
    #: the longest time between two looks, while nothing happens
    refresh_max_ms: int = 300_000
    #: interval at which a table with a problem is loaded again, to notice a repair
    recheck_ms: int = 10_000
    vacuum_interval_ms: int = 0  #: 0 = never
    vacuum_retention_ms: int = 7 * 86_400_000


@dataclass(slots=True)
class _State:
    """The state that is kept between cycles."""

    backoff: Backoff  #: counts failures in a row
    snapshot: Snapshot | None = None
    problem: errors.PkError | None = None
    waiting: list[Submission | Claim] = field(default_factory=list)
    log_starts: dict[int, LogStart] = field(default_factory=dict)
    starts_due: bool = False
    look: bool = False  #: load even if there is no work
    #: readers that wait for a look, and since when
    lookers: list[tuple[Any, int]] = field(default_factory=list)
    fresh_ms: int | None = None  #: the snapshot was the newest version at this time, or later
    look_ms: int = 0  #: time of the last load; 0 = none yet
    not_before_ms: int = 0
    next_refresh_ms: int = 0
    next_vacuum_ms: int = 0
    #: whether files may have been removed since the last vacuum, perhaps before this start
    removed_since_vacuum: bool = True
    #: row sums of files whose names do not state them, as long as the table names them
    sums: dict[str, int] = field(default_factory=dict)
    took_rows: bool = False  #: the last commit took rows away (T16)
    own: OwnCommit = field(default_factory=OwnCommit)  #: the last commit of this owner
    lease_token: int = 0  #: of the job that holds the lease; 0 = none (C5)
    lease_newest: int = 0  #: the highest token that was ever seen: an older job is refused


class Owner:
    """The state machine that commits to one table; the module states its invariants."""

    def __init__(self, topic: str, topic_id: str, uri: str, settings: OwnerSettings) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.uri = uri
        self._settings = settings
        self._state = _State(Backoff((settings.retry_backoff_ms, BACKOFF_MAX_MS)))
        self._pace = LookPace(topic_id, settings.refresh_interval_ms, settings.refresh_max_ms)
        self._paced = False  #: the load under way answers no request
        self._now_ms = 0
        self._asked_ms = 0  #: when the operation under way was asked for
        self._under_way: Load | Create | Commit | Vacuum | SumRows | None = None
        #: log starts at the time of the last operation's request
        self._known: dict[int, LogStart] = {}
        #: how many of the waiting requests, counted from the end, arrived after that (W7)
        self._later = 0
        self._planned: Plan | None = None

    @property
    def snapshot(self) -> Snapshot | None:
        """Returns the newest version seen."""
        return self._state.snapshot

    @property
    def problem(self) -> errors.PkError | None:
        """Returns why the table is currently not written to."""
        return self._state.problem

    @property
    def looked(self) -> bool:
        """Returns whether the owner has asked the store for its table."""
        return self._state.look_ms > 0

    def is_fresh(self, now_ms: int) -> bool:
        """Returns whether the snapshot was the newest version less than `refresh_interval_ms`
        ago."""
        fresh_ms = self._state.fresh_ms
        return fresh_ms is not None and now_ms - fresh_ms < self._settings.refresh_interval_ms

    @property
    def leased(self) -> bool:
        """Returns whether a maintenance job holds the lease of the table (C5)."""
        return self._state.lease_token > 0

    def step(self, event: OwnerEvent, now_ms: int) -> Sequence[Effect]:
        """Applies one event and returns its effects; nothing else changes the state."""
        effects: list[Effect] = []
        self._now_ms, asked_ms = now_ms, self._asked_ms
        answers = isinstance(event, TableLoaded | Committed)
        match event:
            case Submit():
                self._submitted(event, now_ms, effects)
            case ClaimPartition():
                self._pace.asked()
                claim = Claim(
                    event.request,
                    event.partition,
                    event.epoch,
                    event.commit,
                    self._deadline(now_ms),
                )
                self._queue(claim, effects)
            case PartitionsSeen():
                self._seen(event)
            case TableLoaded():
                self._loaded(event, now_ms, effects)
            case Committed():
                self._committed(event, now_ms, effects)
            case Vacuumed():
                assert isinstance(self._under_way, Vacuum)
                self._under_way = None
                self._state.removed_since_vacuum |= event.put_off
            case RowsSummed():
                assert isinstance(self._under_way, SumRows)
                self._under_way = None
                self._state.sums.update(event.sums)
                self._state.look = True
            case Failed():
                self._failed(event.error, now_ms, effects)
            case Close():
                waiting, self._state.waiting, self._later = self._state.waiting, [], 0
                gone = errors.UnknownTopicId(f"topic {self.topic} ({self.topic_id}) is gone")
                self._looked(effects)
                return [*effects, *(Respond(item.request, gone) for item in waiting)]
            case Look():
                self._look(event, effects)
            case Wake():
                pass
        if isinstance(event, Failed):
            self._looked(effects)
        elif answers and not isinstance(self._under_way, Load | Create):
            # not those that came long after the operation was asked for
            self._looked(effects, asked_ms + self._settings.refresh_interval_ms)
        self._expire(now_ms, effects)
        self._go_on(now_ms, effects)
        return effects

    # -- requests ----------------------------------------------------------------------------------

    def _submitted(self, event: Submit, now_ms: int, effects: list[Effect]) -> None:
        if event.change.lease_token:
            self._pace.asked()
        self._queue(Submission(event.request, event.change, self._deadline(now_ms)), effects)

    def _look(self, event: Look, effects: list[Effect]) -> None:
        self._pace.asked()
        if len(self._state.lookers) >= WAITING_MAX:
            effects.append(Respond(event.request, None))  # it reads what is known
            return
        self._state.lookers.append((event.request, self._now_ms))
        if self._state.backoff.attempts:
            self._looked(effects)  # the store does not answer at the moment

    def _looked(self, effects: list[Effect], before_ms: int | None = None) -> None:
        """Answers the readers that came `before_ms`, or all."""
        lookers, self._state.lookers = self._state.lookers, []
        for request, came_ms in lookers:
            if before_ms is None or came_ms < before_ms:
                effects.append(Respond(request, None))
            else:
                self._state.lookers.append((request, came_ms))

    def _deadline(self, now_ms: int) -> int:
        return now_ms + self._settings.request_timeout_ms

    def _queue(self, item: Submission | Claim, effects: list[Effect]) -> None:
        state = self._state
        if isinstance(state.problem, errors.OperatorError):
            effects.append(Respond(item.request, state.problem))  # W4
        elif len(state.waiting) >= WAITING_MAX:
            effects.append(
                Respond(item.request, errors.ThrottledError(f"{self.uri}: too many requests wait"))
            )
        else:
            state.waiting.append(item)
            self._later += 1

    def _seen(self, event: PartitionsSeen) -> None:
        state = self._state
        if event.partitions:
            state.lease_token = event.lease_token
            state.lease_newest = max(state.lease_newest, event.lease_token)
            if event.lease_token:
                self._pace.asked()
        for partition in event.gone:
            state.log_starts.pop(partition, None)
        for partition, start in event.partitions.items():
            if partition not in state.log_starts:
                state.look = True  # the partition's counters may not be loaded yet
            state.log_starts[partition] = start
            if state.snapshot is not None and start_is_due(state.snapshot, partition, start):
                state.starts_due = True

    def _note_due(self) -> None:
        state = self._state
        snapshot = state.snapshot
        state.starts_due = snapshot is not None and any(
            start_is_due(snapshot, partition, start)
            for partition, start in state.log_starts.items()
        )

    def _expire(self, now_ms: int, effects: list[Effect]) -> None:
        """Answers requests past their deadline (W3); whether their commit landed is unknown."""
        late = [item for item in self._state.waiting if item.deadline_ms <= now_ms]
        if late and not isinstance(self._under_way, Commit):
            self._state.waiting = [i for i in self._state.waiting if i.deadline_ms > now_ms]
            self._later = min(self._later, len(self._state.waiting))  # late ones are in front
            cause = self._state.problem
            for item in late:
                error = errors.TierUnavailable(
                    f"{self.uri}: not committed within {self._settings.request_timeout_ms} ms"
                    + (f" ({cause.message})" if cause else "")
                )
                effects.append(Respond(item.request, error))

    # -- the cycle ---------------------------------------------------------------------------------

    def _go_on(self, now_ms: int, effects: list[Effect]) -> None:
        """Starts the next operation if one is due; otherwise sets the timer."""
        state = self._state
        if self._under_way is not None:  # W1
            return
        claimed = any(isinstance(item, Claim) for item in state.waiting)
        urgent = claimed and not state.backoff.attempts
        ready = now_ms >= state.not_before_ms or urgent
        if self._has_work() and ready and self._knows_enough():
            if self._plan_known(now_ms, effects):
                return
            ready = now_ms >= state.not_before_ms
        work = self._has_work()
        if (work and ready) or state.lookers:
            self._ask(Load(self._partitions()), effects)
            return
        # also while work waits for the commit interval: under load some work always waits
        if self._vacuum_due() and now_ms >= state.next_vacuum_ms:
            state.next_vacuum_ms = now_ms + self._settings.vacuum_interval_ms
            state.removed_since_vacuum = False
            self._ask(Vacuum(self._settings.vacuum_retention_ms), effects)
            return
        if state.log_starts and now_ms >= max(state.next_refresh_ms, state.not_before_ms):
            self._ask(Load(self._partitions()), effects)
            self._paced = True
            return
        due = []
        if work:
            due.append(state.not_before_ms)
        if self._vacuum_due():
            due.append(state.next_vacuum_ms)
        if state.log_starts:
            due.append(max(state.next_refresh_ms, state.not_before_ms))
        due += [item.deadline_ms for item in state.waiting[:1]]
        effects.append(SetTimer(TIMER, min(due) if due else None))

    def _has_work(self) -> bool:
        state = self._state
        return bool(state.waiting) or state.starts_due or state.look

    def _knows_enough(self) -> bool:
        """Returns whether the owner may plan on the version that it knows (W8)."""
        state, snapshot = self._state, self._state.snapshot
        if snapshot is None or state.look or state.lookers or state.problem is not None:
            return False
        # With another owner at the table, the next version most likely exists.
        if state.backoff.attempts or state.own.version != snapshot.version:
            return False
        if commit_pacing.others(snapshot.owners, snapshot.version, self._settings.name):
            return False
        for item in state.waiting:
            if isinstance(item, Claim) or item.change.version_read > snapshot.version:
                return False
        if any(partition not in snapshot.counters for partition in self._partitions()):
            return False
        return all(
            start.tiered_end <= snapshot.partition(partition).end
            for partition, start in state.log_starts.items()
        )

    def _plan_known(self, now_ms: int, effects: list[Effect]) -> bool:
        """Plans the next commit on the known version; returns whether an operation is under way."""
        state = self._state
        assert state.snapshot is not None
        self._later = 0
        self._known = dict(state.log_starts)
        self._plan(state.snapshot, now_ms, effects, known=True)
        if self._under_way is not None:
            return True
        self._note_due()
        return False

    def _vacuum_due(self) -> bool:
        state = self._state
        asked_for = self._settings.vacuum_interval_ms > 0 and state.snapshot is not None
        return asked_for and state.removed_since_vacuum and not state.backoff.attempts

    def _partitions(self) -> list[int]:
        known = dict.fromkeys(self._state.log_starts)
        for item in self._state.waiting:
            if isinstance(item, Claim):
                known[item.partition] = None
            else:
                known.update(dict.fromkeys(c.partition for c in item.change.counters))
        if self._state.snapshot is not None:
            known.update(dict.fromkeys(self._state.snapshot.counters))
        return sorted(known)

    def _ask(
        self, operation: Load | Create | Commit | Vacuum | SumRows, effects: list[Effect]
    ) -> None:
        self._under_way = operation
        self._asked_ms, self._paced = self._now_ms, False
        self._later = 0
        self._known = dict(self._state.log_starts)
        effects.append(Send(TABLE, operation))

    def _loaded(self, event: TableLoaded, now_ms: int, effects: list[Effect]) -> None:
        asked, self._under_way = self._under_way, None
        assert isinstance(asked, Load | Create), asked
        if isinstance(asked, Create) and event.snapshot is not None:
            self._ask(Load(self._partitions()), effects)  # load with the partitions' counters
            return
        state = self._state
        if not state.look_ms:
            state.next_vacuum_ms = now_ms + self._settings.vacuum_interval_ms
        state.look_ms = now_ms
        state.look = False
        snapshot, known = event.snapshot, state.snapshot
        if self._paced and snapshot and known and snapshot.version == known.version:
            self._pace.found_nothing()
        elif snapshot is None or known is None or snapshot.version != known.version:
            self._pace.asked()
        if state.lease_token:
            self._pace.asked()
        state.next_refresh_ms = now_ms + self._pace.wait_ms
        try:
            if snapshot is None:
                self._check_missing()
                if self._may_create():
                    self._ask(Create(), effects)
                else:
                    self._answer_missing(effects)
                return
            check_successor(self.uri, state.snapshot, snapshot)
            if any(each not in snapshot.counters for each in self._partitions()):
                self._ask(Load(self._partitions()), effects)  # W6
                return
            self._check_covered(snapshot)
            if state.snapshot is None or snapshot.version != state.snapshot.version:
                accounting.check_rows(self.uri, snapshot)
        except errors.TierTableChanged as error:
            self._failed(error, now_ms, effects)
            return
        self._adopt(snapshot, effects)
        self._plan(snapshot, now_ms, effects)

    def _check_missing(self) -> None:
        """Accepts a missing table before the first commit; afterwards raises `TierTableChanged`:
        the table was deleted."""
        state = self._state
        # Only records that are not deleted had to be in the table.  `tiered_end` of a broker that
        # deleted records before they were tiered counts those, too (T9).
        starts = self._known.items()
        ends = {p: s.tiered_end for p, s in starts if s.tiered_end > s.log_start}
        if state.snapshot is not None:
            ends.update({p: c.end for p, c in state.snapshot.counters.items() if c.end > 0})
        if ends:
            partition, end = min(ends.items())
            raise errors.TierTableChanged(
                f"{self.uri}: the table is gone, partition {partition} of it ended at {end}; "
                "restore it, or delete the topic and create it again. Local data stays",
                uri=self.uri,
            )
        state.snapshot = None

    def _check_covered(self, snapshot: Snapshot) -> None:
        """Raises `TierTableChanged` if the table lacks offsets that a broker knows as tiered: an
        older copy was restored."""
        for partition, start in self._known.items():
            counters = snapshot.partition(partition)
            if counters.end < start.tiered_end and start.log_start < start.tiered_end:
                raise errors.TierTableChanged(
                    f"{self.uri}: version {snapshot.version} ends at {counters.end} in partition "
                    f"{partition}, the broker knows of {start.tiered_end}; restore the table's "
                    "newest version",
                    uri=self.uri,
                )

    def _may_create(self) -> bool:
        """Returns whether a missing table may be created: only if there is something to write.

        A `ClaimPartition` without `commit` creates no table.
        """
        return bool(self._state.log_starts) or any(
            isinstance(item, Submission) or item.commit for item in self._state.waiting
        )

    def _answer_missing(self, effects: list[Effect]) -> None:
        asked, self._state.waiting = self._split()
        for item in asked:
            assert isinstance(item, Claim)
            assert not item.commit
            effects.append(Respond(item.request, wire.TierClaimReply(exists=False)))

    def _split(self) -> tuple[list[Submission | Claim], list[Submission | Claim]]:
        """Splits the waiting requests into those before the operation's request and later ones
        (W7)."""
        waiting = self._state.waiting
        at = len(waiting) - self._later
        return waiting[:at], waiting[at:]

    def _adopt(self, snapshot: Snapshot, effects: list[Effect]) -> None:
        state = self._state
        state.fresh_ms = self._asked_ms
        if state.problem is not None:
            state.problem = None
            effects.append(Publish(PROBLEM, None))
        newer = state.snapshot is None or state.snapshot.version != snapshot.version
        grown = state.snapshot is not None and len(snapshot.counters) > len(state.snapshot.counters)
        if newer or grown:
            state.snapshot = snapshot
            state.sums = {p: each for p, each in state.sums.items() if p in snapshot.files}
            effects.append(Publish(SNAPSHOT, snapshot))
        self._note_due()

    def _plan(
        self, snapshot: Snapshot, now_ms: int, effects: list[Effect], *, known: bool = False
    ) -> None:
        """Plans the next commit on a version; `known` = it was not loaded for this (W8)."""
        state = self._state
        asked, later = self._split()
        planned = plan(
            snapshot,
            asked,
            state.log_starts,
            state.sums,
            hand_overs_first=state.took_rows,
            lease_newest=state.lease_newest,
        )
        if known and planned.refused:
            self._ask(Load(self._partitions()), effects)
            return
        for item, error in planned.refused:
            effects.append(Respond(item.request, error))
        for item in planned.done:
            effects.append(Respond(item.request, reply_of(item, snapshot)))
        state.waiting = [*planned.taken, *planned.waiting, *later]
        if planned.commit is None:
            state.backoff.reset()
            if planned.unsummed:
                self._ask(SumRows(planned.unsummed[:SUMMED_AT_ONCE], snapshot), effects)
            return
        interval_ms = self._settings.commit_interval_ms
        others = commit_pacing.others(snapshot.owners, snapshot.version, self._settings.name)
        next_ms = state.own.next_ms(interval_ms, others)
        urgent = any(map(is_urgent, (*planned.taken, *planned.waiting)))  # waiting: T16
        if now_ms < next_ms and not urgent:
            state.not_before_ms = next_ms
            return
        self._planned = planned
        self._ask(replace(planned.commit, owner=self._settings.name), effects)

    def _committed(self, event: Committed, now_ms: int, effects: list[Effect]) -> None:
        planned, self._planned, self._under_way = self._planned, None, None
        assert planned is not None
        assert planned.commit is not None
        state = self._state
        state.backoff.reset()
        state.own = OwnCommit(event.snapshot.version, now_ms)
        state.not_before_ms = now_ms + self._settings.commit_interval_ms
        state.next_refresh_ms = now_ms + self._pace.wait_ms
        state.waiting = state.waiting[len(planned.taken) :]
        if planned.commit.removes:
            state.removed_since_vacuum = True
        state.took_rows = bool(planned.commit.removes) and planned.commit.data_change
        self._adopt(event.snapshot, effects)
        for item in planned.taken:
            effects.append(Respond(item.request, reply_of(item, event.snapshot)))

    def _failed(self, error: errors.PkError, now_ms: int, effects: list[Effect]) -> None:
        """Backs off after a failure or an unknown outcome; the next cycle loads (T5, W2)."""
        was, self._under_way, self._planned = self._under_way, None, None
        state = self._state
        if isinstance(was, Vacuum):
            state.removed_since_vacuum = True
            return
        state.backoff.failed()
        state.look = True
        if isinstance(error, errors.OperatorError):  # W4
            state.not_before_ms = now_ms + self._settings.recheck_ms
            waiting, state.waiting, self._later = state.waiting, [], 0
            effects += [Respond(item.request, error) for item in waiting]
        elif isinstance(error, CommitConflict) and state.backoff.attempts <= CONFLICTS_AT_ONCE:
            state.not_before_ms = now_ms
            return
        else:
            state.not_before_ms = now_ms + int(state.backoff.wait_ms())
        known = state.problem
        if known is None or type(known) is not type(error) or known.message != error.message:
            effects.append(Publish(PROBLEM, error))
        state.problem = error
