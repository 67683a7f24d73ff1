"""An operator's decisions about the directories of a stopped broker (rule L15): list the logs that
exist and that are missing, and `adopt` or `discard` one of them.

The caller holds the lock of the data directory.  Both decisions write a mark into the second copy
of the identities (identity.py) before anything else changes.  The next start of the broker reports
the replica as offline until it is in neither the ISR nor the ELR.  Only then does an adopted log
take part again, or an empty log begin in place of a discarded one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pk import errors
from pk.log import directory as files
from pk.log import dump, identity
from pk.log.directory import Format
from pk.log.identity import ADOPTED, DISCARDED, Identities, Identity, Known
from pk.log.segment import LOG, base_offset_of, file_name
from pk.log.storage import Storage
from pk.types import Offset, PartitionKey, TopicPartition

ROOT = "topics"
#: The suffix of a directory that the next start removes (log/manager M3).


class LogDirectory(NamedTuple):
    """A directory of a log, or a log whose directory is missing."""

    name: str
    status: str  #: one of the states below
    topic_id: str
    problem: str
    segments: int
    bytes: int


#: ok            its identity is intact
#: restorable    its identity is missing or damaged; the next start restores it
#: unidentified  its identity is lost: an operator must adopt or discard it
#: other         its identity names another partition or another cluster
#: ignored       its name is not <topic>-<number>: nothing opens or removes it (rule L22)
#: missing       a checkpoint names the log, and its directory is missing
#: newer         one of its files is of a newer pk: only that pk can open it (rule L21)
#: adopted       by an operator; the cluster has not confirmed it yet
#: discarded     by an operator; the cluster has not confirmed it yet
OK, RESTORABLE, UNIDENTIFIED = "ok", "restorable", "unidentified"
OTHER, MISSING, IGNORED, NEWER = "other", "missing", "ignored", "newer"


class Contents(NamedTuple):
    """What the segments of a directory hold."""

    segments: int
    bytes: int
    first_offset: Offset
    end_offset: Offset
    damaged: int  #: batches that do not match their checksum or cannot be read


def opened(storage: Storage) -> Format:
    """Read the format file of a data directory.  Raises `InvalidOption` if the directory is not
    formatted, and the errors of `check_format`.
    """
    found = files.read_format(storage)
    if found is None:
        raise errors.InvalidOption(
            f"{storage.root} is no data directory of pk (it has no {files.FORMAT_FILE})",
            directory=storage.root,
        )
    files.check_format(
        storage, found, cluster_id=found.cluster_id, node_id=found.node_id, build=found.build
    )
    return found


def survey(storage: Storage) -> Iterator[LogDirectory]:
    """Yield every directory of a log, then every log that is missing."""
    cluster_id, second = opened(storage).cluster_id, identity.read_all(storage)
    there = [name for name in storage.list(ROOT) if not identity.is_pending_delete(name)]
    for name in there:
        if identity.partition_of(name) is None:
            yield LogDirectory(name, IGNORED, "", "its name is not <topic>-<number>", 0, 0)
            continue
        status, topic_id, problem = _status(storage, name, cluster_id, second)
        sizes = [size for _, size in _segments(storage, name)]
        yield LogDirectory(name, status, topic_id, problem, len(sizes), sum(sizes))
    for name, known in sorted(second.items()):
        if name not in there:
            status = DISCARDED if known.state == DISCARDED else MISSING
            yield LogDirectory(name, status, known.identity.topic_id, "no such directory", 0, 0)


def _status(
    storage: Storage, name: str, cluster_id: str, second: Identities
) -> tuple[str, str, str]:
    known, problem = second.get(name), f"no {identity.PARTITION_FILE}"
    try:
        found = identity.read(storage, f"{ROOT}/{name}")
    except errors.LogUnidentified as damage:
        found, problem = None, damage.message
    if found is None:
        if known is None or known.state == DISCARDED:
            return UNIDENTIFIED, "", problem
        return RESTORABLE, known.identity.topic_id, problem
    if str(found.topic_partition) != name:
        return OTHER, found.topic_id, f"the identity of {found.topic_partition}"
    if found.cluster_id not in ("", cluster_id):
        return OTHER, found.topic_id, f"the identity of cluster {found.cluster_id}"
    if known is not None and known.identity.key == found.key and known.state == ADOPTED:
        return ADOPTED, found.topic_id, ""
    newer = _newer_file(storage, f"{ROOT}/{name}")
    return NEWER if newer else OK, found.topic_id, newer


def _newer_file(storage: Storage, path: str) -> str:
    """Return the error of the first file beside the segments that a newer pk wrote; "" = none."""
    for name in sorted(storage.list(path)):
        kind = dump.kind_of(name)
        if kind is None or kind == LOG:
            continue
        try:
            file = storage.open(f"{path}/{name}", write=False)
        except FileNotFoundError:  # a running broker has replaced or removed it
            continue
        try:
            for _ in dump.dump(kind, file.read, file.size()):
                pass
        except errors.NewerFormat as newer:
            return f"{name}: {newer.message}"
        finally:
            file.close()
    return ""


def extent(storage: Storage, name: str) -> Contents:
    """Return what the segments of a directory hold.  Reads every batch."""
    segments = _segments(storage, name)
    first = segments[0][0] if segments else 0
    end, damaged = first, 0
    for base, size in segments:
        file = storage.open(f"{ROOT}/{name}/{file_name(base, LOG)}", write=False)
        try:
            for batch in dump.dump_log(file.read, size, False):
                damaged += "corrupt" in batch
                last = batch.get("last_offset")
                end = max(end, base, end if last is None else int(last) + 1)
        finally:
            file.close()
    return Contents(len(segments), sum(size for _, size in segments), first, end, damaged)


def _segments(storage: Storage, name: str) -> list[tuple[Offset, int]]:
    """Return base offset and size of each segment."""
    found = []
    for each in storage.list(f"{ROOT}/{name}"):
        base = base_offset_of(each)
        if base is not None:
            file = storage.open(f"{ROOT}/{name}/{each}", write=False)
            found.append((base, file.size()))
            file.close()
    return sorted(found)


def to_adopt(storage: Storage, name: str, topic_id: str) -> Identity:
    """Return the identity that directory `name` is to get.  `topic_id` "" = the topic id in the
    second copy.

    Raises `InvalidOption`, and `InvalidRequest` if there is nothing to adopt.
    """
    cluster_id, second = opened(storage).cluster_id, identity.read_all(storage)
    tp = _partition_of(name)
    if not _segments(storage, name):
        raise errors.InvalidRequest(f"{storage.root}/{ROOT}/{name} holds no segments")
    status, known_id, _ = _status(storage, name, cluster_id, second)
    if status == OK and topic_id in ("", known_id):
        raise errors.InvalidRequest(f"{name} has its identity ({known_id}): nothing to adopt")
    topic_id = topic_id or ("" if status == OTHER else known_id)
    if not topic_id:
        raise errors.InvalidOption(
            f"the topic id of {name} is not known here: give its --topic-id "
            "(pk topics describe shows it)",
            option="--topic-id",
        )
    return Identity(topic_id, tp, cluster_id)


def adopt(storage: Storage, name: str, wanted: Identity) -> None:
    """Adopt directory `name` as the log of `wanted`, SYNCED."""
    _mark(storage, name, Known(wanted, ADOPTED))
    where = f"{ROOT}/{name}/{identity.PARTITION_FILE}"
    others = identity.other_fields(storage, f"{ROOT}/{name}")
    storage.replace_file(where, identity.encode(wanted, others))


def of_name(storage: Storage, name: str, topic_id: str) -> LogDirectory:
    """Return the log of that name.  `topic_id`: the topic id of a log that only checkpoints of
    offsets name.

    Raises `InvalidRequest` if there is neither such a directory nor a checkpoint that names it.
    """
    found = list(survey(storage))
    for each in found:
        if each.name == name:
            return each
    if topic_id:
        key = PartitionKey(topic_id, _partition_of(name).partition)
        if any(key in files.read_offsets(storage, each) for each in files.OFFSETS):
            return LogDirectory(name, MISSING, topic_id, "no such directory", 0, 0)
    told = ", ".join(each.name for each in found) or "none"
    raise errors.InvalidRequest(f"{storage.root} has no log {name!r}; known are: {told}")


def discard(storage: Storage, found: LogDirectory, new_id: str) -> str:
    """Give up the log `found`, SYNCED.  Returns the new name of its directory, which the next start
    removes; '' if there was no directory.
    """
    cluster_id, name = opened(storage).cluster_id, found.name
    if found.status == IGNORED:
        raise errors.InvalidRequest(
            f"{storage.root}/{ROOT}/{name} is no log of a partition ({found.problem}): the server "
            "leaves it alone; move it away by hand"
        )
    known = identity.read_all(storage).get(name)
    # a directory of another partition or cluster can be discarded without losing a log
    if found.status != OTHER:
        wanted = Identity(found.topic_id, _partition_of(name), cluster_id)
        mine = known.identity if known is not None else wanted
        _mark(storage, name, Known(mine, DISCARDED))
    if name not in storage.list(ROOT):
        return ""
    pending_delete = f"{name}.{new_id}{identity.DELETING}"
    storage.rename(f"{ROOT}/{name}", f"{ROOT}/{pending_delete}")
    storage.sync_dir(ROOT)
    return pending_delete


def _mark(storage: Storage, name: str, known: Known) -> None:
    identity.write_all(storage, identity.read_all(storage) | {name: known})


def _partition_of(name: str) -> TopicPartition:
    found = identity.partition_of(name)
    if found is None:
        raise errors.InvalidOption(
            f"{name!r} is no <topic>-<number>: give the directory the name of its partition first",
            option="NAME",
        )
    return found
