"""When a server process collects garbage (rule P7).

A collection visits every object of its generations, and the event loop waits meanwhile.  A tick
that collects the youngest generation visits all that is alive of the last second: with 10,000
members, whose heartbeats wait, hundreds of thousands of objects.  The interpreter's own rule counts
objects made minus objects freed.  Requests free what they make, so a process at a steady load
collects nothing, and one that grows collects often, and little each time.  The oldest generation is
visited once it has grown by a quarter since it was visited last (CPython's rule).

What is loaded when the role begins to serve is never visited again.
"""

from __future__ import annotations

import gc

#: Objects made minus objects freed between two collections of the youngest generation: about 1 ms.
YOUNG_OBJECTS = 10_000
#: Collections of the youngest generation to one of the middle one, and of that to the oldest.
MIDDLE, OLDEST = 20, 10


def collect_seldom() -> None:
    """Set when this process collects garbage."""
    gc.set_threshold(YOUNG_OBJECTS, MIDDLE, OLDEST)


def freeze_loaded() -> None:
    """Exclude from collections what is alive now.

    The youngest objects are looked at first; a second look at the half million of 10,000 partitions
    finds nothing.
    """
    gc.collect(0)
    gc.freeze()
