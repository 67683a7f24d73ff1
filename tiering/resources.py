"""What the tier process takes of the machine: priority, threads, memory.

Called once, before Arrow and deltalake are loaded; only the tier's own process does it.

The process runs at a slightly lower priority (rule P1, server/node/run_config.py) and no lower: to
copy a record costs two to three times the CPU time that the broker spends to take it in
(`make soak` tells both), and on a busy machine the copier must still get it.  The broker keeps what
is not
tiered: a copier that is behind for ever fills its disk.

Rules
  Z1  the number of threads is fixed, not the machine's: a few copy, the rest waits for the store
  Z2  memory that was used once is used again.  Each allocator of the process has one heap for all
      threads: a heap or cache per thread adds up with every thread that comes and goes.  glibc's
      (Python, numpy, Parquet) keeps what was freed, because it holds the large blocks that every
      file needs; a page given back and asked for again costs more than what is done with it.
      deltalake's gives back at once: it needs much for a moment, when a checkpoint is written
"""

from __future__ import annotations

import ctypes
import os

#: deltalake's runtime: a table has one commit a second at most, and one call at a time.
DELTA_THREADS = 2
#: Arrow's own pools do next to nothing here: files are written by the upload threads themselves.
ARROW_THREADS = 1
#: The allocator inside deltalake.
DELTA_MALLOC = "narenas:1,tcache:false,dirty_decay_ms:0,muzzy_decay_ms:0,background_thread:false"
#: Blocks up to this size come from glibc's heap (the most it allows); a read's buffer is 4 MiB.
HEAP_BLOCK_BYTES = 32 * 1024 * 1024
#: So much free memory at its end glibc's heap keeps.
HEAP_KEPT_BYTES = 64 * 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def configure() -> None:
    """Z1, Z2.  What the user's environment says of deltalake stands."""
    os.environ.setdefault("TOKIO_WORKER_THREADS", str(DELTA_THREADS))
    os.environ.setdefault("_RJEM_MALLOC_CONF", DELTA_MALLOC)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # another C library's allocator looks after itself
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, HEAP_KEPT_BYTES)
    import pyarrow as pa

    pa.set_cpu_count(ARROW_THREADS)
    pa.set_io_thread_count(ARROW_THREADS)
