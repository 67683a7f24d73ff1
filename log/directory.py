"""One data directory: the names, contents and checks of its format file, clean-shutdown file and
checkpoints.  It decides no policy.

| file | content |
|---|---|
| pk.json | the owner of the directory, with a checksum (rule L18); written once, at the format |
| run.json | boot id and broker epoch of the running or last process (rule L3), and its torn logs |
| clean-shutdown | exists only while no process runs and the last one closed properly |
| recovery-point-offset-checkpoint | topic id, partition, offset: everything below is SYNCED |
| replication-offset-checkpoint | … high watermark |
| log-start-offset-checkpoint | … log start (rule T9) |
| local-log-start-offset-checkpoint | … everything from here on is in the local log (rule L9) |
| partition-identity-checkpoint | the identities of all logs once more (rule L15, log/identity.py) |
| closed-logs-checkpoint | what a clean stop vouches for (log/closed_logs.py) |
| topics/<topic>-<partition>/ | partition.json (the identity, rule L8) and the segments |
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from pk import errors, formats
from pk.log import checkpoints, closed_logs_file, identity, last_run, sealed
from pk.log.identity import DISCARDED, IDENTITIES, Identities, Identity, Known
from pk.log.last_run import LastRun
from pk.log.storage import Disk, Storage
from pk.types import METADATA_TOPIC, NONE, Offset, PartitionKey, TopicPartition

FORMAT = 1
FORMAT_FILE = "pk.json"
RUN_VERSION = 0  #: of run.json and clean-shutdown
RUN_FILE = "run.json"
CLEAN_FILE = "clean-shutdown"
RECOVERY_POINTS = "recovery-point-offset-checkpoint"
HIGH_WATERMARKS = "replication-offset-checkpoint"
LOG_STARTS = "log-start-offset-checkpoint"
LOCAL_STARTS = "local-log-start-offset-checkpoint"
#: The checkpoints that hold offsets.
OFFSETS = (RECOVERY_POINTS, HIGH_WATERMARKS, LOG_STARTS, LOCAL_STARTS)
#: Names that may exist in a directory that is about to be formatted.
_HARMLESS = {".lock", "lost+found", "run", "metadata", FORMAT_FILE + ".tmp"}
#: Names that exist only in a formatted directory: files, and directories that are not empty.
_DATA = {RUN_FILE, CLEAN_FILE, last_run.FILE, IDENTITIES, closed_logs_file.FILE, *OFFSETS}
_LOGS = ("topics", f"metadata/{METADATA_TOPIC}-0")
#: What the operator has to do if pk.json is lost beside data.
_RESTORE = (
    "Nothing here was changed; remove nothing. Put the file back from any backup of this directory:"
    " it never changes after the format. Without one see docs/REPAIR.md, The identity of a node"
)

Offsets = dict[PartitionKey, int]


@dataclass(slots=True, eq=False)
class Directory:
    """One data directory as the broker registers it (rule L3)."""

    disk: Disk
    directory_id: str
    clean: bool  #: closed properly, or the page cache outlived the process (same boot id)
    previous_broker_epoch: int  #: -1 = no epoch is known
    closed_properly: bool = False
    same_boot: bool = False
    #: Logs that no process could open since a power loss: their tails may be torn (`ProcessRun`).
    torn: frozenset[PartitionKey] = frozenset()
    boot_id: str = ""  #: of this boot, once run.json may name it
    broker_epoch: int = NONE  #: of this process; NONE = it has not registered
    cluster_id: str = ""
    recovery_points: Offsets = field(default_factory=dict)
    log_starts: Offsets = field(default_factory=dict)
    #: log starts that are being moved and are not SYNCED yet
    moving: list[dict[PartitionKey, Offset]] = field(default_factory=list)
    local_starts: Offsets = field(default_factory=dict)
    begun_anew: Offsets = field(default_factory=dict)  #: offsets at which logs are about to begin
    high_watermarks: Offsets = field(default_factory=dict)
    identities: Identities = field(default_factory=dict)
    #: The checkpoints as they are on the disk.
    written: dict[str, Mapping[Any, Any]] = field(default_factory=dict)
    written_run: ProcessRun | None = None  #: what this process has written to run.json
    #: after a clean stop: the line of each log (log/closed_logs); `load` uses them up
    closed_logs: dict[str, str] = field(default_factory=dict)
    failure: Exception | None = None  #: the error that kept the directory from being opened
    last_run: LastRun | None = None  #: the last run of the previous process (rule L10)
    #: Partitions that could not be opened yet: their tails have not been examined.
    unrepaired: dict[PartitionKey, None] = field(default_factory=dict)

    @property
    def failed(self) -> Exception | None:
        return self.failure or self.disk.storage.failed

    @property
    def _offsets(self) -> dict[str, Offsets]:
        return {
            RECOVERY_POINTS: self.recovery_points,
            LOG_STARTS: self.log_starts,
            LOCAL_STARTS: self.local_starts,
            HIGH_WATERMARKS: self.high_watermarks,
        }

    def names(self, key: PartitionKey) -> bool:
        """Whether a checkpoint of offsets, in memory or on the disk, names the log."""
        kept = [self.written.get(name, {}) for name in self._offsets]
        return any(key in offsets for offsets in (*self._offsets.values(), *kept))

    def had(self, topic_id: str, tp: TopicPartition) -> bool:
        """Whether the log existed in this directory and was not given up by this process
        (rule L15).
        """
        key = PartitionKey(topic_id, tp.partition)
        known = self.identities.get(str(tp))
        named = known is not None and known.identity.topic_id in ("", topic_id)
        return named or any(key in offsets for offsets in self._offsets.values())

    def vouches_for(self, key: PartitionKey, name: str) -> bool:
        """Whether the second copy says that the directory `name` belongs to this log."""
        known = self.identities.get(name)
        return known is not None and known.identity.key == key and known.state != DISCARDED

    def register(self, log: Identity) -> None:
        """Note that `log` is served from this directory; the next checkpoint says so (log/identity
        I1).
        """
        known = self.identities.get(str(log.topic_partition))
        if known is None or known.identity.key != log.key:
            self.identities[str(log.topic_partition)] = Known(log)

    def claims(self, key: PartitionKey, end: Offset) -> bool:
        """Whether a checkpoint on the disk says that the log reaches beyond `end`."""
        return any(self.written.get(name, {}).get(key, 0) > end for name in self._offsets)

    def forget(self, topic_id: str, tp: TopicPartition) -> None:
        """Remove the log from the next checkpoint."""
        key = PartitionKey(topic_id, tp.partition)
        for offsets in self._offsets.values():
            offsets.pop(key, None)
        known = self.identities.get(str(tp))
        if known is not None and known.identity.topic_id in ("", topic_id):
            del self.identities[str(tp)]
        self.unrepaired.pop(key, None)

    def not_opened(self, key: PartitionKey, error: Exception) -> None:
        """Note a partition that could not be opened, for want of space for example.  Its torn tail
        still has to be cut when it can be opened.
        """
        final = errors.CorruptLog | errors.LogUnidentified
        if not self.closed_properly and not isinstance(error, final):
            self.unrepaired[key] = None

    def repaired(self, keys: Iterable[PartitionKey]) -> list[PartitionKey]:
        """Note the logs that can be opened now; return those that could not be opened before."""
        waited = [key for key in keys if key in self.unrepaired]
        for key in waited:
            del self.unrepaired[key]
        return waited

    def outlived(self, key: PartitionKey) -> bool:
        """Whether the page cache outlived the last process that wrote this log, so that only the
        log's last batch may be torn (recovery.py: H, I).
        """
        return self.same_boot and key not in self.torn

    def run(self) -> ProcessRun:
        """Return the content of run.json for this process."""
        torn = (key for key in self.unrepaired if not self.outlived(key))
        registered = self.broker_epoch != NONE
        epoch = self.broker_epoch if registered else self.previous_broker_epoch
        return ProcessRun(self.boot_id, epoch, tuple(sorted(torn)))

    async def mark_running(self, boot_id: str) -> None:
        """Mark the process as running: its end counts as unclean until `mark_clean`.  SYNCED before
        any log is written.

        On a full disk run.json is not written; the next checkpoint writes it.  Until then the next
        process takes the end of this one for a power loss.
        """
        self.boot_id = boot_id
        with contextlib.suppress(errors.StorageFull):
            await self.write_run()
        await self.disk.write(partial(_remove_mark, self.disk.storage))

    async def write_run(self) -> None:
        """Write run.json, SYNCED, if its content has changed.  No process writes it before
        `mark_running`.
        """
        run = self.run()
        if self.boot_id and run != self.written_run:
            await self.disk.write(partial(_write_run, self.disk.storage, run))
            self.written_run = run

    async def try_to_write_run(self) -> None:
        """As `write_run`; after an error the next checkpoint writes it."""
        with contextlib.suppress(errors.PkError):
            await self.write_run()

    def run_at_stop(self) -> ProcessRun | None:
        """Return the content of the clean-shutdown file; None = it is not written (rule L3).  A
        process that registered has reported an unclean start to the controller.  A process that
        ended before it registered passes the mark on to the next one.
        """
        return self.run() if self.broker_epoch != NONE or self.closed_properly else None

    @contextmanager
    def moves(self, starts: dict[PartitionKey, Offset]) -> Iterator[None]:
        """While the context is open, every checkpoint that is written has these new log starts."""
        self.moving.append(starts)
        try:
            yield
        finally:
            self.moving = [each for each in self.moving if each is not starts]

    @contextmanager
    def begins(self, key: PartitionKey, offset: Offset) -> Iterator[None]:
        """While the context is open, every checkpoint says that the log begins at `offset`."""
        self.begun_anew[key] = offset
        try:
            yield
        finally:
            del self.begun_anew[key]

    async def write_checkpoints(self, *names: str) -> None:
        """Write the checkpoints that changed, SYNCED; by default all of them."""
        now: dict[str, Mapping[Any, Any]] = {**self._offsets, IDENTITIES: self.identities}
        copies = {name: dict(now[name]) for name in names or now}
        await self.disk.write(partial(self._write, copies))

    def _write(self, wanted: dict[str, Any]) -> None:
        for name, content in wanted.items():
            if self.written.get(name) == content:
                continue
            if name == IDENTITIES:
                identity.write_all(self.disk.storage, content)
            else:
                write_offsets(self.disk.storage, name, content)
            self.written[name] = content


def open_directory(
    disk: Disk, wanted: Format, *, boot_id: str, root: str, level: int = formats.LEVEL
) -> Directory:
    """In the write lane: lock the directory and identify it; format it as `wanted` if it is empty.

    `level`: of `pk.format`, the highest that this node knows.
    `wanted.cluster_id` "" = the cluster that the directory names.  `root`: path of the partition
    directories.  Raises `DirectoryLocked`, `DirectoryOfAnotherCluster`, `DirectoryOfAnotherBuild`
    or `NewerFormat`, and then leaves the directory unlocked.
    """
    storage = disk.storage
    storage.lock()
    try:
        found = read_format(storage, level)
        fresh = found is None
        if found is None:
            assert wanted.cluster_id, "a directory is formatted for a cluster"
            found = wanted
            format_directory(storage, found)
        check_format(
            storage,
            found,
            cluster_id=wanted.cluster_id,
            node_id=wanted.node_id,
            build=wanted.build,
        )
        with formats.named(storage.root):
            before, closed = read_run(storage)
        if root:
            storage.make_dir(root)
            storage.sync_dir("")
        opened = Directory(
            disk,
            found.directory_id,
            False,
            before.broker_epoch,
            closed_properly=closed,
            same_boot=bool(before.boot_id) and before.boot_id == boot_id,
            torn=frozenset(before.torn),
            cluster_id=found.cluster_id,
        )
        opened.clean = not fresh and (closed or opened.same_boot)
        with formats.named(storage.root):
            for name, into in opened._offsets.items():
                into.update(read_offsets(storage, name))
                opened.written[name] = dict(into)
            opened.identities.update(identity.read_all(storage))
            opened.last_run = read_last_run(storage)
            opened.closed_logs = closed_logs_file.read(storage) if closed else {}
        opened.written[IDENTITIES] = dict(opened.identities)
    except BaseException:
        storage.unlock()
        raise
    return opened


class Format(NamedTuple):
    """The content of pk.json."""

    format: int
    build: str
    cluster_id: str
    node_id: int
    directory_id: str


class ProcessRun(NamedTuple):
    """One process that used the directory.

    torn: the logs that it could not open, for want of space for example, and whose tails a power
        loss before it may have torn.  The next process must treat such a tail as torn, and the tail
        of any other log as damaged if it is not whole (recovery.py: G, I)
    """

    boot_id: str = ""
    broker_epoch: int = NONE
    torn: tuple[PartitionKey, ...] = ()


def read_format(storage: Storage, level: int = formats.LEVEL) -> Format | None:
    """Read pk.json; None = the directory is not formatted.  Raises `CorruptLog` if the checksum
    does not match, and `NewerFormat`.

    Early builds of format 0 wrote the file without a checksum.  It is returned all the same, and
    `check_format` refuses it by the name of the build.
    """
    try:
        raw = storage.read_file(FORMAT_FILE)
    except FileNotFoundError:
        return None
    try:
        found = _unsealed(raw) or sealed.decode(raw)
        version = sealed.field(found, "format", int)
        known = max(FORMAT, formats.number_of(level))
        if version > known:
            raise errors.NewerFormat(
                f"{storage.root} has format {version}, this pk knows {known}: use a newer pk",
                directory=storage.root,
            )
        return Format(
            version,
            sealed.field(found, "build", str),
            sealed.field(found, "cluster_id", str),
            sealed.field(found, "node_id", int),
            sealed.field(found, "directory_id", str),
        )
    except sealed.CorruptFile as damage:
        raise errors.CorruptLog(
            f"{storage.root}/{FORMAT_FILE} is damaged: {damage}. {_RESTORE}", directory=storage.root
        ) from damage


def _unsealed(raw: bytes) -> dict[str, Any] | None:
    """Read a file that another format wrote without a checksum; None = it is not such a file.

    A damaged file of this build is not taken for such a file: the damage would have to change the
    format and also the name of the checksum field.
    """
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or sealed.FIELD.encode() in raw:
        return None
    return found if found.get("format") != FORMAT else None


def format_directory(storage: Storage, wanted: Format) -> None:
    """Write pk.json (SYNCED).  Raises `CorruptLog` if the directory holds pk's data, and
    `DirectoryOfAnotherCluster` if it holds other files.
    """
    require_no_data(storage)
    others = [name for name in storage.list("") if name not in _HARMLESS]
    if others:
        raise errors.DirectoryOfAnotherCluster(
            f"{storage.root} is no pk directory and not empty (it holds {others[0]!r}): "
            "give another directory, and leave this one as it is",
            directory=storage.root,
        )
    storage.replace_file(FORMAT_FILE, sealed.encode(wanted._asdict()))


def raise_format(storage: Storage, level: int) -> None:
    """Raise the number in pk.json to that of `level`, SYNCED (rule Q6).  Other fields stay, those
    of other builds included.
    """
    known = sealed.decode(storage.read_file(FORMAT_FILE))
    if known["format"] < formats.number_of(level):
        storage.replace_file(
            FORMAT_FILE, sealed.encode({**known, "format": formats.number_of(level)})
        )


def require_no_data(storage: Storage) -> None:
    """Raise `CorruptLog` if a directory without pk.json has contents that only a formatted one
    has.
    """
    names = storage.list("")
    held = [name for name in names if name in _DATA]
    held += [root for root in _LOGS if root.partition("/")[0] in names and storage.list(root)]
    if held:
        raise errors.CorruptLog(
            f"{storage.root}/{FORMAT_FILE} is gone, and the directory holds pk's data "
            f"({held[0]}): it is not formatted again. {_RESTORE}",
            directory=storage.root,
        )


def check_format(
    storage: Storage, found: Format, *, cluster_id: str, node_id: int, build: str
) -> None:
    """Check that the directory belongs to this cluster and build.  Raises
    `DirectoryOfAnotherCluster` or `DirectoryOfAnotherBuild`.  `cluster_id` "" = any cluster.
    """
    if (cluster_id and found.cluster_id != cluster_id) or found.node_id != node_id:
        raise errors.DirectoryOfAnotherCluster(
            f"{storage.root} belongs to node {found.node_id} of cluster {found.cluster_id}, "
            f"not to node {node_id} of cluster {cluster_id or 'any'}",
            directory=storage.root,
        )
    if found.format < FORMAT:
        raise errors.DirectoryOfAnotherBuild(
            f"{storage.root} has format {found.format} of build {found.build}, this is {build}: "
            f"only the build that wrote a format before {FORMAT} reads it. Use that build, or give "
            "another, empty directory and leave this one",
            directory=storage.root,
        )


def read_run(storage: Storage) -> tuple[ProcessRun, bool]:
    """Return `(the previous process, whether it closed properly)`; a damaged file counts as an
    unclean shutdown.  Raises `NewerFormat`.
    """
    closed = _read_run(storage, CLEAN_FILE)
    return closed or _read_run(storage, RUN_FILE) or ProcessRun(), closed is not None


def _read_run(storage: Storage, name: str) -> ProcessRun | None:
    try:
        return decode_run(name, storage.read_file(name))
    except (FileNotFoundError, sealed.CorruptFile):
        return None


def encode_run(run: ProcessRun) -> bytes:
    """Encode the content of run.json or clean-shutdown.

    Builds that do not know the field `torn` find no boot id beside it, and take the end of this
    process for a power loss.
    """
    written: dict[str, Any] = {"version": RUN_VERSION, **run._asdict()}
    if run.torn:
        written |= {"boot_id": "", "boot_id_of_others": run.boot_id}
    else:
        del written["torn"]
    return sealed.encode(written)


def decode_run(name: str, raw: bytes) -> ProcessRun:
    """Decode the content of the file `name`.  Raises `CorruptFile`, and `NewerFormat` for a whole
    file of another version.
    """
    found = sealed.decode(raw)
    formats.require_version(name, sealed.field(found, "version", int), RUN_VERSION)
    epoch = sealed.field(found, "broker_epoch", int)
    if "torn" not in found:
        return ProcessRun(sealed.field(found, "boot_id", str), epoch)
    torn = sealed.field(found, "torn", list)
    try:
        keys = tuple(PartitionKey(topic_id, partition) for topic_id, partition in torn)
    except (TypeError, ValueError) as error:
        raise sealed.CorruptFile(f"the field 'torn' is {torn!r}") from error
    return ProcessRun(sealed.field(found, "boot_id_of_others", str), epoch, keys)


def read_last_run(storage: Storage) -> LastRun | None:
    """Read the clock checkpoint; None = it is missing or damaged.  Raises `NewerFormat`."""
    try:
        return last_run.decode(storage.read_file(last_run.FILE))
    except FileNotFoundError:
        return None


def note_run(storage: Storage, run: LastRun) -> None:
    """Write the clock checkpoint, SYNCED: the broker trusts its wall clock as of `run`."""
    storage.replace_file(last_run.FILE, last_run.encode(run))


def last_run_of(directories: Sequence[Directory]) -> LastRun | None:
    """Return the newest of the last runs in the directories, or None.

    They differ, because the previous process wrote its directories one after another.
    """
    return max((each.last_run for each in directories if each.last_run is not None), default=None)


def recovered_activity_ms(directories: Sequence[Directory], wall_ms: int) -> int:
    """Return the time that counts as the last activity of a producer read back from a log.

    It is not before the last run of the broker (L10).
    """
    before = last_run_of(directories)
    return wall_ms if before is None else max(wall_ms, before.wall_ms)


def _write_run(storage: Storage, run: ProcessRun) -> None:
    storage.replace_file(RUN_FILE, encode_run(run))


def _remove_mark(storage: Storage) -> None:
    storage.remove(CLEAN_FILE)
    storage.sync_dir("")


def mark_clean(storage: Storage, run: ProcessRun) -> None:
    storage.replace_file(CLEAN_FILE, encode_run(run))


def read_offsets(storage: Storage, name: str) -> Offsets:
    """Read a checkpoint of offsets.  Returns {} for a missing or torn file.

    {} is safe for each of these checkpoints: the broker scans every segment, and the log begins at
    its first segment.  Raises `NewerFormat` for a file of another version, because it may hold log
    starts that this start must keep.
    """
    try:
        lines = checkpoints.decode(name, storage.read_file(name))
        found = {}
        for line in lines:
            topic_id, partition, offset = line.split()
            found[PartitionKey(topic_id, int(partition))] = int(offset)
        return found
    except (FileNotFoundError, ValueError):
        return {}


def write_offsets(storage: Storage, name: str, offsets: Mapping[PartitionKey, int]) -> None:
    """Write a checkpoint of offsets, SYNCED."""
    lines = (f"{key.topic_id} {key.partition} {offset}" for key, offset in sorted(offsets.items()))
    storage.replace_file(name, checkpoints.encode(name, lines))


def give_up(
    storage: Storage, path: str, pending_delete: str, key: PartitionKey, *, ours: bool
) -> bool:
    """Rename the directory of `key` to `pending_delete`, SYNCED.  False if it is missing or belongs
    to another topic id by now: a job that was queued earlier may have created it.

    `ours`: the second copy says that a directory with a damaged or missing identity belongs to
    `key`.  Otherwise it is kept (rule L15).
    """
    known: Identity | None = None
    with contextlib.suppress(errors.LogUnidentified):
        known = identity.read(storage, path)
    if known is not None:
        ours = known.key == key
    if not ours or not storage.exists(path):
        return False
    storage.rename(path, pending_delete)
    storage.sync_dir(path.rpartition("/")[0])
    return True
