"""Damage in the only copy of a partition: the broker serves the whole records and reports the rest.

World-generic.  If another replica is in the ISR or ELR, the broker sets a damaged replica aside
and rebuilds it from the leader (rule L9; broker/metadata_publisher M7).  A damaged replica that is
the only copy cannot be rebuilt.  Its leader surveys the whole segment once, off the loop, and
continues to serve: a fetch in the damaged range fails with `DataLoss` and the range, producers
append at the log's end, and `pk log repair` turns the range into a known gap.

Invariants
  N1  A fetch at any offset of a damaged range fails with the whole range.  `next_offset` skips no
      range before an operator has repaired it.
  N2  The survey that follows an error either finds a range that was not known, or the partition
      goes offline as it does for damage without a range.  So surveys do not repeat without end.
      Reads that began before a survey ended may still fail in a range that it found.  For
      LATE_READS_MS after the survey, such an error begins no other one, and the reader asks again.
  N3  Once another replica is in the ISR or ELR, the damaged replica goes offline and is rebuilt.
      The other replica had the range before it was damaged, or begins above it, because no replica
      copies a damaged batch.
  N4  Missing files at the front of a log are damage if the table does not have their records.
      While that is not known, readers wait and no range is reported as lost.  A follower that
      has less than the present files waits, too: it would begin above the missing range (R5),
      join the ISR, and hide that the range is lost.
  N5  A leader that has asked for an ISR with another replica, and does not know the answer, reports
      no range as lost: this replica may be in the ISR by now.  Readers wait for the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pk import errors
from pk.log import damage as ranges
from pk.log.damage import Damage
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import Environment
from pk.server.replica.partition import Partition
from pk.server.replica.state import ReplicaState
from pk.tasks import TaskRegistry
from pk.types import NONE, PartitionKey

if TYPE_CHECKING:
    from pk.server.metadata.image import PartitionState


#: No read that began before a survey ended takes longer.
LATE_READS_MS = 30_000


class CorruptionManager:
    """Finds, reports and serves around the damaged ranges of one broker's partitions."""

    def __init__(self, env: Environment, metadata: MetadataCache, tasks: TaskRegistry) -> None:
        self._env = env
        self._metadata = metadata
        self._tasks = tasks  #: end with the broker
        self._looking: dict[PartitionKey, None] = {}
        self._surveyed_ms: dict[PartitionKey, int] = {}  #: when the last survey ended

    def is_only_copy(self, state: PartitionState | None) -> bool:
        """Whether no other replica is known to have the committed records of the partition."""
        me = self._env.node_id
        if state is None or me not in state.replicas:
            return False
        if any(each != me for each in (*state.isr, *state.elr)):
            return False
        return me in (*state.isr, *state.elr) or state.replicas == (me,)

    def examine(self, partition: Partition, error: errors.CorruptLog) -> bool:
        """Begin a survey for the damaged range that `error` met.

        False = the caller must take this replica offline instead.
        """
        key = partition.key
        leads = partition.state is ReplicaState.LEADING
        if not leads or not self.is_only_copy(self._metadata.image.partition(key)):
            return False
        if self._waits(partition):
            return True
        if self._is_late(partition, error):
            return True
        if key not in self._looking:
            self._looking[key] = None
            self._tasks.spawn(self._look(partition, error))
        return True

    def _waits(self, partition: Partition) -> bool:
        """Whether another replica may have joined the ISR (N5)."""
        leader = partition.leader
        return leader is not None and any(each != self._env.node_id for each in leader.possible_isr)

    def _is_late(self, partition: Partition, error: errors.CorruptLog) -> bool:
        """Whether `error` met a range that a survey found while the read was under way (N2)."""
        surveyed_ms = self._surveyed_ms.get(partition.key)
        if surveyed_ms is None or self._env.now_ms - surveyed_ms > LATE_READS_MS:
            return False
        return unreadable(partition, int(error.details.get("offset", NONE)))

    async def _look(self, partition: Partition, error: errors.CorruptLog) -> None:
        offset = int(error.details.get("offset", partition.log.local_log_start))
        found: list[Damage] = []
        try:
            survey = partial(partition.log.survey, offset)
            found = await partition.writer.disk.read(survey)
        except errors.PkError as failure:
            self._env.metrics.refused(failure)
        finally:
            self._looking.pop(partition.key, None)
        if partition.state is not ReplicaState.LEADING:
            return
        if not found:
            partition.damaged(error)  # N2
            return
        self._surveyed_ms[partition.key] = self._env.now_ms
        self.report(partition, found)
        partition.bounds_moved(urgent=True)

    def opened(self, partition: Partition) -> None:
        """Report the damage of a log that was opened, if it is the only copy.

        If there are several copies, `settle` decides later.
        """
        if self.is_only_copy(self._metadata.image.partition(partition.key)):
            self.report(partition, partition.log.damage)
            self.look_in_front(partition)

    def report(self, partition: Partition, found: list[Damage]) -> None:
        """Count and log damaged ranges that were not known before."""
        for each in found:
            self._env.metrics.damaged_ranges.inc()
            self._env.warn(
                "damaged_range",
                partition=str(partition),
                offset=each.start,
                next_offset=each.end,
                error=each.problem,
                directory=partition.writer.disk.storage.root,
                repair=f"pk log repair {partition.writer.disk.storage.root} {partition}",
            )

    def settle(self, partition: Partition, state: PartitionState) -> None:
        """Take a damaged replica offline if it is not the only copy (N3).

        This also covers a log that was opened with damage.
        """
        if not partition.online:
            return
        if self.is_only_copy(state):
            self.look_in_front(partition)
            return
        absent = partition.log.absent
        problem = self.problem_of(partition, [] if absent is None else [absent])
        if problem is not None:
            partition.damaged(problem)

    def look_in_front(self, partition: Partition) -> None:
        """Record the missing files at the front of an only copy as damage, except tiered ones (N4).

        Each report of the tier calls this again.
        """
        log = partition.log
        if log.absent is None or not partition.online:
            return
        start = max(log.absent.start, log.log_start)
        if partition.tiered:
            if partition.leader is None or partition.tier.tiered_end == NONE:
                return
            start = max(start, partition.tier.tiered_end)
        if start >= log.absent.end:
            log.absent = None
            return
        leave_file = log.accept_missing(start)
        self.report(partition, log.damage[:1])
        self._tasks.spawn(self._leave(partition, leave_file))
        partition.bounds_moved(urgent=True)

    async def _leave(self, partition: Partition, leave_file: Callable[[], None]) -> None:
        try:
            await partition.writer.disk.write(leave_file)
        except errors.PkError as failure:  # the next start finds the range again
            self._env.metrics.refused(failure)

    def problem_of(
        self, partition: Partition, more: Sequence[Damage] = ()
    ) -> errors.CorruptLog | None:
        """Return the first damaged range of a served log as an error; None if there is none."""
        found = [*more, *partition.log.damage]
        if not found:
            return None
        count = "" if len(found) == 1 else f" ({len(found)} ranges in all)"
        told = ranges.corrupt(str(partition), found[0])
        return errors.CorruptLog(told.message + count, **told.details)

    def client_error(self, partition: Partition, error: errors.PkError) -> errors.PkError:
        """Return the error that answers a read that failed with `error`.

        It is the retriable `OffsetNotAvailable` while a survey looks for the damaged range, for
        reads that the survey overtook, and while the leader waits (N5).
        """
        if isinstance(error, errors.CorruptLog) and (
            partition.key in self._looking
            or (
                partition.state is ReplicaState.LEADING
                and (self._waits(partition) or self._is_late(partition, error))
            )
        ):
            return errors.OffsetNotAvailable(
                f"{partition}: the broker looks for the range that is damaged: {error.message}"
            )
        return partition.client_error(error)


def unreadable(partition: Partition, offset: int) -> bool:
    """Whether `offset` is known to be damaged."""
    return offset != NONE and any(e.start <= offset < e.end for e in partition.log.damage)
