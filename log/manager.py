"""Data directories and the partitions in them: format, lock, loading, checkpoints, deletion.

One per broker process.
    manager = LogManager(disks, node_id=…, cluster_id=…, build=…, world=…, boot_id=…)
    await manager.open()             # lock, format, clean-shutdown file
    await manager.load(config_of)    # opens every partition directory, in parallel
    log = await manager.create(tp, topic_id, config);  manager.get(key);  await manager.delete(key)
    await manager.checkpoint()       # recovery points, log starts, high watermarks; SYNCED
    await manager.close()            # flush, checkpoints, clean-shutdown file, unlock

Rules
  M1  a directory is changed only while its lock is held; one that belongs to others is refused by
      name.
  M2  checkpoints only ever name what was true when they were written: recovery point <= synced end
      (rule L1).
  M3  a partition nobody knows (rule Q2, log/strays.py), or a deleted one, is renamed first and
      removed after a delay; a crash in between leaves the new name, which the next start removes.
  M4  a failed directory takes its own partitions offline and no others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from pk import errors
from pk.log import creation
from pk.log import directory as files
from pk.log.creation import NewPartition, Outcome, Site
from pk.log.directory import Directory, Format, Run
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.log.producers import Producers
from pk.log.segment import IndexCache
from pk.log.storage import Disk
from pk.log.strays import Strays
from pk.types import NONE, Offset, PartitionKey, TopicPartition
from pk.world import World

ConfigOf = Callable[[str, TopicPartition], LogConfig | None]

DELETING = "-delete"
#: How long a stray stays; a deleted partition stays its topic's file_delete_delay_ms.
STRAY_DELAY_MS = 60_000


class LogManager:
    """See the module's docstring."""

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
    ) -> None:
        """`cluster_id` "" = the one in the format file.  `root`: where the partition directories
        stand.
        """
        self.directories: list[Directory] = []
        self.cluster_id = cluster_id
        self._disks = disks
        self._node_id = node_id
        self._build = build
        self._world = world
        self._boot_id = boot_id
        self._expiration_ms = producer_id_expiration_ms
        self._root = root
        self._cache = IndexCache(index_cache_bytes)
        self._logs: dict[PartitionKey, tuple[PartitionLog, Directory]] = {}
        self._strays = Strays()
        self._broker_epoch = NONE
        self._loaded = False
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._checkpointing = {id(disk): asyncio.Lock() for disk in disks}
        #: Logs being cut or begun anew: a recovery point found before that is void (M2).
        self._reshaping: dict[PartitionKey, None] = {}

    # -- opening -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Lock and identify every directory.

        Raises `DirectoryLocked`, `DirectoryOfAnotherCluster`, `DirectoryOfAnotherBuild`,
        `NewerFormat`; then none stays locked.  A directory whose disk fails is kept as failed,
        unless all do (M4)."""
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
        storage = disk.storage
        storage.lock()
        try:
            found = files.read_format(storage)
            fresh = found is None
            if found is None:
                assert self.cluster_id, "a directory is formatted for a cluster"
                found = Format(
                    files.FORMAT, self._build, self.cluster_id, self._node_id, self._world.new_id()
                )
                files.format_directory(storage, found)
            files.check_format(
                storage, found, cluster_id=self.cluster_id, node_id=self._node_id, build=self._build
            )
            self.cluster_id = found.cluster_id
            before, closed = files.read_run(storage)
            if self._root:
                storage.make_dir(self._root)
                storage.sync_dir("")
            opened = Directory(
                disk,
                found.directory_id,
                False,
                before.broker_epoch,
                closed_properly=closed,
                same_boot=bool(before.boot_id) and before.boot_id == self._boot_id,
            )
            opened.clean = not fresh and (closed or opened.same_boot)
            for name, into in (
                (files.RECOVERY_POINTS, opened.recovery_points),
                (files.LOG_STARTS, opened.log_starts),
                (files.HIGH_WATERMARKS, opened.high_watermarks),
            ):
                into.update(files.read_offsets(storage, name))
                opened.written[name] = dict(into)
        except BaseException:
            storage.unlock()
            raise
        return opened

    async def load(self, config_of: ConfigOf) -> list[tuple[PartitionKey, Exception]]:
        """Open every partition found; `config_of(topic_id, tp)` is None for a stray (rule Q2).

        Returns the partitions that could not be opened, with their errors; the others serve.
        """
        jobs: list[tuple[Directory, str]] = []
        for directory in self.directories:
            if directory.failed is None:
                storage = directory.disk.storage
                try:
                    if not directory.closed_properly:  # the last names may be WRITTEN only
                        await directory.disk.write(partial(storage.sync_dir, self._root))
                    names = await directory.disk.read(partial(storage.list, self._root))
                except errors.StorageFailed:
                    continue  # M4
                jobs += [(directory, name) for name in names]
        gate = asyncio.Semaphore(16)

        async def one(directory: Directory, name: str) -> tuple[PartitionKey, Exception] | None:
            async with gate:
                return await self._load_one(directory, name, config_of)

        found = await asyncio.gather(*(one(*job) for job in jobs))
        problems = [problem for problem in found if problem is not None]
        for key in {key: None for key, _ in problems if key in self._logs}:
            log, home = self._logs.pop(key)  # nobody knows which of two is the newer
            await home.disk.write(partial(log.close, False))
        for directory in self.directories:
            if directory.failed is None:
                problems += await self._mark_running(directory)
        self._loaded = True
        return problems

    async def _mark_running(self, directory: Directory) -> list[tuple[PartitionKey, Exception]]:
        """Only once everything is open: a process that dies before its repairs are done must not
        leave word that it ran in this boot, else the next one takes a power loss for damage.

        M2: what the power loss took goes from the checkpoints, too.  It may have been committed in
        a history that was given up (rules R3, R4); what comes to stand there was not.  Partitions
        for which a full disk has no room for that are closed, and returned: to be tried again.
        """
        waiting: list[tuple[PartitionKey, Exception]] = []
        logs = self._logs.items()
        ends = {key: log.written_end for key, (log, home) in logs if home is directory}
        try:
            try:
                await self._claim_less(directory, ends)
            except errors.StorageFull as full:
                waiting = [(key, full) for key, end in ends.items() if directory.claims(key, end)]
                for key, _ in waiting:
                    directory.not_opened(key, full)
                    await directory.disk.write(partial(self._logs.pop(key)[0].close, False))
            run = directory.run(self._boot_id, directory.previous_broker_epoch)
            await directory.disk.write(partial(files.mark_running, directory.disk.storage, run))
        except errors.StorageFailed:
            if all(each.failed is not None for each in self.directories):
                raise  # M4
        return waiting

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    async def _load_one(
        self, directory: Directory, name: str, config_of: ConfigOf
    ) -> tuple[PartitionKey, Exception] | None:
        storage, path = directory.disk.storage, self._path(name)
        if name.endswith(DELETING):  # M3: an earlier life renamed it
            await directory.disk.write(partial(storage.remove_tree, path))
            return None
        key = PartitionKey(name, NONE)
        try:
            identity = await directory.disk.read(partial(files.read_partition, storage, path))
            if identity is None:
                await directory.disk.write(partial(creation.sweep, storage, path))
                return None
            topic_id, tp = identity
            key = PartitionKey(topic_id, tp.partition)
            config = config_of(topic_id, tp)
            if config is None:
                now_ms = self._world.clock.wall_ms()
                await self._strays.note(directory, path, topic_id, tp, now_ms)
                return None
            log = await directory.disk.read(
                partial(self._open_log, directory, path, tp, topic_id, config)
            )
            if key in self._logs:  # only now: they are opened side by side
                await directory.disk.write(partial(log.close, False))
                raise errors.CorruptLog(
                    f"{tp} stands in two directories: {storage.root} and another"
                )
        except (errors.PkError, OSError) as error:
            directory.not_opened(key, error)
            return key, error
        self._logs[key] = (log, directory)
        return None

    def is_stray(self, key: PartitionKey) -> bool:
        """It was not known when it was looked at, and nothing was said of it since (M3)."""
        return key in self._strays

    async def discard_strays(self) -> None:
        """M3: whoever calls this knows every partition that was placed here before it began."""
        for key, directory, path in self._strays.unknown():
            await self._discard(directory, path, key, STRAY_DELAY_MS)

    def _open_log(
        self, directory: Directory, path: str, tp: TopicPartition, topic_id: str, config: LogConfig
    ) -> PartitionLog:
        key = PartitionKey(topic_id, tp.partition)
        return PartitionLog.open(
            directory.disk.storage,
            path,
            tp,
            topic_id,
            config,
            clean=directory.closed_properly,
            same_boot=directory.same_boot,
            recovery_point=directory.recovery_points.get(key, 0),
            log_start=directory.log_starts.get(key),
            now_ms=self._world.clock.wall_ms(),
            cache=self._cache,
            salvage=True,
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
        """A new partition.  Raises the storage's errors."""
        (outcome,) = await self.create_all([NewPartition(tp, topic_id, config)])
        if isinstance(outcome, errors.PkError):
            raise outcome
        return outcome

    async def create_all(self, wanted: Sequence[NewPartition]) -> list[Outcome]:
        """New partitions, `creation.VISIT_MAX` at most, in one visit to each directory.

        Each goes to the directory where it stands, a stray perhaps or one that could not be opened
        before, else to the one with the fewest, then the most free space.  A log, or the storage's
        error, for each.
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
        outcomes: dict[PartitionKey, Outcome] = {}
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
    ) -> dict[PartitionKey, Outcome]:
        def reopen(path: str, new: NewPartition) -> PartitionLog:
            return self._open_log(directory, path, new.tp, new.topic_id, new.config)

        site = Site(directory.disk.storage, self._root, self._doomed, reopen, self._cache)
        try:
            await self._forget_earlier(directory, site, group)
            found = await directory.disk.write(partial(creation.create, site, group))
        except errors.PkError as error:
            return dict.fromkeys((new.key for new in group), error)
        logs = {key: log for key, log in found.items() if isinstance(log, PartitionLog)}
        self._logs |= {key: (log, directory) for key, log in logs.items()}
        for key in logs:
            directory.unrepaired.pop(key, None)
        ends = {key: log.written_end for key, log in logs.items() if directory.names(key)}
        try:
            if ends:  # M2, as for those that were known at once
                await self._claim_less(directory, ends)
        except errors.PkError as error:
            for key in ends:
                del self._logs[key]
                await directory.disk.write(partial(logs[key].close, False))
                found[key] = error
        return found

    async def _forget_earlier(
        self, directory: Directory, site: Site, group: list[NewPartition]
    ) -> None:
        """M2: what a checkpoint says of an earlier life goes, SYNCED, before the new one begins."""
        named = [new for new in group if directory.names(new.key)]
        gone = await directory.disk.write(partial(creation.not_here, site, named)) if named else []
        if gone:
            for key in gone:
                directory.forget(key)
            await directory.write_checkpoints()

    async def delete(self, key: PartitionKey) -> None:
        """Out of the way now, off the disk after file_delete_delay_ms (M3).  The log refuses
        further appends.
        """
        log, directory = self._logs.pop(key)
        log.retire()
        directory.forget(key)
        await directory.disk.write(partial(log.close, False))
        await self._discard(directory, log.path, key, log.config.file_delete_delay_ms)

    async def set_aside(self, tp: TopicPartition, topic_id: str, delay_ms: int) -> None:
        """Out of the way with a partition that is damaged, whether or not it could be opened (L9):
        its replica is made anew.  What was there stays for `delay_ms`, for people.
        """
        key = PartitionKey(topic_id, tp.partition)
        if key in self._logs:
            await self.delete(key)
            return
        for directory in self.directories:
            path, disk = self._path(str(tp)), directory.disk
            if directory.failed is None and await disk.read(partial(disk.storage.exists, path)):
                directory.forget(key)
                await self._discard(directory, path, key, delay_ms)

    def _doomed(self, path: str) -> str:
        return f"{path}.{self._world.new_id()}{DELETING}"

    async def _discard(
        self, directory: Directory, path: str, key: PartitionKey, delay_ms: int
    ) -> None:
        storage, doomed = directory.disk.storage, self._doomed(path)
        if await directory.disk.write(partial(files.give_up, storage, path, doomed, key)):
            self._start(self._remove_later(directory, doomed, delay_ms))

    async def _remove_later(self, directory: Directory, path: str, delay_ms: int) -> None:
        await self._world.clock.sleep_ms(delay_ms)
        with contextlib.suppress(errors.PkError):  # it is offline; the next start removes it
            await directory.disk.write(partial(directory.disk.storage.remove_tree, path))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def cut(self, key: PartitionKey, offset: Offset) -> None:
        """Drop what the log has at or above `offset` (rule R4); M2 holds in between: what says that
        more is there, or was flushed, goes first.  Nothing may be queued for the log meanwhile.
        """
        log, directory = self._logs[key]
        self._reshaping[key] = None
        try:
            await self._claim_less(directory, {key: offset})
            await directory.disk.write(partial(log.truncate_to, offset))
        finally:
            del self._reshaping[key]

    async def start_anew(
        self, key: PartitionKey, offset: Offset, snapshot: bytes = b"", *, log_start: Offset
    ) -> None:
        """Drop the local log; the next one begins at `offset` (rules R5, T4).  The records of
        `[log_start, offset)` are in the tier.
        """
        log, directory = self._logs[key]
        start = min(log_start, offset)
        snapshot = snapshot or Producers().snapshot(offset)  # else it would be blank (O2)
        self._reshaping[key] = None
        try:
            directory.recovery_points[key] = 0  # in between there is no segment at all
            await self._claim_less(directory, {key: min(start, log.local_log_start)})
            if log.written_end < start:  # it may be opened there in between (O2)
                await directory.disk.write(partial(log.keep_snapshot, offset, snapshot))
            with directory.moves({key: start}):  # who dies on the way has nothing below it either
                await self._write_log_starts(directory)
                await directory.disk.write(partial(log.reset_to, offset, snapshot, log_start=start))
        finally:
            del self._reshaping[key]
        await self._write_log_starts(directory)

    async def reopen(self, key: PartitionKey) -> None:
        """Open a log that a full disk left half-way (`torn`), as a start of the process would.

        Raises `StorageFull`: it is as it was; `CorruptLog`, `StorageFailed`.
        """
        log, directory = self._logs[key]
        self._reshaping[key] = None
        try:
            point = directory.recovery_points.get(key, 0)
            await directory.disk.write(partial(log.reopen, point))
        finally:
            del self._reshaping[key]

    async def _claim_less(self, directory: Directory, ends: Mapping[PartitionKey, Offset]) -> None:
        """SYNCED: no checkpoint of these is above its end, nor will be once a move is over."""
        for key, end in ends.items():
            log = self._logs[key][0]
            log.log_start = min(log.log_start, end)
            for named in (directory.recovery_points, directory.high_watermarks, *directory.moving):
                if named.get(key, 0) > end:
                    named[key] = end
        await self._write_checkpoints(directory)

    # -- checkpoints -------------------------------------------------------------------------------

    def high_watermark(self, key: PartitionKey) -> int:
        """The checkpointed high watermark; 0 if there is none."""
        return self._logs[key][1].high_watermarks.get(key, 0)

    def set_high_watermark(self, key: PartitionKey, offset: int) -> None:
        """Remembered for the next checkpoint."""
        found = self._logs.get(key)
        if found is not None:
            found[1].high_watermarks[key] = offset

    async def checkpoint(self, of: Directory | None = None, now_ms: int | None = None) -> None:
        """Recovery points, log starts, high watermarks (SYNCED) of a directory, or of all, one
        after another; producers silent by `now_ms` go.

        Sealed segments are flushed on the way, beside the writer, so that recovery points follow
        the rolls. Raises the first storage error, after every directory had its turn (M4)."""
        problems: list[Exception] = []
        for each in self.directories if of is None else [of]:
            try:
                async with self._checkpointing[id(each.disk)]:
                    if each.failed is None:
                        await self._checkpoint(each, now_ms)
            except errors.PkError as error:
                problems.append(error)
        if problems:
            raise problems[0]

    async def _checkpoint(self, directory: Directory, now_ms: int | None) -> None:
        for key, (log, home) in list(self._logs.items()):
            if home is not directory or key not in self._logs:
                continue
            log.producers.expire(now_ms or 0, self._expiration_ms)
            if directory.recovery_points.get(key) == log.written_end:
                continue  # nothing new since the last one
            await directory.disk.read(log.flush_sealed)
            point = await directory.disk.write(log.checkpoint)
            mine = self._logs.get(key)  # else it was made anew meanwhile (M2)
            same = mine is not None and mine[0] is log and not log.torn
            if same and key not in self._reshaping:
                directory.recovery_points[key] = point
        await self._write_checkpoints(directory)

    async def checkpoint_log_starts(self) -> None:
        """SYNCED: the log starts as they are."""
        for directory in self.directories:
            if directory.failed is None:
                await self._write_log_starts(directory)

    async def move_log_starts(self, moves: Mapping[PartitionKey, Offset]) -> None:
        """Rule T9's first half: SYNCED first, and only then seen by readers and the tier.

        A start that is not ahead stays.  Raises the disk's failure; then nothing moved.
        """
        for directory in self.directories:
            mine = {key: to for key, to in moves.items() if self._home(key) is directory}
            if not mine or directory.failed is not None:
                continue
            with directory.moves(mine):
                await self._write_log_starts(directory)
            for key, to in mine.items():
                if key in self._logs:
                    self._logs[key][0].advance_log_start(to)

    def _home(self, key: PartitionKey) -> Directory | None:
        found = self._logs.get(key)
        return None if found is None else found[1]

    async def _write_checkpoints(self, directory: Directory) -> None:
        self._note_log_starts(directory)
        await directory.write_checkpoints()

    async def _write_log_starts(self, directory: Directory) -> None:
        self._note_log_starts(directory)
        await directory.write_checkpoints(files.LOG_STARTS)

    def _note_log_starts(self, directory: Directory) -> None:
        for key, (log, home) in self._logs.items():
            if home is directory and not log.start_unknown:
                moving = (each.get(key, 0) for each in directory.moving)
                directory.log_starts[key] = max(log.log_start, *moving, 0)

    def remember_broker_epoch(self, broker_epoch: int) -> None:
        """Soon in run.json, and with the clean-shutdown file (rule L3)."""
        self._broker_epoch = broker_epoch
        for directory in self.directories:
            if directory.failed is None:
                self._start(self._write_epoch(directory, broker_epoch))

    async def _write_epoch(self, directory: Directory, broker_epoch: int) -> None:
        with contextlib.suppress(errors.PkError):  # the next start counts as unclean: safe
            run = directory.run(self._boot_id, broker_epoch)
            await directory.disk.write(partial(files.write_run, directory.disk.storage, run))

    # -- closing -----------------------------------------------------------------------------------

    async def close(self, clean: bool = True) -> None:
        """`clean`: everything SYNCED, then the clean-shutdown file.  A failed directory stays
        unclean (M4).
        """
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*list(self._tasks), return_exceptions=True)
        for directory in self.directories:
            if directory.failed is None:
                with contextlib.suppress(errors.PkError):  # not closed properly: it is verified
                    await self._close(directory, clean)
            directory.disk.storage.unlock()
        self._logs.clear()

    async def _close(self, directory: Directory, clean: bool) -> None:
        all_clean = clean and not directory.unrepaired
        for key, (log, home) in self._logs.items():
            if home is not directory:
                continue
            log.retire()
            try:
                await directory.disk.write(partial(log.close, clean))
                directory.recovery_points[key] = log.synced_end
            except errors.PkError:
                all_clean = False
        if not clean or not self._loaded:
            return  # nothing was verified: the next start has to
        await self._write_checkpoints(directory)
        # L3: the controller knows of an unclean start once it was registered; a life that ended
        # before that passes it on.
        known = self._broker_epoch != NONE
        if all_clean and (known or directory.closed_properly):
            epoch = self._broker_epoch if known else directory.previous_broker_epoch
            run = Run(self._boot_id, epoch)
            await directory.disk.write(partial(files.mark_clean, directory.disk.storage, run))
