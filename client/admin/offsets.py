"""The calls of `AdminClient` that concern the offsets of partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pk.client import arguments
from pk.client.admin.connection import AdminConnection, only
from pk.client.network_client import NetworkClient
from pk.client.offsets import ISOLATION, OFFSET_MAX, lookup_offsets
from pk.types import TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: The words that `list_offsets` accepts; a number is a time in ms.
SPECIAL_OFFSETS = {
    "latest": -1, "earliest": -2, "max_timestamp": -3, "earliest_local": -4, "tiered_end": -5,
}  # fmt: skip


class OffsetCalls:
    """The calls that concern offsets; `AdminClient` documents their arguments."""

    def __init__(self, connection: AdminConnection) -> None:
        self._connection = connection

    def list_offsets(
        self,
        partitions: Mapping[TopicPartition, str | int],
        isolation_level: str,
        timeout_s: float,
    ) -> dict[TopicPartition, tuple[int, int]]:
        """Return `(offset, timestamp)` of each partition."""
        asked = arguments.by_place(partitions, "partitions", "offsets")
        wanted = {place: _time_of(spec, "partitions") for place, spec in asked.items()}
        isolation = arguments.choice(isolation_level, "isolation_level", ISOLATION)
        cluster = self._connection.cluster
        return self._connection.run(
            lambda ms: lookup_offsets(cluster, wanted, wanted, isolation, ms), timeout_s
        )

    def offsets(self, topic: str, spec: str | int, timeout_s: float) -> dict[TopicPartition, int]:
        """Return one offset of each partition of a topic."""
        topic, _ = arguments.topic(topic), _time_of(spec, "spec")
        deadline_s = self._connection.deadline_s(timeout_s)
        cluster = self._connection.cluster
        found = self._connection.run(lambda ms: cluster.topic(topic, ms), timeout_s)
        places = {TopicPartition(topic, p): spec for p in range(found.partitions)}
        left_s = self._connection.left_s(deadline_s)
        listed = self.list_offsets(places, "read_committed", left_s)
        return {place: at[0] for place, at in listed.items()}

    def delete_records(
        self, before: Mapping[TopicPartition, int], timeout_s: float
    ) -> dict[TopicPartition, int]:
        """Move the log start of each partition up."""
        asked = arguments.by_place(before, "before", "offsets")
        wanted = {
            place: arguments.whole(offset, "before", -OFFSET_MAX, OFFSET_MAX)
            for place, offset in asked.items()
        }
        cluster = self._connection.cluster
        return self._connection.run(lambda ms: _delete_records(cluster, wanted, ms), timeout_s)


async def _delete_records(
    cluster: NetworkClient, wanted: dict[TopicPartition, int], timeout_ms: int
) -> dict[TopicPartition, int]:
    """Ask the leader of each partition in turn, repeated while leaders change."""
    found: dict[TopicPartition, int] = {}
    clock = cluster.world.clock
    deadline = clock.monotonic_ms() + timeout_ms
    await cluster.check_partitions(wanted, timeout_ms)

    async def attempt(one_ms: int) -> None:
        for place, offset in wanted.items():
            if place in found:
                continue
            key = cluster.metadata.key(place)
            leader = cluster.metadata.leader(key)
            if leader is None:
                cluster.want_metadata()
                raise cluster.metadata.leaderless(place)
            request = wire.DeleteRecordsRequest()
            request.items.add(topic_id=key.topic_id, partition=key.partition, before_offset=offset)
            reply: Any = await cluster.call_node(leader.node, request, timeout_ms=one_ms)
            result = only(reply.results)
            if result.HasField("error"):
                cluster.want_metadata()
                raise frames.raise_error(result.error)
            if result.holds:
                groups = ", ".join(result.holds)
                cluster.warn(f"the deletion in {place} passed the retention holds of {groups}")
            found[place] = result.log_start

    await cluster.retrying(attempt, max(1, deadline - clock.monotonic_ms()))
    return found


def _time_of(spec: Any, argument: str) -> int:
    """Return the protocol's number for a word of SPECIAL_OFFSETS, or for a time."""
    if isinstance(spec, str):
        return arguments.choice(spec, f"{argument}: offset", SPECIAL_OFFSETS)
    name = f"{argument}: a time in ms, or one of {', '.join(SPECIAL_OFFSETS)},"
    return arguments.whole(spec, name, min(SPECIAL_OFFSETS.values()), OFFSET_MAX)
