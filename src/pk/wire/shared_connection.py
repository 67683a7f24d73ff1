"""Control streams that share one connection (rule P3).

A process with hundreds of group members must not take as many of a broker's connections.  Beyond
`socket_network.CONTROL_SOCKETS` its control streams share connections.  A shared connection is a
`SocketStream` whose frames carry those of its streams: `u32le number | what | payload`.

    BEGIN   the client begins the stream
    FRAME   payload is a frame of the stream
    END     the sender has finished; it drops what still arrives for the stream

A frame of stream 0 is an `Error` head, which says why the server ends the connection.  The client
draws the numbers, ascending and never twice.  What has a number that a side does not know belongs
to a stream that it has finished.

Rules
  N2  The end of a stream is explicit.  When the connection ends, all its streams break.
  N3  The frames of all streams that are not taken yet are bounded in bytes and in number.  Beyond
      the bound the connection is not read: a stream whose owner does not read delays the streams
      of its own process, and no others.
  N13 A connection has at most `limits.CONTROL_STREAMS_MAX` streams; the server ends those beyond.
  N14 Frames that wait in a stream stay charged to the connection's account (rule L17) until they
      are taken or dropped.
  N17 The server takes no frame while the connection's send queue is full.  What a peer that does
      not read has still to be sent is therefore bounded, however many streams it has.  The client
      takes frames all the same: if both ends waited for room, neither would make any.  After a
      stream beyond the share of its connection the server takes no frame for a moment, either.
  N18 The client begins no stream on a connection on which nothing has arrived for `patience_ms`
      since an earlier stream began.  The next stream gets another connection, whose opening tells
      whether the peer hangs or only the first connection.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from pk import errors, limits
from pk.tasks import TaskRegistry
from pk.wire import frames
from pk.wire.socket_stream import (
    CLOSE_TIMEOUT_MS,
    WINDOW_BYTES,
    WINDOW_FRAMES,
    SocketStream,
    breathe,
)
from pk.wire.stream_quotas import StreamQuotas
from pk.wire.waiters import Waiters, wait_in, wake_all, wake_one
from pk.world import Buffer, Disconnected, Stream

_PREFIX = struct.Struct("<IB")
PREFIX_BYTES = _PREFIX.size
_FRAME, _END, _BEGIN = 0, 1, 2
#: What `SocketStream` puts before the refusal of a connection: a frame of no stream.
REFUSAL = _PREFIX.pack(0, _FRAME)
#: After a stream beyond the bounds of its connection: the time in which no frame is taken.  A peer
#: that begins another stream at once would keep the server busy.
_PAUSE_S = 0.05
#: Frames that are taken before other tasks of the loop run.
_FRAMES_PER_TURN = 256


class SharedStream:
    """`pk.world.Stream` over a shared connection."""

    def __init__(self, connection: _SharedConnection, number: int) -> None:
        self.connection = connection
        self._number = number
        self._prefix = _PREFIX.pack(number, _FRAME)
        self._inbox: deque[bytes | memoryview] = deque()
        self._readable: Waiters = deque()  # tasks that wait in recv
        # how the other side ended: "" clean, text = why the stream broke
        self._end: str | None = None
        self._closed = False  # this side called close()

    @property
    def peer(self) -> str:
        return self.connection.carrier.peer

    async def send(self, *pieces: Buffer) -> None:
        """Send a frame; wait while the connection's window is full.  Raises `Disconnected`."""
        self._check_open()
        if self.connection.sends_most is not None:
            size = sum(map(len, pieces))
            if size > self.connection.sends_most:
                most = self.connection.sends_most
                raise Disconnected(f"a frame of {size} bytes; {most} are taken in control streams")
        await self.connection.carrier.send(self._prefix, *pieces)

    async def recv(self) -> bytes | memoryview | None:
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
        self.connection.taken(len(frame), isinstance(frame, bytes))
        return frame[PREFIX_BYTES:]

    def admit(self, known: bool) -> None:
        """Admit the connection.  Raises `ThrottledError` if there is no room for it."""
        self.connection.carrier.admit(known)

    def close(self) -> None:
        """Finish both directions: frames that were sent are delivered, unread ones are dropped."""
        if self._closed:
            return
        self._closed = True
        for frame in self._inbox:
            self.connection.taken(len(frame), isinstance(frame, bytes))
        self._inbox.clear()
        wake_all(self._readable)
        self.connection.finished(self._number, both=self._end is not None)

    # -- called by the connection ------------------------------------------------------------------

    def arrived(self, frame: bytes | memoryview) -> bool:
        """Take a frame with its prefix; return False if it is dropped."""
        if self._closed or self._end is not None:
            return False
        self._inbox.append(frame)
        wake_one(self._readable)
        return True

    def ended(self, why: str) -> bool:
        """Note that the other side broke (`why`) or finished (''); return whether this side has
        finished, too.
        """
        if self._end is None:
            self._end = why
            wake_all(self._readable)
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise Disconnected("the stream was closed")
        if self._end is not None:
            raise Disconnected(self._end or "the peer finished")


