"""The metadata image: the state of the cluster at one offset of `__cluster_metadata-0`.

The controller, every broker and the tier process hold one image each.  They build it only by
`apply`, from the same records in the same order (rule Q2), or from a snapshot and the records
behind it.  A snapshot consists of rows for `apply` too (metadata/snapshot.py), so a field that is
added here is added there.  The decisions of the controller read the image.  Values inside are
frozen and replaced as a whole, so a reader may keep a value.  The dictionaries belong to the image.

Invariants (checked by `check`, which tests and the simulator call after every record)
  I1  The leader is NONE or a member of the ISR.  ISR, ELR and last-known members are subsets of the
      replicas.
  I2  ISR, ELR and last-known members are disjoint.
  I3  A broker epoch is the offset of the broker's registration record.
  I4  Equal records in equal order give equal images (replay == image).
  I5  `assigned` and `leaderless` are indexes over the partitions.  They make the cost of a decision
      about one broker proportional to the partitions of the broker, not of the cluster.
  I6  `purges` names deleted topics only, at most PURGES_MAX.
  I7  `directories` is parallel to the replicas, or empty in a state without names.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pk import errors, formats, settings
from pk.topic_names import is_internal
from pk.types import NONE, NodeId, PartitionKey, TopicId
from pk.wire import pk_pb2 as wire

TOPIC_RESOURCE = "topic"
BROKER_RESOURCE = "broker"
#: The leases of maintenance jobs (rule C5): by topic id, one value for each kind of lease.  A build
#: that does not know this resource keeps its values, as it keeps unknown settings (rule Q7).
LEASE_RESOURCE = "maintenance_lease"
#: The schedules of maintenance jobs, and their last runs: by topic id, one value for each job.
SCHEDULE_RESOURCE = "maintenance_schedule"
RUN_RESOURCE = "maintenance_run"
#: Resources of topic ids, which are no settings.
MAINTENANCE_RESOURCES = (LEASE_RESOURCE, SCHEDULE_RESOURCE, RUN_RESOURCE)
#: Most deleted topics whose tables wait for removal.  There may be more if the store is unavailable
#: for long.  The oldest are then dropped from the list, and their tables stay in the store.
PURGES_MAX = 10_000
#: Most terms of the metadata log that an image keeps, the newest ones.
TERMS_MAX = 1_000


class PartitionState(NamedTuple):
    """The state of one partition; `unclean`: its leader was elected without all data (R3).

    A tuple, because images are built of very many, at each start and at each failover.
    """

    replicas: tuple[NodeId, ...]
    isr: tuple[NodeId, ...]
    leader: NodeId
    leader_epoch: int
    partition_epoch: int
    elr: tuple[NodeId, ...] = ()
    last_known: tuple[NodeId, ...] = ()
    adding: tuple[NodeId, ...] = ()
    removing: tuple[NodeId, ...] = ()
    #: The id of each replica's data directory, parallel to `replicas`; "" = not named yet (R11).
    directories: tuple[str, ...] = ()
    unclean: bool = False
    #: the last leader epoch that began uncleanly; followers may truncate for it (R4)
    unclean_epoch: int = NONE

    def led(
        self,
        leader: NodeId,
        isr: tuple[NodeId, ...],
        elr: tuple[NodeId, ...],
        last_known: tuple[NodeId, ...],
    ) -> PartitionState:
        """Return a copy with another leader, at a third of the cost of `_replace`."""
        return PartitionState(
            self.replicas, isr, leader, self.leader_epoch, self.partition_epoch, elr, last_known,
            self.adding, self.removing, self.directories, self.unclean, self.unclean_epoch,
        )  # fmt: skip

    def directory_of(self, member: NodeId) -> str:
        """Return the id of the directory of this replica; "" = the metadata do not name it."""
        if not self.directories or member not in self.replicas:
            return ""
        return self.directories[self.replicas.index(member)]

    @property
    def original(self) -> tuple[NodeId, ...]:
        """The replicas without those that a reassignment adds (KIP-455)."""
        return tuple(member for member in self.replicas if member not in self.adding)

    @property
    def candidates(self) -> tuple[NodeId, ...]:
        """The replicas that an unclean election may choose: not those that only copy yet (R9)."""
        return tuple(
            each for each in self.replicas if each not in self.adding or each in self.last_known
        )

    @property
    def target(self) -> tuple[NodeId, ...]:
        """The replicas after the reassignment; without one, the present replicas."""
        return tuple(member for member in self.replicas if member not in self.removing)


class VoterState(NamedTuple):
    """A voter of the metadata quorum (KIP-853) and its address."""

    node_id: NodeId
    directory_id: str
    address: str


@dataclass(slots=True, frozen=True)
class BrokerState:
    """The registration of one broker (rule L3)."""

    broker_id: NodeId
    broker_epoch: int  #: offset of the registration record
    incarnation_id: str
    boot_id: str
    directory_ids: tuple[str, ...]
    address: str
    rack: str
    fenced: bool = True
    in_controlled_shutdown: bool = False
    clean: bool = True
    changed_offset: int = NONE  #: of the last record about it
    format_level: int = 1  #: the level of `pk.format` that it knows (rule Q6)

    @property
    def available(self) -> bool:
        """Whether the broker may lead and may join an ISR."""
        return not self.fenced and not self.in_controlled_shutdown


@dataclass(slots=True)
class TopicState:
    """One topic; partitions are numbered from 0 without gaps."""

    name: str
    topic_id: TopicId
    partitions: dict[int, PartitionState] = field(default_factory=dict)
    request_id: str = ""  #: id of the request that created it, which may be repeated

    @property
    def internal(self) -> bool:
        return is_internal(self.name)


@dataclass(slots=True)
class MetadataImage:
    """The image.  It begins empty; `apply` takes every committed record in order."""

    offset: int = NONE  #: offset of the last applied record
    cluster_id: str = ""
    genesis: str = ""  #: id of this metadata log; another log of the same cluster id differs
    brokers: dict[NodeId, BrokerState] = field(default_factory=dict)
    topics: dict[TopicId, TopicState] = field(default_factory=dict)
    topic_ids: dict[str, TopicId] = field(default_factory=dict)
    configs: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    next_producer_id: int = 0
    features: dict[str, int] = field(default_factory=dict)
    leader_id: NodeId = NONE  #: epoch of the metadata quorum
    leader_epoch: int = NONE
    #: First offset and epoch of the last terms of the metadata log, ascending; see `origin`.
    terms: tuple[tuple[int, int], ...] = ()
    voters: tuple[VoterState, ...] = ()
    #: Names of deleted topics whose tables wait for removal, by topic id, oldest first.  An entry
    #: stays until a broker has reported that the table is gone (rule T7).
    purges: dict[TopicId, str] = field(default_factory=dict)
    #: Partitions by broker, and leaderless partitions with the offset of the record that left them
    #: without a leader (I5).
    assigned: dict[NodeId, dict[TopicId, dict[int, None]]] = field(
        default_factory=dict, repr=False, compare=False
    )
    leaderless: dict[PartitionKey, int] = field(default_factory=dict, repr=False, compare=False)
    #: Ids of directories, each once: many partitions name the same ones.
    _ids: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    # -- reading -----------------------------------------------------------------------------------

    def topic(self, name: str) -> TopicState | None:
        topic_id = self.topic_ids.get(name)
        return None if topic_id is None else self.topics[topic_id]

    def partition(self, key: PartitionKey) -> PartitionState | None:
        topic = self.topics.get(key.topic_id)
        return None if topic is None else topic.partitions.get(key.partition)

    def partitions(self) -> Iterator[tuple[TopicState, int, PartitionState]]:
        """Yield every partition, by topic in order of creation, then by number."""
        for topic in self.topics.values():
            for number, state in topic.partitions.items():
                yield topic, number, state

    def partitions_of(self, broker_id: NodeId) -> Iterator[tuple[TopicState, int, PartitionState]]:
        """Yield the partitions that have a replica on `broker_id`."""
        for topic_id, numbers in self.assigned.get(broker_id, {}).items():
            topic = self.topics[topic_id]
            for number in numbers:
                yield topic, number, topic.partitions[number]

    @property
    def format_level(self) -> int:
        """The level of `pk.format`; a cluster begins at 1 (rule Q6)."""
        return max(1, self.features.get(formats.FEATURE, 1))

    def available(self, broker_id: NodeId) -> bool:
        broker = self.brokers.get(broker_id)
        return broker is not None and broker.available

    def only_directory(self, broker_id: NodeId) -> str:
        """Return the directory of a broker that has one; "" if it chooses among several (R11)."""
        broker = self.brokers.get(broker_id)
        directories = () if broker is None else broker.directory_ids
        return directories[0] if len(directories) == 1 else ""

    def topic_config(self, name: str, static: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return every setting of a topic: its own over the cluster's over `static` (the
        file's).
        """
        base = {
            **(static or {}),
            **settings.TOPIC.parse(self.settings_of(BROKER_RESOURCE, "")),
        }
        return settings.TOPIC.resolve(self.settings_of(TOPIC_RESOURCE, name), base)

    def settings_of(self, kind: str, name: str) -> dict[str, str]:
        """Return the stored settings of a resource that this build knows.  The others are kept and
        have no effect here (rule Q7).
        """
        return settings.TOPIC.known(self.configs.get((kind, name), {}))

    def unknown_settings(self) -> list[str]:
        """Return the names of stored settings that this build does not know."""
        found = {
            name: None
            for (kind, _), values in self.configs.items()
            if kind not in MAINTENANCE_RESOURCES
            for name in values
        }
        return sorted(name for name in found if name not in settings.TOPIC.by_name)

    # -- the log's history -------------------------------------------------------------------------

    @property
    def origin(self) -> str:
        """The metadata log and its term that have reached `offset`.

        A broker keeps it with each replica.  A metadata log that is restored from a backup goes on
        in a later term.  So another term stands at an offset that the lost part had, and the
        log knows that it did not create the replicas that name the lost part (rule L15).
        """
        return f"{self.genesis}@{self.leader_epoch}"

    def has_reached(self, origin: str, offset: int) -> bool:
        """Return whether this very log has reached `offset` in the term of `origin`.

        False also if the term is older than those that are kept.  An origin of an older build has
        no term: then only log and offset are compared.
        """
        genesis, _, epoch = origin.partition("@")
        if genesis != self.genesis or not 0 <= offset <= self.offset:
            return False
        if not epoch:
            return True
        index = bisect_left(self.terms, (offset + 1, NONE)) - 1
        return index >= 0 and str(self.terms[index][1]) == epoch

    # -- the only mutator --------------------------------------------------------------------------

    def apply(self, offset: int, record: wire.MetadataRecord) -> None:
        """Apply one record.  Raises `CorruptLog` if it contradicts the records before it."""
        kind = record.WhichOneof("record")
        step = _STEPS.get(kind or "")
        if step is None:
            raise errors.NewerFormat(
                f"metadata record {kind!r} at {offset} is not known to this build"
            )
        try:
            step(self, offset, getattr(record, kind or ""))
        except KeyError as missing:
            what = f"metadata record {kind} at {offset} names {missing}, which does not exist"
            raise errors.CorruptLog(what) from missing
        self.offset = offset

    def _cluster(self, _offset: int, record: wire.ClusterRecord) -> None:
        self.cluster_id, self.genesis = record.cluster_id, record.genesis

    def _register_broker(self, offset: int, record: wire.RegisterBrokerRecord) -> None:
        if record.broker_epoch != offset:
            raise errors.CorruptLog(f"broker epoch {record.broker_epoch} at offset {offset}")  # I3
        self.brokers[record.broker_id] = BrokerState(
            broker_id=record.broker_id,
            broker_epoch=record.broker_epoch,
            incarnation_id=record.incarnation_id,
            boot_id=record.boot_id,
            directory_ids=tuple(record.directory_ids),
            address=record.address,
            rack=record.rack,
            fenced=record.fenced,
            in_controlled_shutdown=record.in_controlled_shutdown,
            clean=record.clean,
            changed_offset=offset,
            format_level=max(1, record.format_level),
        )

    def _broker_change(self, offset: int, record: wire.BrokerRegistrationChangeRecord) -> None:
        self.brokers[record.broker_id] = replace(
            self.brokers[record.broker_id],
            fenced=record.fenced,
            in_controlled_shutdown=record.in_controlled_shutdown,
            changed_offset=offset,
        )

    def _unregister_broker(self, _offset: int, record: wire.UnregisterBrokerRecord) -> None:
        del self.brokers[record.broker_id]

    def _topic(self, _offset: int, record: wire.TopicRecord) -> None:
        self.topics[record.topic_id] = TopicState(
            record.name, record.topic_id, request_id=record.request_id
        )
        self.topic_ids[record.name] = record.topic_id

    def _remove_topic(self, _offset: int, record: wire.RemoveTopicRecord) -> None:
        topic = self.topics.pop(record.topic_id)
        del self.topic_ids[topic.name]
        self.configs.pop((TOPIC_RESOURCE, topic.name), None)
        for kind in MAINTENANCE_RESOURCES:
            self.configs.pop((kind, topic.topic_id), None)
        for numbers in self.assigned.values():
            numbers.pop(topic.topic_id, None)
        for number in topic.partitions:
            self.leaderless.pop(PartitionKey(topic.topic_id, number), None)
        if record.purge_tier:
            self._mark_purge(topic.topic_id, topic.name)

    def _tier_purge(self, _offset: int, record: wire.TierPurgeRecord) -> None:
        if record.done:
            self.purges.pop(record.topic_id, None)
        else:
            self._mark_purge(record.topic_id, record.name)

    def _mark_purge(self, topic_id: TopicId, name: str) -> None:
        self.purges[topic_id] = name
        if len(self.purges) > PURGES_MAX:
            del self.purges[next(iter(self.purges))]

    def _partition(self, offset: int, record: wire.PartitionRecord) -> None:
        state = PartitionState(
            replicas=tuple(record.replicas),
            isr=tuple(record.isr),
            leader=record.leader,
            leader_epoch=record.leader_epoch,
            partition_epoch=record.partition_epoch,
            elr=tuple(record.elr),
            last_known=tuple(record.last_known),
            adding=tuple(record.adding),
            removing=tuple(record.removing),
            directories=tuple(self._ids.setdefault(each, each) for each in record.directories),
            unclean=record.unclean,
            unclean_epoch=record.unclean_epoch if record.HasField("unclean_epoch") else NONE,
        )
        self._put(offset, record.topic_id, record.partition, state)

    def _partition_change(self, offset: int, record: wire.PartitionChangeRecord) -> None:
        before = self.topics[record.topic_id].partitions[record.partition]
        self._put(offset, record.topic_id, record.partition, changed(before, record))

    def _put(self, offset: int, topic_id: TopicId, number: int, state: PartitionState) -> None:
        """Store a partition, and update the indexes (I5)."""
        partitions = self.topics[topic_id].partitions
        before = partitions.get(number)
        partitions[number] = state
        held = () if before is None else before.replicas
        if held != state.replicas:
            for member in held:
                if member not in state.replicas:
                    del self.assigned[member][topic_id][number]
            for member in state.replicas:
                self.assigned.setdefault(member, {}).setdefault(topic_id, {})[number] = None
        if state.leader == NONE:
            self.leaderless.setdefault(PartitionKey(topic_id, number), offset)
        elif before is not None and before.leader == NONE:
            self.leaderless.pop(PartitionKey(topic_id, number), None)

    def _config(self, _offset: int, record: wire.ConfigRecord) -> None:
        resource = (record.resource_type, record.resource_name)
        values = dict(self.configs.get(resource, {}))
        if record.HasField("value"):
            values[record.name] = record.value
        else:
            values.pop(record.name, None)
        if values:
            self.configs[resource] = values
        else:
            self.configs.pop(resource, None)

    def _producer_ids(self, _offset: int, record: wire.ProducerIdsRecord) -> None:
        self.next_producer_id = record.next_producer_id

    def _feature_level(self, _offset: int, record: wire.FeatureLevelRecord) -> None:
        self.features[record.name] = record.level

    def _leader_change(self, offset: int, record: wire.LeaderChangeRecord) -> None:
        self.leader_id = record.leader_id
        self.leader_epoch = record.epoch
        before = self.terms[: bisect_left(self.terms, (offset, NONE))]  # rows may repeat terms
        self.terms = (*before, (offset, record.epoch))[-TERMS_MAX:]

    def _voters(self, _offset: int, record: wire.VotersRecord) -> None:
        self.voters = tuple(
            VoterState(voter.node_id, voter.directory_id, voter.address) for voter in record.voters
        )

    def _no_op(self, _offset: int, record: wire.NoOpRecord) -> None:
        """Apply a record that only takes an offset."""

    # -- invariants --------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert I1, I2, I3, I5, I6 and I7."""
        for broker in self.brokers.values():
            assert broker.broker_epoch <= self.offset, broker  # I3
        assert not self.purges.keys() & self.topics.keys(), self.purges  # I6
        assert len(self.purges) <= PURGES_MAX
        for topic, number, state in self.partitions():
            story = (topic.name, number, state)
            replicas, isr, elr = set(state.replicas), set(state.isr), set(state.elr)
            assert state.leader == NONE or state.leader in isr, story  # I1
            assert isr <= replicas, story
            assert elr <= replicas, story
            assert set(state.last_known) <= replicas, story
            assert not isr & elr, story  # I2
            assert not set(state.last_known) & (isr | elr), story
            assert len(state.directories) in (0, len(state.replicas)), story  # I7
            key = PartitionKey(topic.topic_id, number)
            assert (state.leader == NONE) == (key in self.leaderless), story  # I5
            holders = [b for b, held in self.assigned.items() if number in held.get(key[0], {})]
            assert set(holders) == replicas, story


