"""The real network: one port, plain sockets, and grpc.aio for peers of earlier builds (rule P3).

    connect(PRODUCE | FETCH) -> a connection of its own, opened by `PKS1 | kind`, then SocketStream
    connect(CONTROL)         -> the same, and beyond `CONTROL_SOCKETS` streams to one address a
                                part of a shared connection (pk.wire.shared_connection)

A listener looks at the first bytes of each connection.  It forwards an HTTP/2 connection, byte by
byte, to a grpc server behind it: peers of earlier builds and clients in other languages have their
control streams there.  A broker therefore has one address for everything, and a firewall needs one
rule.  docs/design/0003-transport.md says why few streams travel over grpc.

Rules
  N6  The listener closes a connection that sends no valid opening within `CONNECT_TIMEOUT_MS`, and
      an HTTP/2 connection that begins no stream within `STREAM_TIMEOUT_MS`, and a shared one that
      has had none for as long.  The listener answers the opening, so `connect` fails on a peer that
      is stopped or hangs, as it does over grpc.
  N7  The number of accepted connections is bounded: file descriptors must remain for the logs'
      files, and each connection needs a floor of the inbound budget (pk.wire.inbound).
      pk.wire.connection_quotas decides which connections are closed when there are more; no
      connection waits in the backlog behind a silent one.
  N12 A peer that closes a connection at the opening of a control stream may be of a build that
      takes control streams over grpc alone; it is asked over grpc.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from typing import Any

from pk import descriptors, errors, limits
from pk.clock import SystemClock
from pk.tasks import TaskRegistry, awaited
from pk.wire.addresses import (
    NotOpened,
    bind,
    dial,
    dial_named,
    private_address,
    read_exactly,
    tune,
    unlink_socket,
    why_not,
)
from pk.wire.connection_quotas import ConnectionQuotas, host_of
from pk.wire.dead_peers import DeadPeerDetector
from pk.wire.grpc_network import (
    CONNECT_TIMEOUT_MS,
    HANDLER_GRACE_S,
    GrpcNetwork,
    ReportError,
)
from pk.wire.inbound import CONNECTION_BYTES, MemoryPool
from pk.wire.memory import SCRATCH_BYTES, InboundMemory
from pk.wire.shared_connection import (
    PREFIX_BYTES,
    REFUSAL,
    ClientConnection,
    ServerConnection,
)
from pk.wire.socket_stream import SocketStream
from pk.wire.stream_quotas import StreamQuotas
from pk.world import Disconnected, Listener, Stream, StreamHandler, StreamKind

_MAGIC = b"PKS1"
_KINDS = {b"C": StreamKind.CONTROL, b"P": StreamKind.PRODUCE, b"F": StreamKind.FETCH}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
_SHARED = b"M"  # many control streams on one connection
_OPENING_BYTES = len(_MAGIC) + 1
_HTTP2 = b"PRI *"  # the first bytes of every HTTP/2 connection (RFC 9113 §3.4)
_SPLICE_BYTES = 64 * limits.KIB
#: After the process ran out of descriptors: the time in which no connection is accepted.
_ACCEPT_PAUSE_S = 0.2
#: Descriptors of the process per connection: a control connection takes three (`_hand_over`).
_DESCRIPTORS_PER_CONNECTION = 3
#: Control streams of a process to one address that have a connection each.  A process with hundreds
#: of group members must not take as many of the broker's connections.
CONTROL_SOCKETS = 16
#: N6
STREAM_TIMEOUT_MS = 5_000
#: The floors of all connections together may take one byte of this many of the budget.
_FLOORS_SHARE = 2


def connections_max(descriptor_limit: int) -> int:
    """Return how many connections a process with this limit of descriptors accepts (N7)."""
    share = int(descriptor_limit * descriptors.CONNECTIONS_SHARE)
    return max(1, min(limits.CONNECTIONS_MAX, share // _DESCRIPTORS_PER_CONNECTION))


def _connections_max(inbound_bytes_max: int | None = None) -> int:
    """Return how many connections the descriptors and the inbound budget allow (N7)."""
    found = connections_max(descriptors.limit())
    if inbound_bytes_max is not None:
        found = min(found, inbound_bytes_max // _FLOORS_SHARE // CONNECTION_BYTES)
    return max(1, found)


def inbound_memory(inbound_bytes_max: int, message_bytes_max: int) -> InboundMemory:
    """Return the budget of a server process; `message_bytes_max` is the topics' default maximum."""
    connections = _connections_max(inbound_bytes_max)
    frame_bytes_max = limits.frame_bytes_max(message_bytes_max)
    return InboundMemory(MemoryPool(inbound_bytes_max, connections, frame_bytes_max), SystemClock())


