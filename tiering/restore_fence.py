"""Claims a table for a restored cluster, and marks what may be lost (rule T13).

World-generic.  One commit does both, for all partitions of the topic.  The claim refuses every
later commit of an earlier cluster (rule T4).  The end moves to the first offset of the new
generation, and one more row counts than the files have.  So the offsets in between are missing rows
(rule T17): a reader gets DataLoss for them once, and `pk tier accept` settles them.

Invariants
  F1  A table with a claim of this generation was claimed by this restore: a generation belongs to
      one restore (tiering/restore_records A1).  It is left as it is.
  F2  A table with a claim of a later generation is refused: a later restore took it.
"""

from __future__ import annotations

from pk import errors, generations
from pk.tiering.layout import PartitionCounters
from pk.tiering.table import Commit, CommitConflict, Snapshot, Table

ATTEMPTS = 20


def claimed(before: PartitionCounters, generation: int) -> PartitionCounters:
    """Return the counters of a partition for the restored cluster."""
    claim = generation * generations.EPOCHS
    if before.claim >= claim:
        return before
    return before._replace(claim=claim, end=generation * generations.OFFSETS, rows=before.rows + 1)


def partitions_of(snapshot: Snapshot, known: int) -> int:
    """Return how many partitions the topic has: some may be younger than the metadata."""
    seen = {file.partition for file in snapshot.files.values()} | set(snapshot.counters)
    return max(known, max(seen, default=-1) + 1)


async def load(table: Table, known: int) -> Snapshot | None:
    """Return the newest version with the counters of all its partitions."""
    snapshot = await table.load(range(known))
    if snapshot is None:
        return None
    count = partitions_of(snapshot, known)
    return snapshot if count == known else await table.load(range(count))


def generation_of(snapshot: Snapshot) -> int:
    """Return the highest generation that has claimed the table."""
    return generations.generation_of_epoch(snapshot.restored)


async def claim(table: Table, known: int, generation: int) -> Snapshot:
    """Claim all partitions of a table; return the version that has the claims.

    Raises `ClusterRestored` if a later restore took it (F2), `TierTableChanged`, `TierUnavailable`.
    """
    for _ in range(ATTEMPTS):
        snapshot = await load(table, known)
        if snapshot is None:
            raise errors.TierTableChanged(f"{table.uri}: the table is gone", uri=table.uri)
        if generation_of(snapshot) > generation:
            raise errors.ClusterRestored(
                f"{table.uri}: a restore of generation {generation_of(snapshot)} took the table"
            )
        counters = {
            partition: after
            for partition in range(partitions_of(snapshot, known))
            if (after := claimed(snapshot.partition(partition), generation))
            != snapshot.partition(partition)
        }
        if not counters:  # F1
            return snapshot
        try:
            return await table.commit(Commit(snapshot, counters=counters))
        except CommitConflict:
            continue  # the old cluster lives, and committed meanwhile
        except errors.TierUnavailable:
            continue  # it may have landed (rule T5): look
    raise errors.TierUnavailable(f"{table.uri}: {ATTEMPTS} attempts to claim the table failed")
