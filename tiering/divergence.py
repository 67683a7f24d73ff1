"""Where a partition's log and its table are no longer the same line of records.  Pure.

Two logs that have a record of the same leader epoch at the same offset have the same records below
it (KIP-101), and so have a log and a table.  So one look at the table's last offset is enough, and
it needs no file: the table keeps that record's epoch among its counters (rule T2), the log its
epochs.
"""

from __future__ import annotations

from collections.abc import Sequence

from pk import errors
from pk.types import NONE, Epoch, Offset


def has_diverged(
    table_end: Offset,
    table_epoch: Epoch,
    log_end: Offset,
    epochs: Sequence[tuple[Epoch, Offset]],
) -> bool:
    """Whether a leader's log lacks the record the table ends with (rule T15).

    `epochs` are the log's, each with its first offset.  Where they do not reach down to the table's
    end there is nothing to compare: the log begins there on the table's word.
    """
    if log_end < table_end:
        return True
    known = NONE
    for epoch, start in epochs:
        if start < table_end:
            known = epoch
    return known not in (NONE, table_epoch)


def divergence_error(
    partition: int, table_end: Offset, table_epoch: Epoch, log_end: Offset
) -> errors.TierTableChanged:
    """What is said of such a table, and what helps."""
    return errors.TierTableChanged(
        f"partition {partition} of the table ends at {table_end} with a record of leader epoch "
        f"{table_epoch} that the log, which ends at {log_end}, does not have: the log went on "
        "without the table while the topic was not tiered. Local data stays. Turn tier_enable off "
        f"until the log begins at {table_end} or later, or delete records up to there",
        table_end=str(table_end),
    )
