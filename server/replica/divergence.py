"""Where a follower's log parts from its leader's (KIP-101, KIP-279, rules R4, R5).

Sans-IO, the leader's half; the follower's is follower.py.  Two logs that have a record of the same
epoch at the same offset agree on everything up to it: an epoch has one leader, and that one writes
one history.  So it is enough to know where each epoch begins.
"""

from __future__ import annotations

from typing import NamedTuple

from pk.log.epochs import LeaderEpochs
from pk.types import NONE, Epoch, Offset


class EpochEnd(NamedTuple):
    """The newest epoch both may have, and where it ended here."""

    epoch: Epoch
    end_offset: Offset


class StartAt(NamedTuple):
    """Drop the log, begin at `offset`, where a segment of the leader's does (rule R5)."""

    offset: Offset


Divergence = EpochEnd | StartAt


def find_divergence(
    epochs: LeaderEpochs, first: Offset, end: Offset, last_epoch: Epoch, offset: Offset
) -> Divergence | None:
    """What to tell a follower whose log ends at `offset`, with `last_epoch` before it; None = the
    two logs agree up to there.

    The leader holds `[first, end)`; what it knows of epochs below `first` is gone with the records.
    """
    unknown = last_epoch != NONE and (not epochs.entries or last_epoch < epochs.entries[0].epoch)
    if first > 0 and (offset < first or unknown):
        return StartAt(first)  # what was here in epochs older than all known cannot be compared
    if last_epoch != NONE:
        epoch, ended = epochs.end_offset_for(last_epoch, end)
        if epoch == NONE:  # its last epoch never wrote here
            return EpochEnd(epochs.latest, min(end, offset))
        if epoch != last_epoch or min(ended, end) < offset:
            return EpochEnd(epoch, min(ended, end))
    return EpochEnd(epochs.latest, end) if offset > end else None
