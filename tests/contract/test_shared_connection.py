"""Control streams that share a connection (pk.wire.shared_connection): numbers, bounds, refusals.

tests/contract/test_network.py has what every transport promises.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import pytest

from pk import errors, limits
from pk.clock import SystemClock
from pk.wire import shared_connection, socket_network
from pk.wire.inbound import MemoryPool
from pk.wire.memory import InboundMemory
from pk.wire.shared_connection import ClientConnection
from pk.wire.socket_network import PkNetwork
from pk.wire.socket_stream import WINDOW_FRAMES
from pk.world import Disconnected, Listener, Stream, StreamKind
from tests.contract.socket_kit import END, dialled, echo, framed, greet, run, serving

FRAME, FINISHED, BEGIN = 0, 1, 2


def shared() -> PkNetwork:
    """Return a client whose control streams all share connections."""
    return PkNetwork(control_sockets=0)


async def opened(network: PkNetwork, listener: Listener, said: bytes = b"hello") -> Stream:
    stream = await network.connect(listener.address, StreamKind.CONTROL)
    await stream.send(said)
    return stream


def part(number: int, what: int, payload: bytes = b"") -> bytes:
    return framed(struct.pack("<IB", number, what) + payload)


async def answers(listener: Listener, said: bytes, end: bytes = b"") -> bytes:
    """Return what a listener sends to a raw client until it closes, or until `end` came."""
    loop = asyncio.get_running_loop()
    with dialled(listener) as client:
        await loop.sock_sendall(client, b"PKS1M" + said)
        found = b""
        try:
            while more := await loop.sock_recv(client, 65_536):
                found += more
                if end and end in found:
                    break
        except ConnectionResetError:
            pass
    assert found.startswith(b"PKS1")
    return found.removeprefix(b"PKS1")


def test_streams_share_connections_of_a_bounded_number_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """wire/shared_connection N13; a connection ends with the last of its streams."""
    monkeypatch.setattr(limits, "CONTROL_STREAMS_MAX", 10)
    peers: list[str] = []

    async def serve(kind: StreamKind, stream: Stream) -> None:
        assert kind is StreamKind.CONTROL
        peers.append(stream.peer)
        await echo(kind, stream)

    async def test() -> None:
        client = shared()
        async with serving(serve) as (_, listener):
            streams = await asyncio.gather(*(opened(client, listener) for _ in range(25)))
            for number, stream in enumerate(streams):
                assert await stream.recv() == b"hello"
                await stream.send(b"%d" % number)
            assert [await stream.recv() for stream in streams] == [b"%d" % n for n in range(25)]
            assert len(set(peers)) == 3
            for stream in streams[:5]:
                stream.close()
            while len(client._shared[listener.address][0]) != 5:
                await asyncio.sleep(0.01)
            streams += [await opened(client, listener) for _ in range(5)]
            assert len(set(peers)) == 3, "a stream that ended gave its place to another one"
            for stream in streams:
                stream.close()
            while client._shared:
                await asyncio.sleep(0.01)
            await client.close()

    run(test)


def test_the_server_ends_the_streams_beyond_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONTROL_STREAMS_MAX", 2)

    async def test() -> None:
        async with serving(echo) as (_, listener):
            begun = b"".join(part(number, BEGIN) for number in (1, 2, 3))
            said = part(3, FRAME, b"lost") + part(2, FRAME, b"echo")
            found = await answers(listener, begun + said, part(2, FRAME, b"echo"))
            assert found == part(3, FINISHED) + part(2, FRAME, b"echo")

    run(test)


def test_what_belongs_to_no_stream_is_dropped() -> None:
    async def test() -> None:
        async with serving(echo) as (_, listener):
            said = part(7, FRAME, b"lost") + part(7, FINISHED) + part(8, BEGIN)
            said += part(8, FINISHED) + part(9, BEGIN) + part(8, FRAME, b"late")
            found = await answers(listener, said + part(9, FRAME, b"echo"), part(9, FRAME, b"echo"))
            assert sorted((part(8, FINISHED), part(9, FRAME, b"echo"))) == sorted(
                (found[:9], found[9:])
            )

    run(test)


@pytest.mark.parametrize(
    "said",
    [
        framed(b"\0\0\0"),
        framed(b""),
        part(1, BEGIN) + part(1, BEGIN),
        part(2, BEGIN) + part(1, BEGIN),
    ],
    ids=["short", "empty", "twice", "descending"],
)
def test_a_connection_that_breaks_the_rules_ends(said: bytes) -> None:
    async def test() -> None:
        async with serving(echo) as (_, listener):
            found = await answers(listener, said)
            assert found in (b"", END)

    run(test)


def test_a_connection_that_begins_no_stream_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """wire/socket_network N6: as one that opens HTTP/2 and begins none."""
    monkeypatch.setattr(socket_network, "STREAM_TIMEOUT_MS", 100)

    async def test() -> None:
        async with serving(echo) as (_, listener):
            assert await answers(listener, b"") in (b"", END)

    run(test)


def test_a_handler_that_does_not_read_stops_its_connection_only() -> None:
    """wire/shared_connection N3, N14: what waits is bounded and charged, and is read later."""
    memory = InboundMemory(MemoryPool(64 * limits.MIB, 16, limits.MIB), SystemClock())
    slow = asyncio.Event()

    async def serve(kind: StreamKind, stream: Stream) -> None:
        hello = await stream.recv()
        stream.admit(False)
        await stream.send(b"welcome")
        if hello == b"slow":
            await slow.wait()
        await echo(kind, stream)

    async def flood(stream: Stream, count: int) -> None:
        for number in range(count):
            await stream.send(b"%0100d" % number)

    async def test() -> None:
        client, other = shared(), shared()
        count = 4 * WINDOW_FRAMES
        async with serving(serve, memory) as (_, listener):
            first = await opened(client, listener, b"slow")
            beside = await opened(client, listener)
            assert (await first.recv(), await beside.recv()) == (b"welcome", b"welcome")
            sending = asyncio.create_task(flood(first, count))
            while memory.budget.held < 40_000:  # 256 frames in each of two places
                await asyncio.sleep(0.01)
            await beside.send(b"later")
            elsewhere = await opened(other, listener)
            assert await elsewhere.recv() == b"welcome"
            await elsewhere.send(b"now")
            assert await elsewhere.recv() == b"now"
            slow.set()
            for number in range(count):
                assert await first.recv() == b"%0100d" % number
            assert await beside.recv() == b"later"
            await sending
            for stream in (first, beside, elsewhere):
                stream.close()
            await client.close()
            await other.close()
        assert memory.budget.held == 0

    run(test)


def test_frames_that_nobody_takes_are_credited() -> None:
    """wire/shared_connection N14, for streams that were closed."""
    memory = InboundMemory(MemoryPool(64 * limits.MIB, 16, limits.MIB), SystemClock())
    stopped = asyncio.Event()

    async def serve(_kind: StreamKind, stream: Stream) -> None:
        await stream.recv()
        stream.admit(False)
        await stream.send(b"welcome")
        await stopped.wait()
        stream.close()

    async def test() -> None:
        client = shared()
        async with serving(serve, memory) as (_, listener):
            streams = [await opened(client, listener) for _ in range(3)]
            for stream in streams:
                assert await stream.recv() == b"welcome"
                for _ in range(10):
                    await stream.send(bytes(1_000))
            while memory.budget.held < 20_000:
                await asyncio.sleep(0.01)
            stopped.set()
            for stream in streams:
                assert await stream.recv() is None
                stream.close()
            await client.close()
        assert memory.budget.held == 0

    run(test)


def test_a_refusal_of_the_server_reaches_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """wire/socket_stream N4; the client's own bound is taken away."""
    monkeypatch.setattr(ClientConnection, "sends_most", None)
    monkeypatch.setattr(limits, "CONTROL_BYTES_MAX", limits.MIB)

    async def test() -> None:
        client = shared()
        async with serving(greet) as (_, listener):
            streams = [await opened(client, listener) for _ in range(2)]
            for stream in streams:
                assert await stream.recv() == b"welcome"
            await streams[0].send(bytes(2 * limits.MIB))
            for stream in streams:
                with pytest.raises(Disconnected, match="in a stream of this kind"):
                    await stream.recv()
                stream.close()
            await client.close()

    run(test)


