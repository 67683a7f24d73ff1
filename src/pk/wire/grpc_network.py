"""Streams of frames over grpc.aio, as raw bytes (rules P3, world W1); control streams use it.

There is one generic service, `/pk.Stream/{control,produce,fetch}`.  A message is one frame, or
several small frames that were queued together.  No serializer touches a payload.  Each stream has
two pumps, tasks that live as long as the stream: a reader at most a window ahead of `recv`, and a
writer behind a bounded queue.  Therefore `send` and `recv` may be cancelled: a deadline around a
call does not harm the stream that it shares with others.  Any number of tasks may send.  A broken
connection is noticed at once, even while no task reads (rule R7).

Rules
  N1  A message is normally one frame, unchanged.  Three kinds of frames are packed as `mark |
      (u32le length | frame)*`: an empty frame, a frame that starts with the pack mark, and small
      frames that queue up behind a write.
  N2  The end of a stream is explicit: an empty message from the client, status OK from the server.
      Any other end is a break, and the other side gets `Disconnected`.
  N3  Read-ahead and the send queue are bounded in bytes and in frames; beyond them `send` waits.
  N4  A channel lives while it has streams.  A failed channel is dropped, so that the next `connect`
      tries at once instead of waiting for grpc's own back-off.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # breaks are reported as `Disconnected`, once
# grpc's fork handlers kill about one child in four that is forked with a `preexec_fn` while a
# channel is open, before it can exec: a Spark session started beside a pk client does just that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

import grpc
import grpc.aio

from pk import limits
from pk.tasks import TaskRegistry
from pk.wire.waiters import Waiters, wait_in, wake_all
from pk.world import Buffer, Disconnected, Listener, Stream, StreamHandler, StreamKind

ReportError = Callable[
    [str, BaseException], None
]  #: where a handler's unexpected exception is reported

SERVICE = "pk.Stream"
CONNECT_TIMEOUT_MS = 3_000
CLOSE_TIMEOUT_MS = 2_000
KEEPALIVE_MS = 5_000
#: After a listener closed: the time in which its handlers may end before they are cancelled.
HANDLER_GRACE_S = 1.0

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]
_MARK = b"\xff\xff\xff\xff"
_LENGTH = struct.Struct("<I")
#: Frames up to this size are packed together when they queue up (N1).
PACK_FRAME_BYTES = 16 * limits.KIB
PACK_BYTES = 64 * limits.KIB
#: N3: `send` waits while more than this is queued; the reader stays at most this much ahead.
WINDOW_BYTES = limits.MIB
WINDOW_FRAMES = 256

_COMMON: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", limits.WIRE_FRAME_BYTES_MAX),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.lookahead_bytes", 8 * limits.MIB),
    ("grpc.http2.max_frame_size", 4 * limits.MIB),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.enable_http_proxy", 0),
)
CLIENT_OPTIONS = (
    *_COMMON,
    ("grpc.max_receive_message_length", limits.WIRE_FRAME_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)
SERVER_OPTIONS = (
    *_COMMON,
    ("grpc.so_reuseport", 0),  # with the default 1, two brokers could bind one port
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 5),
    ("grpc.max_concurrent_streams", limits.CONTROL_STREAMS_MAX),
)


def _pack(frames: list[bytes]) -> bytes:
    pieces = [_MARK]
    for frame in frames:
        pieces.append(_LENGTH.pack(len(frame)))
        pieces.append(frame)
    return b"".join(pieces)


def _unpack(message: bytes) -> list[bytes]:
    """Return the frames of a packed message.

    Raises `Disconnected` for a wrong packing; the stream to such a peer is broken.
    """
    frames: list[bytes] = []
    at, size = len(_MARK), len(message)
    while at < size:
        if size - at < _LENGTH.size:
            raise Disconnected("the peer sent a malformed message")
        (length,) = _LENGTH.unpack_from(message, at)
        at += _LENGTH.size
        if length > size - at:
            raise Disconnected("the peer sent a malformed message")
        frames.append(message[at : at + length])
        at += length
    return frames


class _GrpcStream:
    """The common part of both ends: two queues, two pumps, the state `open → finished | broken`."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._outbox: deque[bytes] = deque()
        self._outbox_bytes = 0
        # how the other side ended: "" clean, text = why the stream broke
        self._end: str | None = None
        self._closed = False  # this side called close()
        self._readable: Waiters = deque()  # tasks that wait in recv
        # the read pump, when it waits because it is a window ahead
        self._drained: asyncio.Future[None] | None = None
        self._to_write: asyncio.Future[None] | None = None  # the write pump, when it is idle
        self._writable: Waiters = deque()  # tasks that wait in send
        self._tasks = TaskRegistry()
        self._pumps: list[asyncio.Task[None]] = []

    # -- the transport: what the two ends do differently -------------------------------------------

    async def _read_message(self) -> bytes:
        """Return the next message; raise `Disconnected` on a break, `EOFError` at the clean end."""
        raise NotImplementedError

    async def _write_message(self, message: bytes) -> None:
        raise NotImplementedError

    # -- the Stream protocol -----------------------------------------------------------------------

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, *pieces: Buffer) -> None:
        """Queue a frame; wait while the window is full.  Raises `Disconnected`."""
        first = pieces[0]
        frame = first if len(pieces) == 1 and isinstance(first, bytes) else b"".join(pieces)
        while self._outbox_bytes >= WINDOW_BYTES or len(self._outbox) >= WINDOW_FRAMES:
            self._check_open()
            await wait_in(self._writable)
        self._check_open()
        self._outbox.append(frame)
        self._outbox_bytes += len(frame)
        _wake(self._to_write)

    async def recv(self) -> bytes | None:
        """Return the next frame, None at the clean end.  Raises `Disconnected`."""
        while not self._inbox:
            if self._closed:
                return None
            if self._end is not None:
                if self._end:
                    raise Disconnected(self._end)
                return None
            await wait_in(self._readable)
        frame = self._inbox.popleft()
        self._inbox_bytes -= len(frame)
        _wake(self._drained)
        return frame

    def admit(self, known: bool) -> None:
        """Do nothing: this end of a stream has no quota for the peer."""

    def close(self) -> None:
        """Finish both directions: frames that were sent are delivered, unread ones are dropped."""
        if self._closed:
            return
        self._closed = True
        self._inbox.clear()
        self._inbox_bytes = 0
        self._wake_all()
        self._loop.call_later(CLOSE_TIMEOUT_MS / 1000, self._abandon)

    # -- inside ------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise Disconnected("the stream was closed")
        if self._end is not None:
            raise Disconnected(self._end or "the peer finished")

    def _wake_all(self) -> None:
        _wake(self._drained)
        _wake(self._to_write)
        wake_all(self._readable)
        wake_all(self._writable)

    def _ended(self, why: str) -> None:
        """Record that the other side broke (`why`) or finished ('')."""
        if self._end is None:
            self._end = why
            if why:
                self._outbox.clear()
                self._outbox_bytes = 0
            self._wake_all()

    def _start_pumps(self) -> None:
        self._pumps = [
            self._tasks.spawn(self._pump_in()),
            self._tasks.spawn(self._pump_out()),
        ]

    def _abandon(self) -> None:
        """Give up a closed stream whose peer does not read the rest or does not end its side."""
        for pump in self._pumps:
            pump.cancel()

    async def _pump_in(self) -> None:
        try:
            while True:
                while self._inbox_bytes >= WINDOW_BYTES or len(self._inbox) >= WINDOW_FRAMES:
                    self._drained = self._loop.create_future()
                    await self._drained
                message = await self._read_message()
                if self._closed:
                    continue  # read on: the peer's end must be seen
                if message.startswith(_MARK):
                    self._inbox.extend(frames := _unpack(message))
                    self._inbox_bytes += sum(map(len, frames))
                else:
                    self._inbox.append(message)
                    self._inbox_bytes += len(message)
                wake_all(self._readable)
        except EOFError:
            self._ended("")
        except Disconnected as cause:
            self._ended(str(cause) or "the connection broke")
        except Exception as cause:  # grpc's usage errors after the end of a call
            self._ended(f"the connection broke: {cause!r}")

    async def _pump_out(self) -> None:
        try:
            while True:
                while not self._outbox:
                    if self._closed or self._end:
                        return
                    self._to_write = self._loop.create_future()
                    await self._to_write
                message = self._next_message()
                if self._outbox_bytes < WINDOW_BYTES:
                    wake_all(self._writable)
                await self._write_message(message)
        except Disconnected as cause:
            self._ended(str(cause) or "the connection broke")
        except Exception as cause:
            self._ended(f"the connection broke: {cause!r}")

    def _next_message(self) -> bytes:
        frame = self._outbox.popleft()
        self._outbox_bytes -= len(frame)
        small = len(frame) <= PACK_FRAME_BYTES
        if not (small and self._outbox) and frame and not frame.startswith(_MARK):
            return frame
        together, total = [frame], len(frame)
        while (
            small
            and self._outbox
            and len(self._outbox[0]) <= PACK_FRAME_BYTES
            and total < PACK_BYTES
        ):
            frame = self._outbox.popleft()
            self._outbox_bytes -= len(frame)
            together.append(frame)
            total += len(frame)
        return _pack(together)


