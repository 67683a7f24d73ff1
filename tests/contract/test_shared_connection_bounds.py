"""Peers of shared connections that do not read, do not speak or hang (pk.wire.shared_connection).

tests/contract/test_shared_connection.py has the rest of the transport.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pk import limits
from pk.wire import calls, frames, shared_connection, socket_network
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, accept_stream, head_of, serve_control
from pk.wire.grpc_network import GrpcNetwork
from pk.wire.socket_network import PkNetwork
from pk.wire.socket_stream import WINDOW_PIECES
from pk.wire.stream_quotas import StreamQuotas
from pk.world import Disconnected, Listener, Network, Stream, StreamKind
from tests.contract.socket_kit import echo, framed, run, serving

FRAME, FINISHED, BEGIN = 0, 1, 2
HELLO = frames.encode(head_of(wire.Hello(client_id="deaf", protocol=PROTOCOL)))


def part(number: int, what: int, payload: bytes = b"") -> bytes:
    return framed(struct.pack("<IB", number, what) + payload)


async def deaf(listener: Listener) -> socket.socket:
    """Return a connection that was opened and from which nothing more is read."""
    host, port = listener.address.rsplit(":", 1)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect((host, int(port)))
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, b"PKS1M")
    assert await loop.sock_recv(sock, 4) == b"PKS1"
    return sock


async def push(sock: socket.socket, data: bytes) -> bool:
    """Send what the peer takes; return whether it took all."""
    try:
        async with asyncio.timeout(1):
            await asyncio.get_running_loop().sock_sendall(sock, data)
            return True
    except TimeoutError:
        return False


def carriers(listener: Listener) -> list[Any]:
    """Return the server's ends of the connections."""
    return list(listener._dead_peers.streams)  # type: ignore[attr-defined]


def test_what_a_peer_that_does_not_read_is_told_is_bounded() -> None:
    """wire/shared_connection N13, N17: nine bytes of the peer queue the end of a stream."""

    async def test() -> None:
        async with serving(echo) as (_, listener):
            with await deaf(listener) as client:
                (carrier,) = carriers(listener)
                queued, said = 0, b""
                for first in range(1, 600_000, 20_000):
                    said = b"".join(part(first + n, BEGIN) for n in range(20_000))
                    took = await push(client, said)
                    queued = max(queued, len(carrier._outbox))
                    if not took:
                        break
                assert not took, "the server stops reading"
                carrier.abort("enough")
        assert queued < 4 * WINDOW_PIECES

    run(test)


def test_replies_to_a_peer_that_does_not_read_are_bounded() -> None:
    """wire/shared_connection N17; wire/calls A2 bounds each stream, not all streams together."""
    replies = 0

    async def handle(_request: Any, _frame: frames.Frame) -> Any:
        nonlocal replies
        replies += 1
        return wire.MetadataReply(), (bytes(10_000),)

    async def serve(_kind: StreamKind, stream: Stream) -> None:
        if await accept_stream(stream, wire.HelloReply(protocol=PROTOCOL)) is not None:
            await serve_control(stream, {"metadata": handle})

    async def test() -> None:
        call = frames.encode(head_of(wire.MetadataRequest(), correlation_id=1))
        numbers = range(1, 101)
        said = b"".join(part(n, BEGIN) + part(n, FRAME, HELLO) for n in numbers)
        said += b"".join(part(n, FRAME, call) for n in numbers) * 200
        async with serving(serve) as (_, listener):
            with await deaf(listener) as client:
                await push(client, said)
                before = -1
                while not replies or replies != before:
                    before = replies
                    await asyncio.sleep(0.5)
                for carrier in carriers(listener):
                    carrier.abort("enough")
        assert 0 < replies * 10_000 < 64 * limits.MIB

    run(test)


