"""What the cluster promises to keep, seen from outside: which replicas were hit, how many at once.

The promise (docs/SEMANTICS.md, replication).  With n replicas the cluster loses no acknowledged
record by
  - any number of process deaths,
  - up to min_insync_replicas − 1 power losses or disk losses at once, if acknowledged records are
    in the page cache only,
  - any number of power losses with `flush_on_ack`.

A replica that lost data is *hit* until it is in the committed ISR again under a registration made
after the hit.  Hits that overlap count as "at once".  One hit too many ends the partition's era
(oracle.py): records acknowledged before may be lost.  An unclean election that the topic allows
also ends the era.

A copy that rotted (rule L9) counts as lost, as with a lost disk, from the moment it rots, even
while no process has noticed the damage.  It is whole again once the damaged bytes are off the disk
and the replica is in the committed ISR.  A broker that is no replica any more has no copy.  If a
reassignment makes it a replica again before its directory is deleted, it has the rotten copy again.

Readers get an error for records that the last copies lost, and the leader does not skip them.  The
partition stays offline until an operator asks for an unclean election (operations.py); `stranded`
names the partitions where this is allowed.  The same happens where one last-known replica is rotten
and the others only lost their power.  They leave ISR and ELR whatever was SYNCED (rule L3), and a
recovery election waits for the answer of every last-known replica, but a rotten one never reports
its log end (rule R3).  With `flush_on_ack` this loses nothing, because every last-known replica has
all acknowledged records.

`min_insync_replicas` copies need not exist yet: a topic that is created while brokers are down has
a smaller ISR and acknowledges nothing.  If every copy that ISR and ELR name is then hit, and one of
them is rotten, the partition also waits for an operator.  No acknowledged record is lost by this,
and the era goes on.  The same holds where the broker of the last whole copy cannot open it, for
want of descriptors for example: this copy leaves the ELR, and readers get DataLoss until it is in
sync again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pk.sim.options import TopicPlan
from pk.sim.oracle import Oracle
from pk.types import NodeId, PartitionKey

#: How long replies of a machine that lost its power can still arrive.
POWER_SETTLES_MS = 400
#: How long replies can still arrive from a leader that was cut off, or stopped, and does not know
#: its successor.
UNCLEAN_SETTLES_MS = 40_000


class PartitionFacts(NamedTuple):
    """One partition as the committed metadata has it."""

    topic: str
    key: PartitionKey
    replicas: tuple[NodeId, ...]
    isr: tuple[NodeId, ...]
    leader: NodeId
    leader_epoch: int
    known: tuple[NodeId, ...]  #: ISR and ELR; the last-known replicas where both are empty


class Registration(NamedTuple):
    """The boot id and directory ids of a broker's registration."""

    boot_id: str
    directory_ids: tuple[str, ...]


@dataclass(slots=True)
class _Hit:
    disk: bool  #: everything is lost, not only what was not SYNCED
    before: Registration | None  #: the registration of the broker at the hit


