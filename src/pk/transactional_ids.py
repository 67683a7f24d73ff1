"""Maps transactional ids and producer ids to partitions of `__transaction_state`.

The leader of that partition is the coordinator.  A leader of a data partition sees producer ids
only: batches and snapshots do not hold the transactional id.  So a producer id of transactions
contains the number of the partition that allocated it, and both functions are pure (rule X3).

A producer id of transactions has 63 bits:

    1 | partition 12 bits | leader epoch of that partition 26 bits | number in that epoch 24 bits

Invariants
  I1  A coordinator allocates ids of its own partition and its own leader epoch.  A leader epoch has
      one leader, so an id is allocated once.  That holds after an unclean election, too.
  I2  Ids of plain idempotent producers come from blocks of the controller and are below
      `TRANSACTIONAL`.
  I3  The number of partitions of `__transaction_state` never changes.
"""

from __future__ import annotations

import enum

from crc32c import crc32c

from pk import errors
from pk.types import Epoch

TOPIC = "__transaction_state"
PARTITIONS = 16

#: The smallest producer id of transactions.
TRANSACTIONAL = 1 << 62
_PARTITION_BITS, _EPOCH_BITS, _NUMBER_BITS = 12, 26, 24


class FoundBy(enum.IntEnum):
    """Who read the table of a prepared batch: `TableEvidence.found_by` (X11)."""

    DRIVER = 1
    RESOLVER = 2
    OPERATOR = 3


def partition_of_id(transactional_id: str) -> int:
    """Return the partition that coordinates a transactional id."""
    return crc32c(transactional_id.encode()) % PARTITIONS


def is_transactional(producer_id: int) -> bool:
    """Whether a coordinator allocated the producer id."""
    return producer_id >= TRANSACTIONAL


def partition_of_producer(producer_id: int) -> int:
    """Return the partition that allocated a producer id of transactions."""
    assert is_transactional(producer_id)
    return (producer_id >> (_EPOCH_BITS + _NUMBER_BITS)) & ((1 << _PARTITION_BITS) - 1)


def epoch_of_producer(producer_id: int) -> Epoch:
    """Return the leader epoch in which a producer id of transactions was allocated."""
    assert is_transactional(producer_id)
    return (producer_id >> _NUMBER_BITS) & ((1 << _EPOCH_BITS) - 1)


def producer_id(partition: int, leader_epoch: Epoch, number: int) -> int:
    """Return the `number`th producer id that the leader of `leader_epoch` allocates.

    Raises `CoordinatorUnavailable` once an epoch has used all its ids; the next leader epoch has
    new ones.
    """
    assert 0 <= partition < 1 << _PARTITION_BITS
    if number >= 1 << _NUMBER_BITS or leader_epoch >= 1 << _EPOCH_BITS:
        raise errors.CoordinatorUnavailable(
            f"leader epoch {leader_epoch} of {TOPIC}-{partition} has no producer ids left: "
            "elect another leader"
        )
    return (
        TRANSACTIONAL
        | partition << (_EPOCH_BITS + _NUMBER_BITS)
        | leader_epoch << _NUMBER_BITS
        | number
    )
