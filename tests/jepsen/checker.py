"""Finds anomalies in the history of transactional producers and read_committed consumers.

    python tests/jepsen/checker.py HISTORY        a file of JSON lines, written by run.py

Pure: `check` takes a history and returns a verdict.  The classes are those of Jepsen's workload for
Kafka, Redpanda and Bufstream.  A write *happened* if it was acknowledged: by the commit of its
transaction, or by its own acknowledgement if it was sent without a transaction.  It also happened
if its outcome is not known and a consumer returned a record of its transaction.

    lost            a write that happened is missing in a log that was read beyond its place
    unseen          a write that happened is missing, and the log was not read to its place
    torn            some records of a transaction are visible at the end, others are not
    duplicate       one write is at two places
    inconsistent    an offset has two values, or an acknowledgement and a read differ
    phantom         a value was read that was not sent to this key
    G1a             a read of a write that failed (aborted read)
    precommitted    a transaction polled its own write
    G1c             information flows in a circle: from a write to its reader, through processes
                    and through time (an operation that ended comes before one that begins later)
    poll skip       a consumer skips a write that happened
    nonmonotonic poll   a consumer goes back, or gets a record twice
    nonmonotonic send   a process' later write has a lower offset than its earlier one
    offset back     a group's committed offset is lower than one known before (group_rules.py)
    offset phantom  a member got an offset that no member can have committed: also of an abort
    offset skip     a group has passed a record that no member has processed
    processed twice a group has processed a record in two transactions that committed
    G0              transactions that write several keys in different orders

All of them must be 0, except G0.  As in Kafka, the records of open transactions interleave in the
log; a consumer sees none of them before its transaction commits.  For the same reason G1c ignores
the order of writes.

`lost`, `unseen` and `torn` are judged for each consumer whose operations are `final`; without such
a consumer, for all consumers together.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cycles import cyclic_groups
from group_rules import group_anomalies
from history import ASSIGN, FAIL, INFO, OK, SEND, TXN, Operation, Sent, load

ANOMALIES = (
    "lost", "unseen", "torn", "duplicate", "inconsistent", "phantom", "G1a", "precommitted", "G1c",
    "poll skip", "nonmonotonic poll", "nonmonotonic send", "offset back",
    "offset phantom", "offset skip", "processed twice",
)  # fmt: skip
ALLOWED = ("G0",)
SHOWN_MAX = 5  #: of each anomaly, in words


@dataclass(slots=True)
class Verdict:
    """How often each anomaly was found, and the first examples in words."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ANOMALIES + ALLOWED, 0))
    examples: list[str] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)

    def add(self, anomaly: str, words: str, count: int = 1) -> None:
        """Count an anomaly."""
        self.counts[anomaly] += count
        if sum(each.startswith(f"{anomaly}: ") for each in self.examples) < SHOWN_MAX:
            self.examples.append(f"{anomaly}: {words}")

    @property
    def valid(self) -> bool:
        """Return whether no anomaly was found, except those that are allowed."""
        return not any(self.counts[each] for each in ANOMALIES)