def _wake(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


# -- the client's end --------------------------------------------------------------------------


class _Channel:
    """One grpc channel and how many streams use it (N4)."""

    def __init__(self, target: str) -> None:
        self.grpc = grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
        self.streams = 0


def _why(error: grpc.RpcError) -> str:
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else None
    text = (error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)) or ""
    name = code.name.lower().replace("_", " ") if code is not None else "broken"
    return f"{name}: {text}"[:300]


class _ClientStream(_GrpcStream):
    def __init__(self, peer: str, call: Any, released: Callable[[bool], None]) -> None:
        super().__init__(peer)
        self._call = call
        self._released = released

    async def _read_message(self) -> bytes:
        try:
            message = await self._call.read()
        except grpc.RpcError as cause:
            raise Disconnected(_why(cause)) from cause
        if message is _EOF:
            code = await self._call.code()
            if code == grpc.StatusCode.OK:
                raise EOFError
            raise Disconnected(f"{code.name.lower()}: {await self._call.details()}")
        raw: bytes = message
        return raw

    async def _write_message(self, message: bytes) -> None:
        try:
            await self._call.write(message)
        except (grpc.RpcError, asyncio.InvalidStateError) as cause:
            why = _why(cause) if isinstance(cause, grpc.RpcError) else "the peer finished"
            raise Disconnected(why) from cause

    async def _finish(self) -> None:
        await self._write_message(b"")
        await self._call.done_writing()

    def start(self) -> None:
        self._start_pumps()
        self._tasks.spawn(self._run())

    async def _run(self) -> None:
        """After `close`: flush, send the end, wait for the peer's end.  Then, or at a break,
        release all.
        """
        reader, writer = self._pumps
        try:
            await asyncio.wait((writer,))  # closed and flushed, or broken, or abandoned
            if self._end is None and not writer.cancelled():
                await self._finish()
                await asyncio.wait((reader,))
        except (Disconnected, asyncio.InvalidStateError):
            pass
        finally:
            broken = bool(self._end) or reader.cancelled() or writer.cancelled()
            self._ended("the stream was closed")
            self._call.cancel()
            self._abandon()
            self._released(broken)


