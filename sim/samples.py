"""Takes samples of the running processes and passes them to the checkers.

After every event of a controller or broker the observer looks at that process: it samples and
checks at once what changed (architecture, section 5).  So it also sees a state that lasts for one
event only.  What other parties change (tables, the committed metadata) it checks every tick.

Checked
  V15  A broker uses an epoch only once its registration is committed (rule Q3).
  V17  A broker has a leader machine exactly for the partitions whose replica is LEADING, and
       fetches exactly those that are FOLLOWING.  The state of an open log is the current state of
       its partition (replica/state H1, H3).

The observer keeps the committed metadata records of the whole run, as the first controller to
commit each of them had it.  `image` is the metadata image of these records; every other image is
compared with it (V11).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from pk import errors
from pk.log import batch as batches
from pk.log.partition_log import PartitionLog
from pk.server.broker.core import BrokerCore
from pk.server.broker.node import BrokerNode
from pk.server.controller.node import ControllerNode
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import decode_batches
from pk.server.raft.machine import Role
from pk.server.replica.partition import Partition
from pk.server.replica.state import OPEN, ReplicaState
from pk.sim.checkers import Invariants, PartitionSample, require
from pk.sim.cluster import SimCluster
from pk.sim.cluster_checkers import Mark, QuorumCheck, QuorumSample, ReplicaCheck, ReplicaSample
from pk.sim.disk import observing
from pk.sim.loss_model import LossModel, PartitionFacts, Registration
from pk.sim.machine import SimMachine
from pk.sim.move_check import check_move
from pk.sim.options import BROKER, CONTROLLER, TopicPlan
from pk.sim.oracle import Oracle
from pk.topic_names import is_internal
from pk.types import NONE, NodeId, PartitionKey

READ_BYTES = 1 << 22

#: A change of any of these needs a sample: leader and replica machines, HW, log end, log start,
#: segments, segments that a swap replaces.
_Signature = tuple[Any, Any, int, int, int, Any, Any]


class Observer:
    """Watches all processes of a cluster and runs the checkers on their samples."""

    def __init__(self, cluster: SimCluster, oracle: Oracle, counts: dict[str, int]) -> None:
        self.cluster = cluster
        self._world = cluster.world
        self._oracle = oracle
        self._counts = counts
        self._internal_default = (
            {"flush_on_ack": "true"} if cluster.options.internal_flushed else {}
        )
        options = cluster.options
        unharmed = (*options.transaction_topics, *options.compacted_topics)
        self.losses = LossModel(oracle, options.topics, unharmed)
        self._cleaned: dict[PartitionKey, int] = {}  #: the largest cleaned end of any replica
        cluster.listeners["replica_made_anew"] = self._made_anew
        cluster.listeners["log_begun_anew"] = self._begun_anew
        cluster.listeners["partition_offline"] = self._offline
        self._begun: dict[tuple[NodeId, str], None] = {}  #: replicas that began their log again
        self.invariants = Invariants(oracle)
        self.quorum = QuorumCheck()
        self.replicas = ReplicaCheck(oracle)
        self.image = MetadataImage()  #: image of the committed records
        self.latest: dict[PartitionKey, PartitionSample] = {}  #: last sample of the leader
        self.highest: dict[PartitionKey, int] = {}  #: the largest high watermark of any leader
        self._records: list[tuple[int, Any]] = []
        #: The image of the first `_replayed_count` records: those that every image had last time.
        self._replayed, self._replayed_count = MetadataImage(), 0
        self._registrations: dict[int, NodeId] = {}  # committed broker epoch → broker
        self._ends: dict[tuple[PartitionKey, NodeId], int] = {}
        # end of the committed metadata already checked, by controller
        self._read: dict[NodeId, int] = {}
        self._changed: dict[PartitionKey, None] = {}
        #: By controller: a function that returns whether its metadata is still damaged.
        self.metadata_rot: dict[NodeId, Callable[[], bool]] = {}
        cluster.on_controller = self._watch_controller
        cluster.on_broker = self._watch_broker

    def _count(self, name: str, by: int = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + by

    def _now_ms(self) -> float:
        return self._world.loop.now_us / 1000

    # -- controllers -------------------------------------------------------------------------------

    def _watch_controller(self, machine: SimMachine, node: ControllerNode) -> None:
        sim_node = machine.sim_node(CONTROLLER)
        assert sim_node is not None
        life, quorum, metadata = sim_node.incarnation, node.metadata.quorum, node.metadata
        if not self._damaged(machine.node_id):  # damaged metadata is not read again
            self._read.pop(machine.node_id, None)
        last: list[tuple[Any, ...]] = [()]

        def after() -> None:
            log = metadata._log
            if log is None or not quorum._started:
                return
            granted = len(quorum._granted)
            now = (quorum.role, quorum.epoch, quorum.high_watermark, log.synced_end, granted)
            if now == last[0]:
                return
            last[0] = now
            standing = quorum.role in (Role.CANDIDATE, Role.LEADER)
            self.quorum.check(
                QuorumSample(
                    node=machine.node_id,
                    life=life,
                    leads=quorum.role is Role.LEADER,
                    epoch=quorum.epoch,
                    high_watermark=quorum.high_watermark,
                    synced_end=log.synced_end,
                    voters=tuple(voter.node_id for voter in quorum.voters),
                    granted=tuple(v.node_id for v in quorum._granted) if standing else (),
                )
            )
            self._committed(machine.node_id, log, quorum.high_watermark)

        sim_node.after = after

    def metadata_hit(self, machine: SimMachine) -> None:
        """Forget a controller that is about to lose its disk."""
        self.quorum.forget(machine.node_id)
        self._read.pop(machine.node_id, None)
        self.metadata_rot.pop(machine.node_id, None)

    def _damaged(self, node: NodeId) -> bool:
        there = self.metadata_rot.get(node)
        return there is not None and there()

    def committed_by(self, node: NodeId) -> int:
        """Return up to which offset the committed metadata of a controller was checked."""
        return self._read.get(node, 0)

    def _committed(self, node: NodeId, log: PartitionLog, high_watermark: int) -> None:
        """Check and apply what a controller has committed since the last check."""
        at = max(self._read.get(node, 0), log.local_log_start)
        while at < high_watermark:
            try:
                with observing():
                    found = log.read(at, bound=high_watermark, max_bytes=READ_BYTES)
            except errors.CorruptLog:
                if self._damaged(node):
                    return  # the controller will find the damage itself
                raise
            if not found.data:
                break
            fresh = self.quorum.committed(node, list(_marks(found.data)))
            if fresh:
                for offset, record in decode_batches(found.data, fresh[0].base):
                    self._apply(offset, record)
            at = found.next_offset
        self._read[node] = at

    def _apply(self, offset: int, record: Any) -> None:
        kind = record.WhichOneof("record")
        before = None
        if kind == "partition_change":
            change = record.partition_change
            key = PartitionKey(change.topic_id, change.partition)
            before = self.image.partition(key)
        self._records.append((offset, record))
        self.image.apply(offset, record)
        self.image.check()
        if kind == "partition_change":
            self._partition_changed(key, before)
            now, unclean = self.image.partition(key), record.partition_change.elected_uncleanly
            check_move(key, before, now, self._min_isr(key), unclean=unclean)
        elif kind == "partition":
            self._internal(record.partition)
            self._changed[PartitionKey(record.partition.topic_id, record.partition.partition)] = (
                None
            )
        elif kind == "leader_change":
            self._count("quorum elections")
        elif kind == "register_broker":
            self._registrations[offset] = record.register_broker.broker_id

    def _internal(self, record: Any) -> None:
        """Let the loss model know a topic of pk's own, with the replicas that it begins with."""
        topic = self.image.topics[record.topic_id]
        if is_internal(topic.name):
            configs = {
                **self._internal_default,
                **self.image.configs.get(("topic", topic.name), {}),
            }
            plan = TopicPlan(topic.name, 1, configs, len(record.replicas))
            self.losses.add_unharmed(plan)

    def _min_isr(self, key: PartitionKey) -> int:
        """Return min_insync_replicas of a partition, from the committed records."""
        configs, topic = self.image.configs, self.image.topics[key.topic_id]
        for resource in (("topic", topic.name), ("broker", "")):
            value = configs.get(resource, {}).get("min_insync_replicas")
            if value is not None:
                return int(value)
        return 1

    def _partition_changed(self, key: PartitionKey, before: Any) -> None:
        """Count the decision of the controller, and note an election that may lose records."""
        now = self.image.partition(key)
        if before is not None and now is not None:
            for gone in [each for each in before.replicas if each not in now.replicas]:
                self.replicas.moved_away(gone, key)
        assert now is not None
        self._changed[key] = None
        if len(now.isr) < len(before.isr):
            self._count("ISR shrink")
        elif len(now.isr) > len(before.isr):
            self._count("ISR expand")
        if now.leader == NONE:
            self._count("leaderless")
        elif now.leader_epoch > before.leader_epoch:
            if now.unclean and (before.leader == NONE or not before.unclean):
                self._count("elections unclean")
                facts = self._facts(key)
                if facts is not None:
                    self.losses.elected_uncleanly(facts, before.last_known, self._now_ms())
            elif before.leader == NONE and now.leader in before.elr:
                self._count("elections from the ELR")
            else:
                self._count("elections clean")

    def _facts(self, key: PartitionKey) -> PartitionFacts | None:
        topic, state = self.image.topics.get(key.topic_id), self.image.partition(key)
        if topic is None or state is None:
            return None
        known = (*state.isr, *state.elr) or state.last_known
        return PartitionFacts(
            topic.name, key, state.replicas, state.isr, state.leader, state.leader_epoch, known
        )

    def facts(self) -> Iterator[PartitionFacts]:
        """Return the committed state of every partition."""
        for topic, number, _ in self.image.partitions():
            found = self._facts(PartitionKey(topic.topic_id, number))
            assert found is not None
            yield found

    def registered(self, broker: NodeId) -> Registration | None:
        known = self.image.brokers.get(broker)
        return None if known is None else Registration(known.boot_id, known.directory_ids)

    def hit(self, machine: SimMachine, *, disk: bool = False) -> None:
        """Note that a machine is about to lose its power, or its broker's disk."""
        if BROKER not in machine.processes:
            return
        self.losses.hit(
            machine.node_id,
            disk=disk,
            partitions=list(self.facts()),
            registered=self.registered(machine.node_id),
            now_ms=self._now_ms(),
        )
        if disk:
            self.replicas.forget(machine.node_id)
            self.invariants.forget(machine.node_id)
            for place in [place for place in self._ends if place[1] == machine.node_id]:
                del self._ends[place]

    def given_up(self, machine: SimMachine, partition: str) -> None:
        """Note that a broker discards its log and begins it again, as its leader demands."""
        for key in self._called(partition):
            self.replicas.given_up(machine.node_id, key)

    def _made_anew(self, machine: SimMachine, told: dict[str, object]) -> None:
        for key in self._called(str(told["partition"])):
            self.losses.made_anew(key, machine.node_id)
            self.invariants.forget(machine.node_id, key)

    def _begun_anew(self, machine: SimMachine, told: dict[str, object]) -> None:
        partition = str(told["partition"])
        self._begun[machine.node_id, partition] = None
        for key in self._called(partition):
            self.replicas.begun_again(machine.node_id, key, int(str(told["offset"])))
        if any(key in self._cleaned for key in self._called(partition)):  # rule C8
            self.given_up(machine, partition)

    def _offline(self, machine: SimMachine, told: dict[str, object]) -> None:
        """Note that a replica is offline, perhaps because a full disk stopped its new log.

        Then the rest of the old log need not be what it was.
        """
        partition = str(told["partition"])
        if self._begun.pop((machine.node_id, partition), 0) is None:
            self.given_up(machine, partition)

    def _called(self, partition: str) -> list[PartitionKey]:
        return [
            each.key for each in self.facts() if f"{each.topic}-{each.key.partition}" == partition
        ]

    # -- brokers -----------------------------------------------------------------------------------

    def _watch_broker(self, machine: SimMachine, node: BrokerNode) -> None:
        sim_node = machine.sim_node(BROKER)
        assert sim_node is not None
        life, partitions = sim_node.incarnation, node.core.partitions
        seen: dict[PartitionKey, _Signature] = {}

        core, used = node.core, NONE

        def after() -> None:
            nonlocal used
            link = core.lifecycle
            if link.broker_epoch != used:
                used = link.broker_epoch
                committed = self._registrations.get(used) == machine.node_id
                words = "{}: epoch {} is not committed"
                require(committed, "V15", words, machine.name, used)
            # runs after every event: no calls, no properties, no new objects
            for key, partition in partitions.items():
                local, leader = partition.log._local, partition.leader
                known = partition._leader_watermark if leader is None else leader.high_watermark
                last = seen.get(key)
                if (
                    last is None
                    or last[0] is not leader
                    or last[1] is not partition.replica
                    or last[2] != known
                    or last[3] != local.written_end
                    or last[4] != local.log_start
                    or last[5] is not local._segments
                    or last[6] is not local.swapped
                ):
                    log = partition.log
                    self._count_cuts(last, log)
                    seen[key] = (
                        leader,
                        partition.replica,
                        known,
                        log.written_end,
                        log.log_start,
                        local._segments,
                        local.swapped,
                    )
                    self._check_state(core, partition)
                    self._look(machine.node_id, life, partition)

        sim_node.after = after

    @staticmethod
    def _check_state(core: BrokerCore, partition: Partition) -> None:
        state = partition.state
        leads = (partition.leader is not None) == (state is ReplicaState.LEADING)
        follows = (partition.replica is not None) == (state is ReplicaState.FOLLOWING)
        current = state in OPEN and core.replicas.get(partition.key) is partition.hosted
        words = "broker {}: {} is {}: leads {}, fetches {}"
        facts = partition.leader is not None, partition.replica is not None
        me = core.env.node_id
        require(leads and follows and current, "V17", words, me, partition, state, *facts)

    def _count_cuts(self, last: _Signature | None, log: PartitionLog) -> None:
        if last is not None and log.written_end < last[3]:
            self._count("truncations")
        if last is not None and log.local_log_start > last[3]:
            self._count("START_AT")

    def _look(self, broker: NodeId, life: int, partition: Partition) -> None:
        """Check one replica and, if it leads, its partition."""
        key, log = partition.key, partition.log
        state = self.image.partition(key)
        if state is None or broker not in state.replicas:
            return  # the topic was deleted, or the replica moved
        self._ends[key, broker] = log.written_end
        hit = self.losses.is_hit(key, broker)
        isr_ends = tuple(
            (member, self._ends[key, member])
            for member in state.isr
            if (key, member) in self._ends and not self.losses.is_hit(key, member)
        )
        leads = partition.leader is not None
        sample = ReplicaSample(
            key=key,
            topic=partition.topic,
            broker=broker,
            life=life,
            leader_epoch=_epoch_of(partition),
            leads=leads,
            current=_epoch_of(partition) == state.leader_epoch,
            high_watermark=partition.high_watermark,
            log_start=log.log_start,
            local_log_start=log.local_log_start,
            log_end=log.written_end,
            in_sync=len(partition.leader.isr) if partition.leader is not None else 0,
            required=self.losses.copies(partition.topic),
            hit=hit,
            isr_ends=isr_ends,
        )
        at, end = self.replicas.check(sample)
        if log.cleaned.end or key in self._cleaned:
            cleaned = self._cleaned[key] = max(log.cleaned.end, self._cleaned.get(key, 0))
            at = self.replicas.skip(key, broker, max(at, min(cleaned, end)))
        # A damaged copy is not compared: it must not be served, and the readers check what is
        # served.
        rotten = self.losses.is_rotten(key, broker)
        end = at if rotten else min(end, log.written_end)
        while log.local_log_start <= at < end:
            with observing():
                found = log.read(at, bound=end, max_bytes=READ_BYTES)
            if not found.data:
                break
            self.replicas.committed(key, broker, list(_marks(found.data)))
            at = found.next_offset
        if leads:
            self._check_leader(broker, partition, state.leader_epoch)
        elif relies_on_tier(log, sample.high_watermark) and not rotten:
            # A damaged replica may lack its first segments.
            counters = self._table(partition)
            covered = NONE if counters is None else counters.end
            self.invariants.check_local(
                log.log_start, log.local_log_start, covered, partition.tiered, sample
            )

    def _table(self, partition: Partition) -> Any:
        """Return the table's counters of a partition; None = no table or no rows yet."""
        key = partition.key
        snapshot = self.cluster.store.snapshot(partition.topic, key.topic_id)
        return None if snapshot is None else snapshot.counters.get(key.partition)

    def _check_leader(self, broker: NodeId, partition: Partition, epoch: int) -> None:
        key, leader, log = partition.key, partition.leader, partition.log
        assert leader is not None
        counters = self._table(partition)
        current = leader.leader_epoch == epoch
        rotten = self.losses.is_rotten(key, broker)  # its first segments may be missing
        sample = PartitionSample(
            key=key,
            topic=partition.topic,
            broker=broker,
            leader_epoch=leader.leader_epoch,
            log_start=log.log_start,
            local_log_start=log.log_start if rotten else log.local_log_start,
            last_stable_offset=partition.last_stable_offset,
            high_watermark=partition.high_watermark,
            log_end=log.written_end,
            synced_end=log.synced_end,
            tiered=partition.tiered,
            flushed=self.losses.flushed(partition.topic),
            ready=leader.ready,
            current=current,
            table_start=NONE if counters is None else counters.start,
            table_end=NONE if counters is None else counters.end,
        )
        self.invariants.check(sample)
        if current:
            self.latest[key] = sample
            self.highest[key] = max(sample.high_watermark, self.highest.get(key, 0))

    # -- every tick --------------------------------------------------------------------------------

    def tick(self) -> None:
        """Pass partitions whose committed metadata changed, or with damage, to the loss model."""
        if not self._changed:
            return
        brokers = {
            broker: Registration(state.boot_id, state.directory_ids)
            for broker, state in self.image.brokers.items()
        }
        changed, self._changed = self._changed, {}
        for key in {**changed, **dict.fromkeys(self.losses.rotting)}:
            facts = self._facts(key)
            if facts is not None:
                self.losses.seen(facts, brokers)

    def look_at_all(self) -> None:
        """Check every replica of every serving broker."""
        for machine in self.cluster.with_role(BROKER):
            broker, node = machine.broker, machine.sim_node(BROKER)
            if broker is not None and node is not None and machine.serving:
                for partition in list(broker.core.partitions.values()):
                    self._look(machine.node_id, node.incarnation, partition)

    def check_images(self) -> None:
        """Check V11: every metadata image equals the image of the committed records."""
        images: list[tuple[int, str, MetadataImage]] = []
        for machine in self.cluster.machines:
            controller, broker = machine.controller, machine.broker
            if controller is not None and controller.active is not None:
                image = controller.active.machine.image
                if image.offset >= controller.metadata.committed:
                    continue  # its last records are appended but not committed
                images.append((image.offset, f"{machine.name}/controller", image))
            if broker is not None:
                image = broker.core.metadata.image
                images.append((image.offset, f"{machine.name}/broker", image))
        images.sort(key=lambda each: each[:2])
        if images and images[0][0] < self._replayed.offset:  # a node began with an older image
            self._replayed, self._replayed_count = MetadataImage(), 0
        records = itertools.islice(self._records, self._replayed_count, None)
        replayed = self._replayed
        for at, (upto, name, image) in enumerate(images):
            while replayed.offset < upto and (following := next(records, None)) is not None:
                replayed.apply(*following)
                self._replayed_count += not at
            if not at:  # the next check begins here; this one goes on with a copy
                replayed = copy.deepcopy(replayed)
            if replayed.offset == upto:
                words = "{} is not what its log says: {}"
                require(replayed == image, "V11", words, name, image)


def relies_on_tier(log: PartitionLog, high_watermark: int) -> bool:
    """Return whether a follower takes what it lacks at the front for records of the tier.

    A replica with a lower high watermark is just being truncated.  A blank log has no records, and
    begins again as a new replica (log/loading O2): its log start is lowered before its segment
    goes, and its process may die in between.
    """
    return log.log_start < log.local_log_start <= high_watermark and not log.blank


def _epoch_of(partition: Partition) -> int:
    """Return the leader epoch that a replica leads or follows; NONE = neither."""
    if partition.leader is not None:
        return partition.leader.leader_epoch
    replica: Any = partition.replica
    return NONE if replica is None else int(replica.leader_epoch)


def _marks(raw: bytes) -> Iterator[Mark]:
    for header, _ in batches.iter_batches(raw):
        yield Mark(header.base_offset, header.next_offset, header.leader_epoch, header.crc)
