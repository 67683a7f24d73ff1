"""The controller process in virtual time: simulated disk and network, hand-driven brokers."""

from __future__ import annotations

import asyncio
import errno
import io
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from pk import errors, settings, tracing
from pk.server.controller.node import ControllerNode
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import decode_batches
from pk.server.node.run_config import RunConfig
from pk.server.raft.snapshot_id import SUFFIX
from pk.sim.disk import SimDisk, SimStorage
from pk.sim.world import SimWorld
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller
from pk.world import Stream, StreamKind, World

RUN = RunConfig(
    dirs=("/d",),
    directory_ids=("dir-1",),
    run_dir="/d/run",
    cluster_id="cluster",
    node_id=1,
    server=settings.SERVER.resolve({}),
)
BROKER_ADDRESS = "broker:9292"
CALL_MS = 5_000


class Scene:
    """A world with a controller that can be killed and started again on its disk."""

    def __init__(self, seed: int = 1, run: RunConfig | None = None) -> None:
        self.world = SimWorld(seed)
        self.configured = RUN if run is None else run
        self.storage = SimStorage("metadata", self.world.random("disk"))
        self.node: ControllerNode | None = None
        self.fatal: list[BaseException] = []
        self.lines = io.StringIO()  #: the log events of the process

    def start(self) -> None:
        async def main(world: World) -> None:
            disk = SimDisk(self.storage, world.clock, world.rng)
            log = tracing.Log("controller", world.clock.wall_ms, self.lines)
            self.node = ControllerNode(
                world, disk, self.configured, log=log, on_fatal=self.fatal.append
            )
            await self.node.start()

        started = self.world.start("controller", main)
        self.world.run_until(started.done)
        started.result()

    def kill(self, power_loss: bool = False) -> None:
        self.world.kill("controller")
        if power_loss:
            self.storage.power_loss()
        else:
            self.storage.crash()

    def run(self, story: Callable[[World], Awaitable[Any]]) -> Any:
        return self.world.run(story(self.world.world_of("client")))  # type: ignore[arg-type]

    def caller(self, world: World) -> Caller:
        hello = wire.Hello(client_id="test", protocol=PROTOCOL, cluster_id="cluster")
        return Caller(world.network, world.clock, RUN.controller_address, hello)


class HeartbeatingBroker:
    """A broker that registers, sends heartbeats and follows the log."""

    def __init__(self, scene: Scene, world: World, incarnation: str, boot: str = "boot") -> None:
        self.caller = scene.caller(world)
        self.image = MetadataImage()
        self.incarnation, self.boot = incarnation, boot
        self.epoch = NONE

    async def register(self, **more: Any) -> wire.RegisterBrokerReply:
        request = wire.RegisterBrokerRequest(
            broker_id=1,
            cluster_id="cluster",
            incarnation_id=self.incarnation,
            address=BROKER_ADDRESS,
            boot_id=self.boot,
            directory_ids=["dir-1"],
            **more,
        )
        frame = await self.caller.call(request, timeout_ms=CALL_MS)
        self.epoch = frame.head.register_broker_reply.broker_epoch
        return frame.head.register_broker_reply

    async def beat(self, **more: Any) -> wire.BrokerHeartbeatReply:
        request = wire.BrokerHeartbeatRequest(
            broker_id=1, broker_epoch=self.epoch, metadata_offset=self.image.offset, **more
        )
        frame = await self.caller.call(request, timeout_ms=CALL_MS)
        return frame.head.broker_heartbeat_reply

    async def follow(self, max_wait_ms: int = 0) -> None:
        request = wire.FetchMetadataLogRequest(
            from_offset=self.image.offset + 1, max_wait_ms=max_wait_ms, max_bytes=1 << 20
        )
        frame = await self.caller.call(request, timeout_ms=CALL_MS)
        for offset, record in decode_batches(bytes(frame.payload), self.image.offset + 1):
            self.image.apply(offset, record)
            self.image.check()

    async def come_up(self) -> None:
        await self.register()
        await self.follow()
        reply = await self.beat()
        assert not reply.fenced
        await self.follow()


