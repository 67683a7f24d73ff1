"""What the driver knows of each record it sent, and what the log must contain because of it.

A record's value starts with its id; ids grow in send order.  Pure: the driver passes outcomes and
the records that were read, and gets violations in words.  The ledger uses columns instead of
objects, because a campaign has millions of records.

Demands, for every partition
  D1  offsets and ids both grow: no record is there twice, and the order is the send order
  D2  an acknowledged record is there, at the acknowledged offset
  D3  a record of unknown outcome is there at most once
  D4  a record that was refused before it was sent is not there
  D5  no record is there that was not sent
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence

import numpy as np

ID_DIGITS = 12
SHOWN_MAX = 5


class Outcome(enum.Enum):
    PENDING = "pending"
    ACKNOWLEDGED = "acknowledged"
    UNKNOWN = "unknown"
    REFUSED = "refused"


_CODES = {outcome: code for code, outcome in enumerate(Outcome)}
_ACKNOWLEDGED, _PENDING = _CODES[Outcome.ACKNOWLEDGED], _CODES[Outcome.PENDING]


class Read:
    """The records read of one partition: offsets and ids, in reading order."""

    __slots__ = ("ids", "offsets")

    def __init__(self, pairs: Sequence[tuple[int, int]] = ()) -> None:
        self.offsets = array("q", (offset for offset, _ in pairs))
        self.ids = array("q", (number for _, number in pairs))

    def __len__(self) -> int:
        return len(self.offsets)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Read) and (self.offsets, self.ids) == (other.offsets, other.ids)

    __hash__ = None  # type: ignore[assignment]

    def add(self, offsets: Sequence[int], ids: Sequence[int]) -> None:
        self.offsets.extend(offsets)
        self.ids.extend(ids)


class Ledger:
    """The sent records; an id is a position in the columns."""

    def __init__(self) -> None:
        self._partitions = array("q")
        self._offsets = array("q")
        self._outcomes = bytearray()

    def __len__(self) -> int:
        return len(self._outcomes)

    def send(self, partition: int) -> int:
        """Return a new record's id, which is put into its value."""
        self._partitions.append(partition)
        self._offsets.append(-1)
        self._outcomes.append(_PENDING)
        return len(self._outcomes) - 1

    def acknowledge(self, number: int, partition: int, offset: int) -> None:
        self._outcomes[number] = _ACKNOWLEDGED
        self._offsets[number] = offset
        # an acknowledgement that names another partition is found as D2 there
        self._partitions[number] = partition

    def settle(self, number: int, outcome: Outcome) -> None:
        self._outcomes[number] = _CODES[outcome]

    def count(self, outcome: Outcome) -> int:
        return self._outcomes.count(_CODES[outcome])

    def partitions(self) -> list[int]:
        return sorted(set(self._partitions))

    def violations(self, partition: int, found: Read | Sequence[tuple[int, int]]) -> list[str]:
        """Return the broken demands; `found`: (offset, id) of the partition from offset 0 to the
        end.
        """
        read = found if isinstance(found, Read) else Read(found)
        offsets, ids = np.array(read.offsets), np.array(read.ids)
        told = _order(offsets, ids)
        owner = np.array(self._partitions)
        known = (ids >= 0) & (ids < len(owner))
        strange = ~known
        strange[known] = owner[ids[known]] != partition
        told += [
            f"D5: record {ids[at]} at {offsets[at]} was not sent here"
            for at in np.flatnonzero(strange)
        ]
        where = np.full(len(owner), -1)
        where[ids[known][::-1]] = offsets[known][::-1]  # the first place of each
        told += self._promises(owner == partition, where)
        return [f"partition {partition}: {words}" for words in told]

    def _promises(self, mine: np.ndarray, where: np.ndarray) -> list[str]:
        """Check D2 and D4: the outcomes of this partition's records, and where the records are (-1
        = nowhere).
        """
        outcomes = np.array(self._outcomes, dtype=np.uint8)
        acknowledged = np.array(self._offsets)
        lost = mine & (outcomes == _ACKNOWLEDGED) & (where != acknowledged)
        told = [
            f"D2: record {number} was acknowledged at {acknowledged[number]}, "
            f"found at {where[number] if where[number] >= 0 else None}"
            for number in np.flatnonzero(lost)
        ]
        there = mine & (outcomes == _CODES[Outcome.REFUSED]) & (where >= 0)
        told += [
            f"D4: record {number} was refused, found at {where[number]}"
            for number in np.flatnonzero(there)
        ]
        silent = np.flatnonzero(mine & (outcomes == _PENDING))
        return told + [f"D2: record {number} never got an answer" for number in silent]


def _order(offsets: np.ndarray, ids: np.ndarray) -> list[str]:
    # D1
    back = np.flatnonzero(np.diff(offsets) <= 0)
    told = [f"D1: offset {offsets[at + 1]} follows {offsets[at]}" for at in back]
    ranked = np.argsort(ids, kind="stable")
    twice = np.flatnonzero(np.diff(ids[ranked]) == 0)
    told += [
        f"D1: record {ids[ranked[at]]} is at {offsets[ranked[at]]} and at {offsets[ranked[at + 1]]}"
        for at in twice
    ]
    turned = np.flatnonzero(ids[1:] < np.maximum.accumulate(ids)[:-1]) if len(ids) else ()
    again = set(ranked[twice + 1].tolist())
    told += [
        f"D1: record {ids[at + 1]} at {offsets[at + 1]} follows record {ids[: at + 1].max()}"
        for at in turned
        if at + 1 not in again
    ]
    return told


def value_of(number: int, padding: bytes) -> bytes:
    return b"%0*d" % (ID_DIGITS, number) + padding


def number_of(value: bytes | None) -> int:
    """Return the id in a value; -1 for a value that no driver wrote."""
    head = (value or b"")[:ID_DIGITS]
    return int(head) if len(head) == ID_DIGITS and head.isdigit() else -1
