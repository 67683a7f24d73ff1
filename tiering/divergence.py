"""Decides whether a partition's log and its table have diverged (rule T15).  Pure.

If a log and a table have the same last record, they agree on every record below it, as two logs do
(log/divergence).  Comparing the table's last offset is enough, and reads no file: the table keeps
the epoch of its last record among its counters (rule T2).
"""

from __future__ import annotations

from collections.abc import Sequence

from pk import errors
from pk.log.divergence import lacks_last_record
from pk.log.epochs import LeaderEpochs
from pk.types import Epoch, EpochStart, Offset


def find_divergence(
    partition: int,
    table_end: Offset,
    table_epoch: Epoch,
    log_end: Offset,
    epochs: Sequence[tuple[Epoch, Offset]],
) -> errors.TierTableChanged | None:
    """Returns the error that stops copying if a leader's log lacks the table's last record; None =
    the log has it, or begins above it.

    epochs: those of the leader's log, each with its first offset
    """
    known = LeaderEpochs([EpochStart(*each) for each in epochs])
    if not lacks_last_record(known, log_end, table_end, table_epoch):
        return None
    return errors.TierTableChanged(
        f"partition {partition} of the table ends at {table_end} with a record of leader epoch "
        f"{table_epoch} that the log, which ends at {log_end}, does not have: the log went on "
        "without the table while the topic was not tiered. Local data stays. Turn tier_enable off "
        f"until the log begins at {table_end} or later, or delete records up to there",
        table_end=str(table_end),
    )