class GrpcNetwork:
    """`pk.world.Network` over grpc.  Belongs to the event loop it is first used on."""

    def __init__(
        self,
        on_error: ReportError | None = None,
        *,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        request_bytes_max: int = limits.WIRE_FRAME_BYTES_MAX,
    ) -> None:
        self._on_error = on_error
        self._connect_timeout_ms = connect_timeout_ms
        self._request_bytes_max = request_bytes_max
        self._channels: dict[tuple[str, bool], _Channel] = {}
        self._closing = TaskRegistry()

    async def connect(self, address: str, kind: StreamKind) -> Stream:
        """Open a stream; each peer has two channels, control and data (P3).

        Raises `Disconnected`, at once if no server listens there.
        """
        key = (address, kind is StreamKind.CONTROL)
        channel = self._channels.get(key)
        if channel is None:
            channel = self._channels[key] = _Channel(address)
        channel.streams += 1
        method: Any = channel.grpc.stream_stream(f"/{SERVICE}/{kind.value}", None, None)
        call = method()
        try:
            async with asyncio.timeout(self._connect_timeout_ms / 1000):
                await call.wait_for_connection()
                # wait for the peer itself: its kernel accepts connections even when it hangs
                await call.initial_metadata()
                if call.done() and await call.code() != grpc.StatusCode.OK:
                    raise Disconnected(f"unavailable: {await call.details()}"[:300])
        except Disconnected:
            self._release(key, channel, broken=True)
            raise
        except asyncio.CancelledError:
            call.cancel()
            self._release(key, channel, broken=True)
            raise
        except (grpc.RpcError, TimeoutError) as cause:
            call.cancel()
            self._release(key, channel, broken=True)
            silent = f"no answer within {self._connect_timeout_ms} ms"
            why = _why(cause) if isinstance(cause, grpc.RpcError) else silent
            raise Disconnected(why) from cause
        stream = _ClientStream(address, call, lambda broken: self._release(key, channel, broken))
        stream.start()
        return stream

    def _release(self, key: tuple[str, bool], channel: _Channel, broken: bool) -> None:
        channel.streams -= 1
        if broken and self._channels.get(key) is channel:
            del self._channels[key]
        if channel.streams == 0:
            if self._channels.get(key) is channel:
                del self._channels[key]
            self._closing.spawn(channel.grpc.close(None))

    async def listen(
        self, address: str, handler: StreamHandler, front: Front | None = None
    ) -> Listener:
        """Serve streams.  Raises `OSError` with the cause if the address cannot be bound.

        `front`: the listener that forwards its connections to this server, if there is one.
        """
        listener = _GrpcListener(handler, self._on_error, self._request_bytes_max, front)
        await listener.start(address)
        return listener

    async def close(self) -> None:
        """Drop every channel; open streams break."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.grpc.close(None)
        await self._closing.wait()


# -- the server's end --------------------------------------------------------------------------


class Front(Protocol):
    """A listener that forwards connections here; `peer` is grpc's name for a connection."""

    def peer_of(self, peer: str) -> str:
        """Return the peer's public address."""

    def began(self, peer: str, stream: Stream) -> bool:
        """Note that a stream began on the connection; return whether it may stay."""

    def heard(self, stream: Stream) -> None:
        """Note that something arrived on a stream."""

    def ended(self, stream: Stream) -> None:
        """Note that a stream ended."""

    def admit(self, peer: str, known: bool) -> None:
        """Note that a hello on the connection was accepted.  Raises `ThrottledError`."""


