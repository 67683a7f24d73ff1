"""Memory that one file after another is built in.

A tier file is about 64 MiB. Memory of that size, asked for and given back per file, is cleared by
the kernel every time: under load that was a fifth of the copier's CPU time, and what the allocator
kept of it made the process grow. So a few output buffers live as long as their process.

Arrow writes into it directly.  A writer in Python behind a buffer of Arrow's, which can grow, cost
every byte a second copy and the interpreter's lock; a buffer has a size instead, and whoever finds
it too small (`OutputBufferFull`) makes it larger and writes the file again.  Only what was written
once takes memory.

Invariants
  B1  `data` is valid until `clear`; whoever still reads it then must not give the buffer back.
  B2  memory begins at a block's boundary: a store may write it past the page cache.
  B3  memory is what the largest file so far took, unless that was an unusual one (USUAL_BYTES).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pk.log.storage import Buffer

#: What devices ask of the memory they read from, and of positions in a file (B2).
BLOCK_BYTES = 4096
#: Twice the default `tier_file_bytes`, and room for what a batch more and the footer add.
USUAL_BYTES = 192 << 20
#: No file is so large: `tier_file_bytes` and the largest batch bound it.
CAPACITY_MAX = 16 << 30


def _blocks(size: int) -> npt.NDArray[np.uint8]:
    """B2; what is not written to takes no memory."""
    raw = np.empty(size + BLOCK_BYTES, np.uint8)
    skipped = -raw.ctypes.data % BLOCK_BYTES
    return raw[skipped : skipped + size]


class OutputBufferFull(Exception):
    """The file is larger than the buffer."""


class OutputBuffer:
    """Memory for one file at a time."""

    def __init__(self, capacity: int = USUAL_BYTES) -> None:
        self._capacity = max(capacity, BLOCK_BYTES)
        self._usual = self._capacity
        self._memory: npt.NDArray[np.uint8] | None = None
        self._stream: pa.NativeFile | None = None

    def clear(self) -> None:
        """Begin the next file."""
        self._stream = None

    def rest(self) -> None:
        """Nobody reads the last file any more; what it took beyond the usual goes (B3)."""
        if self.size > self._usual:
            self._memory = None
        self._stream = None

    def grow(self) -> None:
        """Twice as large, and empty.  Raises `MemoryError` beyond CAPACITY_MAX."""
        if 2 * self._capacity > CAPACITY_MAX:
            raise MemoryError(f"a tier file does not fit into {self._capacity} bytes")
        self._stream = self._memory = None
        self._capacity *= 2

    def stream(self) -> pa.NativeFile:
        """Where the file is written, from its beginning."""
        if self._memory is None:
            self._memory = _blocks(self._capacity)
        self._stream = pa.FixedSizeBufferWriter(pa.py_buffer(self._memory))
        return self._stream

    @property
    def size(self) -> int:
        """Bytes written."""
        return 0 if self._stream is None else int(self._stream.tell())

    def data(self) -> memoryview:
        """What was written (B1)."""
        if self._memory is None:
            return memoryview(b"")
        return self._memory.data[: self.size].toreadonly()

    def write(self, data: Buffer) -> int:
        """Append; raises `OutputBufferFull`."""
        stream = self._stream or self.stream()
        try:
            return int(stream.write(data))
        except OSError as cause:
            raise OutputBufferFull from cause
