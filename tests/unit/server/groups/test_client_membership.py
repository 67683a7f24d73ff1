"""A consumer's membership (client/group_membership) at a simulated broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pk import errors, limits
from pk.client.assignors import ASSIGNORS
from pk.client.group_membership import GroupMembership
from pk.client.group_types import AssignmentChange, OffsetAndMetadata, OffsetsToCommit
from pk.client.network_client import NetworkClient
from pk.client.options import consumer_options, network_options
from pk.server.groups.coordinator import GroupCoordinators
from pk.types import TopicPartition
from pk.wire import pk_pb2 as wire

SETTINGS = {"group_initial_rebalance_delay_ms": 200, "group_min_session_timeout_ms": 500}
OPTIONS = {"group_id": "g", "session_timeout_ms": 3_000, "heartbeat_interval_ms": 300}
T = [TopicPartition("t", number) for number in range(4)]


class App:
    """An application that polls, as `Consumer` does, while `polls` is set."""

    def __init__(self, cluster: Any, *topics: str, **options: Any) -> None:
        self.world = cluster.client
        self.options = consumer_options({**OPTIONS, **options})
        self.cluster = NetworkClient(self.world, "broker:9292", **network_options(self.options))
        self.member = GroupMembership(self.world, self.cluster, self.options)
        self.owned: tuple[TopicPartition, ...] = ()
        self.changes: list[AssignmentChange] = []
        self.polls = True
        self.member.subscribe(list(topics or ["t"]), None)
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

    def captured(self, offsets: dict[TopicPartition, int]) -> OffsetsToCommit:
        """Offsets, as the consumer captures them."""
        member = self.member
        given = {place: OffsetAndMetadata(offset) for place, offset in offsets.items()}
        keys = {place: key for place, key in member.applied.items() if place in offsets}
        return OffsetsToCommit(given, keys, member.committer())

    async def commit(self, offsets: dict[TopicPartition, int]) -> None:
        await self.member.commits.commit(self.captured(offsets), 1_000)

    async def committed(self, *places: TopicPartition) -> list[int | None]:
        found = await self.member.commits.committed(places, 1_000)
        return [each and each.offset for each in found.values()]

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


@pytest.mark.parametrize("assignor", sorted(ASSIGNORS))
def test_members_share_a_topic_and_one_leaves(make_cluster: Any, assignor: str) -> None:
    async def story(cluster: Any) -> None:
        apps = [App(cluster, partition_assignment_strategy=assignor) for _ in range(2)]
        await apps[0].until(lambda: [len(each.owned) for each in apps] == [2, 2])
        assert sorted(apps[0].owned + apps[1].owned) == T
        await apps[0].close()
        await apps[1].until(lambda: sorted(apps[1].owned) == T, most_ms=2_000)
        await apps[1].close()

    run_story(make_cluster, story)


#: No heartbeat is due within a test; a third of the session is the longest wait for news.
SLOW = {"session_timeout_ms": 600_000, "heartbeat_interval_ms": 150_000}


@pytest.mark.parametrize("assignor", ["range", "cooperative-sticky"])
def test_members_learn_of_a_rebalance_at_once(make_cluster: Any, assignor: str) -> None:
    """Rule P5: their heartbeats wait at the coordinator for it."""

    async def story(cluster: Any) -> None:
        options = {**SLOW, "partition_assignment_strategy": assignor}
        apps = [App(cluster, **options)]
        await apps[0].until(lambda: len(apps[0].owned) == 4)
        for count in (2, 3, 4):
            apps.append(App(cluster, **options))
            await apps[0].until(
                lambda count=count: (
                    sorted(len(each.owned) for each in apps)
                    == {2: [2, 2], 3: [1, 1, 2], 4: [1] * 4}[count]
                ),
                most_ms=1_500,
            )
        await apps.pop().close()
        await apps[0].until(lambda: sum(len(each.owned) for each in apps) == 4, most_ms=1_500)
        for each in apps:
            await each.close()

    run_story(make_cluster, story)


def heartbeats_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The waits of the heartbeats that a coordinator gets from now on."""
    found: list[int] = []
    answer = GroupCoordinators.heartbeat

    async def counted(self: Any, request: wire.GroupHeartbeatRequest) -> wire.GroupHeartbeatReply:
        found.append(request.wait_ms)
        return await answer(self, request)

    monkeypatch.setattr(GroupCoordinators, "heartbeat", counted)
    return found


