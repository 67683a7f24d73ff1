"""One partition's log: decide, write, complete, read, truncate, retain.

`PartitionLog` is what the rest of pk sees.  It is composed of five parts:

    LocalLog         log/local_log  the segments, how far they are written and SYNCED
    LogAppender      log/appending  what is decided and not yet written
    LocalLogWriter   log/writing    changes the files
    LocalLogReader   log/reading    reads what is written
    SegmentSwaps     log/swapping   puts the segments of a cleaning in place

Three threads call a `PartitionLog` (docs/design/0001).  Each method belongs to one of them:

    loop         decide, append_as_follower, roll, take_writes, complete, read_recent, retire,
                 properties, advance_log_start, retention_plan, drop_segments
    write lane   open, perform, flush, checkpoint, truncate_to, reset_to, reopen, close
                 (one thread per directory, in order)
    read lane    read, survey, offset_for_time, offset_of_max_timestamp, bytes_at, sample_offsets,
                 flush_sealed (any thread)

How a batch is appended:

    outcome = log.decide(header, batch, leader_epoch=…, now_ms=…)  # Appended | Duplicate; or raises
    plan = log.take_writes()                        # None = nothing was decided since the last plan
    error = None
    try:
        await disk.write(lambda: log.perform(plan))
    except errors.PkError as e:
        error = e
    done = log.complete(plan, error)                # always, in the order the plans were taken

Several plans may be queued.  If one fails, `complete` undoes every append decided since the last
good end (`done.failed`).  Later plans of that generation fail in the lane without touching the
disk, and the next plan begins by cutting the files back (rule L2).
"""

from __future__ import annotations

from collections.abc import Sequence

from pk import errors
from pk.log import loading, retention, validate
from pk.log.aborted import AbortedPage
from pk.log.appending import LogAppender
from pk.log.batch import Header
from pk.log.batch_cache import BatchCache
from pk.log.control_rows import Marker
from pk.log.damage import Damage, missing_in_front
from pk.log.epochs import LeaderEpochs
from pk.log.index_cache import IndexCache
from pk.log.local_log import LocalLog
from pk.log.plan import (
    Appended,
    Completion,
    Duplicate,
    LogConfig,
    Read,
    RetentionPlan,
    TimeOffset,
    WritePlan,
)
from pk.log.producers import Producers
from pk.log.reading import LocalLogReader
from pk.log.retention import SegmentFacts
from pk.log.storage import Buffer, File, Storage
from pk.log.swapping import SegmentSwaps
from pk.log.validate import MarkerResult
from pk.log.writing import LaneJob, LocalLogWriter
from pk.types import NONE, Offset, TopicPartition


