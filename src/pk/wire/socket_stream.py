"""One stream over a socket: frames behind their length, read straight into their own memory.

The data path's carrier (docs/design/0003-carrier.md).  After the opening (pk.wire.socket_network)
each direction is `(u32le length | frame)*`, and the length 0xffffffff says the clean end.  There is
no task per stream: the event loop calls `_on_readable` and `_on_writable`, and `send` writes at
once when nothing waits before it.  So a small frame costs one system call on either side, and a
byte of a large one is copied twice, by the kernel: out of the sender's buffer, into the receiver's.

Rules
  N1  A frame is any bytes, also none; its length is checked before memory is taken for it.
  N2  The end of a stream is said explicitly.  A connection that ends without it is a break; the
      other side gets `Disconnected`.
  N3  Read-ahead and the send queue are bounded in bytes and in frames; beyond them the socket is
      not read, and `send` waits.
  N5  A task that only sends cannot keep the loop to itself, however fast the peer reads.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Generator
from types import coroutine

import numpy as np

from pk import limits
from pk.wire.waiters import Waiters, wait_in, wake_all, wake_one
from pk.wire.watch import unheard
from pk.world import Buffer, Disconnected

CLOSE_TIMEOUT_MS = 2_000
#: N3: `send` waits while more than this is queued; the reader stays this much ahead.
WINDOW_BYTES = limits.FRAME_BYTES
WINDOW_FRAMES = 256
WINDOW_PIECES = 1024

_LENGTH = struct.Struct("<I")
_END = 0xFFFFFFFF
_END_MARK = _LENGTH.pack(_END)
#: Frames that fit are cut out of one read; the first bytes of larger ones are copied once more.
_SCRATCH_BYTES = 64 * limits.KIB
#: What one call-back of the loop reads at most, so that one stream does not starve the others.
_TURN_BYTES = 4 * limits.MIB
#: N5: bytes sent without a pause before a task lets others run; each send counts as some more.
_BREATH_BYTES = limits.MIB
_SEND_COST_BYTES = 4 * limits.KIB
_BUFFERS_PER_WRITE = 64


@coroutine
def _breathe() -> Generator[None, None, None]:
    """Let the loop turn once."""
    yield


class SocketStream:
    """`pk.world.Stream` over a connected, non-blocking socket, which it owns from now on.

    `finished` is called once, when the socket is closed.
    """

    def __init__(self, sock: socket.socket, peer: str, finished: Callable[[], None]) -> None:
        self._sock = sock
        self._peer = peer
        self._finished = finished
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[bytes | memoryview] = deque()
        self._inbox_bytes = 0
        self._outbox: deque[memoryview] = deque()  # lengths and frames, the first perhaps cut
        self._outbox_bytes = 0
        self._end: str | None = None  # the other side's end: "" clean, text = why it broke
        self._closed = False  # this side called close()
        self._gone = False  # the socket is closed
        self._readable: Waiters = deque()  # tasks in recv
        self._writable: Waiters = deque()  # tasks in send
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._kept = 0  # bytes at the front of the scratch that are not a whole frame yet
        self._large: memoryview | None = None  # the frame that is read into its own memory
        self._large_at = 0
        self._reading = self._writing = False
        self._unpaused = 0
        self._abandon: asyncio.TimerHandle | None = None
        self._set_reading(True)

    # -- the Stream protocol -----------------------------------------------------------------------

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, *pieces: Buffer) -> None:
        """Write a frame, or queue what the socket does not take; waits while the window is full.

        Raises `Disconnected`.
        """
        if self._unpaused >= _BREATH_BYTES:
            self._unpaused = 0
            await _breathe()
        while self._outbox_bytes >= WINDOW_BYTES or len(self._outbox) >= WINDOW_PIECES:
            self._check_open()
            self._unpaused = 0
            await wait_in(self._writable)
        self._check_open()
        size = sum(map(len, pieces))
        self._unpaused += size + _SEND_COST_BYTES
        self._outbox.append(memoryview(_LENGTH.pack(size)))
        self._outbox.extend(map(memoryview, pieces))
        self._outbox_bytes += size + _LENGTH.size
        if not self._writing:
            self._on_writable()

    async def recv(self) -> bytes | memoryview | None:
        """The next frame, None at the clean end.  Raises `Disconnected`."""
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
        if not self._reading and self._end is None and self._has_room():
            self._set_reading(True)
        return frame

    def close(self) -> None:
        """Finish both directions: what was sent is delivered, what was not received is dropped."""
        if self._closed:
            return
        self._closed = True
        self._inbox.clear()
        self._inbox_bytes = 0
        if self._gone:
            self._wake_all()
            return
        self._abandon = self._loop.call_later(CLOSE_TIMEOUT_MS / 1000, self.abort, "closed")
        self._outbox.append(memoryview(_END_MARK))
        self._outbox_bytes += len(_END_MARK)
        if self._end is None:
            self._set_reading(True)  # the other side's end must be seen
        if not self._writing:
            self._on_writable()
        self._wake_all()

    def abort(self, why: str) -> None:
        """Break the stream now; whoever waits on it learns `why`."""
        self._ended(why)
        self._free()

    def check_heard(self) -> None:
        """N8 of pk.wire.watch."""
        if not self._gone and unheard(self._sock):
            self.abort("the peer acknowledges nothing any more")

    # -- inside ------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return self._inbox_bytes < WINDOW_BYTES and len(self._inbox) < WINDOW_FRAMES

    def _check_open(self) -> None:
        if self._closed:
            raise Disconnected("the stream was closed")
        if self._end is not None:
            raise Disconnected(self._end or "the peer finished")

    def _wake_all(self) -> None:
        wake_all(self._readable)
        wake_all(self._writable)

    def _ended(self, why: str) -> None:
        """The other side is gone (`why`), or has finished ('')."""
        if self._end is None:
            self._end = why
            self._wake_all()
        if why:
            self._outbox.clear()
            self._outbox_bytes = 0

    def _free(self) -> None:
        """Close the socket; idempotent."""
        if self._gone:
            return
        self._gone = True
        self._set_reading(False)
        self._set_writing(False)
        if self._abandon is not None:
            self._abandon.cancel()
        self._sock.close()
        self._large = None
        self._finished()

    def _set_reading(self, wanted: bool) -> None:
        if wanted and not self._reading and not self._gone:
            self._reading = True
            self._loop.add_reader(self._sock, self._on_readable)
        elif not wanted and self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock)

    def _set_writing(self, wanted: bool) -> None:
        if wanted and not self._writing and not self._gone:
            self._writing = True
            self._loop.add_writer(self._sock, self._on_writable)
        elif not wanted and self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock)

    # -- reading -----------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        budget = _TURN_BYTES
        try:
            while budget > 0 and self._reading:
                room = self._scratch[self._kept :]
                if self._large is not None:
                    room = self._large[self._large_at :]
                got = self._sock.recv_into(room)
                if not got:
                    raise Disconnected("the peer broke the connection")
                budget -= got
                self._took(got)
                if got < len(room):
                    return  # the socket is empty, or nearly
        except BlockingIOError:
            pass
        except (Disconnected, OSError) as cause:
            self.abort(_why(cause))
        except MemoryError:
            self.abort("a frame does not fit into memory")

    def _took(self, got: int) -> None:
        """`got` more bytes lie where `_on_readable` read to."""
        if self._large is None:
            self._cut(self._kept + got)
            return
        self._large_at += got
        if self._large_at == len(self._large):
            frame, self._large = self._large, None
            self._arrived(frame)

    def _cut(self, filled: int) -> None:
        """Take the frames out of the first `filled` bytes of the scratch."""
        scratch, at = self._scratch, 0
        while filled - at >= _LENGTH.size and self._end is None:
            (size,) = _LENGTH.unpack_from(scratch, at)
            begin = at + _LENGTH.size
            if size == _END:
                self._finish()
                return
            if size > limits.WIRE_FRAME_BYTES_MAX:
                raise Disconnected(f"the peer announced a frame of {size} bytes")
            if begin + size <= filled:
                at = begin + size
                self._arrived(bytes(scratch[begin:at]))
            elif _LENGTH.size + size <= _SCRATCH_BYTES:
                break  # the rest comes with the next read
            else:
                large = np.empty(size, np.uint8).data  # not zeroed, as a bytearray is
                large[: filled - begin] = scratch[begin:filled]
                self._large, self._large_at = large, filled - begin
                at = filled
        self._kept = filled - at
        if at and self._kept:
            scratch[: self._kept] = scratch[at:filled]

    def _arrived(self, frame: bytes | memoryview) -> None:
        if self._closed:
            return  # read on, for the end only
        self._inbox.append(frame)
        self._inbox_bytes += len(frame)
        if not self._has_room():
            self._set_reading(False)
        wake_one(self._readable)

    def _finish(self) -> None:
        """The peer said its end (N2)."""
        self._set_reading(False)
        self._ended("")
        if self._closed and not self._outbox:
            self._free()

    # -- writing -----------------------------------------------------------------------------------

    def _on_writable(self) -> None:
        outbox = self._outbox
        try:
            while outbox:
                several = [outbox[n] for n in range(min(len(outbox), _BUFFERS_PER_WRITE))]
                self._wrote(self._sock.sendmsg(several))
        except BlockingIOError:
            pass
        except OSError as cause:
            self.abort(_why(cause))
            return
        self._set_writing(bool(outbox))
        while self._writable and self._outbox_bytes < WINDOW_BYTES:
            if not wake_one(self._writable):
                break
        if self._closed and not outbox and self._end is not None:
            self._free()

    def _wrote(self, count: int) -> None:
        outbox = self._outbox
        self._outbox_bytes -= count
        while count:
            first = outbox[0]
            if count < len(first):
                outbox[0] = first[count:]
                return
            count -= len(first)
            outbox.popleft()
        while outbox and not len(outbox[0]):
            outbox.popleft()  # an empty piece


def _why(cause: BaseException) -> str:
    if isinstance(cause, OSError) and cause.strerror:
        return f"the connection broke: {cause.strerror}"
    return str(cause) or "the connection broke"
