"""One thing is held back while everything else continues."""

from __future__ import annotations

import asyncio
import random

import pytest

from pk import errors
from pk.sim.disk import SimDisk, SimStorage
from pk.sim.objects import SimObjects
from pk.sim.world import SimWorld
from pk.world import Disconnected, Stream, StreamKind


def test_a_stall_holds_one_direction_of_one_stream() -> None:
    """sim/network N8: frames stay in order afterwards, also over a cut that heals meanwhile; other
    streams pass.
    """
    with SimWorld(4) as world:
        network = world.network
        server, client = world.world_of("server"), world.world_of("client")
        clock = client.clock

        async def echo(_kind: StreamKind, stream: Stream) -> None:
            while (frame := await stream.recv()) is not None:
                await stream.send(frame)

        async def main() -> None:
            await server.network.listen("server:1", echo)
            held = await client.network.connect("server:1", StreamKind.CONTROL)
            other = await client.network.connect("server:1", StreamKind.CONTROL)
            there = [end for end in network.ends() if end.node.name == "client"]
            network.stall(there[0], 2_000)
            network.stall(there[0], 1_000)  # the longer one counts
            began = clock.monotonic_ms()
            for n in range(3):
                await held.send(bytes([n]))
            await other.send(b"passes")
            assert await other.recv() == b"passes"
            assert clock.monotonic_ms() - began < 10
            await clock.sleep_ms(500)
            network.cut("client", "server")
            await clock.sleep_ms(500)
            network.heal("client", "server")
            assert [await held.recv() for _ in range(3)] == [b"\0", b"\1", b"\2"]
            assert 2_000 <= clock.monotonic_ms() - began < 2_010
            assert network.stalled_frames == 3
            network.stall(there[0], 1_000)
            network.break_streams("client", "server")
            with pytest.raises(Disconnected):
                await held.recv()
            await clock.sleep_ms(2_000)  # a stall ends whose stream is closed

        world.run(main())


@pytest.mark.parametrize("after", [False, True])
def test_a_read_that_is_held_holds_nobody_else(after: bool) -> None:
    """The read returns the content from before the hold, or from after it."""
    with SimWorld(1) as world:
        clock = world.world_of("a").clock
        storage = SimStorage()
        disk = SimDisk(storage, clock, random.Random(1))
        file = storage.open("f", create=True)
        held = iter([(0.0, 3_000.0) if after else (3_000.0, 0.0)])
        storage.stall = lambda lane: next(held, (0.0, 0.0)) if lane == "read" else (0.0, 0.0)

        async def main() -> None:
            late = asyncio.get_running_loop().create_task(disk.read(lambda: file.read(0, 9)))
            await clock.sleep_ms(10)
            await disk.write(lambda: file.append([b"new"]))
            assert await disk.read(lambda: file.read(0, 9)) == b"new"
            assert clock.monotonic_ms() < 20
            assert await late == (b"" if after else b"new")
            assert clock.monotonic_ms() >= 3_000

        world.run(main())


@pytest.mark.parametrize("after", [False, True])
def test_a_write_that_is_held_holds_the_writes_behind_it(after: bool) -> None:
    with SimWorld(1) as world:
        clock = world.world_of("a").clock
        storage = SimStorage()
        disk = SimDisk(storage, clock, random.Random(1))
        held = iter([(0.0, 3_000.0) if after else (3_000.0, 0.0)])
        storage.stall = lambda lane: next(held, (0.0, 0.0)) if lane == "write" else (0.0, 0.0)
        done: list[str] = []

        async def write(name: str) -> None:
            await disk.write(lambda: storage.open(name, create=True))
            done.append(name)

        async def main() -> None:
            tasks = [asyncio.get_running_loop().create_task(write(name)) for name in ("1", "2")]
            await clock.sleep_ms(2_900)
            assert await disk.read(lambda: storage.names("")) == (["1"] if after else [])
            assert await disk.compute(lambda: len(done)) == 0
            await asyncio.gather(*tasks)
            assert done == ["1", "2"]

        world.run(main())


def test_a_request_that_is_held_happens_all_the_same() -> None:
    """sim/objects B4: also if the node that sent the request is gone."""
    with SimWorld(1) as world:
        clock = world.world_of("a").clock
        store = SimObjects(world)
        held = {"put one": (20_000.0, 0.0), "put two": (0.0, 20_000.0)}
        store.stall = lambda what: held.get(what, (0.0, 0.0))

        async def main() -> None:
            loop = asyncio.get_running_loop()
            tasks = [loop.create_task(store.put(name, b"1")) for name in ("one", "two", "three")]
            await clock.sleep_ms(100)
            assert [task.done() for task in tasks] == [False, False, True]
            assert sorted(store.memory.objects) == ["three", "two"]
            tasks[0].cancel()
            await tasks[1]
            assert sorted(store.memory.objects) == ["one", "three", "two"]

        world.run(main())


def test_an_operation_that_finds_no_room_changes_nothing() -> None:
    storage = SimStorage()
    storage.fault = lambda operation, _: (
        errors.StorageFull("no room") if operation == "rename" else None
    )
    storage.open("a", create=True)
    with pytest.raises(errors.StorageFull):
        storage.rename("a", "b")
    assert storage.names("") == ["a"]
    storage.fault = None
    storage.rename("a", "b")
    assert storage.names("") == ["b"]