class PkNetwork:
    """`pk.world.Network` of a real process.  Belongs to the event loop it is first used on."""

    def __init__(
        self,
        on_error: ReportError | None = None,
        *,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        memory: InboundMemory | None = None,
        control_sockets: int = CONTROL_SOCKETS,
    ) -> None:
        self._on_error = on_error
        self._connect_timeout_ms = connect_timeout_ms
        self._memory = memory
        self._control_sockets = control_sockets
        self._control_streams: Counter[str] = Counter()  #: that have a connection, by address
        self._shared: dict[str, list[ClientConnection]] = {}
        #: One for each shared connection, and for each that is being opened, by its address.
        self._tasks = TaskRegistry()
        self._grpc = GrpcNetwork(
            on_error,
            connect_timeout_ms=connect_timeout_ms,
            request_bytes_max=limits.CONTROL_BYTES_MAX,
        )
        self._dead_peers = DeadPeerDetector()
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))

    async def connect(self, address: str, kind: StreamKind) -> Stream:
        """Open a stream.  Raises `Disconnected`, at once if no server listens there."""
        if kind is not StreamKind.CONTROL:
            return await self._open(address, kind)
        if self._control_streams[address] >= self._control_sockets:
            return await self._part(address)
        self._control_streams[address] += 1
        try:
            return await self._open(address, kind)
        except BaseException as cause:
            self._control_ended(address)
            if isinstance(cause, NotOpened):  # N12
                return await self._grpc.connect(address, kind)
            raise

    def _control_ended(self, address: str) -> None:
        self._control_streams[address] -= 1
        if not self._control_streams[address]:
            del self._control_streams[address]

    async def _part(self, address: str) -> Stream:
        """Open a control stream on a shared connection; opens a connection if all are full.

        One connection is opened at a time.  All that wait for it share its failure (N6).
        """
        while True:
            for connection in self._shared.get(address, ()):
                if (stream := connection.begin()) is not None:
                    return stream
            opening = self._tasks.get(address)
            if opening is None:
                opening = self._tasks.spawn(self._share(address), address)
            await asyncio.wait((opening,))  # which outlives those that wait for it
            why = (
                Disconnected("the network was closed") if opening.cancelled() else opening.result()
            )
            if isinstance(why, NotOpened):  # N12
                return await self._grpc.connect(address, StreamKind.CONTROL)
            if why is not None:
                raise Disconnected(str(why))

    async def _share(self, address: str) -> Disconnected | None:
        """Open a shared connection; return why there is none."""
        try:
            sock = await self._dialled(address, _SHARED)
        except Disconnected as why:
            return why
        carrier = SocketStream(
            sock, address, lambda: self._dead_peers.remove(carrier),
            memory=self._memory, scratch=self._scratch, carries=REFUSAL,
        )  # fmt: skip
        carrier.admit(known=True)
        self._dead_peers.add(carrier)
        closed = partial(self._unshared, address)
        connection = ClientConnection(carrier, closed, self._connect_timeout_ms)
        self._shared.setdefault(address, []).append(connection)
        self._tasks.spawn(connection.read())
        return None

    def _unshared(self, address: str, connection: ClientConnection) -> None:
        left = self._shared[address]
        left.remove(connection)
        if not left:
            del self._shared[address]

    async def _dialled(self, address: str, letter: bytes) -> socket.socket:
        """Return a connection that the peer has opened.  Raises `Disconnected`."""
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(self._connect_timeout_ms / 1000):
                sock = await dial(address)
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(sock, _MAGIC + letter)
                answer = await read_exactly(sock, len(_MAGIC))
            if answer != _MAGIC:
                raise Disconnected(f"{address} does not speak pk's protocol")
        except BaseException as cause:
            if sock is not None:
                sock.close()
            if isinstance(cause, TimeoutError):
                why = f"no answer within {self._connect_timeout_ms} ms"
                raise Disconnected(why) from cause
            if isinstance(cause, OSError | ValueError) and not isinstance(cause, Disconnected):
                raise Disconnected(why_not(cause)) from cause
            raise
        return sock

    async def _open(self, address: str, kind: StreamKind) -> Stream:
        """Open a stream that has a connection of its own."""
        sock = await self._dialled(address, _LETTERS[kind])

        def finished() -> None:
            self._dead_peers.remove(stream)
            if kind is StreamKind.CONTROL:
                self._control_ended(address)

        stream = SocketStream(sock, address, finished, memory=self._memory, scratch=self._scratch)
        stream.admit(known=True)  # a server dials only registered brokers
        self._dead_peers.add(stream)
        return stream

    async def listen(self, address: str, handler: StreamHandler) -> Listener:
        """Serve streams.  Raises `OSError` with the cause if the address cannot be bound."""
        listener = _PkListener(handler, self._on_error, self._memory, self._scratch)
        await listener.start(address, self._grpc)
        return listener

    async def close(self) -> None:
        """Close the network; open streams break."""
        for stream in list(self._dead_peers.streams):
            stream.abort("the network was closed")
        # a connection whose streams are full and not read does not notice its end by itself
        await self._tasks.wait(HANDLER_GRACE_S)
        await self._tasks.close()
        await self._grpc.close()


