"""The identity of a partition directory, and the second copy of all identities.

`partition.json` in the partition directory names the topic id, the topic and the partition
(rule L8), the cluster, and the metadata log and the offset in it at which the partition was
created.  A CRC-32C covers every byte.

The second copy is `partition-identity-checkpoint` at the root of the data directory: one line for
each log of the directory.  It lies outside of the partition directories, so it survives the loss of
one and still says that there was a log.  Many partitions that are created together cost one write
of it (log/creation.py).

A partition directory with segments is never discarded because its identity is missing, damaged or
unknown (rule L15).  The identity is restored from the second copy, or the partition is offline
until an operator adopts or discards the directory (`pk log adopt | discard`, log/adoption.py).

Invariants
  I1  The second copy names a log as soon as the log's directory is SYNCED, and before the first
      record of the log is acknowledged.  It names the log until the log is given up.  It has one
      topic id for each partition name.
  I2  An identity is restored only if its file is missing or fails its checksum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

from pk import errors, topic_names
from pk.log import checkpoints, sealed
from pk.log.storage import Disk, File, Storage
from pk.types import NONE, Offset, PartitionKey, TopicPartition

PARTITION_FILE = "partition.json"
IDENTITIES = "partition-identity-checkpoint"
#: States of a log in the second copy: it is served from here; an operator adopted its directory; an
#: operator discarded it.  The cluster has not confirmed the last two yet.
HERE, ADOPTED, DISCARDED = "here", "adopted", "discarded"
#: Suffix of a deleted log's directory, until its files are removed.
DELETING = "-delete"
_FIELDS: dict[str, type] = {
    "topic_id": str, "cluster_id": str, "genesis": str, "created": int, "topic": str,
    "partition": int,
}  # fmt: skip


class Identity(NamedTuple):
    """Which partition a log belongs to, and when it was created."""

    topic_id: str
    topic_partition: TopicPartition
    cluster_id: str = ""
    #: the metadata log that knew the partition, and its term: GENESIS@EPOCH (image.origin)
    genesis: str = ""
    created: Offset = NONE  #: the offset of the metadata log when the partition was created here

    @property
    def key(self) -> PartitionKey:
        return PartitionKey(self.topic_id, self.topic_partition.partition)


class Known(NamedTuple):
    """One line of the second copy."""

    identity: Identity
    state: str = HERE


#: By partition name (I1).
Identities = dict[str, Known]


def partition_of(name: str) -> TopicPartition | None:
    """Return the partition whose directory is called `name`; None if it is no `<topic>-<number>`
    (rule L22).
    """
    topic, _, number = name.rpartition("-")
    decimal = number.isascii() and number.isdecimal() and str(int(number)) == number
    if not decimal or topic_names.what_is_wrong(topic):
        return None
    return TopicPartition(topic, int(number))


def is_pending_delete(name: str) -> bool:
    """Whether `name` is that of a deleted log: `<topic>-<number>.<id>-delete`."""
    stem, _, unique = name.removesuffix(DELETING).rpartition(".")
    return name.endswith(DELETING) and bool(unique) and partition_of(stem) is not None


def encode(identity: Identity, others: Mapping[str, Any] | None = None) -> bytes:
    """Encode the content of partition.json (sealed.py); `others`: fields of other builds."""
    fields = identity._asdict()
    fields["topic"], fields["partition"] = fields.pop("topic_partition")
    return sealed.encode({**fields, **(others or {})})


def decode(raw: bytes, where: str) -> Identity:
    """Decode partition.json.  Fields that are not known are skipped.  Raises `LogUnidentified` for
    damage.
    """
    try:
        found = sealed.decode(raw)
        known = {name: sealed.field(found, name, kind) for name, kind in _FIELDS.items()}
    except sealed.CorruptFile as damage:
        raise errors.LogUnidentified(f"{where} is damaged: {damage}") from damage
    tp = TopicPartition(known.pop("topic"), known.pop("partition"))
    return Identity(topic_partition=tp, **known)


def other_fields(storage: Storage, path: str) -> dict[str, Any]:
    """Return the fields of partition.json that this build does not know: a rewritten file keeps
    them (rule L22).  {} if the file is missing or damaged.
    """
    with contextlib.suppress(FileNotFoundError, sealed.CorruptFile):
        found = sealed.decode(storage.read_file(f"{path}/{PARTITION_FILE}"))
        return {name: value for name, value in found.items() if name not in _FIELDS}
    return {}


def read(storage: Storage, path: str) -> Identity | None:
    """Read the identity of a partition directory; None = it has none.  Raises `LogUnidentified`."""
    try:
        raw = storage.read_file(f"{path}/{PARTITION_FILE}")
    except FileNotFoundError:
        return None
    return decode(raw, f"{storage.root}/{path}/{PARTITION_FILE}")


def read_or_restore(storage: Storage, path: str, second: Known | None) -> Identity | None:
    """In the write lane: read the identity.  If it is missing or damaged, restore it from `second`
    (I2).

    A directory that an operator discarded is not restored.
    """
    try:
        found = read(storage, path)
        if found is not None:
            return found
    except errors.LogUnidentified:
        if second is None:
            raise
    if second is None or second.state == DISCARDED or not storage.exists(path):
        return None
    storage.replace_file(f"{path}/{PARTITION_FILE}", encode(second.identity))
    return second.identity


async def identify(disk: Disk, path: str, second: Known | None) -> tuple[Identity | None, str]:
    """Return the identity of a directory, and why it was restored from `second`; '' = it was not
    (rule L15).  Raises `LogUnidentified`.
    """
    storage = disk.storage
    try:
        found = await disk.read(partial(read, storage, path))
        if found is not None or second is None:
            return found, ""
        why = "it was missing"
    except errors.LogUnidentified as damage:
        if second is None:
            raise unidentified(storage, path, damage.message) from damage
        why = damage.message
    found = await disk.write(partial(read_or_restore, storage, path, second))
    return found, why if found is not None else ""


def begin(storage: Storage, path: str, identity: Identity) -> File:
    """Write the identity to a temporary file.  Once the file is SYNCED, `name` renames it to its
    place.
    """
    file = storage.open(f"{path}/{PARTITION_FILE}.tmp", create=True)
    try:
        file.truncate(0)
        file.append([encode(identity)])
    except BaseException:
        file.close()
        raise
    return file


def name(storage: Storage, path: str) -> None:
    """Rename the temporary file to its place: WRITTEN; `sync_dir` makes the name durable."""
    storage.rename(f"{path}/{PARTITION_FILE}.tmp", f"{path}/{PARTITION_FILE}")


# -- the second copy -------------------------------------------------------------------------------


def lines_of(known: Iterable[Known]) -> list[str]:
    """Return the lines of the checkpoint; "-" stands for an empty field."""
    lines = []
    for each, state in known:
        topic, partition = each.topic_partition
        texts = [text or "-" for text in (each.topic_id, each.cluster_id, each.genesis)]
        lines.append(" ".join((*texts, f"{each.created} {partition} {topic} {state}")))
    return sorted(lines)


def parse(lines: Iterable[str]) -> Identities:
    """Parse the lines of the checkpoint.  Raises `ValueError` for an invalid line."""
    found: Identities = {}
    for line in lines:
        *texts, created, partition, topic, state = line.split(" ")
        topic_id, cluster_id, genesis = ("" if text == "-" else text for text in texts)
        tp = TopicPartition(topic, int(partition))
        found[str(tp)] = Known(Identity(topic_id, tp, cluster_id, genesis, int(created)), state)
    return found


def read_all(storage: Storage) -> Identities:
    """Read the second copy.  Missing or damaged = {}: `load` rebuilds it from the partition
    directories.  Raises `NewerFormat`.
    """
    try:
        return parse(checkpoints.decode(IDENTITIES, storage.read_file(IDENTITIES)))
    except (FileNotFoundError, ValueError):
        return {}


def write_all(storage: Storage, identities: Identities) -> None:
    """Write the second copy, SYNCED."""
    storage.replace_file(IDENTITIES, checkpoints.encode(IDENTITIES, lines_of(identities.values())))


# -- what the errors say ---------------------------------------------------------------------------


def unidentified(
    storage: Storage, path: str, why: str, wanted: Identity | None = None
) -> errors.LogUnidentified:
    """Return the error for a directory `path` whose segments have no valid identity.  `wanted`: the
    partition of this name.
    """
    name = path.rpartition("/")[2]
    adopt = f"pk log adopt {storage.root} {name}"
    if wanted is not None:
        adopt += f" --topic-id {wanted.topic_id}"
    return errors.LogUnidentified(
        f"{storage.root}/{path} holds data, but {why}: nothing is appended, renamed or removed "
        f"there. Stop the server, then take the data for the partition's ({adopt}) or give it up "
        f"(pk log discard {storage.root} {name})",
        directory=f"{storage.root}/{path}",
    )


def missing(storage: Storage, tp: TopicPartition, topic_id: str) -> errors.LogMissing:
    """Return the error for the log of `tp` that a checkpoint of `storage` names and that is
    missing.
    """
    return errors.LogMissing(
        f"the log of {tp} ({topic_id}) was in {storage.root} and is missing; its acknowledged "
        "offsets are not given again. Put its directory back and restart; or stop the server, run "
        f"pk log discard {storage.root} {tp} --topic-id {topic_id} and start: then the log begins "
        "empty here",
        directory=storage.root,
    )
