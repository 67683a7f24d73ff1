"""A term of the controller with several brokers, in virtual time: its soft state."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.server.controller import commands
from pk.server.controller.active import TICK_MS
from pk.server.controller.batched_decision import BatchedDecision
from pk.server.controller.leader_rebalancer import DWELL_MS
from pk.server.metadata.image import PartitionState
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from pk.world import Stream, StreamKind, World
from tests.unit.server.controller import test_node
from tests.unit.server.controller.test_node import CALL_MS, HeartbeatingBroker, Scene

Place = tuple[int, int]


class Replica(HeartbeatingBroker):
    """A broker that sends heartbeats by itself and reports the end of its log when asked."""

    def __init__(
        self, scene: Scene, world: World, node_id: int, life: int = 1, at: Place = (0, 0)
    ) -> None:
        super().__init__(scene, world, f"i{node_id}.{life}", f"boot{node_id}.{life}")
        self.world, self.node_id, self.at = world, node_id, at
        self.offline: tuple[PartitionKey, ...] = ()
        self.unfit: tuple[wire.Unfit, ...] = ()
        self._task: asyncio.Task[None] | None = None

    async def register(self, **more: Any) -> wire.RegisterBrokerReply:
        request = wire.RegisterBrokerRequest(
            broker_id=self.node_id, cluster_id="cluster", incarnation_id=self.incarnation,
            address=f"broker{self.node_id}:1", boot_id=self.boot,
            directory_ids=[f"dir-{self.node_id}"],
        )  # fmt: skip
        frame = await self.caller.call(request, timeout_ms=CALL_MS)
        self.epoch = frame.head.register_broker_reply.broker_epoch
        return frame.head.register_broker_reply

    async def live(self) -> None:
        """Register and send heartbeats from now on; register again with the next controller."""
        asked: Any = ()
        while True:
            try:
                if self.epoch == NONE:
                    await self.register()
                await self.follow()
                request = wire.BrokerHeartbeatRequest(
                    broker_id=self.node_id, broker_epoch=self.epoch,
                    metadata_offset=self.image.offset,
                )  # fmt: skip
                for each in asked:
                    request.positions.add(
                        topic_id=each.topic_id, partition=each.partition,
                        last_epoch=self.at[0], log_end=self.at[1],
                    )  # fmt: skip
                request.unfit.extend(self.unfit)
                for key in self.offline:
                    request.offline_replicas.add(topic_id=key.topic_id, partition=key.partition)
                frame = await self.caller.call(request, timeout_ms=CALL_MS)
                asked = frame.head.broker_heartbeat_reply.report_positions
            except errors.RetriableError:
                self.epoch = NONE
            await self.world.clock.sleep_ms(200)

    async def beat(self, timeout_ms: int = CALL_MS, **more: Any) -> wire.BrokerHeartbeatReply:
        request = wire.BrokerHeartbeatRequest(
            broker_id=self.node_id, broker_epoch=self.epoch, metadata_offset=self.image.offset,
            **more,
        )  # fmt: skip
        frame = await self.caller.call(request, timeout_ms=timeout_ms)
        return frame.head.broker_heartbeat_reply

    def start(self) -> Replica:
        self._task = asyncio.get_running_loop().create_task(self.live())
        return self

    async def stop(self) -> None:
        """Lose power; to the controller it is at least as if it had."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.caller.close()

    def state(self, topic: str = "t") -> PartitionState:
        found = self.image.topic(topic)
        assert found is not None
        return found.partitions[0]

    async def until(self, holds: Callable[[PartitionState], bool], within_ms: int) -> None:
        end_ms = self.world.clock.monotonic_ms() + within_ms
        while not holds(self.state()):
            left = self.world.clock.monotonic_ms() < end_ms
            assert left, self.state()
            await self.world.clock.sleep_ms(50)


@pytest.fixture
def scene() -> Any:
    made = Scene()
    made.start()
    yield made
    assert not made.fatal
    made.world.close()


async def ask(scene: Scene, world: World, request: Any) -> Any:
    caller = scene.caller(world)
    frame = await caller.call(request, timeout_ms=30_000)
    await caller.close()
    return getattr(frame.head, frame.head.WhichOneof("body") or "error")


