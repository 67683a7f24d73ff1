"""The decided end of one partition's log: the loop assigns offsets to batches before they are
written.

A `LogAppender` owns everything that is decided and not written yet: the tail segment, the producers
and the leader epochs as of the log end, and the write plans.  It changes the written state
(`LocalLog`) only when a plan completes.  Everything here runs on the loop, except `restart`,
`repair_op` and `repaired`: these run in the write lane while nothing is decided.

Invariants
  A1  Plans complete in the order in which they were taken.
  A2  When a plan fails, every append decided since the last good end is undone (rule L2).  The
      generation grows, `complete` ignores the later plans of the old generation, and the next plan
      begins with the repair of the files.
"""

from __future__ import annotations

from collections import deque

from pk import errors, generations
from pk.log import batch as batches
from pk.log import control_rows, validate
from pk.log.batch import Header
from pk.log.epochs import LeaderEpochs
from pk.log.index import SPAN_MAX
from pk.log.local_log import LocalLog
from pk.log.plan import (
    Appended,
    AppendOp,
    Completion,
    Duplicate,
    EpochOp,
    RepairOp,
    RollOp,
    WritePlan,
)
from pk.log.producers import Producers, Undo
from pk.log.segment import Segment
from pk.log.storage import Buffer
from pk.types import NONE, Offset

NEVER = 2**63 - 1
#: No append passes the end of a block of this many offsets (rule T13).
BLOCK = generations.OFFSETS