class PartitionLog:
    """One partition's log, as the rest of pk uses it.  `config` may be replaced at any time on the
    loop.
    """

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
        self.records_in = self.bytes_in = 0  #: that producers stored since the log was opened
        #: that consumers read from it since then; markers and gaps between offsets count as records
        self.records_out = self.bytes_out = 0
        self.topic_id = topic_id
        self.path = path  #: path of the directory, relative to the storage's root
        self.epochs: LeaderEpochs = loaded.epochs
        self.notes = tuple(loaded.notes)  #: the repairs that opening made
        #: No checkpoint has the log start, and the oldest segments are missing:
        #: server/tier/view.py.
        self.start_unknown = False
        #: Files are missing in front of the first segment: the broker decides whether the table has
        #: their records (server/replica/corruption.py).
        self.absent: Damage | None = None
        #: The tier covers [log_start, tiered_end); -1 = no tier.  Set by the broker.
        self.tiered_end = NONE
        #: Local data below it may be deleted (rule T6: committed, confirmed, delay over).  Set by
        #: the broker.
        self.droppable_end = 0
        #: retention does not move log_start past this offset
        self.retention_hold: int | None = None
        self.recent: BatchCache | None = None  #: cache of the end of the log
        self._local = LocalLog(
            storage,
            path,
            topic_partition,
            config,
            loaded.segments,
            log_start=log_start,
            synced_end=synced_end,
            cache=cache,
        )
        self._local.cleaned_end, self._local.forgotten = loaded.cleaned_end, loaded.forgotten
        self._appender = LogAppender(self._local, loaded.epochs, loaded.producers)
        self._writer = LocalLogWriter(self._local, loaded.epochs, self._appender, loaded)
        self._reader = LocalLogReader(self._local, loaded.epochs)
        self.cleaned = SegmentSwaps(self._local, self._writer)  #: the swaps of a compacted log

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
        local_start: int | None = None,
        now_ms: int,
        same_boot: bool = False,
        cache: IndexCache | None = None,
        skip_damaged: bool = False,
        loaded: loading.Loaded | None = None,
    ) -> PartitionLog:
        """Open or create the log in the directory `path`.

        clean: the log was closed properly
        recovery_point: everything below this offset was SYNCED
        log_start: as checkpointed; None = no checkpoint has it
        local_start: all records from this offset and from log_start on must be in the local log;
            None = no checkpoint has it
        same_boot: the page cache outlived the process, so that only the last batch may be torn
        skip_damaged: see `loading.load`
        loaded: what a clean stop vouched for (log/closed_logs); None = the files are read

        Raises `CorruptLog` (rule L9), `StorageFailed`, `StorageFull`.
        """
        if loaded is None:
            loaded = loading.load(
                storage,
                path,
                config,
                clean=clean,
                same_boot=same_boot,
                recovery_point=recovery_point,
                log_start=log_start or 0,
                now_ms=now_ms,
                skip_damaged=skip_damaged,
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
        if log_start is not None and local_start is not None:
            opened.absent = missing_in_front(max(log_start, local_start), first)
        return opened

    # -- loop: state -------------------------------------------------------------------------------

    @property
    def config(self) -> LogConfig:
        """The topic's settings."""
        return self._local.config

    @config.setter
    def config(self, config: LogConfig) -> None:
        self._local.config = config

    @property
    def log_start(self) -> Offset:
        """The first offset that may be read, from the local log or from the tier."""
        return self._local.log_start

    @log_start.setter
    def log_start(self, offset: Offset) -> None:
        self._local.log_start = offset

    @property
    def log_end(self) -> int:
        """The decided end: the next offset to be assigned."""
        return self._appender.tail.decided.next_offset

    @property
    def written_end(self) -> int:
        """The written end: readers see every record below it."""
        return self._local.written_end

    @property
    def synced_end(self) -> int:
        """The synced end: every record below it is SYNCED."""
        return self._local.synced_end

    @property
    def first_offset(self) -> int:
        """The first offset of the oldest segment.  Replicas copy from there on, also below
        log_start (rule R5).
        """
        return self._local.first_offset

    @property
    def local_log_start(self) -> int:
        """The first offset that can be read here.  Records below it are in the tier, or deleted."""
        return self._local.local_log_start

    @property
    def producers(self) -> Producers:
        """The producers' state at the log end."""
        return self._appender.producers

    @property
    def last_epoch(self) -> int:
        """The newest leader epoch that has a record here; -1 = none."""
        return self.epochs.latest

    @property
    def cuts(self) -> int:
        """How often the log was cut back or begun again.  A plan or a read made before the number
        changed is void.
        """
        return self._local.cuts

    @property
    def reshapes(self) -> int:
        """How often segments were cut, swapped or dropped.  After that, `aborted_in` may lack
        transactions of records that were read before.
        """
        return self._local.voided + self._local.drops

    @property
    def torn(self) -> bool:
        """A cut failed half-way.  The log must be re-opened (`reopen`) before it is used."""
        return self._writer.torn

    @property
    def blank(self) -> bool:
        """The log is empty, and the producers below its start are unknown (log/loading O2)."""
        return self._writer.blank

    @property
    def pending_bytes(self) -> int:
        """Bytes decided and not yet completed: what back-pressure counts."""
        return self._appender.pending_bytes

    @property
    def reaches_back_to(self) -> int:
        """The offset from which the local log is complete.  Older records were deleted, are in the
        table, or were never here.
        """
        if self.absent is not None:
            return self.absent.start
        return min(max(self.first_offset, self.tiered_end, self.droppable_end), self.written_end)

    def count_in(self, records: int, size: int) -> None:
        """Count a batch that a producer stored."""
        self.records_in += records
        self.bytes_in += size

    def count_out(self, records: int, size: int) -> None:
        """Count what a consumer read."""
        self.records_out += records
        self.bytes_out += size

    @property
    def size_bytes(self) -> int:
        """Bytes written, of all segments."""
        return sum(segment.written.size for segment in self._local.segments)

    @property
    def segment_count(self) -> int:
        """How many segments the log has; at least 1."""
        return len(self._local.segments)

    @property
    def segments(self) -> tuple[SegmentFacts, ...]:
        """The written segments, oldest first; the last is the active one.  Files that are missing
        in front are at least as old as the segments behind them.
        """
        facts = [
            SegmentFacts(
                s.base_offset, s.written.next_offset, s.written.size, s.written.max_timestamp
            )
            for s in self._local.segments
        ]
        if len(facts) > 1 and self._local.segments[0].is_hole:
            facts[0] = facts[0]._replace(max_timestamp=facts[1].max_timestamp)
        return tuple(facts)

    @property
    def damage(self) -> list[Damage]:
        """The ranges that are known to be damaged, ascending."""
        return self._reader.damage

    # -- loop: append ------------------------------------------------------------------------------

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
        """Give a producer's batch offsets; see `LogAppender.decide`."""
        return self._appender.decide(
            header,
            batch,
            leader_epoch=leader_epoch,
            now_ms=now_ms,
            from_client=from_client,
            refusal=refusal,
            activity_ms=activity_ms,
        )

    def check_markers(self, markers: Sequence[Marker]) -> list[MarkerResult | errors.PkError]:
        """Which markers the leader must append; see `validate.check_markers`."""
        return validate.check_markers(markers, self.producers.get)

    def append_as_follower(
        self, header: Header, batch: Buffer, *, now_ms: int, newest: int = NONE
    ) -> Appended:
        """Append a leader's batch as it is; see `LogAppender.append_as_follower`."""
        return self._appender.append_as_follower(header, batch, now_ms=now_ms, newest=newest)

    def roll(self) -> bool:
        """Decide a roll; it happens with the next plan.  False if the active segment is empty."""
        return self._appender.roll()

    def flush_due_ms(self) -> int | None:
        """When `flush_ms` requires a flush; None = every record is SYNCED, or it is not set."""
        return self._appender.flush_due_ms()

    def idle(self) -> bool:
        """Whether everything decided is written."""
        return self._appender.idle()

    def take_writes(self) -> WritePlan | None:
        """Everything decided since the last plan; None = nothing."""
        return self._appender.take_writes()

    def complete(self, plan: WritePlan, error: BaseException | None = None) -> Completion:
        """Make what `perform(plan)` wrote visible, or undo it; see `LogAppender.complete`."""
        done = self._appender.complete(plan, error)
        if (
            self.recent is not None
            and error is None
            and plan.generation == self._appender.generation
            and not self._local.retired
        ):
            self.recent.keep(self, self._local.voided, plan)
        return done

    def retire(self) -> None:
        """Refuse further appends: the partition is being closed or deleted."""
        self._local.retired = True
        if self.recent is not None:
            self.recent.forget(self)

    # -- write lane --------------------------------------------------------------------------------

    def perform(self, plan: WritePlan) -> None:
        """Do a plan's file operations; see `LocalLogWriter.perform`."""
        self._writer.perform(plan)

    def flush(self) -> int:
        """Make everything that was performed so far SYNCED; returns `synced_end`."""
        return self._writer.flush()

    def checkpoint(self) -> int:
        """Write the active segment's indexes; returns the recovery point."""
        return self._writer.checkpoint()

    def truncate_to(self, offset: Offset) -> None:
        """Drop every batch that reaches `offset` or above; see `LocalLogWriter.truncate_to`."""
        self._writer.truncate_to(offset)

    def reset_to(
        self,
        offset: Offset,
        snapshot: bytes = b"",
        *,
        log_start: Offset | None = None,
        forgotten_end: Offset = 0,
    ) -> None:
        """Drop everything and start at `offset`; see `LocalLogWriter.reset_to`."""
        self._writer.reset_to(offset, snapshot, log_start=log_start, forgotten_end=forgotten_end)

    def reopen(self, recovery_point: Offset) -> None:
        """Open a log again that a failed cut left half-way (`torn`)."""
        self._writer.reopen(recovery_point)

    def keep_snapshot(self, offset: Offset, snapshot: bytes) -> None:
        """Store another replica's producer state, for a log that is to begin at `offset`."""
        self._writer.keep_snapshot(offset, snapshot)

    def snapshot_at(self, offset: Offset) -> bytes:
        """The producer state at the base offset of a segment; empty if the segment has no
        snapshot.
        """
        return self._reader.snapshot_at(offset)

    def close(self, clean: bool = True) -> None:
        """Close every file.  `clean`: flush first, so that the next opening trusts everything."""
        self._writer.close(clean)

    def begin_close(self, *, vouched: bool = False) -> tuple[list[File], list[str]]:
        """Begin a clean close; see `LocalLogWriter.begin_close`."""
        return self._writer.begin_close(vouched=vouched)

    def end_close(self) -> str:
        """End a clean close once all is SYNCED; return the log's line (log/closed_logs)."""
        self._writer.end_close()
        self._writer.release()
        return self._writer.vouch(self.topic_id)

    def flush_sealed(self) -> None:
        """Make sealed segments SYNCED beside running writes; see `LocalLogWriter.flush_sealed`."""
        self._writer.flush_sealed()

    # -- reads -------------------------------------------------------------------------------------

    def read(
        self,
        offset: Offset,
        *,
        bound: Offset,
        max_bytes: int,
        min_one_batch: bool = True,
        verify: bool = False,
        verify_first: bool = False,
        stored: bool = False,
    ) -> Read:
        """Whole batches of `[offset, bound)`; see `LocalLogReader.read`."""
        return self._reader.read(
            offset,
            bound=bound,
            max_bytes=max_bytes,
            min_one_batch=min_one_batch,
            verify=verify,
            verify_first=verify_first,
            stored=stored,
        )

    def read_recent(
        self, offset: int, *, bound: int, max_bytes: int, min_one_batch: bool = True
    ) -> Read | None:
        """What `read` would return, from memory and without a thread; None = call `read`."""
        if self.recent is None or offset < self._local.local_log_start:
            return None
        voided = self._local.voided
        return self.recent.read(self, voided, offset, bound, max_bytes, min_one_batch)

    def survey(self, offset: Offset) -> list[Damage]:
        """Find damaged ranges in the segment that holds `offset`; see `LocalLogReader.survey`."""
        return self._reader.survey(offset)

    def offset_for_time(self, timestamp_ms: int, bound: Offset) -> TimeOffset | None:
        """The first offset below `bound` with a timestamp of at least `timestamp_ms`."""
        return self._reader.offset_for_time(timestamp_ms, bound)

    def offset_of_max_timestamp(self, bound: Offset) -> TimeOffset | None:
        """The first record below `bound` with the largest timestamp (KIP-734)."""
        return self._reader.offset_of_max_timestamp(bound)

    def newest_append_ms(self) -> int | None:
        """When the last batch was appended (LogAppendTime); None = no broker stamped it."""
        return self._reader.newest_append_ms()

    def bytes_at(self, offsets: Sequence[Offset]) -> list[int]:
        """Local bytes below each offset, at index granularity."""
        return self._reader.bytes_at(offsets)

    def sample_offsets(
        self, start: Offset, end: Offset, samples_max: int
    ) -> list[tuple[Offset, int]]:
        """At most `samples_max` pairs (offset, bytes of [start, offset))."""
        return self._reader.sample_offsets(start, end, samples_max)

    def aborted_in(self, start: Offset, end: Offset, limit: int | None = None) -> AbortedPage:
        """Aborted transactions with records in `[start, end)`; see `log.aborted.find`.

        They are those of the present segments; see `reshapes` for records that were read before.
        """
        return self._reader.aborted_in(start, end, limit)

    def last_stable_offset(self, high_watermark: Offset) -> Offset:
        """The first offset of the oldest open transaction, or the high watermark (rule L11)."""
        return max(
            self._appender.producers.last_stable_offset(high_watermark), self._local.log_start
        )

    # -- loop: retention ---------------------------------------------------------------------------

    def advance_log_start(self, offset: int) -> bool:
        """Move `log_start` up, in memory; the manager checkpoints it (rule T9).  False if `offset`
        is not above it.  Raises `OffsetOutOfRange` above the written end.
        """
        end = self._local.written_end
        if offset > end:
            raise errors.OffsetOutOfRange(
                f"{self.topic_partition} ends at {end}, log start {offset} is beyond"
            )
        if offset <= self._local.log_start:
            return False
        self._local.log_start = offset
        return True

    def retention_plan(
        self, now_ms: int | None, high_watermark: int | None = None
    ) -> RetentionPlan:
        """Which segments may be dropped (log/retention.py); `now_ms` None = the time is unknown.

        Advance and checkpoint `plan.log_start` before dropping (rule T9).
        """
        return retention.plan(
            self.segments,
            self._local.config,
            log_start=self._local.log_start,
            tiered_end=self.tiered_end,
            droppable_end=self.droppable_end,
            hold=self.retention_hold,
            now_ms=now_ms,
            high_watermark=self._local.written_end if high_watermark is None else high_watermark,
        )

    def drop_segments(self, plan: RetentionPlan) -> tuple[LaneJob, LaneJob]:
        """Hide the plan's segments from readers now.  Returns two jobs for the write lane.  The
        first renames the files to `.deleted`, at once.  The second removes them
        `config.file_delete_delay_ms` later, when the readers that had them open are done.
        """
        local = self._local
        gone = [s for s in local.segments[:-1] if s.base_offset in plan.drop]
        local.drop_oldest(gone)
        if plan.log_start > local.log_start:
            local.log_start = plan.log_start
        self.epochs.truncate_start(min(local.log_start, local.segments[0].base_offset))
        return self._writer.drop_jobs(gone)

    def accept_missing(self, start: Offset) -> LaneJob:
        """Accept that the `absent` records from `start` on are lost: reads of them raise `DataLoss`
        from now on.

        Returns a job for the write lane.  It writes an empty segment file, SYNCED, from which the
        next opening and `pk log repair` know the missing range.
        """
        assert self.absent is not None
        lost, self.absent = self.absent._replace(start=start), None
        self.tiered_end = min(self.tiered_end, start)
        self.droppable_end = min(self.droppable_end, start)
        hole = self._local.begin_with_hole(lost)

        def leave_file() -> None:
            self._local.storage.open(hole.path(), create=True).close()
            self._local.storage.sync_dir(self.path)

        return leave_file
