"""The controller: a Replayed machine over `__cluster_metadata-0` with the cluster's durable state.

`decide` reads the image and answers a command with records and a reply.  `apply` applies a record
to the image.  The machine uses no clock but `now_ms`, no stream and no file.  Liveness of brokers
arrives as commands (`sessions.py`), and commands carry fresh ids.  The decisions are in `brokers`,
`leaders`, `reassignments`, `topics`, `internal_topics` and `config_changes`.

Invariants
  M1  `decide` never mutates.  Equal logs give equal machines (replay == image).
  M2  The records of a decision are one batch, which is atomic.  A decision that is too large for
      one batch is made in steps that each are complete (`batched_decision.py`).
  M3  A broker epoch is the offset of the registration record.  So the machine must have applied
      every record below the record that it decides next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from pk import formats
from pk.effects import Publish
from pk.server.controller import (
    brokers,
    commands,
    config_changes,
    internal_topics,
    leaders,
    leases,
    levels,
    reassignments,
    schedules,
    topics,
)
from pk.server.controller.commands import Out, Rules, decision
from pk.server.controller.events import EVENT, events_of
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import MetadataRecord
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

Command = (
    commands.Bootstrap
    | commands.Register
    | commands.Heartbeat
    | commands.Fence
    | commands.Recover
    | commands.CreateTopics
    | commands.CreateInternalTopic
    | commands.RaiseReplication
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
    | commands.DescribeCluster
    | commands.UpgradeCluster
    | commands.AcquireLease
    | commands.RenewLease
    | commands.ReleaseLease
    | commands.SetSchedule
    | commands.DeleteSchedule
    | commands.ListSchedules
    | commands.NoteRun
)


def bootstrap(image: MetadataImage, rules: Rules, command: commands.Bootstrap) -> Out:
    """Write those records that must exist before a term serves and do not exist yet.

    These are the first records of a cluster, and min_insync_replicas of this node's file unless the
    cluster has a default.  If the setting stayed in files, two nodes could disagree about it, and a
    change would not clear the ELR (rule R1, KIP-966).
    """
    bodies: list[Message] = []
    if not image.cluster_id:
        bodies.append(wire.ClusterRecord(cluster_id=command.cluster_id, genesis=command.genesis))
        bodies.append(wire.FeatureLevelRecord(name=formats.FEATURE))  # absent = level 1
    bodies += config_changes.record_min_isr(image, rules)
    return decision(image.cluster_id or command.cluster_id, bodies)


class Controller:
    """The replayed state of the controller and its decisions.  See the module."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.image = MetadataImage()

    @property
    def leaderless(self) -> Mapping[PartitionKey, int]:
        """Leaderless partitions, oldest first, each with the offset since which it has no
        leader.
        """
        return self.image.leaderless

    def decide(self, command: Command, now_ms: int) -> Out:
        """Return the records and the reply for `command`.  Raises typed errors for refusals."""
        decided = _DECISIONS[type(command)](self.image, self.rules, command)
        said = [Publish(EVENT, event) for event in events_of(self.image, decided.records)]
        if said:
            decided.effects = (*decided.effects, *said)
        return decided

    def apply(self, offset: int, record: MetadataRecord) -> None:
        """Apply one record of the log to the image."""
        self.image.apply(offset, record)


_DECISIONS: dict[type, Callable[[MetadataImage, Rules, Any], Out]] = {
    commands.Bootstrap: bootstrap,
    commands.Register: brokers.register,
    commands.Heartbeat: brokers.heartbeat,
    commands.Fence: brokers.fence,
    commands.Recover: brokers.recover,
    commands.CreateTopics: topics.create_topics,
    commands.CreateInternalTopic: internal_topics.create_internal_topic,
    commands.RaiseReplication: internal_topics.raise_replication,
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
    commands.DescribeCluster: levels.describe_cluster,
    commands.UpgradeCluster: levels.upgrade_cluster,
    commands.AcquireLease: leases.acquire_lease,
    commands.RenewLease: leases.renew_lease,
    commands.ReleaseLease: leases.release_lease,
    commands.SetSchedule: schedules.set_schedule,
    commands.DeleteSchedule: schedules.delete_schedule,
    commands.ListSchedules: schedules.list_schedules,
    commands.NoteRun: schedules.note_run,
}
