"""The follower's decisions: where to fetch from, where two logs part, how far it may cut its own.

Sans-IO.  Read first: docs/PROTOCOL.md L2, R4, R5; KIP-101, KIP-279, KIP-595 (truncation on fetch).

A follower sets one position at the leader: its log end and the epoch of its last record.  The
leader answers with records, with where the logs part, or with where to start anew.  Cutting may
take several rounds, each to an older epoch; every round ends at an offset that both logs reached in
the same epoch, or lower.

Invariants
  F1  nothing below the committed high watermark is cut, except to follow a leader epoch that the
      metadata marks unclean (rule R4)
  F2  each answer of the kind "the logs part" lowers the log's end, or its last epoch: the rounds
      end
  F3  nor is a log begun anew below it: who leads cleanly has everything committed from where its
      segments begin, so one that says otherwise has lost records (rules R4, R5)
"""

from __future__ import annotations

from typing import NamedTuple

from pk import errors
from pk.log.epochs import LeaderEpochs
from pk.types import NONE, Epoch, Offset


class Cut(NamedTuple):
    """What a diverging answer asks for."""

    offset: Offset  #: the log's end afterwards
    below_watermark: bool  #: committed records go: an unclean leader never had them (F1)


def cut_at(
    theirs: tuple[Epoch, Offset],
    epochs: LeaderEpochs,
    *,
    log_end: Offset,
    high_watermark: Offset,
    unclean: bool,
) -> Cut:
    """Where to cut when the leader says that its epoch `theirs[0]` ended at `theirs[1]`.

    Raises `LogTruncated` if that would cut committed records under a clean leader (F1).
    """
    their_epoch, their_end = theirs
    if their_epoch == NONE:  # nothing in common, as far as the leader's epochs reach
        target = min(their_end, log_end)
    else:
        own = epochs.end_offset_for(their_epoch, log_end)
        # `own.epoch` is the largest of ours that is not newer; an older one than theirs means that
        # ours ended before theirs began: what we have beyond is of epochs the leader has not.
        target = log_end if own.epoch == NONE else min(own.start_offset, log_end)
        if own.epoch in (NONE, their_epoch):
            target = min(target, their_end)
    committed = target < high_watermark
    if committed and not unclean:
        raise errors.LogTruncated(
            f"the leader parts from this log at {target}, below the committed high watermark "
            f"{high_watermark}, and no unclean election explains that",
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
