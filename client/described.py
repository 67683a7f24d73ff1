"""What a cluster says of its partitions and tables, joined from all of its brokers.

World-generic.  A broker knows how far the logs are that it holds, and a leader alone knows how far
its partition is: every broker is asked, and of each partition the leader's view is shown.  Who
leads and who is in sync is taken from the newest metadata that any of them has.

Invariants
  D1  every partition that the metadata name is described once; one without a leader's view has an
      error that says what it waits for, and the offsets of its longest replica.
  D2  a broker that does not answer keeps the others' answers waiting for PATIENCE_MS and a quarter
      of the call's time at most, and costs nothing but its own view.
  D3  nothing asked here creates a topic.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from pk import errors
from pk.client.network_client import NetworkClient
from pk.tasks import TaskRegistry, awaited
from pk.types import NONE
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: How long a broker is waited for once another one has answered, and at most this share of the
#: call's own time: a description asks twice, one after the other.
PATIENCE_MS = 3_000
PATIENCE_SHARE = 4

Views = dict[int, Any]  #: broker → its reply


@dataclass(slots=True, frozen=True)
class PartitionDescription:
    """Where the log of a partition stands: log_start <= local_log_start, LSO <= HW <= log_end."""

    topic: str
    topic_id: str
    partition: int
    leader: int  #: -1 = none
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    log_start: int
    local_log_start: int
    tiered_end: int
    last_stable_offset: int
    high_watermark: int
    log_end: int
    local_bytes: int
    tier_bytes: int
    segments: int
    directory: str
    error: errors.PkError | None = None
    elr: tuple[int, ...] = ()  #: eligible to lead without being in sync (KIP-966)
    offline_replicas: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes on the leader's local disk."""
        return self.local_bytes

    @property
    def under_replicated(self) -> bool:
        return len(self.isr) < len(self.replicas)


@dataclass(slots=True, frozen=True)
class TierPartition:
    """What the topic's table holds of a partition: offsets `[start, end)`."""

    partition: int
    start: int
    end: int
    epoch: int
    claim: int
    rows: int
    sum: int
    removed: int
    files: int
    bytes: int
    lag: int


@dataclass(slots=True, frozen=True)
class DamagedRange:
    """A data file that is missing or damaged: offsets `[start, end)` cannot be read."""

    partition: int
    start: int
    end: int
    path: str  #: relative to the table
    problem: errors.PkError


@dataclass(slots=True, frozen=True)
class MissingRows:
    """Rows that another engine took out of the table; offsets of `ranges` are in no file."""

    partition: int
    rows: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(slots=True, frozen=True)
class TierDescription:
    """The Delta table behind a topic.

    `damaged`: what reads have found since the tier processes of the leaders started.
    """

    topic: str
    topic_id: str
    uri: str
    version: int
    status: str
    partitions: tuple[TierPartition, ...]
    storage_options: Mapping[str, str]
    problem: errors.PkError | None = None
    damaged: tuple[DamagedRange, ...] = ()
    rows_missing: tuple[MissingRows, ...] = ()


# -- asking ----------------------------------------------------------------------------------------


async def everyone(cluster: NetworkClient, request: Message, timeout_ms: int) -> Views:
    """The reply of every broker that gives one (D2).  Raises the error of one if none does."""
    tasks = TaskRegistry(awaited)
    asked = {
        node: tasks.spawn(cluster.call_node(node, request, timeout_ms=timeout_ms))
        for node in sorted(await cluster.brokers(timeout_ms))
    }
    if not asked:
        raise errors.BrokerUnavailable("the cluster has no broker that is in service")
    try:
        left = list(asked.values())
        await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        patience_ms = min(PATIENCE_MS, timeout_ms / PATIENCE_SHARE)
        await asyncio.wait(left, timeout=patience_ms / 1000)
    finally:
        await tasks.close()
    views: Views = {}
    error: errors.PkError = errors.RequestTimedOut("no broker answered")
    for node, task in asked.items():
        if task.cancelled():
            continue
        try:
            views[node] = task.result()
        except errors.PkError as cause:
            # That a topic is not there is the answer of one that may only be behind.
            error = cause
    if not views:
        raise error
    return views


async def _newest(cluster: NetworkClient, topic_ids: Sequence[str], timeout_ms: int) -> Any:
    """The newest metadata that a broker has; of all topics if none is named (D3)."""
    request = wire.MetadataRequest(topic_ids=topic_ids)
    views = await everyone(cluster, request, timeout_ms)
    return max(views.values(), key=lambda reply: reply.metadata_offset)


# -- partitions ------------------------------------------------------------------------------------


