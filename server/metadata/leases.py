"""The maintenance leases of tables, as the metadata image has them (rule C5).

A lease is a value of the resource `maintenance_lease` of its topic's id.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pk import errors
from pk.server.metadata.image import LEASE_RESOURCE, MetadataImage
from pk.types import TopicId

EXCLUSIVE = "exclusive"


class Lease(NamedTuple):
    """The lease of one table; `token` is the metadata offset of its grant."""

    token: int
    holder: str
    ttl_ms: int

    def text(self) -> str:
        """Return the lease as the metadata store it."""
        return json.dumps(self._asdict())


def lease_of(image: MetadataImage, topic_id: TopicId) -> Lease | None:
    """Return the lease of a topic's table; its job may have died meanwhile."""
    return _parsed(image.configs.get((LEASE_RESOURCE, topic_id), {}))


def leases_of(image: MetadataImage) -> Iterator[tuple[TopicId, Lease]]:
    """Yield every lease with the id of its topic."""
    for (kind, topic_id), values in image.configs.items():
        lease = _parsed(values) if kind == LEASE_RESOURCE else None
        if lease is not None:
            yield topic_id, lease


def _parsed(values: Mapping[str, str]) -> Lease | None:
    if EXCLUSIVE not in values:
        return None
    found: dict[str, Any] = json.loads(values[EXCLUSIVE])
    return Lease(int(found["token"]), str(found["holder"]), int(found["ttl_ms"]))


def check_token(image: MetadataImage, topic_id: TopicId, token: int) -> None:
    """Raise `LeaseHeld` unless `token` is that of the newest lease of the table.

    Raises the retriable `BrokerUnavailable` if the image does not have the grant yet.
    """
    if token > image.offset:
        raise errors.BrokerUnavailable(
            f"the metadata of this broker end at {image.offset}, before the grant of lease {token}"
        )
    lease = lease_of(image, topic_id)
    if lease is None or lease.token != token:
        raise lost(lease, token)


def lost(lease: Lease | None, token: int) -> errors.LeaseHeld:
    """Return the error for a job whose lease is no longer the newest one."""
    now = "no job holds it" if lease is None else f"{lease.holder} holds it ({lease.token})"
    return errors.LeaseHeld(
        f"the lease with token {token} has ended, and {now}: nothing was committed for it. Run the "
        "job again",
        token=str(token),
    )
