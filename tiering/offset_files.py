"""The copies of committed offsets in the tier: names and bytes (rule T13).

A copy is one object with the committed offsets of all groups of one partition of
`__consumer_offsets`:

    _cluster/<cluster id>/<restore generation>/offsets/<partition>/<leader epoch>-<end>.offsets

Names order: of two copies, the one of the later leader epoch counts, then the one with the higher
end.  `end` is a high watermark of the partition: the copy has everything below it.

The bytes are lines of text, which people can read: a head, and for each group a line, for each of
its topics a line, and for each partition a line.

    pk committed-offsets 0
    {"cluster_id": "c", "partition": 3, "leader_epoch": 5, "end": 70, "written_ms": …, "offsets": 1}
    {"group": "g", "kind": "consumer"}
    {"topic": "flights", "topic_id": "…"}
    [0, 42, 3, "metadata", 1700000000000]
    crc32c 1a2b3c4d

The last four numbers of a partition are offset, leader epoch of the record before it (-1 = not
known), metadata, and the time of the commit.  The line of a query's group (S1) has `run` and
`holds_retention`.  A topic without a name was unknown to the coordinator's metadata.

Invariants
  F1  Title, version and checksum are at the same place in every version (rule L21).
  F2  Equal offsets have equal lines below the head, however many pages they came in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from crc32c import crc32c

from pk import errors, formats, limits
from pk.log import checkpoints
from pk.tiering.cluster_directory import FIRST_GENERATION, directory_of
from pk.types import Epoch, Offset, PartitionKey, TopicId
from pk.wire import pk_pb2 as wire

VERSION = 0
TITLE = "committed-offsets"
#: The largest copy, about 500,000 offsets.
COPY_BYTES_MAX = 64 * limits.MIB

_NAME = re.compile(r"^(?P<partition>\d{5})/(?P<epoch>\d{10})-(?P<end>\d{20})\.offsets$")
QUERY, CONSUMER = "query", "consumer"


class CopyName(NamedTuple):
    """What orders the copies of one partition."""

    leader_epoch: Epoch
    end: Offset


class StoredOffset(NamedTuple):
    """A committed offset in a copy; the fields are those of the commit."""

    offset: Offset
    leader_epoch: Epoch
    metadata: str
    committed_ms: int


@dataclass(slots=True)
class StoredGroup:
    """A group in a copy, with the offsets that it had committed."""

    group_id: str
    query_run: str = ""  #: the run of a streaming query; "" = consumers use the group
    holds_retention: bool = False
    topics: dict[TopicId, str] = field(default_factory=dict)  #: names; "" = not known
    offsets: dict[PartitionKey, StoredOffset] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Who uses the group: "query" or "consumer"."""
        return QUERY if self.query_run else CONSUMER


class OffsetsCopy(NamedTuple):
    """A copy that was read back."""

    path: str
    cluster_id: str
    partition: int
    name: CopyName
    written_ms: int  #: wall clock of the tier process that wrote it
    groups: dict[str, StoredGroup]


def directory(cluster_id: str, generation: int = FIRST_GENERATION) -> str:
    """Return the directory of a cluster's copies below the tier's root."""
    return f"{directory_of(cluster_id, generation)}/offsets"


def copy_path(cluster_id: str, partition: int, name: CopyName) -> str:
    """Return the path of a copy below the tier's root."""
    epoch, end = name
    return f"{directory(cluster_id)}/{partition:05d}/{epoch:010d}-{end:020d}.offsets"


def parse_path(path: str) -> tuple[int, CopyName] | None:
    """Return partition and name of the copy at `path`; None = the object is no copy."""
    match = _NAME.match("/".join(path.rsplit("/", 2)[-2:]))
    if match is None:
        return None
    return int(match["partition"]), CopyName(int(match["epoch"]), int(match["end"]))


class CopyLines:
    """The lines of a copy, from the pages of the coordinator."""

    def __init__(self) -> None:
        self.offsets = 0
        self.size = 0  #: bytes
        self.digest = 0  #: of the lines
        self._lines: list[str] = []
        self._group = ""
        self._topic = ""

    def add(self, groups: Iterable[wire.StoredGroup]) -> None:
        """Add the groups of one page; the first one may go on from the page before (F2)."""
        for group in groups:
            if group.group_id != self._group:
                self._group, self._topic = group.group_id, ""
                self._add(_group_line(group))
            for topic in group.topics:
                if topic.topic_id != self._topic:
                    self._topic = topic.topic_id
                    self._add({"topic": topic.topic, "topic_id": topic.topic_id})
                for row in _rows(topic):
                    self._add(row)
                    self.offsets += 1

    def _add(self, line: Any) -> None:
        text = json.dumps(line)
        self._lines.append(text)
        self.size += len(text) + 1
        self.digest = crc32c(text.encode(), self.digest)

    def encode(self, cluster_id: str, partition: int, name: CopyName, written_ms: int) -> bytes:
        """Return the bytes of the copy."""
        head = {
            "cluster_id": cluster_id,
            "partition": partition,
            "leader_epoch": name.leader_epoch,
            "end": name.end,
            "written_ms": written_ms,
            "offsets": self.offsets,
        }
        return checkpoints.encode(TITLE, (json.dumps(head), *self._lines), VERSION)


def _group_line(group: wire.StoredGroup) -> dict[str, Any]:
    if not group.query_run:
        return {"group": group.group_id, "kind": CONSUMER}
    return {
        "group": group.group_id,
        "kind": QUERY,
        "run": group.query_run,
        "holds_retention": group.holds_retention,
    }


def _rows(topic: wire.StoredTopic) -> Iterator[tuple[int, int, int, str, int]]:
    return zip(
        topic.partitions,
        topic.offsets,
        topic.leader_epochs,
        topic.metadata,
        topic.committed_ms,
        strict=True,
    )


def decode(path: str, raw: bytes) -> OffsetsCopy:
    """Return the copy at `path`.

    Raises `DamagedTierFile` if its bytes have changed, and `NewerFormat` if a newer build wrote it.
    Both name the path.
    """
    try:
        with formats.named(path):
            head, *lines = map(json.loads, checkpoints.decode(TITLE, raw, VERSION))
        name = CopyName(head["leader_epoch"], head["end"])
        found = OffsetsCopy(
            path, head["cluster_id"], head["partition"], name, head["written_ms"], {}
        )
        _read_groups(found.groups, lines)
        offsets = sum(len(group.offsets) for group in found.groups.values())
        if (found.partition, name) != parse_path(path) or offsets != head["offsets"]:
            raise ValueError("its head does not match")
    except (ValueError, KeyError, TypeError) as cause:
        raise errors.DamagedTierFile(
            f"{path}: the copy of committed offsets is damaged: {cause}", path=path
        ) from cause
    return found


def _read_groups(groups: dict[str, StoredGroup], lines: Iterable[Any]) -> None:
    group, topic_id = StoredGroup(""), ""
    for line in lines:
        if isinstance(line, list):
            partition, *rest = line
            group.offsets[PartitionKey(topic_id, partition)] = StoredOffset(*rest)
        elif "group" in line:
            group = StoredGroup(
                line["group"], line.get("run", ""), line.get("holds_retention", False)
            )
            groups[group.group_id] = group
        else:
            topic_id = line["topic_id"]
            group.topics[topic_id] = line["topic"]
