"""Balancing of partitions among members that keep what they have.

Pure.  Topics with the same takers (members that may have their partitions) form a class.  Equal
arguments give equal results.

    1. Each member keeps what it has and may have.
    2. Each free partition goes to the taker with the smallest load; those with the fewest takers
       first.
    3. While a member can give a partition to one with at least two fewer, directly or through
       others (a gives to b, b gives to c), it gives one: the member with the largest load first.

Step 3 ends with the most balanced loads that the subscriptions allow.  If no path from a member
leads to a load that is smaller by two, none begins at a member that was reached, and no later path
ends at one: all of them are done.  Without paths through others, three members a {t}, b {t, u} and
c {u} with 3, 2 and 1 partitions would stay as they are.

Invariants
  Y1  Only step 3 takes a partition from its owner, and only to balance.  It takes those first that
      step 2 has given.
  Y2  With equal subscriptions, n partitions and m members, the work is O((n + m) log m).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from pk.types import TopicPartition


class _Holding:
    """What a member has of one class."""

    __slots__ = ("given", "kept")

    def __init__(self) -> None:
        self.kept: list[TopicPartition] = []  #: its own, sorted
        self.given: list[TopicPartition] = []

    def take(self) -> TopicPartition:
        """Remove and return the partition that costs least to move (Y1)."""
        return (self.given or self.kept).pop()

    def __bool__(self) -> bool:
        return bool(self.given or self.kept)


#: A step of a path: a member gives a partition of a class to another member.
_Step = tuple[str, int, str]


class _Balance:
    """The loads and the holdings of all members."""

    def __init__(self, takers: Mapping[str, Sequence[str]], names: Iterable[str]) -> None:
        """takers: topic → names of members, sorted; not empty"""
        self._takers: list[Sequence[str]] = []  #: by class
        self._class_of: dict[str, int] = {}  #: by topic
        numbers: dict[tuple[str, ...], int] = {}
        for topic, listed in sorted(takers.items()):
            key = tuple(listed)
            if key not in numbers:
                numbers[key] = len(self._takers)
                self._takers.append(key)
            self._class_of[topic] = numbers[key]
        self._load = dict.fromkeys(names, 0)
        self._held: dict[str, dict[int, _Holding]] = {name: {} for name in self._load}
        self._classes: dict[str, list[int]] = {name: [] for name in self._load}
        for number, listed in enumerate(self._takers):
            for name in listed:
                self._classes[name].append(number)
        #: By class: (load, name); an entry with another load than the member's is void.
        self._least = [[(0, name) for name in listed] for listed in self._takers]

    def _add(self, name: str, change: int) -> None:
        load = self._load[name] = self._load[name] + change
        for number in self._classes[name]:
            heapq.heappush(self._least[number], (load, name))

    def _holding(self, name: str, number: int) -> _Holding:
        return self._held[name].setdefault(number, _Holding())

    def keep(self, name: str, place: TopicPartition) -> None:
        """Let a member keep a partition; calls come in the order of the partitions."""
        self._holding(name, self._class_of[place.topic]).kept.append(place)
        self._add(name, 1)

    def _smallest(self, number: int) -> tuple[int, str]:
        """Return the smallest load of a class, and its member."""
        heap = self._least[number]
        while self._load[heap[0][1]] != heap[0][0]:
            heapq.heappop(heap)
        return heap[0]

    def fill(self, free: Iterable[TopicPartition]) -> None:
        """Give every free partition to a taker (step 2)."""
        numbers = self._class_of
        for place in sorted(free, key=lambda each: (len(self._takers[numbers[each.topic]]), each)):
            number = numbers[place.topic]
            _, name = self._smallest(number)
            self._holding(name, number).given.append(place)
            self._add(name, 1)

    def balance(self) -> None:
        """Move partitions until no path balances the loads any more (step 3)."""
        largest = [(-load, name) for name, load in self._load.items()]
        heapq.heapify(largest)
        done: set[str] = set()
        while largest:
            load, name = heapq.heappop(largest)
            if -load != self._load[name] or name in done:
                continue
            path = self._direct(name) or self._path(name, done)
            for giver, number, taker in path:
                self._holding(taker, number).given.append(self._held[giver][number].take())
            if path:
                self._add(name, -1)
                self._add(path[-1][2], 1)
                for each in (name, path[-1][2]):
                    heapq.heappush(largest, (-self._load[each], each))

    def _direct(self, name: str) -> list[_Step]:
        """Return the one step to the smallest load that the member can give a partition to."""
        options = [
            (*self._smallest(number), number)
            for number, holding in sorted(self._held[name].items())
            if holding
        ]
        if not options:
            return []
        load, taker, number = min(options)
        return [(name, number, taker)] if load <= self._load[name] - 2 else []

    def _path(self, name: str, done: set[str]) -> list[_Step]:
        """Return the shortest path to a load that is smaller by two; without one, all members that
        were reached are done.
        """
        came: dict[str, _Step | None] = {name: None}
        seen: set[int] = set()
        queue = [name]
        for giver in queue:
            for number, holding in sorted(self._held[giver].items()):
                if not holding or number in seen:
                    continue
                seen.add(number)
                for taker in self._takers[number]:
                    if taker in came:
                        continue
                    came[taker] = (giver, number, taker)
                    if self._load[taker] <= self._load[name] - 2:
                        return _back(came, taker)
                    queue.append(taker)
        done.update(came)
        return []

    def result(self) -> dict[str, list[TopicPartition]]:
        """Return the partitions of every member, sorted."""
        return {
            name: sorted(place for each in held.values() for place in (*each.kept, *each.given))
            for name, held in self._held.items()
        }


def _back(came: Mapping[str, _Step | None], end: str) -> list[_Step]:
    """Return the steps that lead to `end`."""
    found: list[_Step] = []
    step = came[end]
    while step is not None:
        found.append(step)
        step = came[step[0]]
    return found[::-1]


def balanced(
    names: Iterable[str],
    takers: Mapping[str, Sequence[str]],
    counts: Mapping[str, int],
    owners: Mapping[TopicPartition, str],
) -> dict[str, list[TopicPartition]]:
    """Return a balanced assignment in which members keep what they can.

    takers: topic → the members that may have its partitions, sorted
    counts: topic → number of its partitions
    owners: the owners of partitions, if they have any
    """
    listed = {topic: takers[topic] for topic in counts if takers.get(topic)}
    may = {topic: frozenset(each) for topic, each in listed.items()}
    work = _Balance(listed, names)
    free: list[TopicPartition] = []
    for topic in sorted(listed):
        for number in range(counts[topic]):
            place = TopicPartition(topic, number)
            owner = owners.get(place)
            if owner in may[topic]:
                work.keep(owner, place)
            else:
                free.append(place)
    work.fill(free)
    work.balance()
    return work.result()
