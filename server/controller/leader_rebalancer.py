"""Decides when leadership moves away from leaders that give it up, and when it moves back (L16).

Sans-IO; soft state of one term.  A broker reports in heartbeats why its replicas should not lead
(`reports.Unfit`), for example because its disk is full.  This module does not know the reasons: a
new reason only needs another `Unfit` in the report.  `PartitionChangeBuilder.hand_over` takes the
decision for one partition.  This module chooses the partitions to decide about.

A leader that gives up keeps the lead while no other replica may take it
(`LeaderEligibility.taker`).  The command `Prefer` moves the lead back once the preferred leader is
fit.

Invariants
  H1  This module moves a partition at most once in DWELL_MS, moves back included.  So two brokers
      whose disks fill up in turn do not pass the lead back and forth.
  H2  Partitions are examined when a broker reports something new.  While some broker gives up, they
      are examined again after waits of RETRY_MS to RETRY_MAX_MS.  No tick costs O(partitions)
      (rule P6).
  H3  The memory is bounded by the number of partitions.
"""

from __future__ import annotations

from collections.abc import Iterable

from pk.backoff import Backoff
from pk.server.controller.elections import LeaderEligibility
from pk.server.controller.leaders import MOVES_MAX
from pk.server.controller.reports import Report, Reports
from pk.server.metadata.image import MetadataImage
from pk.types import NONE, NodeId, PartitionKey

#: Least time between two moves of one partition.
DWELL_MS = 60_000
#: Wait before a leader that gives up is examined again, if no replica could take the lead.
RETRY_MS = 1_000
RETRY_MAX_MS = 5_000
assert RETRY_MAX_MS < DWELL_MS

#: (broker, reason) → the partitions whose leadership the broker gives up and another may take.
Wanted = dict[tuple[NodeId, str], list[PartitionKey]]


class LeaderRebalancer:
    """Chooses the leaderships to move.  Times are of the controller's monotonic clock."""

    def __init__(self) -> None:
        self._moved_ms: dict[PartitionKey, int] = {}  #: time of each partition's last move (H1)
        #: partitions that were moved and that the preferred leader does not lead yet
        self._away: dict[PartitionKey, None] = {}
        self._due_ms: int | None = None  #: when to look again; None: no broker has to give up
        #: the wait after an examination that moved no leadership
        self._vain = Backoff((2 * RETRY_MS, RETRY_MAX_MS))

    def report_changed(self, before: Report | None, now: Report) -> bool:
        """Note the report of a broker.  Returns whether its fitness changed."""
        changed = now.unfit != (() if before is None else before.unfit)
        if changed or (before is None and self._due_ms is not None):
            self._due_ms = 0
            self._vain.reset()
        return changed

    def wanted(self, image: MetadataImage, reports: Reports, now_ms: int) -> Wanted:
        """Return the leaderships to move now, at most MOVES_MAX."""
        if self._due_ms is None or now_ms < self._due_ms:
            return {}
        cluster, found, count = LeaderEligibility(image, reports), Wanted(), 0
        givers = [who for who in sorted(reports) if _gives_up(cluster.report(who))]
        for who in givers:
            report = cluster.report(who)
            assert report is not None
            for topic, number, state in image.partitions_of(who):
                key = PartitionKey(topic.topic_id, number)
                reason = report.gives_up(key) if state.leader == who else ""
                if not reason or self.rests(key, now_ms) or cluster.taker(state, key) == NONE:
                    continue
                found.setdefault((who, reason), []).append(key)
                count += 1
                if count == MOVES_MAX:
                    self._due_ms = now_ms  # the others at the next tick
                    return found
        if found:
            self._vain.reset()
        wait_ms = RETRY_MS if found else int(self._vain.next_ms())
        self._due_ms = now_ms + wait_ms if givers else None
        return found

    def handed_over(self, image: MetadataImage, keys: Iterable[PartitionKey], now_ms: int) -> None:
        """Note the partitions that another replica leads now."""
        self._forget(now_ms)
        self._away = {key: None for key in self._away if image.partition(key) is not None}  # H3
        for key in keys:
            self._moved(key, now_ms)
            self._away[key] = None

    def _moved(self, key: PartitionKey, now_ms: int) -> None:
        self._moved_ms.pop(key, None)
        self._moved_ms[key] = now_ms  # at the end, so the entries are ordered by time

    def rests(self, key: PartitionKey, now_ms: int) -> bool:
        """Whether the last move of this partition is less than DWELL_MS ago (H1)."""
        at_ms = self._moved_ms.get(key)
        return at_ms is not None and now_ms - at_ms < DWELL_MS

    def rest_ends_ms(self, now_ms: int) -> int | None:
        """When the first resting partition may move again; None if none rests."""
        self._forget(now_ms)
        return None if not self._moved_ms else next(iter(self._moved_ms.values())) + DWELL_MS

    def came_back(self, image: MetadataImage, keys: Iterable[PartitionKey], now_ms: int) -> None:
        """Note that preferred leaders were elected for `keys`; the moved partitions rest again."""
        self._forget(now_ms)
        for key in keys:
            state = image.partition(key)
            if key in self._away and (state is None or state.leader == state.replicas[0]):
                del self._away[key]
                self._moved(key, now_ms)

    def _forget(self, now_ms: int) -> None:
        """Forget moves that are at least DWELL_MS old (H3)."""
        while self._moved_ms:
            key = next(iter(self._moved_ms))
            if self.rests(key, now_ms):
                break
            del self._moved_ms[key]


def _gives_up(report: Report | None) -> bool:
    return report is not None and any(each.gives_up for each in report.unfit)