def changed(state: PartitionState, record: wire.PartitionChangeRecord) -> PartitionState:
    """Return `state` after a change.  Absent fields stay; `unclean` is always set.

    Each change bumps the partition epoch.  A change that names a leader, also the same one, begins
    a new leader epoch.
    """

    has = record.HasField
    led_anew = has("leader")
    leader_epoch = state.leader_epoch + led_anew
    # in one call, field by field: a failover and a start change many (bench/controller_scale.py)
    return PartitionState(
        tuple(record.replicas.values) if has("replicas") else state.replicas,
        tuple(record.isr.values) if has("isr") else state.isr,
        record.leader if led_anew else state.leader,
        leader_epoch,
        state.partition_epoch + 1,
        tuple(record.elr.values) if has("elr") else state.elr,
        tuple(record.last_known.values) if has("last_known") else state.last_known,
        tuple(record.adding.values) if has("adding") else state.adding,
        tuple(record.removing.values) if has("removing") else state.removing,
        tuple(record.directories) or state.directories,
        record.unclean,
        leader_epoch if record.elected_uncleanly else state.unclean_epoch,
    )


_Step = Callable[[MetadataImage, int, Any], None]
_STEPS: dict[str, _Step] = {
    "cluster": MetadataImage._cluster,
    "register_broker": MetadataImage._register_broker,
    "broker_change": MetadataImage._broker_change,
    "unregister_broker": MetadataImage._unregister_broker,
    "topic": MetadataImage._topic,
    "remove_topic": MetadataImage._remove_topic,
    "tier_purge": MetadataImage._tier_purge,
    "partition": MetadataImage._partition,
    "partition_change": MetadataImage._partition_change,
    "config": MetadataImage._config,
    "producer_ids": MetadataImage._producer_ids,
    "feature_level": MetadataImage._feature_level,
    "leader_change": MetadataImage._leader_change,
    "voters": MetadataImage._voters,
    "no_op": MetadataImage._no_op,
}