async def create(caller: Caller, name: str, partitions: int = 1, **configs: str) -> Any:
    request = wire.CreateTopicsRequest(
        topics=[wire.NewTopic(name=name, partitions=partitions, configs=configs)]
    )
    frame = await caller.call(request, timeout_ms=CALL_MS)
    (result,) = frame.head.create_topics_reply.results
    return result


@pytest.fixture
def scene() -> Any:
    made = Scene()
    made.start()
    yield made
    assert not made.fatal
    made.world.close()


def test_a_broker_comes_up_and_topics_follow(scene: Scene) -> None:
    """Q2: it is unfenced only once its image holds its registration; then it leads new
    partitions.
    """

    async def story(world: World) -> None:
        broker = HeartbeatingBroker(scene, world, "i1")
        assert (await create(broker.caller, "early")).error.code == 38  # no broker yet
        await broker.register()
        assert (await broker.beat()).fenced
        assert (await create(broker.caller, "early")).error.code == 8  # fenced: retriable
        await broker.follow()
        assert not (await broker.beat()).fenced
        result = await create(broker.caller, "flights", 3, **{"retention.ms": "-1"})
        assert not result.HasField("error")
        await broker.follow()
        topic = broker.image.topic("flights")
        assert topic is not None
        assert topic.topic_id == result.topic_id
        states = [topic.partitions[n] for n in range(3)]
        assert [(s.leader, s.isr, s.leader_epoch) for s in states] == [(1, (1,), 0)] * 3
        assert broker.image.topic_config("flights")["retention_ms"] == -1
        assert broker.image.cluster_id == "cluster"

    scene.run(story)


def test_the_log_is_long_polled(scene: Scene) -> None:
    async def story(world: World) -> None:
        broker = HeartbeatingBroker(scene, world, "i1")
        await broker.come_up()
        before = broker.image.offset
        started = world.clock.monotonic_ms()
        await broker.follow(max_wait_ms=400)
        assert broker.image.offset == before
        assert 400 <= world.clock.monotonic_ms() - started < 450
        task = asyncio.get_running_loop().create_task(broker.follow(max_wait_ms=4_000))
        await world.clock.sleep_ms(100)
        await create(scene.caller(world), "t")
        await task
        assert broker.image.topic("t") is not None
        with pytest.raises(errors.OffsetOutOfRange):
            await broker.caller.call(
                wire.FetchMetadataLogRequest(from_offset=1_000), timeout_ms=CALL_MS
            )

    scene.run(story)


def test_a_lost_stream_of_a_dead_broker_fences_at_once(scene: Scene) -> None:
    """R7: a reset and a refused connection fence it within 300 ms; its replicas stay eligible
    (ELR).
    """

    async def story(world: World) -> None:
        broker = HeartbeatingBroker(scene, world, "i1")
        await broker.come_up()
        await create(broker.caller, "t")
        watcher = HeartbeatingBroker(scene, world, "other")
        await watcher.follow()
        lost = world.clock.monotonic_ms()
        await broker.caller.close()
        await watcher.follow(max_wait_ms=4_000)
        assert world.clock.monotonic_ms() - lost < 300
        assert watcher.image.brokers[1].fenced
        topic = watcher.image.topic("t")
        assert topic is not None
        state = topic.partitions[0]
        assert (state.leader, state.isr, state.elr) == (NONE, (), (1,))
        # a restart in the same boot is clean and leads again, in a later epoch
        again = HeartbeatingBroker(scene, world, "i2")
        assert (await again.register()).clean
        await again.follow()
        await again.beat()
        await again.follow()
        topic = again.image.topic("t")
        assert topic is not None
        after = topic.partitions[0]
        assert (after.leader, after.isr, after.elr, after.unclean) == (1, (1,), (), False)
        assert after.leader_epoch > state.leader_epoch

    scene.run(story)


def test_who_was_fenced_and_speaks_again_on_its_stream_is_fenced_for_its_next_silence(
    scene: Scene,
) -> None:
    """R7: a process that was stopped for a while breaks no stream, and does not register again."""

    async def story(world: World) -> None:
        broker = HeartbeatingBroker(scene, world, "i1")
        await broker.come_up()
        watcher = HeartbeatingBroker(scene, world, "w")
        for _ in range(3):
            await watcher.follow()
            assert not watcher.image.brokers[1].fenced
            silent = world.clock.monotonic_ms()
            while not watcher.image.brokers[1].fenced:
                assert world.clock.monotonic_ms() - silent <= 7_000
                await watcher.follow(max_wait_ms=1_000)
            while (await broker.beat()).fenced:
                await broker.follow()

    scene.run(story)


