"""One simulated machine: disks, a clock, power, the processes on it and the supervisor that starts
them again.

The processes are the production classes, composed as their `main` functions do.  Everything a real
one would lose with its death is lost: `kill` keeps what is WRITTEN, `power_loss` what is SYNCED
(rule L1), `replace_disk` nothing.

Rules
  K1  a process that would have ended (its start failed, a fatal error) is restarted, as the real
      supervisor does, unless an operator would have to act: without damage nothing here asks for
      one, so that is a failure of the run
  K2  what processes log goes into the trace; a reported bug is a failure of the run
  K3  a machine without power runs nothing; with it comes another boot id
  K4  a clock that jumped is wrong across starts, too, until it is set right (rule L10).  With an
      empty disk it is right: nothing there could say that it is not
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from pk import errors, tracing
from pk.log.last_run import FILE as LAST_RUN
from pk.log.storage import Storage
from pk.server.broker.node import BrokerNode
from pk.server.controller.node import ControllerNode
from pk.server.node.run_config import RunConfig
from pk.server.tier.node import TierNode
from pk.sim.disk import Crashed, SimDisk, SimStorage
from pk.sim.loop import SimNode
from pk.sim.objects import SimObjects
from pk.sim.options import BROKER, CONTROLLER, TIER, NodePlan, SimOptions
from pk.sim.world import SimClock, SimWorld
from pk.tiering.worker import Executors
from pk.world import World

T = TypeVar("T")

#: The directory of each role that has one: DIR/metadata, and the broker's data directory.
DISKS = {CONTROLLER: "meta", BROKER: "d1"}
RESTART_MS = (20, 800)


class KillableStorage(SimStorage):
    """A storage whose process dies in the operation that `crash_at` names."""

    def __init__(self, root: str, rng: random.Random) -> None:
        super().__init__(root, rng)
        self.on_death: Callable[[], None] = lambda: None

    def _die(
        self, apply: Callable[[], None], partly: Callable[[int], None] | None, size: int
    ) -> None:
        try:
            super()._die(apply, partly, size)
        except Crashed:
            self.on_death()  # what is WRITTEN can be read by others, the tier process for one
            raise


class MachineEnvironment(Protocol):
    """The cluster as one of its machines sees it (cluster.py)."""

    @property
    def world(self) -> SimWorld: ...

    @property
    def options(self) -> SimOptions: ...

    @property
    def store(self) -> SimObjects: ...

    @property
    def problems(self) -> list[str]: ...

    def run_of(self, plan: NodePlan) -> RunConfig: ...

    def quorum_of(self) -> dict[str, Any]: ...

    def said(self, name: str, event: str, facts: dict[str, object]) -> None: ...

    def watch_controller(self, machine: Machine, node: ControllerNode) -> None: ...

    def watch_broker(self, machine: Machine, node: BrokerNode) -> None: ...

    def has_operator_for(self, machine: Machine, role: str) -> bool: ...


class NodeLog(tracing.Log):
    """A process's log, kept in the trace (K2)."""

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
    """One role on a machine, over its lives."""

    role: str
    name: str  #: of its node in the simulated world
    node: Any = None  #: ControllerNode, BrokerNode or TierNode of the present life
    start: Any = None  #: the task that starts it
    due_ms: float = 0.0  #: when a dead one starts again
    closing: Any = None  #: a drain under way


