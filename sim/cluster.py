"""Controller, broker and tier nodes of one machine in one simulated world, and their supervisor.

The nodes are the production classes, composed as their `main` functions do, over simulated disks,
streams and an object store.  Everything a real process would lose with its death is lost: `kill`
keeps what is WRITTEN, `power_loss` what is SYNCED (rule L1).

Rules
  K1  a node whose process would have ended (its start failed, a fatal error) is restarted, as the
      real supervisor does, unless an operator would have to act: nothing here asks for one, so
      that is a failure of the run
  K2  what nodes log goes into the trace; a reported bug is a failure of the run
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from pk import errors, settings, tracing
from pk.log.readonly import open_readonly
from pk.log.storage import Storage
from pk.server.broker_node import BrokerNode
from pk.server.controller.image import MetadataImage
from pk.server.controller.records import decode_batches
from pk.server.controller_node import ControllerNode
from pk.server.quorum.opening import LOG_DIR
from pk.server.run_config import RunConfig
from pk.server.tier_node import TierNode
from pk.sim.checkers import PartitionSample, require
from pk.sim.disk import Crashed, SimDisk, SimStorage
from pk.sim.objects import SimObjects
from pk.sim.world import SimWorld
from pk.tiering.worker import Lanes
from pk.types import NONE, PartitionKey
from pk.world import World

T = TypeVar("T")

LISTEN = "broker:9292"
CLUSTER_ID = "c" * 36
ROLES = ("controller", "broker", "tier")
#: The directories: the controller's and the broker's.
DISKS = {"controller": "meta", "broker": "d1"}
RESTART_MS = (20, 800)
LOG_READ_BYTES = 1 << 20


class MortalStorage(SimStorage):
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


class NodeLog(tracing.Log):
    """A process's log, kept in the trace (K2)."""

    def __init__(self, role: str, cluster: SimCluster) -> None:
        super().__init__(role, lambda: 0)
        self._of = cluster

    def _line(self, level: str, event: str, facts: dict[str, object]) -> None:
        known = {name: value for name, value in facts.items() if name != "trace"}
        self._of.world.record(f"{self._role} {level} {event} {known}")
        if level == "BUG":
            self._of.problems.append(f"{self._role}: {event}: {facts.get('trace')}")


