"""Rule L17 on real sockets: a listener keeps the budget of inbound frames."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest

from pk import errors, limits
from pk.clock import SystemClock
from pk.wire.frames import decode, raise_error
from pk.wire.inbound import CONNECTION_BYTES, FLOOR_BYTES, MemoryPool
from pk.wire.memory import InboundMemory
from pk.wire.socket_network import PkNetwork
from pk.world import Listener, Stream, StreamKind
from tests.contract.socket_kit import END, dialled, framed, run, say, serving


def budget(pool: int, frame_bytes_max: int = limits.MIB) -> InboundMemory:
    """Return a budget of `pool` bytes for 100 connections."""
    inbound = MemoryPool(pool + 100 * CONNECTION_BYTES, 100, frame_bytes_max)
    return InboundMemory(inbound, SystemClock())


async def _keep(_kind: StreamKind, stream: Stream) -> None:
    """Handle a stream: release each frame before asking for the next."""
    if await stream.recv() is not None:
        stream.admit(False)
        await stream.send(b"welcome")
    while (frame := await stream.recv()) is not None:
        size = len(frame)
        del frame
        await stream.send(b"%d" % size)


async def greeted(listener: Listener) -> socket.socket:
    """Return a raw connection that was admitted."""
    loop, sock = asyncio.get_running_loop(), dialled(listener)
    await loop.sock_sendall(sock, b"PKS1P" + framed(b"hello"))
    wanted = b"PKS1" + framed(b"welcome")
    assert await exactly(sock, len(wanted)) == wanted
    return sock


async def exactly(sock: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = await asyncio.get_running_loop().sock_recv(sock, size - len(got))
        assert more
        got += more
    return got


async def refusal_of(sock: socket.socket) -> errors.PkError:
    """Return the error in a server's last frame, which is followed by the end."""
    (size,) = struct.unpack("<I", await exactly(sock, 4))
    head = decode(await exactly(sock, size)).head
    assert await exactly(sock, 4) == END
    return raise_error(head.error)


def test_memory_is_taken_as_bytes_arrive_and_given_back() -> None:
    # rule L17

    async def test() -> None:
        memory = budget(64 * limits.MIB, limits.WIRE_FRAME_BYTES_MAX)
        async with serving(_keep, memory) as (_, listener):
            loop, sock = asyncio.get_running_loop(), await greeted(listener)
            size = 24 * limits.MIB + 7
            await loop.sock_sendall(sock, struct.pack("<I", size) + bytes(100_000))
            while memory.budget.held < 100_000 - FLOOR_BYTES:
                await asyncio.sleep(0.001)
            assert memory.budget.held == 100_000 - FLOOR_BYTES
            await loop.sock_sendall(sock, bytes(size - 100_000))
            answer = framed(b"%d" % size)
            assert await exactly(sock, len(answer)) == answer
            await loop.sock_sendall(sock, framed(b"short") * 1_000)
            await exactly(sock, len(framed(b"5")) * 1_000)
            memory.turn()
            assert memory.budget.held == 0
            (account,) = memory._readers
            assert account.held == 0
            sock.close()

    run(test)


@pytest.mark.parametrize("size", [limits.MIB + 1, limits.WIRE_FRAME_BYTES_MAX])
def test_a_frame_beyond_the_bound_is_refused_by_name(size: int) -> None:
    """wire/socket_stream N4, L17: the rest of the frame is dropped, so that the peer can read the
    reason.
    """

    async def test() -> None:
        memory = budget(64 * limits.MIB)
        async with serving(_keep, memory) as (_, listener):
            loop, sock = asyncio.get_running_loop(), await greeted(listener)
            await loop.sock_sendall(sock, struct.pack("<I", size) + bytes(8 * limits.MIB))
            refusal = await refusal_of(sock)
            assert isinstance(refusal, errors.RecordTooLarge)
            assert str(size) in refusal.message
            sock.close()

    run(test)


def test_a_large_frame_comes_after_the_hello() -> None:
    """L17: a peer that has not sent its hello takes no memory."""

    async def test() -> None:
        async with serving(_keep, budget(64 * limits.MIB)) as (_, listener):
            loop = asyncio.get_running_loop()
            with dialled(listener) as sock:
                await loop.sock_sendall(sock, b"PKS1P" + struct.pack("<I", 100_000))
                assert await exactly(sock, 4) == b"PKS1"
                refusal = await refusal_of(sock)
                assert "before a hello" in refusal.message

    run(test)


def test_half_received_frames_are_closed_when_another_needs_their_memory(
    monkeypatch: Any,
) -> None:
    """L17, wire/inbound M4: they are closed with ThrottledError, and only then; meanwhile short
    frames pass.
    """
    monkeypatch.setattr("pk.wire.memory.LOOK_MS", 10)
    monkeypatch.setattr("pk.wire.inbound.STALL_MS", 100)

    async def test() -> None:
        memory = budget(4 * limits.MIB)
        async with serving(_keep, memory) as (_, listener):
            loop = asyncio.get_running_loop()
            half = [await greeted(listener) for _ in range(20)]
            for sock in half:
                await loop.sock_sendall(sock, struct.pack("<I", limits.MIB) + bytes(500_000))
            while not memory.budget.contended:
                await asyncio.sleep(0.001)
            neighbour = await greeted(listener)
            for size in (5, 5_000, limits.MIB):
                await loop.sock_sendall(neighbour, framed(bytes(size)))
                answer = framed(b"%d" % size)
                assert await exactly(neighbour, len(answer)) == answer
            assert memory.refused
            assert isinstance(await refusal_of(half[0]), errors.ThrottledError)
            for sock in (*half, neighbour):
                sock.close()

    run(test)


def test_a_proven_peer_needs_no_room() -> None:
    """L17, wire/inbound M3: its frames pass although the pool is used up."""

    async def serve(_kind: StreamKind, stream: Stream) -> None:
        if (hello := await stream.recv()) is not None:
            stream.admit(bytes(hello) == b"known")
            await stream.send(b"welcome")
        held = []
        while (frame := await stream.recv()) is not None:
            held.append(frame)  # for ever
            await stream.send(b"%d" % len(frame))

    async def test() -> None:
        memory = budget(2 * limits.MIB)
        async with serving(serve, memory) as (network, listener):
            client = PkNetwork()
            stream = await say(client, listener, StreamKind.FETCH, b"hello")
            assert await stream.recv() == b"welcome"
            for _ in range(3):
                await stream.send(bytes(limits.MIB))
            while not memory.budget.contended:
                await asyncio.sleep(0.001)
            broker = await say(client, listener, StreamKind.FETCH, b"known")
            assert await broker.recv() == b"welcome"
            for _ in range(5):
                await broker.send(bytes(limits.MIB))
                assert await broker.recv() == b"%d" % limits.MIB
            assert memory.budget.reserved == 5 * limits.MIB
            assert memory.budget.pooled <= memory.budget.pool_bytes
            stream.close()
            broker.close()
            await client.close()
            assert network is not client

    run(test)
