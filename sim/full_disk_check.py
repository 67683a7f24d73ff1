"""Leaders whose disk is full, and what must become of them.

Checked
  V16  a leader whose disk has less than the reserve hands over within CALM_MS in which nothing else
       is wrong, if an in-sync replica has room and the partition has rested (rule L16)

What else is wrong is decided from outside: a fault that is not over, or was begun lately; a process
that is not the one it was; another leader, another ISR, another active controller.
"""

from __future__ import annotations

from typing import Any

from pk.sim.checkers import require
from pk.sim.cluster import SimCluster
from pk.sim.machine import DISKS, Machine
from pk.sim.options import BROKER
from pk.types import NONE, PartitionKey

#: More than a measurement, a heartbeat, the longest wait of the controller and a commit take.
CALM_MS = 10_000
#: After a move of the lead; more than `leader_rebalancer.DWELL_MS`.
REST_MS = 62_000
#: Less than clock_step_max_ms, with all that slewing and messages cost.
CLOCK_OFF_MS = 30_000


class FullDiskCheck:
    """Looks now and then; `reserve`: disk_reserve_bytes of every broker."""

    def __init__(self, cluster: SimCluster, reserve: int) -> None:
        self._cluster = cluster
        self._reserve = reserve
        self._since: dict[PartitionKey, tuple[Any, float]] = {}  #: what stands, since when
        self._led: dict[PartitionKey, tuple[int, float]] = {}  #: leader epoch, seen first when

    def look(self, now_ms: float, calm_since_ms: float) -> None:
        """`calm_since_ms`: since when no other fault has been at work."""
        active = self._cluster.active()
        controller = None if active is None else active.controller
        if not self._reserve or controller is None or controller.active is None:
            self._since.clear()
            return
        image = controller.active.machine.image
        lives = tuple(_life(machine) for machine in self._cluster.machines)
        stands: dict[PartitionKey, tuple[Any, float]] = {}
        for topic, number, state in image.partitions():
            key = PartitionKey(topic.topic_id, number)
            epoch, led_ms = self._led.get(key, (NONE, now_ms))
            if epoch != state.leader_epoch:
                led_ms = now_ms if epoch != NONE else now_ms - REST_MS
                self._led[key] = state.leader_epoch, led_ms
            rested = now_ms - led_ms >= REST_MS
            if state.leader == NONE or state.unclean or not rested or not self._full(state.leader):
                continue
            takers = [each for each in state.isr if each != state.leader and self._roomy(each)]
            if not takers or not all(image.available(each) for each in takers):
                continue
            facts = (state.leader_epoch, state.isr, tuple(takers), controller.active.epoch, lives)
            known, since_ms = self._since.get(key, (None, now_ms))
            stands[key] = (facts, since_ms if known == facts else now_ms)
            calm_ms = now_ms - max(stands[key][1], calm_since_ms)
            words = "{}-{} is led by {}, whose disk is full, though {} have room"
            given = (topic.name, number, state.leader, takers)
            require(calm_ms <= CALM_MS, "V16", words, *given)
        self._since = stands

    def _full(self, broker: int) -> bool:
        return bool(self._storage(broker).free_bytes() < self._reserve)

    def _roomy(self, broker: int) -> bool:
        machine = self._cluster.by_id[broker]
        has_room = self._storage(broker).capacity is None
        return machine.serving and has_room and self._right(machine)

    def _right(self, machine: Machine) -> bool:
        """Its clock is no reason not to lead (rule L10): some are set apart for good."""
        skews = sorted(each.clock.skew_ms for each in self._cluster.machines)
        middle = len(skews) // 2
        median_ms = (skews[middle] + skews[~middle]) / 2
        return abs(machine.clock.skew_ms - median_ms) <= CLOCK_OFF_MS

    def _storage(self, broker: int) -> Any:
        return self._cluster.by_id[broker].storages[DISKS[BROKER]]


def _life(machine: Machine) -> tuple[int, ...]:
    nodes = (machine.sim_node(role) for role in sorted(machine.processes))
    return tuple(NONE if node is None else node.incarnation for node in nodes)