class LossModel:
    """The lost, damaged and whole copies of every partition; the module says what may be lost."""

    def __init__(
        self, oracle: Oracle, plans: Iterable[TopicPlan], unharmed: Sequence[TopicPlan] = ()
    ) -> None:
        """`unharmed`: further topics, no copy of which rots."""
        self._oracle = oracle
        self._plans = {plan.name: plan for plan in (*plans, *unharmed)}
        self._unharmed = {plan.name for plan in unharmed}
        self._hits: dict[PartitionKey, dict[NodeId, _Hit]] = {}
        #: By replica: functions that return whether each damage is still on the disk.
        self._rotten: dict[PartitionKey, dict[NodeId, list[Callable[[], bool]]]] = {}
        self._once_rotten: dict[tuple[PartitionKey, NodeId], None] = {}
        #: the same of brokers that were replicas when their copy rotted, and are none now
        self._left: dict[tuple[PartitionKey, NodeId], list[Callable[[], bool]]] = {}
        #: where a rotten copy keeps the other replicas from leading
        self.stranded: dict[PartitionKey, None] = {}
        #: the stranded partitions that may lose acknowledged records
        self._at_risk: dict[PartitionKey, None] = {}
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
        """Note that `broker` lost its power or its disk; end eras that lost too many copies."""
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

    def add_unharmed(self, plan: TopicPlan) -> None:
        """Take up a topic that the cluster made by itself, and no copy of which rots."""
        self._plans.setdefault(plan.name, plan)
        self._unharmed.add(plan.name)

    def copies(self, topic: str) -> int:
        """Return how many replicas hold an acknowledged record at least; 0 = unknown topic."""
        plan = self._plans.get(topic)
        return 0 if plan is None else min(plan.copies, self._oracle.weak.get(topic, plan.copies))

    def flushed(self, topic: str) -> bool:
        """Return whether every acknowledged record was SYNCED."""
        plan = self._plans.get(topic)
        return plan is not None and plan.flushed and topic not in self._oracle.weak

    def _weakened(self, topic: str) -> None:
        """End the eras for which too few copies are left after durability was lowered."""
        plan = self._plans[topic]
        for key in list({**self._hits, **self._rotten}):
            lost = self._lost(key, plan)
            mine = key.topic_id == self._oracle.topics[topic].topic_id
            if mine:
                self._strands(key, plan)
            if mine and lost and len(lost) >= self.copies(topic):
                self._costs(key, self._oracle.now_ms())

    def _lost(self, key: PartitionKey, plan: TopicPlan) -> set[NodeId]:
        """Return the replicas that may lack acknowledged records."""
        hits = self._hits.get(key, {})
        flushed = self.flushed(plan.name)
        gone = {broker for broker, each in hits.items() if each.disk or not flushed}
        return gone | set(self._rotten.get(key, ()))

    def may_rot(self, facts: PartitionFacts, broker: NodeId) -> bool:
        """Return whether the promise still holds, or permits the loss, if this copy rots too."""
        plan = self._plans.get(facts.topic)
        if plan is None or plan.name in self._unharmed:
            return False
        left = min(len(facts.replicas), plan.replication_factor)  # once the reassignment is over
        if left < 2:
            return False  # an only copy that rots would stay offline without end
        lost = self._lost(facts.key, plan) | {broker}
        kept = len(lost) < self.copies(plan.name)
        return kept or (plan.unclean and len(lost) < left)

    def rotted(
        self, facts: PartitionFacts, broker: NodeId, there: Callable[[], bool], now_ms: float
    ) -> None:
        """Note that the copy of `broker` is damaged as long as `there()` is true."""
        self._oracle.rotten[facts.key] = self._once_rotten[facts.key, broker] = None
        self._counts_as_lost(facts, broker, [there], now_ms)

    def _counts_as_lost(
        self,
        facts: PartitionFacts,
        broker: NodeId,
        damage: list[Callable[[], bool]],
        now_ms: float,
    ) -> None:
        self._rotten.setdefault(facts.key, {}).setdefault(broker, []).extend(damage)
        plan = self._plans[facts.topic]
        self._strands(facts.key, plan)
        self._strands_known(facts)
        if len(self._lost(facts.key, plan)) >= self.copies(plan.name):
            self._costs(facts.key, now_ms)

    def rotted_file(self, path: str) -> None:
        """Note that a data file of a table is damaged for a while."""
        self._oracle.rotten_files[path] = None

    def made_anew(self, key: PartitionKey, broker: NodeId) -> None:
        """Count a copy as rotten again if it was ever damaged and its broker begins it again.

        Retention may have removed the damage already, but the broker that met it still replaces the
        copy.
        """
        if (key, broker) in self._once_rotten:
            self._rotten.setdefault(key, {}).setdefault(broker, [])

    def is_hit(self, key: PartitionKey, broker: NodeId) -> bool:
        """Return whether this replica may lack records that it had."""
        return broker in self._hits.get(key, ()) or self.is_rotten(key, broker)

    def is_rotten(self, key: PartitionKey, broker: NodeId) -> bool:
        """Return whether this copy is damaged, or was damaged and is not whole again."""
        return broker in self._rotten.get(key, ())

    def was_rotten(self, key: PartitionKey, broker: NodeId) -> bool:
        """Return whether this copy was ever damaged."""
        return (key, broker) in self._once_rotten

    @property
    def rotting(self) -> list[PartitionKey]:
        """The partitions that have a damaged copy."""
        return list(self._rotten)

    def seen(self, facts: PartitionFacts, brokers: dict[NodeId, Registration]) -> None:
        """Take the committed metadata of a partition: its in-sync replicas may be whole again."""
        rotten = self._rotten.get(facts.key, {})
        for broker, damage in list(rotten.items()):
            if broker not in facts.replicas:
                self._left[facts.key, broker] = rotten.pop(broker)
            elif broker in facts.isr and not any(there() for there in damage):
                del rotten[broker]
        if not rotten:
            self._rotten.pop(facts.key, None)
        elif facts.isr:  # the last whole copy may have left the ELR: its broker cannot open it
            self._strands_known(facts)
        for broker in facts.replicas if self._left else ():
            damage = self._left.pop((facts.key, broker), [])
            if any(there() for there in damage):
                self._counts_as_lost(facts, broker, damage, self._oracle.now_ms())
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
        """End the era if the elected leader may lack acknowledged records.

        `last_known` are the last-known replicas before the election.
        """
        plan = self._plans.get(facts.topic)
        if plan is None:
            return
        leader, lost = facts.leader, self._lost(facts.key, plan)
        whole = self.flushed(facts.topic) and leader in last_known and leader not in lost
        if plan.unclean or (facts.key in self._at_risk and not whole):
            self._ends(facts.key, now_ms + UNCLEAN_SETTLES_MS)

    def _strands(self, key: PartitionKey, plan: TopicPlan) -> None:
        """Mark the partition stranded and at risk if a copy is rotten and ISR, ELR may be empty."""
        rotten = self._rotten.get(key)
        if rotten and len({*rotten, *self._hits.get(key, ())}) >= self.copies(plan.name):
            self.stranded[key] = self._oracle.stranded[key] = self._at_risk[key] = None

    def _strands_known(self, facts: PartitionFacts) -> None:
        """Mark the partition as stranded if every copy of ISR and ELR was hit and one is rotten."""
        rotten = self._rotten.get(facts.key, {})
        hits = {*rotten, *self._hits.get(facts.key, ())}
        if rotten.keys() & set(facts.known) and hits >= set(facts.known):
            self.stranded[facts.key] = self._oracle.stranded[facts.key] = None

    def _costs(self, key: PartitionKey, now_ms: float) -> None:
        """End the era of a partition that has lost too many copies at once."""
        self._ends(key, now_ms + POWER_SETTLES_MS)

    def _ends(self, key: PartitionKey, settled_ms: float) -> None:
        self.eras += 1
        self._oracle.era_ends(key.topic_id, key.partition, settled_ms)
