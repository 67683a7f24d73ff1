"""Which ranges one task of Spark reads: pure arithmetic over their costs.

A task of Spark costs about 27 ms, however little it reads; a further range of a task costs some
100 us if it shares a request (sparkconnector/joint_scan), or a round trip.  Ranges with few bytes
therefore share tasks.  The cost of a range is its bytes and a constant cost of opening it, as in
Spark's own file sources.

Invariants
  N1  Every range is in exactly one group, the groups are not empty, and the order is kept: one task
      reads its ranges one after the other.
  N2  A group of several ranges has at most `PACKED_BYTES_MAX` bytes, `max_records` records and
      `max_bytes` bytes.
  N3  There are at least `least` groups if there are that many ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

#: A task that reads more takes longer than it saves, and a cluster may have many more cores than
#: the driver knows of.
PACKED_BYTES_MAX = 32 * 1024 * 1024
#: The default of openCostBytes: what a task reads in the time of a round trip and a request.
OPEN_COST_BYTES = 512 * 1024


class Size(NamedTuple):
    """What a range has."""

    records: int
    bytes: int


def pack(
    sizes: Sequence[Size],
    *,
    cores: int,
    least: int = 0,
    open_cost: int = OPEN_COST_BYTES,
    max_records: int = 0,
    max_bytes: int = 0,
) -> list[range]:
    """Return groups of adjacent ranges, as indexes: about one of equal cost for each core.

    cores: tasks that run at the same time.  least: the least number of groups.  open_cost: bytes,
    at least 1.  max_records, max_bytes: of a group; 0 = not bounded.
    """
    wanted = max(1, cores, least)
    if len(sizes) <= wanted:
        return [range(at, at + 1) for at in range(len(sizes))]
    total = sum(each.bytes + open_cost for each in sizes)
    most_bytes = min(max_bytes or PACKED_BYTES_MAX, PACKED_BYTES_MAX)
    groups: list[range] = []
    start = below = share = 0
    held = Size(0, 0)
    for at, size in enumerate(sizes):
        cost = size.bytes + open_cost
        # the group in which the middle of the range lies, if the whole line has `wanted` equal ones
        mine = (2 * below + cost) * wanted // (2 * total)
        after = Size(held.records + size.records, held.bytes + size.bytes)
        full = after.bytes > most_bytes or (max_records and after.records > max_records)
        if at > start and (mine != share or full):
            groups.append(range(start, at))
            start, after = at, size
        share, held = mine, after
        below += cost
    groups.append(range(start, len(sizes)))
    return _halved(groups, min(least, len(sizes)))


def _halved(groups: list[range], least: int) -> list[range]:
    """Return at least `least` groups: the longest ones are cut in halves."""
    while len(groups) < least:
        at = max(range(len(groups)), key=lambda each: len(groups[each]))
        group = groups[at]
        middle = group.start + len(group) // 2
        groups[at : at + 1] = [range(group.start, middle), range(middle, group.stop)]
    return groups
