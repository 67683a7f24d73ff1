"""Look-ups of offsets by time or special value, at each partition's leader.

World-generic, and light to import: it loads neither Arrow nor the data path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

from pk import errors
from pk.client.network_client import NetworkClient
from pk.types import NONE, PartitionKey, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: The negative timestamps that the protocol uses for special offsets.
LATEST = -1
EARLIEST = -2
#: Offsets are 64 bits wide.
OFFSET_MAX = 2**63 - 1

ISOLATION = {"read_uncommitted": 0, "read_committed": 1}


async def lookup_offsets(
    cluster: NetworkClient,
    places: Iterable[TopicPartition],
    timestamps: Mapping[TopicPartition, int],
    isolation: int,
    timeout_ms: int,
) -> dict[TopicPartition, tuple[int, int]]:
    """Return `(offset, timestamp)` per partition, from the leaders; retries until all have
    answered.
    """
    clock = cluster.world.clock
    deadline = clock.monotonic_ms() + timeout_ms
    left = list(dict.fromkeys(places))
    found: dict[TopicPartition, tuple[int, int]] = {}
    await cluster.check_partitions(left, timeout_ms)

    async def attempt(one_ms: int) -> None:
        error: errors.PkError | None = None
        by_node: dict[int, list[TopicPartition]] = {}
        for place in left:
            leader = cluster.metadata.leader(cluster.metadata.key(place))
            if leader is None:
                cluster.want_metadata()
                error = cluster.metadata.leaderless(place)
            else:
                by_node.setdefault(leader.node, []).append(place)
        asks = [
            _ask_offsets(cluster, node, group, timestamps, isolation, one_ms, found)
            for node, group in by_node.items()
        ]
        # asked in parallel: a silent leader delays no other
        for failed in await asyncio.gather(*asks):
            error = failed or error
        left[:] = [place for place in left if place not in found]
        if left and error is None:
            error = errors.BrokerUnavailable(f"the leader did not answer for {left[0]}")
        if error is not None:
            if error.retriable:
                cluster.want_metadata()
            raise error

    await cluster.retrying(attempt, max(1, deadline - clock.monotonic_ms()))
    return found


async def _ask_offsets(
    cluster: NetworkClient,
    node: int,
    group: Sequence[TopicPartition],
    timestamps: Mapping[TopicPartition, int],
    isolation: int,
    timeout_ms: int,
    found: dict[TopicPartition, tuple[int, int]],
) -> errors.PkError | None:
    """Send one request to one leader.  Puts answers into `found`; returns the last error, or
    None.
    """
    request = wire.ListOffsetsRequest(isolation=isolation)
    places: dict[PartitionKey, TopicPartition] = {}
    for place in group:
        key = cluster.metadata.key(place)
        leader = cluster.metadata.leader(key)
        places[key] = place
        request.queries.add(
            topic_id=key.topic_id,
            partition=key.partition,
            current_leader_epoch=NONE if leader is None else leader.epoch,
            timestamp_ms=timestamps.get(place, LATEST),
        )
    try:
        reply = await cluster.call_node(node, request, timeout_ms=timeout_ms)
    except errors.PkError as cause:
        return cause
    assert isinstance(reply, wire.ListOffsetsReply)
    error: errors.PkError | None = None
    for answer in reply.answers:
        asked = places.get(PartitionKey(answer.topic_id, answer.partition))
        if asked is None:
            continue
        if answer.HasField("error"):
            error = frames.raise_error(answer.error)
        else:
            found[asked] = (answer.offset, answer.timestamp_ms)
    return error
