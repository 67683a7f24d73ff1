"""Decides where a follower truncates or restarts its log when the two logs diverge.

Sans-IO.  Read first: docs/PROTOCOL.md L2, R4, R5; KIP-101, KIP-279, KIP-595 (truncation on fetch).

A follower sets one position at the leader: its log end and the epoch of its last record.  The
leader answers with records, with the end of an epoch, or with the offset to start at
(log/divergence).  Truncation may take several rounds, each to an older epoch.

Invariants
  F1  A follower truncates nothing below the committed high watermark, except to follow a leader
      epoch that the metadata marks unclean (rule R4).
  F2  Each answer with the end of an epoch lowers the log's end, or its last epoch.  So the number
      of rounds is finite.
  F3  A follower does not replace its log with one that starts below the committed high watermark
      either.  A cleanly elected leader has every committed record from its first segment on, so a
      leader that answers otherwise has lost records (rules R4, R5).  A log that ends below the
      leader's forgotten end is an exception: it is copied again (rule C8).
"""

from __future__ import annotations

from typing import NamedTuple

from pk import errors
from pk.log.divergence import EpochEnd, truncation_offset
from pk.log.epochs import LeaderEpochs
from pk.types import Offset


class Cut(NamedTuple):
    """The truncation that a diverging answer requires."""

    offset: Offset  #: the log's end afterwards
    #: whether committed records are removed, because an unclean leader lacks them (F1)
    below_watermark: bool


def cut_at(
    theirs: EpochEnd,
    epochs: LeaderEpochs,
    *,
    log_end: Offset,
    high_watermark: Offset,
    unclean: bool,
) -> Cut:
    """Return where to truncate the log that ends at `log_end` if the leader answers `theirs`.

    Raises `LogTruncated` if that would cut committed records under a clean leader (F1).
    """
    target = truncation_offset(epochs, log_end, theirs)
    committed = target < high_watermark
    if committed and not unclean:
        raise errors.LogTruncated(
            f"the leader's log diverges from this one at {target}, below the committed high "
            f"watermark {high_watermark}, and no unclean election explains that",
            offset=str(target),
            high_watermark=str(high_watermark),
        )
    return Cut(target, committed)


def check_start(
    offset: Offset, *, high_watermark: Offset, unclean: bool, forgotten: bool = False
) -> None:
    """Check that a follower may drop its log and start at `offset`, where its leader's log starts.

    For a follower that has fallen behind, the log's end and the high watermark are below `offset`;
    the records that it drops are in the tier, or deleted (rule R5).  `forgotten`: the leader has
    removed tombstones above the log's end, and has every committed record itself (C8).  Raises
    `LogTruncated` if the high watermark is above `offset` (F3).
    """
    if offset < high_watermark and not unclean and not forgotten:
        raise errors.LogTruncated(
            f"the leader's log starts at {offset}, and this log would begin again there, below the "
            f"committed high watermark {high_watermark}; no unclean election explains that",
            offset=str(offset),
            high_watermark=str(high_watermark),
        )
