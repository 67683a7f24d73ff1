"""A simulated cluster of one controller and several brokers, with producers and readers that check
every result.  The one kit of the tests of replication and of clients in a cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pk import errors, settings, tracing
from pk.client.accumulator import RecordAccumulator
from pk.client.fetch_engine import FetchEngine
from pk.client.fetcher_events import Seek
from pk.client.network_client import NetworkClient
from pk.client.offsets import EARLIEST
from pk.client.options import consumer_options, producer_options
from pk.client.produce_engine import ProduceEngine
from pk.client.record_arguments import record_size
from pk.log.storage import Disk
from pk.server.broker.cleaning import Cleaner
from pk.server.broker.node import BrokerNode
from pk.server.controller.node import ControllerNode
from pk.server.metadata.image import PartitionState
from pk.server.node.run_config import RunConfig
from pk.server.replica.partition import Partition
from pk.server.replica.state import OPEN
from pk.sim.disk import SimDisk, SimStorage
from pk.sim.world import SimWorld
from pk.types import TopicPartition
from pk.wire import pk_pb2 as wire
from pk.world import World

#: How quickly clients try again, unless they have the default settings.
RETRIES = {"retry_backoff_ms": 20, "retry_backoff_max_ms": 200, "request_timeout_ms": 1_000}
SERVER = {
    "broker_session_timeout_ms": 2_000,
    "broker_heartbeat_interval_ms": 300,
    "replica_lag_time_max_ms": 2_000,
}
SESSION_MS = SERVER["broker_session_timeout_ms"]


class BrokerLog(tracing.Log):
    """The log of a broker, written into the trace; a reported bug fails the test."""

    def __init__(self, name: str, kit: Kit) -> None:
        super().__init__(name, lambda: 0)
        self._kit = kit
        self._name = name

    def _line(self, level: str, event: str, facts: dict[str, object]) -> None:
        known = {name: value for name, value in facts.items() if name != "trace"}
        self._kit.said.append((self._name, event, known))
        if level == "BUG":
            self._kit.bugs.append(f"{self._name} {event} {facts.get('trace')}")


class Kit:
    """Nodes that can be killed, lose power and come back.

    directories: how many data directories each broker has, 1 or 2.
    client_defaults: clients have the default settings, and a host that is silent stays connected,
    as a process under SIGSTOP does.  Otherwise they retry quickly.
    cleaner: makes the cleaner of a broker; None = the brokers clean no log.
    server: server settings of all nodes, besides SERVER.
    """

    def __init__(
        self,
        seed: int,
        brokers: int = 3,
        *,
        directories: int = 1,
        client_defaults: bool = False,
        cleaner: Callable[[], Cleaner] | None = None,
        **server: Any,
    ) -> None:
        self._cleaner = cleaner
        self.sim = SimWorld(seed)
        self.clients: dict[str, Any] = {"metadata_max_age_ms": 5_000, **RETRIES}
        if client_defaults:
            self.clients = {}
            self.sim.network.silence_ms = 10**9
        self.bugs: list[str] = []
        self.said: list[tuple[str, str, dict[str, object]]] = []
        self.brokers: dict[int, BrokerNode] = {}
        self.port = 9292  #: of brokers that are booted from now on
        self.boots = dict.fromkeys(range(1, brokers + 1), 1)
        self.run = RunConfig(
            dirs=("/sim/d",),
            directory_ids=("m" * 36,),
            run_dir="/sim/run",
            cluster_id="c" * 36,
            node_id=100,
            server=settings.SERVER.resolve({**SERVER, **server}),
        )
        self.storages = {n: SimStorage(f"d{n}", self.sim.random(f"disk{n}")) for n in self.boots}
        self.second = {
            n: SimStorage(f"s{n}", self.sim.random(f"second{n}"))
            for n in self.boots
            if directories == 2
        }
        self.meta = SimStorage("meta", self.sim.random("meta"))
        self.controller: ControllerNode | None = None
        self.sim.start("controller", self._controller)
        self.sim.run_until(lambda: self.controller is not None)
        for n in self.boots:
            self.boot(n)
        self.until(lambda: all(self.serves(n) for n in self.boots))

    # -- nodes -------------------------------------------------------------------------------------

    async def _controller(self, world: World) -> None:
        disk = SimDisk(self.meta, world.clock, world.rng)
        node = ControllerNode(world, disk, self.run, log=BrokerLog("controller", self))
        await node.start()
        self.controller = node

    def boot(self, n: int) -> None:
        async def main(world: World) -> None:
            storages = [each[n] for each in (self.storages, self.second) if n in each]
            disks: list[Disk] = [SimDisk(each, world.clock, world.rng) for each in storages]
            server = {**self.run.server, "listen": f"b{n}:{self.port}", "node_id": n}
            ids = tuple(each.root * 12 for each in storages)
            run = replace(self.run, node_id=n, server=server, directory_ids=ids)
            node = BrokerNode(
                world,
                disks,
                run,
                boot_id=f"boot-{n}-{self.boots[n]}",
                incarnation_id=world.new_id(),
                log=BrokerLog(f"b{n}", self),
                cleaner=None if self._cleaner is None else self._cleaner(),
            )
            self.brokers[n] = node
            await node.start()

        self.sim.start(f"b{n}", main)

    def kill(self, n: int) -> None:
        """Kill the node like kill -9: data that are WRITTEN stay."""
        self.brokers.pop(n, None)
        self.sim.kill(f"b{n}")
        self.storages[n].crash()
        if n in self.second:
            self.second[n].crash()

    def power_loss(self, n: int) -> None:
        self.kill(n)
        self.storages[n].power_loss()
        self.boots[n] += 1

    def empty_disk(self, n: int) -> None:
        """Restart the node with a new, empty disk."""
        self.kill(n)
        self.boots[n] += 1
        self.storages[n] = SimStorage(f"e{n}", self.sim.random(f"disk{n}/{self.boots[n]}"))

    def drain(self, n: int) -> None:
        """Stop the node cleanly, and wait for the end."""
        task = self.sim.spawn(f"b{n}", self.brokers[n].close())
        self.until(task.done)
        self.kill(n)

    def serves(self, n: int) -> bool:
        return n in self.brokers and self.brokers[n]._serving.is_set()

    def until(self, holds: Any, events_max: int = 2_000_000) -> None:
        self.sim.run_until(lambda: bool(self.bugs) or holds(), events_max)
        self._check()

    def wait(self, duration_ms: int) -> None:
        self.sim.loop.run_for_ms(duration_ms)
        self._check()

    def _check(self) -> None:
        """Check that there is no bug, and that a log is open exactly for the states that say so
        (replica/state H1).
        """
        assert not self.bugs, self.bugs[0]
        for broker in self.brokers.values():
            said = {each.key for each in broker.core.replicas if each.state in OPEN}
            assert said == set(broker.core.partitions)

    def hold_metadata(self, n: int) -> Callable[[], None]:
        """Withhold all new metadata from broker `n` until the returned function is called; it then
        gets them in one chunk.
        """
        follower, clock, held = (
            self.brokers[n].core.publisher,
            self.brokers[n].core.env.clock,
            [True],
        )
        poll = follower._poll

        async def later(wait_ms: int) -> Any:
            while held:
                await clock.sleep_ms(10)
            return await poll(wait_ms)

        setattr(follower, "_poll", later)  # noqa: B010 - it stands in the place of a method
        return held.clear

    # -- looking inside ----------------------------------------------------------------------------

    def topic_id(self, topic: str) -> str:
        """Return the id of a topic, as the controller has it."""
        assert self.controller is not None
        assert self.controller.active is not None
        return self.controller.active.machine.image.topic_ids[topic]

    def state(self, topic: str, number: int = 0) -> PartitionState:
        assert self.controller is not None
        found = self.controller.machine.image.topic(topic)
        assert found is not None
        return found.partitions[number]

    def replica(self, n: int, topic: str, number: int = 0) -> Partition:
        for key, partition in self.brokers[n].core.partitions.items():
            if partition.topic == topic and key.partition == number:
                return partition
        raise AssertionError(f"broker {n} has no {topic}-{number}")

    def in_sync(self, topic: str, count: int = 3) -> bool:
        state = self.state(topic)
        if state.leader not in self.brokers or len(state.isr) != count:
            return False
        return all(
            n in self.brokers
            and self.serves(n)
            and self.replica(n, topic).log.written_end
            == self.replica(state.leader, topic).log.written_end
            == self.replica(n, topic).high_watermark
            for n in state.isr
        )

    def content(self, n: int, topic: str) -> bytes:
        """Return every batch of a replica's log, as stored."""
        log = self.replica(n, topic).log
        at, found = log.local_log_start, b""
        while at < log.written_end:
            read = log.read(at, bound=log.written_end, max_bytes=1 << 30)
            found, at = found + bytes(read.data), read.next_offset
        return found

    def events(self, event: str) -> int:
        return sum(said[1] == event for said in self.said)

    def lies_on_second(self, n: int, topic: str) -> bool:
        return self.replica(n, topic).writer.disk.storage is self.second[n]

    # -- driver ------------------------------------------------------------------------------------

    def cluster(self, name: str, bootstrap: list[str] | None = None) -> NetworkClient:
        world = self.sim.world_of(name)
        given = bootstrap or [f"b{n}:9292" for n in self.boots]
        return NetworkClient(world, given, client_id=name, **self.clients)

    def create(self, topic: str, partitions: int = 1, factor: int = 3, **configs: Any) -> None:
        request = wire.CreateTopicsRequest()
        request.topics.add(
            name=topic,
            partitions=partitions,
            replication_factor=factor,
            configs={name: str(value) for name, value in configs.items()},
        )

        reply = self.ask(request)
        assert not reply.results[0].HasField("error"), reply

    def delete(self, topic: str) -> None:
        reply = self.ask(wire.DeleteTopicsRequest(names=[topic]))
        assert not reply.results[0].HasField("error"), reply

    def spawn_ask(self, request: Any, n: int) -> Any:
        """Call broker `n` in a task."""

        async def story() -> Any:
            cluster = self.cluster("admin")
            try:
                caller = cluster.caller(f"b{n}:9292")
                head = (await caller.call(request, timeout_ms=30_000)).head
                return getattr(head, head.WhichOneof("body"))
            finally:
                await cluster.close()

        return self.sim.spawn("admin", story())

    def ask(self, request: Any) -> Any:
        """Call any broker that answers."""

        async def story() -> Any:
            cluster = self.cluster("admin")
            try:
                return await cluster.call_any(request, timeout_ms=10_000)
            finally:
                await cluster.close()

        return self.sim.run(story())

    def soon(self, holds: Any, within_ms: int = 20_000) -> None:
        deadline = self.now_ms + within_ms
        self.until(lambda: holds() or self.now_ms > deadline)
        assert holds()

    def done(self, name: str, work: Any) -> Any:
        task = self.sim.spawn(name, work)
        self.until(task.done)
        return task.result()

    @property
    def now_ms(self) -> float:
        return self.sim.loop.now_us / 1000

    def silence(self, n: int, *also: str, heal: bool = False) -> None:
        """Let broker `n` answer no request, while its streams stay open."""
        others = [f"b{each}" for each in self.boots if each != n]
        change = self.sim.network.heal if heal else self.sim.network.cut
        for name in ("controller", "admin", "producer", "reader", *others):
            change(f"b{n}", name)

    def spread(self, topic: str, **configs: Any) -> None:
        """Create a topic with one partition led by each broker."""
        self.create(topic, partitions=len(self.boots), **configs)
        leaders = {self.state(topic, n).leader for n in range(len(self.boots))}
        assert leaders == set(self.boots)


