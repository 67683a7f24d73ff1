"""The write side of a partition log: what runs on the directory's write lane.

One thread, in order.  It sees plans and segments, never the loop's decisions; what it keeps for
itself begins with `_lane_`.

Rules
  W1  a plan is performed whole or its generation fails: no later plan of it touches the disk (rule
      L2).
  W2  whatever is removed goes newest first, what retention drops oldest first, so that neither
      dying in between nor a full disk leaves a hole.
  W3  `_sync` makes everything performed SYNCED, oldest first, names included (rule L1).
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right

from pk import errors
from pk.log import epochs as leader_epochs
from pk.log import loading
from pk.log.plan import AppendOp, EpochOp, RepairOp, RollOp, WritePlan
from pk.log.producers import Producers
from pk.log.reading import Readable
from pk.log.segment import (
    DELETED,
    SNAPSHOT,
    Segment,
    Walk,
    base_offset_of,
    file_name,
    write_file,
)
from pk.log.storage import Storage
from pk.types import NONE, Offset


class Writable(Readable):
    """What `PartitionLog` inherits for its lane; the loop owns the fields without `_lane_`."""

    path: str
    producers: Producers
    _storage: Storage
    #: How far the log is SYNCED by what the lane did, and by what the loop was told of: each is set
    #: by one thread (but for cuts, when the other does nothing), so that neither unsays the other.
    _synced_lane: int
    _synced_loop: int
    _tail: Segment
    _repair: bool
    _closed: bool
    _retired: bool

    def _init_lane(self, loaded: loading.Loaded) -> None:
        self._cuts = 0  #: how often the log was cut back: what was read before is void
        #: it was being cut or begun anew, and that failed: only another opening knows what is there
        self.torn = False
        self._blank = loaded.blank
        self._sealed = (0, 0)  #: what `flush_sealed` reached, and the cuts made before it began
        self._lane_failed = NONE  #: plans up to this generation fail (W1)
        self._lane_error: Exception | None = None
        self._lane_end = loaded.segments[-1].written.next_offset
        self._lane_unsynced = [segment for segment in loaded.segments if not segment.synced]
        self._lane_dir_changed = loaded.created
        self._lane_pending_delete: list[Segment] = []  #: dropped, oldest first, and not yet renamed
        #: another replica's snapshot may lie above the end (log/loading O8)
        self._lane_foreign = False

    @property
    def synced_end(self) -> int:
        return max(self._synced_lane, self._synced_loop)

    @property
    def cuts(self) -> int:
        """Another number once the log was cut or begun anew: what was planned before is void."""
        return self._cuts

    @property
    def blank(self) -> bool:
        """It is empty, and knows nothing of who wrote below (log/loading O2)."""
        return (
            self._blank and self._segments[-1].decided.next_offset == self._segments[0].base_offset
        )

    def _idle(self) -> bool:
        """Nothing is decided that is not written."""
        raise NotImplementedError

    def perform(self, plan: WritePlan) -> None:
        """Do the plan's file operations.  Raises what the storage raises; then every plan of its
        generation fails.

        On a full disk the batches before a roll that failed lie whole in their segment until the
        next plan cuts them off: should the process die now, they are stored.  The error says so.
        """
        if plan.generation <= self._lane_failed:
            assert self._lane_error is not None
            raise self._lane_error
        appended = False
        try:
            if self._lane_foreign:  # what it was kept for failed: the log goes on as it was
                loading.remove_snapshots(self._storage, self.path, self._lane_end)
                self._lane_foreign = False
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
                    self._storage.replace_file(f"{self.path}/{leader_epochs.FILE}", op.content)
                else:
                    self._perform_repair(op)
            self._lane_end = plan.end
            if plan.sync:
                self._sync()
        except Exception as error:
            if appended and isinstance(error, errors.StorageFull):
                error = errors.StorageFull(error.message, **error.details, appended="true")
            self._lane_failed = plan.generation
            self._lane_error = error
            raise error

    def _touched(self, segment: Segment) -> None:
        segment.synced = False
        if not self._lane_unsynced or self._lane_unsynced[-1] is not segment:
            self._lane_unsynced.append(segment)

    def _perform_roll(self, op: RollOp) -> None:
        old, new = op.old, op.new
        old.write_indexes(old.decided)  # first: who finds the snapshot does not read what is below
        write_file(
            self._storage, f"{self.path}/{file_name(new.base_offset, SNAPSHOT)}", op.snapshot
        )
        new.create()
        file, old.file = old.file, None
        if file is not None:
            file.close()
        self._touched(new)
        self._lane_dir_changed = True

    def _perform_repair(self, op: RepairOp) -> None:
        """Newest first, so that dying in between leaves no hole (rule L2).  An epoch that was
        undone goes last: it must not name a record that comes to stand above its start later.
        """
        base = op.segment.base_offset
        later = [
            b
            for name in self._storage.list(self.path)
            if (b := base_offset_of(name)) is not None and b > base
        ]
        for other in reversed(later):
            loading.remove_segment(self._storage, self.path, other)
        loading.remove_snapshots(self._storage, self.path, op.segment.written.next_offset)
        file = op.segment.open_for_append()
        if file.size() != op.size:
            for suffix in loading.DERIVED[:3]:  # a roll that failed may have written them
                self._storage.remove(op.segment.path(suffix))
            self._begin_cut()
            file.truncate(op.size)
            file.sync()
            self._storage.remove(f"{self.path}/{loading.CUTTING}")
        self._lane_unsynced = [s for s in self._lane_unsynced if s.base_offset <= base]
        self._touched(op.segment)
        self._lane_dir_changed = True
        self._storage.replace_file(f"{self.path}/{leader_epochs.FILE}", op.epochs)

    def _begin_cut(self) -> None:
        """WRITTEN: who finds the log half-way makes the cut SYNCED before it goes on
        (log/loading O9)."""
        self._storage.open(f"{self.path}/{loading.CUTTING}", create=True).close()

    def _sync(self) -> int:
        """SYNCED: everything performed so far, oldest first (rule L1)."""
        self._finish_drops()
        end = self._lane_end
        for segment in self._lane_unsynced:
            if not segment.dropped:
                _sync_segment(self._storage, segment)
        if self._lane_dir_changed:
            self._storage.sync_dir(self.path)
            self._lane_dir_changed = False
        self._lane_unsynced = []
        return end

    def flush(self) -> int:
        """SYNCED: everything performed so far; returns (and sets) synced_end."""
        end = self._sync()
        self._synced_lane = max(self._synced_lane, min(end, self._written_end))
        return self.synced_end

    def checkpoint(self) -> int:
        """Write the active segment's indexes, so that the next opening walks less; returns the
        recovery point.

        What `flush_sealed` reached counts here, in the lane, where no cut comes in between.
        """
        self._finish_drops()
        cuts, sealed_end = self._sealed
        if self._cuts == cuts:  # else what was flushed may be gone
            self._synced_lane = max(self._synced_lane, sealed_end)
        active = self._segments[-1]
        if active.file is not None:
            active.write_indexes(active.written)
        return self.synced_end

    def truncate_to(self, offset: int) -> None:
        """Drop every batch that reaches `offset` or above.  Nothing may be decided or queued
        meanwhile; the manager lowers the recovery point first."""
        assert self._idle(), "truncation waits for the writes before it"
        self._mend()
        if offset >= self._written_end:
            return
        self._cuts += 1
        if offset < self._segments[0].base_offset:
            # What is below the local log may be in the tier.
            self.reset_to(offset, log_start=min(self.log_start, offset))
            return
        at = bisect_right(self._segments, offset, key=lambda s: s.base_offset) - 1
        if at and offset == self._segments[at].base_offset:
            at -= 1  # but the first stays: only its snapshot knows the producers from before it
        kept, active = self._segments[: at + 1], self._segments[at]
        self.torn = True
        for segment in reversed(self._segments[at + 1 :]):
            self._discard(segment)
        for suffix in loading.DERIVED[:3]:
            self._storage.remove(active.path(suffix))
        size = active.written.size
        extent = active.written
        walk = Walk(active.read_at, 0, extent.size, active.base_offset, damage=active.damage)
        for position, header in walk:
            if header.last_offset >= offset:
                size = position
                break
        self._begin_cut()
        active.open_for_append().truncate(size)
        self._reload(list(kept), offset)

    def reset_to(
        self, offset: int, snapshot: bytes = b"", *, log_start: Offset | None = None
    ) -> None:
        """Drop everything and start at `offset` (rules R5, T4), with another replica's producer
        state there if `snapshot` has one.  Nothing may be decided or queued meanwhile.  `log_start`
        is never above its own on the way: a checkpoint may be written beside it.

        A log that reaches `offset` never ends below it on the way, nor ends there without the
        producers: it may be in the ISR, and lead after a crash.
        """
        assert self._idle(), "a reset waits for the writes before it"
        self._mend()
        self._cuts += 1
        if self._segments[0].base_offset <= offset <= self._written_end:
            self.truncate_to(offset)
        if snapshot:
            self.keep_snapshot(offset, snapshot)
        segments = self._segments[::-1]
        if self._written_end == offset:
            segments = tuple(each for each in self._segments if each.base_offset < offset)
            if len(segments) == len(self._segments):
                Segment(self._storage, self.path, offset).create()
        self.torn = True
        self.log_start = offset if log_start is None else log_start  # half-way, too
        for segment in segments:
            self._discard(segment)
        for at in loading.snapshots(self._storage, self.path):
            if at != offset or not snapshot:
                self._storage.remove(f"{self.path}/{file_name(at, SNAPSHOT)}")
        self.epochs.clear()
        self._reload([], offset)

    def keep_snapshot(self, offset: int, snapshot: bytes) -> None:
        """SYNCED: another replica's producer state, for a log that is to begin at `offset`."""
        self._lane_foreign = True
        self._storage.replace_file(f"{self.path}/{file_name(offset, SNAPSHOT)}", snapshot)

    def _rename_pending_delete(self) -> list[Segment]:
        """SYNCED: dropped segments have another name, the oldest first; what a full disk kept of
        them goes before any later one, else it would leave a hole (W2).
        """
        renamed: list[Segment] = []
        while self._lane_pending_delete:
            segment = self._lane_pending_delete[0]
            with contextlib.suppress(FileNotFoundError):  # what came behind its renaming failed
                self._storage.rename(segment.path(), segment.path() + DELETED)
            for suffix in loading.DERIVED:
                self._storage.remove(segment.path(suffix))
            renamed.append(self._lane_pending_delete.pop(0))
        if renamed:
            self._storage.sync_dir(self.path)
        return renamed

    def _finish_drops(self) -> None:
        """What a full disk kept of dropped segments goes before a recovery point passes them:
        nobody has synced them, and after a power loss their damage would count (rule L9).
        """
        for segment in self._rename_pending_delete():
            self._storage.remove(segment.path() + DELETED)

    def _mend(self) -> None:
        """What a failed plan, or drop, left behind goes before the files are looked at again (rule
        L2).
        """
        self._finish_drops()
        if self._repair:
            self._perform_repair(self._repair_op())
            self._repair = False

    def _repair_op(self) -> RepairOp:
        tail = self._segments[-1]
        return RepairOp(tail, tail.written.size, self.epochs.encode())

    def snapshot_at(self, offset: int) -> bytes:
        """The producer state a segment with this base began with; empty if it had none."""
        try:
            return self._storage.read_file(f"{self.path}/{file_name(offset, SNAPSHOT)}")
        except FileNotFoundError:
            return b""

    def _discard(self, segment: Segment) -> None:
        segment.dropped = True
        self._cache.forget(segment)
        file, segment.file = segment.file, None
        if file is not None:
            file.close()
        loading.remove_segment(self._storage, self.path, segment.base_offset)

    def _reload(self, kept: list[Segment], offset: int) -> None:
        """After files were cut: read the state back from them, as opening does.  What is kept is
        SYNCED first, sealed segments included: `load` takes it for that.
        """
        for segment in kept:
            _sync_segment(self._storage, segment)
            file, segment.file = segment.file, None
            if file is not None:
                file.close()
        self.epochs.truncate_end(offset)
        self._storage.replace_file(f"{self.path}/{leader_epochs.FILE}", self.epochs.encode())
        loaded = loading.load(
            self._storage,
            self.path,
            self.config,
            clean=True,
            same_boot=True,
            recovery_point=0,
            log_start=0 if kept else offset,
            now_ms=self.producers.newest_ms,  # who is read back has not been silent since 1970
        )
        # log/loading O4: below `offset`, too
        self.epochs.truncate_end(loaded.segments[-1].written.next_offset)
        self._go_on_with(loaded)

    def reopen(self, recovery_point: Offset) -> None:
        """A log that was left half-way (`torn`) is opened as a start of the process would."""
        for segment in self._segments:
            self._cache.forget(segment)
            file, segment.file = segment.file, None
            if file is not None:
                file.close()
        loaded = loading.load(
            self._storage,
            self.path,
            self.config,
            clean=False,
            same_boot=True,
            recovery_point=recovery_point,
            log_start=self.log_start,
            now_ms=self.producers.newest_ms,
        )
        self.epochs = loaded.epochs
        self._go_on_with(loaded)

    def _go_on_with(self, loaded: loading.Loaded) -> None:
        """The log is what was found in its files, all of it SYNCED."""
        self.producers = loaded.producers
        self._blank = loaded.blank
        self._segments = tuple(loaded.segments)
        self._cuts += 1  # again: who looked at the segments since it began saw the old ones
        self._tail = loaded.segments[-1]
        self._written_end = self._lane_end = self._tail.written.next_offset
        self._lane_unsynced = list(loaded.segments)
        self._lane_dir_changed = True
        self._lane_foreign = False
        self._synced_loop, self._synced_lane = 0, self._sync()
        self.log_start = min(self.log_start, self._written_end)
        self.torn = False

    def close(self, clean: bool = True) -> None:
        """`clean`: flush, indexes, producer snapshot, all SYNCED; then the next opening trusts
        everything.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if clean:
                self._close_clean()
        finally:
            for segment in self._segments:
                file, segment.file = segment.file, None
                if file is not None:
                    file.close()

    def _close_clean(self) -> None:
        active, end = self._segments[-1], self._written_end
        if self._storage.failed is not None:
            raise errors.StorageFailed(f"{self._storage.root} is offline: {self._storage.failed}")
        if self.torn:
            raise errors.StorageFailed(f"{self.path} was left half-way")
        assert self._idle(), "close waits for the writes before it"
        self._mend()
        self._lane_end = end
        active.open_for_append()
        active.write_indexes(active.written)
        bases = [segment.base_offset for segment in self._segments]
        for at in loading.snapshots(self._storage, self.path):
            if at not in bases and at != end:
                self._storage.remove(f"{self.path}/{file_name(at, SNAPSHOT)}")
        if not self.blank:  # a snapshot says that it is known who wrote below
            state = self.producers.snapshot(end)
            write_file(self._storage, f"{self.path}/{file_name(end, SNAPSHOT)}", state)
        self._storage.replace_file(f"{self.path}/{leader_epochs.FILE}", self.epochs.encode())
        self._synced_loop, self._synced_lane = 0, self._sync()

    def flush_sealed(self) -> None:
        """fdatasync the sealed segments not yet synced, beside running writes; the next
        `checkpoint` counts them.

        Only one at a time.  The directory is synced too: a sealed segment's name is part of what
        must last."""
        cuts, segments = self._cuts, self._segments  # in this order: a cut may come in between
        todo = [segment for segment in segments[:-1] if not segment.synced and not segment.dropped]
        for segment in todo:
            try:
                _sync_segment(self._storage, segment)
            except FileNotFoundError:
                continue  # dropped meanwhile
        if todo or self._lane_dir_changed:
            try:
                self._storage.sync_dir(self.path)
            except FileNotFoundError:
                if not self._retired:
                    raise
                return  # the whole partition was renamed, to be deleted
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
