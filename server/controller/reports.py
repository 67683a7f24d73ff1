"""What brokers say of their replicas in heartbeats: soft state of one term.

A recovery election compares log ends (rule R3), and a replica that its broker cannot serve must
not be elected (rules L2, L9).  Neither is a record: both are bound to the registration that said
them, a new term knows nothing until it is told again, and every heartbeat repeats the whole list
of replicas that are offline.

What *is* durable follows from it: a replica reported offline leaves ISR and ELR by a record, so
that no later term takes it for a holder of the data.  What a new term does not know yet it does
not assume: recovery elections choose only among brokers that it has heard, and only such a broker
joins an ISR.

A replica may also be *unfit* to lead while it can be served: the disk of its broker is full (rule
L16).  That changes no record by itself.  It says who should lead among those that may, and
`leader_rebalancer.py` moves leaders by it.

Invariants
  H1  a report counts for its own broker epoch only
  H2  a position counts only if the broker's image had reached the record that left the partition
      without a leader: from then on the replica stands still; the next leader ends it
  H3  a report is replaced, never changed: a command that carries one means what it meant
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from pk.server.metadata.image import MetadataImage
from pk.types import NodeId, PartitionKey
from pk.wire import pk_pb2 as wire

#: (last epoch, log end) of a replica, as a recovery election compares them.
Position = tuple[int, int]
#: Positions asked of a broker in one heartbeat.
POSITIONS_MAX = 10_000


#: The reasons of `Unfit` (rule L16).
STORAGE_FULL = "storage_full"
CLOCK_OFF = "clock_off"  #: the wall clock of the broker is off the median (rule L10)


@dataclass(slots=True, frozen=True)
class Unfit:
    """One reason why replicas of a broker should not lead.

    replicas: None = every replica of the broker.
    gives_up: where they lead, another replica shall; else they only get no leadership.
    """

    reason: str
    replicas: Mapping[PartitionKey, None] | None = None
    gives_up: bool = False

    def covers(self, key: PartitionKey) -> bool:
        return self.replicas is None or key in self.replicas


@dataclass(slots=True, frozen=True)
class Report:
    """What one registration has said in this term."""

    broker_epoch: int
    offline: Mapping[PartitionKey, None] = field(default_factory=dict)
    #: Position, and the offset the broker's image had reached when it said so.
    positions: Mapping[PartitionKey, tuple[Position, int]] = field(default_factory=dict)
    unfit: tuple[Unfit, ...] = ()

    def gives_up(self, key: PartitionKey) -> str:
        """Why the replica shall not lead any longer; '' = nothing says so."""
        return next((each.reason for each in self.unfit if each.gives_up and each.covers(key)), "")

    def position(self, key: PartitionKey, since: int) -> Position | None:
        """H2: `since` is the offset from which the partition has no leader."""
        found = self.positions.get(key)
        return None if found is None or found[1] < since else found[0]


#: By broker; a broker that is not named has not been heard in this term.
Reports = Mapping[NodeId, Report]


def reported(
    before: Report | None, request: wire.BrokerHeartbeatRequest, leaderless: Container[PartitionKey]
) -> Report:
    """The report of a broker after `request`; positions of partitions that are led again go."""
    kept: dict[PartitionKey, tuple[Position, int]] = {}
    if before is not None and before.broker_epoch == request.broker_epoch:
        kept = {key: at for key, at in before.positions.items() if key in leaderless}
    for each in request.positions:
        key = PartitionKey(each.topic_id, each.partition)
        kept[key] = ((each.last_epoch, each.log_end), request.metadata_offset)
    offline = {PartitionKey(e.topic_id, e.partition): None for e in request.offline_replicas}
    unfit = tuple(_unfit(each) for each in request.unfit)
    return Report(request.broker_epoch, offline, kept, unfit)


def _unfit(said: wire.Unfit) -> Unfit:
    replicas = {PartitionKey(each.topic_id, each.partition): None for each in said.replicas}
    return Unfit(said.reason, None if said.all else replicas, said.gives_up)


def wanted(
    image: MetadataImage, reports: Reports, who: NodeId, also: Container[PartitionKey]
) -> list[PartitionKey]:
    """The partitions whose position `who` shall report.

    Those without a leader whose ISR and ELR are empty and that count `who` among the last known;
    and of `also`, where an unclean election was asked for, all that `who` has.
    """
    report = reports.get(who)
    found: list[PartitionKey] = []
    for key, since in image.leaderless.items():
        state = image.partition(key)
        if state is None or who not in state.replicas:
            continue
        if key not in also and (
            state.isr or state.elr or who not in (state.last_known or state.replicas)
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
