"""How far the tier's table covers one partition, as the tier last reported it to the broker.

Sans-IO.

Invariants
  Y1  log_start <= local_log_start <= tiered_end <= last_stable_offset, once the high watermark has
      caught up (rule T1).
  Y2  `droppable_end <= tiered_end`: local data above the end of the table is never dropped (rule
      T6).
  Y3  The coverage only grows within a leader epoch; a report of another epoch is ignored (rule T4).
  Y5  The coverage is about this log's records.  After a truncation at an offset, nothing beyond
      that offset counts as tiered (rule T15).
"""

from __future__ import annotations

from dataclasses import dataclass

from pk import errors
from pk.log.partition_log import PartitionLog
from pk.types import NONE, Epoch, Offset
from pk.wire import pk_pb2 as wire


@dataclass(slots=True)
class TierState:
    """The tier's coverage of one partition, as its last report said."""

    start: Offset = 0
    tiered_end: Offset = NONE  #: NONE = the tier has not reported yet, or the topic is not tiered
    #: committed, and after the delay every file was found by HEAD (rule T6)
    droppable_end: Offset = NONE
    tier_bytes: int = 0
    missing_from: Offset = NONE  #: first offset of missing rows (rule T17); NONE = none is missing
    leader_epoch: Epoch = NONE
    version: int = NONE
    uri: str = ""
    waiting_ms: int = 0  #: for how long the oldest stable record has not been in the table
    problem: errors.PkError | None = None

    def said_in(self, leader_epoch: Epoch) -> TierState:
        """Return this state if it was reported in `leader_epoch`, else an empty one (Y5).

        While the topic was not tiered, the log may have continued with other records.
        """
        return self if self.leader_epoch == leader_epoch else TierState()

    def report(
        self, progress: wire.TierProgress, leader_epoch: Epoch, last_stable_offset: Offset
    ) -> bool:
        """Take over a report of the tier; True if the coverage moved.

        A report of another epoch is ignored (Y3).
        """
        if progress.leader_epoch != leader_epoch:
            return False
        self.problem = (
            errors.from_wire(
                progress.problem.code, progress.problem.message, dict(progress.problem.details)
            )
            if progress.HasField("problem")
            else None
        )
        if progress.tiered_end > last_stable_offset:
            raise errors.TierTableChanged(
                f"the table covers up to {progress.tiered_end}, "
                f"the log is stable only up to {last_stable_offset}"
            )
        before = (self.tiered_end, self.droppable_end)
        if progress.tiered_end == NONE:
            return False  # the report only has a problem
        self.leader_epoch = leader_epoch
        self.start = progress.start
        self.tiered_end = max(self.tiered_end, progress.tiered_end)
        self.droppable_end = max(
            self.droppable_end, min(progress.droppable_end, self.tiered_end)
        )  # Y2
        self.tier_bytes = progress.tier_bytes
        self.missing_from = progress.missing_from if progress.HasField("missing_from") else NONE
        self.version = progress.version
        self.uri = progress.uri or self.uri
        return (self.tiered_end, self.droppable_end) != before


def tier_has_what_left(log: PartitionLog, *, tiered: bool) -> None:
    """Assume that the table has all records below the local log, except those known as missing (T1,
    L9).

    If the checkpoint of the log start is damaged, only the table has the log start.  The start of
    the local log must not be used instead, because the owner would then delete the table's older
    records (rule T9).
    """
    if log.start_unknown:
        log.start_unknown, log.log_start = False, 0 if tiered else log.log_start
    if tiered:
        left = log.local_log_start if log.absent is None else log.absent.start
        log.tiered_end = max(log.tiered_end, left)
        log.droppable_end = max(log.droppable_end, left)


def known_below(offset: Offset, log: PartitionLog, tier: TierState) -> TierState:
    """Return the coverage after a truncation at `offset`: the tier may lack later records (Y5)."""
    log.tiered_end = min(log.tiered_end, offset)
    log.droppable_end = min(log.droppable_end, offset)
    return tier if tier.tiered_end <= offset else TierState()
