"""A consumer's membership (client/group_membership) at a simulated broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pk import errors
from pk.client.group_membership import AssignmentChange, GroupMembership, OffsetAndMetadata
from pk.client.network_client import NetworkClient
from pk.client.options import consumer_options, network_options
from pk.types import TopicPartition
from pk.wire import pk_pb2 as wire

SETTINGS = {"group_initial_rebalance_delay_ms": 200, "group_min_session_timeout_ms": 500}
OPTIONS = {"group_id": "g", "session_timeout_ms": 3_000, "heartbeat_interval_ms": 300}
T = [TopicPartition("t", number) for number in range(4)]


class App:
    """An application that polls, as `Consumer` does, while `polls` is set."""

    def __init__(self, cluster: Any, **options: Any) -> None:
        self.world = cluster.client
        self.options = consumer_options({**OPTIONS, **options})
        self.cluster = NetworkClient(self.world, "broker:9292", **network_options(self.options))
        self.member = GroupMembership(self.world, self.cluster, self.options)
        self.owned: tuple[TopicPartition, ...] = ()
        self.changes: list[AssignmentChange] = []
        self.polls = True
        self.member.subscribe(["t"], None)
        self._polling = asyncio.ensure_future(self._poll())

    async def _poll(self) -> None:
        while True:
            await self.world.clock.sleep_ms(50)
            if self.polls:
                self.poll()

    def poll(self) -> None:
        self.member.polled()
        change = self.member.change
        if change is not None:
            self.changes.append(change)
            self.owned = change.owned
            self.member.has_applied(change)

    async def until(self, holds: Callable[[], Any], most_ms: int = 20_000) -> None:
        """Wait in virtual time."""
        for _ in range(most_ms // 20):
            if holds():
                return
            await self.world.clock.sleep_ms(20)
        raise AssertionError("it never came true")

    async def close(self, *, leave: bool = True) -> None:
        self._polling.cancel()
        await self.member.close(leave=leave)
        await self.cluster.close()


def run_story(make_cluster: Any, story: Callable[[Any], Any]) -> None:
    """Run a story at a broker with topic t of four partitions."""
    cluster = make_cluster(**SETTINGS)
    cluster.start()

    async def whole() -> None:
        await cluster.create("t", 4)
        await story(cluster)

    cluster.do(whole())


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_members_share_a_topic_and_one_leaves(make_cluster: Any, assignor: str) -> None:
    async def story(cluster: Any) -> None:
        apps = [App(cluster, partition_assignment_strategy=assignor) for _ in range(2)]
        await apps[0].until(lambda: [len(each.owned) for each in apps] == [2, 2])
        assert sorted(apps[0].owned + apps[1].owned) == T
        await apps[0].close()
        await apps[1].until(lambda: sorted(apps[1].owned) == T, most_ms=2_000)
        await apps[1].close()

    run_story(make_cluster, story)


def test_a_cooperative_member_gives_up_only_what_moves(make_cluster: Any) -> None:
    async def story(cluster: Any) -> None:
        options = {"partition_assignment_strategy": "cooperative-sticky"}
        first = App(cluster, **options)
        await first.until(lambda: len(first.owned) == 4)
        second = App(cluster, **options)
        await first.until(lambda: len(first.owned) == len(second.owned) == 2)
        assert all(set(T[:2]) <= set(change.owned) for change in first.changes)
        assert [change.lost for change in first.changes] == [False] * len(first.changes)
        await first.close()
        await second.close()

    run_story(make_cluster, story)


def test_an_application_that_does_not_poll_loses_its_partitions(make_cluster: Any) -> None:
    async def story(cluster: Any) -> None:
        app = App(cluster, max_poll_interval_ms=2_000)
        await app.until(lambda: len(app.owned) == 4)
        generation = app.member.metadata().generation
        app.polls = False
        await app.world.clock.sleep_ms(1_500)
        assert app.member.metadata().generation == generation, "heartbeats keep it"
        await app.world.clock.sleep_ms(2_000)
        other = App(cluster)
        await other.until(lambda: len(other.owned) == 4)
        with pytest.raises(errors.NonEmptyGroup):  # it has no member id any more
            await app.member.commit({T[0]: OffsetAndMetadata(1)}, 1_000)
        app.poll()
        assert app.changes[-1].lost
        assert app.owned == ()
        app.polls = True
        await app.until(lambda: len(app.owned) == len(other.owned) == 2)
        await app.close()
        await other.close()

    run_story(make_cluster, story)


def test_a_change_that_waits_keeps_the_member_and_delays_the_rebalance(make_cluster: Any) -> None:
    """client/group_membership M1: the second member waits for the first one."""

    async def story(cluster: Any) -> None:
        first = App(cluster)
        await first.until(lambda: len(first.owned) == 4)
        first.polls = False
        second = App(cluster)
        await first.world.clock.sleep_ms(6_000)
        assert len(first.owned) == 4
        assert second.owned == ()
        first.polls = True
        await first.until(lambda: len(first.owned) == len(second.owned) == 2, most_ms=2_000)
        await first.close()
        await second.close()

    run_story(make_cluster, story)


def test_a_topic_that_grows_is_shared_again(make_cluster: Any) -> None:
    async def story(cluster: Any) -> None:
        app = App(cluster)
        await app.until(lambda: len(app.owned) == 4)
        caller = cluster.caller()
        request = wire.CreatePartitionsRequest()
        request.topics.add(name="t", total_count=6)
        await caller.call(request, timeout_ms=10_000)
        await app.until(lambda: len(app.owned) == 6)
        await caller.close()
        await app.close()

    run_story(make_cluster, story)


def test_a_static_member_restarts_without_a_rebalance(make_cluster: Any) -> None:
    async def story(cluster: Any) -> None:
        first, second = App(cluster, group_instance_id="1"), App(cluster, group_instance_id="2")
        await first.until(lambda: len(first.owned) == len(second.owned) == 2)
        owned, generation = first.owned, first.member.metadata().generation
        await first.close()
        again = App(cluster, group_instance_id="1")
        await again.until(lambda: again.owned == owned)
        assert again.member.metadata().generation == generation
        await again.world.clock.sleep_ms(5_000)
        assert second.member.metadata().generation == generation
        await again.close()
        await second.close()

    run_story(make_cluster, story)


def test_two_processes_with_one_instance_id_do_not_both_go_on(make_cluster: Any) -> None:
    async def story(cluster: Any) -> None:
        first = App(cluster, group_instance_id="1")
        await first.until(lambda: len(first.owned) == 4)
        second = App(cluster, group_instance_id="1")
        await first.until(lambda: isinstance(first.member.problem, errors.FencedInstanceId))
        assert len(second.owned) == 4
        await first.close()
        await second.close()

    run_story(make_cluster, story)


def test_commits_are_found_again(make_cluster: Any) -> None:
    async def story(cluster: Any) -> None:
        app = App(cluster)
        await app.until(lambda: len(app.owned) == 4)
        await app.member.commit({T[0]: OffsetAndMetadata(5, "note")}, 1_000)
        found = await app.member.committed(T[:2], 1_000)
        assert found == {T[0]: OffsetAndMetadata(5, "note"), T[1]: None}
        app.member.commit_soon({T[1]: OffsetAndMetadata(7)})
        await app.close()
        again = App(cluster)
        await again.until(lambda: len(again.owned) == 4)
        assert again.changes[-1].assigned == {T[0]: 5, T[1]: 7, T[2]: None, T[3]: None}
        await again.close()

    run_story(make_cluster, story)
