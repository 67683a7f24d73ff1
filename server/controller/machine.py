"""The controller: the cluster's durable truth, a Replayed machine over `__cluster_metadata-0`.

`decide` reads the image and answers a command with records and the reply they justify; `apply`
gives a record to the image.  It knows no clock but `now_ms`, no stream, no file; who is alive
comes in as commands (`sessions.py`), fresh ids come with them.  The decisions stand in
`brokers`, `leaders`, `reassignments`, `topics` and `config_changes`.

Invariants
  M1  decide never mutates; equal logs give equal machines (replay == image)
  M2  a decision's records are one batch: all of them or none; what is too large for one is decided
      in steps, each whole by itself (`batched_decision.py`)
  M3  a broker's epoch is the offset of its registration record, so the machine must have applied
      every record below the one it decides next
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from pk.effects import Publish
from pk.server.controller import (
    brokers,
    commands,
    config_changes,
    leaders,
    reassignments,
    topics,
)
from pk.server.controller.commands import Out, Rules, decision
from pk.server.controller.events import EVENT, events_of
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import MetadataRecord
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

#: The feature whose level says which records and formats this cluster may use.
FORMAT_FEATURE = "pk.format"

Command = (
    commands.Bootstrap
    | commands.Register
    | commands.Heartbeat
    | commands.Fence
    | commands.Recover
    | commands.CreateTopics
    | commands.DeleteTopics
    | commands.TierPurged
    | commands.CreatePartitions
    | commands.AlterConfigs
    | commands.DescribeConfigs
    | commands.AllocateProducerIds
    | commands.AlterPartition
    | commands.Prefer
    | commands.HandOver
    | commands.ElectLeaders
    | commands.AlterReassignments
    | commands.ListReassignments
    | commands.UnregisterBroker
    | commands.ListBrokers
)


def bootstrap(image: MetadataImage, rules: Rules, command: commands.Bootstrap) -> Out:
    """What must be on record before a term serves; none of it if it is.

    The first records of a cluster; and min_insync_replicas as this node's file has it, unless the
    cluster has a default of its own: were it left in files, two nodes could differ about it, and a
    change would not clear the ELR (rule R1, KIP-966).
    """
    bodies: list[Message] = []
    if not image.cluster_id:
        bodies.append(wire.ClusterRecord(cluster_id=command.cluster_id, genesis=command.genesis))
        bodies.append(wire.FeatureLevelRecord(name=FORMAT_FEATURE, level=0))
    bodies += config_changes.record_min_isr(image, rules)
    return decision(image.cluster_id or command.cluster_id, bodies)


class Controller:
    """See the module."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.image = MetadataImage()

    @property
    def leaderless(self) -> Mapping[PartitionKey, int]:
        """The partitions without a leader, oldest loss first, with the offset that left them so."""
        return self.image.leaderless

    def decide(self, command: Command, now_ms: int) -> Out:
        """The records and the reply that `command` deserves.  Raises typed errors for refusals."""
        decided = _DECISIONS[type(command)](self.image, self.rules, command)
        said = [Publish(EVENT, event) for event in events_of(self.image, decided.records)]
        if said:
            decided.effects = (*decided.effects, *said)
        return decided

    def apply(self, offset: int, record: MetadataRecord) -> None:
        """Account for one record of the log."""
        self.image.apply(offset, record)


_DECISIONS: dict[type, Callable[[MetadataImage, Rules, Any], Out]] = {
    commands.Bootstrap: bootstrap,
    commands.Register: brokers.register,
    commands.Heartbeat: brokers.heartbeat,
    commands.Fence: brokers.fence,
    commands.Recover: brokers.recover,
    commands.CreateTopics: topics.create_topics,
    commands.DeleteTopics: topics.delete_topics,
    commands.TierPurged: topics.tier_purged,
    commands.CreatePartitions: topics.create_partitions,
    commands.AlterConfigs: config_changes.alter_configs,
    commands.DescribeConfigs: config_changes.describe_configs,
    commands.AllocateProducerIds: topics.allocate_producer_ids,
    commands.AlterPartition: brokers.alter_partition,
    commands.Prefer: leaders.prefer,
    commands.HandOver: leaders.hand_over,
    commands.ElectLeaders: leaders.elect_leaders,
    commands.AlterReassignments: reassignments.alter_reassignments,
    commands.ListReassignments: reassignments.list_reassignments,
    commands.UnregisterBroker: brokers.unregister,
    commands.ListBrokers: brokers.list_brokers,
}
