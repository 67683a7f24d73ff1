"""One partition on this broker: its log, its leader state, and the requests that wait for it.

World-generic, on the loop.  A batch passes these steps: `append` assigns offsets in memory (the
batch is *decided*), the directory's writer writes it, `end_round` completes it, and the `Leader`
moves the high watermark.  Then the produce replies, the fetch sessions and the tier's copier that
waited for the watermark continue.  No batch reaches a reply or a reader in any other way.

Invariants
  H1  A produce entry is answered exactly once, and only through `DelayedProduce.answer`.
  H2  A success under acks=all is answered only after the high watermark of the epoch in which the
      batch was decided has passed the batch (L5).
  H3  Readers get a bound: the high watermark or the last stable offset, never the log's end.
  H4  A duplicate waits with its original (L4): behind it in the queue, or parked at the same
      offset.
  H5  A failed write fails every delayed produce that was decided since the last written end,
      duplicates included (L2).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any

from pk import errors
from pk.log import batch as batches
from pk.log.batch import Header
from pk.log.divergence import Divergence, StartAt, find_divergence, reader_divergence
from pk.log.epoch_files import epoch_file_of
from pk.log.partition_log import PartitionLog
from pk.log.plan import Completion, Duplicate, Now
from pk.log.storage import Buffer
from pk.server.metadata.image import PartitionState
from pk.server.replica.delayed_produce import DelayedProduce
from pk.server.replica.deletions import Deletions
from pk.server.replica.directory_writer import LogDirWriter, Round
from pk.server.replica.host import Host
from pk.server.replica.leader import ACKS_ALL, Leader
from pk.server.replica.offset_checks import check_front, check_position, offset_violations
from pk.server.replica.state import IllegalTransition, ReplicaEvent, ReplicaState
from pk.server.replica.tier_state import TierState, known_below, tier_has_what_left
from pk.server.replica.watchers import Credit, EndWatcher, Follows, MarkerListener, Watcher
from pk.types import NONE, READ_COMMITTED, Epoch, NodeId, Offset, PartitionKey
from pk.wire import pk_pb2 as wire


class Partition:
    """A partition this broker holds a replica of."""

    def __init__(
        self,
        host: Host[Partition],
        key: PartitionKey,
        log: PartitionLog,
        writer: LogDirWriter,
        settings: Mapping[str, Any],
        *,
        tiered: bool,
    ) -> None:
        self._host = host
        self.key = key
        self.topic = log.topic_partition.topic
        self.log = log
        self.writer = writer
        self.settings: Mapping[str, Any] = settings
        self.tiered = tiered  #: the topic is tiered and the server has an object store
        self.tier = TierState()
        self.hosted = host.replicas.on(key, ReplicaEvent.OPENED)
        self.leader: Leader | None = None  #: while it is LEADING
        self.replica: Follows | None = None  #: while it is FOLLOWING
        self.leader_hint: NodeId = NONE
        self.others = False  #: other replicas were in sync when this one last led or followed
        self.unclean = False  #: the current epoch came from an unclean election (rules R3, T4)
        self.marker_listener: MarkerListener | None = None  #: the host of an internal partition
        self._watchers: dict[Watcher, None] = {}
        self._followers: dict[EndWatcher, None] = {}
        #: the high watermark as the leader last reported it, or as this replica knew it as leader
        self._leader_watermark: Offset = 0
        self.leader_log_start: Offset = 0  #: as last reported by the leader, or by the tier's table
        self.leader_settled_end: Offset = 0  #: as last reported by the leader (rule C4)
        self._deletions = Deletions()
        self._inflight: deque[DelayedProduce] = deque()
        self._plan: Any = None
        log.recent = writer.recent
        tier_has_what_left(log, tiered=tiered)

    # -- what others ask -------------------------------------------------------------------------

    @property
    def state(self) -> ReplicaState:
        """What this replica is (replica/state.py)."""
        return self.hosted.state

    @property
    def online(self) -> bool:
        """The replica leads, follows, or could do so."""
        return self.hosted.online

    @property
    def reopenable(self) -> bool:
        """A full disk interrupted a truncation of the log: another opening finds what is there."""
        offline = self.state is ReplicaState.OFFLINE and self.log.torn
        return offline and isinstance(self.hosted.cause, errors.StorageFailed)

    def on(self, event: ReplicaEvent, cause: errors.PkError | None = None) -> None:
        """Change the state of this replica.  Raises `IllegalTransition`."""
        if self._host.replicas.get(self.key) is not self.hosted:
            raise IllegalTransition(f"{self}: {event.name} of a log that was removed or replaced")
        self._host.replicas.on(self.key, event, cause)

    def storage_failed(self, error: errors.PkError) -> None:
        """Report a failed read, write or truncation; the broker decides what goes offline."""
        self._host.storage_failed(self, error)

    def replica_failed(self, error: errors.PkError) -> None:
        """Report a failure of this replica alone (rules R4, L9)."""
        self._host.replica_failed(self, error)

    def damaged(self, error: errors.CorruptLog) -> None:
        """Report damage after which this replica is not served (rule L9)."""
        self._host.damaged(self, error)

    def serving(self, epoch: Epoch = NONE) -> Leader:
        """Return the `Leader`; raise if this broker does not lead, or `epoch` is not current."""
        if self.hosted.cause is not None:  # raised again and again: its trace must not grow
            raise self.client_error(self.hosted.cause).with_traceback(None)
        if self.leader is None:
            raise errors.NotLeaderOrFollower(
                f"{self}: broker {self.leader_hint} leads", leader=str(self.leader_hint)
            )
        self.leader.check_epoch(epoch)
        return self.leader

    def client_error(self, error: errors.PkError) -> errors.PkError:
        """Return the error that clients get for `error`.

        A failure of one replica of several is retriable for them, because another replica will lead
        (rules L2, L9).
        """
        if self.others and isinstance(error, errors.StorageFailed | errors.CorruptLog):
            return errors.NotLeaderOrFollower(f"{self}: this replica is offline: {error.message}")
        return error

    @property
    def leader_epoch(self) -> Epoch:
        return NONE if self.leader is None else self.leader.leader_epoch

    @property
    def high_watermark(self) -> Offset:
        """Return the high watermark as far as this replica knows it."""
        if self.leader is not None:
            return self.leader.high_watermark
        return max(self.log.log_start, min(self._leader_watermark, self.log.written_end))

    @property
    def last_stable_offset(self) -> Offset:
        """Return the last stable offset, which is never below log_start (rule L11)."""
        return max(self.log.log_start, self.log.last_stable_offset(self.high_watermark))

    @property
    def tiered_end(self) -> Offset:
        """The offset up to which the tier is known to cover the log; NONE without a tier."""
        return self.log.tiered_end if self.tiered else NONE

    @property
    def settled_end(self) -> Offset:
        """The offset up to which every assigned replica is known to be cleaned (rule C4)."""
        if self.leader is None or not self.log.config.compacted:
            return self.leader_settled_end
        return min(self.leader.settled_end, self.log.cleaned.end)

    def settled_end_moved(self) -> None:
        """Tell the followers a new settled end."""
        for follower in list(self._followers):
            follower.watermark_moved(self.key)

    def bound(self, isolation: int) -> Offset:
        """How far a reader may see (H3)."""
        return self.last_stable_offset if isolation == READ_COMMITTED else self.high_watermark

    def violations(self) -> list[str]:
        """Return the violated relations between a served partition's offsets (rules T1, L11)."""
        stable, tiered = self.last_stable_offset, self.tiered
        found = offset_violations(self.leader, self.log, stable, tiered=tiered)
        return [f"{self}: {each} out of order" for each in found]

    def __str__(self) -> str:
        return f"{self.topic}-{self.key.partition}"

    # -- produce ---------------------------------------------------------------------------------

    def append(
        self,
        header: Header,
        batch: Buffer,
        epoch: Epoch,
        now: Now,
        delayed: DelayedProduce,
        *,
        from_client: bool = True,
    ) -> None:
        """Decide a checked batch and queue its delayed produce.  If it raises, nothing changed.

        from_client: False = a batch that this broker made: the topic's bounds do not apply to it,
        nor does the reserve of the disk (replica/space D2).
        """
        leader = self.serving(epoch)
        leader.check_acks(delayed.acks)
        if delayed.acks == ACKS_ALL:
            self._host.purgatory.check_room()
        elif header.idempotent:
            raise errors.InvalidRequest("an idempotent producer needs acks=all (rule L6)")
        decided = self.log.decide(
            header,
            batch,
            leader_epoch=leader.leader_epoch,
            now_ms=now.wall_ms,
            activity_ms=now.activity_ms,
            from_client=from_client,
            refusal=self.writer.space.refusal(header.length) if from_client else None,
        )
        delayed.base_offset, delayed.last_offset = decided.base_offset, decided.last_offset
        delayed.append_time_ms = decided.log_append_time_ms
        delayed.log_start = self.log.log_start
        delayed.leader_epoch = leader.leader_epoch
        if isinstance(decided, Duplicate):
            self._wait_with_original(delayed, leader)
            return
        delayed.size = decided.size
        self.log.count_in(header.record_count, decided.size)
        self._inflight.append(delayed)
        self.writer.submit(self, decided.size)

    def check_own(self, epoch: Epoch) -> None:
        """Raise what `append_own` would raise now, whatever the batch."""
        self.serving(epoch).check_acks(ACKS_ALL)
        self._host.purgatory.check_room()

    def append_own(self, batch: Buffer, epoch: Epoch, now: Now, delayed: DelayedProduce) -> None:
        """Decide a batch that this broker made as the leader of `epoch`; as `append` otherwise.

        Raises `NotLeaderOrFollower`, `FencedLeaderEpoch`, `NotEnoughReplicas`, `ThrottledError`.
        """
        assert delayed.acks == ACKS_ALL, "the high watermark must cover it"
        header = batches.read_header(batch)
        self.append(header, batch, epoch, now, delayed, from_client=False)

    def wait_for_decided(self, epoch: Epoch, delayed: DelayedProduce) -> None:
        """Queue a delayed produce that waits until every batch that is decided now is committed."""
        leader = self.serving(epoch)
        leader.check_acks(delayed.acks)
        delayed.last_offset, delayed.leader_epoch = self.log.log_end - 1, leader.leader_epoch
        self._wait_with_original(delayed, leader)

    def _wait_with_original(self, delayed: DelayedProduce, leader: Leader) -> None:
        """Queue a delayed produce behind the batch that was decided at its last offset (H4)."""
        if self._inflight and delayed.last_offset >= self.log.written_end:
            self._inflight.append(delayed)
        else:
            self._settle(delayed, leader)

    def _settle(self, delayed: DelayedProduce, leader: Leader) -> None:
        """Answer a delayed produce whose batch is WRITTEN; acks=all waits for the watermark."""
        if delayed.sink is None:
            return
        if delayed.acks != ACKS_ALL or leader.high_watermark > delayed.last_offset:
            delayed.answer(None)
            return
        delayed.parked = self._host.purgatory.park(
            self.key, delayed.leader_epoch, delayed.last_offset + 1, delayed.deadline_ms, delayed
        )
        self._host.parked()

    # -- the writer (directory_writer.Appender) ----------------------------------------------------

    def take_round(self) -> Round | None:
        """Return what writes everything decided since the last round; None = nothing."""
        assert self._plan is None, "one round at a time"
        self._plan = plan = self.log.take_writes()
        if plan is None:
            return None
        return Round(partial(self.log.perform, plan), epoch_file_of(self.log.path, plan))

    def end_round(self, outcome: Any, failure: BaseException | None) -> None:
        """Complete a round of the writer: move the high watermark and answer, or undo."""
        plan, self._plan = self._plan, None
        error = failure
        if failure is not None and not isinstance(failure, errors.PkError):
            error = errors.InternalError(f"{self}: writing failed: {failure!r}")
        done = self.log.complete(plan, error if isinstance(error, Exception) else None)
        if done.error is not None:
            self._undo(done, done.error)
        else:
            self._advance(done)

    def _advance(self, done: Completion) -> None:
        leader, now_ms = self.leader, self._host.now_ms
        moved = leader is not None and leader.on_local_end(
            done.written_end, done.synced_end, now_ms
        )
        size = 0
        while self._inflight and self._inflight[0].last_offset < done.written_end:
            delayed = self._inflight.popleft()
            size += delayed.completed()
            if leader is not None:
                self._settle(delayed, leader)
        self.writer.done(size)
        for watcher in list(self._followers):
            watcher.moved(self.key)
        if moved:
            self.watermark_moved()
        elif self.replica is not None and leader is None:
            self._follow_log_start()
            self._host.partition_moved(self)
            self.replica.stored()

    def _undo(self, done: Completion, error: errors.PkError) -> None:
        """Fail what was decided since the last written end, after a failed write (H5)."""
        every, self._inflight = self._inflight, deque()
        self.writer.done(sum(delayed.completed() for delayed in every))
        for delayed in every:
            delayed.answer(self.client_error(error))
        if self.marker_listener is not None:
            self.marker_listener.appends_undone(done.written_end)
        if self.leader is not None:
            self.leader.on_undone(done.written_end)
        if isinstance(error, errors.StorageFull):
            self.writer.space.storage_full(self._host.now_ms)
        if isinstance(error, errors.StorageFailed | errors.CorruptLog):
            self.storage_failed(error)
        elif self.replica is not None:
            self.replica.not_stored(error)

    def watermark_moved(self) -> None:
        """Answer the parked produces that the high watermark covers, and wake the readers."""
        leader = self.leader
        assert leader is not None
        for delayed in self._host.purgatory.on_high_watermark(
            self.key, leader.leader_epoch, leader.high_watermark
        ):
            delayed.answer(None)
        self.bounds_moved()

    def bounds_moved(self, *, urgent: bool = False) -> None:
        """Wake the fetch sessions that hold a position here, the followers and the tier's
        copier.
        """
        for watcher in list(self._watchers):
            watcher.moved(self.key, urgent=urgent)
        if self._deletions:
            self.complete_deletions()
        for follower in list(self._followers):
            if urgent:
                follower.moved(self.key, urgent=True)
            else:
                follower.watermark_moved(self.key)
        self._host.partition_moved(self)

    def deleted(self, before: Offset) -> asyncio.Future[None]:
        """Return a future, done when all replicas that may lead next start at `before` (T9)."""
        future = self._deletions.wait(before)
        self.complete_deletions()
        return future

    @property
    def known_log_start(self) -> Offset:
        """Return the lowest log start of the replicas that may lead next (T9); NONE = unknown."""
        return NONE if self.leader is None else self.leader.low_watermark(self.log.log_start)

    def complete_deletions(self) -> None:
        """Answer the deletions that waited for a follower's log start, or for the ISR to change."""
        leads = self.leader is not None
        if (
            self._deletions.log_start_known(self.known_log_start, str(self), leads=leads)
            and self.tiered
        ):
            self._host.partition_moved(self)  # the deleted rows may leave the table now (T9)

    # -- leadership ------------------------------------------------------------------------------

    def lead(self, state: PartitionState, *, checkpointed: Offset) -> None:
        """Lead in the epoch of `state`, or take over an ISR that changed within the epoch."""
        current = self.leader
        self.others = len(state.isr) > 1
        if current is not None and current.leader_epoch == state.leader_epoch:
            if current.on_isr_committed(
                state.isr, state.replicas, state.partition_epoch, self._host.now_ms, state.adding
            ):
                self.watermark_moved()
            self.complete_deletions()
            for follower in list(self._followers):  # removed members set their positions again
                follower.moved(self.key, urgent=True)
            return
        assert self.log.log_end == self.log.written_end or current is not None, "a follower settles"
        tier_has_what_left(self.log, tiered=self.tiered)
        known = max(checkpointed, self.high_watermark)
        self._overtaken(state.leader_epoch)
        self.leader_hint = state.leader
        self.unclean = state.unclean
        self._deletions.new_epoch()
        self.on(ReplicaEvent.ELECTED)
        self.leader = Leader(
            node_id=self._host.node_id,
            leader_epoch=state.leader_epoch,
            partition_epoch=state.partition_epoch,
            replicas=state.replicas,
            isr=state.isr,
            log_end=self.log.written_end,
            synced_end=self.log.synced_end,
            high_watermark=max(known, self.log.log_start),
            min_insync_replicas=self.settings["min_insync_replicas"],
            flush_on_ack=self.settings["flush_on_ack"],
            now_ms=self._host.now_ms,
            adding=state.adding,
        )
        self.bounds_moved(urgent=True)

    def step_down(self, leader: NodeId) -> None:
        """Stop leading, as `leader` leads now (NONE = no broker); answer everything parked (L5)."""
        self.leader_hint = leader
        if self.leader is not None:
            self.on(ReplicaEvent.RESIGNED)
            self._leader_watermark = self.leader.high_watermark
            self.leader = None
            self._overtaken(None)
            self.bounds_moved(urgent=True)

    def follow(self, replica: Follows) -> None:
        """Begin to follow.  From now on this partition notifies `replica` of what it has stored."""
        self.on(ReplicaEvent.FOLLOWED)
        self.replica = replica

    def detach(self) -> Follows | None:
        """Stop fetching; returns what `follow` was given, None if the replica did not follow."""
        replica, self.replica = self.replica, None
        if replica is not None:
            self.on(ReplicaEvent.DETACHED)
        return replica

    def fail(self, error: errors.PkError, event: ReplicaEvent = ReplicaEvent.FAILED) -> None:
        """Stop serving the partition because of `error`, and answer everything parked with it.

        event: FAILED, RECOVERY_BEGUN or REMOVED.
        """
        self.on(event, error)
        if self.leader is not None:
            self._leader_watermark = self.leader.high_watermark
            self.leader = None
        self._abandon(self.client_error(error))
        for delayed in self._host.purgatory.on_epoch(self.key, None):
            delayed.answer(self.client_error(error))
        self.bounds_moved(urgent=True)

    def _overtaken(self, leader_epoch: Epoch | None) -> None:
        error = errors.NotLeaderOrFollower(f"{self}: the leader epoch ended before the commit")
        for delayed in self._host.purgatory.on_epoch(self.key, leader_epoch):
            delayed.answer(error)
        self._abandon(error)

    def _abandon(self, error: errors.PkError) -> None:
        """Fail the produces whose batches are in the writer and may still be stored.

        Under acks=all a client treats any error as an unknown outcome (L5).  Under other acks it
        would take NOT_LEADER for a refusal and send again, so it gets OUTCOME_UNKNOWN (L7).
        """
        unknown = errors.OutcomeUnknown(f"{error.message}; it may have been stored")
        for delayed in list(self._inflight):  # they stay queued: their bytes still count
            delayed.answer(error if delayed.acks == ACKS_ALL else unknown)

    def synced(self, synced_end: Offset) -> None:
        """Take over `synced_end`, which a flush outside a round has reached."""
        if self.leader is not None and self.leader.on_local_end(self.log.written_end, synced_end):
            self.watermark_moved()
        if self.replica is not None:
            self.replica.stored()

    def reconfigure(self, settings: Mapping[str, Any], epoch: Epoch, *, tiered: bool) -> None:
        """Take over the topic's settings as of leader epoch `epoch`.

        A leader of an earlier epoch must not apply them (R1).  The caller has already replaced the
        log's own settings.
        """
        self.settings = settings
        # without a tier, only topic retention counts, as after a restart
        if tiered != self.tiered:
            self.tiered, low = tiered, self.log.local_log_start
            self.tier = self.tier.said_in(self.leader_epoch)
            known = (max(low, self.tier.tiered_end), max(low, self.tier.droppable_end))
            self.log.tiered_end, self.log.droppable_end = known if tiered else (NONE, 0)
        leader, rules = self.leader, (settings["min_insync_replicas"], settings["flush_on_ack"])
        if leader and leader.leader_epoch == epoch and leader.on_config(*rules):
            self.watermark_moved()
        else:
            self._host.partition_moved(self)

    # -- following -------------------------------------------------------------------------------

    def append_fetched(self, payload: Buffer, now_ms: int, epoch: Epoch, credit: Credit) -> None:
        """Append the batches that the leader of `epoch` sent, unchanged; they take `credit`.

        Raises `CorruptBatch`, `FencedLeaderEpoch`; the batches before the bad one are appended.
        """
        assert self.leader is None, "a leader does not follow"
        delayed = DelayedProduce(None, 0, 0, 0, 0, credit)
        try:
            for header, raw in batches.iter_batches(payload):
                batches.check(raw)
                done = self.log.append_as_follower(header, raw, now_ms=now_ms, newest=epoch)
                delayed.size += done.size
                delayed.last_offset = done.last_offset
        finally:
            if delayed.size:
                credit.queued(delayed.size)
                self._inflight.append(delayed)
                self.writer.submit(self, delayed.size)

    def update_high_watermark(self, high_watermark: Offset) -> None:
        """Take over the leader's high watermark, or the end of this log if that is lower."""
        if high_watermark > self._leader_watermark:
            self._leader_watermark = high_watermark
            self._follow_log_start()
            self._host.partition_moved(self)

    def update_retention(
        self, log_start: Offset, tiered_end: Offset, droppable_end: Offset
    ) -> None:
        """Take over the leader's log start, and how far the tier has the log (rules R5, T6)."""
        log = self.log
        if self.tiered:
            log.tiered_end = max(log.tiered_end, tiered_end)
            log.droppable_end = max(log.droppable_end, droppable_end)
        self.update_log_start(log_start)

    def update_log_start(self, log_start: Offset) -> None:
        """Take over a log start that the leader, or the tier's table, has given (T9)."""
        if log_start > max(self.leader_log_start, self.log.log_start):
            self.leader_log_start = log_start
            self._follow_log_start()

    def _follow_log_start(self) -> None:
        """Request an early retention visit if the leader's log start is ahead of this log's.

        The log start follows up to the high watermark.  The client that asked for the deletion
        waits for it, so the visit does not wait for the wheel's next turn.
        """
        if min(self.leader_log_start, self.high_watermark) > self.log.log_start:
            self._host.retain_soon(self.key)

    def cut_watermark(self, offset: Offset) -> None:
        """Lower the watermarks to `offset`, where the log was truncated or replaced (rules R4, R5).

        Reports of a former leader about records beyond `offset` no longer count, also about deleted
        (T9) and tiered (T15) records.  The current leader reports them again if they still hold.
        """
        self.tier = known_below(offset, self.log, self.tier)
        self._leader_watermark = min(self._leader_watermark, offset)
        self.leader_log_start = min(self.leader_log_start, offset)
        self.leader_settled_end = min(self.leader_settled_end, offset)

    # -- readers ---------------------------------------------------------------------------------

    def watch(self, watcher: Watcher) -> None:
        self._watchers[watcher] = None

    def watch_end(self, watcher: EndWatcher) -> None:
        self._followers[watcher] = None

    def unwatch(self, watcher: Any) -> None:
        self._watchers.pop(watcher, None)
        self._followers.pop(watcher, None)

    def check_fetch(self, epoch: Epoch, offset: Offset) -> Leader:
        """Return the `Leader` if a reader may fetch at `offset`, else raise (KIP-207, KIP-320)."""
        leader = self.serving(epoch)
        check_position(str(self), leader, self.log.log_start, offset)
        return leader

    def diverging(self, last_fetched_epoch: Epoch, offset: Offset) -> wire.EpochEnd | None:
        """Return where this log diverges from what a reader has read (KIP-320); None = nowhere."""
        log = self.log
        found = reader_divergence(log.epochs, log.written_end, last_fetched_epoch, offset)
        return None if found is None else wire.EpochEnd(**found._asdict())

    def find_divergence(
        self, last_epoch: Epoch, offset: Offset, forgotten_end: Offset | None
    ) -> Divergence | None:
        """Return where this log diverges from a follower's log; None = nowhere.

        The follower's log ends at `offset`, and its last record has `last_epoch`.  C8 also counts.
        Raises `OffsetNotAvailable` while nothing says where the log begins (replica/corruption N4).
        """
        log, first = self.log, self.log.first_offset
        found = find_divergence(log.epochs, first, log.written_end, last_epoch, offset)
        if found is None and log.cleaned.hides_from(offset, forgotten_end):
            found = StartAt(first)
        if isinstance(found, StartAt):
            check_front(str(self), log)
        return found
