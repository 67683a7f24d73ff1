"""Sets the priority, the threads and the memory of the tier process.

Only the tier's own process calls this, once, before Arrow and deltalake are loaded.

The process runs at a slightly lower priority than the broker (rule P1, server/node/run_config.py),
and no lower.  Copying a record costs two to three times the CPU time that the broker spends on
appending it (`make soak` reports both), and on a busy machine the copier must still get that time.
The broker keeps records that are not tiered: a copier that stays behind fills the broker's disk.

Rules
  Z1  The number of threads does not depend on the machine.  A few threads copy, and the others wait
      for the store.
  Z2  Memory is reused.  Each allocator of the process has one heap for all threads: a heap or cache
      per thread grows with every thread that starts and ends.  glibc's allocator (Python, numpy,
      Parquet) keeps freed memory, because every file needs large blocks, and returning a page to
      the kernel and getting it back costs more than using it.  deltalake's allocator returns memory
      immediately, because deltalake needs much only briefly, when a checkpoint is written.
"""

from __future__ import annotations

import ctypes
import os

#: Threads of deltalake's runtime: a table has one commit a second at most, and one call at a time.
DELTA_THREADS = 2
#: Arrow's own pools have little work here: the upload threads themselves write the files.
ARROW_THREADS = 1
#: Settings of the allocator inside deltalake.
DELTA_MALLOC = "narenas:1,tcache:false,dirty_decay_ms:0,muzzy_decay_ms:0,background_thread:false"
#: Blocks up to this size come from glibc's heap (its maximum); a read's buffer is 4 MiB.
HEAP_BLOCK_BYTES = 32 * 1024 * 1024
#: Free memory that glibc keeps at the end of its heap.
HEAP_KEPT_BYTES = 64 * 1024 * 1024
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


def configure() -> None:
    """Limits threads and memory (Z1, Z2).  Environment variables that the user has set for
    deltalake keep their values."""
    os.environ.setdefault("TOKIO_WORKER_THREADS", str(DELTA_THREADS))
    os.environ.setdefault("_RJEM_MALLOC_CONF", DELTA_MALLOC)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries' allocators need no settings
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES)
        mallopt(_M_TRIM_THRESHOLD, HEAP_KEPT_BYTES)
    import pyarrow as pa

    pa.set_cpu_count(ARROW_THREADS)
    pa.set_io_thread_count(ARROW_THREADS)
