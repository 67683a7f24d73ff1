"""The table owner: the one committer of a topic's table (rule T3).

Sans-IO.  There is one owner per topic; it runs in the tier process of the leader of partition 0.
The copiers and the brokers send it uploaded files (`Submit`), claims (`ClaimPartition`) and moved
log starts (`PartitionsSeen`).  The owner commits all of them together, at most once a second and
table.

The cycle starts from its beginning after any error:
  idle ─work→ loading ─snapshot→ check, plan ─┬─ nothing left → idle
                                              └─ committing ─landed→ answer, pause, idle
                                                     └─ failed or unknown → back off, loading

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
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pk import errors
from pk.backoff import Backoff
from pk.effects import Effect, Publish, Respond, Send, SetTimer
from pk.tiering import accounting
from pk.tiering.data_files import DataFile
from pk.tiering.plan import (
    Claim,
    LogStart,
    Plan,
    Submission,
    partition_state,
    plan,
    start_is_due,
)
from pk.tiering.table import Commit, CommitConflict, Snapshot, check_successor
from pk.types import Epoch
from pk.wire import pk_pb2 as wire

#: Name of the table as a peer in `Send` effects.
TABLE = "table"
#: Name under which new snapshots are published.
SNAPSHOT = "snapshot"
#: Name under which the table's problem (or None) is published.
PROBLEM = "problem"
TIMER = "owner"

#: Maximum number of requests that wait for a commit; further ones get ThrottledError.
WAITING_MAX = 10_000
#: The number of files that are read at once for their row sums.
SUMMED_AT_ONCE = 8
#: The number of immediate retries after commit conflicts; further retries wait with back-off.
CONFLICTS_AT_ONCE = 3
BACKOFF_MAX_MS = 30_000


@dataclass(slots=True, frozen=True)
class OwnerSettings:
    """Intervals and timeouts of the owner."""

    commit_interval_ms: int = 1_000
    retry_backoff_ms: int = 500
    #: a request not committed after this time is answered TierUnavailable
    request_timeout_ms: int = 30_000
    #: the owner notices outside maintenance after this time at the latest
    refresh_interval_ms: int = 5_000
    #: interval at which a table with a problem is loaded again, to notice a repair
    recheck_ms: int = 10_000
    vacuum_interval_ms: int = 0  #: 0 = never
    vacuum_retention_ms: int = 7 * 86_400_000


# -- events ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Submit:
    """Event: a hand-over; answered by `CommitToTableReply` or an error."""

    request: Any
    change: wire.CommitToTableRequest


@dataclass(slots=True)
class ClaimPartition:
    """Event: a claim (rule T4); answered by `TierClaimReply` or an error."""

    request: Any
    partition: int
    epoch: Epoch
    commit: bool


@dataclass(slots=True)
class PartitionsSeen:
    """Event: changes in what the brokers report of the topic's partitions."""

    partitions: Mapping[int, LogStart]
    gone: Sequence[int] = ()
    lease_token: int = 0  #: of the maintenance lease of the topic; 0 = no job holds it (C5)


@dataclass(slots=True)
class TableLoaded:
    """Event: answer to `Load` or `Create`; None = there is no table."""

    snapshot: Snapshot | None


@dataclass(slots=True)
class Committed:
    snapshot: Snapshot


@dataclass(slots=True)
class Vacuumed:
    files: int
    put_off: bool = False  #: no file was looked for: the wall clock is not trusted (L10)


@dataclass(slots=True)
class RowsSummed:
    """Event: answer to `SumRows`: row sums by path (`accounting.UNREADABLE` for a damaged file)."""

    sums: Mapping[str, int]


@dataclass(slots=True)
class Failed:
    """Event: the operation under way raised an error; its outcome is unknown."""

    error: errors.PkError


@dataclass(slots=True)
class Close:
    """Event: the topic is gone; every waiting request is answered with an error."""


@dataclass(slots=True)
class Wake:
    """Event: the timer fired."""


OwnerEvent = (
    Submit
    | ClaimPartition
    | PartitionsSeen
    | TableLoaded
    | Committed
    | Vacuumed
    | RowsSummed
    | Failed
    | Close
    | Wake
)


# -- what the table is asked to do -----------------------------------------------------------------


@dataclass(slots=True)
class Load:
    partitions: Sequence[int]


@dataclass(slots=True)
class Create:
    pass


@dataclass(slots=True)
class Vacuum:
    retention_ms: int


