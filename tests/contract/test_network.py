"""One suite for all networks (docs/ARCHITECTURE.md): the real one, grpc alone, and the simulator's.

The real network sends data over sockets, and control over sockets or over a shared connection of
grpc, so its tests run with both kinds and both ways.

Each test is a coroutine in the network's own kind of event loop; `nets` are the networks of two
nodes.
"""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from pk import event_loops, limits
from pk.clock import Clock, SystemClock
from pk.sim.world import SimWorld
from pk.wire import grpc_network
from pk.wire.grpc_network import GrpcNetwork
from pk.wire.socket_network import PkNetwork
from pk.world import Disconnected, Network, Stream, StreamKind

PATIENCE_S = 20


@dataclass
class Nets:
    server: Network
    client: Network
    address: str
    clock: Clock
    data: bool = False  #: every stream of the suite is a data stream

    async def connect(self, address: str, kind: StreamKind) -> Stream:
        if self.data and kind is StreamKind.CONTROL:
            kind = StreamKind.FETCH
        return await self.client.connect(address, kind)


Test = Callable[[Nets], Coroutine[Any, Any, None]]
Run = Callable[[Test], None]


def run_sim(test: Test, seed: int = 7) -> None:
    world = SimWorld(seed)
    nets = Nets(
        world.world_of("server").network,
        world.world_of("client").network,
        "server:0",
        world.world_of("client").clock,
    )
    world.run(test(nets))
    assert not world.loop.failures
    world.close()


def _run_real(test: Test, address: str, transport: str = "pk") -> None:
    async def main() -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, what: failures.append(what))
        server: Network
        client: Network
        if transport == "grpc":
            server, client = GrpcNetwork(), GrpcNetwork()
        else:
            ways = {"control_sockets": 0} if transport == "shared" else {}
            server, client = PkNetwork(), PkNetwork(**ways)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await test(Nets(server, client, address, SystemClock(), transport == "data"))
        finally:
            await client.close()
            await server.close()
        # grpc has one poller for all loops of a process, and may still notify a closed loop.
        assert not [each for each in failures if "PollerCompletionQueue" not in each["message"]]

    event_loops.run(main())