def test_a_connection_without_a_stream_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """wire/socket_network N6, also if it had streams before."""
    monkeypatch.setattr(socket_network, "STREAM_TIMEOUT_MS", 200)
    monkeypatch.setattr(calls, "HELLO_TIMEOUT_MS", 200)

    async def serve(_kind: StreamKind, stream: Stream) -> None:
        await accept_stream(stream, wire.HelloReply(protocol=PROTOCOL))

    async def test() -> None:
        async with serving(serve) as (_, listener):
            with await deaf(listener) as client:
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(client, part(1, BEGIN) + part(1, FINISHED))
                while await loop.sock_recv(client, 100):
                    pass

    run(test)


def test_a_frame_of_no_stream_ends_the_connection_of_a_client() -> None:
    """Only the server has refusals to send."""
    refusal = frames.encode(wire.Head(error=wire.Error(message="the client's own words")))

    async def test() -> None:
        async with serving(echo) as (_, listener):
            with await deaf(listener) as client:
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(client, part(1, BEGIN) + part(0, FRAME, refusal))
                while await loop.sock_recv(client, 100):
                    pass

    run(test)


@pytest.mark.parametrize("over", ["shared", "grpc"])
def test_silent_streams_turn_no_other_peer_away(over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """wire/stream_quotas N16 and rule L17: a stream that says something gets an answer."""
    monkeypatch.setattr(socket_network, "StreamQuotas", lambda: StreamQuotas(1_000, 20))

    async def test() -> None:
        async with serving(echo) as (_, listener):
            loud: list[Network] = [
                PkNetwork(control_sockets=0) if over == "shared" else GrpcNetwork()
                for _ in range(3)
            ]
            silent = [
                await network.connect(listener.address, StreamKind.CONTROL)
                for network in loud
                for _ in range(30)
            ]
            quotas: Any = listener._streams  # type: ignore[attr-defined]
            while quotas.silent != 20:
                await asyncio.sleep(0.01)
            client = PkNetwork(control_sockets=0)
            for _ in range(30):
                stream = await client.connect(listener.address, StreamKind.CONTROL)
                await stream.send(b"hello")
                assert await stream.recv() == b"hello"
            closed = set[Stream]()
            while len(closed) < 70:
                closed |= {each for each in silent if each not in closed and await ended(each)}
            for network in (client, *loud):
                await network.close()  # type: ignore[attr-defined]
            while len(quotas):
                await asyncio.sleep(0.01)

    run(test)


async def ended(stream: Stream) -> bool:
    """Return whether the server has ended a stream."""
    try:
        async with asyncio.timeout(0.02):
            return await stream.recv() is None
    except TimeoutError:
        return False


def test_a_connection_beyond_its_share_is_not_read_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """wire/shared_connection N17: a peer that begins streams again and again is slowed down."""
    monkeypatch.setattr(shared_connection, "_PAUSE_S", 3_600)
    monkeypatch.setattr(limits, "CONTROL_STREAMS_MAX", 2)

    async def test() -> None:
        async with serving(echo) as (_, listener):
            with await deaf(listener) as client:
                loop = asyncio.get_running_loop()
                begun = b"".join(part(number, BEGIN) for number in (1, 2, 3))
                await loop.sock_sendall(client, begun + part(1, FRAME, b"late"))
                found = await loop.sock_recv(client, 100)
                other = PkNetwork(control_sockets=0)
                stream = await other.connect(listener.address, StreamKind.CONTROL)
                await stream.send(b"hello")
                assert await stream.recv() == b"hello"
                assert found == part(3, FINISHED)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await loop.sock_recv(client, 100)
                await other.close()

    run(test)


def test_streams_beyond_the_bound_of_a_listener_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """wire/stream_quotas N15, whichever connections they are on."""
    monkeypatch.setattr(socket_network, "StreamQuotas", lambda: StreamQuotas(5, 5))

    async def test() -> None:
        async with serving(echo) as (_, listener):
            clients = [PkNetwork(control_sockets=0) for _ in range(2)]
            answered = 0
            for client in clients:
                for _ in range(4):
                    stream = await client.connect(listener.address, StreamKind.CONTROL)
                    await stream.send(b"hello")
                    answered += await stream.recv() == b"hello"
            assert answered == 5
            for client in clients:
                await client.close()

    run(test)


# -- a peer or a connection that hangs -------------------------------------------------------------


def test_connects_to_a_peer_that_hangs_fail_together() -> None:
    """wire/socket_network N6: for all that wait for the same connection."""

    async def test() -> None:
        network = PkNetwork(connect_timeout_ms=400, control_sockets=0)
        with socket.socket() as peer:  # the kernel accepts for it, as for a stopped process
            peer.bind(("127.0.0.1", 0))
            peer.listen(64)
            address = f"127.0.0.1:{peer.getsockname()[1]}"
            asking = (network.connect(address, StreamKind.CONTROL) for _ in range(20))
            found = await asyncio.gather(*asking, return_exceptions=True)
            assert [str(each) for each in found] == ["no answer within 400 ms"] * 20
            peer.setblocking(False)
            peer.accept()[0].close()  # they dialled once
            with pytest.raises(BlockingIOError):
                peer.accept()
        await network.close()

    run(test)


def test_a_network_that_closes_ends_its_connects() -> None:
    async def test() -> None:
        network = PkNetwork(connect_timeout_ms=60_000, control_sockets=0)
        with socket.socket() as peer:
            peer.bind(("127.0.0.1", 0))
            peer.listen(1)
            address = f"127.0.0.1:{peer.getsockname()[1]}"
            asking = asyncio.ensure_future(network.connect(address, StreamKind.CONTROL))
            await asyncio.sleep(0.05)
            await network.close()
            with pytest.raises(Disconnected, match="the network was closed"):
                await asking

    run(test)


class _Proxy:
    """Forwards connections; what those of `swallowed` send is lost."""

    def __init__(self, listener: Listener) -> None:
        self._host, _, port = listener.address.rpartition(":")
        self._port = int(port)
        self.connections = 0
        self.swallowed: set[int] = set()
        self.address = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        behind, sink = await asyncio.open_connection(self._host, self._port)

        async def carry(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                if number not in self.swallowed:
                    to.write(data)
            to.close()

        await asyncio.gather(carry(reader, sink), carry(behind, writer), return_exceptions=True)


@asynccontextmanager
async def proxied(listener: Listener) -> AsyncIterator[_Proxy]:
    proxy = _Proxy(listener)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield proxy
    server.close()


def test_new_streams_leave_a_connection_that_hangs() -> None:
    """wire/shared_connection N18: its peer answers on others."""

    async def test() -> None:
        client = PkNetwork(connect_timeout_ms=300, control_sockets=0)
        async with serving(echo) as (_, listener), proxied(listener) as proxy:
            old = await client.connect(proxy.address, StreamKind.CONTROL)
            await old.send(b"x")
            assert await old.recv() == b"x"
            proxy.swallowed.add(0)
            lost = await client.connect(proxy.address, StreamKind.CONTROL)
            await lost.send(b"y")
            await asyncio.sleep(0.4)
            for _ in range(3):
                stream = await client.connect(proxy.address, StreamKind.CONTROL)
                await stream.send(b"z")
                assert await stream.recv() == b"z"
            assert proxy.connections == 2
            for each in (old, lost):
                each.close()
            await client.close()

    run(test)


def test_a_connection_on_which_streams_rest_takes_new_ones() -> None:
    """wire/shared_connection N18: silence before a stream began says nothing."""

    async def test() -> None:
        client = PkNetwork(connect_timeout_ms=100, control_sockets=0)
        async with serving(echo) as (_, listener), proxied(listener) as proxy:
            for _ in range(3):
                stream = await client.connect(proxy.address, StreamKind.CONTROL)
                await stream.send(b"x")
                assert await stream.recv() == b"x"
                await asyncio.sleep(0.2)
            assert proxy.connections == 1
            await client.close()

    run(test)
