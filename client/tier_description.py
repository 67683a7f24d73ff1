"""The Delta table behind a topic, as `AdminClient.describe_tier` returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pk import errors
from pk.wire import frames
from pk.wire import pk_pb2 as wire


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
class TierDescription:
    """The Delta table behind a topic."""

    topic: str
    topic_id: str
    uri: str
    version: int
    status: str
    partitions: tuple[TierPartition, ...]
    storage_options: Mapping[str, str]
    problem: errors.PkError | None = None


def tier_description_of(reply: wire.DescribeTierReply) -> TierDescription:
    """The reply in the client's words."""
    partitions = [
        TierPartition(
            p.partition,
            p.start,
            p.end,
            p.epoch,
            p.claim,
            p.rows,
            p.sum,
            p.removed,
            p.files,
            p.bytes,
            p.lag,
        )
        for p in reply.partitions
    ]
    return TierDescription(
        reply.topic, reply.topic_id, reply.uri, reply.version, reply.status,
        tuple(sorted(partitions, key=lambda p: p.partition)), dict(reply.storage_options),
        frames.raise_error(reply.problem) if reply.HasField("problem") else None,
    )  # fmt: skip
