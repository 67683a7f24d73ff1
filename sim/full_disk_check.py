"""The check that leaders whose disk is full hand over their leadership, also if the disk of the
active controller is full.

Checked
  V16  A leader whose disk has less free space than the reserve hands over within CALM_MS without
       another fault, if an in-sync replica has space and the partition has rested (rule L16).

The check decides from outside what counts as another fault: a fault that is not over, or that began
lately; a process that was restarted; a change of leader, ISR or active controller.
"""

from __future__ import annotations

from typing import Any

from pk.sim.checkers import require
from pk.sim.cluster import SimCluster
from pk.sim.machine import DISKS, SimMachine
from pk.sim.options import BROKER
from pk.types import NONE, PartitionKey

#: Longer than a measurement, a heartbeat, the longest wait of the controller and a commit together.
CALM_MS = 10_000
#: Rest of a partition after a change of its leader; more than `leader_rebalancer.DWELL_MS`.
REST_MS = 62_000
#: Less than clock_step_max_ms, even with the effects of slewing and of message delays.
CLOCK_OFF_MS = 30_000


class FullDiskCheck:
    """Checks V16 from time to time; `reserve` is the disk_reserve_bytes of every broker."""

    def __init__(self, cluster: SimCluster, reserve: int) -> None:
        self._cluster = cluster
        self._reserve = reserve
        #: a full leader's situation, and since when it is unchanged
        self._since: dict[PartitionKey, tuple[Any, float]] = {}
        #: leader epoch, and when it was first seen
        self._led: dict[PartitionKey, tuple[int, float]] = {}

    def look(self, now_ms: float, calm_since_ms: float) -> None:
        """Check all partitions; since `calm_since_ms` no other fault was active."""
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

    def _right(self, machine: SimMachine) -> bool:
        """Return whether the broker's clock allows it to lead (rule L10).

        Some machines have a clock that differs during the whole run.
        """
        skews = sorted(each.clock.skew_ms for each in self._cluster.machines)
        middle = len(skews) // 2
        median_ms = (skews[middle] + skews[~middle]) / 2
        return abs(machine.clock.skew_ms - median_ms) <= CLOCK_OFF_MS

    def _storage(self, broker: int) -> Any:
        return self._cluster.by_id[broker].storages[DISKS[BROKER]]


def _life(machine: SimMachine) -> tuple[int, ...]:
    nodes = (machine.sim_node(role) for role in sorted(machine.processes))
    return tuple(NONE if node is None else node.incarnation for node in nodes)
