"""Opening a partition's log: examine its files, choose the action by the tables of log/recovery.py,
repair, and rebuild the derived files.

Rules
  O1  Opening a log twice gives the same log: every repair can be repeated without a further effect.
  O2  A log that ends below its log start (deleted records were lost with an unsynced tail) begins
      again, empty, at the log start.  An offset that was assigned once is never assigned to another
      record.  The producers of the records below are unknown then: such a log is blank, and its
      replica is rebuilt from the leader.
  O3  At or above the recovery point, only batches that match their checksum are served.  Below it,
      damage is reported (rule L9) and never cut away.
  O4  An epoch without records is removed from the epoch file, too.  Otherwise records of an older
      epoch, from another leader's log, could be appended above its start.
  O5  File names that a process left WRITTEN when it died are SYNCED by the first flush after the
      start: a flush may only confirm records whose file has a durable name (rule L1).
  O6  An epoch is SYNCED in the epoch file before its first batch is written.  A batch of a newer
      epoch than the file's newest is therefore damaged: no checksum covers the epoch, and a damaged
      one would fence every later leader.
  O7  Rebuilt indexes are written after the replay.  Before the replay a segment's aborted
      transactions are not known, and an existing aborted index is taken for complete.
  O8  A producer snapshot above the end, and an aborted index that goes beyond the end, are removed
      durably before anything is appended.  They describe records that were lost or refused, and
      other records will take those offsets.
  O10 A damaged range that is skipped is recorded in the notes, and `Segment.damage` makes every
      read of it raise `DataLoss`.  Above the recovery point a power loss may have torn a log: a
      batch that does not match there is cut (recovery.py: G) and not reported as damage.
  O9  A cut is SYNCED before anything is appended, also by the next process.  Otherwise a power loss
      could bring back the records that were cut, at offsets where other replicas have other
      records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from pk import errors, formats
from pk.log import aborted, checkpoints, control_rows, forgotten, index, producers, recovery, swap
from pk.log import epochs as leader_epochs
from pk.log.batch import Header
from pk.log.damage import Damage, is_torn
from pk.log.damaged_ranges import FAR, bases_of, damaged_ranges
from pk.log.epochs import LeaderEpochs
from pk.log.forgotten import Forgotten
from pk.log.index import Extent, SparseIndex
from pk.log.plan import LogConfig
from pk.log.producers import Producers
from pk.log.reading import verify_batches
from pk.log.recovery import IndexState, RecoveryAction, Stop
from pk.log.segment import (
    CLEANED,
    DELETED,
    INDEX,
    LOG,
    SNAPSHOT,
    TIMEINDEX,
    TXNINDEX,
    BatchWalk,
    Segment,
    base_offset_of,
    corrupt,
    file_name,
)
from pk.log.storage import Storage
from pk.log.swap import Swap
from pk.types import NONE, Offset

#: Name of the file that marks a directory in which a cut may be WRITTEN and not SYNCED (O9).
CUTTING = "cut"
DERIVED = (INDEX, TIMEINDEX, TXNINDEX, SNAPSHOT)
#: Endings of names that an opening removes.
SWEPT = (DELETED, CLEANED, ".tmp")


@dataclass(slots=True)
class Loaded:
    """An opened partition; `notes` say what was repaired, for the log line and for tests."""

    segments: list[Segment]
    epochs: LeaderEpochs = field(default_factory=LeaderEpochs)
    producers: Producers = field(default_factory=Producers)
    notes: list[str] = field(default_factory=list)
    created: bool = False  #: names may have changed since the directory was last synced
    cleaned_end: Offset = 0  #: every offset below was cleaned (log/swap.py)
    forgotten: Forgotten = field(default_factory=Forgotten)
    blank: bool = False  #: the records and producers below the start are unknown (O2)
    line: str = ""  #: what a clean stop vouched for, if nothing else was read (log/closed_logs)


@dataclass(slots=True)
class Opening:
    """The facts that are known while one partition is opened."""

    storage: Storage
    path: str
    config: LogConfig
    clean: bool
    same_boot: bool
    recovery_point: int
    now_ms: int
    notes: list[str] = field(default_factory=list)
    changed: bool = False
    rebuilt: list[tuple[Segment, SparseIndex]] = field(default_factory=list)
    #: the epoch file is whole: no batch has a newer epoch than its newest (O6)
    epochs_known: bool = False
    #: Known damaged ranges, by the base offset of their segment.
    damage: dict[Offset, tuple[Damage, ...]] = field(default_factory=dict)

    def name(self, base_offset: int, suffix: str = LOG) -> str:
        return f"{self.path}/{file_name(base_offset, suffix)}"

    def note(self, row: str, words: str) -> None:
        self.notes.append(f"{row}: {words}")


def load(
    storage: Storage,
    path: str,
    config: LogConfig,
    *,
    clean: bool,
    same_boot: bool,
    recovery_point: int,
    log_start: int,
    now_ms: int,
    skip_damaged: bool = False,
) -> Loaded:
    """Open or create the log in `path`.  Raises `CorruptLog`, `StorageFailed`, `StorageFull`.

    `skip_damaged`: also open a log with damaged ranges, provided that the end of each is known
    (O10).
    """
    opening = Opening(storage, path, config, clean, same_boot, recovery_point, now_ms)
    try:
        return _load(opening, log_start)
    except errors.CorruptLog:
        if not skip_damaged:
            raise
        again = Opening(storage, path, config, clean, same_boot, recovery_point, now_ms)
        trusted_to = FAR if clean or same_boot else recovery_point
        again.damage = damaged_ranges(
            storage, path, trusted=clean, trusted_to=trusted_to, dense=not config.compacted
        )
        if not again.damage:
            raise
    for ranges in again.damage.values():
        for each in ranges:
            again.note("O10", f"offsets {each} are damaged: {each.problem}")
    return _load(again, log_start)


def _load(opening: Opening, log_start: Offset) -> Loaded:
    storage, path = opening.storage, opening.path
    clean, same_boot = opening.clean, opening.same_boot
    recovery_point = opening.recovery_point
    storage.make_dir(path)
    cleaned_end = swap.resume(storage, path)
    _sweep(opening)
    segments = _segments(opening)
    end = segments[-1].written.next_offset if segments else 0
    if max(end, log_start) < recovery_point:
        raise errors.CorruptLog(
            f"{path} ends at offset {end}, but everything below {recovery_point} was flushed. "
            "If other replicas have these records, this one is rebuilt. Else bring the missing "
            "files back, or stop the broker and run pk log repair to go on without offsets "
            f"[{end}, {recovery_point})",
            offset=str(end),
            recovery_point=str(recovery_point),
        )
    if segments and log_start > end:  # O2
        opening.note("O2", f"the log ends at {end}, before its start {log_start}")
        _remove_all(opening, [segment.base_offset for segment in segments])
        segments = []
    if not segments:
        segments = [Segment(storage, path, max(log_start, 0))]
        segments[0].create()
        opening.changed = True
    active = segments[-1]
    active.open_for_append()
    if active.index is None:
        active.index = _index_of(opening, active)
    if not clean and not same_boot:
        for segment in segments:
            if segment.written.next_offset > recovery_point or segment is active:
                _sync(storage, segment)
        storage.sync_dir(path)
        opening.changed = False
    elif not clean:  # O5
        opening.changed = True
    if storage.exists(f"{path}/{CUTTING}"):  # O9
        assert active.file is not None
        active.file.sync()
        storage.sync_dir(path)
        storage.remove(f"{path}/{CUTTING}")
    loaded = Loaded(
        segments, _epochs(opening, segments), Producers(), opening.notes, opening.changed
    )
    _replay(opening, loaded)
    # snapshots only save time, and deleting records is what frees space
    with contextlib.suppress(errors.StorageFull):
        for segment, sparse in opening.rebuilt:
            segment.write_indexes(segment.written, sparse)
    if loaded.epochs.truncate_end(active.written.next_offset):  # O4
        storage.replace_file(f"{path}/{leader_epochs.FILE}", loaded.epochs.encode())
    loaded.cleaned_end = min(cleaned_end, active.written.next_offset)
    loaded.forgotten = forgotten.read(storage, path, cleaned_end)
    if loaded.cleaned_end < cleaned_end:  # log/swap W4
        opening.note("W4", f"the log ends at {loaded.cleaned_end}, it was cleaned to {cleaned_end}")
        loaded.forgotten = loaded.forgotten._replace(incomplete=True)
        forgotten.write(storage, path, loaded.forgotten)
        swap.write(storage, path, Swap(loaded.cleaned_end))
    first = segments[0].base_offset
    if 0 < first == active.written.next_offset:
        loaded.blank = first not in snapshots(storage, path)
    return loaded


def _sweep(opening: Opening) -> None:
    """Remove files that an earlier process had marked for deletion, files of a cleaning that was
    not swapped in, and indexes whose log is missing.
    """
    names = opening.storage.list(opening.path)
    for name in names:
        stem, dot, suffix = name.partition(".")
        orphan = dot + suffix in (INDEX, TIMEINDEX, TXNINDEX) and stem + LOG not in names
        if orphan or name.endswith(SWEPT):
            opening.storage.remove(f"{opening.path}/{name}")
            opening.changed = True


def _sync(storage: Storage, segment: Segment) -> None:
    if (
        segment.file is not None
    ):  # the active segment: records appended from now on are not covered by this sync
        segment.file.sync()
        return
    file = storage.open(segment.path())
    file.sync()
    file.close()
    segment.synced = True


def _segments(opening: Opening) -> list[Segment]:
    bases = bases_of(opening.storage, opening.path)
    kept: list[Segment] = []
    for number, base in enumerate(bases):
        segment = Segment(opening.storage, opening.path, base)
        segment.damage = opening.damage.get(base, ())
        size = segment.stored_bytes()
        if kept:
            row, action = recovery.joint(
                end_before=kept[-1].written.next_offset,
                base_offset=base,
                empty=size == 0,
                compacted=opening.config.compacted,
                power_lost=not opening.clean and not opening.same_boot,
                recovery_point=opening.recovery_point,
            )
            if action is RecoveryAction.REMOVE:
                opening.note(row, f"empty segment {base} removed")
                remove_segment(opening.storage, opening.path, base)
                opening.changed = True
                continue
            if action is RecoveryAction.CUT:
                opening.note(
                    row, f"cut at {kept[-1].written.next_offset}, segment {base} begins later"
                )
                _remove_all(opening, bases[number:])
                break
            if action is RecoveryAction.CORRUPT:
                end = kept[-1].written.next_offset
                raise errors.CorruptLog(
                    f"{segment.path()} begins at {base}, the segment before it ends at {end}",
                    offset=str(end),
                )
        later = bases[number + 1 :]
        trusted = opening.clean or (bool(later) and later[0] <= opening.recovery_point)
        kept.append(segment)
        if _examine(opening, segment, size, trusted, later):
            break  # cut: every later batch is removed
    return kept


def _examine(
    opening: Opening, segment: Segment, size: int, trusted: bool, later: list[int]
) -> bool:
    """Set `segment.written` after the repair that the table demands; return True if the log was cut
    in this segment.
    """
    sparse, extent, state = _look(segment, size)
    if state is IndexState.BEYOND and segment.damage:
        state = IndexState.UNUSABLE  # the missing end is known to be damaged
    row, action = recovery.before(trusted=trusted, index=state)
    if action is RecoveryAction.CORRUPT:
        raise errors.CorruptLog(
            f"{segment.path()} has {size} bytes, its index covers {extent.size}: "
            "flushed data is missing",
            offset=str(segment.base_offset),
        )
    if action is RecoveryAction.USE:
        _accept(opening, segment, sparse, extent, bool(later))
        return False
    usable = state in (IndexState.SHORT, IndexState.COMPLETE)
    if not usable:
        _remove_index(opening, segment)
    if not usable or (
        action is RecoveryAction.SCAN and extent.next_offset > opening.recovery_point
    ):
        sparse, extent = SparseIndex(segment.base_offset), Extent(0, segment.base_offset)
    opening.note(row, f"segment {segment.base_offset} {action.value} from {extent.size}")
    segment.written = Extent(size, segment.base_offset)
    walk = BatchWalk(
        segment.read_at,
        extent.size,
        size,
        extent.next_offset,
        verify_from=opening.recovery_point if action is RecoveryAction.SCAN else None,
        dense=not opening.config.compacted,
        damage=segment.damage,
    )
    for position, header in walk:
        if position > extent.size:
            extent = extent.beyond(position, header.base_offset)
        if position - sparse.last_position >= max(opening.config.index_interval_bytes, 1):
            sparse.add(header.base_offset, position, extent.max_timestamp)
        extent = extent.grown(
            header, header.base_offset, header.max_timestamp, header.crc, opening.now_ms
        )
    if walk.position > extent.size:
        extent = extent.beyond(walk.position, walk.next_offset)
    row, action = recovery.after(
        walk.stop,
        trusted=trusted,
        offset=walk.next_offset,
        recovery_point=opening.recovery_point,
        same_boot=opening.same_boot,
        torn=walk.stop is Stop.SHORT and _torn(opening, segment, walk, size, later),
    )
    if action is RecoveryAction.CORRUPT:
        raise corrupt(segment.path(), walk)
    if action is RecoveryAction.CUT:
        opening.note(
            row,
            f"segment {segment.base_offset} cut from {size} to {walk.position} bytes, "
            f"at offset {walk.next_offset}: {walk.problem}",
        )
        _cut(opening, segment, walk.position, later)
    _accept(opening, segment, sparse, extent, bool(later) and action is not RecoveryAction.CUT)
    if action is not RecoveryAction.CUT and later:
        opening.rebuilt.append((segment, sparse))  # O7
    return action is RecoveryAction.CUT


def _torn(
    opening: Opening, segment: Segment, walk: BatchWalk, size: int, later: list[Offset]
) -> bool:
    """Whether the bytes at which the walk stopped are the beginning of the log's last batch."""
    if any(_has_data(opening, base) for base in later):
        return False
    dense = not opening.config.compacted
    return is_torn(segment.read_at, size, walk.position, walk.next_offset, dense=dense)


