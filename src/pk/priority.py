"""The CPU priority of a process whose work can wait.

Linux groups the processes of a session (autogroups, sched(7)): niceness counts among the processes
of one group, and the group has a niceness of its own.  pk's processes each have a session.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")


def lower(niceness: int) -> None:
    """Raise the niceness of this process, and of its session if it leads one."""
    os.nice(niceness)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # another system, or a kernel without autogroups
            AUTOGROUP.write_text(f"{niceness}\n")
