"""Where two metadata logs part: up to a shared (epoch, offset) they are the same (KIP-595)."""

from __future__ import annotations

from pk.log.epochs import LeaderEpochs
from pk.server.raft.messages import EpochEnd, Fetch, LogState
from pk.server.raft.snapshot_id import SnapshotId
from pk.types import NONE


def find_divergence(
    log: LogState, epochs: LeaderEpochs, fetch: Fetch
) -> SnapshotId | EpochEnd | None:
    """What a leader with `log` tells a fetcher: None = yours is a prefix of mine.

    A snapshot is what to begin with again; an `EpochEnd` says how far both may still be the same.
    """
    base = log.base
    if fetch.offset < base.end:
        return log.snapshot or base
    if fetch.offset == base.end:
        return None if fetch.last_epoch == base.epoch else log.snapshot or base
    epoch, end = epochs.end_offset_for(fetch.last_epoch, log.end)
    if epoch == NONE:  # an epoch of which no record came to this leader
        return EpochEnd(log.last_epoch, log.end)
    if epoch == fetch.last_epoch and end >= fetch.offset:
        return None
    return EpochEnd(epoch, end)


def common_end(log: LogState, epochs: LeaderEpochs, told: EpochEnd) -> int:
    """Where the fetcher's `log` has to end before it fetches on."""
    epoch, end = epochs.end_offset_for(told.epoch, log.end)
    return max(log.base.end, told.end if epoch == NONE else min(told.end, end))
