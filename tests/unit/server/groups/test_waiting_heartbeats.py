"""Heartbeats that wait for news of their groups (groups/waiting_heartbeats, rule P5)."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pk import errors
from pk.server.groups import waiting_heartbeats
from pk.server.groups.groups import ConsumerGroup
from pk.server.groups.state import GroupMetadata, GroupState, Member
from pk.server.groups.waiting_heartbeats import WaitingHeartbeats, check
from pk.wire import pk_pb2 as wire

COUNT = 200


def group(state: GroupState = GroupState.STABLE, members: int = COUNT) -> ConsumerGroup:
    found = ConsumerGroup("g")
    found.metadata = GroupMetadata("g", state, 1)
    for number in range(members):
        name = f"m{number}"
        found.members[name] = Member(
            name, "", "", 3_000, 3_000, ("range",), wire.GroupSubscription()
        )
    return found


def asked(number: int) -> wire.GroupMember:
    return wire.GroupMember(group_id="g", member_id=f"m{number}", generation=1)


def test_a_change_wakes_those_with_news_in_parts() -> None:
    """server/groups/waiting_heartbeats W2: between the parts others have their turn."""

    async def story() -> None:
        waiting = WaitingHeartbeats()
        tasks = [asyncio.ensure_future(waiting.wait(asked(n), 60_000)) for n in range(COUNT)]
        await asyncio.sleep(0)
        assert len(waiting) == COUNT
        stays = group()
        waiting.compare({"g": stays}, "g")
        del stays.members["m7"]
        waiting.compare({"g": stays}, "g")
        waiting.compare({"g": stays}, "g")
        for _ in range(3):
            await asyncio.sleep(0)
        assert [n for n, task in enumerate(tasks) if task.done()] == [7]
        waiting.compare({"g": group(GroupState.PREPARING_REBALANCE)}, "g")
        turns = 0
        while not all(task.done() for task in tasks):
            before = sum(task.done() for task in tasks)
            await asyncio.sleep(0)
            turns += 1
            woken = sum(task.done() for task in tasks) - before
            assert woken <= waiting_heartbeats.WAKE_MAX
        assert turns >= COUNT // waiting_heartbeats.WAKE_MAX
        assert all(task.result() for task in tasks)
        assert len(waiting) == 0

    asyncio.run(story())


def test_all_are_compared_after_a_replay() -> None:
    """A write whose outcome was unknown may be in the log: no effect told of it."""

    async def story() -> None:
        waiting = WaitingHeartbeats()
        task = asyncio.ensure_future(waiting.wait(asked(0), 60_000))
        await asyncio.sleep(0)
        waiting.compare_all({"g": group()})
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done()
        waiting.compare_all({})
        assert await task

    asyncio.run(story())


def test_what_is_news_for_a_member() -> None:
    stable = group()
    assert check(stable, asked(0)).member_id == "m0"
    with pytest.raises(errors.RebalanceInProgress):
        check(group(GroupState.PREPARING_REBALANCE), asked(0))
    assert check(group(GroupState.COMPLETING_REBALANCE), asked(0))
    with pytest.raises(errors.UnknownMemberId):
        check(stable, asked(COUNT))
    stable.metadata = replace(stable.metadata, generation=2)
    with pytest.raises(errors.IllegalGeneration):
        check(stable, asked(0))
