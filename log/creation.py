"""Creating partitions: many of them in one visit to the write lane of their directory.

A partition is a directory with an identity (partition.json, rule L8) and the first segment.  It
counts as created when a flush may promise its records (rule L1), that is when these are SYNCED:
the identity's bytes, the names in its directory, the name of the directory itself.  The segment is
not: it is empty, and the first flush syncs what is in it by then.

What syncs cost is waiting, not work: a file system commits all that wait together as one.  So a
visit makes the files of all its partitions first and then syncs the same level of all of them at
once; a thousand partitions cost a few dozen commits instead of some thousands.

Rules
  N1  the identity comes last, whole: it is written beside its place, SYNCED, then renamed.  A
      partition that has one is complete but for names that are not SYNCED yet, and `load` and the
      first flush see to those.
  N2  a directory without identity that holds no more than a first segment without a byte is an
      unfinished creation: the next start removes it, the next try goes on with it.  Segments whose
      identity is missing, damaged or another one's stay (rule L15): a partition of that name is not
      created beside them.
  N3  a partition that cannot be created does not stop the others of its visit (log/manager M4); a
      disk that fails stops them all (rule L2).
  N4  a visit is bounded: appends to other partitions of the directory wait until it is over.
  N5  a partition is created where something has its name: what could not be opened there, for want
      of space, say, or of a whole identity, must not begin anew elsewhere, without its records,
      nor once that directory has failed.
  N6  a log that a checkpoint names and that is not there is not begun empty: `LogMissing`, until
      its replica was given up (rule L15)
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
from pk.log.loading import Loaded
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.log.segment import IndexCache, Segment, base_offset_of, file_name
from pk.log.storage import File, Storage
from pk.types import NONE, Offset, PartitionKey, TopicPartition

#: N4: as many as callers ask for in one go.
VISIT_MAX = 64
_FIRST = file_name(0, ".log")


class NewPartition(NamedTuple):
    """One to be created."""

    tp: TopicPartition
    topic_id: str
    config: LogConfig
    again: bool = False  #: it could not be created, or opened, before; or nobody knew it
    genesis: str = ""  #: of the metadata log that knows it
    created: Offset = NONE  #: where that log is

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.topic_id, self.tp.partition)


Outcome = PartitionLog | errors.PkError


@dataclass(slots=True)
class Site:
    """Where a visit builds."""

    storage: Storage
    root: str  #: of the partition directories
    #: the name under which what is in the way is removed later
    pending_delete: Callable[[str], str]
    reopen: Callable[[str, NewPartition], PartitionLog]  #: one that is there already
    cache: IndexCache
    directory: Directory
    gone: Callable[[Identity], bool]  #: the metadata know that its log is of no use any more (L15)

    def identity(self, new: NewPartition) -> Identity:
        return Identity(new.topic_id, new.tp, self.directory.cluster_id, new.genesis, new.created)

    def path(self, new: NewPartition) -> str:
        return f"{self.root}/{new.tp}" if self.root else str(new.tp)


@dataclass(slots=True)
class _Begun:
    """A partition whose files are made."""

    new: NewPartition
    segment: Segment
    identity: File


async def homes(
    directories: Sequence[Directory],
    taken: Iterable[Directory],
    wanted: Mapping[str, NewPartition],
) -> list[Directory | errors.PkError]:
    """A directory for each of `wanted`, by path: where it stands (N5), else the one with the fewest
    partitions, then the most free space; or why there is none.  `taken`: the directory of each
    partition.  A directory that fails meanwhile is one that has failed (log/manager M4).  Raises
    `StorageFailed` when no other is left.
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
        if home is None:
            best = min((counts[id(each)], -free[at], at) for at, each in enumerate(usable))
            home = usable[best[2]]
        counts[id(home)] += 1
        chosen.append(home)
    return chosen


def _standing(storage: Storage, wanted: Mapping[str, NewPartition]) -> dict[str, bool]:
    """Whose name is here, and whether it is they for sure; an earlier life (rule L8) is another."""
    found = {}
    for path, new in wanted.items():
        if storage.exists(path):
            try:
                known = identity.read(storage, path)
            except (errors.LogUnidentified, errors.StorageFailed):
                known = None  # its creation will say so
            if known is None or known.topic_id == new.topic_id:
                found[path] = known is not None
    return found


def create(site: Site, wanted: Sequence[NewPartition]) -> dict[PartitionKey, Outcome]:
    """In the write lane: a log, or why there is none, for each of `wanted` (N3)."""
    storage = site.storage
    found: dict[PartitionKey, Outcome] = {}
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
    """Whether this very partition is there.  A deleted topic's directory of its name goes out of
    the way; any other raises `LogUnidentified` (rule L15).
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
    elif site.gone(known):  # the topic's earlier life (rule L8)
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
    """What opening it would find, without looking: nothing is to be repaired."""
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
    """Those of `wanted` that are to be made from nothing.  In the write lane."""
    missing = []
    for new in wanted:
        try:
            second = site.directory.identities.get(str(new.tp))
            known = identity.read_or_restore(site.storage, site.path(new), second)
        except (errors.LogUnidentified, errors.StorageFailed, errors.StorageFull):
            continue  # its creation will say so
        if known is None and not unfinished(site.storage, site.path(new)):
            continue  # the same
        if known is None or known.key != new.key:
            missing.append(new.key)
    return missing


def unfinished(storage: Storage, path: str) -> bool:
    """Whether a directory without identity is what a creation that died leaves (N2)."""
    return all(
        name.startswith(identity.PARTITION_FILE)
        or (name == _FIRST and not _size(storage, f"{path}/{name}"))
        for name in storage.list(path)
    )


def sweep(storage: Storage, path: str) -> None:
    """In the write lane: a directory without identity goes if its creation died (N2).

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
