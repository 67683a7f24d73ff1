"""Finds the coordinator of a transactional id or of a group.

World-generic.  The coordinator is the leader of one partition of `__transaction_state`, or of
`__consumer_offsets`.  Every broker answers from its metadata image.  The image may be older than
the last election; then the broker that the reply names answers NotCoordinator, and the client asks
again.
"""

from __future__ import annotations

from google.protobuf.message import Message

from pk import errors, group_ids, limits, transactional_ids
from pk.server.broker.internal_topics import InternalTopics
from pk.server.metadata.cache import MetadataCache
from pk.types import NONE
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: `key_type` of FindCoordinatorRequest.
GROUP, TRANSACTION = 0, 1
FIND_TIMEOUT_MS = 30_000


class CoordinatorRequests:
    """Answers find_coordinator."""

    def __init__(self, metadata: MetadataCache, topics: InternalTopics) -> None:
        self._metadata = metadata
        self._topics = topics

    async def find(self, request: wire.FindCoordinatorRequest, frame: frames.Frame) -> Message:
        """Return the coordinator of a key.  The first request creates the internal topic.

        Raises `CoordinatorUnavailable` while the partition has no leader, `InvalidRequest`.
        """
        check_key(request)
        if request.key_type == GROUP:
            name, number = group_ids.TOPIC, group_ids.partition_of_group(request.key)
        else:
            name, number = transactional_ids.TOPIC, transactional_ids.partition_of_id(request.key)
        topic = await self._topics.find(name, frame.head.timeout_ms or FIND_TIMEOUT_MS)
        state = topic.partitions.get(number)
        leader = NONE if state is None else state.leader
        broker = self._metadata.image.brokers.get(leader)
        if broker is None:
            raise errors.CoordinatorUnavailable(f"{name}-{number} has no leader now")
        return wire.FindCoordinatorReply(node_id=leader, address=broker.address, partition=number)


def check_key(request: wire.FindCoordinatorRequest) -> None:
    """Raise if the request has no valid key."""
    names = {
        GROUP: ("a group id", limits.GROUP_ID_BYTES_MAX),
        TRANSACTION: ("a transactional id", limits.TRANSACTIONAL_ID_BYTES_MAX),
    }
    if request.key_type not in names:
        raise errors.InvalidRequest(
            f"key type {request.key_type}: 0 is a group id, 1 a transactional id"
        )
    what, most = names[request.key_type]
    size = len(request.key.encode())
    if not 0 < size <= most:
        raise errors.InvalidRequest(f"{what} has 1 to {most} bytes of UTF-8, not {size}")
