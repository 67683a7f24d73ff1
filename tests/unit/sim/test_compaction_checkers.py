"""Readers of compacted topics that the check must refuse, and their lawful neighbours."""

from __future__ import annotations

import pytest

from pk.sim.checkers import Violation
from pk.sim.compaction_checkers import check_rows
from pk.sim.compaction_history import CompactionHistory, Keyed, KeyedRow
from pk.sim.options import TopicPlan
from pk.sim.oracle import Oracle, RecordId
from pk.types import TopicPartition

PLACE = TopicPartition("t", 0)
RETENTION_MS = 1_000
NOW_MS = 10_000.0


class Bench:
    """A history of acknowledged records, and the rows that a reader got."""

    def __init__(self) -> None:
        plan = TopicPlan("t", 1, {})
        self.eras = Oracle([plan])
        known = Oracle([plan])
        known.created("t", "id-t", 1)
        self.history = CompactionHistory(known, self.eras, {"t": RETENTION_MS})
        self.rows: list[KeyedRow] = []

    def sent(
        self, offset: int, key: bytes, value: bytes | None, *, ago_ms: int = 5_000, ok: bool = True
    ) -> Keyed:
        record = Keyed(self.history.next_id("w"), PLACE, key, value is None, hash(value))
        self.history.send(record)
        if ok:
            self.history.acknowledged(record, offset, NOW_MS - ago_ms)
        else:
            self.history.failed(record)
        return record

    def got(self, offset: int, record: Keyed, *, ago_ms: float = 0.0) -> None:
        row = KeyedRow(
            offset, record.id, record.key, record.tombstone, record.digest, NOW_MS - ago_ms
        )
        self.rows.append(row)

    def check(self, start: int = 0, end: int | None = None) -> None:
        check_rows(
            self.history, PLACE, self.rows,
            start=start, end=end, began_ms=NOW_MS - 100, now_ms=NOW_MS,
        )  # fmt: skip

    def refused(self, words: str, start: int = 0) -> None:
        with pytest.raises(Violation, match=words):
            self.check(start)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_newest_record_of_each_key_suffices(bench: Bench) -> None:
    bench.sent(0, b"a", b"1")
    bench.got(1, bench.sent(1, b"b", b"1"))
    bench.got(2, bench.sent(2, b"a", b"2"))
    bench.check()


def test_an_older_record_over_a_newer_one(bench: Bench) -> None:
    bench.got(0, bench.sent(0, b"a", b"1"))
    bench.sent(1, b"a", b"2")
    bench.refused("is missing, the key has")
    bench.check(start=2)  # a reader from there on needs neither


def test_a_reader_may_stop_below_an_acknowledged_record(bench: Bench) -> None:
    """The high watermark of a new leader with too few replicas in sync (R1)."""
    bench.got(0, bench.sent(0, b"a", b"1"))
    bench.sent(1, b"a", b"2")
    bench.check(end=1)
    bench.refused("is missing, the key has")


def test_a_later_record_of_unknown_outcome_may_replace_the_newest(bench: Bench) -> None:
    bench.sent(0, b"a", b"1")
    bench.got(1, bench.sent(-1, b"a", b"2", ok=False))
    bench.check()


def test_an_unknown_tombstone_may_have_taken_its_key(bench: Bench) -> None:
    bench.sent(0, b"a", b"1")
    bench.refused("is missing")
    bench.sent(-1, b"a", None, ok=False)
    bench.check()


def test_a_record_that_was_acknowledged_while_it_read_may_be_missing(bench: Bench) -> None:
    bench.sent(0, b"a", b"1", ago_ms=50)
    bench.check()


@pytest.mark.parametrize(("ago_ms", "right"), [(RETENTION_MS - 1, False), (5_000, True)])
def test_a_tombstone_stays_for_a_while(bench: Bench, ago_ms: int, right: bool) -> None:
    bench.sent(0, b"a", None, ago_ms=ago_ms)
    if right:
        bench.check()
    else:
        bench.refused("is missing after 999")


def test_a_deleted_key_does_not_come_back(bench: Bench) -> None:
    old = bench.sent(0, b"a", b"1")
    bench.sent(1, b"a", None)
    bench.got(0, old, ago_ms=RETENTION_MS + 1)  # a slow reader
    bench.check()
    bench.rows.clear()
    bench.got(0, old)
    bench.refused("without its tombstone")


def test_order_contents_and_copies(bench: Bench) -> None:
    one, two = bench.sent(0, b"a", b"1"), bench.sent(1, b"b", b"1")
    for rows, words in (
        ([(1, two), (0, one)], "after offset"),
        ([(0, one), (1, two), (2, two)], "twice"),
        ([(0, one), (2, two)], "acknowledged elsewhere"),
    ):
        bench.rows.clear()
        for offset, record in rows:
            bench.got(offset, record)
        bench.refused(words)
    bench.rows = [KeyedRow(0, RecordId("x", 1), b"a", False, 0, NOW_MS)]
    bench.refused("nobody sent")
    bench.rows = [KeyedRow(0, one.id, b"a", False, one.digest + 1, NOW_MS)]
    bench.refused("is not what was sent")


def test_a_partition_that_lost_records_keeps_order_and_contents_only(bench: Bench) -> None:
    one = bench.sent(0, b"a", b"1")
    bench.sent(1, b"a", b"2")
    bench.eras.era_ends("id-t", 0, 0.0)
    bench.got(5, one)
    bench.check()
    bench.got(6, one)
    bench.refused("twice")
