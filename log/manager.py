"""Data directories and the partitions in them: format, lock, loading, checkpoints, deletion.

One per broker process:

    manager = LogManager(disks, node_id=…, cluster_id=…, build=…, world=…, boot_id=…)
    await manager.open()             # lock, format, clean-shutdown file
    await manager.load(config_of)    # opens every partition directory, in parallel
    log = await manager.create(tp, topic_id, config);  manager.get(key);  await manager.delete(key)
    await manager.checkpoint()       # recovery points, log starts, high watermarks; SYNCED
    await manager.close()            # flush, checkpoints, clean-shutdown file, unlock

Rules
  M1  The manager changes a directory only while it holds the directory's lock.  A directory of
      another cluster or another build is refused with an error that names it.
  M2  A checkpoint names only what was true when it was written: a recovery point never exceeds the
      synced end (rule L1).
  M3  A deleted partition, and a partition that the metadata do not know (rule Q2, log/strays.py),
      is first renamed and then removed after a delay.  After a crash in between, the next start
      removes the renamed directory.
  M4  A failed directory takes its own partitions offline and no others.
  M5  A directory with segments is deleted only if `gone` confirms it for an intact identity, or if
      this process had the log open.  A log that a checkpoint names and that is missing is not
      created again as an empty log (rule L15).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from pk import errors, formats
from pk.log import closing, copies, creation, identity
from pk.log import directory as files
from pk.log.checkpointing import Checkpointer, OpenLogs
from pk.log.creation import LogOrError, NewPartition, Site
from pk.log.directory import Directory, Format
from pk.log.identity import ADOPTED, DISCARDED, Identity, Known
from pk.log.index_cache import IndexCache
from pk.log.loading import Loaded
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.log.producers import Producers
from pk.log.storage import Disk
from pk.log.strays import Strays
from pk.tasks import TaskRegistry
from pk.types import NONE, Offset, PartitionKey, TopicPartition
from pk.world import World

ConfigOf = Callable[[str, TopicPartition], LogConfig | None]

#: How long a stray is kept.  A deleted partition is kept for its topic's file_delete_delay_ms.
STRAY_DELAY_MS = 60_000


class LogManager:
    """The data directories of one broker and the logs in them."""

    def __init__(
        self,
        disks: list[Disk],
        *,
        node_id: int,
        cluster_id: str,
        build: str,
        world: World,
        boot_id: str,
        producer_id_expiration_ms: int = 86_400_000,
        root: str = "topics",
        index_cache_bytes: int = 64 * 1024 * 1024,
        level: int = formats.LEVEL,
    ) -> None:
        """Make a manager of closed directories; `open` opens them.  `cluster_id` "" = the cluster
        that the format file names.  `root`: the path of the partition directories.
        """
        self.directories: list[Directory] = []
        self._logs: OpenLogs = {}
        self._checkpoints = Checkpointer(
            self.directories, self._logs, disks, producer_id_expiration_ms
        )
        self.cluster_id, self.level = cluster_id, level
        self._disks, self._node_id, self._build = disks, node_id, build
        self._world, self._boot_id = world, boot_id
        self._root = root
        self._cache, self._strays = IndexCache(index_cache_bytes), Strays()
        self.removed: list[str] = []  #: directories of deleted logs that `load` removed
        #: Whether the metadata say that the log of this identity is no longer needed (M5).
        self.gone: Callable[[Identity], bool] = lambda found: False
        self.named: Callable[[PartitionKey], str] = lambda key: ""  #: its directory's id (R11)
        #: Directories whose names are neither <topic>-<number> nor those of deleted logs.
        self.ignored: list[str] = []
        self.restored: dict[str, str] = {}  #: directories with a restored identity, and why
        #: Replicas that an operator adopted or discarded; the cluster has not confirmed it yet.
        self.operator_marked: dict[PartitionKey, None] = {}
        self._loaded = False
        self._tasks = TaskRegistry()

    # -- opening -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Lock and identify every directory.

        Raises `DirectoryLocked`, `DirectoryOfAnotherCluster`, `DirectoryOfAnotherBuild` or
        `NewerFormat`, and then holds no lock.  A directory whose disk fails is kept and marked as
        failed; if all disks fail, the error is raised (M4).
        """
        failures: list[Exception] = []
        try:
            for disk in self._disks:
                try:
                    self.directories.append(await disk.write(partial(self._open_directory, disk)))
                except errors.StorageFailed as failure:
                    failures.append(failure)
                    self.directories.append(Directory(disk, "", False, NONE, failure=failure))
            if failures and len(failures) == len(self._disks):
                raise failures[0]
        except BaseException:
            for disk in self._disks[: len(self.directories)]:
                disk.storage.unlock()
            self.directories.clear()
            raise

    def _open_directory(self, disk: Disk) -> Directory:
        wanted = Format(
            files.FORMAT, self._build, self.cluster_id, self._node_id, self._world.new_id()
        )
        opened = files.open_directory(
            disk, wanted, boot_id=self._boot_id, root=self._root, level=self.level
        )
        self.cluster_id = opened.cluster_id
        return opened

    async def load(self, config_of: ConfigOf) -> list[tuple[PartitionKey, Exception]]:
        """Open every partition directory; `config_of(topic_id, tp)` is None for a stray (rule Q2).

        Returns the partitions that could not be opened, with their errors; the others are served.
        """
        jobs: list[tuple[Directory, str]] = []
        for directory in self.directories:
            if directory.failed is None:
                storage = directory.disk.storage
                try:
                    if not directory.closed_properly:  # the newest names may not be SYNCED
                        await directory.disk.write(partial(storage.sync_dir, self._root))
                    names = await directory.disk.read(partial(storage.list, self._root))
                except errors.StorageFailed:
                    continue  # M4
                for name in names:
                    if identity.is_pending_delete(name) or identity.partition_of(name) is not None:
                        jobs.append((directory, name))
                    else:
                        self.ignored.append(f"{storage.root}/{self._path(name)}")
        closed = closing.wanted(jobs, self._path, self.named, config_of)
        jobs = await closing.open_all(jobs, closed, self._open_log, self._take)
        gate = asyncio.Semaphore(16)

        async def one(directory: Directory, name: str) -> tuple[PartitionKey, Exception] | None:
            async with gate:
                return await self._load_one(directory, name, config_of)

        found = await asyncio.gather(*(one(*job) for job in jobs))
        problems = [problem for problem in found if problem is not None]
        for key in {key: None for key, _ in problems if key in self._logs}:
            log, home = self._logs.pop(key)  # nothing says which of the two is the newer
            await home.disk.write(partial(log.close, False))
        for directory in self.directories:
            if directory.failed is None:
                problems += await self._mark_running(directory)
        self._loaded = True
        return problems

    async def _mark_running(self, directory: Directory) -> list[tuple[PartitionKey, Exception]]:
        """Write run.json once every partition is open.  If the process dies before its repairs are
        done, run.json must not name this boot: the next one would take a power loss for damage.

        M2: offsets that a power loss took are removed from the checkpoints, too.  Other records may
        be appended at these offsets later, and those were not committed (rules R3, R4).  If a full
        disk has no room for the checkpoint, the partitions concerned are closed and returned, and
        the caller tries them again.
        """
        waiting = list[tuple[PartitionKey, Exception]]()
        try:
            waiting = await self._checkpoints.lower_all(directory)
            for key, _ in waiting:
                await directory.disk.write(partial(self._logs.pop(key)[0].close, False))
            await directory.mark_running(self._boot_id)
        except errors.StorageFailed:
            if all(each.failed is not None for each in self.directories):
                raise  # M4
        return waiting

    def _take(self, directory: Directory, found: Identity, log: PartitionLog) -> bool:
        """Serve the log.  False = another one is served: the directories load in parallel."""
        if found.key in self._logs:
            return False
        self._logs[found.key] = (log, directory)
        self._opened_here(directory, found)
        return True

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    async def _load_one(
        self, directory: Directory, name: str, config_of: ConfigOf
    ) -> tuple[PartitionKey, Exception] | None:
        storage, path = directory.disk.storage, self._path(name)
        if identity.is_pending_delete(name):  # M3: an earlier process renamed it
            await directory.disk.write(partial(storage.remove_tree, path))
            self.removed.append(f"{storage.root}/{path}")
            return None
        second = directory.identities.get(name)
        key = PartitionKey(name, NONE) if second is None else second.identity.key
        try:
            found, why = await identity.identify(directory.disk, path, second)
            if why:
                self.restored[f"{storage.root}/{path}"] = why
            if found is None:
                await directory.disk.write(partial(creation.sweep, storage, path))
                return None
            tp = found.topic_partition
            if str(tp) != name:  # the log of that name is another one, and is served
                raise identity.unidentified(storage, path, f"its identity is that of {tp}")
            key = found.key
            config = config_of(key.topic_id, tp)
            if config is None:
                now_ms = self._world.clock.wall_ms()
                await self._strays.note(directory, path, found, now_ms)
                return None
            if older := await copies.older(self.directories, directory, path, self.named(key)):
                return PartitionKey(name, NONE), older
            with formats.named(f"{storage.root}/{path}"):
                log = await directory.disk.read(
                    partial(self._open_log, directory, path, tp, key.topic_id, config)
                )
            if not self._take(directory, found, log):
                await directory.disk.write(partial(log.close, False))
                raise copies.second(tp, storage.root)
        except (errors.PkError, OSError) as error:
            directory.not_opened(key, error)
            return key, error
        return None

    def _opened_here(self, directory: Directory, found: Identity) -> None:
        """Register the log in this directory's second copy and remove it from all others."""
        tp = found.topic_partition
        for each in self.directories:
            if each is not directory and each.failed is None:
                each.forget(found.topic_id, tp)
        directory.register(found)
        if directory.identities[str(tp)].state == ADOPTED:
            self.operator_marked[found.key] = None

    def is_stray(self, key: PartitionKey) -> bool:
        """Whether the metadata did not know the partition at the start, and still do not (M3)."""
        return key in self._strays

    async def discard_strays(self) -> tuple[list[str], list[str]]:
        """Discard the strays (M3); the caller must know every partition placed on this broker.

        Returns the directories that are kept (M5), and those that are discarded.
        """
        kept, discarded = list[str](), list[str]()
        for directory, path, found in self._strays.unknown():
            gone = self.gone(found)
            if gone:
                await self._discard(directory, path, found.key, STRAY_DELAY_MS)
                directory.forget(found.topic_id, found.topic_partition)
            (discarded if gone else kept).append(f"{directory.disk.storage.root}/{path}")
        for directory in [each for each in self.directories if each.failed is None]:
            for each, _ in [*directory.identities.values()]:
                if each.key in self._logs or not self.gone(each):
                    continue
                path = self._path(str(each.topic_partition))  # it could not be opened
                if await self._discard(directory, path, each.key, STRAY_DELAY_MS):
                    discarded.append(f"{directory.disk.storage.root}/{path}")
                directory.forget(each.topic_id, each.topic_partition)
        return kept, discarded

    def _open_log(
        self,
        directory: Directory,
        path: str,
        tp: TopicPartition,
        topic_id: str,
        config: LogConfig,
        loaded: Loaded | None = None,
    ) -> PartitionLog:
        key = PartitionKey(topic_id, tp.partition)
        known = directory.identities.get(str(tp))
        strange = known is not None and known.state == ADOPTED  # verified as after a power loss
        return PartitionLog.open(
            directory.disk.storage,
            path,
            tp,
            topic_id,
            config,
            clean=directory.closed_properly and not strange,
            same_boot=directory.outlived(key) and not strange,
            recovery_point=directory.recovery_points.get(key, 0),
            log_start=directory.log_starts.get(key),
            local_start=None if strange else directory.local_starts.get(key),
            now_ms=files.recovered_activity_ms(self.directories, self._world.clock.wall_ms()),
            cache=self._cache,
            skip_damaged=True,
            loaded=loaded,
        )

    # -- partitions --------------------------------------------------------------------------------

    def get(self, key: PartitionKey) -> PartitionLog | None:
        found = self._logs.get(key)
        return None if found is None else found[0]

    def logs(self) -> dict[PartitionKey, PartitionLog]:
        return {key: log for key, (log, _) in self._logs.items()}

    def directory_of(self, key: PartitionKey) -> Directory:
        return self._logs[key][1]

    def disk_of(self, key: PartitionKey) -> Disk:
        return self._logs[key][1].disk

    async def create(self, tp: TopicPartition, topic_id: str, config: LogConfig) -> PartitionLog:
        """Create one partition.  Raises the storage's errors."""
        (outcome,) = await self.create_all([NewPartition(tp, topic_id, config)])
        if isinstance(outcome, errors.PkError):
            raise outcome
        return outcome

    async def create_all(self, wanted: Sequence[NewPartition]) -> list[LogOrError]:
        """Create partitions, at most `creation.VISIT_MAX`, in one visit to each directory.

        A partition that already has a directory (a stray, or one that could not be opened) is
        created there.  Any other is created in the directory with the fewest partitions, then the
        most free space.  Returns a log, or the storage's error, for each.
        """
        assert all(new.key not in self._logs for new in wanted), "a partition exists"
        wanted = [new._replace(again=new.again or new.key in self._strays) for new in wanted]
        for new in wanted:
            self._strays.known(new.key)
        taken = [directory for _, directory in self._logs.values()]
        paths = {self._path(str(new.tp)): new for new in wanted}
        try:
            homes = await creation.homes(self.directories, taken, paths)
        except errors.PkError as error:
            return [error for _ in wanted]
        groups: dict[Directory, list[NewPartition]] = {}
        outcomes: dict[PartitionKey, LogOrError] = {}
        for new, home in zip(wanted, homes, strict=True):
            if isinstance(home, Directory):
                groups.setdefault(home, []).append(new)
            else:
                outcomes[new.key] = home
        visits = await asyncio.gather(*(self._visit(*each) for each in groups.items()))
        for visit in visits:
            outcomes |= visit
        return [outcomes[new.key] for new in wanted]

    async def _visit(
        self, directory: Directory, group: list[NewPartition]
    ) -> dict[PartitionKey, LogOrError]:
        def reopen(path: str, new: NewPartition) -> PartitionLog:
            return self._open_log(directory, path, new.tp, new.topic_id, new.config)

        site = Site(
            directory.disk.storage, self._root, self._pending_delete, reopen, self._cache,
            directory, self.gone,
        )  # fmt: skip
        try:
            lost = await self._look_for_earlier(directory, site, group)
            present = [new for new in group if new.key not in lost]
            found = await directory.disk.write(partial(creation.create, site, present))
        except errors.PkError as error:
            return dict.fromkeys((new.key for new in group), error)
        found |= lost
        logs = {key: log for key, log in found.items() if isinstance(log, PartitionLog)}
        self._logs |= {key: (log, directory) for key, log in logs.items()}
        repaired = directory.repaired(logs)
        for new in present:
            if new.key in logs:
                self._opened_here(directory, site.identity(new))
        ends = {key: log.written_end for key, log in logs.items() if directory.names(key)}
        try:
            if ends:  # M2, as for the partitions that were known at the start
                await self._checkpoints.lower(directory, ends)
            else:  # before their first records (log/identity I1)
                await directory.write_checkpoints(identity.IDENTITIES)
            await directory.write_run()
        except errors.PkError as error:
            for key in repaired:
                directory.not_opened(key, error)
            for key in logs:
                del self._logs[key]
                await directory.disk.write(partial(logs[key].close, False))
                found[key] = error
        return found

    async def _look_for_earlier(
        self, directory: Directory, site: Site, group: list[NewPartition]
    ) -> dict[PartitionKey, LogOrError]:
        """Find the partitions of `group` that had a log here which is missing now (M5).

        M2: the checkpoint entries of a log that was given up are removed first, SYNCED.
        """
        had = {new.key: home for new in group if (home := self._had(new)) is not None}
        named = [new for new in group if new.key in had or directory.names(new.key)]
        look = partial(creation.not_here, site, named)
        absent = await directory.disk.write(look) if named else []
        lost: dict[PartitionKey, LogOrError] = {}
        for new in [new for new in named if new.key in absent]:
            home = had.get(new.key)
            if home is None:
                directory.forget(new.topic_id, new.tp)
                continue
            lost[new.key] = identity.missing(home.disk.storage, new.tp, new.topic_id)
            known = home.identities.get(str(new.tp))
            if known is not None and known.state == DISCARDED:
                self.operator_marked[new.key] = None
        if len(lost) < len(absent):
            await directory.write_checkpoints()
        return lost

    def _had(self, new: NewPartition) -> Directory | None:
        """Return the directory that had the log of `new`, according to its checkpoints."""
        homes = (each for each in self.directories if each.failed is None)
        return next((each for each in homes if each.had(new.topic_id, new.tp)), None)

    async def clear_operator_mark(self, new: NewPartition) -> None:
        """Remove the mark of an operator's decision, SYNCED.  From now on an adopted log is like
        any other, and a new log may be created in place of a discarded one.
        """
        for directory in self.directories:
            known = directory.identities.get(str(new.tp))
            if known is None or known.state not in (ADOPTED, DISCARDED):
                continue
            if known.state == DISCARDED:
                directory.forget(new.topic_id, new.tp)
            else:
                mine = Identity(*known.identity[:3], new.genesis, new.created)
                path = f"{self._path(str(new.tp))}/{identity.PARTITION_FILE}"
                write = partial(directory.disk.storage.replace_file, path, identity.encode(mine))
                await directory.disk.write(write)
                directory.identities[str(new.tp)] = Known(mine)
            await directory.write_checkpoints()
        self.operator_marked.pop(new.key, None)

    async def delete(self, key: PartitionKey) -> None:
        """Rename a partition's directory now and remove it after file_delete_delay_ms (M3).  The
        log refuses further appends.
        """
        log, directory = self._logs.pop(key)
        log.retire()
        self.operator_marked.pop(key, None)
        await directory.disk.write(partial(log.close, False))
        await self._discard(directory, log.path, key, log.config.file_delete_delay_ms)
        directory.forget(key.topic_id, log.topic_partition)

    async def set_aside(self, tp: TopicPartition, topic_id: str, delay_ms: int) -> None:
        """Rename the directory of a partition that is damaged (rule L9) or missing (rule L15), also
        of one that could not be opened, to rebuild the replica.  It is kept for `delay_ms`.  After
        `StorageFull` the checkpoints still have the log start: without it, the first file that is
        left would be taken for the first.
        """
        key, path = PartitionKey(topic_id, tp.partition), self._path(str(tp))
        if key in self._logs:
            await self.delete(key)
            return
        for directory in self.directories:
            if directory.failed is None:
                await self._discard(directory, path, key, delay_ms)
                directory.forget(topic_id, tp)

    def _pending_delete(self, path: str) -> str:
        return f"{path}.{self._world.new_id()}{identity.DELETING}"

    async def _discard(
        self, directory: Directory, path: str, key: PartitionKey, delay_ms: int
    ) -> bool:
        storage, pending_delete = directory.disk.storage, self._pending_delete(path)
        ours = directory.vouches_for(key, path.rpartition("/")[2])
        give_up = partial(files.give_up, storage, path, pending_delete, key, ours=ours)
        if given_up := await directory.disk.write(give_up):
            self._tasks.spawn(self._remove_later(directory, pending_delete, delay_ms))
        return given_up

    async def _remove_later(self, directory: Directory, path: str, delay_ms: int) -> None:
        await self._world.clock.sleep_ms(delay_ms)
        with contextlib.suppress(errors.PkError):  # offline: the next start removes it
            await directory.disk.write(partial(directory.disk.storage.remove_tree, path))

    async def cut(self, key: PartitionKey, offset: Offset) -> None:
        """Truncate the log at `offset` (rule R4).  The checkpoints are lowered before the files are
        cut, so that M2 holds in between.  No write may be queued for the log meanwhile.
        """
        log, directory = self._logs[key]
        async with self._checkpoints.reshaping(key):
            await self._checkpoints.lower(directory, {key: offset})
            await directory.disk.write(partial(log.truncate_to, offset))

    async def start_anew(
        self,
        key: PartitionKey,
        offset: Offset,
        snapshot: bytes = b"",
        *,
        log_start: Offset,
        forgotten_end: Offset = 0,
    ) -> None:
        """Delete the local log and begin a new one at `offset` (rules R5, T4).  The records of
        `[log_start, offset)` are in the tier.  `forgotten_end`: see log/forgotten H3.
        """
        log, directory = self._logs[key]
        start = min(log_start, offset)
        snapshot = snapshot or Producers().snapshot(offset)  # else it is blank (log/loading O2)
        reset = partial(log.reset_to, log_start=start, forgotten_end=forgotten_end)
        async with self._checkpoints.reshaping(key):
            with directory.begins(key, offset):
                directory.recovery_points[key] = 0  # in between there is no segment at all
                await self._checkpoints.lower(directory, {key: min(start, log.local_log_start)})
                if log.written_end < start:  # it may be opened in between (log/loading O2)
                    await directory.disk.write(partial(log.keep_snapshot, offset, snapshot))
                # if the process dies in between, nothing lies below this offset either
                with directory.moves({key: start}):
                    await self._checkpoints.write_log_starts(directory)
                    await directory.disk.write(partial(reset, offset, snapshot))
        await self._checkpoints.write_log_starts(directory)

    async def reopen(self, key: PartitionKey) -> None:
        """Open a log again, as at a start of the process, after a cut stopped half-way (`torn`).

        Raises `StorageFull`, which leaves the log as it was, `CorruptLog` or `StorageFailed`.
        """
        log, directory = self._logs[key]
        async with self._checkpoints.reshaping(key):
            point = directory.recovery_points.get(key, 0)
            await directory.disk.write(partial(log.reopen, point))

    # -- checkpoints -------------------------------------------------------------------------------

    async def checkpoint(self, of: Directory | None = None, now_ms: int | None = None) -> None:
        """Checkpoint one directory, or all; see `Checkpointer.checkpoint`."""
        await self._checkpoints.checkpoint(of, now_ms)

    async def checkpoint_log_starts(self) -> None:
        """Write the log starts of all directories, SYNCED."""
        await self._checkpoints.checkpoint_log_starts()

    async def move_log_starts(self, moves: Mapping[PartitionKey, Offset]) -> None:
        """Move log starts up, SYNCED first (rule T9); see `Checkpointer.move_log_starts`."""
        await self._checkpoints.move_log_starts(moves)

    def high_watermark(self, key: PartitionKey) -> Offset:
        """The checkpointed high watermark; 0 if there is none."""
        return self._checkpoints.high_watermark(key)

    def set_high_watermark(self, key: PartitionKey, offset: Offset) -> None:
        """Remember the high watermark for the next checkpoint."""
        self._checkpoints.set_high_watermark(key, offset)

    def remember_broker_epoch(self, broker_epoch: int) -> None:
        """Remember the broker epoch, and write it to run.json soon (L3).  `close` writes it to the
        clean-shutdown file."""
        for directory in self.directories:
            if directory.failed is None:
                directory.broker_epoch = broker_epoch
                self._tasks.spawn(directory.try_to_write_run())

    # -- closing -----------------------------------------------------------------------------------

    async def close(self, clean: bool = True) -> None:
        """Close every directory.  With `clean`, flush everything and then write the clean-shutdown
        file.  A failed directory stays unclean (M4).
        """
        await self._tasks.close()
        for directory in self.directories:
            if directory.failed is None:
                with contextlib.suppress(errors.PkError):  # unclean: the next start verifies it
                    await self._close(directory, clean)
            directory.disk.storage.unlock()
        self._logs.clear()

    async def _close(self, directory: Directory, clean: bool) -> None:
        mine = [(key, log) for key, (log, home) in self._logs.items() if home is directory]
        lines, closed = await closing.close_all(directory.disk, [log for _, log in mine], clean)
        ends = [
            (key, log.synced_end) for (key, log), done in zip(mine, closed, strict=True) if done
        ]
        directory.recovery_points.update(ends)
        all_clean = clean and all(closed) and not directory.unrepaired
        if not clean or not self._loaded:
            return  # nothing was verified: the next start has to do it
        await self._checkpoints.write(directory)
        await closing.write_lines(directory.disk, lines)
        run = directory.run_at_stop()
        if all_clean and run is not None:
            await directory.disk.write(partial(files.mark_clean, directory.disk.storage, run))
