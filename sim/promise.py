"""What the cluster promises to keep, from the outside: which replicas were hit, and how many at
once.

The promise (docs/SEMANTICS.md, replication): with n replicas no acknowledged record is lost by any
number of process deaths, by up to min_insync_replicas − 1 power losses or disk losses at once with
acknowledgements from the page cache, by any number of power losses with `flush_on_ack`.

A replica that lost data is *hit* until it is in the committed ISR again under a registration made
since; hits that overlap are "at once".  One hit too many ends the partition's era (oracle.py): what
was acknowledged before may be gone.  An unclean election that the topic allows does the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pk.sim.options import TopicPlan
from pk.sim.oracle import Oracle
from pk.types import NodeId, PartitionKey

#: How long replies of a machine that lost its power can be on their way.
POWER_SETTLES_MS = 400
#: The same of a leader that was cut off, or stopped, and knows nothing of its successor.
UNCLEAN_SETTLES_MS = 40_000


class PartitionFacts(NamedTuple):
    """One partition as the committed metadata has it."""

    topic: str
    key: PartitionKey
    replicas: tuple[NodeId, ...]
    isr: tuple[NodeId, ...]
    leader: NodeId
    leader_epoch: int


class Registration(NamedTuple):
    """What a broker said of itself when it registered."""

    boot_id: str
    directory_ids: tuple[str, ...]


@dataclass(slots=True)
class _Hit:
    disk: bool  #: all is gone, not only what was not SYNCED
    before: Registration | None  #: the one it had then


class Promise:
    """See the module."""

    def __init__(self, oracle: Oracle, plans: Iterable[TopicPlan]) -> None:
        self._oracle = oracle
        self._plans = {plan.name: plan for plan in plans}
        self._hits: dict[PartitionKey, dict[NodeId, _Hit]] = {}
        self.eras = 0

    def hit(
        self,
        broker: NodeId,
        *,
        disk: bool,
        partitions: Iterable[PartitionFacts],
        registered: Registration | None,
        now_ms: float,
    ) -> None:
        """`broker` lost its power or its disk."""
        for facts in partitions:
            plan = self._plans.get(facts.topic)
            if plan is None or broker not in facts.replicas:
                continue
            hits = self._hits.setdefault(facts.key, {})
            before = hits.get(broker)
            hits[broker] = _Hit(disk or (before is not None and before.disk), registered)
            counted = sum(each.disk or not plan.flushed for each in hits.values())
            if counted >= plan.copies and (disk or not plan.flushed):
                self._ends(facts.key, now_ms + POWER_SETTLES_MS)

    def is_hit(self, key: PartitionKey, broker: NodeId) -> bool:
        """Whether this replica may lack what it had."""
        return broker in self._hits.get(key, ())

    def seen(self, facts: PartitionFacts, brokers: dict[NodeId, Registration]) -> None:
        """The committed metadata of a partition: whoever is in sync again is whole."""
        hits = self._hits.get(facts.key)
        if not hits:
            return
        for broker, hit in list(hits.items()):
            back = brokers.get(broker)
            known = back is not None and back != hit.before
            if broker not in facts.replicas or (known and broker in facts.isr):
                del hits[broker]

    def elected_uncleanly(self, facts: PartitionFacts, now_ms: float) -> None:
        """The partition has a leader that may lack acknowledged records."""
        plan = self._plans.get(facts.topic)
        if plan is not None and plan.unclean:
            self._ends(facts.key, now_ms + UNCLEAN_SETTLES_MS)

    def _ends(self, key: PartitionKey, settled_ms: float) -> None:
        self.eras += 1
        self._oracle.era_ends(key.topic_id, key.partition, settled_ms)