class _SharedConnection:
    """Both ends of a shared connection; `carrier` belongs to it."""

    #: The largest frame that the peer takes; None = any.
    sends_most: int | None = None

    def __init__(self, carrier: SocketStream) -> None:
        self.carrier = carrier
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, SharedStream] = {}
        self._waiting_bytes = 0
        self._waiting_frames = 0
        self._drained: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._streams)

    async def read(self) -> None:
        """Give each frame to its stream until the connection ends; then all streams break."""
        why, turn = "the peer broke the connection", 0
        try:
            while (frame := await self._next()) is not None:
                if frame[:PREFIX_BYTES] == REFUSAL:
                    why = self._refused(frame) or why
                self._take(frame)
                turn += 1
                if turn % _FRAMES_PER_TURN == 0:
                    await breathe()
                while self._waiting_bytes >= WINDOW_BYTES or self._waiting_frames >= WINDOW_FRAMES:
                    self._drained = self._loop.create_future()
                    await self._drained
        except (Disconnected, errors.CorruptBatch) as cause:
            why = str(cause) or why
        finally:
            for number, stream in list(self._streams.items()):
                stream.ended(why)
                self._forget(number)
            self.carrier.close()

    async def _next(self) -> bytes | memoryview | None:
        return await self.carrier.recv()

    def _refused(self, frame: bytes | memoryview) -> str:
        """Return why the peer ends the connection."""
        raise Disconnected("the peer sent a frame of stream 0")

    def _take(self, frame: bytes | memoryview) -> None:
        small = isinstance(frame, bytes)
        if len(frame) < PREFIX_BYTES:
            raise Disconnected("the peer sent a frame without a stream")
        number, what = _PREFIX.unpack_from(frame)
        if what == _BEGIN:
            self._begun(number)
        stream = self._streams.get(number)
        self._waiting_bytes += len(frame)
        self._waiting_frames += 1
        if stream is None or what != _FRAME or not self._arrived(stream, frame):
            self.taken(len(frame), small)
        if stream is not None and what == _END and stream.ended(""):
            self._forget(number)

    def _arrived(self, stream: SharedStream, frame: bytes | memoryview) -> bool:
        """Give a frame to its stream; return False if it is dropped."""
        return stream.arrived(frame)

    def _begun(self, number: int) -> None:
        """Serve a stream that the peer begins."""

    def taken(self, size: int, small: bool) -> None:
        """Note that a stream took or dropped a frame."""
        self._waiting_bytes -= size
        self._waiting_frames -= 1
        if small:
            self.carrier.credit(size)
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def finished(self, number: int, *, both: bool) -> None:
        """Send the end of a stream; `both`: the peer has finished it, too."""
        if number not in self._streams:
            return
        self.carrier.post(_PREFIX.pack(number, _END))
        if both:
            self._forget(number)
        else:  # a peer that never finishes must not keep the stream
            self._loop.call_later(CLOSE_TIMEOUT_MS / 1000, self._forget, number)

    def _forget(self, number: int) -> None:
        self._streams.pop(number, None)


