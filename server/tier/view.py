"""What the broker knows of the tier, and what the tier is told of the broker's partitions.

Sans-IO.  `TierState` is one partition's coverage as the tier last reported it.  `TierFeed` answers
the tier's long poll with the partitions that changed since the generation it names (rule P6): a
poll costs what changed, not what exists.

Invariants
  V1  log_start <= local_log_start <= tiered_end <= last_stable_offset once the watermark has caught
      up (rule T1)
  V2  `droppable_end <= tiered_end`: local data above what the table covers is never dropped (rule
      T6)
  V3  coverage only grows within a leader epoch; a report of another epoch is ignored (rule T4)
  V4  a session that names a generation older than the oldest forgotten tombstone gets the full list
  V5  what is known is of this log's records: nothing is known to be tiered beyond where the log was
      cut (rule T15)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pk import errors
from pk.log.partition_log import PartitionLog
from pk.types import NONE, Epoch, Offset, PartitionKey
from pk.wire import pk_pb2 as wire

#: Partitions that are gone and still told to a poll; more, and old sessions get the full list.
TOMBSTONES_MAX = 10_000
#: The copier works in seconds: many appends become one report (P6).
REPORT_INTERVAL_MS = 200


@dataclass(slots=True)
class TierState:
    """The tier's coverage of one partition, as its last report said."""

    start: Offset = 0
    tiered_end: Offset = NONE  #: NONE = the tier has not reported yet, or the topic is not tiered
    droppable_end: Offset = NONE  #: committed, delayed and every file HEADed (rule T6)
    tier_bytes: int = 0
    leader_epoch: Epoch = NONE
    version: int = NONE
    uri: str = ""
    problem: errors.PkError | None = None

    def said_in(self, leader_epoch: Epoch) -> TierState:
        """This, unless it was said in another leader epoch: while the topic was not tiered the log
        may have gone on with other records (V5).
        """
        return self if self.leader_epoch == leader_epoch else TierState()

    def report(
        self, progress: wire.TierProgress, leader_epoch: Epoch, last_stable_offset: Offset
    ) -> bool:
        """Take a report over; True if the coverage moved.

        A report of another epoch is ignored (V3).
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
            return False  # it only tells its problem
        self.leader_epoch = leader_epoch
        self.start = progress.start
        self.tiered_end = max(self.tiered_end, progress.tiered_end)
        self.droppable_end = max(
            self.droppable_end, min(progress.droppable_end, self.tiered_end)
        )  # V2
        self.tier_bytes = progress.tier_bytes
        self.version = progress.version
        self.uri = progress.uri or self.uri
        return (self.tiered_end, self.droppable_end) != before


def tier_has_what_left(log: PartitionLog, *, tiered: bool) -> None:
    """T1: what is not local any more is in the tier.

    Where a damaged checkpoint does not say where the log starts, only the table does: were it where
    the local log begins, the table's older records would be deleted (rule T9).
    """
    if log.start_unknown:
        log.start_unknown, log.log_start = False, 0 if tiered else log.log_start
    if tiered:
        log.tiered_end = max(log.tiered_end, log.local_log_start)
        log.droppable_end = max(log.droppable_end, log.local_log_start)


def known_below(offset: Offset, log: PartitionLog, tier: TierState) -> TierState:
    """A log that is cut at `offset` goes on with records that the tier need not have (V5)."""
    log.tiered_end = min(log.tiered_end, offset)
    log.droppable_end = min(log.droppable_end, offset)
    return tier if tier.tiered_end <= offset else TierState()


class TierFeed:
    """Which partitions changed since a generation."""

    def __init__(self, session_id: str) -> None:
        self.session_id = (
            session_id  #: of this broker process; another one means: take the full list
        )
        self.generation = 1
        self._changed: dict[PartitionKey, int] = {}  #: oldest change first
        self._gone: dict[PartitionKey, str] = {}  #: tombstones: key -> topic name
        self._oldest_complete = 0

    def touch(self, key: PartitionKey) -> None:
        """Something the tier must know about `key` changed."""
        self.generation += 1
        self._changed.pop(key, None)
        self._changed[key] = self.generation

    def remove(self, key: PartitionKey, topic: str) -> None:
        """This broker does not lead `key` any more."""
        self.touch(key)
        self._gone[key] = topic
        while len(self._gone) > TOMBSTONES_MAX:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._oldest_complete = max(self._oldest_complete, self._changed.pop(oldest, 0))  # V4

    def restore(self, key: PartitionKey) -> None:
        """This broker leads `key` (again)."""
        self._gone.pop(key, None)
        self.touch(key)

    def news(self, session_id: str, generation: int) -> bool:
        """Whether `reply` would name anything."""
        return session_id != self.session_id or generation < self.generation

    def reply(
        self,
        request: wire.TierPartitionsRequest,
        describe: Callable[[PartitionKey], wire.TierPartition | None],
    ) -> wire.TierPartitionsReply:
        """The partitions changed since the request's generation, oldest change first."""
        full = request.session_id != self.session_id or request.generation < self._oldest_complete
        since = 0 if full else request.generation
        found: list[wire.TierPartition] = []
        for key in reversed(self._changed):
            if self._changed[key] <= since:
                break
            if key in self._gone:
                if not full:
                    topic = self._gone[key]
                    found.append(
                        wire.TierPartition(
                            topic=topic, topic_id=key.topic_id, partition=key.partition, gone=True
                        )
                    )
                continue
            described = describe(key)
            if described is not None:
                found.append(described)
        found.reverse()
        return wire.TierPartitionsReply(
            session_id=self.session_id, generation=self.generation, full=full, partitions=found
        )
