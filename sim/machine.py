"""One simulated machine: disks, a clock, power, processes and the supervisor that restarts them.

The processes are the production classes, composed as their `main` functions do.  A simulated death
loses what a real one would lose: `kill` keeps what is WRITTEN, `power_loss` keeps what is SYNCED
(rule L1), `replace_disk` keeps nothing.

Rules
  K1  The supervisor restarts a process that would have ended (its start failed, or it met a fatal
      error), as the real supervisor does.  An error that needs an operator is a failure of the run,
      because nothing here needs one without damage.
  K2  The log of each process goes into the trace; a reported bug is a failure of the run.
  K3  A machine without power runs nothing; when the power returns it has another boot id.
  K4  A clock that jumped stays wrong across starts until it is set right (rule L10).  With an empty
      disk the clock is set right at once, because nothing on that disk could show the jump.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from pk import errors, tracing
from pk.log.last_run import FILE as LAST_RUN
from pk.log.storage import Storage
from pk.server.broker.node import BrokerNode
from pk.server.controller.node import ControllerNode
from pk.server.node.run_config import RunConfig
from pk.server.tier.node import TierNode
from pk.sim.cleaner import SimCleaner
from pk.sim.disk import Crashed, SimDisk, SimStorage
from pk.sim.lake import SimLake
from pk.sim.loop import SimNode
from pk.sim.objects import SimObjects
from pk.sim.options import BROKER, CONTROLLER, TIER, NodePlan, SimOptions
from pk.sim.world import SimClock, SimWorld
from pk.tiering.worker import Executors
from pk.world import World

T = TypeVar("T")

#: Disk name by role: for DIR/metadata of a controller and for a broker's data directory.
DISKS = {CONTROLLER: "meta", BROKER: "d1"}
#: Files that a tier process merges into one: tables of the simulator have few files.
MERGED_FILES = 2
#: In runs with maintained tables an owner gives a hand-over up after the first time, and takes none
#: whose horizons begin within the second one: tombstones leave tables within a run.
OWNER_TIMEOUT_MS, LANDS_WITHIN_MS = 1_500, 2_500
RESTART_MS = (20, 800)
POWER_OFF_MS = (400, 5_000)


class KillableStorage(SimStorage):
    """A storage that kills its process in the operation that `crash_at` names."""

    def __init__(self, root: str, rng: random.Random) -> None:
        super().__init__(root, rng)
        self.on_death: Callable[[], None] = lambda: None

    def _die(
        self, apply: Callable[[], None], partly: Callable[[int], None] | None, size: int
    ) -> None:
        try:
            super()._die(apply, partly, size)
        except Crashed:
            self.on_death()  # other processes, such as the tier, can read what is WRITTEN
            raise


class MachineEnvironment(Protocol):
    """What a machine uses of its cluster (cluster.py)."""

    @property
    def world(self) -> SimWorld: ...

    @property
    def options(self) -> SimOptions: ...

    @property
    def store(self) -> SimObjects: ...

    @property
    def lake(self) -> SimLake: ...

    @property
    def problems(self) -> list[str]: ...

    def run_of(self, plan: NodePlan) -> RunConfig: ...

    def quorum_of(self) -> dict[str, Any]: ...

    def said(self, name: str, event: str, facts: dict[str, object]) -> None: ...

    def cleaning(self, machine: SimMachine, step: str, path: str) -> None: ...

    def watch_controller(self, machine: SimMachine, node: ControllerNode) -> None: ...

    def watch_broker(self, machine: SimMachine, node: BrokerNode) -> None: ...

    def has_operator_for(self, machine: SimMachine, role: str) -> bool: ...


class NodeLog(tracing.Log):
    """The log of a process, written into the trace (K2)."""

    def __init__(self, name: str, cluster: MachineEnvironment) -> None:
        super().__init__(name, lambda: 0)
        self._of = cluster

    def _line(self, level: str, event: str, facts: dict[str, object]) -> None:
        known = {name: value for name, value in facts.items() if name != "trace"}
        self._of.said(self._role, event, known)
        self._of.world.record(f"{self._role} {level} {event} {known}")
        if level == "BUG":
            self._of.problems.append(f"{self._role}: {event}: {facts.get('trace')}")


@dataclass(slots=True)
class Process:
    """One role on a machine, across restarts."""

    role: str
    name: str  #: name of its node in the simulated world
    node: Any = None  #: the present ControllerNode, BrokerNode or TierNode
    start: Any = None  #: the task that starts it
    due_ms: float = 0.0  #: when the supervisor restarts it
    closing: Any = None  #: task of a drain that goes on


class SimMachine:
    """One simulated machine with its processes; the module says what each fault keeps."""

    def __init__(self, cluster: MachineEnvironment, plan: NodePlan) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self.plan = plan
        self.name = plan.name
        self.node_id = plan.number
        self.boots = 1
        self.disks_replaced = 0
        self.processes = {
            role: Process(role, f"{plan.name}/{role}")
            for role in (CONTROLLER, BROKER, TIER)
            if role in plan.roles
        }
        self.storages: dict[str, KillableStorage] = {}
        for role, disk in DISKS.items():
            if role in self.processes:
                self._insert(disk, role)
        self.clock = SimClock(self._world.loop, plan.skew_ms)
        for process in self.processes.values():
            self._world.clocks[process.name] = self.clock
        self._jumped_ms = 0  #: error of the clock by jumps
        self.run: RunConfig = cluster.run_of(plan)
        self._rng = self._world.random(f"{plan.name}/supervisor")

    def _insert(self, disk: str, role: str) -> None:
        """Put an empty disk into the machine."""
        root = f"{self.name}.{disk}"
        number = f"/{self.disks_replaced}" if self.disks_replaced else ""
        fresh = KillableStorage(root, self._world.random(f"disk/{root}{number}"))
        fresh.on_death = lambda: self.kill(role, self._rng.uniform(*RESTART_MS))
        self.storages[disk] = fresh

    # -- processes ---------------------------------------------------------------------------------

    def _now_ms(self) -> float:
        return self._world.loop.now_us / 1000

    def sim_node(self, role: str) -> SimNode | None:
        """Return the running node of a role, or None."""
        process = self.processes.get(role)
        node = self._world.nodes.get(process.name) if process is not None else None
        return node if node is not None and node.alive else None

    def alive(self, role: str) -> bool:
        return self.sim_node(role) is not None

    def started(self, role: str) -> bool:
        """Whether the process of a role runs, and its start has succeeded."""
        start = self.processes[role].start
        return self.alive(role) and start.done() and not start.cancelled() and not start.exception()

    @property
    def controller(self) -> ControllerNode | None:
        return self.processes[CONTROLLER].node if self.alive(CONTROLLER) else None

    @property
    def broker(self) -> BrokerNode | None:
        return self.processes[BROKER].node if self.alive(BROKER) else None

    @property
    def tier(self) -> TierNode | None:
        return self.processes[TIER].node if self.alive(TIER) else None

    @property
    def serving(self) -> bool:
        """Whether the broker accepts streams."""
        broker = self.broker
        return broker is not None and broker._serving.is_set()

    def _disk(self, role: str, world: World) -> SimDisk:
        name = DISKS[role]
        node = self.sim_node(role)
        assert node is not None
        storage = self.storages[name]
        lanes = self._world.random(f"{storage.root}/{node.incarnation}/lanes")
        disk = SimDisk(storage, world.clock, lanes)
        node.on_kill.append(disk.kill)
        return disk

    async def _start_controller(self, world: World) -> None:
        process, cluster = self.processes[CONTROLLER], self._cluster
        process.node = ControllerNode(
            world,
            self._disk(CONTROLLER, world),
            self.run,
            log=NodeLog(process.name, cluster),
            **cluster.quorum_of(),
        )
        cluster.watch_controller(self, process.node)
        await process.node.start()

    async def _start_broker(self, world: World) -> None:
        process, disk = self.processes[BROKER], self._disk(BROKER, world)
        process.node = BrokerNode(
            world,
            [disk],
            self.run,
            boot_id=f"{self.name}-boot-{self.boots}",
            incarnation_id=world.new_id(),
            log=NodeLog(process.name, self._cluster),
            cleaner=self._cleaner(world),
        )
        if self._cluster.options.recent_bytes is not None:
            recent = process.node.core.writers.of(disk).recent
            recent._bytes_max = self._cluster.options.recent_bytes
        self._cluster.watch_broker(self, process.node)
        await process.node.start()

    def _cleaner(self, world: World) -> SimCleaner | None:
        """Return the cleaner of a broker that starts; runs without compacted topics have none."""
        if not self._cluster.options.compacted_topics:
            return None
        node = self.sim_node(BROKER)
        assert node is not None
        drawn = self._world.random(f"{self.name}/{node.incarnation}/cleaner")
        hit = self._cluster.cleaning
        return SimCleaner(
            world.clock, drawn, partial(hit, self, "begun"), partial(hit, self, "written")
        )

    async def _start_tier(self, world: World) -> None:
        process, cluster = self.processes[TIER], self._cluster
        node = self.sim_node(TIER)
        assert node is not None
        drawn = self._world.random(f"{process.name}/{node.incarnation}/lanes")

        async def execute(work: Callable[[], T]) -> T:
            stall = self.storages[DISKS[BROKER]].stall  # the tier reads the broker's disk
            before, after = (0.0, 0.0) if stall is None else stall("read")
            await world.clock.sleep_ms(drawn.uniform(0.1, 3.0) + before)
            done = work()
            if after:
                await world.clock.sleep_ms(after)
            return done

        process.node = TierNode(
            world,
            cluster.store,
            cluster.store,
            self._view,
            Executors(execute, execute),
            self.run,
            broker_address=str(self.run.server["listen"]),
            log=NodeLog(process.name, cluster),
            evidence=cluster.lake,
        )
        process.node.merger.run_files = MERGED_FILES
        if cluster.options.maintained_topics:
            worker = process.node.worker
            worker.owner_settings = replace(
                worker.owner_settings, request_timeout_ms=OWNER_TIMEOUT_MS
            )
            worker.lands_within_ms = LANDS_WITHIN_MS
        await process.node.start()

    def _view(self, path: str) -> tuple[Storage, str]:
        """Return the storage and the path in it for a path of the broker."""
        root, _, inside = path.partition("/")
        storage = self.storages[DISKS[BROKER]]
        assert root == storage.root, path
        return storage, inside

    def start(self, role: str) -> None:
        process = self.processes[role]
        main: Callable[[World], Awaitable[None]] = getattr(self, f"_start_{role}")
        process.node = None
        process.start = self._world.start(process.name, main)
        process.start.add_done_callback(_seen, context=contextvars.Context())

    @property
    def knows_time(self) -> bool:
        """Whether its broker has stored the time of its last run (K4)."""
        return self.storages[DISKS[BROKER]].exists(LAST_RUN)

    @property
    def stepped_ms(self) -> int:
        """The error of the wall clock that steps have left."""
        return self.clock.skew_ms - self.plan.skew_ms - self._jumped_ms

    def jump(self, by_ms: int) -> None:
        """Move the wall clock by `by_ms`; the error adds up until `right`."""
        self._world.record(f"clock jump {self.name} {by_ms}")
        self._jumped_ms += by_ms
        self.clock.step(by_ms)

    def right(self) -> None:
        """Undo all jumps of the wall clock."""
        if self._jumped_ms:
            self.jump(-self._jumped_ms)

    # -- deaths ------------------------------------------------------------------------------------

    def kill(self, role: str, restart_ms: float) -> None:
        """Kill a process like kill -9; the supervisor restarts it after `restart_ms`."""
        if not self.alive(role):
            return
        process = self.processes[role]
        self._world.kill(process.name)
        if role in DISKS:
            self.storages[DISKS[role]].crash()
        process.due_ms = self._now_ms() + restart_ms

    def kill_all(self, restart_ms: float) -> None:
        """Kill every process of the machine at once."""
        for role in self.processes:
            self.kill(role, restart_ms)

    def power_loss(self, restart_ms: float) -> None:
        """Cut the power: after the restart only what is SYNCED is sure to be there (K3)."""
        self._world.record(f"power loss of {self.name}")
        self.kill_all(restart_ms)
        for process in self.processes.values():
            process.due_ms = self._now_ms() + restart_ms
        for storage in self.storages.values():
            storage.power_loss()
        self.boots += 1

    def replace_disk(self, role: str, restart_ms: float) -> None:
        """Replace the disk of a process by an empty one and restart the process."""
        self._world.record(f"empty disk for {self.name}/{role}")
        self.kill(role, restart_ms)
        if role == BROKER:  # the tier reads that disk
            self.kill(TIER, restart_ms)
            self.right()  # an empty disk: the clock is right (K4)
        self.processes[role].due_ms = self._now_ms() + restart_ms
        self.disks_replaced += 1
        self._insert(DISKS[role], role)
        if role == CONTROLLER:  # a formatted directory is another voter (rule Q1)
            directory = f"{self.name}-dir/{self.disks_replaced}".ljust(36, "-")
            self.run = replace(self.run, metadata_directory_id=directory)

    def drain(self) -> None:
        """Send SIGTERM to the broker: it shuts down cleanly and is then restarted."""
        process, broker = self.processes[BROKER], self.broker
        if process.closing is None and broker is not None and self.serving:
            self._world.record(f"drain {process.name}")
            process.closing = self._world.spawn(process.name, broker.close())

    def pause(self, role: str) -> None:
        """Stop a process like SIGSTOP."""
        if self.alive(role):
            self._world.pause(self.processes[role].name)

    def resume(self, role: str) -> None:
        if self.alive(role):
            self._world.resume(self.processes[role].name)

    # -- the supervisor ----------------------------------------------------------------------------

    def supervise(self) -> None:
        """Start, restart and watch the processes (K1); the cluster calls this every tick."""
        nodes = self._world.nodes
        for role, process in self.processes.items():
            node = nodes.get(process.name)
            if node is not None and node.alive:
                self._watch(process)
            elif self._now_ms() >= process.due_ms:
                self.start(role)
            if process.closing is not None:
                self._drained(process)

    def _drained(self, process: Process) -> None:
        ended = process.closing.done()
        if ended and self.alive(process.role):
            process.closing.result()
            self.kill(process.role, self._rng.uniform(*RESTART_MS))
        if ended or not self.alive(process.role):
            process.closing = None

    def _watch(self, process: Process) -> None:
        failure: BaseException | None = getattr(process.node, "failed", None)
        if failure is None and process.start.done():
            failure = process.start.exception()
        if failure is None:
            return
        self._world.record(f"{process.name} ended: {failure!r}")
        restarts = isinstance(failure, errors.PkError) and (
            failure.retriable or not isinstance(failure, errors.OperatorError)
        )
        if not restarts and not self._cluster.has_operator_for(self, process.role):
            self._cluster.problems.append(f"{process.name} ended: {failure!r}")
        self.kill(process.role, self._rng.uniform(*RESTART_MS))


def _seen(start: asyncio.Task[Any]) -> None:
    """Take the exception of a failed start, so that asyncio does not report it as never retrieved.

    The process may be killed before the supervisor looks; its next start then fails again.
    """
    if not start.cancelled():
        start.exception()
