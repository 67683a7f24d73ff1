"""Memory that one file after another is built in.

A tier file is about 64 MiB. Memory of that size, asked for and given back per file, is cleared by
the kernel every time: under load that was a fifth of the copier's CPU time, and what the allocator
kept of it made the process grow. So a few sinks live as long as their process.

Invariants
  S1  `data` is valid until `clear`; whoever still reads it then must not give the sink back.
  S2  memory begins at a block's boundary: a store may write it past the page cache.
  S3  memory is what the largest file so far took, unless that was an unusual one (KEPT_BYTES_MAX).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pk.log.storage import Buffer

START_BYTES = 1 << 20
#: What devices ask of the memory they read from, and of positions in a file (S2).
BLOCK_BYTES = 4096
#: Twice the default `tier_file_bytes`, and room for what a batch more and a doubling add.
KEPT_BYTES_MAX = 256 << 20


def _blocks(size: int) -> npt.NDArray[np.uint8]:
    """S2."""
    raw = np.empty(size + BLOCK_BYTES, np.uint8)
    skipped = -raw.ctypes.data % BLOCK_BYTES
    return raw[skipped : skipped + size]


class Sink:
    """A file to write to, as pyarrow sees it."""

    closed = False

    def __init__(self) -> None:
        self._memory = _blocks(START_BYTES)
        self._size = 0

    def clear(self) -> None:
        """Begin the next file."""
        self._size = 0
        if len(self._memory) > KEPT_BYTES_MAX:
            self._memory = _blocks(START_BYTES)

    def data(self) -> memoryview:
        """What was written (S1)."""
        return self._memory.data[: self._size].toreadonly()

    def write(self, data: Buffer) -> int:
        start, self._size = self._size, self._size + len(data)
        if self._size > len(self._memory):
            grown = _blocks(max(self._size, 2 * len(self._memory)))
            grown[:start] = self._memory[:start]
            self._memory = grown
        self._memory[start : self._size] = np.frombuffer(data, np.uint8)
        return len(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False