class Analysis:
    """What follows from a history: writers, readers, and each key's log."""

    def __init__(self, history: Sequence[Operation]) -> None:
        self.history = history
        #: (key, value) → the position of the operation that sent it
        self.writer: dict[tuple[int, int], int] = {}
        #: key → offset → the values that a read returned there
        self.read_at: dict[int, dict[int, set[int]]] = defaultdict(dict)
        #: (key, value) → the offsets at which a read returned it
        self.places: dict[tuple[int, int], set[int]] = {}
        for at, operation in enumerate(history):
            for sent in operation.sends:
                self.writer[sent.key, sent.value] = at
            for polled in operation.polls:
                log = self.read_at[polled.key]
                for offset, value in zip(polled.offsets, polled.values, strict=True):
                    log.setdefault(offset, set()).add(value)
                    self.places.setdefault((polled.key, value), set()).add(offset)
        seen = {self.writer[write] for write in self.places if write in self.writer}
        #: positions of the operations with a write that a consumer returned
        self.seen_writers = seen
        #: (key, value) → its offset, of the writes that happened; -1 = not known
        self.happened: dict[tuple[int, int], int] = {
            (sent.key, sent.value): self.offset_of(sent)
            for at, operation in enumerate(history)
            for sent in operation.sends
            if self.has_happened(at, sent)
        }
        #: key → the sorted offsets of all records that a read_committed consumer must return
        self.log: dict[int, list[int]] = self._logs()

    def has_happened(self, at: int, sent: Sent) -> bool:
        """Return whether this write of the operation at position `at` is known to be visible."""
        if self.history[at].kind == SEND:
            return sent.offset >= 0 or (sent.key, sent.value) in self.places
        return self.has_committed(at)

    def has_committed(self, at: int) -> bool:
        """Return whether the transaction at position `at` is known to have committed."""
        outcome = self.history[at].outcome
        return outcome == OK or (outcome != FAIL and at in self.seen_writers)

    def offset_of(self, sent: Sent) -> int:
        """Return the offset of the acknowledgement, else of a read; -1 = not known."""
        if sent.offset >= 0:
            return sent.offset
        return min(self.places.get((sent.key, sent.value), {-1}))

    def _logs(self) -> dict[int, list[int]]:
        offsets = {key: set(log) for key, log in self.read_at.items()}
        for (key, _), offset in self.happened.items():
            if offset >= 0:
                offsets.setdefault(key, set()).add(offset)
        return {key: sorted(found) for key, found in offsets.items()}

    def name(self, at: int) -> str:
        """Return words for the operation at a position."""
        operation = self.history[at]
        note = f" ({operation.note})" if operation.note else ""
        return f"{operation.outcome} {operation.kind} {at} of process {operation.process}{note}"


def check(history: Sequence[Operation]) -> Verdict:
    """Return the verdict about a history."""
    verdict, analysis = Verdict(), Analysis(history)
    verdict.totals = totals(history)
    for judge in JUDGES:
        judge(analysis, verdict)
    return verdict


def totals(history: Iterable[Operation]) -> dict[str, int]:
    """Return how many operations of each kind and outcome there are, and how many records."""
    found: Counter[str] = Counter()
    for operation in history:
        found["operations"] += operation.kind != ASSIGN
        found[f"{operation.kind} {operation.outcome}"] += 1
        found["copies"] += bool(operation.group) and (operation.kind, operation.outcome) == (
            TXN,
            OK,
        )
        found["records sent"] += len(operation.sends)
        found["records polled"] += sum(len(each.offsets) for each in operation.polls)
    return {name: count for name, count in sorted(found.items()) if count}


# -- one write, one place --------------------------------------------------------------------------


def _places(analysis: Analysis, verdict: Verdict) -> None:
    """Find duplicates, inconsistent offsets, phantoms and aborted reads."""
    for (key, value), offsets in analysis.places.items():
        if len(offsets) > 1:
            verdict.add("duplicate", f"key {key}: {value} is at offsets {sorted(offsets)}")
        at = analysis.writer.get((key, value))
        if at is None:
            verdict.add("phantom", f"key {key}: {value} at {min(offsets)} was not sent to it")
        elif analysis.history[at].outcome == FAIL:
            verdict.add("G1a", f"key {key}: {value} at {min(offsets)}, of {analysis.name(at)}")
    taken: dict[tuple[int, int], set[int]] = {
        (key, offset): set(values)
        for key, log in analysis.read_at.items()
        for offset, values in log.items()
    }
    for operation in analysis.history:
        for sent in operation.sends:
            if sent.offset >= 0:  # durable with acks=all, also if its transaction was aborted
                taken.setdefault((sent.key, sent.offset), set()).add(sent.value)
                elsewhere = analysis.places.get((sent.key, sent.value), {sent.offset})
                if sent.offset not in elsewhere:
                    verdict.add(
                        "inconsistent",
                        f"key {sent.key}: {sent.value} was acknowledged at {sent.offset} "
                        f"and read at {sorted(elsewhere)}",
                    )
    for (key, offset), values in taken.items():
        if len(values) > 1:
            verdict.add("inconsistent", f"key {key}: offset {offset} has {sorted(values)}")