def _remove_all(opening: Opening, bases: list[int]) -> None:
    for base in reversed(bases):
        remove_segment(opening.storage, opening.path, base)
    opening.changed = True


def _look(segment: Segment, size: int) -> tuple[SparseIndex, Extent, IndexState]:
    nothing = SparseIndex(segment.base_offset), Extent(0, segment.base_offset)
    try:
        sparse, extent = segment.load_index()
    except (index.CorruptIndex, FileNotFoundError):
        return *nothing, IndexState.COMPLETE if size == 0 else IndexState.UNUSABLE
    if extent.size == size:
        return sparse, extent, IndexState.COMPLETE
    return sparse, extent, IndexState.SHORT if extent.size < size else IndexState.BEYOND


def _accept(
    opening: Opening, segment: Segment, sparse: SparseIndex, extent: Extent, sealed: bool
) -> None:
    if segment.damage and segment.damage[-1].end_position == extent.size:
        extent = extent.beyond(extent.size, segment.damage[-1].end)
    segment.written = segment.decided = extent
    segment.index = None if sealed else sparse
    segment.synced = opening.clean or (sealed and extent.next_offset <= opening.recovery_point)


def _remove_index(opening: Opening, segment: Segment) -> None:
    """Remove an index that does not fit its log, SYNCED.  Otherwise a power loss that takes the
    replacement could bring the old index back beside data that is trusted by then (recovery.py: D).
    """
    for suffix in (INDEX, TIMEINDEX):
        opening.storage.remove(segment.path(suffix))
    opening.changed = True


