"""Divergence of two metadata logs (KIP-595): log/divergence, for logs that begin at a snapshot."""

from __future__ import annotations

from pk.log.divergence import EpochEnd, diverging_end, truncation_offset
from pk.log.epochs import LeaderEpochs
from pk.server.raft.messages import Fetch, LogState
from pk.server.raft.snapshot_id import SnapshotId
from pk.types import NONE, Offset


def find_divergence(
    log: LogState, epochs: LeaderEpochs, fetch: Fetch
) -> SnapshotId | EpochEnd | None:
    """Return where a fetcher's log diverges from the leader's `log`; None if it is a prefix.

    A `SnapshotId` names the snapshot that the fetcher must load.  An `EpochEnd` is the offset up to
    which both logs may agree.
    """
    base = log.base
    if fetch.offset < base.end:
        return log.snapshot or base
    if fetch.offset == base.end:
        return None if fetch.last_epoch == base.epoch else log.snapshot or base
    found = diverging_end(epochs, log.end, fetch.last_epoch, fetch.offset)
    if found is not None and found.epoch == NONE:  # the leader has no record of that epoch
        return EpochEnd(log.last_epoch, log.end)
    return found


def common_end(log: LogState, epochs: LeaderEpochs, theirs: EpochEnd) -> Offset:
    """Return the offset to which the fetcher truncates its `log` before it fetches again."""
    own = truncation_offset(epochs, log.end, theirs)
    return max(log.base.end, min(theirs.end_offset, own))
