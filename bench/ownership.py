"""What the members of a group have told: who owns which partition, and since when it is polled.

Pure: the lines of bench/rebalance_member go in, times come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Told:
    """The lines of one member so far.  Times are seconds of one clock."""

    ready: bool = False
    owned: dict[int, float] = field(default_factory=dict)  #: partition → when it was assigned
    polled: dict[int, float] = field(default_factory=dict)  #: owned partition → its first record
    losses: list[float] = field(default_factory=list)  #: when partitions were revoked
    pauses: list[tuple[float, float]] = field(default_factory=list)  #: (begin, end)

    def hear(self, line: Mapping[str, Any]) -> None:
        """Take in one line."""
        what, at = line["what"], float(line["at"])
        partitions = line.get("partitions", ())
        if what == "ready":
            self.ready = True
        elif what == "assigned":
            self.owned.update(dict.fromkeys(partitions, at))
        elif what == "revoked":
            if partitions:
                self.losses.append(at)
            for each in partitions:
                self.owned.pop(each, None)
                self.polled.pop(each, None)
        elif what == "polled":
            self.polled.update(dict.fromkeys(partitions, at))
        elif what == "pause":
            self.pauses.append((at - line["seconds"], at))


def settled_at(members: Iterable[Told], partitions: int) -> float | None:
    """Return when the last partition was first polled by its owner; None = not all are.

    Each partition has one owner that has polled it, and each member owns its share, rounded down:
    a group that has not heard of a new member yet does not count.
    """
    members = list(members)
    owned = [each for member in members for each in member.owned]
    if sorted(owned) != list(range(partitions)):
        return None
    share = partitions // len(members)
    if any(len(each.owned) < share or each.owned.keys() - each.polled.keys() for each in members):
        return None
    return max(at for each in members for at in each.polled.values())


def owned_at(members: Iterable[Told]) -> float:
    """Return when the last partition was assigned."""
    return max(at for each in members for at in each.owned.values())


def longest_pause(members: Iterable[Told], begin: float, end: float) -> float:
    """Return the longest pause, in seconds, that overlaps the time from begin to end, of the
    members that lost no partition in it; of all members if each lost some; 0 = none.
    """
    members = list(members)
    kept = [each for each in members if not any(begin <= at <= end for at in each.losses)]
    found = (
        after - before
        for each in kept or members
        for before, after in each.pauses
        if after >= begin and before <= end
    )
    return max(found, default=0.0)
