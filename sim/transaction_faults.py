"""Faults of transactions: control requests that come late and twice, and coordinators that die.

A control request is one of `CONTROL`: a request of a producer or of a broker that begins, registers
or ends transactions.  The sender of a late request takes its stream for broken and repeats the
request on another stream, so the request is executed twice, in any order (sim/network N7).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from pk.sim.cluster import SimCluster
from pk.sim.lake import LakeFaults
from pk.sim.machine import DISKS, RESTART_MS, SimMachine
from pk.sim.network import NOBODY, End
from pk.sim.options import BROKER, SimOptions
from pk.wire import frames

CONTROL = ("init_producer_id", "end_txn", "add_partitions_to_txn", "write_txn_markers")
#: The control requests of runs with jobs only.
JOB_CONTROL = (
    "add_partitions_to_txn",
    "write_txn_markers",
    "join_transaction",
    "commit_participants",
    "commit_participants",
    "abort_participants",
)
#: The control requests of runs with jobs of log and table.
TABLE_CONTROL = (
    "join_transaction",
    "prepare_participants",
    "commit_participants",
    "abort_participants",
    "write_txn_markers",
)
MARKERS = "write_txn_markers"
LATE_MS = ((1.0, 50.0), (50.0, 3_000.0))
#: The receiver of a late request takes the stream for open for so long.
LINGER_MS = 5_000.0
FULL_MS = (300.0, 8_000.0)
#: Runs a function after a delay in ms.
After = Callable[[float, Callable[[], None]], None]


class TransactionFaults:
    """Begins these faults.  `after(ms, work)` runs `work` later; `meet` counts an effect."""

    def __init__(self, cluster: SimCluster, after: After, meet: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._options: SimOptions = cluster.options
        self._after = after
        self._meet = meet
        self._rng: random.Random = cluster.world.random("faults/transactions")
        #: returns the broker that coordinates a transactional id; NONE = no broker does
        self.coordinator_of: Callable[[str], int] = lambda _: 0
        self.begin: dict[str, Callable[[], None]] = {
            "late_control": self._late_control,
            "kill_coordinator": self._kill_coordinator,
            "kill_at_markers": self._kill_at_markers,
            "coordinator_full": self._coordinator_full,
            **LakeFaults(cluster.lake, cluster.world.random("faults/lake"), after, meet).begin,
        }

    @property
    def _control(self) -> tuple[str, ...]:
        """The kinds of control requests that the run has."""
        options = self._options
        plain = CONTROL if options.transactions else ()
        of_tables = TABLE_CONTROL if options.together_jobs else ()
        return (*plain, *(JOB_CONTROL if options.jobs else ()), *of_tables)

    def _coordinator(self) -> SimMachine | None:
        """Return the machine that coordinates a drawn transactional id."""
        name = self._rng.choice(self._options.transactional_ids)
        return self._cluster.by_id.get(self.coordinator_of(name))

    def _late_control(self) -> None:
        """Let the next control request of a drawn kind come late, mostly after its repetition."""
        rng, network = self._rng, self._cluster.world.network
        kind, late_ms = rng.choice(self._control), rng.uniform(*rng.choice(LATE_MS))

        def trap(end: End, frame: bytes) -> None:
            if _kind_of(frame) == kind:
                network.trap = None
                self._meet(f"late {kind}")
                network.give_up(end, late_ms, LINGER_MS)

        network.trap = trap

    def _kill_coordinator(self) -> None:
        machine = self._coordinator()
        if machine is not None:
            self._meet("coordinators killed")
            machine.kill(BROKER, self._rng.uniform(*RESTART_MS))

    def _kill_at_markers(self) -> None:
        """Kill the next coordinator that sends markers, when the first of them are on their way.

        The decision is committed.  Sometimes the markers arrive late, when another coordinator has
        sent them again.
        """
        rng, world = self._rng, self._cluster.world
        network, late = world.network, rng.random() < 0.5
        late_ms, restart_ms = rng.uniform(50, 3_000), rng.uniform(*RESTART_MS)

        def trap(end: End, frame: bytes) -> None:
            if _kind_of(frame) != MARKERS:
                return
            network.trap = None
            self._meet("coordinators killed at markers")
            name = end.node.name.partition("/")[0]
            machine = next(each for each in self._cluster.machines if each.name == name)
            if late:
                network.give_up(end, late_ms, LINGER_MS)
            kill = partial(machine.kill, BROKER, restart_ms)
            world.loop.call_at_us(world.loop.now_us, kill, context=NOBODY)

        network.trap = trap

    def _coordinator_full(self) -> None:
        """Fill the disk of a coordinator for a while."""
        machine = self._coordinator()
        storage = None if machine is None else machine.storages[DISKS[BROKER]]
        if storage is None or storage.capacity is not None:
            return
        self._meet("full coordinators")
        storage.capacity = storage.used_bytes() + self._rng.choice([0, self._rng.randint(0, 3_000)])

        def undo() -> None:
            storage.capacity = None

        self._after(self._rng.uniform(*FULL_MS), undo)


def _kind_of(frame: bytes) -> str | None:
    kind: str | None = frames.decode(frame).head.WhichOneof("body")
    return kind
