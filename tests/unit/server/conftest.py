"""A broker without controller and tier, on a simulated disk and network, to test handlers and
partitions.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from pk import errors, settings, tracing
from pk.log import columns
from pk.log.directory import Directory
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.server.broker.clock_watch import ClockWatch
from pk.server.broker.core import BrokerCore
from pk.server.broker.node import BrokerNode, BrokerStreams
from pk.server.controller.node import ControllerNode
from pk.server.handlers.peers import Peer
from pk.server.metadata.image import PartitionState
from pk.server.node.run_config import RunConfig
from pk.server.replica.context import Environment
from pk.server.replica.directory_reports import DirectoryReports
from pk.server.replica.metrics import BrokerMetrics
from pk.server.replica.offline_reports import OfflineReports
from pk.server.replica.partition import Partition
from pk.server.replica.state import HostedReplicas
from pk.server.tier.node import TierNode
from pk.sim.disk import SimDisk, SimStorage
from pk.sim.world import SimWorld
from pk.tiering.objects import MemoryStore
from pk.tiering.table import MemoryTables
from pk.tiering.worker import Executors
from pk.types import NONE, PartitionKey, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller, accept_stream, head_of, open_stream
from pk.world import Disconnected, Stream, StreamKind, World

TOPIC_ID = "11111111-1111-4111-8111-111111111111"
ADDRESS = "broker:9292"
PROVEN = "proven"
HELLO = wire.Hello(client_id="test", protocol=PROTOCOL)


class Manager:
    """The calls that the core makes to a LogManager."""

    def __init__(self, disk: SimDisk) -> None:
        self.directories = [Directory(disk, "d1", True, NONE)]
        self.watermarks: dict[PartitionKey, int] = {}
        self.log_start_checkpoints = 0
        self.logs: dict[PartitionKey, PartitionLog] = {}

    def set_high_watermark(self, key: PartitionKey, offset: int) -> None:
        self.watermarks[key] = offset

    def high_watermark(self, key: PartitionKey) -> int:
        return self.watermarks.get(key, 0)

    async def checkpoint(
        self, directory: Directory | None = None, *, expire: bool = True
    ) -> None: ...

    async def checkpoint_log_starts(self) -> None:
        self.log_start_checkpoints += 1

    async def move_log_starts(self, moves: Mapping[PartitionKey, int]) -> None:
        self.log_start_checkpoints += 1
        for key, to in moves.items():
            self.logs[key].advance_log_start(to)


class Image:
    """The states in which the rig's partitions are led; the broker `elsewhere` has their data,
    too.
    """

    def __init__(self) -> None:
        self.states: dict[PartitionKey, PartitionState] = {}
        self.elsewhere: tuple[int, ...] = ()
        self.topics: dict[str, Any] = {}
        self.configs: dict[tuple[str, str], dict[str, str]] = {}

    def topic(self, name: str) -> Any:
        return None

    def partition(self, key: PartitionKey) -> PartitionState | None:
        state = self.states.get(key)
        if state is None:
            return None
        every = (*state.replicas, *self.elsewhere)
        return state._replace(replicas=every, isr=(*state.isr, *self.elsewhere))


class Metadata:
    def __init__(self) -> None:
        self.image = Image()
        self.tier_enabled = True

    def leader_of(self, key: PartitionKey) -> int:
        return NONE


class Tier:
    """A tier that answers from a script."""

    enabled = True

    def __init__(self) -> None:
        self.fetches: list[tuple[str, int]] = []
        self.batches: Callable[[int], tuple[bytes, int]] | None = None
        self.times: Callable[[int], wire.TierOffsetForTimeReply] | None = None
        self.known: list[bool] = []  #: look-ups by time: whether in a version that may be old
        self.missing: list[str] = []
        self.confirmed: list[tuple[int, int]] = []
        self.gate: asyncio.Event | None = None

    def new_reader(self) -> int:
        return 1

    async def fetch(
        self, partition: Partition, offset: int, max_bytes: int, reader: int = 0
    ) -> tuple[bytes, int]:
        self.fetches.append((str(partition), offset))
        if self.gate is not None:
            await self.gate.wait()
        if self.batches is None:
            raise errors.TierUnavailable("the store is down")
        return self.batches(offset)

    async def offset_for_time(
        self, partition: Partition, timestamp_ms: int, *, known: bool = False
    ) -> wire.TierOffsetForTimeReply:
        self.known.append(known)
        if self.times is None:
            raise errors.TierUnavailable("the store is down")
        return self.times(timestamp_ms)

    async def confirm(self, partition: Partition, start: int, end: int) -> list[str]:
        self.confirmed.append((start, end))
        return self.missing


class Rig:
    """One broker core and its clients."""

    def __init__(self, seed: int = 1) -> None:
        self.world = SimWorld(seed)
        self.mine = self.world.world_of("broker")
        self.storage = SimStorage("d1", self.world.random("disk"))
        self.disk = SimDisk(self.storage, self.mine.clock, self.world.random("lanes"))
        self.bugs: list[BaseException] = []
        self.events: list[tuple[str, dict[str, Any]]] = []  #: the lines of the broker's log
        self.manager = Manager(self.disk)
        self.metrics = tracing.Metrics()
        env = Environment(
            self.mine,
            1,
            settings.SERVER.resolve({}),
            BrokerMetrics(self.metrics),
            lambda where, bug: self.bugs.append(bug),
            lambda event, **facts: self.events.append((event, facts)),
        )
        self.contact = True
        self.tier = Tier()
        lifecycle: Any = SimpleNamespace(
            in_contact=lambda: self.contact,
            heartbeat_soon=lambda: None,
            want_shutdown=False,
            offline_reports=OfflineReports(),
            directory_reports=DirectoryReports(),
        )
        metadata: Any = Metadata()
        manager: Any = self.manager
        tier: Any = self.tier
        clocks = ClockWatch(env, manager, metadata)
        self.core = BrokerCore(env, manager, metadata, clocks, lifecycle, tier, HELLO, None)
        verifier: Any = self.core.verifier
        verifier.ask = self.coordinator
        self.streams = BrokerStreams(self.core)
        self.core.clocks.begin("boot", fresh=True)
        self.core.clocks.trust.compare((), ())  # it is alone, and its clock right

    async def coordinator(self, asked: Any) -> wire.TxnAnswer:
        """Answer, as a coordinator, that every partition is registered."""
        return wire.TxnAnswer()

    def partition(
        self,
        number: int = 0,
        *,
        epoch: int = 0,
        tiered: bool = False,
        replicas: tuple[int, ...] = (1,),
        **config: Any,
    ) -> Partition:
        """Return a led partition of the topic."""
        wanted = settings.TOPIC.resolve(dict(config.items()))
        key = PartitionKey(TOPIC_ID, number)
        log = PartitionLog.open(
            self.storage,
            f"topics/t-{number}",
            TopicPartition("t", number),
            TOPIC_ID,
            LogConfig.of(wanted),
            clean=True,
            now_ms=self.mine.clock.wall_ms(),
        )
        partition = Partition(
            self.core.host, key, log, self.core.writers.of(self.disk), wanted, tiered=tiered
        )
        self.core.partitions[key] = partition
        self.manager.logs[key] = log
        self.lead(partition, epoch, replicas=replicas)
        return partition

    def lead(
        self,
        partition: Partition,
        epoch: int,
        *,
        replicas: tuple[int, ...] = (1,),
        partition_epoch: int = 0,
    ) -> None:
        state = PartitionState(
            replicas=replicas,
            isr=replicas,
            leader=1,
            leader_epoch=epoch,
            partition_epoch=partition_epoch,
        )
        self.core.metadata.image.states[partition.key] = state
        partition.lead(state, checkpointed=self.manager.high_watermark(partition.key))

    def forget_partitions(self) -> None:
        """Close all logs, as a new process finds it."""
        self.core.partitions.clear()
        vars(self.core.replicas).update(vars(HostedReplicas()))

    async def serve(self, kind: StreamKind, stream: Stream) -> None:
        said = await accept_stream(stream, wire.HelloReply(protocol=PROTOCOL))
        if said is None:
            return
        await self.streams.handler(kind, stream, Peer(said, lambda: False)).serve()

    def run(self, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Listen, then run the story; bugs fail the test."""

        async def whole() -> None:
            await self.world.spawn("broker", self.mine.network.listen(ADDRESS, self.serve))
            await story()

        self.world.world_of("client")
        task = self.world.spawn("client", whole())
        self.world.run_until(task.done)
        task.result()
        assert not self.bugs, self.bugs
        for partition in self.core.partitions.values():
            assert not partition.violations()
        assert not self.world.loop.failures, self.world.loop.failures

    async def stream(self, kind: StreamKind) -> Stream:
        stream, _ = await open_stream(self.world.world_of("client").network, ADDRESS, kind, HELLO)
        return stream

    def caller(self) -> Caller:
        client = self.world.world_of("client")
        return Caller(client.network, client.clock, ADDRESS, HELLO)


