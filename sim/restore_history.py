"""What clients of a restored cluster and of the clusters before it know, and what must hold of it.

A record's producer is named NAME@NUMBER, where the number is that of the cluster it was sent to.
The first cluster has the number 0, and the cluster of generation g has the number g.

Checked
  V38  An offset of a partition of a topic id is given to one record: no two acknowledgements, rows
       of readers, or rows of a table differ at an offset, whichever clusters they come from.
  V39  A reader that keeps its position, also when it moves to the restored cluster, gets every
       offset in order, or an error that names what it does not get.
  V40  The histories of two clusters do not interleave in a table.  The rows below the end of a
       table, as the restore claimed it, stay as they are, and no row is added to them.  The rows in
       the block of a generation come from the cluster of that generation.
  V41  An acknowledged record of a lost cluster below the table's end, and every acknowledged record
       of the last cluster, is in the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pk import generations
from pk.client.offsets import EARLIEST
from pk.sim.checkers import ReadRow, require
from pk.sim.oracle import RecordId
from pk.types import Offset


class Place(NamedTuple):
    """A partition of one life of a topic."""

    topic_id: str
    partition: int


class Kept(NamedTuple):
    """The table of a partition as a restore claimed it."""

    generation: int
    end: Offset  #: of the table, before the claim moved it
    rows: dict[Offset, ReadRow]


def cluster_of(record: RecordId) -> int:
    """Return the number of the cluster that a record was sent to."""
    return int(record.producer.split("@")[1])


class RestoreHistory:
    """The records at all offsets that a client of any cluster has seen."""

    def __init__(self) -> None:
        self.given: dict[tuple[Place, Offset], ReadRow] = {}
        self.acknowledged: dict[tuple[Place, Offset], int] = {}  #: number of the cluster
        self.kept: dict[Place, list[Kept]] = {}
        self.generations: list[int] = []  #: of the restores so far

    def saw(self, place: Place, row: ReadRow, who: str) -> None:
        """Note a row at its offset (V38)."""
        known = self.given.setdefault((place, row.offset), row)
        words = "{} has {} at {}, and {} was given there before"
        require(known == row, "V38", words, who, row, place, known)

    def acked(self, place: Place, row: ReadRow, cluster: int) -> None:
        """Note an acknowledgement of a cluster (V38)."""
        self.saw(place, row, f"an acknowledgement of cluster {cluster}")
        self.acknowledged[place, row.offset] = cluster

    def claimed(self, place: Place, kept: Kept) -> None:
        """Note the table of a partition at the claim of a restore (V41)."""
        self.kept.setdefault(place, []).append(kept)
        for (where, offset), cluster in self.acknowledged.items():
            if where == place and offset < kept.end and cluster == kept.generation - 1:
                words = "{} of {} is below {} and is not in the table"
                require(offset in kept.rows, "V41", words, offset, place, kept.end)

    def check_table(self, place: Place, rows: Iterable[ReadRow], last: int) -> int:
        """Check V38, V40 and V41 of the newest version; return the number of rows.

        last: number of the last cluster
        """
        found: dict[Offset, ReadRow] = {}
        for row in rows:
            require(row.offset not in found, "V40", "{} has {} twice", place, row.offset)
            found[row.offset] = row
            self.saw(place, row, "the table")
            block, of = row.offset // generations.OFFSETS, cluster_of(row.id)
            require(block == of, "V40", "{}: {} was sent to cluster {}", place, row, of)
        claimed = {each.generation: each.rows for each in self.kept.get(place, ())}
        for generation in self.generations:
            low, before = generation * generations.OFFSETS, claimed.get(generation, {})
            now = {offset: row for offset, row in found.items() if offset < low}
            words = "{}: the rows below generation {} were {}, and are {}"
            require(now == before, "V40", words, place, generation, len(before), len(now))
        for (where, offset), cluster in self.acknowledged.items():
            if where == place and cluster == last:
                require(offset in found, "V41", "{} of {} is not in the table", offset, place)
        return len(found)


class KeptPosition:
    """The position of one reader in one partition (V39)."""

    def __init__(self, history: RestoreHistory, name: str, place: Place) -> None:
        self._history = history
        self._name = name
        self._place = place
        self.next: Offset = 0  #: EARLIEST = an error said that its offset is gone
        self.told = 0  #: number of errors that named a loss

    def took(self, row: ReadRow) -> None:
        words = "{} at {} of {} gets {}"
        facts = self._name, self.next, self._place, row
        require(self.next in (row.offset, EARLIEST), "V39", words, *facts)
        self._history.saw(self._place, row, self._name)
        self.next = row.offset + 1

    def out_of_range(self) -> None:
        """Begin again at the log start: an error says that the offset is outside the log."""
        self.told += 1
        self.next = EARLIEST

    def lost(self, start: Offset, end: Offset) -> None:
        """Go on behind a range that an error named."""
        words = "{} at {} of {} gets an error about [{}, {})"
        facts = self._name, self.next, self._place, start, end
        inside = start <= self.next < end or self.next == EARLIEST
        require(inside, "V39", words, *facts)
        self.told += 1
        self.next = end