def test_a_silent_broker_is_fenced_after_its_session(scene: Scene) -> None:
    """R7: an open stream without heartbeats does not count after broker_session_timeout_ms."""

    async def story(world: World) -> None:
        broker = HeartbeatingBroker(scene, world, "i1")
        await broker.come_up()
        watcher = HeartbeatingBroker(scene, world, "w")
        await watcher.follow()
        with pytest.raises(errors.DuplicateBroker):
            await HeartbeatingBroker(scene, world, "i2").register()
        silent = world.clock.monotonic_ms()
        while not watcher.image.brokers[1].fenced:
            await watcher.follow(max_wait_ms=1_000)
        assert 5_900 <= world.clock.monotonic_ms() - silent <= 6_200
        assert (await HeartbeatingBroker(scene, world, "i2").register()).clean  # now it may
        with pytest.raises(errors.StaleBrokerEpoch):
            await broker.beat()

    scene.run(story)


def test_a_reachable_broker_keeps_its_session_over_a_reset(scene: Scene) -> None:
    """R7: a reset alone fences no broker: the broker answers on its address and resumes (no new
    epoch).
    """

    async def story(world: World) -> None:
        async def serve(_kind: StreamKind, stream: Stream) -> None:
            await stream.recv()

        await world.network.listen(BROKER_ADDRESS, serve)
        broker = HeartbeatingBroker(scene, world, "i1")
        await broker.come_up()
        scene.world.network.break_streams("client", "controller")
        await world.clock.sleep_ms(1_000)
        epoch = broker.epoch
        reply = await broker.register()
        assert (reply.broker_epoch, reply.clean) == (epoch, True)
        assert not (await broker.beat()).fenced
        await broker.follow()
        assert not broker.image.brokers[1].fenced

    scene.run(story)


@pytest.mark.parametrize("power_loss", [False, True])
def test_a_killed_controller_remembers(scene: Scene, power_loss: bool) -> None:
    """L1: every answered request was SYNCED; Q4: the epoch grows with every start."""

    async def before(world: World) -> MetadataImage:
        broker = HeartbeatingBroker(scene, world, "i1")
        await broker.come_up()
        for n in range(5):
            assert not (await create(broker.caller, f"t{n}", 2)).HasField("error")
        await broker.follow()
        return broker.image

    old = scene.run(before)
    assert scene.node is not None
    assert scene.node.metadata.epoch == 1
    scene.kill(power_loss)
    scene.start()
    assert scene.node.metadata.epoch == 2

    async def after(world: World) -> MetadataImage:
        broker = HeartbeatingBroker(scene, world, "i1")
        while broker.image.offset < old.offset:
            await broker.follow()
        assert broker.image.topic_ids == old.topic_ids
        await broker.follow()
        return broker.image

    new = scene.run(after)
    assert new.leader_epoch == 2
    assert [state for _, _, state in new.partitions()] == [s for _, _, s in old.partitions()]


def test_two_controllers_on_one_directory(scene: Scene) -> None:
    async def second(world: World) -> None:
        disk = SimDisk(scene.storage, world.clock, world.rng)
        node = ControllerNode(world, disk, RUN)
        with pytest.raises(errors.DirectoryLocked):
            await node.start()

    task = scene.world.start("second", second)
    scene.world.run_until(task.done)
    task.result()


def test_a_full_disk_refuses_and_recovers() -> None:
    """runtime/replayed_host H4: a failed append leaves nothing behind; once there is space, the
    controller continues by itself.
    """
    scene = Scene()
    scene.start()

    async def story(world: World) -> None:
        broker = HeartbeatingBroker(scene, world, "i1")
        await broker.come_up()
        await create(broker.caller, "before")
        scene.storage.capacity = scene.storage.used_bytes()
        with pytest.raises(errors.StorageFull):
            await create(broker.caller, "refused")
        scene.storage.capacity = None
        assert not (await create(broker.caller, "after")).HasField("error")
        await broker.follow()
        assert list(broker.image.topic_ids) == ["before", "after"]

    scene.run(story)
    assert not scene.fatal
    scene.world.close()