def _has_data(opening: Opening, base: int) -> bool:
    return Segment(opening.storage, opening.path, base).stored_bytes() > 0


def _cut(opening: Opening, segment: Segment, size: int, later: list[int]) -> None:
    """Remove the later segments, newest first: a process that dies in between leaves a log without
    a hole.
    """
    _remove_all(opening, later)
    for suffix in (INDEX, TIMEINDEX, TXNINDEX):
        opening.storage.remove(segment.path(suffix))
    file = opening.storage.open(segment.path())
    file.truncate(size)
    file.sync()
    file.close()
    opening.storage.sync_dir(opening.path)


def remove_segment(storage: Storage, path: str, base_offset: int) -> None:
    """Remove a segment's derived files and then its log, so that no derived file outlives its
    log.
    """
    for suffix in (*DERIVED, LOG):
        storage.remove(f"{path}/{file_name(base_offset, suffix)}")


def _index_of(opening: Opening, segment: Segment) -> SparseIndex:
    sparse, _, state = _look(segment, segment.written.size)
    return (
        sparse
        if state is IndexState.COMPLETE
        else segment.reindexed(opening.config.index_interval_bytes)
    )


def _epochs(opening: Opening, segments: list[Segment]) -> LeaderEpochs:
    try:
        known = LeaderEpochs.decode(
            opening.storage.read_file(f"{opening.path}/{leader_epochs.FILE}")
        )
        opening.epochs_known = True
        return known
    except FileNotFoundError:
        pass
    except checkpoints.CorruptCheckpoint as cause:
        opening.note("epochs", str(cause))
    rebuilt = LeaderEpochs()
    for segment in segments:
        for _, header in _walk(segment, 0):
            if header.leader_epoch > rebuilt.latest:
                rebuilt.assign(header.leader_epoch, header.base_offset)
    return rebuilt