@pytest.mark.parametrize("older", [False, True])
def test_heartbeats_keep_their_period(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch, older: bool
) -> None:
    """Whether the answers wait or not, and while the application does not act on the news."""
    if older:
        monkeypatch.setattr("pk.server.groups.coordinator.HEARTBEAT_WAIT_PART", 2**31)

    async def story(cluster: Any) -> None:
        beats = heartbeats_of(monkeypatch)
        app = App(cluster)
        await app.until(lambda: len(app.owned) == 4)
        await app.world.clock.sleep_ms(1_000)
        del beats[:]
        await app.world.clock.sleep_ms(3_000)
        assert set(beats) == {300}
        assert 8 <= len(beats) <= 10
        app.polls = False
        other = App(cluster)
        await app.world.clock.sleep_ms(1_000)
        del beats[:]
        await app.world.clock.sleep_ms(3_000)
        assert other.owned == ()
        assert 8 <= len(beats) <= 10, "the new member's join waits, so it sends none"
        await app.close()
        await other.close()

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


def test_sticky_members_get_back_what_they_had(make_cluster: Any) -> None:
    """They give everything up before the join, and say what it was (KIP-54)."""

    async def story(cluster: Any) -> None:
        apps = [App(cluster, partition_assignment_strategy="sticky") for _ in range(2)]
        await apps[0].until(lambda: [len(each.owned) for each in apps] == [2, 2])
        before = [set(each.owned) for each in apps]
        await cluster.create("u", 1)
        apps[0].member.subscribe(["t", "u"], None)
        await apps[0].until(lambda: [len(each.owned) for each in apps] == [3, 2])
        assert [set(each.owned) & set(T) for each in apps] == before
        assert any(change.owned == () for change in apps[0].changes)
        for each in apps:
            await each.close()

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
        with pytest.raises(errors.UnknownMemberId, match="poll again"):
            await app.commit({T[0]: 1})
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
        await second.until(lambda: len(second.owned) == 4)
        await first.close()
        await second.close()

    run_story(make_cluster, story)


def test_commits_are_found_again(make_cluster: Any) -> None:
    async def story(cluster: Any) -> None:
        app = App(cluster)
        await app.until(lambda: len(app.owned) == 4)
        noted = app.captured({T[0]: 5})._replace(offsets={T[0]: OffsetAndMetadata(5, "note")})
        await app.member.commits.commit(noted, 1_000)
        found = await app.member.commits.committed(T[:2], 1_000)
        assert found == {T[0]: OffsetAndMetadata(5, "note"), T[1]: None}
        app.member.commits.commit_soon(app.captured({T[1]: 7}), 1_000)
        await app.close()
        again = App(cluster)
        await again.until(lambda: len(again.owned) == 4)
        assert again.changes[-1].assigned == {T[0]: 5, T[1]: 7, T[2]: None, T[3]: None}
        await again.close()

    run_story(make_cluster, story)


# -- commits of a member that was removed ----------------------------------------------------------


def test_a_removed_member_commits_nothing_although_the_group_is_empty(make_cluster: Any) -> None:
    """The next owner has committed 9 and has left: the late commit of 4 is not sent."""

    async def story(cluster: Any) -> None:
        app = App(cluster, max_poll_interval_ms=2_000)
        await app.until(lambda: len(app.owned) == 4)
        app.polls = False
        late = app.captured({T[0]: 4})
        await app.world.clock.sleep_ms(4_000)
        other = App(cluster)
        await other.until(lambda: len(other.owned) == 4)
        await other.commit({T[0]: 9})
        await other.close()
        app.member.commits.commit_soon(late, 1_000)
        with pytest.raises(errors.UnknownMemberId, match="poll again"):
            await app.member.commits.commit(late, 1_000)
        assert await app.committed(T[0]) == [9]
        app.poll()
        with pytest.raises(errors.RebalanceInProgress, match="no assignment"):
            app.member.committer()
        app.polls = True
        await app.until(lambda: len(app.owned) == 4)
        assert app.changes[-1].assigned[T[0]] == 9
        with pytest.raises(errors.UnknownMemberId):  # it has another member id by now
            await app.member.commits.commit(late, 1_000)
        await app.commit({T[0]: 10})
        await app.close()

    run_story(make_cluster, story)