class Ledger:
    """Sends numbered records in bursts, and notes the offset of each acknowledged one.

    keys: how many keys the records have in turn; 0 = no keys
    size: bytes of a value, at least
    """

    def __init__(self, kit: Kit, topic: str, keys: int = 0, size: int = 1, **given: Any) -> None:
        self.kit = kit
        self._keys = keys
        self._size = size
        self.topic = topic
        self.sent = 0
        self.acked: dict[int, int] = {}  #: number -> offset
        self.failed: dict[int, errors.PkError] = {}
        world = kit.sim.world_of("producer")
        settings, _ = producer_options(
            {"linger_ms": 1, "delivery_timeout_ms": 30_000, **RETRIES, **given}
        )
        self.engine = ProduceEngine(world, kit.cluster("producer"), settings)
        self._world = world
        self._going = True
        self._task = kit.sim.spawn("producer", self._run())

    async def _run(self) -> None:
        self.engine.cluster.start()
        while self._going:
            await self._world.clock.sleep_ms(5)
            try:
                accumulator = await self.engine.open(self.topic, 500)
            except errors.PkError:
                continue
            for _ in range(self._world.rng.randint(1, 20)):
                self._append(accumulator)
            self.engine.poke()

    def _append(self, accumulator: RecordAccumulator) -> None:
        """Give the next record to the producer."""
        number, self.sent = self.sent, self.sent + 1
        value = b"%0*d" % (self._size, number)
        key = b"%d" % (number % self._keys) if self._keys else None
        size = record_size(value, key, None, self.topic)

        def told(metadata: Any, error: Any) -> None:
            if error is None:
                self.acked[number] = metadata.offset
            else:
                self.failed[number] = error

        offered = accumulator.append(value, key, None, 0, None, told, size=size)
        if offered is None:
            self.failed[number] = errors.BufferExhausted("full")

    def more(self, count: int) -> None:
        """Run until `count` more records are acknowledged."""
        want = len(self.acked) + count
        self.kit.until(lambda: len(self.acked) >= want or self.engine.fatal is not None)
        assert self.engine.fatal is None, self.engine.fatal

    def stop(self) -> None:
        """No more records; run until every one has an outcome."""
        self._going = False

        async def flush() -> None:
            self.engine.begin_flush()

        self.kit.until(self.kit.sim.spawn("producer", flush()).done)
        self.kit.until(
            lambda: self._task.done() and len(self.acked) + len(self.failed) == self.sent
        )

    def rows(self) -> dict[int, int]:
        """Return offset -> number, as a consumer reads it from the beginning."""
        kit = self.kit
        world = kit.sim.world_of("reader")
        options = consumer_options({"auto_offset_reset": "earliest", **RETRIES})
        engine = FetchEngine(world, kit.cluster("reader"), options)
        found: dict[int, int] = {}
        state = kit.state(self.topic)
        end = kit.replica(state.leader, self.topic).high_watermark

        async def story() -> None:
            engine.assign([TopicPartition(self.topic, 0)])
            while not found or max(found) + 1 < end:
                await world.clock.sleep_ms(10)
                try:
                    drained = engine.drain()
                except errors.CorruptBatch:  # asked for again, the broker looks at it too (L9)
                    engine.step(Seek(TopicPartition(self.topic, 0), EARLIEST))
                    continue
                for _, batch in drained:
                    offsets = batch.column("offset").to_pylist()
                    values = batch.column("value").to_pylist()
                    found.update(zip(offsets, map(int, values), strict=True))
            await engine.close()

        kit.sim.run(story())
        return found

    def check(self) -> None:
        """Acknowledged: there, once, where it was said; anything else: at most once; in order."""
        rows = self.rows()
        numbers = list(rows.values())
        assert len(set(numbers)) == len(numbers), "twice"
        assert numbers == sorted(numbers), "out of order"
        for number, offset in self.acked.items():
            assert rows.get(offset) == number, (number, offset, rows.get(offset))