def test_a_frame_beyond_the_bound_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream must not end the others of its process."""
    monkeypatch.setattr(ClientConnection, "sends_most", 1_000)

    async def test() -> None:
        client = shared()
        async with serving(echo) as (_, listener):
            stream, beside = await opened(client, listener), await opened(client, listener)
            with pytest.raises(Disconnected, match="1001 bytes; 1000 are taken"):
                await stream.send(bytes(500), bytes(501))
            for each in (stream, beside):
                assert await each.recv() == b"hello"
                each.close()
            await client.close()

    run(test)


def test_streams_break_with_their_connection() -> None:
    async def test() -> None:
        client = shared()
        async with serving(echo) as (_, listener):
            streams = [await opened(client, listener) for _ in range(3)]
            for stream in streams:
                assert await stream.recv() == b"hello"
            (connection,) = client._shared[listener.address]
            connection.carrier.abort("the cable was cut")
            for stream in streams:
                with pytest.raises(Disconnected, match="the cable was cut"):
                    await stream.recv()
                with pytest.raises(Disconnected, match="the cable was cut"):
                    await stream.send(b"more")
                stream.close()
            assert not client._shared
            again = await opened(client, listener)
            assert await again.recv() == b"hello"
            again.close()
            await client.close()

    run(test)


def test_a_peer_of_an_earlier_build_is_asked_over_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """wire/socket_network N12: it closes the connection at its opening."""
    asked: list[Any] = []

    async def over_grpc(address: str, kind: StreamKind) -> Stream:
        asked.append((address, kind))
        raise Disconnected("asked")

    async def earlier(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(5) == b"PKS1M"
        writer.close()

    async def test() -> None:
        server = await asyncio.start_server(earlier, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = shared()
        monkeypatch.setattr(client._grpc, "connect", over_grpc)
        with pytest.raises(Disconnected, match="asked"):
            await client.connect(address, StreamKind.CONTROL)
        assert asked == [(address, StreamKind.CONTROL)]
        server.close()
        await client.close()

    run(test)


def test_a_peer_that_never_finishes_keeps_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_connection, "CLOSE_TIMEOUT_MS", 50)
    ended = asyncio.Event()

    async def busy(_kind: StreamKind, stream: Stream) -> None:
        while await stream.recv() is not None:
            pass
        await ended.wait()

    async def test() -> None:
        client = shared()
        async with serving(busy) as (_, listener):
            kept, stream = await opened(client, listener), await opened(client, listener)
            stream.close()
            (connection,) = client._shared[listener.address]
            while len(connection) != 1:
                await asyncio.sleep(0.01)
            ended.set()
            kept.close()
            await client.close()

    run(test)


def test_an_error_is_what_a_refused_peer_reads() -> None:
    """Rule L17: the hello of a client for which there is no room."""

    async def serve(_kind: StreamKind, stream: Stream) -> None:
        await stream.recv()
        raise errors.ThrottledError("no room")

    async def test() -> None:
        client = shared()
        async with serving(serve) as (_, listener):
            stream = await opened(client, listener)
            assert await stream.recv() is None
            stream.close()
            await client.close()

    run(test)


def test_a_network_closes_although_a_stream_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """wire/shared_connection N3: the connection is not read, so it does not see its own end."""
    monkeypatch.setattr(socket_network, "HANDLER_GRACE_S", 0.1)

    async def flood(_kind: StreamKind, stream: Stream) -> None:
        while True:
            await stream.send(b"more")

    async def test() -> None:
        client = shared()
        async with serving(flood) as (_, listener):
            stream = await client.connect(listener.address, StreamKind.CONTROL)
            (connection,) = client._shared[listener.address]
            while connection._drained is None:
                await asyncio.sleep(0.01)
            await client.close()
            while await _next(stream):
                pass

    run(test)


async def _next(stream: Stream) -> Any:
    """Return the next frame; None = the stream broke."""
    try:
        return await stream.recv()
    except Disconnected:
        return None