class _Connection:
    """One accepted connection."""

    __slots__ = ("began", "peer", "sock", "stream", "task")

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.sock = sock
        self.peer = peer
        self.task: asyncio.Task[None] | None = None
        self.stream: SocketStream | None = None
        self.began = False  #: whether a control stream began on it

    def close(self, why: str) -> None:
        """Close the socket; the connection's task then ends."""
        if self.stream is not None:
            self.stream.abort(why)
        elif self.task is not None:
            self.task.cancel()


class _PkListener:
    def __init__(
        self,
        handler: StreamHandler,
        on_error: ReportError | None,
        memory: InboundMemory | None,
        scratch: memoryview,
    ) -> None:
        self._handler = handler
        self._on_error = on_error
        self._memory = memory
        self._scratch = scratch
        self._loop = asyncio.get_running_loop()
        self._sock: socket.socket | None = None
        self._address = ""
        self._behind: Listener | None = None  # grpc's own address, for this process alone
        self._accepting = TaskRegistry()
        self._dead_peers = DeadPeerDetector()
        self._tasks = TaskRegistry()  # one task per accepted connection
        # control connections, by grpc's name for their peers
        self._carried: dict[str, _Connection] = {}
        self._streams: StreamQuotas[Stream, object] = StreamQuotas()  # wire/stream_quotas N15
        bytes_max = None if memory is None else memory.budget.bytes_max
        self._quotas: ConnectionQuotas[_Connection] = ConnectionQuotas(
            _connections_max(bytes_max)
        )  # N7

    @property
    def address(self) -> str:
        return self._address

    async def start(self, address: str, control: GrpcNetwork) -> None:
        self._sock = bind(address)
        try:
            self._address = address
            if not address.startswith("unix:"):
                port = self._sock.getsockname()[1]
                self._address = f"{address.rpartition(':')[0]}:{port}"
            self._behind = await control.listen(private_address(), self._handler, self)
        except BaseException:
            self._sock.close()
            raise
        self._accepting.spawn(self._accept(self._sock))

    # -- grpc_network.Front ------------------------------------------------------------------------

    def peer_of(self, peer: str) -> str:
        """Return the peer's public address."""
        connection = self._carried.get(peer)
        return peer if connection is None else connection.peer

    def began(self, peer: str, stream: Stream) -> bool:
        """Note that a control stream began on the connection; return whether it may stay."""
        if (connection := self._carried.get(peer)) is not None:
            connection.began = True
        loser = self._streams.begin(stream, connection)
        if loser is not None and loser is not stream:
            loser.close()
        return loser is not stream

    def heard(self, stream: Stream) -> None:
        """Note that something arrived on a stream."""
        self._streams.hear(stream)

    def ended(self, stream: Stream) -> None:
        """Note that a stream ended."""
        self._streams.end(stream)

    def admit(self, peer: str, known: bool) -> None:
        """Admit a connection, whose control stream sent a valid hello.  Raises `ThrottledError`."""
        if (connection := self._carried.get(peer)) is not None:
            self._admit(connection, known)

    # -- connections -------------------------------------------------------------------------------

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                sock, where = await self._loop.sock_accept(listening)
            except asyncio.CancelledError:
                raise
            except OSError as cause:
                if self._on_error is not None:  # out of descriptors or memory: this may pass
                    self._on_error(f"accepting on {self._address}", cause)
                waiting = self._loop.create_future()
                self._loop.call_later(_ACCEPT_PAUSE_S, waiting.cancel)
                await asyncio.wait((waiting,))
                continue
            peer = f"{where[0]}:{where[1]}" if isinstance(where, tuple) else self._address
            connection = _Connection(sock, peer)
            for other in self._quotas.arrive(connection, host_of(peer)):
                other.close("a newer connection took its place before it said hello")
                if other is connection:
                    sock.close()
                    break
            else:
                task = connection.task = self._tasks.spawn(self._serve(connection))
                task.add_done_callback(partial(self._done, connection))

    def _done(self, connection: _Connection, _: asyncio.Task[None]) -> None:
        if connection.stream is None:  # a stream closes its socket itself
            connection.sock.close()
        self._quotas.leave(connection)

    def _admit(self, connection: _Connection, known: bool) -> None:
        """Admit the connection.  Raises `ThrottledError` if the clients' share is used up."""
        # a Unix socket: its file's permissions say who may connect
        local = not host_of(connection.peer)
        if why := self._quotas.admit(connection, known or local):
            raise errors.ThrottledError(f"{self._address} takes no more connections: {why}")

    async def _serve(self, connection: _Connection) -> None:
        """Serve one connection until its handler ends."""
        sock = connection.sock
        try:
            tune(sock)
            async with asyncio.timeout(CONNECT_TIMEOUT_MS / 1000):  # N6
                opening = await read_exactly(sock, _OPENING_BYTES)
                kind = _kind_of(opening)
                if kind is not None or opening == _MAGIC + _SHARED:
                    await self._loop.sock_sendall(sock, _MAGIC)
        except (OSError, TimeoutError):
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        if opening == _HTTP2:
            await self._hand_over(connection, opening)
        elif kind is not None:
            await self._run(kind, connection)
        elif opening == _MAGIC + _SHARED:
            await self._run_shared(connection)
        else:
            sock.close()  # not pk's protocol

    async def _run(self, kind: StreamKind, connection: _Connection) -> None:
        most = limits.CONTROL_BYTES_MAX if kind is StreamKind.CONTROL else None
        await self._handled(kind, self._stream(connection, most))

    def _stream(
        self, connection: _Connection, frame_bytes_max: int | None, carries: bytes = b""
    ) -> SocketStream:
        """Return the stream over a connection that was opened."""
        stream = connection.stream = SocketStream(
            connection.sock,
            connection.peer,
            lambda: self._dead_peers.remove(stream),
            memory=self._memory,
            scratch=self._scratch,
            admitted=lambda known: self._admit(connection, known),
            frame_bytes_max=frame_bytes_max,
            carries=carries,
        )
        self._dead_peers.add(stream)
        return stream

    async def _handled(self, kind: StreamKind, stream: Stream) -> None:
        try:
            await self._handler(kind, stream)
        except Disconnected:
            pass
        except Exception as bug:
            if self._on_error is not None:
                self._on_error(f"serving a {kind.value} stream of {stream.peer}", bug)
        finally:
            stream.close()

    async def _run_shared(self, connection: _Connection) -> None:
        """Serve a connection that control streams share."""
        carrier = self._stream(connection, PREFIX_BYTES + limits.CONTROL_BYTES_MAX, REFUSAL)
        silent: list[asyncio.TimerHandle] = []

        def begun() -> None:
            while silent:
                silent.pop().cancel()

        def idle() -> None:
            begun()
            ms = STREAM_TIMEOUT_MS
            silent.append(self._loop.call_later(ms / 1000, self._silent, connection))

        async def serve(stream: Stream) -> None:
            begun()
            await self._handled(StreamKind.CONTROL, stream)

        idle()
        try:
            await ServerConnection(carrier, serve, self._streams, idle).run(HANDLER_GRACE_S)
        finally:
            begun()

    async def _hand_over(self, connection: _Connection, opening: bytes) -> None:
        """Forward a control connection to grpc and back until either side ends."""
        assert self._behind is not None
        sock = connection.sock
        try:
            behind, name = await dial_named(self._behind.address)
        except OSError:
            sock.close()
            return
        self._carried[name] = connection
        silent = self._loop.call_later(STREAM_TIMEOUT_MS / 1000, self._silent, connection)
        ways: list[Coroutine[Any, Any, None]] = [_carry(sock, behind), _carry(behind, sock)]
        tasks = TaskRegistry(awaited)
        try:
            await self._loop.sock_sendall(behind, opening)
            carrying = [tasks.spawn(way) for way in ways]
            await asyncio.wait(carrying, return_when=asyncio.FIRST_COMPLETED)
        finally:
            silent.cancel()
            del self._carried[name]
            await tasks.close()
            sock.close()
            behind.close()

    def _silent(self, connection: _Connection) -> None:
        """Close a connection that has begun no stream (N6)."""
        if not connection.began:
            connection.close("it began no stream")

    async def close(self, grace_ms: int) -> None:
        """Accept no more connections, wait `grace_ms` for open streams, then break them."""
        assert self._sock is not None
        assert self._behind is not None
        await self._accepting.close()
        self._sock.close()
        if self._address.startswith("unix:"):
            unlink_socket(self._address.removeprefix("unix:"))
        closing = TaskRegistry()
        control = closing.spawn(self._behind.close(grace_ms))
        # without tasks, the streams only wait for their peers' ends
        if self._dead_peers.streams and self._tasks:
            await self._tasks.wait(grace_ms / 1000)
        for stream in list(self._dead_peers.streams):
            stream.abort("the server shuts down")
        await control
        await self._tasks.wait(HANDLER_GRACE_S)  # the handlers get the break from recv or send
        await self._tasks.close()


def _kind_of(opening: bytes) -> StreamKind | None:
    return _KINDS.get(opening[len(_MAGIC) :]) if opening.startswith(_MAGIC) else None


async def _carry(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    try:
        while data := await loop.sock_recv(source, _SPLICE_BYTES):
            await loop.sock_sendall(sink, data)
    except OSError:
        pass
