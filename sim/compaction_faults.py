"""Faults that hit a cleaning: its machine dies, loses power or room while segments are swapped, or
the partition gets another leader while its log is cleaned.

Each fault waits for the next cleaning of any broker.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from pk import errors
from pk.sim.cluster import SimCluster
from pk.sim.disk import GROWING, NO_ROOM
from pk.sim.machine import DISKS, POWER_OFF_MS, RESTART_MS, SimMachine
from pk.sim.network import NOBODY
from pk.sim.options import BROKER
from pk.sim.samples import Observer
from pk.types import NONE

#: Operations of the disk until the swap is hit; a swap has some dozens.
SWAP_OPERATIONS = 45
FULL_MS = (200.0, 5_000.0)
#: Runs a function after a delay in ms.
After = Callable[[float, Callable[[], None]], None]


class CompactionFaults:
    """Begins these faults.  `after(ms, work)` runs `work` later; `meet` counts an effect."""

    def __init__(
        self,
        cluster: SimCluster,
        observer: Observer,
        after: After,
        meet: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._observer = observer
        self._after = after
        self._meet = meet
        self._rng: random.Random = cluster.world.random("faults/compaction")
        traps = cluster.cleaning_traps
        self.begin: dict[str, Callable[[], None]] = {
            "death_in_swap": lambda: traps.update(written=self._die),
            "power_in_swap": lambda: traps.update(written=self._lose_power),
            "full_in_swap": lambda: traps.update(written=self._fill),
            "election_in_cleaning": lambda: traps.update(begun=self._elect),
        }

    def _die(self, machine: SimMachine, _path: str) -> None:
        self._meet("deaths in swaps")
        machine.storages[DISKS[BROKER]].crash_at = self._rng.randint(0, SWAP_OPERATIONS)

    def _lose_power(self, machine: SimMachine, path: str) -> None:
        """Cut the power in the operation in which the process would die."""
        storage, world = machine.storages[DISKS[BROKER]], self._cluster.world
        off_ms, dies = self._rng.uniform(*POWER_OFF_MS), storage.on_death

        def power() -> None:
            self._observer.hit(machine)
            machine.power_loss(off_ms)

        def dead() -> None:
            storage.on_death = dies
            dies()
            self._meet("power losses in swaps")
            world.loop.call_at_us(world.loop.now_us, power, context=NOBODY)

        self._die(machine, path)
        storage.on_death = dead

    def _fill(self, machine: SimMachine, _path: str) -> None:
        """Let some operations of the swap find no room."""
        storage, rng = machine.storages[DISKS[BROKER]], self._rng
        skipped, left = rng.randint(0, SWAP_OPERATIONS // 2), rng.choice([1, 2, 5, 1_000])

        def fault(operation: str, path: str) -> Exception | None:
            nonlocal skipped, left
            if operation not in GROWING:
                return None
            skipped -= 1
            if skipped >= 0 or left <= 0:
                return None
            left -= 1
            return errors.StorageFull(f"{storage.root}: {NO_ROOM} {path}")

        def undo() -> None:
            if storage.fault is fault:
                storage.fault = None

        self._meet("full disks in swaps")
        storage.fault = fault
        self._after(rng.uniform(*FULL_MS), undo)

    def _elect(self, machine: SimMachine, path: str) -> None:
        """Kill the leader of the partition that is cleaned, or drain the broker that cleans it."""
        name = path.rpartition("/")[2]
        leaders = [
            facts.leader
            for facts in self._observer.facts()
            if f"{facts.topic}-{facts.key.partition}" == name and facts.leader != NONE
        ]
        self._meet("elections in cleanings")
        world = self._cluster.world
        strike = machine.drain
        if leaders and leaders[0] != machine.node_id:
            leader = self._cluster.by_id[leaders[0]]
            strike = partial(leader.kill, BROKER, self._rng.uniform(*RESTART_MS))
        world.loop.call_at_us(world.loop.now_us, strike, context=NOBODY)