# -- everything is there ---------------------------------------------------------------------------


def _everything(analysis: Analysis, verdict: Verdict) -> None:
    """Find lost, unseen and torn writes, for each final consumer."""
    finals = sorted({each.process for each in analysis.history if each.final})
    for process in finals or [None]:
        values: set[tuple[int, int]] = set()
        ends: dict[int, int] = {}
        for operation in analysis.history:
            if process in (None, operation.process):
                for polled in operation.polls:
                    values.update((polled.key, value) for value in polled.values)
                    ends[polled.key] = max(ends.get(polled.key, -1), *polled.offsets, -1)
        who = "any consumer" if process is None else f"final consumer {process}"
        _missing(analysis, verdict, values, ends, who)


def _missing(
    analysis: Analysis,
    verdict: Verdict,
    values: set[tuple[int, int]],
    ends: dict[int, int],
    who: str,
) -> None:
    """Find the writes that happened and that a consumer, which read up to `ends`, did not get."""
    torn: dict[int, int] = {}
    for write, offset in analysis.happened.items():
        if write in values:
            continue
        at, (key, value) = analysis.writer[write], write
        anomaly = "lost" if offset < ends.get(key, -1) else "unseen"
        words = f"key {key}: {value} at {offset}, of {analysis.name(at)}"
        verdict.add(anomaly, f"{words}, is missing for {who}")
        torn[at] = torn.get(at, 0) + 1
    for at, count in torn.items():
        operation = analysis.history[at]
        if operation.kind == TXN and count < len(operation.sends):
            words = f"{count} of {len(operation.sends)} writes are missing for {who}"
            verdict.add("torn", f"{analysis.name(at)}: {words}")


# -- order -----------------------------------------------------------------------------------------


def _polls(analysis: Analysis, verdict: Verdict) -> None:
    """Walk along each consumer: it must return exactly the records of the log, one by one."""
    ranks = {key: {each: at for at, each in enumerate(log)} for key, log in analysis.log.items()}
    due: dict[int, dict[int, int]] = defaultdict(dict)  #: process → key → position in the log
    for operation in analysis.history:
        expected = due[operation.process]
        if operation.kind == ASSIGN:
            due[operation.process] = {
                key: bisect_left(analysis.log.get(key, []), offset)
                for key, offset in operation.starts.items()
            }
        for key, offsets, _ in operation.polls:
            for offset in offsets:
                rank = ranks[key][offset]
                wanted = expected.get(key, rank)
                words = f"process {operation.process}, key {key}: offset {offset}"
                if rank < wanted:
                    before = analysis.log[key][wanted - 1]
                    verdict.add("nonmonotonic poll", f"{words} follows offset {before}")
                elif rank > wanted:
                    missed = analysis.log[key][wanted:rank]
                    verdict.add("poll skip", f"{words} comes instead of {missed[:3]}", len(missed))
                expected[key] = rank + 1


def _sends(analysis: Analysis, verdict: Verdict) -> None:
    """Compare the order of each process' sends with the order of the log."""
    last: dict[tuple[int, int], tuple[int, int]] = {}
    for operation in analysis.history:
        for sent in operation.sends:
            offset, place = analysis.offset_of(sent), (operation.process, sent.key)
            if offset < 0:
                continue
            before, value = last.get(place, (-1, -1))
            if offset <= before:
                words = f"{sent.value} at {offset} was sent after {value} at {before}"
                verdict.add(
                    "nonmonotonic send", f"process {operation.process}, key {sent.key}: {words}"
                )
            last[place] = offset, sent.value


