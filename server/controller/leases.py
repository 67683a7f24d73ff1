"""Leases of maintenance jobs: one job at a time may rewrite the files of a table (rule C5).

A lease of the kind `run:JOB` says that a runner runs this job; it concerns no files (0018).
The grant is a record: holder, fencing token and TTL.  The token is the offset of the record, so it
grows with every grant.  Renewals are soft state of the active controller, as the sessions of
brokers are.  A new active controller has heard nothing yet, so a lease then lives one more TTL.

Invariants
  N1  A lease is granted to another holder only after the lease before it was released, or was not
      renewed for its TTL.
  N2  The token of a later grant is higher, also after a release and after a failover.
"""

from __future__ import annotations

from pk import errors, schedules
from pk.server.controller.commands import (
    AcquireLease,
    Out,
    ReleaseLease,
    RenewLease,
    Rules,
    decision,
)
from pk.server.metadata.image import LEASE_RESOURCE, MetadataImage
from pk.server.metadata.leases import (
    EXCLUSIVE,
    Lease,
    LeaseKey,
    lease_of,
    lease_with,
    leases_of,
    lost,
    run_kind,
)
from pk.types import TopicId
from pk.wire import pk_pb2 as wire

TTL_MIN_MS, TTL_MAX_MS = 1_000, 3_600_000
HOLDER_MAX = 200  #: characters
KINDS = (EXCLUSIVE, *(run_kind(job) for job in schedules.JOBS))


def acquire_lease(image: MetadataImage, _rules: Rules, command: AcquireLease) -> Out:
    """Grant the lease of a table.  The holder of a lease gets the same lease again.

    Raises `LeaseHeld` while another holder has it (N1).
    """
    request = command.request
    if request.kind not in KINDS:
        raise errors.InvalidRequest(
            f"{request.kind[:40]!r} is no kind of lease: there are {', '.join(KINDS)}"
        )
    if not 0 < len(request.holder) <= HOLDER_MAX:
        raise errors.InvalidRequest(f"the holder of a lease has 1 to {HOLDER_MAX} characters")
    if not TTL_MIN_MS <= request.ttl_ms <= TTL_MAX_MS:
        raise errors.InvalidRequest(
            f"the TTL of a lease is {TTL_MIN_MS} to {TTL_MAX_MS} ms, not {request.ttl_ms}"
        )
    topic = image.topic(request.topic)
    if topic is None:
        raise errors.UnknownTopicOrPartition(f"topic {request.topic[:300]!r} does not exist")
    held = lease_of(image, topic.topic_id, request.kind)
    if held is not None and held.holder == request.holder:
        return decision(_granted(topic.topic_id, held, image.offset, command.now_ms))
    if held is not None and (topic.topic_id, request.kind) in command.renewed:
        what = "" if request.kind == EXCLUSIVE else f" ({request.kind})"
        raise errors.LeaseHeld(
            f"the maintenance job {held.holder} holds the lease of {topic.name}{what}: run this "
            f"job when it has ended; the lease of a job that died ends after {held.ttl_ms} ms",
            holder=held.holder,
        )
    lease = Lease(image.offset + 1, request.holder, request.ttl_ms)
    record = wire.ConfigRecord(
        resource_type=LEASE_RESOURCE,
        resource_name=topic.topic_id,
        name=request.kind,
        value=lease.text(),
    )
    granted = _granted(topic.topic_id, lease, image.offset + 1, command.now_ms)
    return decision(granted, [record])


def _granted(topic_id: TopicId, lease: Lease, offset: int, now_ms: int) -> wire.AcquireLeaseReply:
    return wire.AcquireLeaseReply(
        topic_id=topic_id,
        token=lease.token,
        ttl_ms=lease.ttl_ms,
        metadata_offset=offset,
        now_ms=now_ms,
    )


def renew_lease(image: MetadataImage, _rules: Rules, command: RenewLease) -> Out:
    """Confirm that a lease is still the newest one of its table.  Raises `LeaseHeld` otherwise."""
    request = command.request
    found = lease_with(image, request.topic_id, request.token)
    if found is None:
        raise lost(lease_of(image, request.topic_id), request.token)
    return decision(wire.RenewLeaseReply(ttl_ms=found[1].ttl_ms))


def release_lease(image: MetadataImage, _rules: Rules, command: ReleaseLease) -> Out:
    """End a lease; one that has ended already stays as it is."""
    request = command.request
    found = lease_with(image, request.topic_id, request.token)
    if found is None:
        return decision(wire.ReleaseLeaseReply(metadata_offset=image.offset))
    record = wire.ConfigRecord(
        resource_type=LEASE_RESOURCE, resource_name=request.topic_id, name=found[0]
    )
    return decision(wire.ReleaseLeaseReply(metadata_offset=image.offset + 1), [record])


class RenewedLeases:
    """When each lease was last renewed: soft state of one term."""

    def __init__(self) -> None:
        self._heard: dict[LeaseKey, tuple[int, int]] = {}  #: lease → (token, when)

    def heard(self, topic_id: TopicId, kind: str, token: int, now_ms: int) -> None:
        """Note a grant or a renewal."""
        self._heard[topic_id, kind] = token, now_ms

    def live(self, image: MetadataImage, now_ms: int) -> frozenset[LeaseKey]:
        """Return the leases that were renewed within their TTL.

        A lease of which this term has not heard lives from now on for its TTL.
        """
        found = []
        leases = dict(leases_of(image))
        for key, lease in leases.items():
            token, when_ms = self._heard.get(key, (lease.token, now_ms))
            if token != lease.token:
                when_ms = now_ms
            self._heard[key] = lease.token, when_ms
            if now_ms < when_ms + lease.ttl_ms:
                found.append(key)
        self._heard = {t: each for t, each in self._heard.items() if t in leases}
        return frozenset(found)
