"""The faults of a run: a plan drawn from the seed, carried out tick by tick.

Every fault has an end: the supervisor restarts a killed process, a full disk gets space, a cut link
works again.  `heal` ends all faults at once, before the phase in which the cluster must recover.
"""

from __future__ import annotations

import heapq
import math
import os
import random
from collections.abc import Callable, Sequence
from itertools import combinations

from pk import errors
from pk.sim.clock_faults import ClockFaults
from pk.sim.cluster import SimCluster
from pk.sim.compaction_faults import CompactionFaults
from pk.sim.corruption import Corruption
from pk.sim.disk import GROWING, NO_DESCRIPTOR, NO_ROOM, OPENING
from pk.sim.format_faults import FormatFaults
from pk.sim.identity_faults import IdentityFaults
from pk.sim.machine import DISKS, POWER_OFF_MS, RESTART_MS, KillableStorage, SimMachine
from pk.sim.network import End, Link
from pk.sim.operations import Operator
from pk.sim.options import BROKER, CONTROLLER, TIER, SimOptions
from pk.sim.oracle import Oracle
from pk.sim.samples import Observer
from pk.sim.table_faults import TableFaults
from pk.sim.transaction_faults import TransactionFaults
from pk.sim.world import SimWorld
from pk.types import NONE
from pk.wire import frames

CLIENTS = ("client", "admin")
SLOW_DELAY_US = (1_000, 60_000)
SLOW_BYTES_PER_MS = 200
CUT_MS = (50, 6_000)
PAUSE_MS = (50, 9_000)
#: How long a single operation is held, drawn log-uniformly: mostly short, but sometimes so long
#: that sessions expire, leaders change, and logs are truncated and filled again meanwhile.
DISK_STALL_MS = (100, 8_000)
STREAM_STALL_MS = (100, 5_000)
STORE_STALL_MS = (300, 60_000)
#: How long a leader's disk is full: also long enough that another broker must lead (rule L16).
LEADER_FULL_MS = (500, 40_000)
#: The faults that rule L16 makes harmless: what it promises is checked while they last (V16).
CALM_FAULTS = ("leader_full", "controller_full")
#: How long a fault without an end of its own, for example a stalled stream, may still have effects.
AFTERMATH_MS = 9_000


