"""The commands of the controller machine, and helpers that its decisions share.

A command is a request from the wire together with inputs that a pure core cannot produce: fresh
ids, whether a session is live, which partitions have waited long enough, and the brokers' reports
(`reports`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from pk import errors, formats
from pk.effects import Decision, Effect
from pk.server.controller.reports import Reports
from pk.server.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, BrokerState, MetadataImage
from pk.server.metadata.leases import LeaseKey
from pk.server.metadata.records import MetadataRecord, record_of
from pk.types import NodeId, PartitionKey, TopicId
from pk.wire import pk_pb2 as wire


@dataclass(slots=True, frozen=True)
class Bootstrap:
    """A term begins: record the cluster id if the log has none.

    `genesis`: a fresh id that distinguishes this metadata log from another log of the same cluster
    id.
    """

    cluster_id: str
    genesis: str = ""


@dataclass(slots=True, frozen=True)
class Register:
    """A broker registers.

    `live`: whether the previous registration of the broker still has its stream.
    """

    request: wire.RegisterBrokerRequest
    live: bool
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Heartbeat:
    """A broker's heartbeat.

    `reports`: the reports of all brokers, this heartbeat included.  `retry`: partitions about which
    this heartbeat is new.  `unclean`: partitions of which every replica reports its position.
    """

    request: wire.BrokerHeartbeatRequest
    reports: Reports = field(default_factory=dict)
    retry: tuple[PartitionKey, ...] = ()
    unclean: frozenset[PartitionKey] = frozenset()


@dataclass(slots=True, frozen=True)
class Fence:
    """The session of this registration ended."""

    broker_id: NodeId
    broker_epoch: int
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Recover:
    """Try elections for these leaderless partitions, and try to complete these reassignments.

    `waited`: partitions that have waited `unclean_recovery_wait_ms` for missing members.
    """

    partitions: tuple[PartitionKey, ...]
    waited: frozenset[PartitionKey] = frozenset()
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Prefer:
    """Move the leadership of these partitions to their first replica where it is in sync."""

    partitions: tuple[PartitionKey, ...]
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class HandOver:
    """Move the leadership of these partitions away from leaders that give it up (rule L16)."""

    partitions: tuple[PartitionKey, ...]
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class ElectLeaders:
    """Elect preferred or unclean leaders on request (KIP-460)."""

    request: wire.ElectLeadersRequest
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class AlterReassignments:
    """Begin, change or cancel reassignments (KIP-455)."""

    request: wire.AlterReassignmentsRequest
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class ListReassignments:
    request: wire.ListReassignmentsRequest


@dataclass(slots=True, frozen=True)
class ListBrokers:
    request: wire.ListBrokersRequest


@dataclass(slots=True, frozen=True)
class DescribeCluster:
    """Describe the level of the cluster.

    `voters`: the levels that voters sent with their fetches in this term, by node id.
    """

    request: wire.DescribeClusterRequest
    voters: Mapping[NodeId, int] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class UpgradeCluster:
    """Raise the level of the cluster (rule Q6).  `voters`: as of `DescribeCluster`."""

    request: wire.UpgradeClusterRequest
    voters: Mapping[NodeId, int] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class UnregisterBroker:
    request: wire.UnregisterBrokerRequest


@dataclass(slots=True, frozen=True)
class CreateTopics:
    """Create topics.  `topic_ids`: one fresh topic id per topic of the request."""

    request: wire.CreateTopicsRequest
    topic_ids: tuple[TopicId, ...]
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class CreateInternalTopic:
    """Create a topic of pk's own for a broker that needs it."""

    request: wire.CreateInternalTopicRequest


@dataclass(slots=True, frozen=True)
class RaiseReplication:
    """Add replicas to internal topics, as far as brokers are available."""

    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class DeleteTopics:
    request: wire.DeleteTopicsRequest


@dataclass(slots=True, frozen=True)
class TierPurged:
    request: wire.TierPurgedRequest


