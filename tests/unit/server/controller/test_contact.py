"""Heartbeats while the metadata disk hangs: which are answered at once, and which wait
(controller/active A4).
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pk import errors
from pk.server.controller import commands
from pk.server.controller.active import TICK_MS
from pk.server.controller.machine import Controller
from pk.wire import pk_pb2 as wire
from pk.world import World
from tests.unit.server.controller.test_active import Replica, ask
from tests.unit.server.controller.test_node import Scene


@pytest.fixture
def scene() -> Any:
    made = Scene()
    made.start()
    yield made
    assert not made.fatal
    made.world.close()


async def two_up(scene: Scene, world: World) -> list[Replica]:
    """Return two unfenced brokers, which send heartbeats when the test asks them to."""
    brokers = [Replica(scene, world, node_id) for node_id in (1, 2)]
    for broker in brokers:
        await broker.register()
        await broker.follow()
        assert not (await broker.beat()).fenced
        await broker.follow()
    return brokers


async def stand_still(scene: Scene, world: World) -> asyncio.Task[Any]:
    """Let the metadata disk hang from now on, while the record of a topic is being written."""
    scene.storage.lag_ms = 20_000
    new = wire.NewTopic(name="t", partitions=1, replication_factor=2)
    stuck = asyncio.ensure_future(ask(scene, world, wire.CreateTopicsRequest(topics=[new])))
    await world.clock.sleep_ms(200)
    return stuck


async def goes_on(scene: Scene, world: World, stuck: asyncio.Task[Any]) -> None:
    scene.storage.lag_ms = 0
    await stuck
    await world.clock.sleep_ms(2_000)


def test_a_metadata_disk_that_stands_still_takes_no_contact_from_brokers(scene: Scene) -> None:
    """controller/active A4: the controller lives and receives heartbeats, and no other controller
    leads. The changes that a heartbeat causes have to wait.
    """

    async def story(world: World) -> None:
        one, two = await two_up(scene, world)
        stuck = await stand_still(scene, world)
        for _ in range(3):
            for broker in (one, two):
                assert not (await broker.beat(timeout_ms=500)).fenced
            await world.clock.sleep_ms(2_000)
        for says in ({"want_shutdown": True}, {"offline_replicas": [wire.FetchPartition()]}):
            with pytest.raises(errors.RequestTimedOut):
                await one.beat(timeout_ms=500, **says)
        assert not (await two.beat(timeout_ms=500)).fenced
        await goes_on(scene, world, stuck)
        for broker in (one, two):
            await broker.caller.close()

    scene.run(story)


def test_what_is_not_committed_of_a_registration_is_not_said(scene: Scene) -> None:
    """controller/active A4: another controller may be elected without the record."""

    async def story(world: World) -> None:
        broker = Replica(scene, world, 1)
        await broker.register()
        await broker.follow()
        scene.storage.lag_ms = 20_000
        for _ in range(2):  # it is unfenced; to this controller it is
            with pytest.raises(errors.RequestTimedOut):
                await broker.beat(timeout_ms=500)
        assert scene.node is not None
        assert not scene.node.machine.image.brokers[1].fenced
        scene.storage.lag_ms = 0
        await world.clock.sleep_ms(30_000)
        await broker.caller.close()

    scene.run(story)


def test_who_is_about_to_be_fenced_is_not_told_that_all_is_well(scene: Scene) -> None:
    """controller/active A4, R6: the session is over, and the record that ends the registration
    waits for the disk.
    """

    async def story(world: World) -> None:
        one, two = await two_up(scene, world)
        stuck = await stand_still(scene, world)
        assert scene.node is not None
        assert scene.node.active is not None
        sessions = scene.node.active.sessions
        sessions._by_broker[1].deadline_ms = world.clock.monotonic_ms()
        await world.clock.sleep_ms(2 * TICK_MS)
        with pytest.raises(errors.RequestTimedOut):
            await one.beat(timeout_ms=500)
        assert not (await two.beat(timeout_ms=500)).fenced
        await goes_on(scene, world, stuck)
        for broker in (one, two):
            await broker.caller.close()

    scene.run(story)


def test_a_term_that_replays_its_log_says_nothing_of_registrations(scene: Scene) -> None:
    """controller/active A4: of a broker that registered again, a replay first produces the earlier
    registration.
    """

    async def story(world: World) -> None:
        broker, other = await two_up(scene, world)
        node = scene.node
        assert node is not None
        assert node.active is not None
        request = wire.BrokerHeartbeatRequest(broker_id=1, broker_epoch=broker.epoch)
        beat = commands.Heartbeat(request, node.active._known())
        assert node.active._settled(beat) is not None
        log: list[Any] = []
        await node.metadata.replay(lambda offset, record: log.append(record))
        part, whole = Controller(node.machine.rules), node.machine
        for offset, record in enumerate(log[:-1]):
            part.apply(offset, record)
        node.active.host.machine = part
        assert not part.image.brokers[1].fenced
        assert node.active._settled(beat) is None
        node.active.host.machine = whole
        for each in (broker, other):
            await each.caller.close()

    scene.run(story)
