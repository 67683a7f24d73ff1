"""Wrong wall clocks of the machines (rules L10, C4)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from pk.sim.cluster import SimCluster
from pk.sim.machine import POWER_OFF_MS, RESTART_MS, SimMachine
from pk.sim.options import BROKER
from pk.sim.samples import Observer

#: More than a clock may step unnoticed, and than the time after which producers expire (rule L10).
CLOCK_JUMP_MS = (100_000, 90_000_000)
#: More than clock_step_max_ms, even with the effects of slewing.
NOT_TRUSTED_MS = 62_000
#: A broker whose clock is this far behind still accepts the timestamps of clients with right clocks
#: (message_timestamp_after_max_ms).
CLOCK_BEHIND_MS = (100_000, 1_500_000)
#: Shorter than the grace (campaign.GRACE_MS), after which a node may trust a wrong clock.
CLOCK_WRONG_MS = (500, 20_000)


class ClockFaults:
    """Sets clocks wrong.  `after`: runs a call after a delay; `count`: counts."""

    def __init__(
        self,
        cluster: SimCluster,
        observer: Observer,
        rng: random.Random,
        after: Callable[[float, Callable[[], None]], None],
        count: Callable[[str], None],
    ) -> None:
        self._cluster = cluster
        self._observer = observer
        self._rng = rng
        self._after = after
        self._count = count

    def step(self) -> None:
        """Step a clock.  Rule C4 needs right clocks on half of any majority of the brokers.  So if
        another wrong clock would be too much, one is set right; and the clock of an only broker
        steps by more than it trusts.
        """
        machine = self._rng.choice(self._cluster.machines)
        by_ms = self._rng.choice([-1, 1]) * self._rng.randint(500, 300_000)
        brokers = list(self._cluster.with_role(BROKER))
        wrong = [each for each in brokers if each.stepped_ms]
        if machine in brokers and machine not in wrong:
            if len(brokers) == 1:
                by_ms = by_ms if abs(by_ms) > NOT_TRUSTED_MS else 3 * NOT_TRUSTED_MS
            elif len(wrong) >= (len(brokers) // 2 + 1) // 2:
                machine = self._rng.choice(wrong)
                by_ms = -machine.stepped_ms
        self._cluster.world.record(f"clock step {machine.name} {by_ms}")
        machine.clock.step(by_ms)

    def jump(self) -> None:
        """Set a clock far ahead for a while, also across starts of its broker (sim/machine K4)."""
        self._jump([self._rng.choice(list(self._cluster.with_role(BROKER)))], self._ahead_ms())

    def _ahead_ms(self) -> int:
        return round(math.exp(self._rng.uniform(*map(math.log, CLOCK_JUMP_MS))))

    def _jump(self, machines: Sequence[SimMachine], by_ms: int) -> None:
        for machine in machines:
            if machine.knows_time:
                machine.jump(by_ms)
                self._after(self._rng.uniform(*CLOCK_WRONG_MS), machine.right)

    def wrong_start(self) -> None:
        """Stop one or all brokers' machines and restart them with a wrong clock.

        The machines lose their power or only their processes.  The clock is ahead or a little
        behind, by the same amount on all of them.
        """
        rng, machines = self._rng, list(self._cluster.with_role(BROKER))
        if rng.random() < 0.7:
            machines = [rng.choice(machines)]
        power = rng.random() < 0.5
        for machine in machines:
            if power:
                self._observer.hit(machine)
                machine.power_loss(rng.uniform(*POWER_OFF_MS))
            else:
                machine.kill_all(rng.uniform(*RESTART_MS))
        behind = rng.random() < 0.2
        self._jump(machines, -rng.randint(*CLOCK_BEHIND_MS) if behind else self._ahead_ms())
        self._count(f"starts {'behind' if behind else 'ahead'}")