def _walk(segment: Segment, position: int, next_offset: int | None = None) -> BatchWalk:
    base = segment.base_offset if next_offset is None else next_offset
    return BatchWalk(segment.read_at, position, segment.written.size, base, damage=segment.damage)


def snapshots(storage: Storage, path: str) -> list[int]:
    """Return the offsets of the producer snapshots, ascending."""
    return [at for name in storage.list(path) if (at := base_offset_of(name, SNAPSHOT)) is not None]


def remove_snapshots(storage: Storage, path: str, end: Offset) -> None:
    """Remove the producer snapshots above `end`, SYNCED (O8)."""
    above = [at for at in snapshots(storage, path) if at > end]
    for at in above:
        storage.remove(f"{path}/{file_name(at, SNAPSHOT)}")
    if above:
        storage.sync_dir(path)


def _replay(opening: Opening, loaded: Loaded) -> None:
    """Rebuild the producers, the epochs and the missing aborted indexes: from the newest usable
    snapshot and every batch header after it.  If an aborted index is missing, the replay begins
    early enough to rebuild it, so that the next opening has the same result (O1).
    """
    end = loaded.segments[-1].written.next_offset
    missing = [
        s.base_offset for s in loaded.segments if not _load_aborted(opening, s) and s.written.size
    ]
    remove_snapshots(opening.storage, opening.path, end)
    if missing and any(at > missing[0] for at in snapshots(opening.storage, opening.path)):
        _replay_from(opening, loaded, missing[0])
        loaded.producers = Producers()
    _replay_from(opening, loaded, end)