class SimCluster:
    """See the module."""

    def __init__(self, world: SimWorld, **server: Any) -> None:
        self.world = world
        self.store = SimObjects(world)
        self.problems: list[str] = []
        self.server = settings.SERVER.resolve(
            {"listen": LISTEN, "tier_url": self.store.url, **server}
        )
        self.run = RunConfig(
            dirs=("/sim/d1",),
            directory_ids=("d" * 36,),
            run_dir="/sim/run",
            cluster_id=CLUSTER_ID,
            node_id=1,
            server=self.server,
        )
        self.storages = {
            name: MortalStorage(name, world.random(f"disk/{name}")) for name in DISKS.values()
        }
        for role, name in DISKS.items():
            self.storages[name].on_death = self._death_of(role)
        self.controller: ControllerNode | None = None
        self.broker: BrokerNode | None = None
        self.tier: TierNode | None = None
        self.boots = 1
        self._rng = world.random("supervisor")
        self._starts: dict[str, Any] = {}
        self._due_ms: dict[str, float] = dict.fromkeys(ROLES, 0.0)  #: when a dead role starts again
        self._closing: Any = None

    # -- nodes -------------------------------------------------------------------------------------

    def _now_ms(self) -> float:
        return self.world.loop.now_us / 1000

    def alive(self, role: str) -> bool:
        node = self.world.nodes.get(role)
        return node is not None and node.alive

    def _death_of(self, role: str) -> Callable[[], None]:
        return lambda: self.kill(role, self._rng.uniform(*RESTART_MS))

    def _disk(self, role: str, world: World) -> SimDisk:
        name = DISKS[role]
        node = self.world.nodes[role]
        lanes = self.world.random(f"{name}/{node.incarnation}/lanes")
        disk = SimDisk(self.storages[name], world.clock, lanes)
        node.on_kill.append(disk.kill)
        return disk

    async def _controller(self, world: World) -> None:
        self.controller = ControllerNode(
            world, self._disk("controller", world), self.run, log=NodeLog("controller", self)
        )
        await self.controller.start()

    async def _broker(self, world: World) -> None:
        self.broker = BrokerNode(
            world,
            [self._disk("broker", world)],
            self.run,
            boot_id=f"boot-{self.boots}",
            incarnation_id=world.new_id(),
            log=NodeLog("broker", self),
        )
        await self.broker.start()

    async def _tier(self, world: World) -> None:
        node = self.world.nodes["tier"]
        drawn = self.world.random(f"tier/{node.incarnation}/lanes")

        async def lane(work: Callable[[], T]) -> T:
            await world.clock.sleep_ms(drawn.uniform(0.1, 3.0))
            return work()

        self.tier = TierNode(
            world,
            self.store,
            self.store,
            self._view,
            Lanes(lane, lane),
            self.run,
            broker_address=LISTEN,
            log=NodeLog("tier", self),
        )
        await self.tier.start()

    def _view(self, path: str) -> tuple[Storage, str]:
        """Where a path of the broker's is."""
        root, _, inside = path.partition("/")
        return self.storages[root], inside

    def start(self, role: str) -> None:
        main: Callable[[World], Awaitable[None]] = getattr(self, f"_{role}")
        setattr(self, role, None)
        self._starts[role] = self.world.start(role, main)

    # -- deaths ------------------------------------------------------------------------------------

    def kill(self, role: str, restart_ms: float) -> None:
        """kill -9; the supervisor starts it again after `restart_ms`."""
        if not self.alive(role):
            return
        self.world.kill(role)
        if role in DISKS:
            self.storages[DISKS[role]].crash()
        self._due_ms[role] = self._now_ms() + restart_ms

    def power_loss(self, restart_ms: float) -> None:
        """The machine is off; only what is SYNCED is sure to be there when it comes back."""
        self.world.record("power loss")
        for role in ROLES:
            self.kill(role, restart_ms)
            self._due_ms[role] = self._now_ms() + restart_ms
        for storage in self.storages.values():
            storage.power_loss()
        self.boots += 1

    def drain(self) -> None:
        """SIGTERM of the broker: it ends by itself, cleanly, and is started again."""
        broker = self.broker
        if self._closing is None and broker is not None and self.serving:
            self.world.record("drain broker")
            self._closing = self.world.spawn("broker", broker.close())

    @property
    def serving(self) -> bool:
        """Whether the broker takes streams."""
        return self.alive("broker") and self.broker is not None and self.broker._serving.is_set()

    def supervise(self) -> None:
        """K1; called every tick."""
        if self._closing is not None:
            ended = self._closing.done()
            if ended and self.alive("broker"):
                self._closing.result()
                self.kill("broker", self._rng.uniform(*RESTART_MS))
            if ended or not self.alive("broker"):
                self._closing = None
        for role in ROLES:
            if self.alive(role):
                self._watch(role)
            elif self._now_ms() >= self._due_ms[role]:
                self.start(role)

    def _watch(self, role: str) -> None:
        start, node = self._starts[role], getattr(self, role)
        failure: BaseException | None = getattr(node, "failed", None)
        if failure is None and start.done():
            failure = start.exception()
        if failure is None:
            return
        self.world.record(f"{role} ended: {failure!r}")
        restarts = isinstance(failure, errors.PkError) and (
            failure.retriable or not isinstance(failure, errors.OperatorError)
        )
        if not restarts:
            self.problems.append(f"{role} ended: {failure!r}")
        self.kill(role, self._rng.uniform(*RESTART_MS))

    def step_clocks(self, by_ms: int) -> None:
        """The machine's wall clock jumps."""
        self.world.record(f"clock step {by_ms}")
        for name in sorted(self.world.clocks):
            self.world.clocks[name].step(by_ms)

    # -- looking inside ----------------------------------------------------------------------------

    def sample(self) -> list[PartitionSample]:
        """Every partition the live broker leads."""
        if not self.serving or self.broker is None:
            return []
        found = []
        for key, partition in self.broker.core.partitions.items():
            leader, log = partition.leader, partition.log
            if leader is None:
                continue
            snapshot = self.store.snapshot(partition.topic, key.topic_id)
            counters = None
            if snapshot is not None and key.partition in snapshot.counters:
                counters = snapshot.counters[key.partition]
            found.append(
                PartitionSample(
                    key=key,
                    topic=partition.topic,
                    leader_epoch=leader.leader_epoch,
                    log_start=log.log_start,
                    local_log_start=log.local_log_start,
                    last_stable_offset=partition.last_stable_offset,
                    high_watermark=partition.high_watermark,
                    log_end=log.written_end,
                    synced_end=log.synced_end,
                    tiered=partition.tiered,
                    flushed=bool(partition.settings["flush_on_ack"]),
                    ready=leader.ready,
                    table_start=NONE if counters is None else counters.start,
                    table_end=NONE if counters is None else counters.end,
                )
            )
        return found

    def check_images(self) -> None:
        """Replay of the metadata log equals the images of controller and broker (rule Q4)."""
        if self.controller is None or not self.alive("controller"):
            return
        images = [("controller", self.controller.machine.image)]
        if self.broker is not None and self.alive("broker") and hasattr(self.broker.core, "link"):
            images.append(("broker", self.broker.core.follower.image))
        reader = open_readonly(self.storages["meta"], LOG_DIR)
        replayed = MetadataImage()
        for role, image in sorted(images, key=lambda pair: pair[1].offset):
            while replayed.offset < image.offset:
                at = replayed.offset + 1
                piece = reader.read(at, bound=image.offset + 1, max_bytes=LOG_READ_BYTES)
                if not piece.data:
                    return  # applied, and not written yet
                for offset, record in decode_batches(piece.data, at):
                    if offset <= image.offset:
                        replayed.apply(offset, record)
                        replayed.check()
            if replayed.offset == image.offset:
                require(replayed == image, "replay", f"{role} is not what its log says: {image}")

    def unwell(self) -> str:
        """Why the cluster does not work as it should; '' = it does."""
        for role in ROLES:
            if not self.alive(role):
                return f"{role} is not running"
        if not self.serving or self.broker is None or self.tier is None:
            return "a node is not serving"
        if self.tier.problem is not None:
            return f"the tier has a problem: {self.tier.problem!r}"
        core = self.broker.core
        for topic, number, _ in core.follower.image.partitions():
            key = PartitionKey(topic.topic_id, number)
            partition = core.partitions.get(key)
            if partition is None or partition.leader is None:
                return f"{topic.name}-{number} is not led: {core.follower.why_not_here(key)!r}"
        for sample in self.sample():
            if sample.high_watermark < sample.log_end:
                return f"HW has not reached the end: {sample}"
            if sample.tiered and sample.table_end < sample.last_stable_offset:
                if sample.table_end == NONE and sample.last_stable_offset == 0:
                    continue
                return f"tiered_end has not reached the LSO: {sample}"
        return ""
