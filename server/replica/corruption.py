"""Damage in the only copy of a partition: what is whole is served, what is damaged is told.

World-generic.  With another replica in ISR or ELR a damaged one is set aside and made anew from the
leader (rule L9; broker/metadata_publisher M7).  Without one there is nothing to make it of.
Then the leader looks at the whole segment once, off the loop, and goes on: readers get `DataLoss`
with the range, producers go on behind the end, and `pk log repair` turns the range into a known
gap.

Invariants
  N1  a reader who asks in a damaged range hears of the whole range; no range is passed over by
      `next_offset` before an operator has repaired it
  N2  the survey that follows an error finds a range that was not known, or the partition goes
      offline as it does for damage without a range: looking ends
  N3  once another replica is in ISR or ELR the damaged one goes offline and is made anew: the other
      one had the range before, or begins above it, for no replica copies a damaged batch
  N4  files that are missing in front of a log are damage where the table does not have their
      records; while that is not known readers wait, and nothing is called lost
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pk import errors
from pk.log import damage as ranges
from pk.log.damage import Damage
from pk.server.replica.context import BrokerContext
from pk.server.replica.partition import Partition
from pk.server.replica.state import ReplicaState
from pk.types import NONE, PartitionKey

if TYPE_CHECKING:
    from pk.server.metadata.image import PartitionState


class CorruptionManager:
    """See the module's docstring."""

    def __init__(self, core: BrokerContext) -> None:
        self._core = core
        self._looking: dict[PartitionKey, None] = {}

    def is_only_copy(self, state: PartitionState | None) -> bool:
        """Nobody else is known to have what was committed."""
        me = self._core.node_id
        if state is None or me not in state.replicas:
            return False
        if any(each != me for each in (*state.isr, *state.elr)):
            return False
        return me in (*state.isr, *state.elr) or state.replicas == (me,)

    def examine(self, partition: Partition, error: errors.CorruptLog) -> bool:
        """Find the range of what was met; False: this replica is to go offline instead."""
        core, key = self._core, partition.key
        leads = partition.state is ReplicaState.LEADING
        if not leads or not self.is_only_copy(core.publisher.image.partition(key)):
            return False
        if key not in self._looking:
            self._looking[key] = None
            core.spawn(self._look(partition, error))
        return True

    async def _look(self, partition: Partition, error: errors.CorruptLog) -> None:
        offset = int(error.details.get("offset", partition.log.local_log_start))
        found: list[Damage] = []
        try:
            survey = partial(partition.log.survey, offset)
            found = await partition.writer.disk.read(survey)
        except errors.PkError as failure:
            self._core.metrics.refused(failure)
        finally:
            self._looking.pop(partition.key, None)
        if partition.state is not ReplicaState.LEADING:
            return
        if not found:
            self._core.damaged(partition, error)  # N2
            return
        self.report(partition, found)
        partition.bounds_moved(urgent=True)

    def opened(self, partition: Partition) -> None:
        """A log was opened, with damage perhaps; of several copies `settle` has the say."""
        if self.is_only_copy(self._core.publisher.image.partition(partition.key)):
            self.report(partition, partition.log.damage)
            self.look_in_front(partition)

    def report(self, partition: Partition, found: list[Damage]) -> None:
        """Metric and log line of ranges that were not known."""
        for each in found:
            self._core.metrics.damaged_ranges.inc()
            self._core.warn(
                "damaged_range",
                partition=str(partition),
                offset=each.start,
                next_offset=each.end,
                error=each.problem,
                directory=partition.writer.disk.storage.root,
                repair=f"pk log repair {partition.writer.disk.storage.root} {partition}",
            )

    def settle(self, partition: Partition, state: PartitionState) -> None:
        """N3, and for a log that was opened with damage."""
        if not partition.online:
            return
        if self.is_only_copy(state):
            self.look_in_front(partition)
            return
        absent = partition.log.absent
        problem = self.problem_of(partition, [] if absent is None else [absent])
        if problem is not None:
            self._core.damaged(partition, problem)

    def look_in_front(self, partition: Partition) -> None:
        """N4: of the only copy files are missing in front.  Asked again with each report of the
        tier.
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
        self._core.spawn(self._leave(partition, leave_file))
        partition.bounds_moved(urgent=True)

    async def _leave(self, partition: Partition, leave_file: Callable[[], None]) -> None:
        try:
            await partition.writer.disk.write(leave_file)
        except errors.PkError as failure:  # the next start finds the range again
            self._core.metrics.refused(failure)

    def problem_of(
        self, partition: Partition, more: Sequence[Damage] = ()
    ) -> errors.CorruptLog | None:
        """What is damaged of a log that is served."""
        found = [*more, *partition.log.damage]
        if not found:
            return None
        count = "" if len(found) == 1 else f" ({len(found)} ranges in all)"
        told = ranges.corrupt(str(partition), found[0])
        return errors.CorruptLog(told.message + count, **told.details)

    def client_error(self, partition: Partition, error: errors.PkError) -> errors.PkError:
        """`error` of a read, as its reader hears it: while the range is looked for, it waits."""
        if isinstance(error, errors.CorruptLog) and partition.key in self._looking:
            return errors.OffsetNotAvailable(
                f"{partition}: the broker looks for the range that is damaged: {error.message}"
            )
        return partition.client_error(error)


def unreadable(partition: Partition, offset: int) -> bool:
    """Whether `offset` is known to be damaged."""
    return offset != NONE and any(e.start <= offset < e.end for e in partition.log.damage)
