"""What a follower may do with its log when the leader answers that the two logs diverge.

Sans-IO.  Read first: docs/PROTOCOL.md L2, R4, R5; KIP-101, KIP-279, KIP-595 (truncation on fetch).

A follower sets one position at the leader: its log end and the epoch of its last record.  The
leader answers with records, with the end of an epoch, or with the offset to start at
(log/divergence).  Truncation may take several rounds, each to an older epoch.

Invariants
  F1  nothing below the committed high watermark is cut, except to follow a leader epoch that the
      metadata marks unclean (rule R4)
  F2  each answer with the end of an epoch lowers the log's end, or its last epoch: the rounds end
  F3  nor is a log begun anew below it: who leads cleanly has everything committed from where its
      segments begin, so one that says otherwise has lost records (rules R4, R5)
"""

from __future__ import annotations

from typing import NamedTuple

from pk import errors
from pk.log.divergence import EpochEnd, truncation_offset
from pk.log.epochs import LeaderEpochs
from pk.types import Offset


class Cut(NamedTuple):
    """What a diverging answer asks for."""

    offset: Offset  #: the log's end afterwards
    below_watermark: bool  #: committed records go: an unclean leader never had them (F1)


def cut_at(
    theirs: EpochEnd,
    epochs: LeaderEpochs,
    *,
    log_end: Offset,
    high_watermark: Offset,
    unclean: bool,
) -> Cut:
    """Where to cut the log that ends at `log_end` when the leader answers `theirs`.

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


def check_start(offset: Offset, *, high_watermark: Offset, unclean: bool) -> None:
    """Whether a log may be dropped to begin at `offset`, where its leader's does (rule R5).

    A follower that has fallen behind ends, and knows of committed records, below `offset`; what it
    drops is in the tier, or deleted.  Raises `LogTruncated` if it knows of more (F3).
    """
    if offset < high_watermark and not unclean:
        raise errors.LogTruncated(
            f"the leader has this log begin anew at {offset}, below the committed high watermark "
            f"{high_watermark}, and no unclean election explains that",
            offset=str(offset),
            high_watermark=str(high_watermark),
        )
