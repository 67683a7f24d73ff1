"""What goes wrong in a run, and when it is right again: a plan made of a seed, carried out tick by
tick.

Every fault has its end: a killed node is restarted by the supervisor, a full disk gets space, a cut
link heals.  `heal` ends all of them at once, for the phase in which everything must become well.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from pk.sim.cluster import RESTART_MS, SimCluster
from pk.sim.options import SimOptions
from pk.sim.world import SimWorld

LINKS = (
    ("client", "broker"),
    ("admin", "broker"),
    ("broker", "controller"),
    ("broker", "tier"),
)
#: Longer than any reply of the machine that lost power can be on its way (see oracle.py, era).
POWER_OFF_MS = (400, 1_500)
SLOW_DELAY_US = (1_000, 60_000)
SLOW_BYTES_PER_MS = 200


class Faults:
    """See the module.  `restart_client` kills the client's process and starts another."""

    def __init__(
        self,
        world: SimWorld,
        cluster: SimCluster,
        options: SimOptions,
        restart_client: Callable[[], None],
    ) -> None:
        self._world = world
        self._cluster = cluster
        self._options = options
        self._restart_client = restart_client
        self._rng: random.Random = world.random("faults")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._next_ms = self._rng.uniform(100, 800)
        self.counts: dict[str, int] = {}

    def _after(self, delay_ms: float, undo: Callable[[], None]) -> None:
        self._number += 1
        due = self._world.loop.now_us / 1000 + delay_ms
        heapq.heappush(self._due, (due, self._number, undo))

    def tick(self) -> None:
        """Undo what is over; begin what is due."""
        now_ms = self._world.loop.now_us / 1000
        while self._due and self._due[0][0] <= now_ms:
            heapq.heappop(self._due)[2]()
        if self._options.faults and now_ms >= self._next_ms:
            self._next_ms = now_ms + self._rng.uniform(*self._options.fault_every_ms)
            name = self._rng.choice(self._options.faults)
            self.counts[name] = self.counts.get(name, 0) + 1
            self._world.record(f"fault {name}")
            getattr(self, f"_{name}")()

    def heal(self) -> None:
        """No fault is left; dead nodes are restarted by the supervisor."""
        while self._due:
            heapq.heappop(self._due)[2]()
        for storage in self._cluster.storages.values():
            storage.crash_at = None
        self._cluster.store.late_commit = None
        self._world.record("healed")

    # -- processes ---------------------------------------------------------------------------------

    def _kill(self, *roles: str) -> None:
        for role in roles:
            self._cluster.kill(role, self._rng.uniform(*RESTART_MS))

    def _kill_broker(self) -> None:
        self._kill("broker")

    def _kill_controller(self) -> None:
        self._kill("controller")

    def _kill_tier(self) -> None:
        self._kill("tier")

    def _kill_all(self) -> None:
        self._kill("controller", "broker", "tier")

    def _kill_client(self) -> None:
        self._restart_client()

    def _torn_write(self) -> None:
        """The process dies inside one of its next operations on the disk."""
        name = self._rng.choice(sorted(self._cluster.storages))
        self._cluster.storages[name].crash_at = self._rng.randint(0, 60)

    def _power(self) -> None:
        self._cluster.power_loss(self._rng.uniform(*POWER_OFF_MS))

    def _drain(self) -> None:
        self._cluster.drain()

    def _clock_step(self) -> None:
        self._cluster.step_clocks(self._rng.choice([-1, 1]) * self._rng.randint(500, 300_000))

    # -- network -----------------------------------------------------------------------------------

    def _break_streams(self) -> None:
        self._world.network.break_streams(*self._rng.choice(LINKS))

    def _slow_network(self) -> None:
        network = self._world.network
        pair = self._rng.choice(LINKS)
        for one, two in (pair, pair[::-1]):
            link = network.link(one, two)
            link.delay_us, link.bytes_per_ms = SLOW_DELAY_US, SLOW_BYTES_PER_MS
            link.break_chance = 0.02

        def undo() -> None:
            for one, two in (pair, pair[::-1]):
                link, model = network.link(one, two), network.default
                link.delay_us, link.bytes_per_ms = model.delay_us, model.bytes_per_ms
                link.break_chance = 0.0

        self._after(self._rng.uniform(200, 2_000), undo)

    def _cut(self) -> None:
        one, two = self._rng.choice(LINKS)
        both = self._rng.random() < 0.7
        self._world.network.cut(one, two, both=both)
        self._after(
            self._rng.uniform(50, 3_000), lambda: self._world.network.heal(one, two, both=both)
        )

    # -- disk and store ----------------------------------------------------------------------------

    def _disk_full(self) -> None:
        storage = self._cluster.storages[self._rng.choice(["d1", "d1", "meta"])]
        storage.capacity = storage.used_bytes() + self._rng.randint(0, 30_000)

        def undo() -> None:
            storage.capacity = None

        self._after(self._rng.uniform(100, 2_000), undo)

    def _store_outage(self) -> None:
        store = self._cluster.store
        store.away = True

        def undo() -> None:
            store.away = False

        self._after(self._rng.uniform(100, 3_000), undo)

    def _store_flaky(self) -> None:
        store = self._cluster.store
        store.lost_requests, store.lost_replies, store.stragglers = 0.1, 0.2, 0.15
        store.delay_ms = (1.0, 150.0)

        def undo() -> None:
            store.lost_requests = store.lost_replies = store.stragglers = 0.0
            store.delay_ms = (0.5, 8.0)

        self._after(self._rng.uniform(300, 3_000), undo)

    def _late_commit(self) -> None:
        """The tier dies with a commit on its way; its successor is quick, the commit is not: it
        mostly lands after the successor has looked at the table and before it commits itself.
        """
        rng, cluster = self._rng, self._cluster

        def committed() -> float:
            restart_ms = rng.uniform(5, 40)
            cluster.kill("tier", restart_ms)
            return restart_ms + rng.uniform(15, 70)

        cluster.store.late_commit = committed

    def _optimize(self) -> None:
        broker = self._cluster.broker
        if broker is None or not self._cluster.serving:
            return
        for topic in list(broker.core.follower.image.topics.values()):
            self._cluster.store.optimize(topic.name, topic.topic_id)
