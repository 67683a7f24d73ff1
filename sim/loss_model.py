"""What the cluster promises to keep, from the outside: which replicas were hit, and how many at
once.

The promise (docs/SEMANTICS.md, replication): with n replicas no acknowledged record is lost by any
number of process deaths, by up to min_insync_replicas − 1 power losses or disk losses at once with
acknowledgements from the page cache, by any number of power losses with `flush_on_ack`.

A replica that lost data is *hit* until it is in the committed ISR again under a registration made
since; hits that overlap are "at once".  One hit too many ends the partition's era (oracle.py): what
was acknowledged before may be gone.  An unclean election that the topic allows does the same.

A copy that rotted (rule L9) is a lost one like that of a lost disk, from the moment it rots: nobody
may know yet.  It is whole again once the damaged bytes are off the disk and the replica is in the
committed ISR.  What the last copies lost is told and not skipped, so that the partition stays
offline until somebody asks for an unclean election (operator.py): `stranded` says where that is
allowed.  It is so too where a rotten copy is one of the last known and the others only lost their
power: whatever was SYNCED they leave ISR and ELR (rule L3), and a recovery election hears every
last-known replica, but a rotten one never says how far it is (rule R3).  With `flush_on_ack` that
costs nothing: whoever of the last known is elected has everything.

`min_insync_replicas` copies need not exist yet: a topic that is created while brokers are away has
a smaller ISR, and acknowledges nothing.  If every copy that ISR and ELR know is hit then, a rotten
one among them, the partition waits for an operator as well.  Nothing that was acknowledged is lost
by that, so that the era goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
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
    known: tuple[NodeId, ...]  #: ISR and ELR, or the last known where both are empty


class Registration(NamedTuple):
    """What a broker said of itself when it registered."""

    boot_id: str
    directory_ids: tuple[str, ...]


@dataclass(slots=True)
class _Hit:
    disk: bool  #: all is gone, not only what was not SYNCED
    before: Registration | None  #: the one it had then


class LossModel:
    """See the module."""

    def __init__(self, oracle: Oracle, plans: Iterable[TopicPlan]) -> None:
        self._oracle = oracle
        self._plans = {plan.name: plan for plan in plans}
        self._hits: dict[PartitionKey, dict[NodeId, _Hit]] = {}
        #: By replica: what tells whether each damage is still on its disk.
        self._rotten: dict[PartitionKey, dict[NodeId, list[Callable[[], bool]]]] = {}
        self._once_rotten: dict[tuple[PartitionKey, NodeId], None] = {}
        self.stranded: dict[PartitionKey, None] = {}  #: a rotten copy keeps the rest from leading
        self._at_risk: dict[PartitionKey, None] = {}  #: where that may cost what was acknowledged
        self.eras = 0
        oracle.on_weakened = self._weakened

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
            self._strands(facts.key, plan)
            self._strands_known(facts)
            lost = len(self._lost(facts.key, plan)) >= self.copies(facts.topic)
            if lost and (disk or not self.flushed(facts.topic)):
                self._costs(facts.key, now_ms)

    def copies(self, topic: str) -> int:
        """How many replicas hold what was acknowledged, at least; 0 = no topic of the run."""
        plan = self._plans.get(topic)
        return 0 if plan is None else min(plan.copies, self._oracle.weak.get(topic, plan.copies))

    def flushed(self, topic: str) -> bool:
        """Whether all that was acknowledged was SYNCED."""
        plan = self._plans.get(topic)
        return plan is not None and plan.flushed and topic not in self._oracle.weak

    def _weakened(self, topic: str) -> None:
        """Copies that were enough for what was asked before may not be for what is asked now."""
        plan = self._plans[topic]
        for key in list({**self._hits, **self._rotten}):
            lost = self._lost(key, plan)
            mine = key.topic_id == self._oracle.topics[topic].topic_id
            if mine:
                self._strands(key, plan)
            if mine and lost and len(lost) >= self.copies(topic):
                self._costs(key, self._oracle.now_ms())

    def _lost(self, key: PartitionKey, plan: TopicPlan) -> set[NodeId]:
        """The replicas that may lack what was acknowledged."""
        hits = self._hits.get(key, {})
        flushed = self.flushed(plan.name)
        gone = {broker for broker, each in hits.items() if each.disk or not flushed}
        return gone | set(self._rotten.get(key, ()))

    def may_rot(self, facts: PartitionFacts, broker: NodeId) -> bool:
        """Whether the promise stands, or permits the loss, if this copy rots too."""
        plan = self._plans.get(facts.topic)
        if plan is None:
            return False
        left = min(len(facts.replicas), plan.replication_factor)  # when a move that goes on is over
        if left < 2:
            return False  # an only copy stays offline for ever
        lost = self._lost(facts.key, plan) | {broker}
        kept = len(lost) < self.copies(plan.name)
        return kept or (plan.unclean and len(lost) < left)

    def rotted(
        self, facts: PartitionFacts, broker: NodeId, there: Callable[[], bool], now_ms: float
    ) -> None:
        """The copy of `broker` is damaged as long as `there`."""
        self._rotten.setdefault(facts.key, {}).setdefault(broker, []).append(there)
        self._oracle.rotten[facts.key] = self._once_rotten[facts.key, broker] = None
        plan = self._plans[facts.topic]
        self._strands(facts.key, plan)
        self._strands_known(facts)
        if len(self._lost(facts.key, plan)) >= self.copies(plan.name):
            self._costs(facts.key, now_ms)

    def rotted_file(self, path: str) -> None:
        """A data file of a table is damaged for a while."""
        self._oracle.rotten_files[path] = None

    def made_anew(self, key: PartitionKey, broker: NodeId) -> None:
        """A copy that was damaged once is set aside: retention may have taken the damage before,
        but whoever met it goes on to make the copy anew.
        """
        if (key, broker) in self._once_rotten:
            self._rotten.setdefault(key, {}).setdefault(broker, [])

    def is_hit(self, key: PartitionKey, broker: NodeId) -> bool:
        """Whether this replica may lack what it had."""
        return broker in self._hits.get(key, ()) or self.is_rotten(key, broker)

    def is_rotten(self, key: PartitionKey, broker: NodeId) -> bool:
        """Whether this copy is damaged, or was and is not whole again."""
        return broker in self._rotten.get(key, ())

    def was_rotten(self, key: PartitionKey, broker: NodeId) -> bool:
        """Whether this copy was ever damaged."""
        return (key, broker) in self._once_rotten

    @property
    def rotting(self) -> list[PartitionKey]:
        """Partitions with a damaged copy."""
        return list(self._rotten)

    def seen(self, facts: PartitionFacts, brokers: dict[NodeId, Registration]) -> None:
        """The committed metadata of a partition: whoever is in sync again is whole."""
        rotten = self._rotten.get(facts.key, {})
        for broker, damage in list(rotten.items()):
            gone = broker in facts.isr and not any(there() for there in damage)
            if gone or broker not in facts.replicas:
                del rotten[broker]
        if not rotten:
            self._rotten.pop(facts.key, None)
        hits = self._hits.get(facts.key)
        if not hits:
            return
        for broker, hit in list(hits.items()):
            back = brokers.get(broker)
            known = back is not None and back != hit.before
            if broker not in facts.replicas or (known and broker in facts.isr):
                del hits[broker]

    def elected_uncleanly(
        self, facts: PartitionFacts, last_known: Container[NodeId], now_ms: float
    ) -> None:
        """The partition has a leader that may lack acknowledged records; `last_known`: before."""
        plan = self._plans.get(facts.topic)
        if plan is None:
            return
        leader, lost = facts.leader, self._lost(facts.key, plan)
        whole = self.flushed(facts.topic) and leader in last_known and leader not in lost
        if plan.unclean or (facts.key in self._at_risk and not whole):
            self._ends(facts.key, now_ms + UNCLEAN_SETTLES_MS)

    def _strands(self, key: PartitionKey, plan: TopicPlan) -> None:
        """So many copies were hit that ISR and ELR may be empty, and one of them is rotten."""
        rotten = self._rotten.get(key)
        if rotten and len({*rotten, *self._hits.get(key, ())}) >= self.copies(plan.name):
            self.stranded[key] = self._oracle.stranded[key] = self._at_risk[key] = None

    def _strands_known(self, facts: PartitionFacts) -> None:
        """Every copy that ISR and ELR know was hit, and one of them is rotten."""
        rotten = self._rotten.get(facts.key, {})
        hits = {*rotten, *self._hits.get(facts.key, ())}
        if rotten.keys() & set(facts.known) and hits >= set(facts.known):
            self.stranded[facts.key] = self._oracle.stranded[facts.key] = None

    def _costs(self, key: PartitionKey, now_ms: float) -> None:
        """Too many copies are lost at once."""
        self._ends(key, now_ms + POWER_SETTLES_MS)

    def _ends(self, key: PartitionKey, settled_ms: float) -> None:
        self.eras += 1
        self._oracle.era_ends(key.topic_id, key.partition, settled_ms)