class Faults:
    """Begins and ends the faults of a run.  `restart_client` kills and restarts the client."""

    def __init__(
        self,
        world: SimWorld,
        cluster: SimCluster,
        observer: Observer,
        options: SimOptions,
        restart_client: Callable[[], None],
        operator: Operator,
        oracle: Oracle,
    ) -> None:
        self._world = world
        self._cluster = cluster
        self._observer = observer
        self._options = options
        self._restart_client = restart_client
        self._rng: random.Random = world.random("faults")
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._next_ms = self._rng.uniform(100, 800)
        #: The time since which only CALM_FAULTS are active; may lie in the future.
        self.calm_since_ms = 0.0
        self.rarer = 1  #: factor of the pauses between two faults
        self.counts: dict[str, int] = {}
        self.met: dict[str, int] = {}  #: effects that were counted, by name
        self._operator = operator
        self._rots = Corruption(cluster, observer, operator, self._rng, self.met)
        self._lost = IdentityFaults(
            cluster, observer, self._rng, lambda: list(self._rots.copies()), self._meet
        )
        files = FormatFaults(cluster, observer, self._rng, self._in, self._meet)
        self._other_version, self._unknown_field = files.other_version, files.unknown_field
        self._older_build = files.older_build
        clocks = ClockFaults(cluster, observer, self._rng, self._in, self._meet)
        self._clock_step, self._clock_jump = clocks.step, clocks.jump
        self._wrong_start = clocks.wrong_start
        self._tables = TableFaults(cluster, observer, oracle, self._in, self._meet)
        self.transactions = TransactionFaults(cluster, self._in, self._meet)
        of_cleanings = CompactionFaults(cluster, observer, self._in, self._meet).begin
        self._begin = self.transactions.begin | of_cleanings

    def _log_uniform(self, bounds: tuple[float, float]) -> float:
        return math.exp(self._rng.uniform(*map(math.log, bounds)))

    def _meet(self, name: str) -> None:
        self.met[name] = self.met.get(name, 0) + 1

    def _after(
        self, delay_ms: tuple[float, float], undo: Callable[[], None], *, alone: bool = False
    ) -> None:
        """Run `undo` after a drawn delay.  `alone`: `calm_since_ms` does not change."""
        self._in(self._rng.uniform(*delay_ms), undo, alone=alone)

    def _in(self, delay_ms: float, undo: Callable[[], None], *, alone: bool = False) -> None:
        self._number += 1
        due = self._world.loop.now_us / 1000 + delay_ms
        if not alone:
            self.calm_since_ms = max(self.calm_since_ms, due + AFTERMATH_MS)
        heapq.heappush(self._due, (due, self._number, undo))

    def tick(self) -> None:
        """End the faults that are over and begin a fault if one is due."""
        now_ms = self._world.loop.now_us / 1000
        while self._due and self._due[0][0] <= now_ms:
            heapq.heappop(self._due)[2]()
        if self._options.faults and now_ms >= self._next_ms:
            wait_ms = self._rng.uniform(*self._options.fault_every_ms)
            self._next_ms = now_ms + wait_ms * self.rarer
            name = self._rng.choice(self._options.faults)
            self.counts[name] = self.counts.get(name, 0) + 1
            self._world.record(f"fault {name}")
            if name not in CALM_FAULTS:
                self.calm_since_ms = max(self.calm_since_ms, now_ms + AFTERMATH_MS)
            (self._begin.get(name) or getattr(self, f"_{name}"))()

    def heal(self) -> None:
        """End all faults; the supervisors restart dead processes."""
        while self._due:
            heapq.heappop(self._due)[2]()
        for machine in self._cluster.machines:
            for storage in machine.storages.values():
                storage.crash_at = storage.fault = storage.stall = None
        self._cluster.store.late_commit = self._cluster.store.stall = None
        self._cluster.traps.clear()
        self._cluster.cleaning_traps.clear()
        self._world.network.trap = None
        self._world.record("healed")

    # -- who ---------------------------------------------------------------------------------------

    def _machine(self, role: str) -> SimMachine:
        return self._rng.choice(self._cluster.with_role(role))

    def _storage(self) -> KillableStorage:
        machine = self._rng.choice(self._cluster.machines)
        return machine.storages[self._rng.choice(sorted(machine.storages))]

    def _hosts(self) -> list[str]:
        return [*CLIENTS, *(machine.name for machine in self._cluster.machines)]

    def _link(self) -> tuple[str, str]:
        """Draw the two ends of a link: two hosts, or two processes of one machine."""
        machine = self._rng.choice(self._cluster.machines)
        processes = [process.name for process in machine.processes.values()]
        if len(processes) > 1 and self._rng.random() < 0.3:
            one, two = self._rng.sample(processes, 2)
        else:
            one = machine.name
            two = self._rng.choice([host for host in self._hosts() if host != one])
        return one, two

    # -- processes ---------------------------------------------------------------------------------

    def _kill(self, machine: SimMachine, role: str) -> None:
        machine.kill(role, self._rng.uniform(*RESTART_MS))

    def _kill_broker(self) -> None:
        self._kill(self._machine(BROKER), BROKER)

    def _kill_controller(self) -> None:
        active = self._cluster.active()
        machine = self._machine(CONTROLLER)
        self._kill(
            active if active is not None and self._rng.random() < 0.5 else machine, CONTROLLER
        )

    def _kill_tier(self) -> None:
        self._kill(self._machine(TIER), TIER)

    def _kill_machine(self) -> None:
        self._rng.choice(self._cluster.machines).kill_all(self._rng.uniform(*RESTART_MS))

    def _kill_leader(self) -> None:
        led = [facts.leader for facts in self._observer.facts() if facts.leader != NONE]
        if led:
            self._kill(self._cluster.by_id[self._rng.choice(led)], BROKER)

    def _kill_client(self) -> None:
        self._restart_client()

    def _pause(self) -> None:
        machine = self._rng.choice(self._cluster.machines)
        roles = sorted(machine.processes)
        if self._rng.random() < 0.7:
            roles = [self._rng.choice(roles)]
        for role in roles:
            machine.pause(role)

        def undo() -> None:
            for role in roles:
                machine.resume(role)

        self._after(PAUSE_MS, undo)

    def _torn_write(self) -> None:
        """Make a process die inside one of its next operations on the disk."""
        self._storage().crash_at = self._rng.randint(0, 60)

    def _power(self) -> None:
        machines = list(self._cluster.machines)
        if self._rng.random() < 0.9:
            several = self._rng.randint(2, len(machines)) if len(machines) > 1 else 1
            count = 1 if self._rng.random() < 0.7 else several
            machines = self._rng.sample(machines, count)
        for machine in machines:
            self._observer.hit(machine)
            machine.power_loss(self._rng.uniform(*POWER_OFF_MS))
        self.counts["power losses"] = self.counts.get("power losses", 0) + len(machines)

    def _replace_disk(self) -> None:
        machine = self._machine(BROKER)
        self._observer.hit(machine, disk=True)
        machine.replace_disk(BROKER, self._rng.uniform(*POWER_OFF_MS))

    def _empty_metadata(self) -> None:
        """Restart a controller with an empty disk."""
        free = self._operator.free()
        if free:
            self._operator.replace_metadata(
                self._rng.choice(free), self._rng.uniform(*POWER_OFF_MS)
            )

    def _drain(self) -> None:
        self._machine(BROKER).drain()

    # -- network -----------------------------------------------------------------------------------

    def _break_streams(self) -> None:
        self._world.network.break_streams(*self._link())

    def _change(
        self, pairs: Sequence[tuple[str, str]], change: Callable[[Link], None], last_ms: float
    ) -> None:
        """Change links in both directions for a while."""
        network = self._world.network
        links = [network.link(*ends) for pair in pairs for ends in (pair, pair[::-1])]
        for link in links:
            change(link)

        def undo() -> None:
            model = network.default
            for link in links:
                link.delay_us, link.bytes_per_ms = model.delay_us, model.bytes_per_ms
                link.break_chance = model.break_chance

        self._after((200, last_ms), undo)

    def _slow_network(self) -> None:
        def slow(link: Link) -> None:
            link.delay_us, link.bytes_per_ms = SLOW_DELAY_US, SLOW_BYTES_PER_MS
            link.break_chance = 0.02

        self._change([self._link()], slow, 2_000)

    def _flaky_network(self) -> None:
        """Let streams between all hosts break now and then."""

        def lose(link: Link) -> None:
            link.break_chance = 0.01

        self._change(list(combinations(self._hosts(), 2)), lose, 3_000)

    def _cut(self) -> None:
        self._sever([self._link()], both=self._rng.random() < 0.7)

    def _isolate(self) -> None:
        """Cut a host off from all others, in one direction or both."""
        name = self._rng.choice(self._cluster.machines).name
        pairs = [(name, host) for host in self._hosts() if host != name]
        if self._rng.random() < 0.5:
            pairs = [pair[::-1] for pair in pairs]
        self._sever(pairs, both=self._rng.random() < 0.6)

    def _split(self) -> None:
        """Split the hosts into two groups that cannot reach each other."""
        hosts = self._hosts()
        self._rng.shuffle(hosts)
        at = self._rng.randint(1, len(hosts) - 1)
        pairs = [(one, two) for one in hosts[:at] for two in hosts[at:]]
        self._sever(pairs, both=self._rng.random() < 0.8)

    def _stream_stall(self) -> None:
        """Hold one direction of one to three streams while other streams pass (sim/network N8);
        mostly streams between brokers and controllers, because clients have many more.
        """
        network = self._world.network
        ends = network.ends()
        inner = [end for end in ends if "/" in end.node.name and "/" in end.other.node.name]
        if inner and self._rng.random() < 0.7:
            ends = inner
        for end in self._rng.sample(ends, min(len(ends), self._rng.randint(1, 3))):
            network.stall(end, self._log_uniform(STREAM_STALL_MS))

    def _lost_isr_change(self) -> None:
        """Let the next leader that asks to change the ISR get no answer.

        Either the request is lost, or the controller executes it and the answer is lost.
        """
        network, done = self._world.network, self._rng.random() < 0.6

        def trap(end: End, frame: bytes) -> None:
            source, target = end.node.name, end.other.node.name
            if not (source.endswith(f"/{BROKER}") and target.endswith(f"/{CONTROLLER}")):
                return
            if not frames.decode(frame).head.HasField("alter_partition"):
                return
            network.trap = None
            self._meet(f"ISR changes {'unheard of' if done else 'lost'}")
            if not done:
                network.break_streams(source, target)
            self._sever([(target, source)], both=not done)

        network.trap = trap

    def _late_frames(self) -> None:
        """Let a client or broker give up a stream with a request on its way, which is executed
        late, mostly after it was sent again on another stream.
        """
        network = self._world.network
        of_client, skipped = self._rng.random() < 0.7, self._rng.randint(0, 5)
        late_ms = self._rng.choice([self._rng.uniform(1, 50), self._rng.uniform(50, 3_000)])

        def trap(end: End, _frame: bytes) -> None:
            nonlocal skipped
            source = end.node.name
            if not (source == "client" if of_client else source.endswith(f"/{BROKER}")):
                return
            skipped -= 1
            if skipped < 0:
                network.trap = None
                network.give_up(end, late_ms)

        network.trap = trap

    def _crash_anew(self) -> None:
        """Make the next broker that begins a log again (rules R5, T4) die in the middle of it."""

        def trap(machine: SimMachine, facts: dict[str, object]) -> None:
            self._observer.given_up(machine, str(facts["partition"]))
            self._meet("deaths anew")
            machine.storages[DISKS[BROKER]].crash_at = self._rng.randint(0, 15)

        self._cluster.traps["log_begun_anew"] = trap

    def _rot_and_cut(self) -> None:
        """Damage a leader's copy, cut the leader off from the controller, restart the client."""
        machine, active = self._rots.strike_log(), self._cluster.active()
        if machine is not None and active is not None and machine is not active:
            self._sever([(machine.name, active.name)], both=self._rng.random() < 0.5)
        self._restart_client()

    def _sever(self, pairs: Sequence[tuple[str, str]], *, both: bool) -> None:
        network = self._world.network
        for one, two in pairs:
            network.cut(one, two, both=both)

        def undo() -> None:
            for one, two in pairs:
                network.heal(one, two, both=both)

        self._after(CUT_MS, undo)

    # -- disk and store ----------------------------------------------------------------------------

    def _disk_full(self) -> None:
        storage = self._storage()
        storage.capacity = storage.used_bytes() + self._rng.randint(0, 30_000)

        def undo() -> None:
            storage.capacity = None

        self._after((100, 2_000), undo)

    def _leader_full(self) -> None:
        """Fill only the disk of a broker that leads, up to the reserve or nearly completely."""
        led = [facts.leader for facts in self._observer.facts() if facts.leader != NONE]
        machine = self._cluster.by_id[self._rng.choice(led)] if led else self._machine(BROKER)
        storage = machine.storages[DISKS[BROKER]]
        if storage.capacity is not None:
            return
        storage.capacity = storage.used_bytes() + self._rng.choice([0, self._rng.randint(0, 9_000)])
        self._meet("full leaders")

        def undo() -> None:
            storage.capacity = None

        self._after(LEADER_FULL_MS, undo, alone=True)

    def _controller_full(self) -> None:
        """Fill the disk of the active controller, if the other voters have space."""
        active, voters = self._cluster.active(), self._cluster.with_role(CONTROLLER)
        disks = [machine.storages[DISKS[CONTROLLER]] for machine in voters]
        if active is None or len(voters) == 1 or any(disk.capacity is not None for disk in disks):
            return
        storage = active.storages[DISKS[CONTROLLER]]
        storage.capacity = storage.used_bytes()
        self._meet("full controllers")

        def undo() -> None:
            storage.capacity = None

        self._after(LEADER_FULL_MS, undo, alone=True)

    def _disk_slow(self) -> None:
        storage = self._storage()
        storage.lag_ms = self._rng.choice([10.0, 100.0, 1_000.0])

        def undo() -> None:
            storage.lag_ms = 0.0

        self._after((100, 4_000), undo)

    def _disk_stall(self) -> None:
        """Hold single jobs of a disk for a long time, in the read lane, the write lane or both."""
        storage, rng = self._storage(), self._rng
        lanes = rng.choice([("read",), ("write",), ("read", "write")])
        chance = rng.choice([0.02, 0.1, 0.5])

        def stall(lane: str) -> tuple[float, float]:
            if lane not in lanes or rng.random() >= chance:
                return 0.0, 0.0
            self._meet(f"stalls of {lane}s")
            held_ms = self._log_uniform(DISK_STALL_MS)
            self._world.record(f"{lane} of {storage.root} is held for {held_ms:.0f} ms")
            return (held_ms, 0.0) if rng.random() < 0.5 else (0.0, held_ms)

        storage.stall = stall

        def undo() -> None:
            if storage.stall is stall:
                storage.stall = None

        self._after((200, 5_000), undo)

    def _disk_short(self) -> None:
        """Let a few operations in a row find no space, on the whole disk or in one directory."""
        storage, rng = self._storage(), self._rng
        skipped, left = rng.randint(0, 20), rng.choice([1, 1, 2, 4, 10])
        local, where = rng.random() < 0.5, ""

        def fault(operation: str, path: str) -> Exception | None:
            nonlocal skipped, left, where
            if operation not in GROWING or not path.startswith(where):
                return None
            skipped -= 1
            if skipped >= 0:
                return None
            if local and not where:
                where = os.path.dirname(path)
            left -= 1
            if not left:
                storage.fault = None
            self._meet("operations without room")
            self._world.record(f"no room in {storage.root} for {operation} {path}")
            return errors.StorageFull(f"{storage.root}: {NO_ROOM} {path}")

        self._break(storage, fault, (200, 5_000))

    def _no_descriptors(self) -> None:
        """Let some operations that open a file, or open it again, find no free descriptor."""
        storage, rng = self._storage(), self._rng
        chance = rng.choice([0.02, 0.1, 0.5])

        def fault(operation: str, path: str) -> Exception | None:
            if operation not in OPENING or rng.random() >= chance:
                return None
            self._meet("operations without a descriptor")
            self._world.record(f"no descriptor in {storage.root} for {operation} {path}")
            return errors.StorageFull(f"{storage.root}: {operation} {path}: {NO_DESCRIPTOR}")

        self._break(storage, fault, (200, 3_000))

    def _break(
        self,
        storage: KillableStorage,
        fault: Callable[[str, str], Exception | None],
        span_ms: tuple[int, int],
    ) -> None:
        """Let operations of a storage fail as `fault` says, for a time."""
        storage.fault = fault

        def undo() -> None:
            if storage.fault is fault:
                storage.fault = None

        self._after(span_ms, undo)

    def _rot(self) -> None:
        self._rots.strike()

    def _identity_lost(self) -> None:
        self._lost.lose_file()

    def _identity_rot(self) -> None:
        self._lost.rot_second()

    def _partition_lost(self) -> None:
        self._lost.lose_directory()

    def _front_lost(self) -> None:
        self._lost.lose_front()

    def _store_outage(self) -> None:
        store = self._cluster.store
        store.away = True

        def undo() -> None:
            store.away = False

        self._after((100, 3_000), undo)

    def _store_flaky(self) -> None:
        store = self._cluster.store
        store.lost_requests, store.lost_replies, store.stragglers = 0.1, 0.2, 0.15
        store.delay_ms = (1.0, 150.0)

        def undo() -> None:
            store.lost_requests = store.lost_replies = store.stragglers = 0.0
            store.delay_ms = (0.5, 8.0)

        self._after((300, 3_000), undo)

    def _store_stall(self) -> None:
        """Let the store execute, or answer, some requests very late while others pass."""
        store, rng = self._cluster.store, self._rng
        chance = rng.choice([0.05, 0.3])

        def stall(what: str) -> tuple[float, float]:
            if rng.random() >= chance:
                return 0.0, 0.0
            self._meet("stalls of the store")
            held_ms = self._log_uniform(STORE_STALL_MS)
            self._world.record(f"store is held for {held_ms:.0f} ms: {what}")
            return (held_ms, 0.0) if rng.random() < 0.5 else (0.0, held_ms)

        store.stall = stall

        def undo() -> None:
            if store.stall is stall:
                store.stall = None

        self._after((300, 5_000), undo)

    def _late_commit(self) -> None:
        """Kill the tier while a commit is on its way, and delay that commit.

        The commit mostly takes effect after the next tier process has loaded the table and before
        that process commits.
        """
        rng, machine = self._rng, self._machine(TIER)

        def committed() -> float:
            restart_ms = rng.uniform(5, 40)
            machine.kill(TIER, restart_ms)
            return restart_ms + rng.uniform(15, 70)

        self._cluster.store.late_commit = committed

    def _optimize(self) -> None:
        for topic in list(self._observer.image.topics.values()):
            self._cluster.store.optimize(topic.name, topic.topic_id)

    def _object_rot(self) -> None:
        """Damage a data file of a table until an operator restores it."""
        store, topics = self._cluster.store, list(self._observer.image.topics.values())
        if not topics:
            return
        topic = self._rng.choice(topics)
        path = store.rot(topic.name, topic.topic_id, self._rng)
        if path is None:
            return
        self._world.record(f"rot of {path}")
        self._meet("rot of tier files")
        self._observer.losses.rotted_file(path)
        self._after((300, 5_000), lambda: store.restore(path))

    def _delta_rot(self) -> None:
        self._tables.rot_log()

    def _delete_rows(self) -> None:
        self._tables.delete_rows()