@dataclass(slots=True, frozen=True)
class CreatePartitions:
    request: wire.CreatePartitionsRequest
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class AlterConfigs:
    request: wire.AlterConfigsRequest


@dataclass(slots=True, frozen=True)
class DescribeConfigs:
    request: wire.DescribeConfigsRequest


@dataclass(slots=True, frozen=True)
class AllocateProducerIds:
    request: wire.AllocateProducerIdsRequest


@dataclass(slots=True, frozen=True)
class AlterPartition:
    request: wire.AlterPartitionRequest
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class AcquireLease:
    """A maintenance job asks for the lease of a table (rule C5).

    `renewed`: the leases that were renewed within their TTL.  `now_ms`: of the wall clock.
    """

    request: wire.AcquireLeaseRequest
    renewed: frozenset[LeaseKey] = frozenset()
    now_ms: int = 0


@dataclass(slots=True, frozen=True)
class RenewLease:
    request: wire.RenewLeaseRequest


@dataclass(slots=True, frozen=True)
class ReleaseLease:
    request: wire.ReleaseLeaseRequest


@dataclass(slots=True, frozen=True)
class SetSchedule:
    """Set the schedule of a maintenance job.  `now_ms`: of the controller's wall clock."""

    request: wire.SetScheduleRequest
    now_ms: int


@dataclass(slots=True, frozen=True)
class DeleteSchedule:
    request: wire.DeleteScheduleRequest


@dataclass(slots=True, frozen=True)
class ListSchedules:
    """List schedules.  `renewed` and `now_ms`: as of `AcquireLease`."""

    request: wire.ListSchedulesRequest
    renewed: frozenset[LeaseKey]
    now_ms: int


@dataclass(slots=True, frozen=True)
class NoteRun:
    """Note the outcome of a maintenance job.  `now_ms`: of the controller's wall clock."""

    request: wire.NoteRunRequest
    now_ms: int


@dataclass(slots=True, frozen=True)
class Rules:
    """The settings that decisions depend on."""

    node_id: NodeId
    server: Mapping[str, Any]  #: resolved `settings.SERVER`
    topic_defaults: Mapping[str, Any] = field(default_factory=dict)  #: from the configuration file
    format_level: int = formats.LEVEL  #: the level of `pk.format` that this node knows

    def of_topic(self, image: MetadataImage, name: str, option: str) -> Any:
        """Return one raw setting of a topic without resolving all settings."""
        for resource in ((TOPIC_RESOURCE, name), (BROKER_RESOURCE, "")):
            value = image.configs.get(resource, {}).get(option)
            if value is not None:
                return value
        return self.topic_defaults.get(option)

    def min_isr(self, image: MetadataImage, name: str) -> int:
        """Return min_insync_replicas from the records; files do not count (config_changes.py)."""
        for resource in ((TOPIC_RESOURCE, name), (BROKER_RESOURCE, "")):
            value = image.configs.get(resource, {}).get("min_insync_replicas")
            if value is not None:
                return int(value)
        return 1

    def unclean_enabled(self, image: MetadataImage, name: str) -> bool:
        value = self.of_topic(image, name, "unclean_leader_election_enable")
        return str(value).strip().lower() in ("true", "1", "yes", "on")


Out = Decision[MetadataRecord]


def decision(reply: Any, bodies: Sequence[Message] = (), effects: Sequence[Effect] = ()) -> Out:
    """Return a `Decision` that writes records with these bodies and answers `reply`."""
    return Decision([record_of(body) for body in bodies], reply, effects)


def registered(image: MetadataImage, broker_id: NodeId, broker_epoch: int) -> BrokerState:
    """Return the current registration of the broker that asks.  Raises `StaleBrokerEpoch`."""
    broker = image.brokers.get(broker_id)
    if broker is None or broker.broker_epoch != broker_epoch:
        current = "not registered" if broker is None else f"registered with {broker.broker_epoch}"
        raise errors.StaleBrokerEpoch(
            f"broker {broker_id} with epoch {broker_epoch} is {current}; it must register again"
        )
    return broker
