"""Spares reused Python workers of Spark the cost of garbage collection over imported modules.

Spark's daemon makes a worker collect garbage after every task.  A full collection walks every
object of every imported module (pyspark, Arrow, pk).  That takes 45 ms of CPU, as much as reading
and decoding 700,000 records, and a stream pays it for every partition of every trigger.  Modules do
not become garbage, so a worker that is used again excludes their objects from collection, once
(`gc.freeze`; docs/design/0004).

Invariant
  W1  An excluded object is still freed when its last reference goes.  Only cycles among the objects
      that existed at the second task stay until the process ends.  The exclusion happens once, so
      its memory is bounded.
"""

from __future__ import annotations

import gc
import os

from pyspark import TaskContext

_tasks = 0
_pid = 0


def begin_task() -> None:
    """Count a task of this worker; at the second task, exclude all present objects from collection.

    The first task is too early: not all modules are loaded yet, and a worker that runs a single
    task would gain nothing.  At the second, Spark has just collected garbage, so none is kept.
    Outside a task, as in the driver's own process, the function does nothing.
    """
    global _pid, _tasks
    if TaskContext.get() is None:
        return
    if _pid != os.getpid():
        _pid, _tasks = os.getpid(), 0
    _tasks += 1
    if _tasks == 2:
        gc.freeze()