class LogAppender:
    """Assigns offsets to batches and makes write plans.  `local` is the written state; `epochs` and
    `producers` are those of its end.
    """

    def __init__(self, local: LocalLog, epochs: LeaderEpochs, producers: Producers) -> None:
        self._local = local
        self._epochs = epochs
        self.producers = producers
        self.tail = local.segments[-1]  #: the segment that gets the next batch
        self.generation = 0  #: grows when a plan fails (A2)
        self.pending_bytes = 0  #: bytes decided and not completed
        self._pending: WritePlan | None = None  #: the plan that is decided and not taken
        self._outstanding: deque[WritePlan] = deque()  #: plans taken and not completed
        self._undo: deque[Undo] = deque()
        self._repair = False
        self._unsynced_records = 0
        self._unsynced_since_ms: int | None = None

    @property
    def log_end(self) -> Offset:
        """The next offset to be assigned."""
        return self.tail.decided.next_offset

    def idle(self) -> bool:
        """Whether everything decided is written."""
        return self._pending is None and not self._outstanding

    def repair_op(self) -> RepairOp | None:
        """Return how the files are cut back after a plan failed; None = no plan failed since the
        last repair.
        """
        if not self._repair:
            return None
        tail = self._local.segments[-1]
        return RepairOp(tail, tail.written.size, self._epochs.encode())

    def repaired(self) -> None:
        """Note that the write lane has performed `repair_op`."""
        self._repair = False

    def restart(self, producers: Producers, tail: Segment) -> None:
        """Continue with the state that was read back from the files, after the log was cut or
        opened again.
        """
        self.producers = producers
        self.tail = tail

    def decide(
        self,
        header: Header,
        batch: Buffer,
        *,
        leader_epoch: int,
        now_ms: int,
        from_client: bool = True,
        refusal: errors.PkError | None = None,
        activity_ms: int | None = None,
    ) -> Appended | Duplicate:
        """Assign offsets to a batch, in memory (by the tables of log/validate.py).

        header, batch: as `batch.check` returned it; `columns.validate_body` was run.  `batch` must
            not change until the plan that holds it is completed
        from_client: False = a batch of the broker's own (markers, metadata records)
        refusal: why no batch may be appended now.  A duplicate is answered all the same
        activity_ms: time of the last activity of the producer, if that is not `now_ms` (rule L10)

        Raises `refusal`, `FencedLeaderEpoch`, and what log/validate.py raises.
        """
        self._check_open()
        if from_client:
            validate.check_batch(header, self._local.config, now_ms)
        if leader_epoch < self._epochs.latest:
            raise errors.FencedLeaderEpoch(
                f"{self._local.topic_partition}: leader epoch {leader_epoch} is below the log's "
                f"epoch {self._epochs.latest}"
            )
        if not header.control:
            verdict, span = validate.check_producer(header, self.producers.get(header.producer_id))
            if verdict is validate.ValidationResult.DUPLICATE:
                assert span is not None
                return Duplicate(span.base_offset, span.last_offset, span.append_time_ms)
        if refusal is not None:
            raise refusal
        stamp = now_ms if self._local.config.log_append_time and not header.control else None
        base = self.tail.decided.next_offset
        if generations.leaves_block(base, header.next_offset - header.base_offset, BLOCK):
            raise errors.UnsupportedFeature(
                f"{self._local.topic_partition}: no offset is left (T13): make another topic"
            )
        parts = batches.patched(batch, base, leader_epoch, stamp)
        max_timestamp = header.max_timestamp if stamp is None else stamp
        activity_ms = now_ms if activity_ms is None else activity_ms
        return self._assign(
            header, batch, base, leader_epoch, parts, max_timestamp, activity_ms, stamp
        )

    def append_as_follower(
        self, header: Header, batch: Buffer, *, now_ms: int, newest: int = NONE
    ) -> Appended:
        """Append a batch of the leader unchanged, with its offsets and its epoch.

        newest: the leader's epoch; -1 = unknown.  No checksum covers the epoch of a batch, and a
            damaged one that is too high would fence every later leader

        Raises `CorruptBatch` unless the batch continues the log, or if its epoch is above `newest`;
        `FencedLeaderEpoch` if its epoch is below the log's.
        """
        self._check_open()
        end, tp = self.log_end, self._local.topic_partition
        gap = header.base_offset > end and not self._local.config.compacted
        if header.base_offset < end or gap:
            raise errors.CorruptBatch(f"{tp}: batch at {header.base_offset}, the log ends at {end}")
        if newest != NONE and header.leader_epoch > newest:
            raise errors.CorruptBatch(
                f"{tp}: a batch of epoch {header.leader_epoch}, the leader's epoch is {newest}"
            )
        if header.leader_epoch < self._epochs.latest:
            raise errors.FencedLeaderEpoch(
                f"{tp}: epoch {header.leader_epoch} is below the log's epoch {self._epochs.latest}"
            )
        return self._assign(
            header,
            batch,
            header.base_offset,
            header.leader_epoch,
            [batch],
            header.max_timestamp,
            now_ms,
            None,
        )

    def _check_open(self) -> None:
        local = self._local
        if local.storage.failed is not None:
            raise errors.StorageFailed(f"{local.storage.root} is offline: {local.storage.failed}")
        if local.closed or local.retired:
            raise errors.NotLeaderOrFollower(f"{local.topic_partition} is closed")

    def _assign(
        self,
        header: Header,
        batch: Buffer,
        base: int,
        leader_epoch: int,
        parts: list[Buffer],
        max_timestamp: int,
        now_ms: int,
        stamp: int | None,
    ) -> Appended:
        """Add an accepted batch to the decided state and to the pending plan."""
        plan = self._plan()
        self._roll_if_due(plan, header, base, now_ms)
        first_of_epoch = leader_epoch != NONE and self._epochs.assign(leader_epoch, base)
        if first_of_epoch:
            plan.ops.append(EpochOp(self._epochs.encode()))
        tail = self.tail
        markers = control_rows.decode_markers(batch) if header.control else ()
        if header.control or header.producer_id != NONE:
            undo = self.producers.apply(
                header, base, now_ms, markers, NONE if stamp is None else stamp
            )
            tail.aborted += undo.aborted
            self._undo.append(undo)
        last = plan.ops[-1] if plan.ops else None
        if isinstance(last, AppendOp) and last.segment is tail:
            last.buffers.extend(parts)
        else:
            plan.ops.append(AppendOp(tail, tail.decided.size, parts))
        crc = header.crc if stamp is None else batches.read_header(parts[0]).crc
        tail.grow(header, base, max_timestamp, crc, now_ms, self._local.config.index_interval_bytes)
        plan.extents[tail] = tail.decided
        plan.end = tail.decided.next_offset
        plan.size += header.length
        plan.records += header.record_count
        self.pending_bytes += header.length
        if self._local.synced_end >= base:
            self._unsynced_records, self._unsynced_since_ms = 0, None
        self._unsynced_records += header.record_count
        if self._unsynced_since_ms is None:
            self._unsynced_since_ms = now_ms
        if self._flush_wanted(now_ms):
            plan.sync = True
        done = Appended(
            base,
            base + header.last_offset_delta,
            max_timestamp,
            NONE if stamp is None else stamp,
            leader_epoch,
            header.length,
            first_of_epoch,
        )
        plan.appended.append(done)
        return done

    def _plan(self) -> WritePlan:
        """Return the plan that has not been taken yet; begin one if there is none."""
        plan = self._pending
        if plan is None:
            plan = self._pending = WritePlan(self.generation, self.log_end, self.log_end)
            repair = self.repair_op()
            if repair is not None:
                self._repair = False
                plan.ops.append(repair)
        return plan

    def _flush_wanted(self, now_ms: int) -> bool:
        config = self._local.config
        if config.flush_on_ack or self._unsynced_records >= config.flush_messages:
            return True
        return (
            self._unsynced_since_ms is not None
            and now_ms - self._unsynced_since_ms >= config.flush_ms
        )

    def flush_due_ms(self) -> int | None:
        """Return when `flush_ms` requires a flush; None = every record is SYNCED, or flush_ms is
        not set.
        """
        if self._unsynced_since_ms is None or self._local.synced_end >= self.log_end:
            return None
        if self._local.config.flush_ms >= NEVER - self._unsynced_since_ms:
            return None
        return self._unsynced_since_ms + self._local.config.flush_ms

    def _roll_if_due(self, plan: WritePlan, header: Header, base: int, now_ms: int) -> None:
        extent, config = self.tail.decided, self._local.config
        if not extent.size:
            return
        full = extent.size + header.length > config.segment_bytes
        span = base + header.last_offset_delta - self.tail.base_offset > SPAN_MAX
        if full or span or now_ms - extent.first_append_ms >= config.segment_ms:
            # Not at `base`: in a copy of a cleaned log offsets may be missing in front of it, and
            # segments join without a gap (log/swap W3).
            self._roll(plan, self.log_end)

    def _roll(self, plan: WritePlan, base: int) -> None:
        old = self.tail
        new = Segment(self._local.storage, self._local.path, base)
        plan.ops.append(RollOp(old, new, self.producers.snapshot(base)))
        plan.extents[old] = old.decided
        plan.extents[new] = new.decided
        self.tail = new

    def roll(self) -> bool:
        """Decide a roll; the next plan performs it.  Returns False if the active segment is
        empty.
        """
        self._check_open()
        if not self.tail.decided.size:
            return False
        self._roll(self._plan(), self.log_end)
        return True

    def take_writes(self) -> WritePlan | None:
        """Take everything that was decided since the last plan; None = nothing.  The caller
        performs the plans in this order and completes each.
        """
        plan, self._pending = self._pending, None
        if plan is not None:
            if plan.sync:
                self._unsynced_records = 0
                self._unsynced_since_ms = None
            self._outstanding.append(plan)
        return plan

    def complete(self, plan: WritePlan, error: BaseException | None = None) -> Completion:
        """Make the batches that `perform(plan)` wrote visible to readers, or undo them if there is
        an `error` (A2).  Called once per plan (A1).
        """
        local = self._local
        if plan.generation != self.generation:  # undone together with an earlier plan
            return Completion(local.written_end, local.synced_end)
        assert self._outstanding, "a plan that was not taken"
        assert self._outstanding[0] is plan, "plans complete in order"
        if error is not None:
            return self._failed(error)
        self._outstanding.popleft()
        fresh = []
        for segment, extent in plan.extents.items():
            segment.written = extent
            if segment.base_offset > local.segments[-1].base_offset:
                fresh.append(segment)
        if fresh:
            local.begin_segments(fresh)
        local.written_end = plan.end
        self.pending_bytes -= plan.size
        while self._undo and self._undo[0].offset < plan.end:
            self._undo.popleft()
        if plan.sync:
            local.synced_by_loop = max(local.synced_by_loop, plan.end)
        return Completion(local.written_end, local.synced_end, rolled=bool(fresh))

    def _failed(self, error: BaseException) -> Completion:
        """Undo every append decided since the last good end; the next plan cuts the files back
        (rule L2).
        """
        plans = [*self._outstanding, *([self._pending] if self._pending is not None else [])]
        failed = tuple(done for plan in plans for done in plan.appended)
        self._outstanding.clear()
        self._pending = None
        while self._undo:
            self.producers.undo(self._undo.pop())
        self.tail = self._local.segments[-1]
        self.tail.revert()
        self._epochs.truncate_end(self._local.written_end)
        self.generation += 1
        self._repair = True
        self.pending_bytes = 0
        typed = (
            error
            if isinstance(error, errors.PkError)
            else errors.StorageFailed(f"{self._local.path}: {error!r}")
        )
        return Completion(self._local.written_end, self._local.synced_end, failed, typed)
