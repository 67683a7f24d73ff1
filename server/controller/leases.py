"""Leases of maintenance jobs: one job at a time may rewrite the files of a table (rule C5).

The grant is a record: holder, fencing token and TTL.  The token is the offset of the record, so it
grows with every grant.  Renewals are soft state of the active controller, as the sessions of
brokers are.  A new active controller has heard nothing yet, so a lease then lives one more TTL.

Invariants
  N1  A lease is granted to another holder only after the lease before it was released, or was not
      renewed for its TTL.
  N2  The token of a later grant is higher, also after a release and after a failover.
"""

from __future__ import annotations

from pk import errors
from pk.server.controller.commands import (
    AcquireLease,
    Out,
    ReleaseLease,
    RenewLease,
    Rules,
    decision,
)
from pk.server.metadata.image import LEASE_RESOURCE, MetadataImage
from pk.server.metadata.leases import EXCLUSIVE, Lease, lease_of, leases_of, lost
from pk.types import TopicId
from pk.wire import pk_pb2 as wire

TTL_MIN_MS, TTL_MAX_MS = 1_000, 3_600_000
HOLDER_MAX = 200  #: characters


def acquire_lease(image: MetadataImage, _rules: Rules, command: AcquireLease) -> Out:
    """Grant the lease of a table.  The holder of a lease gets the same lease again.

    Raises `LeaseHeld` while another holder has it (N1).
    """
    request = command.request
    if request.kind != EXCLUSIVE:
        raise errors.InvalidRequest(f"{request.kind[:40]!r} is no kind of lease: use {EXCLUSIVE!r}")
    if not 0 < len(request.holder) <= HOLDER_MAX:
        raise errors.InvalidRequest(f"the holder of a lease has 1 to {HOLDER_MAX} characters")
    if not TTL_MIN_MS <= request.ttl_ms <= TTL_MAX_MS:
        raise errors.InvalidRequest(
            f"the TTL of a lease is {TTL_MIN_MS} to {TTL_MAX_MS} ms, not {request.ttl_ms}"
        )
    topic = image.topic(request.topic)
    if topic is None:
        raise errors.UnknownTopicOrPartition(f"topic {request.topic[:300]!r} does not exist")
    held = lease_of(image, topic.topic_id)
    if held is not None and held.holder == request.holder:
        return decision(_granted(topic.topic_id, held, image.offset))
    if held is not None and topic.topic_id in command.renewed:
        raise errors.LeaseHeld(
            f"the maintenance job {held.holder} holds the lease of {topic.name}: run this job when "
            f"it has ended; the lease of a job that died ends after {held.ttl_ms} ms",
            holder=held.holder,
        )
    lease = Lease(image.offset + 1, request.holder, request.ttl_ms)
    record = wire.ConfigRecord(
        resource_type=LEASE_RESOURCE,
        resource_name=topic.topic_id,
        name=EXCLUSIVE,
        value=lease.text(),
    )
    return decision(_granted(topic.topic_id, lease, image.offset + 1), [record])


def _granted(topic_id: TopicId, lease: Lease, offset: int) -> wire.AcquireLeaseReply:
    return wire.AcquireLeaseReply(
        topic_id=topic_id, token=lease.token, ttl_ms=lease.ttl_ms, metadata_offset=offset
    )


def renew_lease(image: MetadataImage, _rules: Rules, command: RenewLease) -> Out:
    """Confirm that a lease is still the newest one of its table.  Raises `LeaseHeld` otherwise."""
    request = command.request
    lease = lease_of(image, request.topic_id)
    if lease is None or lease.token != request.token:
        raise lost(lease, request.token)
    return decision(wire.RenewLeaseReply(ttl_ms=lease.ttl_ms))


def release_lease(image: MetadataImage, _rules: Rules, command: ReleaseLease) -> Out:
    """End a lease; one that has ended already stays as it is."""
    request = command.request
    lease = lease_of(image, request.topic_id)
    if lease is None or lease.token != request.token:
        return decision(wire.ReleaseLeaseReply(metadata_offset=image.offset))
    record = wire.ConfigRecord(
        resource_type=LEASE_RESOURCE, resource_name=request.topic_id, name=EXCLUSIVE
    )
    return decision(wire.ReleaseLeaseReply(metadata_offset=image.offset + 1), [record])


class RenewedLeases:
    """When each lease was last renewed: soft state of one term."""

    def __init__(self) -> None:
        self._heard: dict[TopicId, tuple[int, int]] = {}  #: topic id → (token, when)

    def heard(self, topic_id: TopicId, token: int, now_ms: int) -> None:
        """Note a grant or a renewal."""
        self._heard[topic_id] = token, now_ms

    def live(self, image: MetadataImage, now_ms: int) -> frozenset[TopicId]:
        """Return the topics whose lease was renewed within its TTL.

        A lease of which this term has not heard lives from now on for its TTL.
        """
        found = []
        leases = dict(leases_of(image))
        for topic_id, lease in leases.items():
            token, when_ms = self._heard.get(topic_id, (lease.token, now_ms))
            if token != lease.token:
                when_ms = now_ms
            self._heard[topic_id] = lease.token, when_ms
            if now_ms < when_ms + lease.ttl_ms:
                found.append(topic_id)
        self._heard = {t: each for t, each in self._heard.items() if t in leases}
        return frozenset(found)