def failing(**server: Any) -> tuple[Scene, HeartbeatingBroker]:
    """A scene in which the controller may fail, with a broker that is unfenced."""
    scene = Scene(run=replace(RUN, server={**RUN.server, **server}))
    scene.start()
    broker = HeartbeatingBroker(scene, scene.world.world_of("client"), "i1")
    scene.run(lambda _: broker.come_up())
    return scene, broker


def log_file(scene: Scene) -> str:
    return next(path for path in scene.storage.files() if path.endswith(".log"))


def test_who_waits_for_news_is_not_handed_the_failure_of_the_controller() -> None:
    """controller/node N1: a broker would take the error for an answer, and would end because of a
    disk that is not its own.
    """
    scene, broker = failing(metadata_log_max_record_bytes_between_snapshots=1)
    scene.storage.fault = lambda _operation, path: (
        OSError(errno.EIO, "it is worn out") if SUFFIX in path else None
    )

    async def story(_world: World) -> None:
        for _ in range(2):  # before it happens, and after
            with pytest.raises(errors.ControllerUnavailable):
                await broker.follow(max_wait_ms=4_000)

    scene.run(story)
    assert [type(each) for each in scene.fatal] == [errors.StorageFailed]
    scene.world.close()


def test_a_controller_whose_log_is_damaged_hands_none_of_it_out_and_ends() -> None:
    # controller/node N1, rule L9
    scene, broker = failing()
    scene.storage.rot(log_file(scene), 100, 3)
    broker.image = MetadataImage()  # like a broker that has just started

    async def story(_world: World) -> None:
        for _ in range(2):
            with pytest.raises(errors.ControllerUnavailable):
                await broker.follow()

    scene.run(story)
    assert [type(each) for each in scene.fatal] == [errors.CorruptLog]
    scene.world.close()


def test_who_reads_while_the_log_is_made_shorter_asks_again(scene: Scene) -> None:
    """The disk is slow: when the read runs, a snapshot has replaced the requested records."""

    async def story(world: World) -> None:
        broker = HeartbeatingBroker(scene, world, "i1")
        await broker.come_up()
        broker.image = MetadataImage()
        scene.storage.lag_ms = 500
        fetch = asyncio.ensure_future(broker.follow())
        await world.clock.sleep_ms(100)
        assert scene.node is not None
        log = scene.node.metadata
        log._open_log.advance_log_start(log.committed)
        with pytest.raises(errors.ControllerUnavailable):
            await fetch

    scene.run(story)


def test_controlled_shutdown(scene: Scene) -> None:
    """The broker may stop once it has seen that it leads no partition any more."""

    async def story(world: World) -> None:
        broker = HeartbeatingBroker(scene, world, "i1")
        await broker.come_up()
        result = await create(broker.caller, "t")
        await broker.follow()
        assert not (await broker.beat(want_shutdown=True)).may_shut_down
        assert not (await broker.beat(want_shutdown=True)).may_shut_down  # has not seen it yet
        await broker.follow()
        assert (await broker.beat(want_shutdown=True)).may_shut_down
        state = broker.image.partition(PartitionKey(result.topic_id, 0))
        assert state is not None
        assert (state.leader, state.elr) == (NONE, (1,))

    scene.run(story)


def history(seed: int) -> str:
    """Return the life of a broker and the death of a controller, as the network saw them."""
    scene = Scene(seed)
    scene.start()

    async def story(world: World) -> None:
        broker = HeartbeatingBroker(scene, world, "i1")
        await broker.come_up()
        await asyncio.gather(*(create(broker.caller, f"t{n}", 3) for n in range(5)))
        await broker.follow()

    scene.run(story)
    scene.kill(power_loss=True)
    scene.start()
    scene.run(story)
    assert scene.node is not None
    digest = f"{scene.world.digest} {scene.node.metadata.end} {scene.world.loop.events}"
    scene.world.close()
    return digest


def test_one_seed_one_history() -> None:
    assert history(5) == history(5)
    assert history(5) != history(6)
