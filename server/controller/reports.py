"""The reports of brokers about their replicas, from heartbeats: soft state of one term.

A recovery election compares log ends (rule R3), and a replica that its broker cannot serve must not
be elected (rules L2, L9).  Positions and offline replicas are not records.  They belong to one
registration.  A new term has none until brokers report again, and every heartbeat repeats the whole
list of offline replicas.

Their consequences are durable: a record removes an offline replica from ISR and ELR, so that no
later term takes it for a holder of the data.  A new term assumes nothing about a broker before its
first heartbeat.  Only brokers that have sent a heartbeat in this term are chosen by recovery
elections or join an ISR.

A replica may be *unfit* to lead although its broker serves it, for example because the disk is full
(rule L16).  Unfitness changes no record.  It orders the replicas that may lead, and
`leader_rebalancer.py` moves leaders by it.

Invariants
  H1  A report counts only for its own broker epoch.
  H2  A position counts only if the broker's image had reached the record that left the partition
      without a leader.  From that record on the log of the replica does not change, until the next
      leader is elected.
  H3  A report is replaced, never changed, so that a command that carries a report stays as it was.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from pk.server.metadata.image import MetadataImage
from pk.types import NodeId, PartitionKey
from pk.wire import pk_pb2 as wire

#: (last epoch, log end) of a replica; recovery elections compare these.
EpochAndEnd = tuple[int, int]
#: The most positions that a heartbeat reply asks for.
POSITIONS_MAX = 10_000


#: The reasons of `Unfit` (rule L16).
STORAGE_FULL = "storage_full"
CLOCK_OFF = "clock_off"  #: the wall clock of the broker is off the median (rule L10)


@dataclass(slots=True, frozen=True)
class Unfit:
    """One reason why replicas of a broker should not lead.

    replicas: the replicas concerned; None = every replica of the broker.
    gives_up: whether the replicas also give up the leaderships that they have.
    """

    reason: str
    replicas: Mapping[PartitionKey, None] | None = None
    gives_up: bool = False

    def covers(self, key: PartitionKey) -> bool:
        return self.replicas is None or key in self.replicas


@dataclass(slots=True, frozen=True)
class Report:
    """The report of one registration in this term."""

    broker_epoch: int
    offline: Mapping[PartitionKey, None] = field(default_factory=dict)
    #: The position, and the offset that the broker's image had reached when it reported it.
    positions: Mapping[PartitionKey, tuple[EpochAndEnd, int]] = field(default_factory=dict)
    unfit: tuple[Unfit, ...] = ()
    partitions_max: int = 0  #: how many replicas the broker may hold; 0 = it does not say

    def gives_up(self, key: PartitionKey) -> str:
        """The reason why the replica gives up the lead; '' if there is none."""
        return next((each.reason for each in self.unfit if each.gives_up and each.covers(key)), "")

    def position(self, key: PartitionKey, since: int) -> EpochAndEnd | None:
        """Return the replica's position, or None if it does not count (H2).

        `since`: the offset of the record that left the partition without a leader."""
        found = self.positions.get(key)
        return None if found is None or found[1] < since else found[0]


#: Reports by broker.  A broker without a report has sent no heartbeat in this term.
Reports = Mapping[NodeId, Report]


def reported(
    before: Report | None, request: wire.BrokerHeartbeatRequest, leaderless: Container[PartitionKey]
) -> Report:
    """Return the report of a broker after `request`, without positions of led partitions."""
    kept: dict[PartitionKey, tuple[EpochAndEnd, int]] = {}
    if before is not None and before.broker_epoch == request.broker_epoch:
        kept = {key: at for key, at in before.positions.items() if key in leaderless}
    for each in request.positions:
        key = PartitionKey(each.topic_id, each.partition)
        kept[key] = ((each.last_epoch, each.log_end), request.metadata_offset)
    offline = {PartitionKey(e.topic_id, e.partition): None for e in request.offline_replicas}
    unfit = tuple(_unfit(each) for each in request.unfit)
    return Report(request.broker_epoch, offline, kept, unfit, request.partitions_max)


def _unfit(said: wire.Unfit) -> Unfit:
    replicas = {PartitionKey(each.topic_id, each.partition): None for each in said.replicas}
    return Unfit(said.reason, None if said.all else replicas, said.gives_up)


def wanted(
    image: MetadataImage, reports: Reports, who: NodeId, also: Container[PartitionKey]
) -> list[PartitionKey]:
    """Return the partitions whose position broker `who` is asked to report.

    These are the leaderless partitions with empty ISR and ELR that have `who` among their
    last-known members, and the replicas of `who` among `also`, for which an unclean election was
    requested.
    """
    report = reports.get(who)
    found: list[PartitionKey] = []
    for key, since in image.leaderless.items():
        state = image.partition(key)
        if state is None or who not in state.replicas:
            continue
        if key not in also and (
            state.isr or state.elr or who not in (state.last_known or state.original)
        ):
            continue
        if report is not None and (
            key in report.offline or report.position(key, since) is not None
        ):
            continue
        found.append(key)
        if len(found) == POSITIONS_MAX:
            break
    return found
