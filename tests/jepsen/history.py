"""The history of a run: a list of operations of client processes, as plain data.

A *process* is one client: its operations follow each other.  Each write is a number that is sent
once.  A *key* is the number of a partition.

    send    records of a producer without transactions; each record has an outcome of its own
    poll    records that a consumer got
    txn     sends and polls in one transaction
    assign  the consumer of the process begins to read at these offsets, and reads nothing else
    commit  a member of a group commits offsets
    fetch   a member of a group asks for the committed offsets

A `poll` or a `txn` of a member names the group: its records are processed by the group.  A `txn`
may commit offsets.

An operation is `ok` (it happened), `fail` (it did not and never will) or `info` (its outcome is not
known: it may happen at any time, or never).  An operation that was invoked and never completed is
`info`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

SEND, POLL, TXN, ASSIGN = "send", "poll", "txn", "assign"
COMMIT, FETCH = "commit", "fetch"
OK, FAIL, INFO = "ok", "fail", "info"


class Sent(NamedTuple):
    """A record that was sent; offset -1 = not acknowledged."""

    key: int
    value: int
    offset: int = -1


class Polled(NamedTuple):
    """Records of one key that a poll returned, in their order."""

    key: int
    offsets: list[int]
    values: list[int]


@dataclass(slots=True)
class Operation:
    """One operation of a process.  Times are seconds of one clock."""

    process: int
    kind: str
    invoked: float
    outcome: str = INFO
    ended: float | None = None
    sends: list[Sent] = field(default_factory=list)
    polls: list[Polled] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)  #: of `assign`: key → offset
    group: str = ""
    #: Key → offset of the next record: committed, or found by a `fetch`.
    offsets: dict[int, int] = field(default_factory=dict)
    final: bool = False  #: by a consumer that reads every key from offset 0 after the last fault
    note: str = ""  #: why the operation ended as it did, for a person

    def finish(self, outcome: str, now: float, note: str = "") -> None:
        """Note the outcome."""
        self.outcome, self.ended, self.note = outcome, now, note


def dump(history: Iterable[Operation]) -> Iterator[str]:
    """Yield a JSON line for each operation."""
    for operation in history:
        yield json.dumps(dataclasses.asdict(operation))


def load(lines: Iterable[str]) -> list[Operation]:
    """Return the history of these lines."""
    return [_operation(json.loads(line)) for line in lines if line.strip()]


def _operation(row: dict[str, Any]) -> Operation:
    row["sends"] = [Sent(*each) for each in row["sends"]]
    row["polls"] = [Polled(*each) for each in row["polls"]]
    for name in ("starts", "offsets"):
        row[name] = {int(key): offset for key, offset in row[name].items()}
    return Operation(**row)
