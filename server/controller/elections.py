"""Who leads a partition, and what ISR, ELR and last-known become when brokers come and go
(KIP-966).

A partition's state moves through `Draft`, a scratch copy on which the controller applies one or
more of the steps below; `Draft.record` is the change, or None.  Elections are tried in this
order:

  | who is there                                   | elected                      | unclean |
  |------------------------------------------------|------------------------------|---------|
  | an available member of the ISR                 | the first in replica order   | no      |
  | an available member of the ELR                 | the same; it joins the ISR   | no      |
  | ISR and ELR empty, every last-known registered | greatest (last epoch, end)   | yes     |
  | the same, some missing, wait over and allowed  | greatest among those present | yes     |
  | otherwise                                      | nobody: leader NONE          | –       |

The third row is the recovery election of rule R3: it needs no permission, for nothing
acknowledged can be anywhere else.  With one last-known member its log is the greatest without
being asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pk.server.controller.image import PartitionState
from pk.types import NONE, NodeId, TopicId
from pk.wire import pk_pb2 as wire

#: (last epoch, log end) of a replica, as a recovery election compares them.
Position = tuple[int, int]


@dataclass(slots=True)
class Cluster:
    """What an election may know of the brokers."""

    available: Callable[[NodeId], bool]
    positions: Mapping[NodeId, Position] = field(default_factory=dict)
    unclean_enabled: bool = False  #: unclean_leader_election_enable of the topic
    wait_over: bool = False  #: unclean_recovery_wait_ms has passed


class Draft:
    """One partition while the controller decides about it."""

    def __init__(self, before: PartitionState, min_insync_replicas: int) -> None:
        self.before = before
        self.now = before
        self.led_anew = False
        self._min_isr = min(max(1, min_insync_replicas), len(before.replicas))

    # -- members leave --------------------------------------------------------------------------

    def fence(self, broker_id: NodeId) -> None:
        """`broker_id` is gone but has its data: below min ISR it stays eligible (ELR)."""
        now = self.now
        if broker_id not in now.isr:
            return
        isr = tuple(member for member in now.isr if member != broker_id)
        eligible = len(isr) < self._min_isr
        elr = (*now.elr, broker_id) if eligible else now.elr
        self._set(replace(now, isr=isr, elr=elr), losing=broker_id)

    def lose(self, broker_id: NodeId) -> None:
        """`broker_id` may have lost data (rule L3): it is neither in sync nor eligible."""
        now = self.now
        if broker_id not in now.isr and broker_id not in now.elr:
            return
        isr = tuple(member for member in now.isr if member != broker_id)
        elr = tuple(member for member in now.elr if member != broker_id)
        last_known = now.last_known
        if not isr and broker_id not in last_known:
            last_known = (*last_known, broker_id)
        self._set(replace(now, isr=isr, elr=elr, last_known=last_known), losing=broker_id)

    def _set(self, now: PartitionState, losing: NodeId) -> None:
        if now.leader == losing:
            now = replace(now, leader=NONE)
            self.led_anew = True
        self.now = now

    def forget_eligible(self) -> None:
        """min_insync_replicas changed: what made the ELR safe no longer holds (rule R1).

        While the ISR is empty nobody moves the high watermark, so the ELR stays true and stays.
        """
        if self.now.isr and self.now.elr:
            self.now = replace(self.now, elr=())

    # -- somebody leads -------------------------------------------------------------------------

    def elect(self, cluster: Cluster) -> bool:
        """Give a leaderless partition a leader if the table above has one."""
        now = self.now
        if now.leader != NONE:
            return False
        for eligible in (now.isr, now.elr):
            for member in now.replicas:
                if member in eligible and cluster.available(member):
                    isr = now.isr if member in now.isr else (*now.isr, member)
                    self._lead(member, isr, unclean=now.unclean)
                    return True
        if now.isr or now.elr:
            return False
        chosen = self._recover(cluster)
        if chosen is None:
            return False
        self._lead(chosen, (chosen,), unclean=True)
        return True

    def _recover(self, cluster: Cluster) -> NodeId | None:
        known = self.now.last_known or self.now.replicas
        present = [member for member in known if cluster.available(member)]
        if len(present) < len(known) and not (cluster.wait_over and cluster.unclean_enabled):
            return None
        if len(present) == 1:
            return present[0]
        if not present or any(member not in cluster.positions for member in present):
            return None
        return max(present, key=lambda member: (cluster.positions[member], -present.index(member)))

    def _lead(self, leader: NodeId, isr: tuple[NodeId, ...], *, unclean: bool) -> None:
        elr = tuple(member for member in self.now.elr if member not in isr)
        self.led_anew = True
        self.now = replace(
            self.now, leader=leader, isr=isr, elr=elr, last_known=(), unclean=unclean
        )

    def lead_again(self) -> None:
        """The same leader begins a new leader epoch: its process was restarted (rule L5)."""
        if self.now.leader != NONE:
            self.led_anew = True

    # -- the outcome ----------------------------------------------------------------------------

    def waits_for(self, available: Callable[[NodeId], bool]) -> tuple[NodeId, ...]:
        """The brokers whose return would give the partition a leader."""
        now = self.now
        members = (*now.isr, *now.elr) or now.last_known or now.replicas
        return tuple(member for member in members if not available(member))

    def record(self, topic_id: TopicId, partition: int) -> wire.PartitionChangeRecord | None:
        """The change from `before` to `now`, or None if there is none."""
        before, now = self.before, self.now
        if now == before and not self.led_anew:
            return None
        change = wire.PartitionChangeRecord(
            topic_id=topic_id, partition=partition, unclean=now.unclean
        )
        if now.isr != before.isr:
            change.isr.CopyFrom(wire.IntList(values=now.isr))
        if now.elr != before.elr:
            change.elr.CopyFrom(wire.IntList(values=now.elr))
        if now.last_known != before.last_known:
            change.last_known.CopyFrom(wire.IntList(values=now.last_known))
        if self.led_anew:
            change.leader = now.leader
        return change
