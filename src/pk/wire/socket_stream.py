"""One stream over a socket: each frame follows its length and is read straight into its own memory.

This is the data path's transport (docs/design/0003-transport.md).  After the opening
(pk.wire.socket_network), each direction is `(u32le length | frame)*`; the length 0xffffffff marks
the clean end.  A stream has no task: the event loop calls `_on_readable` and `_on_writable`, and
`send` writes at once when nothing is queued before it.  A small frame therefore costs one system
call on either side.  A byte of a large frame is copied twice, by the kernel: out of the sender's
buffer, and into the receiver's.

Rules
  N1  A frame is any bytes, also none.  Its length is checked before memory is allocated for it, and
      memory is allocated as its bytes arrive (rule L17).
  N2  The end of a stream is explicit.  A connection that ends without it is a break; the other side
      gets `Disconnected`.
  N3  Read-ahead and the send queue are bounded in bytes and in frames.  Beyond the bounds, the
      socket is not read, and `send` waits.
  N4  A refused stream sends the reason in an `Error` frame, then its end.  Bytes that still arrive
      are read and dropped.
  N5  A task that only sends lets other tasks of the loop run, however fast the peer reads.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Generator, Sequence
from types import coroutine

from pk import errors, limits
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.dead_peers import is_unacknowledged
from pk.wire.inbound import KEPT_BYTES
from pk.wire.memory import SCRATCH_BYTES, Assembly, InboundMemory
from pk.wire.waiters import Waiters, wait_in, wake_all, wake_one
from pk.world import Buffer, Disconnected

CLOSE_TIMEOUT_MS = 2_000
#: N3: `send` waits while more than this is queued; the reader stays at most this much ahead.
WINDOW_BYTES = limits.FRAME_BYTES
WINDOW_FRAMES = 256
WINDOW_PIECES = 1024

_LENGTH = struct.Struct("<I")
_END = 0xFFFFFFFF
_END_MARK = _LENGTH.pack(_END)
#: A stream's first frame is its hello; until the hello is accepted, no larger frame is accepted.
HELLO_BYTES_MAX = 64 * limits.KIB
#: The most bytes that a call-back reads, so that no stream starves the others.
_TURN_BYTES = 4 * limits.MIB
#: N5: bytes that a task sends before it lets others run; each send counts as some more.
_BREATH_BYTES = limits.MIB
_SEND_COST_BYTES = 4 * limits.KIB
_BUFFERS_PER_WRITE = 64
#: Short frames are credited to the budget together, in portions of this size.
_CREDIT_BYTES = 16 * limits.KIB


@coroutine
def breathe() -> Generator[None, None, None]:
    """Let the event loop run other tasks once."""
    yield


class SocketStream:
    """`pk.world.Stream` over a connected, non-blocking socket, which the stream owns from now on.

    `finished` is called once, when the socket is closed.  `memory`: the budget of the process;
    without one, frames are not counted.  `scratch`: a buffer that the streams of one loop share.
    `admitted`: decides, after the peer's hello was accepted, whether the peer may stay.
    `frame_bytes_max`: the largest frame that any peer may send.  `carries`: what is put
    before a refusal, if the frames are those of a shared connection (pk.wire.shared_connection);
    its owner calls `credit` itself.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        finished: Callable[[], None],
        *,
        memory: InboundMemory | None = None,
        scratch: memoryview | None = None,
        admitted: Callable[[bool], None] | None = None,
        frame_bytes_max: int | None = None,
        carries: bytes = b"",
    ) -> None:
        self._sock = sock
        self._peer = peer
        self._finished = finished
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[bytes | memoryview] = deque()
        self._inbox_bytes = 0
        # lengths and frames; the first may be partly sent
        self._outbox: deque[memoryview] = deque()
        self._outbox_bytes = 0
        # how the other side ended: "" clean, text = why the stream broke
        self._end: str | None = None
        self._closed = False  # this side called close()
        self._gone = False  # the socket is closed
        self._readable: Waiters = deque()  # tasks that wait in recv
        self._writable: Waiters = deque()  # tasks that wait in send
        self._scratch = scratch or memoryview(bytearray(SCRATCH_BYTES))
        self._kept = b""  # the first part of a short frame
        self._large: Assembly | None = None  # the frame that is being read into its own memory
        self._skip = 0  # bytes still to come of a frame that is dropped
        self._taken = 0  # bytes of short frames that were taken and are not credited yet
        self._short = 0  # bytes of short frames that arrived and are not charged yet
        self._memory = memory
        self._account = memory.open(self) if memory is not None else None
        self._admitted = admitted
        self._frame_bytes_max = frame_bytes_max
        self._carries = carries
        self._greeted = memory is None
        self._refused = ""
        self._reading = self._writing = False
        self._unpaused = 0
        self._abandon: asyncio.TimerHandle | None = None
        self._set_reading(True)

    # -- the Stream protocol -----------------------------------------------------------------------

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, *pieces: Buffer) -> None:
        """Write a frame, or queue what the socket does not take; wait while the window is full.

        Raises `Disconnected`.
        """
        if self._unpaused >= _BREATH_BYTES:
            self._unpaused = 0
            await breathe()
        if self._outbox_bytes >= WINDOW_BYTES or len(self._outbox) >= WINDOW_PIECES:
            self._unpaused = 0
            await self.room()
        self._check_open()
        self._unpaused += self._push(pieces) + _SEND_COST_BYTES

    async def room(self) -> None:
        """Wait while the window is full.  Raises `Disconnected`."""
        while self._outbox_bytes >= WINDOW_BYTES or len(self._outbox) >= WINDOW_PIECES:
            self._check_open()
            await wait_in(self._writable)

    def post(self, frame: bytes) -> None:
        """Write or queue a small frame whatever the window; an ended stream drops it."""
        if not self._closed and self._end is None:
            self._push((frame,))

    def _push(self, pieces: Sequence[Buffer]) -> int:
        """Write or queue a frame; returns its bytes."""
        size = sum(map(len, pieces))
        self._outbox.append(memoryview(_LENGTH.pack(size)))
        self._outbox.extend(map(memoryview, pieces))
        self._outbox_bytes += size + _LENGTH.size
        if not self._writing:
            self._on_writable()
        return size

    async def recv(self) -> bytes | memoryview | None:
        """Return the next frame, None at the clean end.  Raises `Disconnected`."""
        while not self._inbox:
            if self._refused:
                raise Disconnected(self._refused)
            if self._closed:
                return None
            if self._end is not None:
                if self._end:
                    raise Disconnected(self._end)
                return None
            await wait_in(self._readable)
        frame = self._inbox.popleft()
        self._inbox_bytes -= len(frame)
        if self._account is not None and type(frame) is bytes and not self._carries:
            self._credit(len(frame))
        if not self._reading and self._end is None and self._has_room():
            self._set_behind(False)
        return frame

    def admit(self, known: bool) -> None:
        """Admit the peer after its hello.  Raises `ThrottledError` if there is no room for it."""
        if self._admitted is not None:
            self._admitted(known)
        self._greeted = True
        if known and self._memory is not None and self._account is not None:
            self._memory.budget.reserve(self._account)
            self.resume()

    def close(self) -> None:
        """Finish both directions: frames that were sent are delivered, unread ones are dropped."""
        if self._closed:
            return
        self._closed = True
        self._stop_receiving()
        short = sum(len(frame) for frame in self._inbox if isinstance(frame, bytes))
        self._inbox.clear()
        self._inbox_bytes = 0
        self._credit(short)
        if self._gone:
            self._wake_all()
            return
        self._abandon = self._loop.call_later(CLOSE_TIMEOUT_MS / 1000, self.abort, "closed")
        self._outbox.append(memoryview(_END_MARK))
        self._outbox_bytes += len(_END_MARK)
        if self._end is None:
            self._set_reading(True)  # read on: the peer's end must be seen
        if not self._writing:
            self._on_writable()
        self._wake_all()

    def refuse(self, why: errors.PkError) -> None:
        """Send `why` and the end (N4).  The handler gets `Disconnected` from recv and send."""
        if self._closed or self._gone:
            return
        head = wire.Head(error=frames.error_of(why))
        raw = self._carries + frames.encode(head)
        self._refused = why.message
        self._outbox += (memoryview(_LENGTH.pack(len(raw))), memoryview(raw))
        self._outbox_bytes += len(raw) + _LENGTH.size
        self.close()

    def credit(self, size: int) -> None:
        """Credit short frames of a shared connection that were taken or dropped."""
        if self._account is not None:
            self._credit(size)

    def resume(self) -> None:
        """Read the socket again (pk.wire.memory's `Reader`)."""
        if self._end is None and (self._closed or self._has_room()):
            self._set_reading(True)

    def abort(self, why: str) -> None:
        """Break the stream now; tasks that wait on it get `Disconnected` with `why`."""
        self._ended(why)
        self._free()

    def check_acknowledged(self) -> None:
        """Break the stream if the peer acknowledges nothing (wire/dead_peers N8)."""
        if not self._gone and is_unacknowledged(self._sock):
            self.abort("the peer acknowledges nothing any more")

    # -- inside ------------------------------------------------------------------------------------

    def _stop_receiving(self) -> None:
        """Release the memory of the frame that is being received; its rest is dropped (N4)."""
        self._settle()
        if self._large is not None:
            self._skip = self._large.size - self._large.filled
            self._large.end()
            self._large = None
        if self._memory is not None and self._account is not None:
            self._memory.close(self._account)

    def _settle(self) -> None:
        """Charge the short frames of one read together."""
        if self._short and self._memory is not None and self._account is not None:
            self._memory.budget.arrived(self._account, self._short, self._memory.now_ms())
        self._short = 0

    def _credit(self, size: int) -> None:
        """Credit short frames that were taken; `InboundMemory.watch` credits large ones."""
        self._taken += size
        if (self._taken >= _CREDIT_BYTES or not self._inbox) and self._account is not None:
            assert self._memory is not None
            self._memory.freed(self._account, self._taken)
            self._taken = 0

    def _set_behind(self, behind: bool) -> None:
        """Stop reading while the handler is behind, or read again (N3)."""
        self._set_reading(not behind)
        if self._memory is not None and self._account is not None:
            self._memory.budget.behind(self._account, behind, self._memory.now_ms())

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
        """Record that the other side broke (`why`) or finished ('')."""
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
        self._stop_receiving()
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
        turn = _TURN_BYTES
        try:
            while turn > 0 and self._reading:
                into = self._where()
                if self._memory and self._account and not self._closed:
                    room = self._memory.room(self._account, len(into))
                    if not room:
                        self._set_reading(False)  # until `resume`
                        return
                    into = into[:room]
                got = self._sock.recv_into(into)
                if not got:
                    raise Disconnected("the peer broke the connection")
                turn -= got
                self._took(got)
                if got < len(into):
                    return  # the socket is empty, or nearly
        except BlockingIOError:
            pass
        except (Disconnected, OSError) as cause:
            self.abort(_why(cause))
        except MemoryError:
            self.abort("a frame does not fit into memory")

    def _where(self) -> memoryview:
        """Return the buffer for the next bytes."""
        if self._skip:
            return self._scratch[: self._skip]
        if self._large is not None:
            return self._large.rest()
        kept = len(self._kept)
        self._scratch[:kept] = self._kept
        return self._scratch[kept:]

    def _took(self, got: int) -> None:
        """Process `got` bytes that were read into the buffer of `_where`."""
        if self._skip:
            self._skip -= got
        elif self._large is None:
            self._cut(len(self._kept) + got)
        else:
            self._grew(self._large, got)

    def _grew(self, large: Assembly, got: int) -> None:
        large.filled += got
        memory, account = self._memory, self._account
        if memory is not None and account is not None and memory.budget.grew(account, got):
            memory.budget.mark(account, memory.now_ms())
        if large.filled < large.size:
            return
        self._large = None
        large.end()
        if memory is not None and account is not None:
            memory.budget.finished(account, memory.now_ms())
            memory.watch(account, large.array, large.size)
        self._arrived(large.view)

    def _cut(self, filled: int) -> None:
        """Take the frames out of the first `filled` bytes of the scratch buffer."""
        scratch, at = self._scratch, 0
        self._kept = b""
        while filled - at >= _LENGTH.size and self._end is None:
            (size,) = _LENGTH.unpack_from(scratch, at)
            begin = at + _LENGTH.size
            if size == _END:
                self._finish()
                break
            if self._closed:  # N4
                at = begin + size
                if at > filled:
                    self._skip = at - filled
                continue
            if size > HELLO_BYTES_MAX and not self._may_announce(size):
                continue
            if begin + size <= filled:
                at = begin + size
                self._short += size
                self._arrived(bytes(scratch[begin:at]))
            elif _LENGTH.size + size <= KEPT_BYTES:
                break  # the rest comes with the next read
            else:
                self._begin(size, scratch[begin:filled])
                at = filled
        if at < filled and self._end is None:
            self._kept = bytes(scratch[at:filled])
        self._settle()

    def _may_announce(self, size: int) -> bool:
        """Return whether a frame of `size` bytes is accepted; refuse the stream otherwise.

        Raises `Disconnected` if the size is beyond every valid frame.
        """
        if size > limits.WIRE_FRAME_BYTES_MAX:
            raise Disconnected(f"the peer announced a frame of {size} bytes")
        if not self._greeted:
            bound, what = HELLO_BYTES_MAX, "before a hello was accepted"
        elif self._frame_bytes_max is not None and size > self._frame_bytes_max:
            bound, what = self._frame_bytes_max, "in a stream of this kind"
        elif self._memory is None or (self._account is not None and self._account.reserved):
            return True
        else:
            bound, what = self._memory.bound(size), "as max_message_bytes of the topics are"
        if size > bound:
            self.refuse(errors.RecordTooLarge(f"a frame of {size} bytes; {bound} are taken {what}"))
        return size <= bound

    def _begin(self, size: int, first: memoryview) -> None:
        """Begin a frame that is received into its own memory."""
        large = self._large = Assembly(size, self._memory)
        large.view[: len(first)] = first
        if self._account is not None and self._memory is not None:
            self._memory.budget.begin(self._account, size, self._memory.now_ms())
        self._grew(large, len(first))

    def _arrived(self, frame: bytes | memoryview) -> None:
        self._inbox.append(frame)
        self._inbox_bytes += len(frame)
        if not self._has_room():
            self._set_behind(True)
        wake_one(self._readable)

    def _finish(self) -> None:
        """Handle the peer's end (N2)."""
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