@pytest.fixture(
    params=[
        "sim",
        "grpc-tcp",
        "grpc-unix",
        "pk-tcp",
        "pk-unix",
        "shared-tcp",
        "shared-unix",
        "data-tcp",
        "data-unix",
    ]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    if request.param == "sim":
        return run_sim
    address = "127.0.0.1:0"
    transport, _, way = request.param.partition("-")
    if way == "unix":
        address = f"unix:{tmp_path_factory.mktemp('s')}/n.sock"
    return lambda test: _run_real(test, address, transport)


async def echo(_kind: StreamKind, stream: Stream) -> None:
    while (frame := await stream.recv()) is not None:
        await stream.send(frame)


def test_frames_arrive_whole_and_in_order(run: Run) -> None:
    """world W1, wire/socket_stream N1: a frame is any bytes, including none, and bytes that look
    like a pack.
    """
    odd = [b"", b"\xff\xff\xff\xff", b"\xff\xff\xff\xff\x01", b"\xff" * 9, b"a", bytes(100_000)]
    frames = [odd[n % len(odd)] + str(n).encode() * (n % 3) for n in range(300)]

    async def test(nets: Nets) -> None:
        listener = await nets.server.listen(nets.address, echo)
        stream = await nets.connect(listener.address, StreamKind.CONTROL)
        sender = asyncio.get_running_loop().create_task(_send_all(stream, frames))
        assert [await stream.recv() for _ in frames] == frames
        await sender
        stream.close()
        await listener.close(0)

    run(test)


async def _send_all(stream: Stream, frames: list[bytes]) -> None:
    for frame in frames:
        await stream.send(frame)


def test_pieces_arrive_as_one_frame(run: Run) -> None:
    frames: list[list[bytes | bytearray | memoryview]] = [
        [b"head", memoryview(bytes(300_000)), bytearray(b"tail")],
        [b"", b""],
        [memoryview(b"alone")],
        [b"x"] * 2000,
    ]

    async def test(nets: Nets) -> None:
        listener = await nets.server.listen(nets.address, echo)
        stream = await nets.connect(listener.address, StreamKind.PRODUCE)
        for pieces in frames:
            await stream.send(*pieces)
        for pieces in frames:
            assert await stream.recv() == b"".join(pieces)
        stream.close()
        await listener.close(0)

    run(test)


def test_a_large_frame_travels(run: Run) -> None:
    frame = bytes(range(256)) * (12 * limits.MIB // 256)

    async def test(nets: Nets) -> None:
        listener = await nets.server.listen(nets.address, echo)
        stream = await nets.connect(listener.address, StreamKind.PRODUCE)
        await stream.send(frame)
        assert await stream.recv() == frame
        stream.close()
        await listener.close(0)

    run(test)


def test_kinds_reach_the_handler(run: Run) -> None:
    async def test(nets: Nets) -> None:
        async def name_it(kind: StreamKind, stream: Stream) -> None:
            await stream.send(kind.value.encode())

        listener = await nets.server.listen(nets.address, name_it)
        for kind in StreamKind:
            stream = await nets.client.connect(listener.address, kind)
            assert await stream.recv() == kind.value.encode()
            assert await stream.recv() is None
            stream.close()
        await listener.close(0)

    run(test)


def test_concurrent_senders_lose_nothing(run: Run) -> None:
    async def test(nets: Nets) -> None:
        listener = await nets.server.listen(nets.address, echo)
        stream = await nets.connect(listener.address, StreamKind.CONTROL)
        loop = asyncio.get_running_loop()
        mine = [[f"{who}/{n}".encode() for n in range(50)] for who in range(8)]
        senders = [loop.create_task(_send_all(stream, frames)) for frames in mine]
        received = [await stream.recv() for _ in range(8 * 50)]
        for frames in mine:
            assert [frame for frame in received if frame in frames] == frames
        await asyncio.gather(*senders)
        stream.close()
        await listener.close(0)

    run(test)


def test_back_pressure_stops_the_sender(run: Run) -> None:
    """If the peer does not read, `send` waits after a bounded number of bytes."""
    frame = bytes(limits.MIB)
    total = 120

    async def test(nets: Nets) -> None:
        go = asyncio.Event()
        got = 0

        async def reader(_kind: StreamKind, stream: Stream) -> None:
            nonlocal got
            await go.wait()
            while await stream.recv() is not None:
                got += 1

        listener = await nets.server.listen(nets.address, reader)
        stream = await nets.connect(listener.address, StreamKind.PRODUCE)
        sent = 0

        async def sender() -> None:
            nonlocal sent
            for _ in range(total):
                await stream.send(frame)
                sent += 1
            stream.close()

        task = asyncio.get_running_loop().create_task(sender())
        before = -1
        while sent != before:  # until it moves no more
            before = sent
            await nets.clock.sleep_ms(300)
        assert 0 < sent < 64
        go.set()
        await task
        while got < total:
            await nets.clock.sleep_ms(20)
        await listener.close(0)

    run(test)


def test_the_client_ends_cleanly(run: Run) -> None:
    """wire/socket_stream N2: after close the other side receives everything that was sent, then
    None.
    """

    async def test(nets: Nets) -> None:
        seen: list[bytes | None] = []
        done = asyncio.Event()

        async def reader(_kind: StreamKind, stream: Stream) -> None:
            while True:
                seen.append(await stream.recv())
                if seen[-1] is None:
                    break
            assert await stream.recv() is None
            done.set()

        listener = await nets.server.listen(nets.address, reader)
        stream = await nets.connect(listener.address, StreamKind.CONTROL)
        frames = [str(n).encode() for n in range(100)]
        await _send_all(stream, frames)
        stream.close()
        stream.close()
        assert await stream.recv() is None
        with pytest.raises(Disconnected):
            await stream.send(b"late")
        await done.wait()
        assert seen == [*frames, None]
        await listener.close(0)

    run(test)


def test_the_server_ends_cleanly(run: Run) -> None:
    async def test(nets: Nets) -> None:
        async def bye(_kind: StreamKind, stream: Stream) -> None:
            await stream.send(b"1")
            await stream.send(b"2")
            stream.close()

        listener = await nets.server.listen(nets.address, bye)
        stream = await nets.connect(listener.address, StreamKind.CONTROL)
        assert [await stream.recv() for _ in range(4)] == [b"1", b"2", None, None]
        with pytest.raises(Disconnected):
            await stream.send(b"nobody reads this")
        stream.close()
        await listener.close(0)

    run(test)


def test_nobody_listens(run: Run) -> None:
    async def test(nets: Nets) -> None:
        listener = await nets.server.listen(nets.address, echo)
        address = listener.address
        await listener.close(0)
        for _ in range(2):
            with pytest.raises(Disconnected):
                await nets.connect(address, StreamKind.CONTROL)
        # wire/grpc_network N4: once a server listens again, the next attempt succeeds
        listener = await nets.server.listen(address, echo)
        stream = await nets.connect(listener.address, StreamKind.CONTROL)
        await stream.send(b"x")
        assert await stream.recv() == b"x"
        stream.close()
        await listener.close(0)

    run(test)


def test_a_taken_address_is_refused(tmp_path: Any) -> None:
    """P3: so_reuseport=0.  (For unix sockets the directory's lock decides instead.)"""

    async def test(nets: Nets) -> None:
        listener = await nets.server.listen(nets.address, echo)
        with pytest.raises(OSError) as caught:
            await nets.client.listen(listener.address, echo)
        assert caught.value.errno == errno.EADDRINUSE
        await listener.close(0)

    run_sim(test)
    _run_real(test, "127.0.0.1:0")


def test_a_shut_down_server_breaks_the_stream_at_once(run: Run) -> None:
    """R7: a client that only waits notices the end of the stream; it need not send to find out."""

    async def test(nets: Nets) -> None:
        told = asyncio.Event()

        async def stuck(_kind: StreamKind, stream: Stream) -> None:
            await stream.send(b"hello")
            try:
                await stream.recv()
            except Disconnected:
                told.set()

        listener = await nets.server.listen(nets.address, stuck)
        stream = await nets.connect(listener.address, StreamKind.FETCH)
        assert await stream.recv() == b"hello"
        closing = asyncio.get_running_loop().create_task(listener.close(50))
        with pytest.raises(Disconnected):
            await stream.recv()
        with pytest.raises(Disconnected):
            await stream.send(b"x")
        await closing
        await told.wait()
        stream.close()

    run(test)


def test_a_cancelled_recv_and_a_cancelled_send_harm_nothing(run: Run) -> None:
    """Calls that share a stream have deadlines; frames are neither lost nor doubled."""

    async def test(nets: Nets) -> None:
        listener = await nets.server.listen(nets.address, echo)
        stream = await nets.connect(listener.address, StreamKind.CONTROL)
        for n in range(20):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.002):
                    await stream.recv()
            await stream.send(str(n).encode())
            assert await stream.recv() == str(n).encode()
        full = 0
        try:
            async with asyncio.timeout(0.3):
                while True:
                    await stream.send(bytes(limits.MIB))
                    full += 1
        except TimeoutError:
            pass
        for _ in range(full):
            assert await stream.recv() == bytes(limits.MIB)
        await stream.send(b"last")
        assert await stream.recv() == b"last"
        stream.close()
        await listener.close(0)

    run(test)


def test_a_failing_handler_ends_its_stream_only(run: Run) -> None:
    async def test(nets: Nets) -> None:
        async def picky(_kind: StreamKind, stream: Stream) -> None:
            if await stream.recv() == b"bad":
                raise Disconnected("I do not like it")
            await stream.send(b"fine")

        listener = await nets.server.listen(nets.address, picky)
        bad = await nets.connect(listener.address, StreamKind.CONTROL)
        good = await nets.connect(listener.address, StreamKind.CONTROL)
        await bad.send(b"bad")
        assert await bad.recv() is None
        await good.send(b"good")
        assert await good.recv() == b"fine"
        bad.close()
        good.close()
        await listener.close(0)

    run(test)


def test_many_streams_at_once(run: Run) -> None:
    async def test(nets: Nets) -> None:
        listener = await nets.server.listen(nets.address, echo)

        async def one(n: int) -> None:
            stream = await nets.connect(listener.address, StreamKind.FETCH)
            await stream.send(str(n).encode())
            assert await stream.recv() == str(n).encode()
            stream.close()

        works: list[Awaitable[None]] = [one(n) for n in range(60)]
        await asyncio.gather(*works)
        await listener.close(0)

    run(test)


def test_a_malformed_pack_breaks_the_stream() -> None:
    """wire/socket_stream N1: a hostile length is checked before it is used."""
    for message in (b"\xff\xff\xff\xff\x05", b"\xff\xff\xff\xff\x05\x00\x00\x00ab"):
        with pytest.raises(Disconnected):
            grpc_network._unpack(message)
    assert grpc_network._unpack(grpc_network._pack([b"", b"a", b"bc"])) == [b"", b"a", b"bc"]


def test_a_killed_process_is_noticed_at_once() -> None:
    """R7: kill -9 resets the connection; the peer does not wait for a keepalive (which takes
    10 s).
    """
    code = (
        "import asyncio\n"
        "from pk import event_loops\n"
        "from pk.wire.grpc_network import GrpcNetwork\n"
        "async def main():\n"
        "    async def serve(kind, stream):\n"
        "        await stream.send(b'here')\n"
        "        await stream.recv()\n"
        "    listener = await GrpcNetwork().listen('127.0.0.1:0', serve)\n"
        "    print(listener.address, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "event_loops.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()

        async def main() -> None:
            network = GrpcNetwork()
            stream = await network.connect(address, StreamKind.CONTROL)
            assert await stream.recv() == b"here"
            child.kill()
            async with asyncio.timeout(grpc_network.KEEPALIVE_MS / 1000):
                with pytest.raises(Disconnected):
                    pytest.fail(f"received {await stream.recv()!r}")
                with pytest.raises(Disconnected):
                    pytest.fail(f"connected: {await network.connect(address, StreamKind.CONTROL)}")
            await network.close()

        event_loops.run(main())
