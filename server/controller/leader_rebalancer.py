"""When leaders that give up the lead hand it over, and when it comes back (rule L16).

Sans-IO, soft state of one term.  A broker says in heartbeats why its replicas should not lead
(`reports.Unfit`): its disk is full, say.  The reasons are no part of this module: a further one
needs another `Unfit` in the report of a broker, whoever puts it there.  The decision itself stands
in `PartitionChangeBuilder.hand_over`; here is which partitions are worth one.

A leader that gives up keeps the lead while no other replica may take it (`Cluster.taker`).  The
preferred leader comes back by `Prefer`, which asks whether it is fit.

Invariants
  H1  this module moves a partition at most once in DWELL_MS, the way back included: two brokers
      that fill up in turn do not pass the lead back and forth
  H2  partitions are looked at when there is news of a broker, and while some broker gives up, after
      waits of RETRY_MS to RETRY_MAX_MS: nothing is O(partitions) at every tick (rule P6)
  H3  what is remembered is bounded by the partitions there are
"""

from __future__ import annotations

from collections.abc import Iterable

from pk.backoff import Backoff
from pk.server.controller.elections import Cluster
from pk.server.controller.leaders import MOVES_MAX
from pk.server.controller.reports import Report, Reports
from pk.server.metadata.image import MetadataImage
from pk.types import NONE, NodeId, PartitionKey

#: Between two moves of one partition.
DWELL_MS = 60_000
#: A leader that gives up, and whose lead nobody could take, is looked at again after this.
RETRY_MS = 1_000
RETRY_MAX_MS = 5_000
assert RETRY_MAX_MS < DWELL_MS

#: Broker and reason → partitions that it gives up and that another replica may lead.
Wanted = dict[tuple[NodeId, str], list[PartitionKey]]


class LeaderRebalancer:
    """See the module.  Times are the controller's monotonic clock."""

    def __init__(self) -> None:
        self._moved_ms: dict[PartitionKey, int] = {}  #: the last move of each (H1)
        self._away: dict[PartitionKey, None] = {}  #: handed over, and not led by the first since
        self._due_ms: int | None = None  #: when to look again; None: nobody gives up
        self._vain = Backoff((2 * RETRY_MS, RETRY_MAX_MS))  #: looks that found nothing

    def heard(self, before: Report | None, now: Report) -> bool:
        """A broker was heard.  True if what it says of its fitness is news."""
        changed = now.unfit != (() if before is None else before.unfit)
        if changed or (before is None and self._due_ms is not None):
            self._due_ms = 0
            self._vain.reset()
        return changed

    def wanted(self, image: MetadataImage, reports: Reports, now_ms: int) -> Wanted:
        """What to hand over now, at most MOVES_MAX partitions."""
        if self._due_ms is None or now_ms < self._due_ms:
            return {}
        cluster, found, count = Cluster(image, reports), Wanted(), 0
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
        """Other replicas lead these from now on."""
        self._forget(now_ms)
        self._away = {key: None for key in self._away if image.partition(key) is not None}  # H3
        for key in keys:
            self._moved(key, now_ms)
            self._away[key] = None

    def _moved(self, key: PartitionKey, now_ms: int) -> None:
        self._moved_ms.pop(key, None)
        self._moved_ms[key] = now_ms  # behind all others: in order of time

    def rests(self, key: PartitionKey, now_ms: int) -> bool:
        """H1: it was moved just now."""
        at_ms = self._moved_ms.get(key)
        return at_ms is not None and now_ms - at_ms < DWELL_MS

    def rest_ends_ms(self, now_ms: int) -> int | None:
        """When the first of those that rest may move again; None = none does."""
        self._forget(now_ms)
        return None if not self._moved_ms else next(iter(self._moved_ms.values())) + DWELL_MS

    def came_back(self, image: MetadataImage, keys: Iterable[PartitionKey], now_ms: int) -> None:
        """Preferred leaders were elected for `keys`, where they could be: those rest again."""
        self._forget(now_ms)
        for key in keys:
            state = image.partition(key)
            if key in self._away and (state is None or state.leader == state.replicas[0]):
                del self._away[key]
                self._moved(key, now_ms)

    def _forget(self, now_ms: int) -> None:
        """H3."""
        while self._moved_ms:
            key = next(iter(self._moved_ms))
            if self.rests(key, now_ms):
                break
            del self._moved_ms[key]


def _gives_up(report: Report | None) -> bool:
    return report is not None and any(each.gives_up for each in report.unfit)