def written(kit: Kit, topic: str, count: int) -> Ledger:
    """Create a topic without load, whose replicas all have every record."""
    ledger = Ledger(kit, topic)
    ledger.more(count)
    ledger.stop()
    kit.until(lambda: kit.in_sync(topic))
    return ledger


def assign(kit: Kit, topic: str, *replicas: int) -> None:
    """Reassign partition 0."""
    request = wire.AlterReassignmentsRequest()
    request.reassignments.add(
        topic=topic, topic_id=kit.topic_id(topic), partition=0, replicas=replicas
    )
    reply = kit.ask(request)
    assert not reply.results[0].HasField("error"), reply


class Lines:
    """One producer that sends a numbered record to every partition of a topic every few
    milliseconds.
    """

    def __init__(
        self, kit: Kit, topic: str, partitions: int = 1, bootstrap: Any = None, **given: Any
    ) -> None:
        self.kit = kit
        self.topic = topic
        self.partitions = partitions
        self.sent = 0
        self.acked: dict[tuple[int, int], int] = {}  #: (partition, number) -> offset
        self.newest = dict.fromkeys(range(partitions), -1)  #: the last number acknowledged
        self.failed: dict[tuple[int, int], errors.PkError] = {}
        options, _ = producer_options(given)
        self.world = kit.sim.world_of("producer")
        cluster = kit.cluster("producer", bootstrap)
        self.engine = ProduceEngine(self.world, cluster, options)
        self._going = True
        self._task = kit.sim.spawn("producer", self._run())

    async def _run(self) -> None:
        self.engine.cluster.start()
        accumulator = await self.engine.open(self.topic, 60_000)
        while self._going:
            number, self.sent = self.sent, self.sent + 1
            for partition in range(self.partitions):
                value = b"%d" % number

                def told(at: Any, error: Any, key: Any = (partition, number)) -> None:
                    if error is None:
                        self.acked[key] = at.offset
                        self.newest[key[0]] = max(self.newest[key[0]], key[1])
                    else:
                        self.failed[key] = error

                size = record_size(value, None, None, self.topic)
                accumulator.append(value, None, None, partition, None, told, size=size)
            self.engine.poke()
            await self.world.clock.sleep_ms(self.world.rng.randint(1, 9))

    def after(self, partition: int = 0) -> float:
        """Run until a record that is sent from now on is acknowledged: how many ms that takes."""
        begun, mark = self.kit.now_ms, self.sent
        self.kit.until(lambda: self.newest[partition] >= mark or self.engine.fatal is not None)
        assert self.engine.fatal is None, self.engine.fatal
        return self.kit.now_ms - begun

    def stop(self) -> None:
        """No more; every record gets an outcome."""
        self._going = False
        self.kit.until(self._task.done)

        async def flush() -> None:
            self.engine.begin_flush()

        self.kit.until(self.kit.sim.spawn("producer", flush()).done)
        total = self.sent * self.partitions
        self.kit.until(lambda: len(self.acked) + len(self.failed) == total)