# -- circles ---------------------------------------------------------------------------------------


def _information_flow(analysis: Analysis, verdict: Verdict) -> None:
    """Find G1c, and transactions that polled their own writes."""
    edges: dict[int, set[int]] = defaultdict(set)
    for at, operation in enumerate(analysis.history):
        for polled in operation.polls:
            for value in polled.values:
                writer = analysis.writer.get((polled.key, value), at)
                if writer != at:
                    edges[writer].add(at)
                elif (polled.key, value) in analysis.writer:
                    verdict.add("precommitted", f"key {polled.key}: {value} in {analysis.name(at)}")
    _add_time(analysis.history, edges)
    _add_processes(analysis.history, edges)
    for group in cyclic_groups(edges):
        found = [at for at in group if at < len(analysis.history)]
        names = "; ".join(map(analysis.name, found[:4]))
        verdict.add("G1c", f"{len(found)} operations, among them {names}")


def _add_time(history: Sequence[Operation], edges: dict[int, set[int]]) -> None:
    """Add edges from each operation that ended to those that were invoked later.

    The operations that ended lead to a chain of further nodes, one for each end, so the number of
    edges stays small.
    """
    ended = sorted(
        (each.ended, at)
        for at, each in enumerate(history)
        if each.ended is not None and each.outcome != INFO
    )
    times = [time for time, _ in ended]
    first = len(history)
    for number, (_, at) in enumerate(ended):
        edges[at].add(first + number)
        if number:
            edges[first + number - 1].add(first + number)
    for at, operation in enumerate(history):
        before = bisect_left(times, operation.invoked) - 1
        if before >= 0:
            edges[first + before].add(at)


def _add_processes(history: Sequence[Operation], edges: dict[int, set[int]]) -> None:
    """Add an edge from each transaction to the next one of its process.

    A producer whose outcome is not known is replaced by one with the same transactional id, and
    `init_transactions` returns once the earlier transaction has ended.
    """
    last: dict[int, int] = {}
    for at, operation in enumerate(history):
        if operation.kind == TXN:
            if operation.process in last:
                edges[last[operation.process]].add(at)
            last[operation.process] = at


def _write_order(analysis: Analysis, verdict: Verdict) -> None:
    """Count G0: circles of the orders in which transactions wrote the keys."""
    logs: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for write, offset in analysis.happened.items():
        at = analysis.writer[write]
        if offset >= 0 and analysis.history[at].kind == TXN:
            logs[write[0]].append((offset, at))
    edges: dict[int, set[int]] = defaultdict(set)
    for log in logs.values():
        log.sort()
        for (_, one), (_, other) in itertools.pairwise(log):
            if one != other:
                edges[one].add(other)
    for group in cyclic_groups(edges):
        verdict.add("G0", f"{len(group)} transactions, among them {analysis.name(group[0])}")


def _groups(analysis: Analysis, verdict: Verdict) -> None:
    """Find committed offsets that go back, and records that groups skip or process twice."""
    for anomaly, words in group_anomalies(analysis.history, analysis.log, analysis.has_committed):
        verdict.add(anomaly, words)


Judge = Callable[[Analysis, Verdict], None]
JUDGES: tuple[Judge, ...] = (
    _places, _everything, _polls, _sends, _information_flow, _write_order, _groups,
)  # fmt: skip


def main() -> int:
    """Print the verdict about the history in a file."""
    with Path(sys.argv[1]).open() as lines:
        verdict = check(load(lines))
    for name, count in {**verdict.totals, **verdict.counts}.items():
        print(f"{name:<24}{count:>10}")
    print("\n".join(verdict.examples))
    return 0 if verdict.valid else 1


if __name__ == "__main__":
    sys.exit(main())
