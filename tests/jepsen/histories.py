"""Histories for the tests of the checker, operation by operation."""

from __future__ import annotations

from typing import Any

from checker import check
from history import ASSIGN, COMMIT, FETCH, OK, POLL, TXN, Operation, Polled, Sent

NEVER = None


class History:
    """A history in which each operation takes one second, after the one before unless `at` is
    given.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._now = 0.0

    def add(self, process: int, kind: str, outcome: str = OK, **fields: Any) -> History:
        """Add an operation; at: when it was invoked; lasts: seconds, NEVER = no completion."""
        begin, lasts = fields.pop("at", self._now), fields.pop("lasts", 1.0)
        ended = NEVER if lasts is NEVER else begin + lasts
        self.operations.append(Operation(process, kind, begin, outcome, ended, **fields))
        self._now = max(self._now, begin) + 2.0
        return self

    def txn(
        self, process: int, *sends: tuple[int, int, int], outcome: str = OK, **fields: Any
    ) -> History:
        """Add a transaction that sends (key, value, offset)."""
        return self.add(process, TXN, outcome, sends=[Sent(*each) for each in sends], **fields)

    def poll(self, process: int, key: int, *pairs: tuple[int, int], final: bool = False) -> History:
        """Add a poll that returned (offset, value) of one key."""
        return self.add(process, POLL, polls=[polled(key, *pairs)], final=final)

    def assign(self, process: int, **starts: int) -> History:
        """Add an assignment: k0=5 means key 0 from offset 5."""
        return self.add(
            process, ASSIGN, starts={int(key[1:]): offset for key, offset in starts.items()}
        )

    def copy(
        self, process: int, sent: tuple[int, int, int], *pairs: tuple[int, int], **fields: Any
    ) -> History:
        """Add a transaction of a member of `exact`: it has polled (offset, value) of key 0, sends
        (key, value, offset), and commits what follows.
        """
        fields.setdefault("offsets", {0: pairs[-1][0] + 1})
        polls = [polled(0, *pairs)]
        return self.txn(process, sent, polls=polls, group="exact", **fields)

    def process(self, process: int, *pairs: tuple[int, int]) -> History:
        """Add a poll of a member of `plain` that returned (offset, value) of key 0."""
        return self.add(process, POLL, polls=[polled(0, *pairs)], group="plain")

    def commit(self, process: int, offset: int, outcome: str = OK, **fields: Any) -> History:
        """Add a commit of a member of `plain` for key 0."""
        return self.add(process, COMMIT, outcome, group="plain", offsets={0: offset}, **fields)

    def fetch(self, process: int, offset: int, group: str = "plain", **fields: Any) -> History:
        """Add what a member of a group got when it asked for the offset of key 0."""
        return self.add(process, FETCH, group=group, offsets={0: offset}, **fields)

    def of_groups(self) -> dict[str, int]:
        """Return the anomalies of groups: these histories do not read everything to the end."""
        names = ("offset back", "offset phantom", "offset skip", "processed twice")
        return {name: count for name, count in self.found().items() if name in names}

    def found(self) -> dict[str, int]:
        """Return the anomalies that are not 0, G0 included."""
        return {name: count for name, count in check(self.operations).counts.items() if count}


def polled(key: int, *pairs: tuple[int, int]) -> Polled:
    return Polled(key, [offset for offset, _ in pairs], [value for _, value in pairs])
