"""The maintained tables of a run, as known outside the cluster, and what must hold of them.

A maintained table is that of a compacted topic with a tier.  Its keyed records are in the history
of all compacted topics (compaction_history.py).

Checked
  V30  Each row of a table is a record that was sent, with its contents, at the offset that was
       acknowledged, and is there once.  Of each key with an acknowledged record below the table's
       end it has the newest one, or a later one.  A tombstone may be missing only if
       delete_retention_ms have passed since it was acknowledged, and then the table has no row of
       its key (rules C4, C6).  Rows and row sums of the live files are those of the counters (T2).
  V31  A snapshot as of X has of each key the row that was the newest below X, or no row if that was
       a tombstone (rule C3).
  V32  Once an owner has taken a hand-over under a lease, it takes no later one under an older
       lease, as long as the partition that names the owner has the same leader (rule C5).

A partition that may have lost acknowledged records is checked for contents only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pk.sim.checkers import require
from pk.sim.compaction_checkers import check_contents, newest_of
from pk.sim.compaction_history import CompactionHistory, KeyedRow
from pk.types import NONE, Offset, TopicPartition


class TableFacts(NamedTuple):
    """One partition of a version of a table.  `rows`: those at or above `start`, by offset."""

    start: Offset
    end: Offset
    counted: int  #: rows − removed
    counted_sum: int  #: sum − removed_sum
    rows: Sequence[KeyedRow]
    row_sum: int


def check_table_rows(
    history: CompactionHistory, place: TopicPartition, facts: TableFacts, now_ms: float
) -> None:
    """Check V30 for a version that was newest at `now_ms`."""
    where = f"the table of {place}"
    check_contents(history, place, facts.rows, "V30", where)
    same = (len(facts.rows), facts.row_sum) == (facts.counted, facts.counted_sum)
    words = "{}: {} rows with the sum {}, the counters say {} with {}"
    numbers = len(facts.rows), facts.row_sum, facts.counted, facts.counted_sum
    require(same, "V30", words, where, *numbers)
    if history.may_be_cut(place):
        return
    last = {row.key: row for row in facts.rows}
    retention_ms = history.retention_ms(place)
    for key, record in newest_of(history, place, facts.start, facts.end, now_ms).items():
        row = last.get(key)
        if row is not None and row.offset >= record.offset:
            continue
        require(record.tombstone, "V30", "{}: {} is missing, the key has {}", where, record, row)
        age_ms = now_ms - record.acked_ms
        old = age_ms > retention_ms and row is None
        words = "{}: {} is missing after {} ms, and the key has {}"
        require(old, "V30", words, where, record, age_ms, row)


@dataclass(slots=True)
class SnapshotState:
    """The snapshot of a topic: X of each partition, and the row of each key."""

    positions: dict[int, Offset] = field(default_factory=dict)
    rows: dict[tuple[int, bytes], KeyedRow] = field(default_factory=dict)


def check_snapshot(
    history: CompactionHistory,
    topic: str,
    state: SnapshotState,
    starts: Mapping[int, Offset],
    began_ms: float,
) -> None:
    """Check V31.  began_ms: when the run began, which brought the snapshot to X.

    starts: the start of each partition in the version that was read
    """
    for partition, end in state.positions.items():
        place = TopicPartition(topic, partition)
        if history.may_be_cut(place):
            continue
        where = f"the snapshot of {place} as of {end}"
        mine = [row for (number, _), row in state.rows.items() if number == partition]
        check_contents(history, place, sorted(mine), "V31", where)
        newest = newest_of(history, place, starts.get(partition, 0), end, began_ms)
        for key, record in newest.items():
            row = state.rows.get((partition, key))
            after = row is not None and row.offset >= record.offset
            gone = record.tombstone and row is None
            require(after or gone, "V31", "{}: it has {} for {}", where, row, record)


class Taken(NamedTuple):
    """A hand-over that an owner took: the lease's token, and the leader epoch of partition 0."""

    token: int
    leader_epoch: int
    answered_ms: float


class LeaseHistory:
    """The hand-overs that were taken, by topic; checks V32."""

    def __init__(self) -> None:
        self._newest: dict[str, Taken] = {}

    def taken(self, topic: str, token: int, sent_ms: float, now_ms: float, epoch: int) -> None:
        """Note that a hand-over, which was sent at `sent_ms`, changed the table.

        epoch: the leader epoch of partition 0, now
        """
        newest = self._newest.get(topic, Taken(NONE, NONE, 0.0))
        older = token < newest.token and newest.answered_ms <= sent_ms
        stale = older and newest.leader_epoch == epoch
        words = "a hand-over to {} under lease {} was taken after {}"
        require(not stale, "V32", words, topic, token, newest)
        if token > newest.token:
            self._newest[topic] = Taken(token, epoch, now_ms)
