"""The memory of inbound frames: drives pk.wire.inbound for the streams of a process (rule L17).

A frame is received into memory that grows with it, up to the announced length.  The kernel provides
a page when it is first written, so the memory in use is that of the bytes that arrived, and these
are charged.  But an allocator keeps freed pages that lie between used ones, so the allocated bytes
count, too.  While all frames being received have allocated less than the pool together, each begins
with FIRST_BYTES, and a frame of the usual size is never copied.  Beyond that, a frame begins with
SMALL_BYTES and gets four times as much whenever it is full.

Without a budget (clients), every read is allowed and nothing is counted.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from pk import errors, limits
from pk.clock import Clock
from pk.wire.inbound import Account, MemoryPool

if TYPE_CHECKING:
    import numpy as np

#: Room for a frame of the usual size with its head.
FIRST_BYTES = limits.FRAME_BYTES + limits.MIB
SMALL_BYTES = 128 * limits.KIB
GROWTH = 4
#: Frames up to this size are cut out of the scratch buffer that all streams of a network share.
SCRATCH_BYTES = 64 * limits.KIB
#: How often the budget is checked for streams without progress, while another stream waits.
LOOK_MS = 250


class Reader(Protocol):
    """A stream whose frames are counted."""

    def resume(self) -> None:
        """Read again: there is room."""
        ...

    def refuse(self, why: errors.PkError) -> None:
        """Answer with `why` and close the stream."""
        ...


class InboundMemory:
    """The budget of one process, on its event loop."""

    def __init__(
        self,
        budget: MemoryPool,
        clock: Clock,
        *,
        frame_bytes_max: Callable[[], int] | None = None,
    ) -> None:
        self.budget = budget
        self.now_ms = clock.monotonic_ms
        #: finds the maximum frame size by the topics' present settings
        self.find_frame_bytes_max = frame_bytes_max
        self.allocated = 0  #: bytes allocated for the frames that are being received
        self.refused = 0  #: streams closed because the budget was exhausted
        self._usual = budget.frame_bytes_max
        self._readers: dict[Account, Reader] = {}
        #: by id: a weak reference to the memory of a whole frame (which has no hash), its account,
        #: its size
        self._alive: dict[int, tuple[Any, Account, int]] = {}
        self._freed: deque[int] = deque()  # ids of released frames; any thread may add
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.Handle | None = None

    def open(self, reader: Reader) -> Account:
        account = Account(self.now_ms())
        self._readers[account] = reader
        return account

    def close(self, account: Account) -> None:
        self._readers.pop(account, None)
        self.budget.close(account)
        self.turn()

    def bound(self, size: int) -> int:
        """Return the maximum frame size; ask the topics only if `size` exceeds the usual one."""
        if size > self._usual and self.find_frame_bytes_max is not None:
            self.budget.frame_bytes_max = max(self._usual, self.find_frame_bytes_max())
        return self.budget.frame_bytes_max

    def room(self, account: Account, wanted: int) -> int:
        """Return how many bytes the stream may read now; 0 = none before `resume`."""
        budget = self.budget
        if budget.pooled + wanted <= budget.easy_bytes:
            return wanted
        if self._freed:
            self._collect()
        allowed = budget.room(account, wanted)
        if not allowed:
            self.budget.wait(account)
            if self._timer is None:
                self._loop = asyncio.get_running_loop()
                self._timer = self._loop.call_later(LOOK_MS / 1000, self._look)
        return allowed

    def watch(self, account: Account, memory: Any, size: int) -> None:
        """Credit `size` bytes when `memory`, that of a whole frame, is released."""
        if self._freed:
            self._collect()
        reference = weakref.ref(memory, self._gone)
        self._alive[id(reference)] = (reference, account, size)

    def freed(self, account: Account, size: int) -> None:
        """Credit short frames that a handler took."""
        if not self.budget.ebbed(account, size):
            self.budget.freed(account, size, self.now_ms())
            self.turn()

    def turn(self) -> None:
        """Resume the streams that have room again."""
        if self._freed:
            self._collect()
        if self.budget.contended:
            for account in self.budget.ready(self.now_ms()):
                self._readers[account].resume()

    # -- inside ------------------------------------------------------------------------------------

    def _gone(self, reference: Any) -> None:
        """Note that the last view of a frame was released; any thread may call this."""
        self._freed.append(id(reference))
        loop = self._loop
        if loop is not None and self.budget.contended:
            try:
                loop.call_soon_threadsafe(self.turn)
            except RuntimeError:
                pass  # the loop is closed: no stream waits

    def _collect(self) -> None:
        now_ms = self.now_ms()
        while self._freed:
            _, account, size = self._alive.pop(self._freed.popleft())
            self.budget.freed(account, size, now_ms)

    def _look(self) -> None:
        """Close streams that hold memory without progress, one by one, until none must close."""
        self._timer = None
        self.turn()
        while (victim := self.budget.victim(self.now_ms())) is not None:
            self.refused += 1
            self._readers[victim].refuse(
                errors.ThrottledError(
                    "the memory for inbound frames is used up (inbound_bytes_max), and this "
                    "stream makes no progress: send again, more slowly"
                )
            )
            self.turn()
        if self.budget.contended:
            assert self._loop is not None
            self._timer = self._loop.call_later(LOOK_MS / 1000, self._look)


class Assembly:
    """The memory of one frame that is received piece by piece."""

    __slots__ = ("_memory", "array", "filled", "size", "view")

    def __init__(self, size: int, memory: InboundMemory | None) -> None:
        self.size = size
        self.filled = 0
        self._memory = memory
        begin = FIRST_BYTES
        if memory is not None and memory.allocated + FIRST_BYTES > memory.budget.pool_bytes:
            begin = SMALL_BYTES
        self.array = _memory_of(min(size, begin))
        self.view = self.array.data
        self._allocated(len(self.array))

    def rest(self) -> memoryview:
        """Return the buffer for the next bytes."""
        if self.filled == len(self.array) < self.size:
            larger = _memory_of(min(self.size, GROWTH * len(self.array)))
            larger[: self.filled] = self.array
            self._allocated(len(larger) - len(self.array))
            self.array, self.view = larger, larger.data
        return self.view[self.filled :]

    def end(self) -> None:
        """Stop counting the memory as being received: the frame is whole or given up."""
        self._allocated(-len(self.array))

    def _allocated(self, size: int) -> None:
        if self._memory is not None:
            self._memory.allocated += size


def _memory_of(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return memory that is not zeroed, unlike a bytearray."""
    import numpy as np  # a process that receives small frames only, as a command, needs none

    return np.empty(size, np.uint8)
