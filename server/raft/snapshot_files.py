"""The snapshot files of `DIR/metadata`: create, read, fetch piece by piece, replace, remove.

World-generic.  The name of a file shows its state.  Each step is SYNCED before the next (rule L1):

    .checkpoint.part   being written or fetched; the next process removes it
    .checkpoint.load   complete, from a leader, ahead of the log, which is being replaced
    .checkpoint        complete

Invariants
  F1  `kept` are the newest two undamaged snapshots.  Older ones are removed only after the newer
      one is SYNCED.
  F2  While a `.load` exists the log may be in any state.  The next start replaces the log by this
      snapshot.
  F3  No operation occupies the writer for longer than `PIECE_BYTES` take, because votes use the
      same writer (rule P1).
  F4  While a `.load` exists, this node fetches no records from the leader.  A fetch would confirm
      records to the leader, and the next start would drop them together with the log (F2).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from pk import errors, formats, limits
from pk.clock import Clock
from pk.log.partition_log import PartitionLog
from pk.log.storage import Disk, File, Storage
from pk.server.raft.snapshot_framing import check
from pk.server.raft.snapshot_id import SUFFIX, SnapshotId, file_name, id_of

PART, LOAD = ".part", ".load"
#: Wait before the next attempt on a full disk.
FULL_WAIT_MS = 1_000
#: Snapshots kept.  If the newest is damaged, the one before it and the log have the same records.
KEEP = 2
#: The most bytes that an operation writes, sends or asks for.
PIECE_BYTES = 256 * 1024
#: Most bytes of a snapshot, which must fit into memory.
SNAPSHOT_BYTES_MAX = 1024 * limits.MIB


class Found:
    """The snapshot files found when a directory is opened."""

    def __init__(self, storage: Storage) -> None:
        """Verify every file; remove `.part` files.

        Raises `CorruptLog` for a damaged `.load` (F2), `NewerFormat`.
        """
        self.kept: tuple[SnapshotId, ...] = ()
        self.loading: SnapshotId | None = None
        self.damaged: tuple[str, ...] = ()  #: damaged files, each with the cause
        names = storage.list("")
        for name in names:
            if name.endswith(SUFFIX + PART):
                storage.remove(name)
        for name in names:
            loading = id_of(name.removesuffix(LOAD))
            if loading is None:
                continue
            try:
                with formats.named(f"{storage.root}/{name}"):
                    check(storage.read_file(name), loading)
            except errors.CorruptLog as cause:
                if name.endswith(LOAD):
                    raise
                self.damaged = (*self.damaged, f"{storage.root}/{name}: {cause.message}")
                continue
            if name.endswith(LOAD):
                self.loading = loading
            else:
                self.kept = (*self.kept, loading)
        self.newest_end = max((known.end for name in names if (known := id_of(name))), default=0)
        self.kept = self.kept[-KEEP:]


def finish_load(storage: Storage, loaded: SnapshotId) -> None:
    """Give `loaded`, behind which the log begins, its final name; remove the others, SYNCED."""
    name = file_name(loaded)
    # else an earlier attempt renamed it, and then found a full disk
    if storage.exists(name + LOAD):
        storage.rename(name + LOAD, name)
    storage.sync_dir("")
    remove_others(storage, (loaded,))


def remove_others(storage: Storage, kept: Iterable[SnapshotId]) -> None:
    """Remove all snapshots but the kept ones (F1), SYNCED."""
    names = {file_name(each) for each in kept}
    for name in storage.list(""):
        if id_of(name) is not None and name not in names:
            storage.remove(name)
    storage.sync_dir("")


class SnapshotFiles:
    """The snapshots of a running node.  `kept`: oldest first."""

    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._disk = disk
        self._clock = clock
        self.kept: tuple[SnapshotId, ...] = ()

    @property
    def newest(self) -> SnapshotId | None:
        return self.kept[-1] if self.kept else None

    async def read(self, wanted: SnapshotId) -> bytes:
        """Read and verify a whole file.  Raises `CorruptLog`, `SnapshotNotFound`."""
        return await self._disk.read(partial(_read_checked, self._disk.storage, wanted))

    async def piece(self, wanted: SnapshotId, position: int, max_bytes: int) -> tuple[bytes, int]:
        """Read at most `PIECE_BYTES` at `position`, and the size.  Raises `SnapshotNotFound`."""
        if wanted not in self.kept:
            raise errors.SnapshotNotFound(f"there is no snapshot {file_name(wanted)}")
        count = max(1, min(max_bytes, PIECE_BYTES))
        return await self._disk.read(
            partial(_read_piece, self._disk.storage, wanted, position, count)
        )

    def forget(self, damaged: SnapshotId) -> None:
        """Drop a damaged snapshot from `kept`, so that it is neither replayed nor sent."""
        self.kept = tuple(each for each in self.kept if each != damaged)

    async def write(self, made: SnapshotId, pieces: Iterable[bytes]) -> None:
        """Write a snapshot as a `.part` file, in slices.  `keep` makes it count.

        Raises errors of the storage.
        """
        disk = self._disk
        part = file_name(made) + PART
        writing = await self.begin_part(made)
        waiting: list[bytes] = []
        size = 0
        try:
            for piece in pieces:
                waiting.append(piece)
                size += len(piece)
                if size >= PIECE_BYTES:
                    await disk.write(partial(_append, writing, waiting))
                    waiting, size = [], 0
                await self._clock.sleep_ms(0)
            await disk.write(partial(_append, writing, waiting))
            await disk.write(partial(_rename, disk.storage, part, file_name(made)))
        except errors.PkError:
            await disk.write(partial(disk.storage.remove, part))
            raise
        finally:
            writing.close()

    async def keep(self, made: SnapshotId) -> None:
        """Rename the newest snapshot `made`, then remove the oldest (F1)."""
        self.kept = (*(each for each in self.kept if each != made), made)[-KEEP:]
        await self._disk.write(partial(remove_others, self._disk.storage, self.kept))

    # -- a snapshot that is fetched ----------------------------------------------------------------

    async def begin_part(self, fetched: SnapshotId) -> File:
        """Create an empty `.part` file."""
        name = file_name(fetched) + PART
        return await self._disk.write(partial(_fresh, self._disk.storage, name))

    async def append_part(self, file: File, piece: bytes) -> None:
        await self._disk.write(partial(_append, file, [piece]))

    async def drop_part(self, fetched: SnapshotId) -> None:
        name = file_name(fetched) + PART
        await self._disk.write(partial(self._disk.storage.remove, name))

    async def read_part(self, fetched: SnapshotId) -> bytes:
        """Read and verify the whole `.part` file.  Raises `CorruptLog`."""
        return await self._disk.read(partial(_read_checked, self._disk.storage, fetched, PART))

    async def begin_load(self, fetched: SnapshotId) -> None:
        """Rename `.part` to `.load`.  From now on this snapshot counts, and the log will be
        replaced by it (F2).
        """
        name = file_name(fetched)
        await self._disk.write(partial(_rename, self._disk.storage, name + PART, name + LOAD))

    async def finish_load(self, loaded: SnapshotId, log: PartitionLog) -> None:
        """Finish the load; on a full disk wait for space, because the load cannot be undone
        (F4).
        """
        while True:
            try:
                await self._disk.write(partial(log.reset_to, loaded.end))
                await self._disk.write(partial(finish_load, self._disk.storage, loaded))
                break
            except errors.StorageFull:
                await self._clock.sleep_ms(FULL_WAIT_MS)
        self.kept = (loaded,)


def _fresh(storage: Storage, name: str) -> File:
    file = storage.open(name, create=True)
    file.truncate(0)
    return file


def _append(file: File, pieces: list[bytes]) -> None:
    if pieces:
        file.append(pieces)
        file.sync()


def _rename(storage: Storage, old: str, new: str) -> None:
    storage.rename(old, new)
    storage.sync_dir("")


def _read_checked(storage: Storage, wanted: SnapshotId, suffix: str = "") -> bytes:
    name = file_name(wanted) + suffix
    try:
        raw = storage.read_file(name)
        with formats.named(f"{storage.root}/{name}"):
            check(raw, wanted)
    except FileNotFoundError as cause:
        raise errors.SnapshotNotFound(f"{storage.root}/{name} is gone") from cause
    except errors.CorruptLog as cause:
        raise errors.CorruptLog(f"{storage.root}/{name}: {cause.message}") from cause
    return raw


def _read_piece(
    storage: Storage, wanted: SnapshotId, position: int, count: int
) -> tuple[bytes, int]:
    name = file_name(wanted)
    try:
        file = storage.open(name, write=False)
    except FileNotFoundError as cause:
        raise errors.SnapshotNotFound(f"{storage.root}/{name} is gone") from cause
    try:
        size = file.size()
        if not 0 <= position <= size:
            raise errors.InvalidRequest(f"{name} has {size} bytes, position {position} is beyond")
        return file.read(position, count), size
    finally:
        file.close()