@pytest.fixture
def rig() -> Iterator[Rig]:
    built = Rig()
    yield built
    built.world.close()


def batch(count: int = 3, *, size: int = 10, timestamp: int | None = None, **fields: Any) -> bytes:
    """Return a produced batch."""
    rows = pa.RecordBatch.from_pydict({"value": pa.array([bytes(size)] * count, pa.binary())})
    stamp = 1_735_689_600_000 if timestamp is None else timestamp
    return b"".join(columns.encode(rows, default_timestamp=stamp, **fields))


def produce(
    *entries: tuple[int, bytes],
    acks: int = -1,
    correlation_id: int = 1,
    epoch: int = -1,
    topic_id: str = TOPIC_ID,
    timeout_ms: int = 0,
) -> bytes:
    """A frame of (partition, batch) entries."""
    request = wire.ProduceRequest(acks=acks, timeout_ms=timeout_ms)
    for partition, raw in entries:
        request.partitions.add(
            topic_id=topic_id, partition=partition, current_leader_epoch=epoch, batch_bytes=len(raw)
        )
    return frames.encode(
        head_of(request, correlation_id=correlation_id), [raw for _, raw in entries]
    )


async def results(stream: Stream, count: int) -> list[wire.ProduceResult]:
    """The next `count` produce results, in the order they came."""
    found: list[wire.ProduceResult] = []
    while len(found) < count:
        raw = await stream.recv()
        assert raw is not None
        head = frames.decode(raw).head
        if head.HasField("error"):
            raise frames.raise_error(head.error)
        found += head.produce_reply.results
    return found