def test_a_member_whose_commit_is_refused_joins_again(make_cluster: Any) -> None:
    """An operator removes the member; its commit learns it before the next heartbeat."""

    async def story(cluster: Any) -> None:
        app = App(cluster, session_timeout_ms=60_000, heartbeat_interval_ms=50_000)
        await app.until(lambda: len(app.owned) == 4)
        before = app.member.metadata()
        request = wire.LeaveGroupRequest(group_id="g")
        request.members.add(group_id="g", member_id=before.member_id)
        caller = cluster.caller()
        await caller.call(request, timeout_ms=10_000)
        with pytest.raises(errors.UnknownMemberId):
            await app.commit({T[0]: 1})
        await app.until(lambda: app.changes[-1].lost, most_ms=1_000)
        await app.until(lambda: len(app.owned) == 4, most_ms=5_000)
        assert app.member.metadata().member_id != before.member_id
        await caller.close()
        await app.close()

    run_story(make_cluster, story)


def test_a_commit_of_kept_partitions_names_the_newest_generation(make_cluster: Any) -> None:
    """Cooperative: positions of an earlier generation count for partitions that stay."""

    async def story(cluster: Any) -> None:
        options = {"partition_assignment_strategy": "cooperative-sticky"}
        first = App(cluster, **options)
        await first.until(lambda: len(first.owned) == 4)
        kept, moved = first.captured({T[0]: 3}), first.captured({T[3]: 3})
        second = App(cluster, **options)
        await first.until(lambda: len(first.owned) == len(second.owned) == 2)
        assert first.member.metadata().generation > kept.who.generation
        await first.member.commits.commit(kept, 1_000)
        with pytest.raises(errors.IllegalGeneration):
            await first.member.commits.commit(moved, 1_000)
        assert await first.committed(T[0], T[3]) == [3, None]
        generation = first.member.metadata().generation
        await first.world.clock.sleep_ms(2_000)
        assert first.member.metadata().generation == generation, "the refusal was not about it"
        await first.close()
        await second.close()

    run_story(make_cluster, story)


def test_later_commits_join_the_one_that_waits(make_cluster: Any) -> None:
    """client/group_commits J3: one waits, whatever the number of calls; the last offset wins."""

    async def story(cluster: Any) -> None:
        app = App(cluster)
        await app.until(lambda: len(app.owned) == 4)
        commits = app.member.commits
        for offset in range(1, 100):
            commits.commit_soon(app.captured({T[offset % 2]: offset}), 1_000)
        assert len(commits._tasks) == 1
        await asyncio.ensure_future(app.commit({T[0]: 1, T[2]: 1}))  # every call is a task
        assert await app.committed(*T[:3]) == [1, 99, 1]
        await app.close()

    run_story(make_cluster, story)


