"""The numbers that a cluster may give, by its restore generation (rule T13).

Pure.  A cluster that was never restored has generation 0.  A cluster that is restored from its tier
has a later generation than every cluster before it that used the same tables.  Offsets of a
partition, leader epochs and producer ids are given in blocks, one for each generation.  A restore
begins each of them with the block of its generation.  No cluster ever leaves the block in which a
number began.  So a restored cluster gives no number that an earlier one gave or will give, also if
the earlier one lives on where the restore cannot see it.

Invariants
  B1  A log appends no batch that would pass the end of a block.
  B2  The controller allocates no producer ids beyond the end of a block.
  B3  Leader epochs of a partition are counted from the beginning of a block.  The controller elects
      no leader with the last epoch of a block (server/controller/elections), so a million elections
      of one partition do not leave it.  Producer ids of transactions contain the leader epoch of
      their partition of `__transaction_state` (pk.transactional_ids), so a restore begins this
      topic in the block, too.
"""

from __future__ import annotations

#: Offsets of one partition: a million records a second for 35 years.
OFFSETS = 2**50
#: Leader epochs of one partition: an election a minute for two years.  They have 31 bits, and 26
#: in the producer ids of transactions.
EPOCHS = 2**20
PRODUCER_IDS = 2**48
#: The last generation: the blocks of epochs end there.
GENERATION_MAX = 2**26 // EPOCHS - 1


def generation_of_epoch(epoch: int) -> int:
    """Return the generation of the cluster that gave this leader epoch or claim."""
    return max(epoch, 0) // EPOCHS


def leaves_block(first: int, count: int, block: int) -> bool:
    """Return whether the numbers `[first, first + count)` pass the end of the block of `first`."""
    return first // block != (first + max(count, 1) - 1) // block