async def topic_on(scene: Scene, world: World, count: int, **configs: str) -> list[Replica]:
    """Return this many brokers, and topic t with a replica on each."""
    brokers = [Replica(scene, world, node_id).start() for node_id in range(1, count + 1)]
    await world.clock.sleep_ms(1_000)
    new = wire.NewTopic(name="t", partitions=1, replication_factor=count, configs=configs)
    reply = await ask(scene, world, wire.CreateTopicsRequest(topics=[new]))
    assert not reply.results[0].HasField("error"), reply
    await world.clock.sleep_ms(500)
    return brokers


async def power_cut(brokers: list[Replica], world: World) -> None:
    for broker in brokers:
        await broker.stop()
    await world.clock.sleep_ms(1_000)


async def alter(scene: Scene, world: World, **values: str) -> None:
    resource = wire.ConfigResource(type="topic", name="t")
    change = wire.ConfigChange(resource=resource, set=values)
    await ask(scene, world, wire.AlterConfigsRequest(changes=[change]))


def test_the_greatest_log_is_elected_after_a_power_cut(scene: Scene) -> None:
    """R3: the election needs no permission and takes place once the last replica has reported."""

    async def story(world: World) -> None:
        await power_cut(await topic_on(scene, world, 2, min_insync_replicas="2"), world)
        one = Replica(scene, world, 1, life=2, at=(0, 10)).start()
        await world.clock.sleep_ms(3_000)
        assert one.state().leader == NONE
        two = Replica(scene, world, 2, life=2, at=(0, 11)).start()
        await one.until(lambda state: state.leader != NONE, 2_000)
        assert (one.state().leader, one.state().isr, one.state().unclean) == (2, (2,), True)
        await two.stop()
        await one.stop()

    scene.run(story)


def test_a_new_term_asks_again_before_it_elects(scene: Scene) -> None:
    async def before(world: World) -> Replica:
        await power_cut(await topic_on(scene, world, 2, min_insync_replicas="2"), world)
        one = Replica(scene, world, 1, life=2, at=(0, 10)).start()
        await world.clock.sleep_ms(1_500)
        return one

    one = scene.run(before)
    scene.kill()
    scene.start()

    async def after(world: World) -> None:
        two = Replica(scene, world, 2, life=2, at=(0, 9)).start()
        await world.clock.sleep_ms(2_000)
        await one.until(lambda state: state.leader != NONE, 6_000)
        assert (one.state().leader, one.state().unclean) == (1, True)
        await two.stop()
        await one.stop()

    scene.run(after)


def test_who_is_missing_is_passed_over_when_loss_is_allowed_later(scene: Scene) -> None:
    """The setting changes long after the wait was over: the election takes place at once."""

    async def story(world: World) -> None:
        await power_cut(await topic_on(scene, world, 2, min_insync_replicas="2"), world)
        two = Replica(scene, world, 2, life=2).start()
        await world.clock.sleep_ms(1_000)
        await two.stop()  # it registered, so it may have lost data; then it never returns
        one = Replica(scene, world, 1, life=2, at=(0, 3)).start()
        await world.clock.sleep_ms(40_000)
        assert one.state().leader == NONE
        assert set(one.state().last_known) == {1, 2}
        await alter(scene, world, unclean_leader_election_enable="true")
        await one.until(lambda state: state.leader == 1, 1_000)
        await one.stop()

    scene.run(story)


def gone_before_the_reply(scene: Scene, kind: type) -> Callable[[], bool]:
    """Ask for a `kind` of election whose reply never arrives, though the record is committed;
    return whether it was.
    """
    assert scene.node is not None
    assert scene.node.active is not None
    host, committed = scene.node.active.host, asyncio.Event()
    ask = host.ask

    async def asked(command: Any) -> Any:
        reply = await ask(command)
        if isinstance(command, kind) and not committed.is_set():
            committed.set()
            await asyncio.Event().wait()
        return reply

    host.ask = asked  # type: ignore[method-assign]
    return committed.is_set


def test_elections_are_tried_though_who_allowed_them_is_gone(scene: Scene) -> None:
    """The client's stream breaks between the record and the reply."""

    async def story(world: World) -> None:
        await power_cut(await topic_on(scene, world, 2, min_insync_replicas="2"), world)
        two = Replica(scene, world, 2, life=2).start()
        await world.clock.sleep_ms(1_000)
        await two.stop()
        one = Replica(scene, world, 1, life=2, at=(0, 3)).start()
        await world.clock.sleep_ms(40_000)
        committed = gone_before_the_reply(scene, commands.AlterConfigs)
        resource = wire.ConfigResource(type="topic", name="t")
        change = wire.ConfigChange(
            resource=resource, set={"unclean_leader_election_enable": "true"}
        )
        caller = scene.caller(world)
        with pytest.raises(errors.RequestTimedOut):
            await caller.call(wire.AlterConfigsRequest(changes=[change]), timeout_ms=500)
        assert committed()
        assert one.state().leader == NONE
        await caller.close()
        await one.until(lambda state: state.leader == 1, 1_000)
        await one.stop()

    scene.run(story)


