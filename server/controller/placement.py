"""Placement of the replicas of a new topic: rack-aware round robin (KIP-36).

Brokers form one ring that alternates between racks.  The first replica of partition p is the broker
at `start + p`.  The next replicas follow in the ring, first on racks that the partition does not
use yet, then on the others.  Brokers that are not available come last, so that an available broker
leads the partition if there is one.

An operator may name the replicas instead (`assigned`).  Kafka's rules apply: the replicas of a
partition are distinct and registered, and all partitions have equally many.

Properties (tests/unit/server/controller)
  - replicas of a partition are distinct
  - leaders per broker differ by at most one while all brokers are available
  - with at least as many racks as replicas, no two replicas of a partition share a rack
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pk import errors
from pk.types import NodeId


@dataclass(slots=True, frozen=True)
class Candidate:
    """A registered broker."""

    broker_id: NodeId
    rack: str
    available: bool


def place(
    candidates: Sequence[Candidate], partitions: int, replication_factor: int, start: int
) -> list[tuple[NodeId, ...]]:
    """Return the replicas of each new partition.

    Raises `InvalidReplicationFactor`, `BrokerUnavailable`.
    """
    if replication_factor > len(candidates):
        raise errors.InvalidReplicationFactor(
            f"replication factor {replication_factor}, but {len(candidates)} brokers are registered"
        )
    ring = _ring([each for each in candidates if each.available])
    spare = _ring([each for each in candidates if not each.available])
    if not ring:
        raise errors.BrokerUnavailable("no broker is available to lead new partitions")
    return [
        _replicas(ring, spare, (start + number) % len(ring), replication_factor)
        for number in range(partitions)
    ]


def assigned(
    candidates: Sequence[Candidate], given: Sequence[Sequence[int]], replication_factor: int = 0
) -> list[tuple[NodeId, ...]]:
    """Return the replicas that an operator names for each new partition, checked.

    candidates: all registered brokers.  replication_factor: of the partitions that exist; 0 = there
    are none.  Raises `InvalidReplicaAssignment`, `BrokerUnavailable`.
    """
    known = {each.broker_id: each for each in candidates}
    placed: list[tuple[NodeId, ...]] = []
    for number, members in enumerate(given):
        entry = f"entry {number} of the replica assignment"
        factor = replication_factor or len(given[0])
        if not members or len(members) != factor:
            raise errors.InvalidReplicaAssignment(
                f"{entry} names {len(members)} replicas: each names the same number, at least one"
                + (f", here {factor} as the topic's partitions have" if replication_factor else "")
            )
        if len(set(members)) != len(members):
            raise errors.InvalidReplicaAssignment(f"{entry} names a broker twice: {list(members)}")
        unknown = [member for member in members if NodeId(member) not in known]
        if unknown:
            raise errors.InvalidReplicaAssignment(
                f"{entry} names broker {unknown[0]}, which is not registered"
            )
        if not any(known[NodeId(member)].available for member in members):
            raise errors.BrokerUnavailable(
                f"{entry} names {list(members)}: none of them is available to lead the partition"
            )
        placed.append(tuple(NodeId(member) for member in members))
    return placed


def _ring(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Order all candidates so that neighbours are on different racks while several are left."""
    racks: dict[str, list[Candidate]] = {}
    for each in sorted(candidates, key=lambda c: (c.rack, c.broker_id)):
        racks.setdefault(each.rack, []).append(each)
    ring: list[Candidate] = []
    depth = 0
    while len(ring) < len(candidates):
        ring += [members[depth] for members in racks.values() if depth < len(members)]
        depth += 1
    return ring


def _replicas(
    ring: list[Candidate], spare: list[Candidate], first: int, count: int
) -> tuple[NodeId, ...]:
    in_order = ring[first:] + ring[:first]
    chosen = [in_order[0]]
    for pool in (in_order[1:], spare):
        for fresh_rack_only in (True, False):
            for each in pool:
                if len(chosen) == count:
                    break
                used = {other.rack for other in chosen}
                if each not in chosen and (each.rack not in used or not fresh_rack_only):
                    chosen.append(each)
    return tuple(each.broker_id for each in chosen)
