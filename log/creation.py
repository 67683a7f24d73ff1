"""Creates partitions: many of them in one visit to the write lane of their directory.

A partition is a directory with an identity (partition.json, rule L8) and the first segment.  It
counts as created when a flush may confirm its records (rule L1), that is, when the identity's
bytes, the names in its directory and the name of the directory itself are SYNCED.  The segment is
not SYNCED: it is empty, and the first flush syncs it.

A sync costs waiting and hardly any work: a file system commits all syncs that wait together at
once.  So a visit first makes the files of all its partitions and then syncs the same level of all
of them together.  A thousand partitions cost a few dozen commits instead of some thousands.

Rules
  N1  The identity is written last, whole: into a temporary file that is SYNCED and then renamed.  A
      partition that has an identity is complete, except that names may not be SYNCED yet; `load`
      and the first flush sync them.
  N2  A directory that has no identity and at most an empty first segment is an unfinished
      creation.  The next start removes it, and the next attempt to create the partition continues
      with it.  Segments whose identity is missing, damaged or another partition's are kept
      (rule L15), and a partition of that name is not created beside them.
  N3  A partition that cannot be created does not stop the others of its visit (log/manager M4).  A
      failed disk stops them all (rule L2).
  N4  The size of a visit is bounded, because appends to other partitions of the directory wait
      until it is over.
  N5  If a data directory already has an entry of the partition's name, the partition is created
      there.  The entry may be a log that could not be opened, for example because the disk is full.
      This log must not begin in another directory without its records, even after its own directory
      has failed.
  N6  A log that a checkpoint names and that is missing is not created as an empty log.
      `LogMissing` is raised until its replica was given up (rule L15).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from pk import errors
from pk.log import identity
from pk.log.directory import Directory
from pk.log.identity import Identity
from pk.log.index_cache import IndexCache
from pk.log.loading import Loaded
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.log.segment import Segment, base_offset_of, file_name
from pk.log.storage import File, Storage
from pk.types import NONE, Offset, PartitionKey, TopicPartition

#: N4: the most partitions of one visit; as many as callers ask for at once.
VISIT_MAX = 64
_FIRST = file_name(0, ".log")


class NewPartition(NamedTuple):
    """One partition to be created."""

    tp: TopicPartition
    topic_id: str
    config: LogConfig
    again: bool = False  #: an earlier attempt to create or open it failed, or it was a stray
    genesis: str = ""  #: the metadata log that knows the partition, and its term
    created: Offset = NONE  #: the offset that the metadata log had reached
    #: id of the directory that the metadata name for it; "" = any directory (rule R11)
    directory_id: str = ""

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.topic_id, self.tp.partition)


LogOrError = PartitionLog | errors.PkError


@dataclass(slots=True)
class Site:
    """The data directory in which a visit creates partitions."""

    storage: Storage
    root: str  #: path of the partition directories
    #: the name to which an obsolete directory is renamed, to be removed later
    pending_delete: Callable[[str], str]
    #: returns a partition that is there already
    reopen: Callable[[str, NewPartition], PartitionLog]
    cache: IndexCache
    directory: Directory
    #: whether the metadata say that its log is no longer needed (L15)
    gone: Callable[[Identity], bool]

    def identity(self, new: NewPartition) -> Identity:
        return Identity(new.topic_id, new.tp, self.directory.cluster_id, new.genesis, new.created)

    def path(self, new: NewPartition) -> str:
        return f"{self.root}/{new.tp}" if self.root else str(new.tp)


@dataclass(slots=True)
class _Begun:
    """A partition whose files are made and not yet SYNCED."""

    new: NewPartition
    segment: Segment
    identity: File


async def homes(
    directories: Sequence[Directory],
    taken: Iterable[Directory],
    wanted: Mapping[str, NewPartition],
) -> list[Directory | errors.PkError]:
    """Choose a directory for each of `wanted`, by path: the directory where the partition already
    stands (N5), else the directory in its record (rule R11), else the directory with the fewest
    partitions, then the most free space.  The value is an error if there is none.  `taken`: the
    directory of each partition.  A directory that fails meanwhile counts as failed (log/manager
    M4).  Raises `StorageFailed` if no other directory is left.
    """
    lost = [(each.disk.storage.root, each.failed) for each in directories if each.failed]
    if not lost and len(directories) == 1:
        return [*directories] * len(wanted)
    counts = Counter(map(id, taken))
    usable: list[Directory] = []
    free: list[int] = []
    standing: dict[str, Directory] = {}
    for each in [each for each in directories if each.failed is None]:
        disk = each.disk
        try:
            there = await disk.read(partial(_standing, disk.storage, wanted))
            standing |= {path: each for path, sure in there.items() if sure or path not in standing}
            free.append(await disk.read(disk.storage.free_bytes))
            usable.append(each)
        except errors.StorageFailed as failure:
            lost.append((disk.storage.root, failure))
    if not usable:
        raise errors.StorageFailed("every data directory of this broker has failed")
    chosen: list[Directory | errors.PkError] = []
    for path, new in wanted.items():
        home = standing.get(path)
        if home is None and new.again and lost:
            where, (root, why) = f"{new.tp} is in no directory that works", lost[0]
            told = f"{where}, so it is taken to be in {root}, which failed: {why}"
            chosen.append(errors.StorageFailed(told, directory=root))
            continue
        if home is None and new.directory_id:
            named = [each for each in usable if each.directory_id == new.directory_id]
            home = named[0] if named else None
        if home is None:
            best = min((counts[id(each)], -free[at], at) for at, each in enumerate(usable))
            home = usable[best[2]]
        counts[id(home)] += 1
        chosen.append(home)
    return chosen


def _standing(storage: Storage, wanted: Mapping[str, NewPartition]) -> dict[str, bool]:
    """Find the partitions of `wanted` whose name exists in this directory, and whether it certainly
    belongs to the same topic id; a directory of another topic id (rule L8) is another partition.
    """
    found = {}
    for path, new in wanted.items():
        if storage.exists(path):
            try:
                known = identity.read(storage, path)
            except (errors.LogUnidentified, errors.StorageFailed):
                known = None  # `create` will report the error
            if known is None or known.topic_id == new.topic_id:
                found[path] = known is not None
    return found


def create(site: Site, wanted: Sequence[NewPartition]) -> dict[PartitionKey, LogOrError]:
    """In the write lane: create the partitions `wanted`.  Returns for each a log, or the error that
    prevented it (N3).
    """
    storage = site.storage
    found: dict[PartitionKey, LogOrError] = {}
    begun: list[_Begun] = []
    for new in wanted:
        try:
            if _in_place(site, new):
                found[new.key] = site.reopen(site.path(new), new)
            else:
                begun.append(_begin(site, new))
        except errors.PkError as error:
            found[new.key] = error
    try:
        storage.sync_all([each.identity for each in begun])
        for each in begun:
            try:
                identity.name(storage, each.segment.directory)
                found[each.new.key] = _log_of(site, each)
            except errors.PkError as error:
                found[each.new.key] = error
        made = [outcome.path for outcome in found.values() if isinstance(outcome, PartitionLog)]
        storage.sync_all((), made)
        storage.sync_dir(site.root)
    except errors.PkError as failure:
        found |= {new.key: failure for new in wanted}
    finally:
        for each in begun:
            each.identity.close()
            if not isinstance(found.get(each.new.key), PartitionLog):
                each.segment.close()
    return found


def _in_place(site: Site, new: NewPartition) -> bool:
    """Whether exactly this partition is there already.  The directory of a deleted topic of the
    same name is renamed out of the way; any other directory raises `LogUnidentified` (rule L15).
    """
    storage, path = site.storage, site.path(new)
    if not storage.exists(path):
        return False
    wanted = site.identity(new)
    try:
        second = site.directory.identities.get(str(new.tp))
        known = identity.read_or_restore(storage, path, second)
    except errors.LogUnidentified as damage:
        raise identity.unidentified(storage, path, damage.message, wanted) from damage
    if known is None:
        if not unfinished(storage, path):
            why = f"no {identity.PARTITION_FILE}"
            raise identity.unidentified(storage, path, why, wanted)
    elif known.key == new.key:
        return True
    elif site.gone(known):  # a deleted topic of the same name (rule L8)
        storage.rename(path, site.pending_delete(path))
    else:
        other = f"{known.topic_partition} ({known.topic_id})"
        why = f"they are those of {other}, which these metadata never knew"
        raise identity.unidentified(storage, path, why, wanted)
    return False


def _begin(site: Site, new: NewPartition) -> _Begun:
    storage, path = site.storage, site.path(new)
    storage.make_dir(path)
    segment = Segment(storage, path, 0)
    segment.create()
    try:
        named = identity.begin(storage, path, site.identity(new))
    except BaseException:
        segment.close()
        raise
    return _Begun(new, segment, named)


def _log_of(site: Site, begun: _Begun) -> PartitionLog:
    """Return what opening the new log would find, without reading: nothing needs repair."""
    new, segment = begun.new, begun.segment
    return PartitionLog(
        site.storage,
        segment.directory,
        new.tp,
        new.topic_id,
        new.config,
        Loaded([segment]),
        log_start=0,
        synced_end=0,
        cache=site.cache,
    )


def not_here(site: Site, wanted: Sequence[NewPartition]) -> list[PartitionKey]:
    """In the write lane: return the partitions of `wanted` that have to be created from nothing."""
    missing = []
    for new in wanted:
        try:
            second = site.directory.identities.get(str(new.tp))
            known = identity.read_or_restore(site.storage, site.path(new), second)
        except (errors.LogUnidentified, errors.StorageFailed, errors.StorageFull):
            continue  # `create` will report the error
        if known is None and not unfinished(site.storage, site.path(new)):
            continue  # `create` will report this error, too
        if known is None or known.key != new.key:
            missing.append(new.key)
    return missing


def unfinished(storage: Storage, path: str) -> bool:
    """Whether a directory without identity is a creation that did not finish (N2)."""
    return all(
        name.startswith(identity.PARTITION_FILE)
        or (name == _FIRST and not _size(storage, f"{path}/{name}"))
        for name in storage.list(path)
    )


def sweep(storage: Storage, path: str) -> None:
    """In the write lane: remove a directory without identity if it is an unfinished creation (N2).

    Raises `LogUnidentified` for segments (rule L15).
    """
    if unfinished(storage, path):
        storage.remove_tree(path)
    elif any(base_offset_of(name) is not None for name in storage.list(path)):
        raise identity.unidentified(storage, path, f"no {identity.PARTITION_FILE}")


def _size(storage: Storage, path: str) -> int:
    file = storage.open(path, write=False)
    try:
        return file.size()
    finally:
        file.close()