def position(partition: int = 0, offset: int = 0, **fields: Any) -> wire.FetchPosition:
    given = {"current_leader_epoch": -1, "last_fetched_epoch": -1, "position_id": 1, **fields}
    return wire.FetchPosition(topic_id=TOPIC_ID, partition=partition, fetch_offset=offset, **given)


def fetch(*positions: wire.FetchPosition, credit: int = 1 << 24, **fields: Any) -> bytes:
    given = {
        "replica_id": -1,
        "isolation": 1,
        "max_wait_ms": 500,
        "min_bytes": 1,
        "max_bytes": 1 << 22,
        **fields,
    }
    return frames.encode(
        head_of(wire.FetchRequest(positions=positions, credit_bytes=credit, **given))
    )


async def fetched(stream: Stream) -> tuple[wire.FetchReply, memoryview]:
    raw = await stream.recv()
    assert raw is not None
    frame = frames.decode(raw)
    if frame.head.HasField("error"):
        raise frames.raise_error(frame.head.error)
    return frame.head.fetch_reply, frame.payload


@pytest.fixture
def kit() -> SimpleNamespace:
    """The helpers above, for tests (test modules do not import each other)."""
    return SimpleNamespace(
        batch=batch,
        produce=produce,
        results=results,
        position=position,
        fetch=fetch,
        fetched=fetched,
        topic_id=TOPIC_ID,
    )


# -- whole nodes ---------------------------------------------------------------------------------

LISTEN = "broker:9292"
CLUSTER = "c" * 36
CLUSTER_HELLO = wire.Hello(client_id="test", protocol=PROTOCOL, cluster_id=CLUSTER)


