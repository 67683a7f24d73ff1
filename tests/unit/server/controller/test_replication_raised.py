"""Replicas that a term of the controller adds to internal topics, in virtual time."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.server.controller import commands
from pk.transactional_ids import TOPIC
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


async def internal_topic_on(scene: Scene, world: World) -> Replica:
    """Return broker 1, which had an internal topic created while it was alone."""
    one = Replica(scene, world, 1).start()
    await world.clock.sleep_ms(1_000)
    request = wire.CreateInternalTopicRequest(
        broker_id=1, broker_epoch=one.epoch, name=TOPIC, topic_id="own"
    )
    await ask(scene, world, request)
    return one


def adding(broker: Replica) -> set[tuple[int, ...]]:
    found = broker.image.topic(TOPIC)
    assert found is not None
    return {state.adding for state in found.partitions.values()}


def test_an_internal_topic_gets_more_replicas_as_brokers_come(scene: Scene) -> None:
    async def story(world: World) -> None:
        one = await internal_topic_on(scene, world)
        await world.clock.sleep_ms(1_000)
        assert adding(one) == {()}
        two = Replica(scene, world, 2).start()
        await world.clock.sleep_ms(1_500)
        assert adding(one) == {(2,)}
        for each in (one, two):
            await each.stop()

    scene.run(story)


def test_a_new_term_adds_the_replicas_that_the_former_one_did_not_add(scene: Scene) -> None:
    async def before(world: World) -> Replica:
        one = await internal_topic_on(scene, world)
        assert scene.node is not None
        assert scene.node.active is not None

        async def nothing(now_ms: int) -> None:
            """Stand for a controller that dies before it adds replicas."""

        active: Any = scene.node.active
        active._raise_replication = nothing
        for node_id in (2, 3):
            Replica(scene, world, node_id).start()
        await world.clock.sleep_ms(1_500)
        assert adding(one) == {()}
        return one

    one = scene.run(before)
    scene.kill()
    scene.start()

    async def after(world: World) -> None:
        await world.clock.sleep_ms(3_000)
        assert {frozenset(each) for each in adding(one)} == {frozenset({2, 3})}

    scene.run(after)


def test_a_full_disk_of_the_controller_delays_the_replicas(scene: Scene) -> None:
    async def story(world: World) -> None:
        one = await internal_topic_on(scene, world)
        assert scene.node is not None
        assert scene.node.active is not None
        host: Any = scene.node.active.host
        tries = 0
        asks = host.ask

        async def asked(command: Any) -> Any:
            nonlocal tries
            if isinstance(command, commands.RaiseReplication):
                tries += 1
                if tries <= 2:
                    raise errors.StorageFull("full")
            return await asks(command)

        host.ask = asked
        two = Replica(scene, world, 2).start()
        await world.clock.sleep_ms(1_500)
        assert adding(one) == {()}
        await world.clock.sleep_ms(3_000)
        assert adding(one) == {(2,)}
        assert tries == 3
        for each in (one, two):
            await each.stop()

    scene.run(story)
