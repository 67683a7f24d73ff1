"""What a node is handed instead of the operating system: clock, network, randomness, ids.

World-generic code (◇ in docs/ARCHITECTURE.md) is ordinary `async` code over these protocols.  In
production they are asyncio, sockets, grpc and files; in the simulator a virtual-time event loop, a
seeded network and a simulated disk, and the code between is the same file.

A *stream* carries whole frames (pk.wire.frames) in order, both ways, with back-pressure: `send`
returns when the frame is accepted, not when it arrived.  Three kinds exist per pair of peers:
CONTROL (requests and replies with correlation ids, pushes), PRODUCE and FETCH (rules P3–P5).  Rules
  W1  a stream is FIFO each way; frames are lost only together with the stream (`Disconnected` on
      both ends).
  W2  nobody outside the `rpc` shells and the simulator knows what carries a stream.
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
    """Which service of the peer a stream speaks to."""

    CONTROL = "control"
    PRODUCE = "produce"
    FETCH = "fetch"


class Disconnected(ConnectionError):
    """The stream is gone; whether the last frames arrived is unknown."""


class Stream(Protocol):
    """One bidirectional, ordered, flow-controlled sequence of frames."""

    @property
    def peer(self) -> str: ...

    async def send(self, *pieces: Buffer) -> None:
        """Hand a frame over, whole or in pieces; waits while the peer's window is full.

        The pieces must not change afterwards.  Raises `Disconnected`.
        """
        ...

    async def recv(self) -> bytes | memoryview | None:
        """The next frame; None when the peer finished cleanly.  Raises `Disconnected`."""
        ...

    def admit(self, known: bool) -> None:
        """The server accepted the peer's hello; `known`: a proven broker or controller (rule L17).

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
    """The only door to other nodes (`Channel` in docs/ARCHITECTURE.md)."""

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
    """Everything a node may touch of its surroundings, storage and object store aside."""

    clock: Clock
    network: Network
    rng: random.Random  #: seeded; jitter and back-off only
    new_id: Callable[[], str]  #: a fresh uuid as text
