"""What a reused Python worker of Spark pays at every task, and need not.

Spark's daemon lets a worker collect garbage after every task.  A full collection walks every
object of every imported module, pyspark's, Arrow's and ours: 45 ms of CPU, as much as reading and
decoding 700,000 records; a stream pays it for every partition of every trigger.  Modules do not
become garbage, so a worker that is used again sets them apart, once (docs/design/0004).

Invariant
  W1  what is set apart is still freed when its last reference goes; only cycles among objects that
      were there at the second task stay until the process ends.  It happens once, so it is bounded.
"""

from __future__ import annotations

import gc
import os

from pyspark import TaskContext

_tasks = 0
_pid = 0


def begin_task() -> None:
    """Count a task of this worker; at the second one, set apart what is there.

    Not at the first: then the modules a task needs are not all loaded, and a worker that runs one
    task only would gain nothing.  Spark has just collected, so no garbage is kept.  Does nothing
    outside a task: in the driver's own process memory is not ours to arrange.
    """
    global _pid, _tasks
    if TaskContext.get() is None:
        return
    if _pid != os.getpid():
        _pid, _tasks = os.getpid(), 0
    _tasks += 1
    if _tasks == 2:
        gc.freeze()
