"""One partition's log: decide, write, complete, read, truncate, retain.

Three threads meet here and never share a mutable thing without a rule (docs/design/0001):
  loop        decide, append_as_follower, take_writes, complete, read_recent, retire, properties,
              advance_log_start, retention_plan, drop_segments
  write lane  open, perform, flush, checkpoint, truncate_to, reset_to, close
              (one thread per directory, in order)
  read lane   read, offset_for_time, offset_of_max_timestamp, bytes_at, flush_sealed (any thread)

Use
    outcome = log.decide(header, batch, leader_epoch=…, now_ms=…)     # Appended | Duplicate |
    raises plan = log.take_writes()                                          # None = nothing
    decided since the last plan try: await disk.write(lambda: log.perform(plan)); error = None
    except errors.PkError as e: error = e done = log.complete(plan, error)
    # always, in the order the plans were taken
Several plans may be queued.  If one fails, `complete` undoes every append decided since the last
good end (`done.failed`), later plans of that generation fail in the lane without touching the disk,
and the next plan begins by cutting the files back (rule L2)."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable

from pk import errors
from pk.log import aborted, columns, loading, retention, validate
from pk.log import batch as batches
from pk.log.batch import Header
from pk.log.epochs import LeaderEpochs
from pk.log.index import SPAN_MAX
from pk.log.plan import (
    Appended,
    AppendOp,
    Completion,
    Duplicate,
    EpochOp,
    LogConfig,
    Read,
    RetentionPlan,
    RollOp,
    WritePlan,
)
from pk.log.producers import Producers, Undo
from pk.log.recent import Recent
from pk.log.retention import SegmentFacts
from pk.log.segment import (
    DELETED,
    IndexCache,
    Segment,
)
from pk.log.storage import Buffer, Storage
from pk.log.writing import Writable
from pk.types import NONE, AbortedTransaction, TopicPartition

#: A job for the write lane.
PendingDelete = Callable[[], None]
DAY_MS = 86_400_000
NEVER = 2**63 - 1


class PartitionLog(Writable):
    """See the module's docstring.  `config` may be replaced at any time on the loop."""

    def __init__(
        self,
        storage: Storage,
        path: str,
        topic_partition: TopicPartition,
        topic_id: str,
        config: LogConfig,
        loaded: loading.Loaded,
        *,
        log_start: int,
        synced_end: int,
        cache: IndexCache,
    ) -> None:
        self.topic_partition = topic_partition
        self.topic_id = topic_id
        self.path = path  #: directory relative to the storage's root
        self.config = config
        self.epochs: LeaderEpochs = loaded.epochs
        self.producers: Producers = loaded.producers
        self.notes = tuple(loaded.notes)  #: what opening repaired
        self.log_start = log_start
        #: No checkpoint says where the log starts, and something left: see server/tier/view.py.
        self.start_unknown = False
        #: The tier covers [log_start, tiered_end); -1 = no tier.  Set by the broker.
        self.tiered_end = NONE
        #: Below it local data may go (rule T6: committed, confirmed, delay over).  Set by the
        #: broker.
        self.droppable_end = 0
        self.retention_hold: int | None = None  #: retention does not move log_start past it
        self.recent: Recent | None = None  #: where the end of the log is kept in memory
        self._storage = storage
        self._cache = cache
        self._segments: tuple[Segment, ...] = tuple(loaded.segments)  #: readers take it as a whole
        self._written_end = loaded.segments[-1].written.next_offset
        self._synced_lane, self._synced_loop = synced_end, 0
        # loop: what is decided and not yet written
        self._tail = loaded.segments[-1]  #: the segment the next batch goes to
        self._pending: WritePlan | None = None
        self._outstanding: deque[WritePlan] = deque()
        self._undo: deque[Undo] = deque()
        self._generation = 0
        self._repair = False
        self._pending_bytes = 0
        self._unsynced_records = 0
        self._unsynced_since_ms: int | None = None
        self._init_lane(loaded)
        self._closed = False
        self._retired = False

    @classmethod
    def open(
        cls,
        storage: Storage,
        path: str,
        topic_partition: TopicPartition,
        topic_id: str,
        config: LogConfig,
        *,
        clean: bool,
        recovery_point: int = 0,
        log_start: int | None = None,
        now_ms: int,
        same_boot: bool = False,
        cache: IndexCache | None = None,
        salvage: bool = False,
    ) -> PartitionLog:
        """Open or create.  `clean`: it was closed properly; `same_boot`: the page cache outlived
        the process, so that only the very tail may be torn.  `salvage`: see `loading.load`.
        Raises `CorruptLog` (rule L9), `StorageFailed`, `StorageFull`."""
        loaded = loading.load(
            storage,
            path,
            config,
            clean=clean,
            same_boot=same_boot,
            recovery_point=recovery_point,
            log_start=log_start or 0,
            now_ms=now_ms,
            salvage=salvage,
        )
        first, end = loaded.segments[0].base_offset, loaded.segments[-1].written.next_offset
        start = min(first if log_start is None else log_start, end)
        synced = min(recovery_point, end) if not clean and same_boot else end
        if loaded.created and clean:
            synced = min(recovery_point, end)
        opened = cls(
            storage,
            path,
            topic_partition,
            topic_id,
            config,
            loaded,
            log_start=start,
            synced_end=synced,
            cache=cache or IndexCache(4 * 1024 * 1024),
        )
        opened.start_unknown = log_start is None and first > 0
        return opened

    # -- loop: state -------------------------------------------------------------------------------

    @property
    def log_end(self) -> int:
        """Decided end: the next offset to be assigned."""
        return self._tail.decided.next_offset

    @property
    def written_end(self) -> int:
        return self._written_end

    @property
    def size_bytes(self) -> int:
        return sum(segment.written.size for segment in self._segments)

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    @property
    def segments(self) -> tuple[SegmentFacts, ...]:
        """What is written, oldest first; the last is the active one."""
        return tuple(
            SegmentFacts(
                s.base_offset, s.written.next_offset, s.written.size, s.written.max_timestamp
            )
            for s in self._segments
        )

    def newest_append_ms(self) -> int | None:
        """When the last batch was appended, as a broker wrote into it (LogAppendTime); None = no
        broker did.  Reads the disk.
        """
        for segment in reversed(self._segments):
            if segment.written.size:
                raw = segment.read_at(segment.written.last_position, batches.HEADER_BYTES)
                last = batches.read_header(raw)
                return last.max_timestamp if last.log_append_time and not last.control else None
        return None

    @property
    def pending_bytes(self) -> int:
        """Decided, not yet completed: what back-pressure counts."""
        return self._pending_bytes

    @property
    def last_epoch(self) -> int:
        return self.epochs.latest

    # -- loop: append ------------------------------------------------------------------------------

    def decide(
        self,
        header: Header,
        batch: Buffer,
        *,
        leader_epoch: int,
        now_ms: int,
        from_client: bool = True,
        transactions: bool = False,
        refusal: errors.PkError | None = None,
        heard_ms: int | None = None,
    ) -> Appended | Duplicate:
        """Give the batch offsets, in memory (the tables of log/validate.py).

        `header` comes from `batch.check`, and `columns.validate_body` was run.
        `from_client=False`: the broker's own batches (markers, metadata records).  `batch` must not
        change until the plan that holds it completed.  `refusal`: why nothing may be appended now;
        what is stored already is answered all the same.  `heard_ms`: when its producer
        was heard, and the segment appended to, where that is not `now_ms` (rule L10)."""
        self._check_open()
        if from_client:
            validate.check_batch(header, self.config, now_ms, transactions)
        if leader_epoch < self.epochs.latest:
            raise errors.FencedLeaderEpoch(
                f"{self.topic_partition}: epoch {leader_epoch} after {self.epochs.latest}"
            )
        if not header.control:
            verdict, span = validate.check_producer(header, self.producers.get(header.producer_id))
            if verdict is validate.Verdict.DUPLICATE:
                assert span is not None
                return Duplicate(span.base_offset, span.last_offset, span.append_time_ms)
        if refusal is not None:
            raise refusal
        stamp = now_ms if self.config.log_append_time and not header.control else None
        base = self._tail.decided.next_offset
        parts = batches.patched(batch, base, leader_epoch, stamp)
        max_timestamp = header.max_timestamp if stamp is None else stamp
        heard_ms = now_ms if heard_ms is None else heard_ms
        return self._assign(
            header, batch, base, leader_epoch, parts, max_timestamp, heard_ms, stamp
        )

    def append_as_follower(
        self, header: Header, batch: Buffer, *, now_ms: int, newest: int = NONE
    ) -> Appended:
        """Take a leader's batch as it is, offsets and epoch included.  Raises `CorruptBatch` unless
        it continues the log, and if its epoch is beyond `newest`, the leader's: no checksum covers
        it, and it would fence every leader to come.
        """
        self._check_open()
        end = self.log_end
        if header.base_offset < end or (header.base_offset > end and not self.config.compacted):
            raise errors.CorruptBatch(
                f"{self.topic_partition}: batch at {header.base_offset}, the log ends at {end}"
            )
        if newest != NONE and header.leader_epoch > newest:
            raise errors.CorruptBatch(
                f"{self.topic_partition}: batch of epoch {header.leader_epoch}, {newest} leads"
            )
        if header.leader_epoch < self.epochs.latest:
            raise errors.FencedLeaderEpoch(
                f"{self.topic_partition}: epoch {header.leader_epoch} after {self.epochs.latest}"
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
        if self._storage.failed is not None:
            raise errors.StorageFailed(f"{self._storage.root} is offline: {self._storage.failed}")
        if self._closed or self._retired:
            raise errors.NotLeaderOrFollower(f"{self.topic_partition} is closed")

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
        """Everything is allowed: make it part of the decided state and of the pending plan."""
        plan = self._plan()
        self._roll_if_due(plan, header, base, now_ms)
        first_of_epoch = leader_epoch != NONE and self.epochs.assign(leader_epoch, base)
        if first_of_epoch:
            plan.ops.append(EpochOp(self.epochs.encode()))
        tail = self._tail
        markers = columns.decode_markers(batch) if header.control else ()
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
        tail.grow(header, base, max_timestamp, crc, now_ms, self.config.index_interval_bytes)
        plan.extents[tail] = tail.decided
        plan.end = tail.decided.next_offset
        plan.size += header.length
        plan.records += header.record_count
        self._pending_bytes += header.length
        if self.synced_end >= base:
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
        plan = self._pending
        if plan is None:
            plan = self._pending = WritePlan(self._generation, self.log_end, self.log_end)
            if self._repair:
                self._repair = False
                plan.ops.append(self._repair_op())
        return plan

    def _idle(self) -> bool:
        return self._pending is None and not self._outstanding

    def _flush_wanted(self, now_ms: int) -> bool:
        config = self.config
        if config.flush_on_ack or self._unsynced_records >= config.flush_messages:
            return True
        return (
            self._unsynced_since_ms is not None
            and now_ms - self._unsynced_since_ms >= config.flush_ms
        )

    def flush_due_ms(self) -> int | None:
        """When `flush_ms` asks for a flush; None = nothing unsynced, or no such setting."""
        if self._unsynced_since_ms is None or self.synced_end >= self.log_end:
            return None
        if self.config.flush_ms >= NEVER - self._unsynced_since_ms:
            return None
        return self._unsynced_since_ms + self.config.flush_ms

    def _roll_if_due(self, plan: WritePlan, header: Header, base: int, now_ms: int) -> None:
        extent, config = self._tail.decided, self.config
        if not extent.size:
            return
        full = extent.size + header.length > config.segment_bytes
        span = base + header.last_offset_delta - self._tail.base_offset > SPAN_MAX
        if full or span or now_ms - extent.first_append_ms >= config.segment_ms:
            self._roll(plan, base)

    def _roll(self, plan: WritePlan, base: int) -> None:
        old = self._tail
        new = Segment(self._storage, self.path, base)
        plan.ops.append(RollOp(old, new, self.producers.snapshot(base)))
        plan.extents[old] = old.decided
        plan.extents[new] = new.decided
        self._tail = new

    def roll(self) -> bool:
        """Decide a roll; it happens with the next plan.  False if the active segment is empty."""
        self._check_open()
        if not self._tail.decided.size:
            return False
        self._roll(self._plan(), self.log_end)
        return True

    def take_writes(self) -> WritePlan | None:
        """Everything decided since the last plan; None = nothing.  It must be performed, in order,
        and completed.
        """
        plan, self._pending = self._pending, None
        if plan is not None:
            if plan.sync:
                self._unsynced_records = 0
                self._unsynced_since_ms = None
            self._outstanding.append(plan)
        return plan

    def complete(self, plan: WritePlan, error: BaseException | None = None) -> Completion:
        """What `perform(plan)` did becomes true, or undone.  Called once per plan, in the order
        they were taken.
        """
        if plan.generation != self._generation:
            return Completion(
                self._written_end, self.synced_end
            )  # undone together with an earlier one
        assert self._outstanding, "a plan that was not taken"
        assert self._outstanding[0] is plan, "plans complete in order"
        if error is not None:
            return self._failed(error)
        self._outstanding.popleft()
        fresh = []
        for segment, extent in plan.extents.items():
            segment.written = extent
            if segment.base_offset > self._segments[-1].base_offset:
                fresh.append(segment)
        if fresh:
            self._segments = (*self._segments, *fresh)
        for segment in self._segments[-1 - len(fresh) : -1] if fresh else ():
            segment.index = None  # sealed: its index is on disk
        self._written_end = plan.end
        self._pending_bytes -= plan.size
        while self._undo and self._undo[0].offset < plan.end:
            self._undo.popleft()
        if plan.sync:
            self._synced_loop = max(self._synced_loop, plan.end)
        if self.recent is not None and not self._retired:
            self.recent.keep(self, self._cuts, plan)
        return Completion(self._written_end, self.synced_end, rolled=bool(fresh))

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
        self._tail = self._segments[-1]
        self._tail.revert()
        self.epochs.truncate_end(self._written_end)
        self._generation += 1
        self._repair = True
        self._pending_bytes = 0
        typed = (
            error
            if isinstance(error, errors.PkError)
            else errors.StorageFailed(f"{self.path}: {error!r}")
        )
        return Completion(self._written_end, self.synced_end, failed, typed)

    # -- loop: transactions, retention -------------------------------------------------------------

    def retire(self) -> None:
        """Refuse further appends: the partition is being closed or deleted."""
        self._retired = True
        if self.recent is not None:
            self.recent.forget(self)

    def read_recent(
        self, offset: int, *, bound: int, max_bytes: int, min_one_batch: bool = True
    ) -> Read | None:
        """What `read` could give, from memory and at once; None = `read` must be asked."""
        if self.recent is None or offset < self.local_log_start:
            return None
        return self.recent.read(self, self._cuts, offset, bound, max_bytes, min_one_batch)

    def last_stable_offset(self, high_watermark: int) -> int:
        """Rule L11."""
        return max(self.producers.last_stable_offset(high_watermark), self.log_start)

    def aborted_in(self, start: int, end: int) -> list[AbortedTransaction]:
        """Aborted transactions with records in `[start, end)`, by marker offset."""
        found: list[AbortedTransaction] = []
        segments = self._segments
        at = max(0, bisect_right(segments, start, key=lambda s: s.base_offset) - 1)
        for segment in segments[at:]:  # a marker may lie any way behind its records
            if segment.aborted:
                found += aborted.overlapping(segment.aborted, start, end)
        return found

    def advance_log_start(self, offset: int) -> bool:
        """In memory; the manager checkpoints it (rule T9).  False if it is not ahead."""
        if offset > self._written_end:
            raise errors.OffsetOutOfRange(
                f"{self.topic_partition} ends at {self._written_end}, log start {offset} is beyond"
            )
        if offset <= self.log_start:
            return False
        self.log_start = offset
        return True

    def retention_plan(
        self, now_ms: int | None, high_watermark: int | None = None
    ) -> RetentionPlan:
        """What may go (log/retention.py); `now_ms` None = nobody knows the time.

        Advance and checkpoint `plan.log_start` before dropping (rule T9).
        """
        return retention.plan(
            self.segments,
            self.config,
            log_start=self.log_start,
            tiered_end=self.tiered_end,
            droppable_end=self.droppable_end,
            hold=self.retention_hold,
            now_ms=now_ms,
            high_watermark=self._written_end if high_watermark is None else high_watermark,
        )

    def drop_segments(self, plan: RetentionPlan) -> tuple[PendingDelete, PendingDelete]:
        """Readers stop seeing them now.  Two jobs for the write lane: rename to `.deleted`, at
        once, and remove, `config.file_delete_delay_ms` later, when readers that were at it are
        done."""
        gone = [s for s in self._segments[:-1] if s.base_offset in plan.drop]
        assert gone == list(self._segments[: len(gone)]), "segments go from the oldest on"
        self._segments = self._segments[len(gone) :]
        for segment in gone:
            segment.dropped = True
            self._cache.forget(segment)
        if plan.log_start > self.log_start:
            self.log_start = plan.log_start
        self.epochs.truncate_start(min(self.log_start, self._segments[0].base_offset))

        renamed: list[Segment] = []

        def rename() -> None:
            """SYNCED: recovery points go past these segments, which must not come back then."""
            self._lane_unsynced = [s for s in self._lane_unsynced if s not in gone]
            self._lane_pending_delete += gone
            renamed.extend(self._rename_pending_delete())

        def remove() -> None:
            for segment in renamed:
                self._storage.remove(segment.path() + DELETED)

        return rename, remove
