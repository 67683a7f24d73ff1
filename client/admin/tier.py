"""Requests to each partition's leader to restore missing rows, or to accept their loss (rule
T17).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pk.client.network_client import NetworkClient
from pk.types import TopicPartition
from pk.wire import pk_pb2 as wire


@dataclass(slots=True, frozen=True)
class TierRows:
    """The result for a partition's missing rows."""

    rows: int  #: rows restored, or accepted as lost
    missing: int  #: still missing
    ranges: tuple[tuple[int, int], ...]  #: of the missing rows: offsets that no file contains
    version: int  #: of the table, after the call


async def tier_rows(
    cluster: NetworkClient, topic: str, accept: bool, timeout_ms: int
) -> dict[int, TierRows]:
    """Send one request per partition, repeated while its leader changes."""
    known = await cluster.topic(topic, timeout_ms)
    found: dict[int, TierRows] = {}

    async def attempt(one_ms: int) -> None:
        for partition in range(known.partitions):
            if partition in found:
                continue
            place = TopicPartition(topic, partition)
            key = cluster.metadata.key(place)
            leader = cluster.metadata.leader(key)
            if leader is None:
                cluster.want_metadata()
                raise cluster.metadata.leaderless(place)
            request = wire.TierRowsRequest(
                topic=topic, topic_id=key.topic_id, partition=partition, accept=accept
            )
            reply: Any = await cluster.call_node(leader.node, request, timeout_ms=one_ms)
            ranges = tuple((each.start, each.end) for each in reply.ranges)
            found[partition] = TierRows(reply.rows, reply.missing, ranges, reply.version)

    await cluster.retrying(attempt, timeout_ms)
    return found
