"""All machines of one simulated world, and the object store they share.

A cluster of one machine with one controller, broker and tier needs no code of its own (rule Q4): no
code here depends on the number of machines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pk import formats
from pk.server.broker.clock_trust import Doubt
from pk.server.broker.node import BrokerNode
from pk.server.controller.node import ControllerNode
from pk.server.node.run_config import RunConfig
from pk.server.node.settings import ROLES, Resolved, resolve
from pk.server.raft.messages import Voter
from pk.server.raft.timing import Timing
from pk.sim.lake import SimLake
from pk.sim.machine import KillableStorage as KillableStorage
from pk.sim.machine import SimMachine
from pk.sim.objects import SimObjects
from pk.sim.options import BROKER, CONTROLLER, NEWER_LEVEL, NodePlan, SimOptions
from pk.sim.world import SimWorld
from pk.types import NONE, PartitionKey

BROKER_PORT = 9292
CONTROLLER_PORT = 9093
CLUSTER_ID = "c" * 36
#: A controller or broker logs this event when it had to load a metadata snapshot, because the
#: metadata log began after its position.
SNAPSHOT_LOADED = "metadata_snapshot_loaded"

#: Smaller than the space that a full disk of the simulator mostly has left, so that metadata may
#: find no space either.
METADATA_RESERVE = 1_000


def _directory(node: NodePlan) -> str:
    return f"{node.name}-dir".ljust(36, "-")


@dataclass(frozen=True)
class SimIdentity:
    """What a cluster is called.  voter_id: the directory id of a first voter."""

    cluster_id: str = CLUSTER_ID
    voter_id: Callable[[NodePlan], str] = _directory


class SimCluster:
    """The machines, store and configuration of one simulated cluster.

    store: the path to a store that other clusters of the world use as well; None = a store of its
    own
    """

    def __init__(
        self,
        world: SimWorld,
        options: SimOptions,
        store: SimObjects | None = None,
        identity: SimIdentity | None = None,
        **server: Any,
    ) -> None:
        self.world = world
        self.options = options
        self.identity = identity or SimIdentity()
        self.store = store or SimObjects(world)
        self.lake = SimLake(world)
        self.problems: list[str] = []
        self.events: dict[str, int] = {}  #: log events of all processes, by name
        self.snapshot_loads = {CONTROLLER: 0, BROKER: 0}
        self.on_controller: Callable[[SimMachine, ControllerNode], None] | None = None
        self.on_broker: Callable[[SimMachine, BrokerNode], None] | None = None
        #: Event → function called at each log event of that name, with the machine of the process.
        #: `traps`: the same, but called only at the next event and then removed.
        self.listeners: dict[str, Callable[[SimMachine, dict[str, object]], None]] = {}
        self.traps: dict[str, Callable[[SimMachine, dict[str, object]], None]] = {}
        #: Step of a cleaning ("begun", "written") → function called at the next such step, with the
        #: machine and the path of the log.
        self.cleaning_traps: dict[str, Callable[[SimMachine, str], None]] = {}
        #: Role by node id: the process must not start, for another build wrote one of its files.
        self.other_builds: dict[int, str] = {}
        #: Nodes of an older build; a newer level of `pk.format` stops them (rule Q6).
        self.older_builds: dict[int, None] = {}
        self.on_damage: Callable[[SimMachine], bool] | None = None
        # Full disks of the simulator have less space than the default reserve.
        self._server = {
            "tier_url": self.store.url,
            "disk_reserve_bytes": 0,
            "tier_offsets_interval_ms": 0,
            "tier_metadata_interval_ms": 0,
            **server,
        }
        self.machines = [SimMachine(self, plan) for plan in options.nodes]
        self.by_id = {machine.node_id: machine for machine in self.machines}

    # -- configuration -----------------------------------------------------------------------------

    @property
    def bootstrap(self) -> str:
        """The broker addresses that clients connect to first."""
        return ",".join(f"{node.name}:{BROKER_PORT}" for node in self.options.with_role(BROKER))

    def _voters(self) -> dict[Voter, str]:
        return {
            Voter(node.number, self.identity.voter_id(node)): f"{node.name}:{CONTROLLER_PORT}"
            for node in self.options.with_role(CONTROLLER)
        }

    def resolved_of(self, plan: NodePlan) -> Resolved:
        """Return the settings of a machine."""
        voters = [f"{voter.node_id}@{at}" for voter, at in self._voters().items()]
        given = {
            "listen": f"{plan.name}:{BROKER_PORT}",
            "node_id": plan.number,
            "process_roles": ",".join(role for role in plan.roles if role in ROLES),
            "controller_quorum_voters": ",".join(voters),
        }
        return resolve({}, {}, {**given, **self._server})

    def run_of(self, plan: NodePlan) -> RunConfig:
        """Return the configuration that the supervisor of a machine gives to its processes."""
        return RunConfig(
            dirs=(f"/sim/{plan.name}/d1",),
            directory_ids=(_directory(plan),),
            run_dir=f"/sim/{plan.name}/run",
            cluster_id=self.identity.cluster_id,
            node_id=plan.number,
            server=self.resolved_of(plan).server,
            metadata_directory_id=self.identity.voter_id(plan),
            topic_defaults={"flush_on_ack": True} if self.options.internal_flushed else {},
            format_level=NEWER_LEVEL if "older_build" in self.options.faults else formats.LEVEL,
        )

    def quorum_of(self) -> dict[str, Any]:
        """Return the arguments of a controller besides its configuration."""
        timing = Timing(**self.options.timing)
        return {"voters": self._voters(), "timing": timing, "reserve_bytes": METADATA_RESERVE}

    # -- what happens ------------------------------------------------------------------------------

    def with_role(self, role: str) -> list[SimMachine]:
        return [machine for machine in self.machines if role in machine.processes]

    def supervise(self) -> None:
        """Run the supervisors of all machines; called every tick."""
        for machine in self.machines:
            machine.supervise()

    def said(self, name: str, event: str, facts: dict[str, object]) -> None:
        """Count the `event` that process `name` (MACHINE/ROLE) logged; call its listeners."""
        self.events[event] = self.events.get(event, 0) + 1
        host, _, role = name.partition("/")
        if event == SNAPSHOT_LOADED:
            self.snapshot_loads[role] += 1
        for told in (self.listeners.get(event), self.traps.pop(event, None)):
            if told is not None:
                told(next(machine for machine in self.machines if machine.name == host), facts)

    def cleaning(self, machine: SimMachine, step: str, path: str) -> None:
        """Note a step of a cleaning on `machine`, and let a fault hit it."""
        trap = self.cleaning_traps.pop(step, None)
        if trap is not None:
            trap(machine, path)

    def watch_controller(self, machine: SimMachine, node: ControllerNode) -> None:
        """Pass a controller that is about to start to `on_controller`."""
        if self.on_controller is not None:
            self.on_controller(machine, node)

    def watch_broker(self, machine: SimMachine, node: BrokerNode) -> None:
        """Pass a broker that is about to start to `on_broker`."""
        if self.on_broker is not None:
            self.on_broker(machine, node)

    def has_operator_for(self, machine: SimMachine, role: str) -> bool:
        """Return whether the operator repairs a process that cannot be restarted as it is."""
        if self.other_builds.get(machine.node_id) == role or machine.node_id in self.older_builds:
            return True
        return role == CONTROLLER and self.on_damage is not None and self.on_damage(machine)

    def active(self) -> SimMachine | None:
        """Return the machine of the active controller, or None; of several, the latest epoch's."""
        found = [
            (machine.controller.active.epoch, machine.node_id)
            for machine in self.with_role(CONTROLLER)
            if machine.controller is not None and machine.controller.active is not None
        ]
        return self.by_id[max(found)[1]] if found else None

    def unwell(self) -> str:
        """Return why the cluster does not work as it should; '' = it does."""
        for machine in self.machines:
            for role, process in machine.processes.items():
                if not machine.alive(role):
                    return f"{process.name} is not running"
        active = self.active()
        if active is None or active.controller is None:
            return "no controller is active"
        term = active.controller.active
        assert term is not None
        image = term.machine.image
        for topic, number, state in image.partitions():
            where = f"{topic.name}-{number}"
            if state.leader == NONE:
                return f"{where} has no leader: {state}"
            if sorted(state.isr) != sorted(state.replicas):
                return f"{where} is not in sync: {state}"
            if state.adding or state.removing:
                return f"{where} is being reassigned: {state}"
            key = PartitionKey(topic.topic_id, number)
            why_not = self._led_well(state.leader, key)
            if why_not:
                return f"{where}: {why_not}"
        for number, known in image.brokers.items():
            if not known.fenced and number not in term.sessions._by_broker:
                return f"nobody would notice the silence of broker {number}"
        return self._brokers_unwell(image.offset)

    def _brokers_unwell(self, offset: int) -> str:
        for machine in self.with_role(BROKER):
            broker, tier = machine.broker, machine.tier
            if broker is None or not machine.serving:
                return f"{machine.name} is not serving"
            if broker.core.clocks.trust.doubt is not Doubt.NONE:
                return f"{machine.name} doubts its clock: {broker.core.clocks.trust.doubt}"
            if broker.core.metadata.image.offset < offset:
                return f"{machine.name} is behind in the metadata log"
            if tier is not None and tier.problem is not None:
                return f"the tier of {machine.name} has a problem: {tier.problem!r}"
        return ""

    def _led_well(self, leader: int, key: PartitionKey) -> str:
        broker = self.by_id[leader].broker
        partition = broker.core.partitions.get(key) if broker is not None else None
        if partition is None or partition.leader is None:
            why = broker.core.hosted.why_not_here(key) if broker is not None else "it is dead"
            return f"broker {leader} does not lead: {why!r}"
        high, end = partition.high_watermark, partition.log.written_end
        if high < end:
            return f"HW {high} has not reached the end {end}"
        if partition.tiered:
            stable = partition.last_stable_offset
            snapshot = self.store.snapshot(partition.topic, key.topic_id)
            covered = NONE if snapshot is None else snapshot.partition(key.partition).end
            if covered < stable and not (covered == NONE and stable == 0):
                return f"tiered_end {covered} has not reached the LSO {stable}"
            start = NONE if snapshot is None else snapshot.partition(key.partition).start
            if start > partition.log.log_start:
                return f"log_start {partition.log.log_start} is below the table's start {start}"
        return ""
