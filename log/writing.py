"""The write side of a partition log: what runs on the directory's write lane.

One thread performs everything here, in order.  The writer sees the plans and the written state
(`LocalLog`), never the loop's decisions.  No other thread uses the state that it keeps between
calls.

Rules
  W1  A plan is performed whole, or its generation fails: no later plan of that generation touches
      the disk (rule L2).
  W2  A cut removes segments newest first; retention drops them oldest first.  A hole in the log is
      thus impossible, even if the process dies in between or the disk is full.
  W3  `_sync` makes everything that was performed SYNCED, oldest first, file names included
      (rule L1).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pk import errors
from pk.log import closed_logs, epoch_files, loading
from pk.log import epochs as leader_epochs
from pk.log import forgotten as cleaner_forgotten
from pk.log import swap as cleaner_swap
from pk.log.epochs import LeaderEpochs
from pk.log.forgotten import Forgotten
from pk.log.local_log import LocalLog, segment_at
from pk.log.plan import AppendOp, EpochOp, RepairOp, RollOp, WritePlan
from pk.log.producers import Producers
from pk.log.segment import (
    DELETED,
    SNAPSHOT,
    BatchWalk,
    Segment,
    base_offset_of,
    file_name,
    write_file,
)
from pk.log.storage import File, Storage
from pk.log.swap import Swap
from pk.types import NONE, Offset

LaneJob = Callable[[], None]


class Decided(Protocol):
    """What the writer asks of the loop's side of the log (`LogAppender`)."""

    producers: Producers

    def idle(self) -> bool: ...
    def repair_op(self) -> RepairOp | None: ...
    def repaired(self) -> None: ...
    def restart(self, producers: Producers, tail: Segment) -> None: ...


