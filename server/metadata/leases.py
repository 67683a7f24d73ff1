"""The maintenance leases of tables, as the metadata image has them (rule C5).

A lease is a value of the resource `maintenance_lease` of its topic's id, named by its kind.

    exclusive   of the files of the table: one job at a time rewrites them
    run:JOB     of a job: one runner at a time runs it (0018)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pk import errors
from pk.server.metadata.image import LEASE_RESOURCE, MetadataImage
from pk.types import TopicId

EXCLUSIVE = "exclusive"

#: The topic and the kind of a lease.
LeaseKey = tuple[TopicId, str]


def run_kind(job: str) -> str:
    """Return the kind of the lease under which a job runs."""
    return f"run:{job}"


class Lease(NamedTuple):
    """The lease of one table; `token` is the metadata offset of its grant."""

    token: int
    holder: str
    ttl_ms: int

    def text(self) -> str:
        """Return the lease as the metadata store it."""
        return json.dumps(self._asdict())


def lease_of(image: MetadataImage, topic_id: TopicId, kind: str = EXCLUSIVE) -> Lease | None:
    """Return a lease of a topic; its job may have died meanwhile."""
    text = image.configs.get((LEASE_RESOURCE, topic_id), {}).get(kind)
    return None if text is None else _parsed(text)


def lease_with(image: MetadataImage, topic_id: TopicId, token: int) -> tuple[str, Lease] | None:
    """Return the kind and the lease of a topic that has this token."""
    for kind, text in image.configs.get((LEASE_RESOURCE, topic_id), {}).items():
        lease = _parsed(text)
        if lease.token == token:
            return kind, lease
    return None


def leases_of(image: MetadataImage) -> Iterator[tuple[LeaseKey, Lease]]:
    """Yield every lease with the id of its topic and its kind."""
    for (resource, topic_id), values in image.configs.items():
        if resource == LEASE_RESOURCE:
            for kind, text in values.items():
                yield (topic_id, kind), _parsed(text)


def _parsed(text: str) -> Lease:
    found: dict[str, Any] = json.loads(text)
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
