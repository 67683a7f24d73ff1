"""What the controller is asked to decide, and what its decisions share.

A command is a request as it came from the wire plus what a pure core cannot make itself: fresh
ids, whether a session is live, whose waits are over, what brokers reported (`reports`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from pk import errors
from pk.effects import Decision, Effect
from pk.server.controller.reports import Reports
from pk.server.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, BrokerState, MetadataImage
from pk.server.metadata.records import MetadataRecord, record_of
from pk.types import NodeId, PartitionKey, TopicId
from pk.wire import pk_pb2 as wire


@dataclass(slots=True, frozen=True)
class Bootstrap:
    """A term begins: say which cluster this is, if the log does not.

    `genesis`: a fresh id; it tells this metadata log from another one of the same cluster id.
    """

    cluster_id: str
    genesis: str = ""


@dataclass(slots=True, frozen=True)
class Register:
    """`live`: the broker's previous registration still has its stream."""

    request: wire.RegisterBrokerRequest
    live: bool
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class Heartbeat:
    """`reports` counts this heartbeat in; `retry`: partitions it may have news of.

    `unclean`: those whose replicas are all asked for their positions.
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
    """Try elections for these leaderless partitions, and to end these reassignments.

    `waited`: those that have waited unclean_recovery_wait_ms for missing members.
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
    """Leaders of these partitions that give up the lead hand it over (rule L16)."""

    partitions: tuple[PartitionKey, ...]
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class ElectLeaders:
    """KIP-460."""

    request: wire.ElectLeadersRequest
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class AlterReassignments:
    """KIP-455."""

    request: wire.AlterReassignmentsRequest
    reports: Reports = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class ListReassignments:
    request: wire.ListReassignmentsRequest


@dataclass(slots=True, frozen=True)
class ListBrokers:
    request: wire.ListBrokersRequest


@dataclass(slots=True, frozen=True)
class UnregisterBroker:
    request: wire.UnregisterBrokerRequest


@dataclass(slots=True, frozen=True)
class CreateTopics:
    """`topic_ids`: a fresh one per topic of the request."""

    request: wire.CreateTopicsRequest
    topic_ids: tuple[TopicId, ...]


@dataclass(slots=True, frozen=True)
class DeleteTopics:
    request: wire.DeleteTopicsRequest


@dataclass(slots=True, frozen=True)
class TierPurged:
    request: wire.TierPurgedRequest


@dataclass(slots=True, frozen=True)
class CreatePartitions:
    request: wire.CreatePartitionsRequest


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
class Rules:
    """The settings decisions depend on."""

    node_id: NodeId
    server: Mapping[str, Any]  #: resolved `settings.SERVER`
    topic_defaults: Mapping[str, Any] = field(default_factory=dict)  #: from the configuration file

    def of_topic(self, image: MetadataImage, name: str, option: str) -> Any:
        """One raw setting of a topic without resolving all of them."""
        for resource in ((TOPIC_RESOURCE, name), (BROKER_RESOURCE, "")):
            value = image.configs.get(resource, {}).get(option)
            if value is not None:
                return value
        return self.topic_defaults.get(option)

    def min_isr(self, image: MetadataImage, name: str) -> int:
        """As the records say: never a file's (config_changes.py)."""
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
    """`reply`, justified by records with these bodies."""
    return Decision([record_of(body) for body in bodies], reply, effects)


def registered(image: MetadataImage, broker_id: NodeId, broker_epoch: int) -> BrokerState:
    """The current registration of the broker that asks.  Raises `StaleBrokerEpoch`."""
    broker = image.brokers.get(broker_id)
    if broker is None or broker.broker_epoch != broker_epoch:
        current = "not registered" if broker is None else f"registered with {broker.broker_epoch}"
        raise errors.StaleBrokerEpoch(
            f"broker {broker_id} with epoch {broker_epoch} is {current}; it must register again"
        )
    return broker
