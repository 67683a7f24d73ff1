"""Where two metadata logs diverge (KIP-595): log/divergence, above a snapshot."""

from __future__ import annotations

from pk.log.divergence import EpochEnd, diverging_end, truncation_offset
from pk.log.epochs import LeaderEpochs
from pk.server.raft.messages import Fetch, LogState
from pk.server.raft.snapshot_id import SnapshotId
from pk.types import NONE, Offset


def find_divergence(
    log: LogState, epochs: LeaderEpochs, fetch: Fetch
) -> SnapshotId | EpochEnd | None:
    """What a leader with `log` answers a fetch; None = the fetcher's log is a prefix of `log`.

    A `SnapshotId` is the snapshot that the fetcher must load.  An `EpochEnd` says up to where both
    logs may still agree.
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
    """Where the fetcher truncates its `log` to before it fetches again."""
    own = truncation_offset(epochs, log.end, theirs)
    return max(log.base.end, min(theirs.end_offset, own))