class LocalLogWriter:
    """Changes the files of one partition's log, on the write lane.

    loaded: what opening found.  `local` has its segments and `epochs` its epochs.
    """

    def __init__(
        self, local: LocalLog, epochs: LeaderEpochs, decided: Decided, loaded: loading.Loaded
    ) -> None:
        self._local = local
        self._storage = local.storage
        self._path = local.path
        self._epochs = epochs
        self._decided = decided
        #: A cut or a new beginning of the log failed half-way: the log must be re-opened.
        self.torn = False
        self._blank = loaded.blank
        #: the offset that `flush_sealed` reached, and the number of cuts when it began
        self._sealed = (0, 0)
        self._failed = NONE  #: plans up to this generation fail (W1)
        self._error: Exception | None = None
        self._end: Offset = local.written_end
        self._unsynced = [segment for segment in loaded.segments if not segment.synced]
        self._dir_changed = loaded.created
        #: dropped segments, oldest first, that are not renamed yet
        self._pending_delete: list[Segment] = []
        #: a snapshot of another replica may lie above the end (log/loading O8)
        self._foreign = False
        #: what the last clean stop vouched for (log/closed_logs), and the epochs of that moment
        self._line, self._line_epochs = loaded.line, epochs.entries
        self._swap: Swap | None = None  #: decided, and not finished (log/swap W2)
        self._new: Sequence[Segment] = ()  #: its new segments

    @property
    def blank(self) -> bool:
        """Whether the log is empty and the producers below its start are unknown (log/loading
        O2).
        """
        segments = self._local.segments
        return self._blank and segments[-1].decided.next_offset == segments[0].base_offset

    def perform(self, plan: WritePlan) -> None:
        """Do the plan's file operations.  If the storage raises, every plan of this generation
        fails.

        If a roll fails on a full disk, the batches before it stay in their segment until the next
        plan cuts them off.  If the process dies before that, these batches are stored.  The error
        says so.
        """
        if plan.generation <= self._failed:
            assert self._error is not None
            raise self._error
        appended = False
        try:
            self.finish_swap()
            # the reset for which the snapshot was kept has failed: the log continues as it was
            if self._foreign:
                loading.remove_snapshots(self._storage, self._path, self._end)
                self._foreign = False
            for op in plan.ops:
                if isinstance(op, AppendOp):
                    file = op.segment.open_for_append()
                    assert file.size() == op.position, (file.path, file.size(), op.position)
                    file.append(op.buffers)
                    appended = True
                    self._touched(op.segment)
                elif isinstance(op, RollOp):
                    self._perform_roll(op)
                elif isinstance(op, EpochOp):
                    if not (plan.epochs_synced and op is plan.ops[0]):
                        path = f"{self._path}/{leader_epochs.FILE}"
                        self._storage.replace_file(path, op.content)
                else:
                    self._perform_repair(op)
            self._end = plan.end
            if plan.sync:
                self._sync()
        except Exception as error:
            if appended and isinstance(error, errors.StorageFull):
                error = errors.StorageFull(error.message, **error.details, appended="true")
            self._failed = plan.generation
            self._error = error
            raise error

    def _touched(self, segment: Segment) -> None:
        segment.synced = False
        if not self._unsynced or self._unsynced[-1] is not segment:
            self._unsynced.append(segment)

    def _perform_roll(self, op: RollOp) -> None:
        old, new = op.old, op.new
        # first, so that an opening that finds the snapshot does not read the older segments
        old.write_indexes(old.decided)
        write_file(
            self._storage, f"{self._path}/{file_name(new.base_offset, SNAPSHOT)}", op.snapshot
        )
        new.create()
        file, old.file = old.file, None
        if file is not None:
            file.close()
        self._touched(new)
        self._dir_changed = True

    def _perform_repair(self, op: RepairOp) -> None:
        """Cut the log back after a failed plan, newest segment first, so that dying in between
        leaves no hole (rule L2).  An epoch that was undone is removed last: it must not cover
        records that are appended above its start later.
        """
        base = op.segment.base_offset
        later = [
            b
            for name in self._storage.list(self._path)
            if (b := base_offset_of(name)) is not None and b > base
        ]
        for other in reversed(later):
            loading.remove_segment(self._storage, self._path, other)
        loading.remove_snapshots(self._storage, self._path, op.segment.written.next_offset)
        file = op.segment.open_for_append()
        if file.size() != op.size:
            for suffix in loading.DERIVED[:3]:  # a roll that failed may have written these files
                self._storage.remove(op.segment.path(suffix))
            self._begin_cut()
            file.truncate(op.size)
            file.sync()
            self._storage.remove(f"{self._path}/{loading.CUTTING}")
        self._unsynced = [s for s in self._unsynced if s.base_offset <= base]
        self._touched(op.segment)
        self._dir_changed = True
        self._storage.replace_file(f"{self._path}/{leader_epochs.FILE}", op.epochs)

    def _begin_cut(self) -> None:
        """Create the file that marks an unfinished cut (WRITTEN).  An opening that finds it makes
        the cut SYNCED before it continues (log/loading O9).
        """
        self._storage.open(f"{self._path}/{loading.CUTTING}", create=True).close()

    def _sync(self) -> int:
        """Sync everything that was performed so far, oldest first (rule L1)."""
        self._finish_drops()
        end = self._end
        for segment in self._unsynced:
            if not segment.dropped:
                _sync_segment(self._storage, segment)
        if self._dir_changed:
            self._storage.sync_dir(self._path)
            self._dir_changed = False
        self._unsynced = []
        return end

    def flush(self) -> int:
        """Sync everything that was performed so far; sets and returns `synced_end`."""
        end = self._sync()
        self._local.synced_by_lane = max(
            self._local.synced_by_lane, min(end, self._local.written_end)
        )
        return self._local.synced_end

    def checkpoint(self) -> int:
        """Write the active segment's indexes, unless it is short (log/closed_logs B5), so that the
        next opening has less to walk; return the recovery point.

        The result of `flush_sealed` is taken over here, in the lane, where no cut can come in
        between.
        """
        self._finish_drops()
        cuts, sealed_end = self._sealed
        if self._local.cuts == cuts:  # otherwise a cut may have removed what was flushed
            self._local.synced_by_lane = max(self._local.synced_by_lane, sealed_end)
        active = self._local.segments[-1]
        if active.file is not None and not closed_logs.is_short(self._local):
            active.write_indexes(active.written)
        return self._local.synced_end

    def swap(self, swap: Swap, segments: Mapping[Segment, Segment | None]) -> None:
        """Put cleaned segments in place (log/swap.py).

        segments: each segment that is replaced, with the new one; None = an earlier segment has
            that new one

        Raises `StorageFull`.  If `swap_pending` is true then, the swap is decided, and a later job
        finishes it; otherwise nothing has changed.
        """
        self._finish_drops()
        for segment in self._unsynced:
            if segment.base_offset < swap.cleaned_end and not segment.dropped:
                _sync_segment(self._storage, segment)
        self._storage.sync_dir(self._path)
        forgotten = self._local.forgotten
        end = max(forgotten.forgotten_end, swap.forgotten_end)
        forgotten = forgotten._replace(forgotten_end=end, cleaned_end=swap.cleaned_end)
        cleaner_forgotten.write(self._storage, self._path, forgotten)  # log/forgotten H1
        self._local.forgotten = forgotten
        try:
            cleaner_swap.write(self._storage, self._path, swap)
        except errors.StorageFull:  # it may have been written; without it the log counts as dirty
            self._storage.remove(f"{self._path}/{cleaner_swap.FILE}")
            raise
        self._swap = swap
        self._new = [each for each in segments.values() if each is not None]
        self._local.cleaned_end = swap.cleaned_end
        self._local.show_swapped(segments)
        self.finish_swap()

    @property
    def swap_pending(self) -> bool:
        """Whether a swap is decided and not finished."""
        return self._swap is not None

    def finish_swap(self) -> None:
        """Finish a swap that a full disk interrupted (log/swap W2).  Raises `StorageFull`."""
        if self._swap is not None:
            cleaner_swap.carry_out(self._storage, self._path, self._swap)
            for segment in self._new:
                segment.tail = ""
            self._swap, self._new = None, ()

    def truncate_to(self, offset: int) -> None:
        """Drop every batch that reaches `offset` or above.  Nothing may be decided or queued
        meanwhile.  The manager lowers the recovery point first.
        """
        assert self._decided.idle(), "truncation waits for the writes before it"
        self._mend()
        if offset >= self._local.written_end:
            return
        self._local.cuts += 1
        if offset < self._local.segments[0].base_offset:
            # What is below the local log may be in the tier.
            self.reset_to(offset, log_start=min(self._local.log_start, offset))
            return
        at = segment_at(self._local.segments, offset)
        if at and offset == self._local.segments[at].base_offset:
            at -= 1  # but segment 0 is kept: only its snapshot has the producers from before it
        kept, active = self._local.segments[: at + 1], self._local.segments[at]
        self.torn = True
        for segment in reversed(self._local.segments[at + 1 :]):
            self._discard(segment)
        for suffix in loading.DERIVED[:3]:
            self._storage.remove(active.path(suffix))
        size = active.written.size
        extent = active.written
        walk = BatchWalk(active.read_at, 0, extent.size, active.base_offset, damage=active.damage)
        for position, header in walk:
            if header.last_offset >= offset:
                size = position
                break
        self._begin_cut()
        active.open_for_append().truncate(size)
        self._reload(list(kept), offset)

    def reset_to(
        self,
        offset: int,
        snapshot: bytes = b"",
        *,
        log_start: Offset | None = None,
        forgotten_end: Offset = 0,
    ) -> None:
        """Drop everything and begin at `offset` (rules R5, T4), with another replica's producer
        state if `snapshot` has one.  Nothing may be decided or queued meanwhile.  `log_start` never
        exceeds its target in between, because a checkpoint may be written at the same time.

        forgotten_end: of the log that is copied (log/forgotten H3)

        A log that reaches `offset` must at no moment end below it, nor end there without the
        producers: the replica may be in the ISR, and may become leader after a crash.
        """
        assert self._decided.idle(), "a reset waits for the writes before it"
        self._mend()
        self._local.cuts += 1
        if self._local.segments[0].base_offset <= offset <= self._local.written_end:
            self.truncate_to(offset)
        if snapshot:
            self.keep_snapshot(offset, snapshot)
        segments = self._local.segments[::-1]
        if self._local.written_end == offset:
            segments = tuple(each for each in self._local.segments if each.base_offset < offset)
            if len(segments) == len(self._local.segments):
                Segment(self._storage, self._path, offset).create()
        self.torn = True
        # set even if the reset fails half-way
        self._local.log_start = offset if log_start is None else log_start
        for segment in segments:
            self._discard(segment)
        for at in loading.snapshots(self._storage, self._path):
            if at != offset or not snapshot:
                self._storage.remove(f"{self._path}/{file_name(at, SNAPSHOT)}")
        self._epochs.clear()
        self._reload([], offset)
        forgotten = Forgotten(forgotten_end, self._local.cleaned_end)
        if self._local.forgotten != forgotten:
            cleaner_forgotten.write(self._storage, self._path, forgotten)
            self._local.forgotten = forgotten

    def keep_snapshot(self, offset: int, snapshot: bytes) -> None:
        """Store another replica's producer state for a log that is about to begin at `offset`,
        SYNCED.
        """
        self._foreign = True
        self._storage.replace_file(f"{self._path}/{file_name(offset, SNAPSHOT)}", snapshot)

    def _rename_pending_delete(self) -> list[Segment]:
        """Rename dropped segments to `.deleted`, oldest first, SYNCED.  Segments that a full disk
        kept are renamed before any later one, because otherwise a hole would be left (W2).
        """
        renamed: list[Segment] = []
        while self._pending_delete:
            segment = self._pending_delete[0]
            # an earlier call renamed it and failed after that
            with contextlib.suppress(FileNotFoundError):
                self._storage.rename(segment.path(), segment.path() + DELETED)
            for suffix in loading.DERIVED:
                self._storage.remove(segment.path(suffix))
            renamed.append(self._pending_delete.pop(0))
        if renamed:
            self._storage.sync_dir(self._path)
        return renamed

    def _finish_drops(self) -> None:
        """Rename the dropped segments that a full disk kept, before a recovery point passes them.
        They were never synced, and after a power loss their damage would count as damage of the log
        (rule L9).  A swap that a full disk interrupted is finished first (log/swap W2).
        """
        self.finish_swap()
        for segment in self._rename_pending_delete():
            self._storage.remove(segment.path() + DELETED)

    def _mend(self) -> None:
        """Remove what a failed plan or a failed drop left behind, before the files are read again
        (rule L2).
        """
        self._finish_drops()
        repair = self._decided.repair_op()
        if repair is not None:
            self._perform_repair(repair)
            self._decided.repaired()

    def _discard(self, segment: Segment) -> None:
        segment.dropped = True
        self._local.cache.forget(segment)
        file, segment.file = segment.file, None
        if file is not None:
            file.close()
        loading.remove_segment(self._storage, self._path, segment.base_offset)

    def _reload(self, kept: list[Segment], offset: int) -> None:
        """Read the state back from the files after a cut, as opening does.  The segments that are
        kept, sealed ones included, are SYNCED first, because `load` takes them as SYNCED.
        """
        for segment in kept:
            _sync_segment(self._storage, segment)
            file, segment.file = segment.file, None
            if file is not None:
                file.close()
        self._epochs.truncate_end(offset)
        self._storage.replace_file(f"{self._path}/{leader_epochs.FILE}", self._epochs.encode())
        loaded = loading.load(
            self._storage,
            self._path,
            self._local.config,
            clean=True,
            same_boot=True,
            recovery_point=0,
            log_start=0 if kept else offset,
            # A producer read back counts as active at the time of the newest append, not in 1970.
            now_ms=self._decided.producers.newest_ms,
        )
        # log/loading O4: below `offset`, too
        self._epochs.truncate_end(loaded.segments[-1].written.next_offset)
        self._go_on_with(loaded)

    def reopen(self, recovery_point: Offset) -> None:
        """Open a log again, as at a start of the process, after a cut stopped half-way (`torn`)."""
        for segment in self._local.segments:
            self._local.cache.forget(segment)
            file, segment.file = segment.file, None
            if file is not None:
                file.close()
        loaded = loading.load(
            self._storage,
            self._path,
            self._local.config,
            clean=False,
            same_boot=True,
            recovery_point=recovery_point,
            log_start=self._local.log_start,
            now_ms=self._decided.producers.newest_ms,
        )
        self._epochs.replace(loaded.epochs.entries)
        self._go_on_with(loaded)

    def _go_on_with(self, loaded: loading.Loaded) -> None:
        """Replace the state of the log by what was found in its files, all of it SYNCED."""
        self._decided.restart(loaded.producers, loaded.segments[-1])
        self._blank = loaded.blank
        self._local.cleaned_end, self._local.forgotten = loaded.cleaned_end, loaded.forgotten
        # Count a second cut: a reader that began after the first one saw the old segments.
        self._local.replace_segments(loaded.segments)
        self._end = self._local.written_end
        self._unsynced = list(loaded.segments)
        self._dir_changed = True
        self._foreign = False
        self._local.synced_by_loop, self._local.synced_by_lane = 0, self._sync()
        self._local.log_start = min(self._local.log_start, self._local.written_end)
        self.torn = False

    def drop_jobs(self, gone: Sequence[Segment]) -> tuple[LaneJob, LaneJob]:
        """Return two jobs for the lane that delete dropped segments.  The first renames their files
        to `.deleted`, the second removes the renamed files.  The second runs when no reader can
        have the files open.
        """
        renamed: list[Segment] = []

        def rename() -> None:
            """Rename the files, SYNCED: recovery points pass these segments, which must not
            reappear then.
            """
            self._unsynced = [s for s in self._unsynced if s not in gone]
            self._pending_delete += gone
            self.finish_swap()
            renamed.extend(self._rename_pending_delete())

        def remove() -> None:
            for segment in renamed:
                self._storage.remove(segment.path() + DELETED)

        return rename, remove

    def close(self, clean: bool = True) -> None:
        """Close every file.  `clean`: as `begin_close` and `end_close`, with the syncs between."""
        if self._local.closed:
            return
        try:
            if clean:
                files, directories = self.begin_close()
                self._storage.sync_all(files, directories)
                self.end_close()
        finally:
            self.release()

    def release(self) -> None:
        """Close every file."""
        self._local.closed = True
        for segment in self._local.segments:
            file, segment.file = segment.file, None
            if file is not None:
                file.close()

    def begin_close(self, *, vouched: bool = False) -> tuple[list[File], list[str]]:
        """Write the indexes and the producer snapshot, so that the next opening trusts everything.
        Return the files and directories to be synced before `end_close`; none if the directory is
        as a clean stop left it.

        vouched: the log's line will be stored: a short log needs no more (log/closed_logs B5)
        """
        active, end = self._local.segments[-1], self._local.written_end
        if self._storage.failed is not None:
            raise errors.StorageFailed(f"{self._storage.root} is offline: {self._storage.failed}")
        if self.torn:
            raise errors.StorageFailed(f"{self._path} was left half-way")
        assert self._decided.idle(), "close waits for the writes before it"
        self._mend()
        self._end = end
        if self._epochs.entries is not self._line_epochs or not closed_logs.stands(
            self._line, self._storage, self._path
        ):
            self._line = ""
        if self._line:
            return [], []
        bases = [segment.base_offset for segment in self._local.segments]
        known = loading.snapshots(self._storage, self._path)
        for at in [at for at in known if at not in bases and at != end]:
            self._storage.remove(f"{self._path}/{file_name(at, SNAPSHOT)}")
            self._dir_changed = True
        state = self._decided.producers.snapshot(end)
        if not (vouched and closed_logs.is_enough(self._local, known, state)):
            self._dir_changed = True
            active.write_indexes(active.written)
            if not self.blank:  # a snapshot means that the producers below are known
                write_file(self._storage, f"{self._path}/{file_name(end, SNAPSHOT)}", state)
        epoch_files.write(self._storage, self._path, self._epochs)
        for segment in self._unsynced:  # oldest first (rule L1)
            if segment is not active and not segment.dropped:
                _sync_segment(self._storage, segment)
        files = [active.open_for_append()] if active in self._unsynced else []
        return files, [self._path] if self._dir_changed else []

    def end_close(self) -> None:
        """Everything is SYNCED."""
        self._unsynced, self._dir_changed = [], False
        self._local.synced_by_loop, self._local.synced_by_lane = 0, self._end

    def vouch(self, topic_id: str) -> str:
        """After a clean close: return the log's line, "" = it has none (log/closed_logs)."""
        if not self._line and not self.blank:
            self._line = closed_logs.line_of(
                self._local, topic_id, self._epochs, self._decided.producers, self._end
            )
        return self._line

    def flush_sealed(self) -> None:
        """Sync the sealed segments that are not synced yet, beside running writes.  The next
        `checkpoint` takes the result over.

        Only one call at a time.  The directory is synced too, because a sealed segment's name must
        be durable as well.
        """
        cuts, segments = (
            self._local.cuts,
            self._local.segments,
        )  # in this order, because a cut may come in between
        todo = [segment for segment in segments[:-1] if not segment.synced and not segment.dropped]
        for segment in todo:
            try:
                _sync_segment(self._storage, segment)
            except FileNotFoundError:
                continue  # dropped in the meantime
        if todo or self._dir_changed:
            try:
                self._storage.sync_dir(self._path)
            except FileNotFoundError:
                if not self._local.retired:
                    raise
                return  # the whole partition directory was renamed, to be deleted
        self._sealed = cuts, segments[-1].base_offset


def _sync_segment(storage: Storage, segment: Segment) -> None:
    file = segment.file
    if file is not None:
        file.sync()
        return
    if not segment.synced:
        opened = storage.open(segment.path())
        try:
            opened.sync()
        finally:
            opened.close()
        segment.synced = True
