"""Memory in which one file after another is built.

A tier file is about 64 MiB.  If memory of that size is allocated and freed per file, the kernel
clears it every time.  Under load that took a fifth of the copier's CPU time, and memory that the
allocator kept made the process grow.  Therefore a few output buffers live as long as their process.

Arrow writes into the memory directly.  A growing buffer behind a Python writer would cost every
byte a second copy under the interpreter's lock.  Instead a buffer has a fixed size; if it is too
small (`OutputBufferFull`), the caller grows it and writes the file again.  Only pages that were
written once take memory.

Invariants
  B1  `data` is valid until `clear`.  A caller returns the buffer only once it no longer reads
      `data`.
  B2  The memory begins at a block's boundary, so that a store may write it past the page cache.
  B3  A buffer uses as much memory as the largest file so far, or USUAL_BYTES if that file was
      larger.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pk.log.storage import Buffer

#: Alignment that devices require of memory and of positions in a file (B2).
BLOCK_BYTES = 4096
#: Twice the default `tier_file_bytes`, and room for one more batch and the footer.
USUAL_BYTES = 192 << 20
#: No file is this large: `tier_file_bytes` and the largest batch bound it.
CAPACITY_MAX = 16 << 30


def _blocks(size: int) -> npt.NDArray[np.uint8]:
    """Allocates aligned memory (B2); pages that are not written to take no memory."""
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
        """Begins the next file."""
        self._stream = None

    def rest(self) -> None:
        """Frees memory beyond the usual size (B3); the caller no longer reads the last file."""
        if self.size > self._usual:
            self._memory = None
        self._stream = None

    def grow(self) -> None:
        """Doubles the size and empties the buffer.  Raises `MemoryError` beyond CAPACITY_MAX."""
        if 2 * self._capacity > CAPACITY_MAX:
            raise MemoryError(f"a tier file does not fit into {self._capacity} bytes")
        self._stream = self._memory = None
        self._capacity *= 2

    def stream(self) -> pa.NativeFile:
        """Returns the stream that writes the file from its beginning."""
        if self._memory is None:
            self._memory = _blocks(self._capacity)
        self._stream = pa.FixedSizeBufferWriter(pa.py_buffer(self._memory))
        return self._stream

    @property
    def size(self) -> int:
        """Returns the number of bytes written."""
        return 0 if self._stream is None else int(self._stream.tell())

    def data(self) -> memoryview:
        """Returns the bytes written (B1)."""
        if self._memory is None:
            return memoryview(b"")
        return self._memory.data[: self.size].toreadonly()

    def write(self, data: Buffer) -> int:
        """Appends bytes; raises `OutputBufferFull`."""
        stream = self._stream or self.stream()
        try:
            return int(stream.write(data))
        except OSError as cause:
            raise OutputBufferFull from cause