def _replay_from(opening: Opening, loaded: Loaded, limit: Offset) -> None:
    """Replay from the newest snapshot at `limit` or below.  A snapshot below the first segment is
    not used: it does not know the batches that retention has deleted since.  With it, the
    producer's next batch would be taken for a gap, or a late retry for a new batch.
    """
    first = start = loaded.segments[0].base_offset
    for at in reversed(snapshots(opening.storage, opening.path)):
        if not first <= at <= limit:
            continue
        name = opening.name(at, SNAPSHOT)
        try:
            with formats.named(name):
                found, state = Producers.from_snapshot(opening.storage.read_file(name))
        except producers.CorruptSnapshot as cause:
            opening.note("snapshot", f"{at}: {cause}")
            continue
        if found == at:
            loaded.producers, start = state, at
            break
    for segment in loaded.segments:
        if segment.written.next_offset > start:
            segment.aborted = [entry for entry in segment.aborted if entry.last_offset < start]
            _replay_segment(opening, loaded, segment, start)


def _load_aborted(opening: Opening, segment: Segment) -> bool:
    path = segment.path(TXNINDEX)
    try:
        with formats.named(path):
            entries = aborted.decode(opening.storage.read_file(path))
    except FileNotFoundError:
        return False
    except aborted.CorruptTransactionIndex as damage:
        opening.note("aborted index", f"{segment.base_offset}: {damage}")
        usable = False
    else:
        usable = not entries or entries[-1].last_offset < segment.written.next_offset  # O8
    if not usable:
        opening.storage.remove(path)
        opening.storage.sync_dir(opening.path)
        return False
    segment.aborted = entries
    return True


def _replay_segment(opening: Opening, loaded: Loaded, segment: Segment, start: int) -> None:
    sparse = segment.index
    position, base = (
        sparse.floor_position(sparse.floor(start))
        if sparse is not None
        else (0, segment.base_offset)
    )
    walk = _walk(segment, position, base)
    for at, header in walk:
        if header.last_offset < start:
            continue
        if header.leader_epoch > loaded.epochs.latest:
            if opening.epochs_known:  # O6
                raise errors.CorruptLog(
                    f"{segment.path()}: the batch at offset {header.base_offset} says leader epoch "
                    f"{header.leader_epoch}, {leader_epochs.FILE} knows {loaded.epochs.latest}",
                    offset=str(header.base_offset),
                )
            loaded.epochs.assign(header.leader_epoch, header.base_offset)
        segment.aborted += replay_one(loaded.producers, segment, at, header, opening.now_ms)
    if walk.stop is not Stop.END:
        raise corrupt(segment.path(), walk)


def replay_one(
    state: Producers, segment: Segment, position: int, header: Header, now_ms: int
) -> list[aborted.AbortedEntry]:
    """Apply one batch of the log to `state`; return the aborted transactions that it ends.

    Raises `CorruptLog` if a damaged batch claims to be a control batch, or does not continue the
    sequence of its producer.
    """
    if header.producer_id == NONE and not header.control:
        return []
    markers: Sequence[control_rows.Marker] = ()
    # A flipped bit may be in the batch's attributes, its producer id or its sequence.  If it were
    # applied, the producer's next batch would be refused from then on, or a retry of this batch
    # stored twice (rule L6).  The first batch of each producer is checked, too: it may be another
    # producer's.
    if header.control or not producers.continues(header, state.get(header.producer_id)):
        raw = segment.read_at(position, header.length)
        verify_batches(segment.path(), raw)
        markers = control_rows.decode_markers(raw) if header.control else ()
    stamp = header.max_timestamp if header.log_append_time else NONE
    return list(state.apply(header, header.base_offset, now_ms, markers, stamp).aborted)
