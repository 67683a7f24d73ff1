"""Disk space reserved for the metadata: kept while there is space, given up on a full disk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest

from pk import errors
from pk.effects import Level
from pk.server.raft.messages import SaveVote, Vote
from pk.server.raft.reserve import RESERVE_FILE, TIMES, ReserveDisk
from pk.sim.disk import SimDisk, SimStorage
from pk.sim.world import SimWorld
from tests.unit.server.raft.test_log import Disk, saved

SIZE = 1_000


def run(story: Any, storage: SimStorage) -> ReserveDisk:
    with SimWorld(1) as world:
        disk = ReserveDisk(SimDisk(storage, world.world_of("a").clock, random.Random(1)), SIZE)
        coroutine: Coroutine[Any, Any, None] = story(disk)
        world.run(coroutine)
        return disk


def test_a_write_without_room_gives_up_the_reserve_and_says_so() -> None:
    storage = SimStorage()

    async def story(disk: ReserveDisk) -> None:
        await disk.prepare()
        assert disk.held
        assert storage.used_bytes() == SIZE
        storage.capacity = SIZE
        for _ in range(2):
            outcome = await asyncio.gather(
                disk.write(lambda: storage.replace_file("vote", b"x" * 50)), return_exceptions=True
            )
            if not isinstance(outcome[0], Exception):
                break
            assert isinstance(outcome[0], errors.StorageFull)
            assert not disk.held
        assert storage.peek("vote")
        await disk.prepare()
        assert not disk.held, "there is no room for it"
        storage.capacity = 50 + TIMES * SIZE
        await disk.prepare()
        assert disk.held

    run(story, storage)


def test_a_start_on_a_full_disk_has_room_at_once() -> None:
    storage = SimStorage()

    async def first(disk: ReserveDisk) -> None:
        await disk.prepare()

    async def again(disk: ReserveDisk) -> None:
        storage.capacity = storage.used_bytes() + SIZE - 1
        await disk.prepare()
        assert not disk.held
        assert RESERVE_FILE not in storage.names("")
        storage.replace_file("vote", b"x")

    run(first, storage)
    storage.crash()
    run(again, storage)


def test_other_failures_leave_the_reserve() -> None:
    storage = SimStorage()

    async def story(disk: ReserveDisk) -> None:
        await disk.prepare()

        def work() -> None:
            raise errors.StorageFailed("gone")

        with pytest.raises(errors.StorageFailed):
            await disk.write(work)
        assert disk.held
        assert await disk.read(lambda: storage.names("")) == [RESERVE_FILE]
        assert await disk.compute(lambda: 1) == 1

    run(story, storage)


def test_a_vote_waits_for_room_and_a_started_node_has_some() -> None:
    """The vote is saved before it is sent; a full disk does not end the process."""
    disk = Disk()
    log = disk.open()
    vote = Vote(7, 1, "d")

    async def full() -> None:
        disk.storage.capacity = 0
        saving = asyncio.get_running_loop().create_task(log.write([SaveVote(vote)], Level.SYNCED))
        await asyncio.sleep(5)
        assert not saving.done()
        disk.storage.capacity = None
        await saving
        assert saved(disk)[0] == vote

    disk.world.run(full())
    assert not disk.fatal
    disk.world.run(log.note_synced())
    assert RESERVE_FILE in disk.storage.names("")
    disk.world.run(log.close())
    disk.storage.crash()
    disk.storage.capacity = disk.storage.used_bytes()
    again = disk.open()
    assert again.leadership.start >= 0, "it leads a new epoch"
    assert RESERVE_FILE not in disk.storage.names("")
    disk.world.run(again.close())
    assert not disk.fatal
