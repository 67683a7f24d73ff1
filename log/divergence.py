"""Where two logs diverge, from the offsets at which their leader epochs begin.  Pure.

Two logs that have a record of the same leader epoch at the same offset agree on every record below
it, because an epoch has one leader, and a leader writes one history (KIP-101, KIP-279, KIP-595).
So it is enough to know the offsets at which each epoch begins and ends, and no record is read.

    who compares                              asks
    leader, for a follower (rules R4, R5)     find_divergence
    leader, for a reader (KIP-320, rule R4)   reader_divergence
    leader of the metadata quorum             diverging_end  (server/raft/divergence.py)
    follower, for what the leader answered    truncation_offset
    copier, for the table (rule T15)          lacks_last_record  (tiering/divergence.py)
"""

from __future__ import annotations

from typing import NamedTuple

from pk.log.epochs import LeaderEpochs
from pk.types import NONE, Epoch, Offset


class EpochEnd(NamedTuple):
    """The newest epoch that both logs may have, and where it ended in the log of the leader."""

    epoch: Epoch
    end_offset: Offset


class StartAt(NamedTuple):
    """The follower drops its log and begins at `offset`, where a segment of the leader begins
    (rule R5).
    """

    offset: Offset


Divergence = EpochEnd | StartAt


# -- the log that answers --------------------------------------------------------------------------


def diverging_end(
    epochs: LeaderEpochs, end: Offset, last_epoch: Epoch, offset: Offset
) -> EpochEnd | None:
    """Compare this log, which ends at `end`, with a log that ends at `offset` in `last_epoch`.

    Returns None if this log has the other log's last record.  Otherwise returns the newest epoch
    here that is not above `last_epoch`, and its end.  The epoch is -1 if `last_epoch` is newer than
    every epoch here.
    """
    epoch, epoch_end = epochs.end_offset_for(last_epoch, end)
    if epoch == NONE:
        return EpochEnd(NONE, end)
    if epoch == last_epoch and epoch_end >= offset:
        return None
    return EpochEnd(epoch, epoch_end)


def find_divergence(
    epochs: LeaderEpochs, first: Offset, end: Offset, last_epoch: Epoch, offset: Offset
) -> Divergence | None:
    """Return a leader's answer to a follower whose log ends at `offset`, with `last_epoch` before
    it; None = the two logs agree up to there.

    The leader holds `[first, end)`.  It does not know the epochs of records below `first`.
    """
    unknown = last_epoch != NONE and (not epochs.entries or last_epoch < epochs.entries[0].epoch)
    if first > 0 and (offset < first or unknown):
        return StartAt(first)  # an epoch older than all known ones cannot be compared
    if last_epoch == NONE:
        return EpochEnd(epochs.latest, end) if offset > end else None
    found = diverging_end(epochs, end, last_epoch, offset)
    if found is None:  # an epoch may begin above `end`: decided and not written yet
        return EpochEnd(last_epoch, end) if offset > end else None
    if found.epoch == NONE:  # the leader has no record of the follower's last epoch
        return EpochEnd(epochs.latest, min(end, offset))
    return EpochEnd(found.epoch, min(found.end_offset, end))


def reader_divergence(
    epochs: LeaderEpochs, end: Offset, last_epoch: Epoch, offset: Offset
) -> EpochEnd | None:
    """Return where this log diverges from the log in which a reader read up to `offset`, in
    `last_epoch`; None = the reader may go on (KIP-320, rule R4).
    """
    if last_epoch == NONE or offset == 0:
        return None
    found = diverging_end(epochs, end, last_epoch, offset)
    if found is None:
        return None
    if found.epoch != NONE:
        return EpochEnd(found.epoch, min(found.end_offset, offset))
    if offset > end:
        # The record was committed when it was read.  It is lost, with the epoch it was read in.
        return EpochEnd(last_epoch, end)
    return EpochEnd(epochs.latest, offset) if epochs.entries else None


def lacks_last_record(
    epochs: LeaderEpochs, log_end: Offset, end: Offset, last_epoch: Epoch
) -> bool:
    """Whether the log that ends at `log_end` lacks the record of `last_epoch` just below `end`.

    False if its epochs do not reach down to `end`: there is nothing to compare.
    """
    return log_end < end or epochs.epoch_of(end - 1) not in (NONE, last_epoch)


# -- the log that asked ----------------------------------------------------------------------------


def truncation_offset(epochs: LeaderEpochs, log_end: Offset, theirs: EpochEnd) -> Offset:
    """Return the offset at which the log that ends at `log_end` is cut after a leader answered
    `theirs`.

    The result is an offset that both logs reached in the same epoch, or a lower one than before:
    truncation may take several rounds, each to an older epoch (KIP-595).
    """
    if theirs.epoch == NONE:  # nothing in common, as far as the leader's epochs reach
        return min(theirs.end_offset, log_end)
    own = epochs.end_offset_for(theirs.epoch, log_end)
    if own.epoch == NONE:
        return min(theirs.end_offset, log_end)
    target = min(own.start_offset, log_end)
    # `own.epoch` is this log's newest epoch that is not above theirs.  If it is older, this log's
    # records above its end belong to epochs that the leader does not have.
    return min(target, theirs.end_offset) if own.epoch == theirs.epoch else target
