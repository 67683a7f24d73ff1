"""The interfaces a node uses instead of the operating system: clock, network, randomness, ids.

World-generic code (◇ in docs/ARCHITECTURE.md) is ordinary `async` code over these protocols.  In
production they are implemented by asyncio, sockets, grpc and files; in the simulator by a
virtual-time event loop, a seeded network and a simulated disk.  The code that uses them is the
same.

A *stream* carries whole frames (pk.wire.frames) in order, both ways, with back-pressure: `send`
returns when the frame is accepted, not when it arrived.  Three kinds exist per pair of peers:
CONTROL (requests and replies with correlation ids, pushes), PRODUCE and FETCH (rules P3–P5).

Rules
  W1  A stream is FIFO each way.  Frames are lost only together with the stream (`Disconnected` on
      both ends).
  W2  Only the `rpc` shells and the simulator know the transport of a stream.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from pk.clock import Clock

Buffer = bytes | bytearray | memoryview


class StreamKind(enum.StrEnum):
    """The service of the peer that a stream uses."""

    CONTROL = "control"
    PRODUCE = "produce"
    FETCH = "fetch"


class Disconnected(ConnectionError):
    """The stream has ended; whether the last frames arrived is unknown."""


class Stream(Protocol):
    """One bidirectional, ordered, flow-controlled sequence of frames."""

    @property
    def peer(self) -> str: ...

    async def send(self, *pieces: Buffer) -> None:
        """Send a frame, whole or in pieces; waits while the peer's window is full.

        The pieces must not change afterwards.  Raises `Disconnected`.
        """
        ...

    async def recv(self) -> bytes | memoryview | None:
        """Return the next frame; None when the peer finished cleanly.  Raises `Disconnected`."""
        ...

    def admit(self, known: bool) -> None:
        """Note that the server accepted the peer's hello; `known`: an authenticated broker or
        controller (rule L17).

        Raises `ThrottledError` if there is no room for the peer.
        """
        ...

    def close(self) -> None:
        """Finish both directions; idempotent, never raises."""
        ...


StreamHandler = Callable[[StreamKind, Stream], Awaitable[None]]


class Listener(Protocol):
    """A bound address that serves streams."""

    @property
    def address(self) -> str:
        """`HOST:PORT` (the real port where 0 was asked for) or `unix:PATH`."""
        ...

    async def close(self, grace_ms: int) -> None: ...


class Network(Protocol):
    """The only access to other nodes (`Channel` in docs/ARCHITECTURE.md)."""

    async def connect(self, address: str, kind: StreamKind) -> Stream:
        """Open a stream.  Raises `Disconnected` if the peer cannot be reached."""
        ...

    async def listen(self, address: str, handler: StreamHandler) -> Listener:
        """Serve streams; `handler` runs once per accepted stream.

        Raises `OSError` if the address is taken.
        """
        ...


@dataclass(slots=True, frozen=True)
class World:
    """Everything that a node may use of its surroundings, except storage and object store."""

    clock: Clock
    network: Network
    rng: random.Random  #: seeded; for jitter and back-off only
    new_id: Callable[[], str]  #: a fresh uuid as text
