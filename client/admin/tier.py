"""The calls of `AdminClient` that concern the Delta table behind a topic.

`repair_tier` and `accept_tier` ask each partition's leader to restore missing rows, or to accept
their loss (rule T17).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pk import errors
from pk.client import arguments
from pk.client.admin import described
from pk.client.admin.connection import AdminConnection
from pk.client.admin.described import TierDescription
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


class TierCalls:
    """The calls that concern a topic's table; `AdminClient` documents their arguments."""

    def __init__(self, connection: AdminConnection) -> None:
        self._connection = connection

    def describe_tier(self, topic: str, timeout_s: float) -> TierDescription:
        """Return the table behind a topic."""
        name, cluster = arguments.topic(topic), self._connection.cluster
        return self._connection.retrying(
            lambda one_ms: described.describe_tier(cluster, name, one_ms), timeout_s
        )

    def repair_tier(self, topic: str, timeout_s: float) -> dict[int, TierRows]:
        """Restore rows that another engine deleted."""
        return self._tier_rows(topic, timeout_s, accept=False)

    def accept_tier(self, topic: str, timeout_s: float) -> dict[int, TierRows]:
        """Accept that another engine deleted rows."""
        return self._tier_rows(topic, timeout_s, accept=True)

    def retain_tier(self, topic: str, timeout_s: float) -> dict[int, int]:
        """Have each leader apply retention now."""
        name, cluster = arguments.topic(topic), self._connection.cluster
        found = self._connection.run(lambda ms: _ask_now(cluster, name, "retention", ms), timeout_s)
        return {partition: reply.log_start for partition, reply in found.items()}

    def vacuum_tier(self, topic: str, timeout_s: float) -> int:
        """Vacuum the table now."""
        name, cluster = arguments.topic(topic), self._connection.cluster
        found = self._connection.run(lambda ms: _ask_now(cluster, name, "vacuum", ms), timeout_s)
        if found[0].put_off:
            raise errors.TierUnavailable(
                f"the table of topic {name} was not vacuumed: the broker does not trust its clock "
                "(rule L10); `pk brokers list` shows why, `pk brokers confirm-clock` ends it"
            )
        return int(found[0].files)

    def _tier_rows(self, topic: str, timeout_s: float, *, accept: bool) -> dict[int, TierRows]:
        name, cluster = arguments.topic(topic), self._connection.cluster
        return self._connection.run(lambda ms: ask_leaders(cluster, name, accept, ms), timeout_s)


async def ask_leaders(
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


async def _ask_now(
    cluster: NetworkClient, topic: str, work: str, timeout_ms: int
) -> dict[int, wire.TierNowReply]:
    """Send a request to the leader of each partition; a vacuum only to that of partition 0."""
    known = await cluster.topic(topic, timeout_ms)
    found: dict[int, wire.TierNowReply] = {}

    async def attempt(one_ms: int) -> None:
        for partition in range(known.partitions if work == "retention" else 1):
            if partition in found:
                continue
            place = TopicPartition(topic, partition)
            key = cluster.metadata.key(place)
            leader = cluster.metadata.leader(key)
            if leader is None:
                cluster.want_metadata()
                raise cluster.metadata.leaderless(place)
            request = wire.TierNowRequest(
                topic=topic, topic_id=key.topic_id, partition=partition, work=work
            )
            reply: Any = await cluster.call_node(leader.node, request, timeout_ms=one_ms)
            found[partition] = reply

    await cluster.retrying(attempt, timeout_ms)
    return found
