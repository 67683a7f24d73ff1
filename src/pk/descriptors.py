"""The descriptors of a process, and who may have how many.

A process whose limit is reached cannot open a file, accept a connection or sync a directory.  So
each kind of use has a share of the limit, and the shares leave a part for what is open for a
moment: sealed segments that are read, files that are replaced, connections to an object store.
"""

from __future__ import annotations

import resource

#: The share of files that stay open (`log/descriptor_pool`), and of connections (rule L17).
FILES_SHARE = 0.55
CONNECTIONS_SHARE = 0.35
#: The limit that is assumed if the process has none.
UNLIMITED = 1 << 20
#: A server with fewer descriptors does not start.
LEAST = 256


def limit() -> int:
    """Return how many descriptors this process may have (`ulimit -n`)."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else min(soft, UNLIMITED)


def share(part: float) -> int:
    """Return how many descriptors a share of the limit is; at least one."""
    return max(1, int(limit() * part))