def test_many_partitions_are_committed_and_fetched_in_parts(
    make_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member may own more partitions than one request names."""
    monkeypatch.setattr(limits, "OFFSETS_PER_REQUEST_MAX", 3)

    async def story(cluster: Any) -> None:
        app = App(cluster)
        await app.until(lambda: len(app.owned) == 4)
        await app.commit({place: 5 + place.partition for place in T})
        assert await app.committed(*T) == [5, 6, 7, 8]
        await app.close()
        again = App(cluster)
        await again.until(lambda: len(again.owned) == 4)
        assert again.changes[-1].assigned == dict(zip(T, [5, 6, 7, 8], strict=True))
        await again.close()

    run_story(make_cluster, story)


# -- heartbeats ------------------------------------------------------------------------------------


def test_steady_changes_of_the_metadata_delay_no_heartbeat(make_cluster: Any) -> None:
    """client/group_membership M3: the leader's session goes on."""

    async def story(cluster: Any) -> None:
        app = App(cluster)
        await app.until(lambda: len(app.owned) == 4)
        member_id = app.member.metadata().member_id
        for _ in range(100):  # twice the session, a change in each third of the heartbeat interval
            await app.world.clock.sleep_ms(100)
            app.cluster.want_metadata()
            for told in app.cluster.on_change:
                told()
        assert app.member.metadata().member_id == member_id
        assert not any(change.lost for change in app.changes)
        await app.commit({T[0]: 1})
        await app.close()

    run_story(make_cluster, story)


def test_missing_topics_delay_the_assignment_once_and_no_heartbeat(make_cluster: Any) -> None:
    """The leader waits for all of them at once, a moment; the next assignment does not wait."""

    async def story(cluster: Any) -> None:
        app = App(cluster, "t", *(f"missing-{number}" for number in range(8)))
        await app.until(lambda: len(app.owned) == 4, most_ms=5_000)
        member_id = app.member.metadata().member_id
        other = App(cluster)
        await app.until(lambda: len(app.owned) == len(other.owned) == 2, most_ms=1_500)
        await cluster.create("missing-3", 1)
        await app.until(lambda: len(app.owned) + len(other.owned) == 5, most_ms=5_000)
        assert app.member.metadata().member_id == member_id
        await app.close()
        await other.close()

    run_story(make_cluster, story)


def test_a_coordinator_that_is_away_for_longer_than_the_session_begins_no_rebalance(
    make_cluster: Any,
) -> None:
    cluster = make_cluster(**SETTINGS)
    cluster.start()
    apps: list[App] = []
    clock = cluster.client.clock

    async def before() -> None:
        await cluster.create("t", 4)
        apps.extend(App(cluster) for _ in range(2))
        await apps[0].until(lambda: [len(each.owned) for each in apps] == [2, 2])

    cluster.do(before())
    who = [each.member.metadata() for each in apps]
    cluster.kill("broker", "d1")
    cluster.do(clock.sleep_ms(10_000))
    cluster.start_broker()

    async def after() -> None:
        await clock.sleep_ms(10_000)
        assert [each.member.metadata() for each in apps] == who
        await apps[0].commit({apps[0].owned[0]: 1})
        for each in apps:
            await each.close()

    cluster.do(after())


# -- topics ----------------------------------------------------------------------------------------


def test_a_topic_that_was_created_again_begins_a_rebalance(make_cluster: Any) -> None:
    """Rule L8.  No metadata without the topic arrive, and it has as many partitions as before."""

    async def story(cluster: Any) -> None:
        app = App(cluster)
        await app.until(lambda: len(app.owned) == 4)
        before = app.member.applied[T[0]]
        await app.commit({T[0]: 5})
        network: Any = app.cluster
        update, network.apply = network.apply, lambda reply, names, whole: None
        caller = cluster.caller()
        await caller.call(wire.DeleteTopicsRequest(names=["t"]), timeout_ms=10_000)
        topic_id = await cluster.create("t", 4)
        network.apply = update
        app.cluster.want_metadata()
        await app.until(lambda: app.member.applied.get(T[0], before).topic_id == topic_id)
        assert before.topic_id != topic_id
        assert app.changes[-1].assigned[T[0]] is None, "the old offset is not of this topic"
        await app.commit({T[0]: 1})
        assert await app.committed(T[0]) == [1]
        await caller.close()
        await app.close()

    run_story(make_cluster, story)


def test_a_static_leader_that_starts_again_notices_that_a_topic_has_grown(
    make_cluster: Any,
) -> None:
    """The topic of another member grew while the leader was away."""

    async def story(cluster: Any) -> None:
        await cluster.create("u", 1)
        leader = App(cluster, group_instance_id="1")
        await leader.until(lambda: len(leader.owned) == 4)
        other = App(cluster, "u", group_instance_id="2")
        await leader.until(lambda: len(other.owned) == 1 and len(leader.owned) == 4)
        await leader.close()
        caller = cluster.caller()
        request = wire.CreatePartitionsRequest()
        request.topics.add(name="u", total_count=3)
        await caller.call(request, timeout_ms=10_000)
        again = App(cluster, group_instance_id="1")
        await again.until(lambda: len(other.owned) == 3 and len(again.owned) == 4)
        request.topics[0].total_count = 5
        await caller.call(request, timeout_ms=10_000)
        await again.until(lambda: len(other.owned) == 5 and len(again.owned) == 4)
        await caller.close()
        await again.close()
        await other.close()

    run_story(make_cluster, story)


def test_a_static_leader_that_starts_again_begins_no_rebalance(make_cluster: Any) -> None:
    async def story(cluster: Any) -> None:
        leader = App(cluster, group_instance_id="1")
        await leader.until(lambda: len(leader.owned) == 4)
        generation = leader.member.metadata().generation
        await leader.close()
        again = App(cluster, group_instance_id="1")
        await again.until(lambda: len(again.owned) == 4)
        await again.world.clock.sleep_ms(5_000)
        assert again.member.metadata().generation == generation
        await again.close()

    run_story(make_cluster, story)
