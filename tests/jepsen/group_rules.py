"""Finds anomalies of consumer groups in a history.  Pure.

A group *processes* a record when a member polls it; if its members work in transactions, when a
transaction that polled it commits.

    offset back     An offset was acknowledged to a committer, or returned to a member that asked.
                    After that, a request that began later committed a lower one, or was answered
                    with a lower one.  A member begins where the group is, and a member that was
                    removed cannot commit (X12), so no request can.
    offset phantom  A member that asked got an offset that no commit named, or only the commits of
                    transactions that were aborted.
    offset skip     A record is below an offset that the group has committed, or below a record that
                    it has processed, and no member has processed it: it fell between two owners.
    processed twice Two transactions of members that both committed have processed a record (X2).

A commit whose outcome is not known counts only by what was seen of it: an offset that a member got,
or a record of its transaction that a consumer returned.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from history import FAIL, FETCH, OK, TXN, Operation

#: (group, key)
Place = tuple[str, int]


def group_anomalies(
    history: Sequence[Operation],
    log: Mapping[int, Sequence[int]],
    has_committed: Callable[[int], bool],
) -> Iterator[tuple[str, str]]:
    """Yield each anomaly with words.

    log: key → the sorted offsets of the records that a consumer must return
    has_committed: whether the transaction at a position of the history has committed
    """
    yield from _offsets_back(history)
    yield from _offsets_of_no_commit(history)
    yield from _processed(history, log, has_committed)


def _offsets_back(history: Sequence[Operation]) -> Iterator[tuple[str, str]]:
    """Compare each offset with the largest one that was known before its request began."""
    known: dict[Place, list[tuple[float, int, int]]] = defaultdict(list)
    for at, operation in enumerate(history):
        if operation.outcome == OK and operation.ended is not None:
            for key, offset in operation.offsets.items():
                known[operation.group, key].append((operation.ended, offset, at))
    for (group, key), found in known.items():
        found.sort()
        times = [time for time, _, _ in found]
        largest = [found[0]]
        for each in found[1:]:
            largest.append(max(largest[-1], each, key=lambda one: one[1]))
        for _, offset, at in found:
            before = bisect_left(times, history[at].invoked) - 1
            if before >= 0 and offset < largest[before][1]:
                _, larger, other = largest[before]
                words = f"{_name(history, at)} has {offset} after {larger} of "
                yield "offset back", f"{group}, key {key}: {words}{_name(history, other)}"


def _offsets_of_no_commit(history: Sequence[Operation]) -> Iterator[tuple[str, str]]:
    """Compare each offset that a member got with those that were committed, or may have been."""
    possible: dict[Place, set[int]] = defaultdict(set)
    for operation in history:
        if operation.kind != FETCH and operation.outcome != FAIL:
            for key, offset in operation.offsets.items():
                possible[operation.group, key].add(offset)
    for at, operation in enumerate(history):
        if operation.kind == FETCH and operation.outcome == OK:
            for key, offset in operation.offsets.items():
                if offset and offset not in possible[operation.group, key]:
                    words = f"{_name(history, at)} got {offset}, which was not committed"
                    yield "offset phantom", f"{operation.group}, key {key}: {words}"


def _processed(
    history: Sequence[Operation],
    log: Mapping[int, Sequence[int]],
    has_committed: Callable[[int], bool],
) -> Iterator[tuple[str, str]]:
    """Compare what each group has processed with the log, as far as the group has come."""
    polled: dict[Place, set[int]] = defaultdict(set)
    copied: dict[Place, Counter[int]] = defaultdict(Counter)  #: in transactions
    reached: dict[Place, int] = defaultdict(int)
    for at, operation in enumerate(history):
        if not operation.group:
            continue
        counts = has_committed(at) if operation.kind == TXN else operation.outcome == OK
        if not counts:
            continue
        for key, offset in operation.offsets.items():
            reached[operation.group, key] = max(reached[operation.group, key], offset)
        for each in operation.polls:
            place = operation.group, each.key
            if operation.kind == TXN:
                copied[place].update(each.offsets)
            polled[place].update(each.offsets)
            reached[place] = max(reached[place], *(offset + 1 for offset in each.offsets), 0)
    for place, end in reached.items():
        group, key = place
        offsets = log.get(key, ())
        for offset in offsets[: bisect_left(offsets, end)]:
            if offset not in polled[place]:
                words = f"{group}, key {key}: no member has processed offset {offset} below {end}"
                yield "offset skip", words
    for (group, key), counted in copied.items():
        for offset, count in sorted(counted.items()):
            if count > 1:
                words = f"offset {offset} is in {count} committed transactions"
                yield "processed twice", f"{group}, key {key}: {words}"


def _name(history: Sequence[Operation], at: int) -> str:
    operation = history[at]
    return f"{operation.kind} {at} of process {operation.process}"