class Reader:
    """One consumer of every partition, which reads from the beginning."""

    def __init__(self, kit: Kit, topic: str, partitions: int = 1) -> None:
        self.kit = kit
        self.rows: dict[int, list[tuple[int, int]]] = {p: [] for p in range(partitions)}
        self.told: list[errors.PkError] = []
        self.world = kit.sim.world_of("reader")
        options = consumer_options({"auto_offset_reset": "earliest"})
        self.engine = FetchEngine(self.world, kit.cluster("reader"), options)
        self._task = kit.sim.spawn("reader", self._run(topic))

    async def _run(self, topic: str) -> None:
        self.engine.assign([TopicPartition(topic, p) for p in self.rows])
        while True:
            await self.world.clock.sleep_ms(2)
            try:
                found = self.engine.drain()
            except errors.PkError as error:
                self.told.append(error)
                continue
            for place, batch in found:
                offsets = batch.column("offset").to_pylist()
                values = map(int, batch.column("value").to_pylist())
                self.rows[place.partition] += zip(offsets, values, strict=True)

    def after(self, partition: int = 0) -> float:
        """Run until something new is read: how many ms that takes."""
        begun, seen = self.kit.now_ms, len(self.rows[partition])
        self.kit.until(lambda: len(self.rows[partition]) > seen)
        return self.kit.now_ms - begun

    def check(self, lines: Lines) -> None:
        """Everything acknowledged was read, where it was said, each once, in order, no gap."""
        for partition, rows in self.rows.items():
            offsets = [offset for offset, _ in rows]
            assert offsets == list(range(len(rows))), "a gap or a repetition"
            numbers = [number for _, number in rows]
            assert numbers == sorted(set(numbers)), "order, exactly once"
            for (p, number), offset in lines.acked.items():
                assert p != partition or rows[offset] == (offset, number)

    def catch_up(self, lines: Lines) -> None:
        want = {p: max(o for (q, _), o in lines.acked.items() if q == p) + 1 for p in self.rows}
        self.kit.until(lambda: all(len(self.rows[p]) >= end for p, end in want.items()))