@dataclass(slots=True)
class SumRows:
    """Read these files and sum the hashes of their rows: they are to be removed, and their names do
    not state their sums (rule T2)."""

    files: Sequence[DataFile]
    snapshot: Snapshot


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
    look_ms: int = 0  #: time of the last load; 0 = none yet
    not_before_ms: int = 0
    next_refresh_ms: int = 0
    next_vacuum_ms: int = 0
    #: whether files may have been removed since the last vacuum, perhaps before this start
    removed_since_vacuum: bool = True
    #: row sums of files whose names do not state them, as long as the table names them
    sums: dict[str, int] = field(default_factory=dict)
    took_rows: bool = False  #: the last commit took rows away (T16)
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
    def leased(self) -> bool:
        """Returns whether a maintenance job holds the lease of the table (C5)."""
        return self._state.lease_token > 0

    def step(self, event: OwnerEvent, now_ms: int) -> Sequence[Effect]:
        """Applies one event and returns its effects; nothing else changes the state."""
        effects: list[Effect] = []
        match event:
            case Submit():
                self._queue(
                    Submission(event.request, event.change, self._deadline(now_ms)), effects
                )
            case ClaimPartition():
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
                return [Respond(item.request, gone) for item in waiting]
            case Wake():
                pass
        self._expire(now_ms, effects)
        self._go_on(now_ms, effects)
        return effects

    # -- requests ----------------------------------------------------------------------------------

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
        """Answers requests that waited past their deadline (W3); whether their commit landed is
        unknown."""
        late = [item for item in self._state.waiting if item.deadline_ms <= now_ms]
        if late and not isinstance(self._under_way, Commit):
            self._state.waiting = [i for i in self._state.waiting if i.deadline_ms > now_ms]
            # late requests are at the front
            self._later = min(self._later, len(self._state.waiting))
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
        work = bool(state.waiting) or state.starts_due or state.look
        claimed = any(isinstance(item, Claim) for item in state.waiting)
        urgent = claimed and not state.backoff.attempts
        if work and (now_ms >= state.not_before_ms or urgent):
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
        state.next_refresh_ms = now_ms + self._settings.refresh_interval_ms
        snapshot = event.snapshot
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

    def _plan(self, snapshot: Snapshot, now_ms: int, effects: list[Effect]) -> None:
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
        for item, error in planned.refused:
            effects.append(Respond(item.request, error))
        for item in planned.done:
            effects.append(_done(item, snapshot))
        state.waiting = [*planned.taken, *planned.waiting, *later]
        if planned.commit is None:
            state.backoff.reset()
            if planned.unsummed:
                self._ask(SumRows(planned.unsummed[:SUMMED_AT_ONCE], snapshot), effects)
            return
        self._planned = planned
        self._ask(planned.commit, effects)

    def _committed(self, event: Committed, now_ms: int, effects: list[Effect]) -> None:
        planned, self._planned, self._under_way = self._planned, None, None
        assert planned is not None
        assert planned.commit is not None
        state = self._state
        state.backoff.reset()
        state.not_before_ms = now_ms + self._settings.commit_interval_ms
        state.next_refresh_ms = now_ms + self._settings.refresh_interval_ms
        state.waiting = state.waiting[len(planned.taken) :]
        if planned.commit.removes:
            state.removed_since_vacuum = True
        state.took_rows = bool(planned.commit.removes) and planned.commit.data_change
        self._adopt(event.snapshot, effects)
        for item in planned.taken:
            effects.append(_done(item, event.snapshot))

    def _failed(self, error: errors.PkError, now_ms: int, effects: list[Effect]) -> None:
        """Backs off after an operation that failed or whose outcome is unknown; the next cycle
        starts with a load (T5, W2)."""
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


def _done(item: Submission | Claim, snapshot: Snapshot) -> Respond:
    if isinstance(item, Claim):
        counters = snapshot.partition(item.partition)
        return Respond(
            item.request,
            wire.TierClaimReply(
                exists=True,
                start=counters.start,
                end=counters.end,
                end_epoch=counters.epoch,
                claim=counters.claim,
            ),
        )
    touched = sorted(
        {c.partition for c in item.change.counters} | {a.partition for a in item.change.adds}
    )
    return Respond(
        item.request,
        wire.CommitToTableReply(
            version=snapshot.version,
            partitions=[partition_state(snapshot, partition) for partition in touched],
        ),
    )
