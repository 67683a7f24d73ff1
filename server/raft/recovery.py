"""Opens the metadata directory: the saved vote, the snapshots and the log, and their consistency.

World-generic; runs in the writer.  The log has every record from `base` on.  Records below `base`
are in a snapshot.

    a .load exists            finish the load: empty the log, and begin it at the snapshot's end
    newest snapshot damaged   use the one before it, if the log reaches back to its end
    log begins above them     CorruptLog: the state before the log is unknown
    log ends below them       CorruptLog: a snapshot is made of records that were SYNCED here

Invariants
  O1  Opening twice gives the same result.
  O2  Committed records are never cut as a torn tail.  Damage below `synced_end`, or below a
      snapshot, is reported and left in place.  A clean stop notes the end of the log, so that no
      later damage is taken for a torn tail.
  O3  Every cut is reported with its range (`OpenedDirectory.cuts`).
  O4  If there are records and no vote, nothing is cut, because the synced end is unknown.  The
      voters decide whether the node may start without its vote (raft/log W7; rule Q5).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pk import errors, formats, limits, settings
from pk.log.damaged_ranges import bases_of
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.log.recovery import Stop
from pk.log.segment import BatchWalk, Segment, corrupt
from pk.log.storage import Storage
from pk.server.raft.messages import Vote
from pk.server.raft.quorum_state_store import QUORUM_STATE, read_state, state_bytes, vote_lost
from pk.server.raft.snapshot_files import KEEP, LOAD, Found, finish_load
from pk.server.raft.snapshot_id import NOTHING, SnapshotId, id_of
from pk.types import METADATA_TOPIC, METADATA_TOPIC_ID, TopicPartition

LOG_DIR = f"{METADATA_TOPIC}-0"

#: Settings of the metadata log.  Unlike a topic's log, it is shortened only by a snapshot, every
#: write to it is synced, and its batches may be large (controller/machine M2).
_CONFIG = {
    "retention_ms": -1,
    "flush_on_ack": True,
    "index_interval_bytes": 4096,
    "max_message_bytes": 64 * limits.MIB,
    "decoded_bytes_max": 64 * limits.MIB,
}
#: Prefixes of the log's opening notes that report removed bytes.
_CUT_WORDS = (" cut ", "removed", "before its start")
_SEGMENT_BYTES = (14 * 1024, 64 * limits.MIB)
#: The least records, in bytes, for which the size of the snapshot makes another one due.
_BYTES_LEAST = limits.MIB
#: The records behind a snapshot, as a multiple of it.  With 2, the snapshots cost about as much as
#: the records were to apply.
_TAIL_SHARE = 2


@dataclass(slots=True, frozen=True)
class SnapshotRules:
    """When a snapshot is due (KIP-630).

    It is due after a number of bytes of committed records, or after a time if there are new
    records.
    """

    max_bytes: int = 20 * limits.MIB
    max_interval_ms: int = 3_600_000  #: 0 = by bytes only

    def bytes_due(self, newest_bytes: int) -> int:
        """The bytes of records behind the newest snapshot, of this size, that make one due.

        At most `max_bytes`.  Fewer are enough if they are many compared with the cluster: each
        process replays the snapshot and them at its start, and each restart of a broker adds
        records for each of its partitions.
        """
        return min(self.max_bytes, max(_BYTES_LEAST, _TAIL_SHARE * newest_bytes))

    @property
    def segment_bytes(self) -> int:
        """The segment size, below the snapshot distance: the log is shortened by whole segments."""
        least, most = _SEGMENT_BYTES
        return min(max(self.max_bytes // 2, least), most)


@dataclass(slots=True, frozen=True)
class OpenedDirectory:
    """The result of opening the metadata directory."""

    vote: Vote
    log: PartitionLog
    kept: tuple[SnapshotId, ...]  #: undamaged snapshots, oldest first
    damaged: tuple[str, ...]  #: damaged snapshots, each with the cause
    cuts: tuple[str, ...] = ()  #: cuts and removals (O3)
    vote_lost: bool = False  #: there are records and no vote (O4)

    def report(self, say: Callable[..., None]) -> None:
        """Return one line for each damaged snapshot and each cut."""
        for why in self.damaged:
            say("metadata_snapshot_damaged", why=why)
        for what in self.cuts:
            say("metadata_log_cut", what=what)


def base_of(kept: Sequence[SnapshotId], first: int) -> SnapshotId:
    """Return the base of a log whose files begin at `first`: the end of the older snapshot.

    So the log can replace the newest snapshot if that is damaged.  Raises `CorruptLog` if no
    snapshot reaches up to `first`.
    """
    covering = [each for each in kept if each.end >= first]
    if first == 0 and len(covering) < KEEP:
        return NOTHING
    if not covering:
        raise errors.CorruptLog(
            f"the metadata log begins at {first}, and no whole snapshot reaches up to there",
            log_start=str(first),
        )
    return covering[0]


def recover(
    storage: Storage, rules: SnapshotRules, now_ms: int, level: int = formats.LEVEL
) -> OpenedDirectory:
    """Open the directory by the table of the module.  Raises `CorruptLog`, `NewerFormat`."""
    state = read_state(storage, level)
    lost = state is None and _holds_records(storage)
    if lost:
        state = Vote(), _whole_end(storage)
    vote, synced_end = state or (Vote(), 0)
    found = Found(storage)
    if found.loading is not None:
        if lost:  # the snapshot came from another voter
            raise vote_lost(storage)
        log = _begin_anew(storage, rules, found.loading, now_ms)
        cut = f"everything below offset {found.loading.end}: a snapshot takes its place"
        return OpenedDirectory(vote, log, (found.loading,), found.damaged, (cut,))
    synced_end = max(synced_end, found.newest_end)  # O2: the end noted with the vote may be old
    log = _open(storage, rules, now_ms, synced_end=synced_end, log_start=None)
    where = f"{storage.root}/{LOG_DIR}"
    try:
        base = base_of(found.kept, log.segments[0].base_offset)
    except errors.CorruptLog as cause:
        raise errors.CorruptLog("; ".join((f"{where}: {cause.message}", *found.damaged))) from cause
    kept = tuple(each for each in found.kept if each.end >= base.end)
    log.flush()
    log.advance_log_start(base.end)
    cuts = tuple(note for note in log.notes if any(word in note for word in _CUT_WORDS))
    return OpenedDirectory(vote, log, kept, found.damaged, cuts, lost)


def _holds_records(storage: Storage) -> bool:
    """Whether there is a log or a snapshot; a vote was SYNCED before either existed."""
    if any(id_of(name.removesuffix(LOAD)) is not None for name in storage.list("")):
        return True
    return any(
        Segment(storage, LOG_DIR, base).stored_bytes() for base in bases_of(storage, LOG_DIR)
    )


def _whole_end(storage: Storage) -> int:
    """Return the log end if every batch is undamaged.  Raises `CorruptLog` otherwise (O4)."""
    end = 0
    for base in bases_of(storage, LOG_DIR):
        segment = Segment(storage, LOG_DIR, base)
        size = segment.stored_bytes()
        walk = BatchWalk(segment.read_at, 0, size, base, verify_from=base)
        for _ in walk:
            pass
        if walk.stop is not Stop.END:
            damage = corrupt(segment.path(), walk)
            raise errors.CorruptLog(
                f"{storage.root}/{QUORUM_STATE} is gone, and {damage.message}: without the file it "
                "is not known whether committed metadata was there. Nothing here was changed; put "
                "the metadata directory back from a backup made since the last start"
            ) from damage
        end = walk.next_offset
    return end


def close_log(storage: Storage, log: PartitionLog, vote: Vote, clean: bool, level: int = 1) -> None:
    """Close the log; a clean stop notes its end (O2).  Raises `StorageFull`, `StorageFailed`.

    A torn log is closed as after a kill: its end is not known (raft/log_writer W5).
    """
    clean = clean and not log.torn
    log.close(clean)
    if clean:
        # On a full disk the former note stays; damage above it is then judged as after a kill.
        with contextlib.suppress(errors.StorageFull):
            storage.replace_file(QUORUM_STATE, state_bytes(vote, log.written_end, level))


def _open(
    storage: Storage,
    rules: SnapshotRules,
    now_ms: int,
    *,
    synced_end: int,
    log_start: int | None,
) -> PartitionLog:
    config = {**_CONFIG, "segment_bytes": rules.segment_bytes}
    return PartitionLog.open(
        storage,
        LOG_DIR,
        TopicPartition(METADATA_TOPIC, 0),
        METADATA_TOPIC_ID,
        LogConfig.of(settings.TOPIC.resolve(config)),
        clean=False,  # always verified from the last point known to be SYNCED
        recovery_point=synced_end,
        log_start=log_start,
        now_ms=now_ms,
    )


def _begin_anew(
    storage: Storage, rules: SnapshotRules, loading: SnapshotId, now_ms: int
) -> PartitionLog:
    """Finish the load of snapshot `loading` that a process death interrupted: empty the log."""
    for name in storage.list(LOG_DIR):
        storage.remove(f"{LOG_DIR}/{name}")
    log = _open(storage, rules, now_ms, synced_end=0, log_start=loading.end)
    log.flush()
    finish_load(storage, loading)
    return log