def test_elections_without_room_are_tried_though_the_broker_is_gone(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat that unfences the broker is decided, and its stream breaks before the reply."""

    async def serve(_kind: StreamKind, stream: Stream) -> None:
        await stream.recv()

    async def story(world: World) -> None:
        one, two = await topic_on(scene, world, 2)
        await two.stop()
        await world.clock.sleep_ms(1_000)
        await one.stop()
        await world.clock.sleep_ms(1_000)
        again = Replica(scene, world, 1)
        await again.register()
        await again.follow()
        monkeypatch.setattr(BatchedDecision, "full", True)  # no room
        committed = gone_before_the_reply(scene, commands.Heartbeat)
        with pytest.raises(errors.RequestTimedOut):
            await again.beat(timeout_ms=500)
        assert committed()
        await again.follow()
        assert not again.image.brokers[1].fenced
        assert again.state().leader == NONE
        assert scene.node is not None
        assert scene.node.active is not None
        term = scene.node.active
        assert term._elections_due_ms is None, "nothing is new"
        monkeypatch.undo()
        await world.network.listen("broker1:1", serve)  # it lives: it is not fenced
        await again.caller.close()
        again.caller = scene.caller(world)
        await again.follow()
        await world.clock.sleep_ms(200)
        await again.follow()
        assert again.state().leader == 1
        await again.caller.close()

    scene.run(story)


def test_who_is_heard_while_others_are_fenced_is_not(scene: Scene) -> None:
    """R7: both brokers were silent; fencing the first takes so long that the other sends a
    heartbeat.
    """

    async def story(world: World) -> None:
        brokers = await topic_on(scene, world, 2)
        for broker in brokers:
            assert broker._task is not None
            broker._task.cancel()  # its stream stays
        assert scene.node is not None
        assert scene.node.active is not None
        term, fenced = scene.node.active, []
        for broker in brokers:  # at one tick
            term.sessions._by_broker[broker.node_id].deadline_ms = world.clock.monotonic_ms()
        ask = term.host.ask

        async def asked(command: Any) -> Any:
            if isinstance(command, commands.Fence):
                fenced.append(command.broker_id)
                await brokers[1].beat()
            return await ask(command)

        term.host.ask = asked  # type: ignore[method-assign]
        await world.clock.sleep_ms(1_000)
        assert fenced == [1]
        term.host.ask = ask  # type: ignore[method-assign]
        for broker in brokers:
            await broker.caller.close()
        await world.clock.sleep_ms(1_000)

    scene.run(story)


def test_a_silent_broker_is_fenced_at_the_end_of_its_session(scene: Scene) -> None:
    """R7: a controller that ran all the time has received every heartbeat there was, and waits no
    longer.
    """

    async def story(world: World) -> None:
        (broker,) = await topic_on(scene, world, 1)
        await broker.beat()
        assert broker._task is not None
        broker._task.cancel()  # its stream stays
        node = scene.node
        assert node is not None
        assert node.active is not None
        (session,) = node.active.sessions._by_broker.values()
        ends_ms = session.deadline_ms
        while not node.machine.image.brokers[1].fenced:
            await world.clock.sleep_ms(5)
        assert 0 <= world.clock.monotonic_ms() - ends_ms <= TICK_MS
        await broker.caller.close()
        await world.clock.sleep_ms(1_000)

    scene.run(story)


@pytest.mark.parametrize("still_ms", [6_500, 9_000])
def test_a_controller_that_stood_still_fences_nobody_who_speaks(
    scene: Scene, still_ms: int
) -> None:
    """R7: when the controller continues, sessions have run out whose heartbeats it could not
    receive; no broker is fenced for that, the first of them included.
    """

    async def story(world: World) -> None:
        brokers = await topic_on(scene, world, 2)
        scene.world.pause("controller")
        await world.clock.sleep_ms(still_ms)
        scene.world.resume("controller")
        await world.clock.sleep_ms(2_000)
        for broker in brokers:
            await broker.stop()

    scene.run(story)
    assert "broker_fenced" not in scene.lines.getvalue()


def test_an_operators_unclean_election_waits_for_what_replicas_say(scene: Scene) -> None:
    async def story(world: World) -> None:
        brokers = await topic_on(scene, world, 3, min_insync_replicas="1")
        for broker in brokers:
            broker.at = (0, 10 * broker.node_id)
        (first, second, third) = brokers
        for member in (first, second):  # both leave the ISR; 3 leaves last, with every record
            await member.stop()
        await world.clock.sleep_ms(1_000)
        await third.stop()
        await world.clock.sleep_ms(1_000)
        back = [Replica(scene, world, n, at=(0, 10 * n)).start() for n in (1, 2)]
        await world.clock.sleep_ms(1_000)
        assert back[0].state().leader == NONE
        reply = await ask(scene, world, wire.ElectLeadersRequest(unclean=True))
        (result,) = reply.results
        assert (result.topic, result.error.code) == ("t", 0)
        await back[0].until(lambda state: state.leader == 2, 1_000)
        for broker in back:
            await broker.stop()

    scene.run(story)


@pytest.mark.parametrize("enabled", [True, False])
def test_leaders_move_back_by_themselves(monkeypatch: pytest.MonkeyPatch, enabled: bool) -> None:
    server = {
        **test_node.RUN.server,
        "leader_imbalance_check_interval_seconds": 20,
        "auto_leader_rebalance_enable": enabled,
    }
    run = dataclasses.replace(test_node.RUN, server=server)
    monkeypatch.setattr(test_node, "RUN", run)
    scene = Scene()
    scene.start()

    async def story(world: World) -> None:
        first, second = await topic_on(scene, world, 2)
        assert first.state().leader == 1
        await first.stop()
        await second.until(lambda state: state.leader == 2, 1_000)
        again = Replica(scene, world, 1).start()
        await world.clock.sleep_ms(1_000)
        state = second.state()
        item = wire.AlterPartitionItem(
            topic_id=second.image.topic_ids["t"], partition=0, leader_epoch=state.leader_epoch,
            partition_epoch=state.partition_epoch, new_isr=[2, 1],
            isr_broker_epochs=[second.epoch, again.epoch],
        )  # fmt: skip
        request = wire.AlterPartitionRequest(broker_id=2, broker_epoch=second.epoch, items=[item])
        reply = await ask(scene, world, request)
        assert not reply.results[0].HasField("error"), reply
        await world.clock.sleep_ms(2_000)
        assert second.state().leader == 2
        if enabled:
            await second.until(lambda state: state.leader == 1, 20_000)
        else:
            await world.clock.sleep_ms(30_000)
            assert second.state().leader == 2
        await second.stop()
        await again.stop()

    scene.run(story)
    assert not scene.fatal
    scene.world.close()


def test_a_partition_that_waits_for_a_damaged_replica_names_its_broker(scene: Scene) -> None:
    """R3: the broker is registered, and an operator would not guess that its replica is missing."""

    async def story(world: World) -> None:
        brokers = await topic_on(scene, world, 2, min_insync_replicas="2")
        place = PartitionKey(brokers[0].image.topic_ids["t"], 0)
        await power_cut(brokers, world)
        one = Replica(scene, world, 1, life=2, at=(0, 10)).start()
        two = Replica(scene, world, 2, life=2)
        two.offline = (place,)
        two.start()
        await world.clock.sleep_ms(40_000)
        assert one.state().leader == NONE
        assert set(one.state().last_known) == {1, 2}
        (said,) = [line for line in scene.lines.getvalue().splitlines() if " leaderless " in line]
        assert said.endswith(" waits_for=[2]"), said
        await two.stop()
        await one.stop()

    scene.run(story)


def test_an_offline_replica_gives_the_lead_to_another(scene: Scene) -> None:
    async def story(world: World) -> None:
        first, second = await topic_on(scene, world, 2)
        first.offline = (PartitionKey(first.image.topic_ids["t"], 0),)
        await second.until(lambda state: state.leader == 2 and state.isr == (2,), 1_000)
        await first.stop()
        await second.stop()

    scene.run(story)


def test_reassignments_and_unregistering_travel_the_wire(scene: Scene) -> None:
    async def story(world: World) -> None:
        first, second = await topic_on(scene, world, 2)
        third = Replica(scene, world, 3).start()
        await world.clock.sleep_ms(1_000)
        request = wire.AlterReassignmentsRequest()
        request.reassignments.add(
            topic="t", topic_id=first.image.topic_ids["t"], partition=0, replicas=[3, 1]
        )
        reply = await ask(scene, world, request)
        assert reply.results[0].error.code == 0
        listed = await ask(scene, world, wire.ListReassignmentsRequest())
        (moving,) = listed.reassignments
        assert (list(moving.replicas), list(moving.adding)) == ([3, 1, 2], [3])
        assert (list(moving.removing), moving.topic) == ([2], "t")
        await second.stop()
        await world.clock.sleep_ms(1_000)
        with pytest.raises(errors.InvalidRequest):
            await ask(scene, world, wire.UnregisterBrokerRequest(broker_id=2))
        await first.stop()
        await third.stop()

    scene.run(story)


def test_a_smaller_minimum_ends_a_reassignment_that_waited_for_more(scene: Scene) -> None:
    """No later event may ever cause another look at the partition."""

    async def story(world: World) -> None:
        first, second, third = await topic_on(scene, world, 3, min_insync_replicas="3")
        fourth = Replica(scene, world, 4).start()
        await second.stop()
        await world.clock.sleep_ms(1_000)
        topic_id = first.image.topic_ids["t"]
        request = wire.AlterReassignmentsRequest()
        request.reassignments.add(topic="t", topic_id=topic_id, partition=0, replicas=[1, 2, 4])
        reply = await ask(scene, world, request)
        assert reply.results[0].error.code == 0
        await first.until(lambda state: state.adding == (4,), 1_000)
        state = first.state()
        joins = wire.AlterPartitionRequest(broker_id=1, broker_epoch=first.epoch)
        joins.items.add(
            topic_id=topic_id, partition=0, leader_epoch=state.leader_epoch,
            partition_epoch=state.partition_epoch, new_isr=[1, 3, 4],
            isr_broker_epochs=[first.epoch, third.epoch, fourth.epoch],
        )  # fmt: skip
        await ask(scene, world, joins)
        await first.until(lambda state: set(state.isr) == {1, 3, 4}, 1_000)
        await world.clock.sleep_ms(2_000)
        assert first.state().removing == (3,)
        await alter(scene, world, min_insync_replicas="2")
        await first.until(lambda state: state.replicas == (1, 2, 4), 1_000)
        assert not first.state().removing
        for broker in (first, third, fourth):
            await broker.stop()

    scene.run(story)


def test_a_full_leader_hands_over_and_is_preferred_again(scene: Scene) -> None:
    """L16: it hands over at once, and gets the lead back a minute later at the earliest, although
    its disk has room before.
    """

    async def story(world: World) -> None:
        brokers = {each.node_id: each for each in await topic_on(scene, world, 3)}
        one = brokers[1]
        first = one.state().replicas[0]
        full = wire.Unfit(reason="storage_full", all=True, gives_up=True)
        brokers[first].unfit = (full,)
        await one.until(lambda state: state.leader != first, 700)
        taker = one.state().leader
        assert set(one.state().isr) == {1, 2, 3}
        brokers[first].unfit = ()
        await world.clock.sleep_ms(2_000)
        brokers[taker].unfit = (full,)  # it fills up in turn
        await world.clock.sleep_ms(DWELL_MS - 4_000)
        assert one.state().leader == taker, "one move a minute"
        await one.until(lambda state: state.leader == first, 8_000)
        for each in brokers.values():
            await each.stop()

    scene.run(story)


def test_a_preferred_leader_comes_back_soon_after_it_has_room(scene: Scene) -> None:
    """L16: it does not wait for the next check for imbalance, which is minutes away."""

    async def story(world: World) -> None:
        brokers = {each.node_id: each for each in await topic_on(scene, world, 3)}
        one = brokers[1]
        first = one.state().replicas[0]
        brokers[first].unfit = (wire.Unfit(reason="storage_full", all=True, gives_up=True),)
        await one.until(lambda state: state.leader != first, 700)
        await world.clock.sleep_ms(DWELL_MS + 20_000)
        assert one.state().leader != first
        brokers[first].unfit = (wire.Unfit(reason="storage_full", all=True),)
        await world.clock.sleep_ms(1_000)
        assert one.state().leader != first, "it has less than what a new leader must have"
        brokers[first].unfit = ()
        await one.until(lambda state: state.leader == first, 1_000)
        for each in brokers.values():
            await each.stop()

    scene.run(story)