class Machine:
    """See the module."""

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
        self._jumped_ms = 0  #: by how much the clock is wrong
        self.run: RunConfig = cluster.run_of(plan)
        self._rng = self._world.random(f"{plan.name}/supervisor")

    def _insert(self, disk: str, role: str) -> None:
        """An empty disk."""
        root = f"{self.name}.{disk}"
        number = f"/{self.disks_replaced}" if self.disks_replaced else ""
        fresh = KillableStorage(root, self._world.random(f"disk/{root}{number}"))
        fresh.on_death = lambda: self.kill(role, self._rng.uniform(*RESTART_MS))
        self.storages[disk] = fresh

    # -- processes ---------------------------------------------------------------------------------

    def _now_ms(self) -> float:
        return self._world.loop.now_us / 1000

    def sim_node(self, role: str) -> SimNode | None:
        """The running node of a role."""
        process = self.processes.get(role)
        node = self._world.nodes.get(process.name) if process is not None else None
        return node if node is not None and node.alive else None

    def alive(self, role: str) -> bool:
        return self.sim_node(role) is not None

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
        """Whether the broker takes streams."""
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
        )
        if self._cluster.options.recent_bytes is not None:
            recent = process.node.core.writer_of(disk).recent
            recent._bytes_max = self._cluster.options.recent_bytes
        self._cluster.watch_broker(self, process.node)
        await process.node.start()

    async def _start_tier(self, world: World) -> None:
        process, cluster = self.processes[TIER], self._cluster
        node = self.sim_node(TIER)
        assert node is not None
        drawn = self._world.random(f"{process.name}/{node.incarnation}/lanes")

        async def execute(work: Callable[[], T]) -> T:
            stall = self.storages[DISKS[BROKER]].stall  # of the broker's disk, which it reads
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
        )
        await process.node.start()

    def _view(self, path: str) -> tuple[Storage, str]:
        """Where a path of the broker's is."""
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
        """Whether its broker has stored a last run (K4)."""
        return self.storages[DISKS[BROKER]].exists(LAST_RUN)

    def jump(self, by_ms: int) -> None:
        """The wall clock is wrong by so much more, until `right`."""
        self._world.record(f"clock jump {self.name} {by_ms}")
        self._jumped_ms += by_ms
        self.clock.step(by_ms)

    def right(self) -> None:
        """The wall clock is as it was before it jumped."""
        if self._jumped_ms:
            self.jump(-self._jumped_ms)

    # -- deaths ------------------------------------------------------------------------------------

    def kill(self, role: str, restart_ms: float) -> None:
        """kill -9; the supervisor starts it again after `restart_ms`."""
        if not self.alive(role):
            return
        process = self.processes[role]
        self._world.kill(process.name)
        if role in DISKS:
            self.storages[DISKS[role]].crash()
        process.due_ms = self._now_ms() + restart_ms

    def kill_all(self, restart_ms: float) -> None:
        """Every process, the supervisor's own children in one go."""
        for role in self.processes:
            self.kill(role, restart_ms)

    def power_loss(self, restart_ms: float) -> None:
        """The machine is off; only what is SYNCED is sure to be there when it comes back (K3)."""
        self._world.record(f"power loss of {self.name}")
        self.kill_all(restart_ms)
        for process in self.processes.values():
            process.due_ms = self._now_ms() + restart_ms
        for storage in self.storages.values():
            storage.power_loss()
        self.boots += 1

    def replace_disk(self, role: str, restart_ms: float) -> None:
        """The process's disk is gone; it starts again on an empty one."""
        self._world.record(f"empty disk for {self.name}/{role}")
        self.kill(role, restart_ms)
        if role == BROKER:  # it reads that disk
            self.kill(TIER, restart_ms)
            self.right()  # K4
        self.processes[role].due_ms = self._now_ms() + restart_ms
        self.disks_replaced += 1
        self._insert(DISKS[role], role)
        if role == CONTROLLER:  # formatted anew: another voter (rule Q1)
            directory = f"{self.name}-dir/{self.disks_replaced}".ljust(36, "-")
            self.run = replace(self.run, metadata_directory_id=directory)

    def drain(self) -> None:
        """SIGTERM of the broker: it ends by itself, cleanly, and is started again."""
        process, broker = self.processes[BROKER], self.broker
        if process.closing is None and broker is not None and self.serving:
            self._world.record(f"drain {process.name}")
            process.closing = self._world.spawn(process.name, broker.close())

    def pause(self, role: str) -> None:
        """SIGSTOP."""
        if self.alive(role):
            self._world.pause(self.processes[role].name)

    def resume(self, role: str) -> None:
        if self.alive(role):
            self._world.resume(self.processes[role].name)

    # -- the supervisor ----------------------------------------------------------------------------

    def supervise(self) -> None:
        """K1; called every tick."""
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
    """A start that failed may be killed before the supervisor looks: the next one tells."""
    if not start.cancelled():
        start.exception()