class _ServerStream(_GrpcStream):
    def __init__(self, context: Any, front: Front | None) -> None:
        peer = context.peer()
        super().__init__(front.peer_of(peer) if front is not None else peer)
        self._context = context
        self._front = front
        self._carried = peer
        #: The handler's task, which may outlive the call: it may wait for something else when the
        #: stream breaks, and sees the break at its next recv or send.

    async def _read_message(self) -> bytes:
        message = await self._context.read()
        if message is _EOF:
            raise Disconnected("the peer broke the connection")
        if self._front is not None:
            self._front.heard(self)
        if not message:
            raise EOFError
        raw: bytes = message
        return raw

    async def _write_message(self, message: bytes) -> None:
        await self._context.write(message)

    def admit(self, known: bool) -> None:
        """Admit the peer after its hello.  Raises `ThrottledError` if there is no room for it."""
        if self._front is not None:
            self._front.admit(self._carried, known)

    async def run(self, handler: Coroutine[Any, Any, None], handlers: TaskRegistry) -> None:
        """Drive the stream until its handler ends, flush what it sent, return status OK (N2)."""
        self._start_pumps()
        task = handlers.spawn(handler)
        _, writer = self._pumps
        try:
            await asyncio.wait((task, writer), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                self.close()
                await asyncio.wait((writer,))
        finally:  # also when grpc cancels this coroutine because the connection broke
            self._ended("the connection broke")
            self._abandon()


class _GrpcListener:
    def __init__(
        self,
        handler: StreamHandler,
        on_error: ReportError | None,
        request_bytes_max: int,
        front: Front | None,
    ) -> None:
        self._handler = handler
        self._on_error = on_error
        self._front = front
        limit = ("grpc.max_receive_message_length", request_bytes_max)
        self._server = grpc.aio.server(options=(*SERVER_OPTIONS, limit))
        self._handlers = TaskRegistry()
        self._address = ""
        methods = {
            kind.value: grpc.stream_stream_rpc_method_handler(self._serve(kind))
            for kind in StreamKind
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, methods),)
        )

    @property
    def address(self) -> str:
        return self._address

    async def start(self, address: str) -> None:
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as cause:
            raise _bind_error(address) from cause
        self._address = (
            address if address.startswith("unix") else f"{address.rpartition(':')[0]}:{port}"
        )
        await self._server.start()

    def _serve(self, kind: StreamKind) -> Callable[[Any, Any], Awaitable[None]]:
        async def serve(_requests: Any, context: Any) -> None:
            stream, front = _ServerStream(context, self._front), self._front
            if front is not None and not front.began(context.peer(), stream):
                return
            try:
                await context.send_initial_metadata(())
                await stream.run(self._guard(kind, stream), self._handlers)
            finally:
                if front is not None:
                    front.ended(stream)

        return serve

    async def _guard(self, kind: StreamKind, stream: Stream) -> None:
        try:
            await self._handler(kind, stream)
        except Disconnected:
            pass
        except Exception as bug:
            if self._on_error is not None:
                self._on_error(f"serving a {kind.value} stream of {stream.peer}", bug)

    async def close(self, grace_ms: int) -> None:
        """Accept no more streams, wait `grace_ms` for open ones, then break them."""
        await self._server.stop(grace_ms / 1000)
        await self._handlers.wait(HANDLER_GRACE_S)  # the handlers get the break from recv or send
        await self._handlers.close()


def _bind_error(address: str) -> OSError:
    """Return the operating system's error for binding `address`; grpc says only that it failed."""
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.bind(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            info = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
            with socket.socket(info[0], info[1]) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(info[4])
    except OSError as cause:
        why = cause.strerror or str(cause)
        return OSError(cause.errno or errno.EADDRINUSE, f"cannot listen on {address}: {why}")
    except ValueError:
        return OSError(errno.EINVAL, f"cannot listen on {address}: not HOST:PORT")
    return OSError(errno.EADDRINUSE, f"cannot listen on {address}")