async def describe_partitions(
    cluster: NetworkClient, names: Sequence[str] | None, timeout_ms: int
) -> list[PartitionDescription]:
    """Every partition of these topics (None = all), by topic and partition.

    Raises `UnknownTopicOrPartition` for a name that no topic has.
    """
    views = await everyone(cluster, wire.DescribePartitionsRequest(topics=names), timeout_ms)
    ids = {view.topic_id: view.topic for reply in views.values() for view in reply.partitions}
    found = set(ids.values())
    complete = names is not None and found.issuperset(names)
    metadata = await _newest(cluster, sorted(ids) if complete else (), timeout_ms)
    by_place: dict[tuple[str, int], dict[int, Any]] = {}
    for node, reply in views.items():
        for view in reply.partitions:
            by_place.setdefault((view.topic_id, view.partition), {})[node] = view
    described = [
        _described(topic, info, by_place.get((topic.topic_id, info.partition), {}))
        for topic in metadata.topics
        if not topic.HasField("error") and (names is None or topic.name in names)
        for info in topic.partitions
    ]
    for name in names or ():
        if all(each.topic != name for each in described):
            raise errors.UnknownTopicOrPartition(f"topic {name!r} does not exist")
    return sorted(described, key=lambda each: (each.topic, each.partition))


def _described(topic: Any, info: Any, views: Mapping[int, Any]) -> PartitionDescription:
    view, error = _best(info, views)
    return PartitionDescription(
        topic.name, topic.topic_id, info.partition, info.leader, info.leader_epoch,
        tuple(info.replicas), tuple(info.isr), view.log_start, view.local_log_start,
        view.tiered_end, view.last_stable_offset, view.high_watermark, view.log_end,
        view.local_bytes, view.tier_bytes, view.segments, view.directory, error,
        tuple(info.elr), tuple(info.offline_replicas),
    )  # fmt: skip


def _best(info: Any, views: Mapping[int, Any]) -> tuple[Any, errors.PkError | None]:
    """The view to show and what is wrong (D1)."""
    problems = {
        node: frames.raise_error(view.error)
        for node, view in views.items()
        if view.HasField("error")
    }
    if info.leader in views:
        return views[info.leader], problems.get(info.leader)
    longest = max(views.values(), key=lambda view: view.log_end, default=wire.PartitionState())
    if problems:  # the cause; that nobody leads follows from it
        return longest, next(iter(problems.values()))
    if info.leader != NONE:
        return longest, errors.BrokerUnavailable(f"broker {info.leader}, its leader, is silent")
    absent = list(info.isr) or list(info.elr) or list(info.last_known) or list(info.replicas)
    names = ", ".join(map(str, absent))
    return longest, errors.NotLeaderOrFollower(
        f"no leader: it waits for one of the brokers {names}", waits_for=names
    )


# -- tables ----------------------------------------------------------------------------------------


async def describe_tier(cluster: NetworkClient, topic: str, timeout_ms: int) -> TierDescription:
    """The table behind a topic and what it holds: the newest version that anybody knows, each
    partition's share as its leader sees it.
    """
    views = await everyone(cluster, wire.DescribeTierRequest(topic=topic), timeout_ms)
    newest = max(views.values(), key=lambda reply: (reply.version, bool(reply.uri)))
    metadata = await _newest(cluster, [newest.topic_id], timeout_ms)
    leaders = {p.partition: p.leader for t in metadata.topics for p in t.partitions}
    shares: dict[int, Any] = {}
    damaged: dict[tuple[int, int, str], DamagedRange] = {}
    missing: dict[int, MissingRows] = {}
    for node, reply in sorted(views.items()):
        for each in reply.damaged:
            if leaders.get(each.partition, NONE) in (node, NONE):
                damaged[each.partition, each.start, each.path] = DamagedRange(
                    each.partition, each.start, each.end, each.path,
                    frames.raise_error(each.problem),
                )  # fmt: skip
        for lacking in reply.rows_missing:
            if leaders.get(lacking.partition, NONE) in (node, NONE):
                ranges = tuple((each.start, each.end) for each in lacking.ranges)
                missing[lacking.partition] = MissingRows(lacking.partition, lacking.rows, ranges)
        for share in reply.partitions:
            mine = leaders.get(share.partition) == node
            if mine or share.partition not in shares:
                shares[share.partition] = share
    leading = [views[node] for node in dict.fromkeys(leaders.values()) if node in views]
    problems = [reply.problem for reply in leading if reply.HasField("problem")]
    status = newest.status
    if problems and not newest.HasField("problem"):
        status = next(reply.status for reply in leading if reply.HasField("problem"))
    elif missing and not problems:
        status = "rows_missing"
    return TierDescription(
        newest.topic, newest.topic_id, newest.uri, newest.version, status,
        tuple(_share(shares[p]) for p in sorted(shares)), dict(newest.storage_options),
        frames.raise_error(problems[0]) if problems else None,
        tuple(damaged[key] for key in sorted(damaged)),
        tuple(missing[key] for key in sorted(missing)),
    )  # fmt: skip


def _share(p: Any) -> TierPartition:
    return TierPartition(
        p.partition, p.start, p.end, p.epoch, p.claim, p.rows, p.sum, p.removed, p.files, p.bytes,
        p.lag,
    )  # fmt: skip


def unique(names: Iterable[str] | str) -> list[str]:
    """Topic names as given by a caller, each once."""
    return list(dict.fromkeys([names] if isinstance(names, str) else names))
