"""Descriptions of partitions and tables, combined from the replies of all brokers.

World-generic.  A broker knows the state of the logs that it holds, but only the leader knows the
state of its partition.  Every broker is asked, and for each partition the leader's view is shown.
Leader and in-sync replicas come from the newest metadata of any broker.

Invariants
  D1  Every partition in the metadata is described once.  A partition without a leader's view has an
      error that names the cause, and the offsets of its longest replica.
  D2  A broker that does not answer delays the result by at most PATIENCE_MS, and at most a quarter
      of the call's time.  Only its own view is missing then.
  D3  No request here creates a topic.
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

#: How long the others are awaited once one broker has answered, and the largest share of the call's
#: time for this: a description asks twice, one after the other.
PATIENCE_MS = 3_000
PATIENCE_SHARE = 4

Views = dict[int, Any]  #: broker → its reply


@dataclass(slots=True, frozen=True)
class OpenTransaction:
    """A transaction that has no marker yet.  It holds back the last stable offset."""

    producer_id: int
    producer_epoch: int
    first_offset: int
    began_ms: int  #: when the leader appended its first batch, by that broker's clock


@dataclass(slots=True, frozen=True)
class PartitionDescription:
    """The state of a partition's log: log_start <= local_log_start, LSO <= HW <= log_end."""

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
    elr: tuple[int, ...] = ()  #: replicas that may lead without being in sync (KIP-966)
    offline_replicas: tuple[int, ...] = ()
    #: the open transaction that begins first; None = no transaction is open, or no leader answered
    oldest_transaction: OpenTransaction | None = None

    @property
    def bytes(self) -> int:
        """Return the bytes on the leader's local disk."""
        return self.local_bytes

    @property
    def under_replicated(self) -> bool:
        return len(self.isr) < len(self.replicas)


@dataclass(slots=True, frozen=True)
class TierPartition:
    """The part of a partition that the topic's table contains: offsets `[start, end)`."""

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
    forgotten: int = 0  #: one above the highest tombstone that compaction has removed


@dataclass(slots=True, frozen=True)
class DamagedRange:
    """A missing or damaged data file: offsets `[start, end)` cannot be read."""

    partition: int
    start: int
    end: int
    path: str  #: relative to the table's directory
    problem: errors.PkError


@dataclass(slots=True, frozen=True)
class MissingRows:
    """Rows that another engine removed from the table; no file contains the offsets of `ranges`."""

    partition: int
    rows: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(slots=True, frozen=True)
class TierDescription:
    """The Delta table behind a topic.

    `damaged`: files that readers found damaged since the tier processes of the leaders started.
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
    """Return the reply of every broker that gives one (D2).  Raises one broker's error if none
    does.
    """
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
            # A broker that lacks the topic may only be behind.
            error = cause
    if not views:
        raise error
    return views


async def _newest(cluster: NetworkClient, topic_ids: Sequence[str], timeout_ms: int) -> Any:
    """Return the newest metadata of any broker; of all topics if none is named (D3)."""
    request = wire.MetadataRequest(topic_ids=topic_ids)
    views = await everyone(cluster, request, timeout_ms)
    return max(views.values(), key=lambda reply: reply.metadata_offset)


# -- partitions ------------------------------------------------------------------------------------


async def describe_partitions(
    cluster: NetworkClient, names: Sequence[str] | None, timeout_ms: int
) -> list[PartitionDescription]:
    """Return every partition of these topics (None = all), by topic and partition.

    Raises `UnknownTopicOrPartition` for a topic that does not exist.
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
        tuple(info.elr), tuple(info.offline_replicas), oldest_transaction(view),
    )  # fmt: skip


def oldest_transaction(view: Any) -> OpenTransaction | None:
    """Return the open transaction of a leader's `PartitionState` that begins first."""
    if not view.HasField("oldest_transaction"):
        return None
    told = view.oldest_transaction
    return OpenTransaction(
        told.producer_id, told.producer_epoch, told.transaction_start, told.transaction_began_ms
    )


def _best(info: Any, views: Mapping[int, Any]) -> tuple[Any, errors.PkError | None]:
    """Return the view of a partition to show, and its error (D1)."""
    problems = {
        node: frames.raise_error(view.error)
        for node, view in views.items()
        if view.HasField("error")
    }
    if info.leader in views:
        return views[info.leader], problems.get(info.leader)
    longest = max(views.values(), key=lambda view: view.log_end, default=wire.PartitionState())
    if problems:  # the cause of the missing leader
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
    """Describe the table behind a topic: the newest version that any broker knows, and each
    partition's part as its leader sees it.
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
        p.lag, p.forgotten,
    )  # fmt: skip


def unique(names: Iterable[str] | str) -> list[str]:
    """Return the topic names without duplicates, in order."""
    return list(dict.fromkeys([names] if isinstance(names, str) else names))
