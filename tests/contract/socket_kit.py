"""Shared parts of the tests of the socket transport: raw connections, listeners, handlers."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from pk import errors, event_loops
from pk.wire.memory import InboundMemory
from pk.wire.socket_network import PkNetwork
from pk.world import Listener, Stream, StreamHandler, StreamKind

PATIENCE_S = 20
END = b"\xff\xff\xff\xff"


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    event_loops.run(main())


def framed(frame: bytes) -> bytes:
    return struct.pack("<I", len(frame)) + frame


async def answer_to(listener: Listener, said: bytes) -> bytes | None:
    """Return what a listener answers before it closes; None = it closed with unread bytes."""
    loop = asyncio.get_running_loop()
    with dialled(listener) as stranger:
        await loop.sock_sendall(stranger, said)
        try:
            return await loop.sock_recv(stranger, 100)
        except ConnectionResetError:
            return None


def dialled(listener: Listener) -> socket.socket:
    host, _, port = listener.address.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setblocking(False)
    return sock


@asynccontextmanager
async def serving(
    handler: StreamHandler, memory: InboundMemory | None = None
) -> AsyncIterator[tuple[PkNetwork, Listener]]:
    """Yield a network and its listener, which are closed however the test ends.

    A grpc server that is collected after its loop was closed reports an error of its own, which
    hides why the test failed.
    """
    network = PkNetwork(memory=memory)
    listener = await network.listen("127.0.0.1:0", handler)
    try:
        yield network, listener
    finally:
        await listener.close(500)
        await network.close()


async def greet(_kind: StreamKind, stream: Stream) -> None:
    """Handle a stream as a server: any frame is a hello; a frame `known` makes the peer a proven
    one.
    """
    hello = await stream.recv()
    if hello is None:
        return
    try:
        stream.admit(bytes(hello) == b"known")
        await stream.send(b"welcome")
    except errors.ThrottledError as refusal:
        await stream.send(refusal.message.encode())
        return
    await echo(_kind, stream)


async def say(network: PkNetwork, listener: Listener, kind: StreamKind, said: bytes) -> Stream:
    stream = await network.connect(listener.address, kind)
    await stream.send(said)
    return stream


async def echo(_kind: StreamKind, stream: Stream) -> None:
    """Handle a stream by sending back what arrives."""
    while (frame := await stream.recv()) is not None:
        await stream.send(frame)
