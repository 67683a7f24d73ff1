"""Consumer groups over a broker: requests that wait, sessions, restarts (groups/coordinator)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from pk import errors
from pk.group_ids import TOPIC, partition_of_group
from pk.server.groups import coordinator
from pk.server.handlers.coordinators import GROUP
from pk.types import NONE
from pk.wire import pk_pb2 as wire

ID = "app"
SETTINGS = {"group_initial_rebalance_delay_ms": 200, "group_min_session_timeout_ms": 500}


def asked(member: str, generation: int = NONE, instance: str = "") -> wire.GroupMember:
    return wire.GroupMember(
        group_id=ID, member_id=member, generation=generation, group_instance_id=instance
    )


class Client:
    """The requests of consumers to the broker."""

    def __init__(self, cluster: Any, session_ms: int = 3_000) -> None:
        self.caller = cluster.caller()
        self.session_ms = session_ms

    async def call(self, request: Any) -> Any:
        """Return the reply, however often the coordinator has to be asked."""
        while True:
            try:
                frame = await self.caller.call(request, timeout_ms=20_000)
                return getattr(frame.head, frame.head.WhichOneof("body"))
            except (errors.CoordinatorLoading, errors.NotCoordinator):
                await self.caller.call(
                    wire.FindCoordinatorRequest(key=ID, key_type=GROUP), timeout_ms=20_000
                )

    async def join(
        self, member: str, generation: int = NONE, *, instance: str = "", topic: str = "t"
    ) -> wire.JoinGroupReply:
        """Join, and ask again while the reply is pending."""
        request = wire.JoinGroupRequest(
            member=asked(member, generation, instance), session_timeout_ms=self.session_ms,
            rebalance_timeout_ms=4_000, assignors=["range"],
            subscription=wire.GroupSubscription(topics=[topic]),
        )  # fmt: skip
        reply: wire.JoinGroupReply = await self.call(request)
        while reply.pending:
            reply = await self.call(request)
        return reply

    async def sync(
        self, member: str, generation: int, topic_id: str = "", **given: Iterable[int]
    ) -> list[int]:
        request = wire.SyncGroupRequest(member=asked(member, generation))
        for name, partitions in given.items():
            item = request.assignment.members.add(member_id=name)
            item.partitions.add(topic_id=topic_id, partitions=partitions)
        reply = await self.call(request)
        while reply.pending:
            reply = await self.call(request)
        return [each for topic in reply.partitions for each in topic.partitions]

    async def heartbeat(self, member: str, generation: int, wait_ms: int = 0) -> None:
        request = wire.GroupHeartbeatRequest(member=asked(member, generation), wait_ms=wait_ms)
        await self.call(request)

    def waits(self, member: str, generation: int, wait_ms: int = 900) -> asyncio.Task[None]:
        """A heartbeat that waits for news."""
        return asyncio.ensure_future(self.heartbeat(member, generation, wait_ms))

    async def commit(self, topic_id: str, offset: int, member: str, generation: int) -> None:
        request = wire.OffsetCommitRequest(member=asked(member, generation))
        request.topics.add(topic_id=topic_id, partitions=[0], offsets=[offset])
        reply = await self.call(request)
        assert not reply.refused

    async def offsets(self) -> list[int]:
        request = wire.OffsetFetchRequest()
        request.groups.add(group_id=ID)
        (found,) = (await self.call(request)).groups
        assert not found.HasField("error"), found.error
        return [each for topic in found.topics for each in topic.offsets]

    async def pair(self, topic_id: str) -> int:
        """A stable group of a and b; returns the generation."""
        first, second = await asyncio.gather(self.join("a"), self.join("b"))
        assert first.generation == second.generation
        assert sorted(each.member_id for each in first.members) == ["a", "b"]
        owned = await asyncio.gather(
            self.sync("b", first.generation),
            self.sync("a", first.generation, topic_id, a=[0], b=[1]),
        )
        assert owned == [[1], [0]]
        return first.generation


def test_two_members_join_and_share_a_topic(make_cluster: Any) -> None:
    cluster = make_cluster(**SETTINGS)
    cluster.start()

    async def story() -> None:
        topic_id = await cluster.create("t", 2)
        client = Client(cluster)
        generation = await client.pair(topic_id)
        await client.heartbeat("a", generation)
        await client.commit(topic_id, 5, "a", generation)
        assert await client.offsets() == [5]
        (found,) = (await client.call(wire.DescribeGroupsRequest(group_ids=[ID]))).groups
        assert (found.state, found.coordinator_id, len(found.members)) == ("Stable", 1, 2)
        assert all(0 <= each.heard_ago_ms < 3_000 for each in found.members)
        (listed,) = (await client.call(wire.ListGroupsRequest())).groups
        assert (listed.group_id, listed.members) == (ID, 2)
        await client.caller.close()

    cluster.do(story())


def test_a_silent_member_is_removed_after_its_session(make_cluster: Any) -> None:
    """The other one learns it from a heartbeat, joins again, and has all partitions."""
    cluster = make_cluster(**SETTINGS)
    cluster.start()
    clock = cluster.client.clock

    async def story() -> None:
        topic_id = await cluster.create("t", 2)
        client = Client(cluster)
        generation = await client.pair(topic_id)

        async def alive() -> None:
            while True:
                await client.heartbeat("a", generation)
                await clock.sleep_ms(500)

        began_ms = clock.monotonic_ms()
        with pytest.raises(errors.RebalanceInProgress):
            await alive()
        assert 2_500 < clock.monotonic_ms() - began_ms < 4_500
        reply = await client.join("a", generation)
        assert [each.member_id for each in reply.members] == ["a"]
        assert await client.sync("a", reply.generation, topic_id, a=[0, 1]) == [0, 1]
        with pytest.raises(errors.UnknownMemberId):
            await client.heartbeat("b", generation)
        with pytest.raises(errors.UnknownMemberId):
            await client.commit(topic_id, 9, "b", generation)
        await client.caller.close()

    cluster.do(story())


def test_a_heartbeat_waits_for_news_and_no_longer_than_a_part_of_the_session(
    make_cluster: Any,
) -> None:
    """Rule P5, and server/groups/coordinator N10: the wait renews no session."""
    cluster = make_cluster(**SETTINGS)
    cluster.start()
    clock = cluster.client.clock

    async def story() -> None:
        topic_id = await cluster.create("t", 2)
        client = Client(cluster)
        generation = await client.pair(topic_id)
        for wait_ms, least_ms, most_ms in ((0, 0, 20), (400, 400, 450), (9_000, 1_000, 1_050)):
            began_ms = clock.monotonic_ms()
            await client.heartbeat("a", generation, wait_ms)
            assert least_ms <= clock.monotonic_ms() - began_ms <= most_ms
        with pytest.raises(errors.InvalidRequest):
            await client.heartbeat("a", generation, -1)
        waiting = client.waits("a", generation)
        await clock.sleep_ms(600)
        (found,) = (await client.call(wire.DescribeGroupsRequest(group_ids=[ID]))).groups
        assert found.members[0].heard_ago_ms >= 550
        began_ms = clock.monotonic_ms()
        joining = asyncio.ensure_future(client.join("c"))
        with pytest.raises(errors.RebalanceInProgress):
            await waiting
        assert clock.monotonic_ms() - began_ms < 50
        with pytest.raises(errors.RebalanceInProgress):  # known already: it does not wait
            await client.heartbeat("b", generation, 900)
        assert clock.monotonic_ms() - began_ms < 50
        joining.cancel()
        await client.caller.close()

    cluster.do(story())


def test_a_second_heartbeat_takes_the_place_of_the_one_that_waits(make_cluster: Any) -> None:
    """server/groups/waiting_heartbeats W1."""
    cluster = make_cluster(**SETTINGS)
    cluster.start()

    async def story() -> None:
        topic_id = await cluster.create("t", 2)
        client = Client(cluster)
        generation = await client.pair(topic_id)
        first = client.waits("a", generation)
        await cluster.client.clock.sleep_ms(20)
        second = client.waits("a", generation)
        await cluster.client.clock.sleep_ms(20)
        assert first.done()
        assert not second.done()
        (hosted,) = (each for each in cluster.broker.core.groups._hosted.values() if each.groups)
        assert len(hosted.heartbeats) == 1
        await client.caller.close()
        with pytest.raises(errors.BrokerUnavailable):
            await second
        await cluster.client.clock.sleep_ms(20)
        assert len(hosted.heartbeats) == 0, "the stream was lost, and the wait ended"

    cluster.do(story())


def test_a_removed_or_replaced_member_learns_it_while_its_heartbeat_waits(
    make_cluster: Any,
) -> None:
    cluster = make_cluster(**SETTINGS)
    cluster.start()

    async def story() -> None:
        await cluster.create("t", 2)
        client, other = Client(cluster), Client(cluster)
        generation = (await client.join("old", instance="1")).generation
        sync = wire.SyncGroupRequest(member=asked("old", generation, "1"))
        sync.assignment.members.add(member_id="old")
        await client.call(sync)
        request = wire.GroupHeartbeatRequest(member=asked("old", generation, "1"), wait_ms=900)
        waiting = asyncio.ensure_future(client.call(request))
        await cluster.client.clock.sleep_ms(20)
        await other.join("new", instance="1")
        with pytest.raises(errors.FencedInstanceId):
            await waiting
        request.member.CopyFrom(asked("new", generation, "1"))
        waiting = asyncio.ensure_future(client.call(request))
        await cluster.client.clock.sleep_ms(20)
        await other.call(wire.LeaveGroupRequest(group_id=ID, members=[request.member]))
        with pytest.raises(errors.UnknownMemberId):
            await waiting
        await other.call(wire.DeleteGroupsRequest(group_ids=[ID]))
        with pytest.raises(errors.UnknownMemberId):
            await client.call(request)
        await client.caller.close()
        await other.caller.close()

    cluster.do(story())


def test_heartbeats_that_wait_end_with_the_leadership_and_the_contact(make_cluster: Any) -> None:
    cluster = make_cluster(**SETTINGS)
    cluster.start()

    async def story() -> None:
        topic_id = await cluster.create("t", 2)
        client = Client(cluster)
        generation = await client.pair(topic_id)
        groups = cluster.broker.core.groups
        waiting = client.waits("a", generation)
        await cluster.client.clock.sleep_ms(20)
        contact = groups._contact
        groups._contact = type("Away", (), {"in_contact": lambda self: False})()
        with pytest.raises(errors.CoordinatorUnavailable):
            await waiting
        groups._contact = contact
        request = wire.GroupHeartbeatRequest(member=asked("a", generation), wait_ms=900)
        again = asyncio.ensure_future(client.caller.call(request, timeout_ms=20_000))
        await cluster.client.clock.sleep_ms(20)
        number = partition_of_group(ID)
        core = cluster.broker.core
        key = next(
            each.key for each in core.partitions.values()
            if each.topic == TOPIC and each.key.partition == number
        )  # fmt: skip
        began_ms = cluster.client.clock.monotonic_ms()
        core.partitions[key].step_down(NONE)
        with pytest.raises(errors.NotCoordinator):
            await again
        assert cluster.client.clock.monotonic_ms() - began_ms < 50
        await client.caller.close()

    cluster.do(story())


def test_a_member_that_waits_in_a_join_keeps_its_session(make_cluster: Any) -> None:
    """The other one does not join, so the rebalance timeout removes it."""
    cluster = make_cluster(**SETTINGS)
    cluster.start()

    async def story() -> None:
        topic_id = await cluster.create("t", 2)
        client = Client(cluster, session_ms=1_000)
        generation = await client.pair(topic_id)

        async def alive() -> None:
            while True:
                try:
                    await client.heartbeat("b", generation)
                except errors.RebalanceInProgress:
                    pass
                await cluster.client.clock.sleep_ms(300)

        beating = asyncio.ensure_future(alive())
        reply = await client.join("a", generation)
        assert [each.member_id for each in reply.members] == ["a"]
        assert reply.generation == generation + 1
        with pytest.raises(errors.UnknownMemberId):
            await beating
        await client.caller.close()

    cluster.do(story())


def test_nothing_rebalances_because_the_coordinator_restarts(make_cluster: Any) -> None:
    """Members go on with their generation; offsets and sessions are there."""
    cluster = make_cluster(**SETTINGS)
    cluster.start()

    async def before() -> tuple[str, int]:
        topic_id = await cluster.create("t", 2)
        client = Client(cluster)
        generation = await client.pair(topic_id)
        await client.commit(topic_id, 5, "a", generation)
        await client.caller.close()
        return topic_id, generation

    topic_id, generation = cluster.do(before())
    cluster.kill("broker", "d1")
    cluster.start_broker()

    async def after() -> None:
        client = Client(cluster)
        assert await client.offsets() == [5]
        for _ in range(10):
            await client.heartbeat("a", generation)
            await client.heartbeat("b", generation)
            await cluster.client.clock.sleep_ms(500)
        await client.commit(topic_id, 6, "a", generation)
        assert await client.sync("b", generation) == [1]
        await client.caller.close()

    cluster.do(after())


def test_a_request_that_waits_is_answered_when_the_leadership_ends(make_cluster: Any) -> None:
    cluster = make_cluster(**SETTINGS)
    cluster.start()

    async def story() -> None:
        topic_id = await cluster.create("t", 2)
        client = Client(cluster)
        generation = await client.pair(topic_id)
        request = wire.JoinGroupRequest(
            member=asked("a", generation), session_timeout_ms=3_000, rebalance_timeout_ms=4_000,
            assignors=["range"], subscription=wire.GroupSubscription(topics=["t"]),
        )  # fmt: skip
        waiting = asyncio.ensure_future(client.caller.call(request, timeout_ms=20_000))
        await cluster.client.clock.sleep_ms(50)
        assert not waiting.done()
        number = partition_of_group(ID)
        core = cluster.broker.core
        key = next(
            each.key for each in core.partitions.values()
            if each.topic == TOPIC and each.key.partition == number
        )  # fmt: skip
        core.partitions[key].step_down(NONE)
        with pytest.raises(errors.NotCoordinator):
            await waiting
        await client.caller.close()

    cluster.do(story())


def test_no_reply_leaves_a_broker_without_contact_to_the_controller(make_cluster: Any) -> None:
    cluster = make_cluster(**SETTINGS)
    cluster.start()

    async def story() -> None:
        topic_id = await cluster.create("t", 2)
        client = Client(cluster)
        generation = await client.pair(topic_id)
        contact = cluster.broker.core.groups._contact
        cluster.broker.core.groups._contact = type("Away", (), {"in_contact": lambda self: False})()
        for ask in (
            client.heartbeat("a", generation),
            client.commit(topic_id, 1, "a", generation),
            client.join("c"),
        ):
            with pytest.raises(errors.CoordinatorUnavailable):
                await ask
        cluster.broker.core.groups._contact = contact
        await client.caller.close()

    cluster.do(story())


def test_no_session_ends_because_heartbeats_were_refused(make_cluster: Any) -> None:
    """server/groups/coordinator N8: the broker had no contact for longer than the session."""
    cluster = make_cluster(**SETTINGS)
    cluster.start()

    async def story() -> None:
        topic_id = await cluster.create("t", 2)
        client = Client(cluster)
        generation = await client.pair(topic_id)
        groups = cluster.broker.core.groups
        contact, clock = groups._contact, cluster.client.clock
        groups._contact = type("Away", (), {"in_contact": lambda self: False})()
        await clock.sleep_ms(10_000)
        with pytest.raises(errors.CoordinatorUnavailable):
            await client.heartbeat("a", generation)
        groups._contact = contact
        await clock.sleep_ms(2_000)
        for member in ("a", "b"):
            await client.heartbeat(member, generation)
        await clock.sleep_ms(5_000)
        with pytest.raises(errors.UnknownMemberId):
            await client.heartbeat("a", generation)
        await client.caller.close()

    cluster.do(story())


def test_requests_that_wait_are_asked_again_at_a_change_of_the_phase_only(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """server/groups/coordinator N9: a join storm costs three decisions a member, not one for
    each pair of members.
    """
    cluster = make_cluster(**SETTINGS)
    cluster.start()
    asked_ids: list[str] = []
    ask = coordinator.GroupCoordinators._ask

    async def counted(self: Any, hosted: Any, command: Any) -> Any:
        if isinstance(command, coordinator.commands.JoinGroup):
            asked_ids.append(command.request.member.member_id)
        return await ask(self, hosted, command)

    async def story() -> None:
        await cluster.create("t", 2)
        client = Client(cluster)
        monkeypatch.setattr(coordinator.GroupCoordinators, "_ask", counted)
        names = [f"m{number:02}" for number in range(20)]
        replies = await asyncio.gather(*[client.join(name) for name in names])
        assert {reply.generation for reply in replies} == {1}
        assert len(asked_ids) <= 3 * len(names)
        await client.caller.close()

    cluster.do(story())


def test_offsets_of_a_deleted_topic_are_removed(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "EXPIRE_MS", 1_000)
    cluster = make_cluster(**SETTINGS)
    cluster.start()

    async def story() -> None:
        gone, kept = sorted([await cluster.create("t", 2), await cluster.create("u")])
        client = Client(cluster)
        await client.commit(gone, 5, "", NONE)
        await client.commit(kept, 6, "", NONE)
        await client.call(wire.DeleteTopicsRequest(topic_ids=[gone]))
        await cluster.client.clock.sleep_ms(900)
        assert await client.offsets() == [5, 6], "one look is not enough"
        await cluster.client.clock.sleep_ms(3_000)
        assert await client.offsets() == [6]
        reply = await client.call(wire.DeleteGroupsRequest(group_ids=[ID, "other"]))
        assert not reply.groups[0].HasField("error")
        assert reply.groups[1].error.code == errors.GroupIdNotFound.code
        await client.caller.close()

    cluster.do(story())


def test_a_commit_that_waits_for_the_transaction_coordinator_is_pending(
    make_cluster: Any,
) -> None:
    """server/groups/coordinator N7: and the group is checked after the wait (rule X2)."""
    cluster = make_cluster(**SETTINGS)
    cluster.start()

    async def story() -> None:
        topic_id = await cluster.create("t", 2)
        client = Client(cluster)
        generation = await client.pair(topic_id)
        core = cluster.broker.core
        request = wire.TxnOffsetCommitRequest(
            member=asked("a", generation), producer_id=7, base_sequence=0
        )
        request.topics.add(topic_id=topic_id, partitions=[0], offsets=[5])
        answered = asyncio.Event()

        async def register(key: Any) -> None:
            await answered.wait()

        parked = asyncio.get_running_loop().create_task(
            core.groups.commit_in_transaction(request, core.publisher, register)
        )
        await cluster.client.clock.sleep_ms(50)

        async def stable_code(partition: int) -> int:
            fetch = wire.OffsetFetchRequest(require_stable=True)
            fetch.groups.add(group_id=ID).topics.add(topic_id=topic_id, partitions=[partition])
            code: int = (await client.call(fetch)).groups[0].error.code
            return code

        assert await stable_code(0) == errors.UnstableOffsetCommit.code
        assert await stable_code(1) == 0
        await client.call(wire.LeaveGroupRequest(group_id=ID, members=[asked("a", generation)]))
        answered.set()
        with pytest.raises(errors.UnknownMemberId):
            await parked
        assert await stable_code(0) == 0
        await client.caller.close()

    cluster.do(story())