class ClientConnection(_SharedConnection):
    """The client's end: it begins streams, and the connection ends with the last of them.

    closed: called once, when no stream may begin any more
    patience_ms: N18
    """

    sends_most = limits.CONTROL_BYTES_MAX

    def __init__(
        self,
        carrier: SocketStream,
        closed: Callable[[ClientConnection], None],
        patience_ms: int,
    ) -> None:
        super().__init__(carrier)
        self._closed = closed
        self._patience_s = patience_ms / 1000
        self._open = True
        self._last = 0
        #: When a stream began after the last frame arrived; None = none has begun since.
        self._began_s: float | None = None

    def begin(self) -> SharedStream | None:
        """Begin a stream; None = the connection takes no more (N13, N18)."""
        if not self._open or len(self._streams) >= limits.CONTROL_STREAMS_MAX:
            return None
        now_s = self._loop.time()
        if self._began_s is None:
            self._began_s = now_s
        elif now_s - self._began_s >= self._patience_s:
            return None
        self._last += 1
        stream = self._streams[self._last] = SharedStream(self, self._last)
        self.carrier.post(_PREFIX.pack(self._last, _BEGIN))
        return stream

    async def read(self) -> None:
        try:
            await super().read()
        finally:
            self._stop()

    def _refused(self, frame: bytes | memoryview) -> str:
        return frames.decode(frame[PREFIX_BYTES:]).head.error.message

    def _take(self, frame: bytes | memoryview) -> None:
        self._began_s = None
        super()._take(frame)

    def _forget(self, number: int) -> None:
        super()._forget(number)
        if not self._streams and self._open:
            self._stop()
            self.carrier.close()

    def _stop(self) -> None:
        if self._open:
            self._open = False
            self._closed(self)


class ServerConnection(_SharedConnection):
    """The server's end.

    serve: runs for each stream that the client begins, and closes it
    quotas: of the listener's streams
    idle: called when the last stream has ended
    """

    def __init__(
        self,
        carrier: SocketStream,
        serve: Callable[[SharedStream], Coroutine[Any, Any, None]],
        quotas: StreamQuotas[Stream, object],
        idle: Callable[[], None],
    ) -> None:
        super().__init__(carrier)
        self._serve = serve
        self._quotas = quotas
        self._idle = idle
        self._tasks = TaskRegistry()
        self._newest = 0
        self._greedy = False  #: it has just begun a stream beyond its share

    async def _next(self) -> bytes | memoryview | None:
        if self._greedy:
            self._greedy = False
            waiting = self._loop.create_future()
            self._loop.call_later(_PAUSE_S, waiting.cancel)
            await asyncio.wait((waiting,))
        await self.carrier.room()  # N17
        return await self.carrier.recv()

    def _begun(self, number: int) -> None:
        if number <= self._newest:
            raise Disconnected("the peer began a stream twice")
        self._newest = number
        stream = SharedStream(self, number)
        full = len(self._streams) >= limits.CONTROL_STREAMS_MAX  # N13
        loser = stream if full else self._quotas.begin(stream, self)
        self._greedy = isinstance(loser, SharedStream) and loser.connection is self
        if loser is stream:
            self.carrier.post(_PREFIX.pack(number, _END))
            return
        self._streams[number] = stream
        self._tasks.spawn(self._serve(stream))
        if loser is not None:
            loser.close()

    def _arrived(self, stream: SharedStream, frame: bytes | memoryview) -> bool:
        self._quotas.hear(stream)
        return super()._arrived(stream, frame)

    def _forget(self, number: int) -> None:
        stream = self._streams.get(number)
        super()._forget(number)
        if stream is not None:
            self._quotas.end(stream)
            if not self._streams:
                self._idle()

    async def run(self, grace_s: float) -> None:
        """Serve until the connection ends; then the handlers have `grace_s` to end, too."""
        try:
            await self.read()
            await self._tasks.wait(grace_s)
        finally:
            await self._tasks.close()