class Cluster:
    """One controller, one broker, one client."""

    def __init__(self, seed: int, *, disks: int = 1, **server: Any) -> None:
        self.world = SimWorld(seed)
        self.disks = [f"d{number}" for number in range(1, disks + 1)]
        self.boot = "boot-1"
        given = {"listen": LISTEN, "disk_reserve_bytes": 0, **server}
        self.server = settings.SERVER.resolve(given)
        self.run = RunConfig(
            dirs=tuple(f"/sim/{name}" for name in self.disks),
            directory_ids=tuple(name.ljust(36, "d") for name in self.disks),
            run_dir="/sim/run",
            cluster_id=CLUSTER,
            node_id=1,
            server=self.server,
        )
        self.storages = {
            name: SimStorage(name, self.world.random(name)) for name in ("meta", *self.disks)
        }
        self.controller: ControllerNode | None = None
        self.broker: BrokerNode | None = None
        self.client = self.world.world_of("client")
        self.store = MemoryStore()
        self.tables = MemoryTables()
        self.tier: TierNode | None = None

    def disk(self, name: str, world: World, node: str) -> SimDisk:
        disk = SimDisk(self.storages[name], world.clock, self.world.random(f"{name}/lanes"))
        self.world.nodes[node].on_kill.append(disk.kill)
        return disk

    def start_controller(self) -> None:
        async def main(world: World) -> None:
            disk = self.disk("meta", world, "controller")
            self.controller = ControllerNode(world, disk, self.run)
            await self.controller.start()

        self.world.start("controller", main)

    def start_broker(self) -> None:
        async def main(world: World) -> None:
            disks: list[Any] = [self.disk(name, world, "broker") for name in self.disks]
            self.broker = BrokerNode(
                world, disks, self.run, boot_id=self.boot, incarnation_id=world.new_id()
            )
            await self.broker.start()

        self.broker = None
        task = self.world.start("broker", main)
        self.world.run_until(
            lambda: task.done() or (self.broker is not None and self.broker._serving.is_set())
        )
        if task.done():
            task.result()

    def start_tier(self) -> None:
        """Start the tier process: the store and the tables outlive it, like a real store."""

        async def execute(work: Callable[[], Any]) -> Any:
            return work()

        async def main(world: World) -> None:
            self.tier = TierNode(
                world,
                self.store,
                self.tables,
                lambda path: (self.storages["d1"], path.partition("/")[2]),
                Executors(execute, execute),
                self.run,
                broker_address=LISTEN,
            )
            await self.tier.start()

        self.world.start("tier", main)

    def start(self) -> None:
        self.start_controller()
        self.start_broker()

    def kill(self, node: str, storage: str, *, power: bool = False) -> None:
        self.world.kill(node)
        if power:
            self.storages[storage].power_loss()
        else:
            self.storages[storage].crash()

    def replace_storage(self, name: str) -> None:
        """Put a new, empty disk in."""
        self.storages[name] = SimStorage(name, self.world.random(f"{name}/new"))

    def do(self, story: Any) -> Any:
        """Run a client's coroutine; check afterwards that the offsets of every partition are in
        order.
        """
        task = self.world.spawn("client", story)
        self.world.run_until(task.done)
        if self.broker is not None:
            for partition in self.broker.core.partitions.values():
                assert not partition.violations()
        return task.result()

    def caller(self, **more: Any) -> Caller:
        return Caller(self.client.network, self.client.clock, LISTEN, CLUSTER_HELLO, **more)

    async def stream(self, kind: StreamKind) -> Stream:
        return (await open_stream(self.client.network, LISTEN, kind, CLUSTER_HELLO))[0]

    async def create(self, name: str, partitions: int = 1, **configs: str) -> str:
        caller = self.caller()
        request = wire.CreateTopicsRequest()
        request.topics.add(name=name, partitions=partitions, replication_factor=1, configs=configs)
        reply = (await caller.call(request, timeout_ms=10_000)).head.create_topics_reply
        await caller.close()
        (result,) = reply.results
        if result.HasField("error"):
            raise frames.raise_error(result.error)
        return result.topic_id

    async def produce(self, kit: Any, topic_id: str, count: int, acks: int = -1) -> list[int]:
        """`count` batches one by one; the base offsets."""
        stream = await self.stream(StreamKind.PRODUCE)
        found = []
        for turn in range(count):
            frame = kit.produce(
                (0, kit.batch()), topic_id=topic_id, correlation_id=turn + 1, acks=acks
            )
            with contextlib.suppress(Disconnected):  # a refused stream gets the reason
                await stream.send(frame)
            (answer,) = await kit.results(stream, 1)
            if answer.HasField("error"):
                raise frames.raise_error(answer.error)
            found.append(answer.base_offset)
        stream.close()
        return found

    async def read(self, kit: Any, topic_id: str) -> int:
        """How many offsets a reader from 0 sees."""
        stream = await self.stream(StreamKind.FETCH)
        at = kit.position()
        at.topic_id = topic_id
        await stream.send(kit.fetch(at))
        reply, _ = await kit.fetched(stream)
        (entry,) = reply.partitions
        if entry.HasField("error"):
            raise frames.raise_error(entry.error)
        while entry.next_offset < entry.high_watermark:
            reply, _ = await kit.fetched(stream)
            (entry,) = reply.partitions
        stream.close()
        return int(entry.next_offset)


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., Cluster]]:
    """Build clusters; at the end none may have met an unexpected exception."""
    made: list[Cluster] = []

    def make(seed: int = 7, **server: Any) -> Cluster:
        made.append(Cluster(seed, **server))
        return made[-1]

    yield make
    failures = [failure for each in made for failure in each.world.loop.failures]
    for each in made:
        each.world.close()
    assert not failures, failures


@pytest.fixture
def tiered(make_cluster: Callable[..., Cluster]) -> Cluster:
    """Return broker, controller and tier, running."""
    cluster = make_cluster(11, tier_url="memory://tier", log_retention_check_interval_ms=1_000)
    cluster.start()
    cluster.start_tier()
    return cluster


@pytest.fixture
def cluster(make_cluster: Callable[..., Cluster]) -> Cluster:
    return make_cluster(7)
