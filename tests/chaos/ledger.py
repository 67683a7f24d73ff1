"""What the driver knows of each record it sent, and what that demands of the log.

A record's value starts with its id; ids grow in send order.  Pure: the driver feeds it outcomes and
what was read, and gets violations in words.

Demands, for every partition
  D1  offsets and ids both grow: nothing twice, and order is send order
  D2  an acknowledged record is there, at the offset that was acknowledged
  D3  a record of unknown outcome is there once or not at all
  D4  a record refused before it was sent is not there
  D5  nothing is there that was not sent
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

ID_DIGITS = 12
SHOWN_MAX = 5


class Outcome(enum.Enum):
    PENDING = "pending"
    ACKNOWLEDGED = "acknowledged"
    UNKNOWN = "unknown"
    REFUSED = "refused"


@dataclass(slots=True)
class Sent:
    partition: int
    outcome: Outcome = Outcome.PENDING
    offset: int = -1


@dataclass(slots=True)
class Ledger:
    """Ids are positions in `records`."""

    records: list[Sent] = field(default_factory=list)

    def send(self, partition: int) -> int:
        """A new record's id, to be put into its value."""
        self.records.append(Sent(partition))
        return len(self.records) - 1

    def acknowledge(self, number: int, partition: int, offset: int) -> None:
        sent = self.records[number]
        sent.outcome, sent.offset = Outcome.ACKNOWLEDGED, offset
        # an acknowledgement that names another partition is found as D2 there
        sent.partition = partition

    def settle(self, number: int, outcome: Outcome) -> None:
        self.records[number].outcome = outcome

    def count(self, outcome: Outcome) -> int:
        return sum(sent.outcome is outcome for sent in self.records)

    def partitions(self) -> list[int]:
        return sorted({sent.partition for sent in self.records})

    def violations(self, partition: int, found: list[tuple[int, int]]) -> list[str]:
        """`found`: (offset, id) of the partition from offset 0 to the end, in reading order."""
        told = []
        where: dict[int, int] = {}
        last_offset = last_id = -1
        for offset, number in found:
            if offset <= last_offset:
                told.append(f"D1: offset {offset} follows {last_offset}")
            if number in where:
                told.append(f"D1: record {number} is at {where[number]} and at {offset}")
            elif number < last_id:
                told.append(f"D1: record {number} at {offset} follows record {last_id}")
            if not 0 <= number < len(self.records) or (self.records[number].partition != partition):
                told.append(f"D5: record {number} at {offset} was not sent here")
            where.setdefault(number, offset)
            last_offset, last_id = offset, max(last_id, number)
        for number, sent in enumerate(self.records):
            if sent.partition != partition:
                continue
            if sent.outcome is Outcome.ACKNOWLEDGED and where.get(number) != sent.offset:
                told.append(
                    f"D2: record {number} was acknowledged at {sent.offset}, "
                    f"found at {where.get(number)}"
                )
            elif sent.outcome is Outcome.REFUSED and number in where:
                told.append(f"D4: record {number} was refused, found at {where[number]}")
            elif sent.outcome is Outcome.PENDING:
                told.append(f"D2: record {number} never got an answer")
        return [f"partition {partition}: {words}" for words in told]


def value_of(number: int, padding: bytes) -> bytes:
    return b"%0*d" % (ID_DIGITS, number) + padding


def number_of(value: bytes | None) -> int:
    """The id in a value; -1 for what no driver wrote."""
    head = (value or b"")[:ID_DIGITS]
    return int(head) if len(head) == ID_DIGITS and head.isdigit() else -1
