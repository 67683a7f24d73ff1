"""Histories of transactions that each check must refuse, and their lawful neighbours."""

from __future__ import annotations

from typing import Any

import pytest

from pk.sim.checkers import ReadRow, Violation
from pk.sim.oracle import RecordId, Topic
from pk.sim.transaction_checkers import (
    DecisionsCheck,
    FencesCheck,
    ReadersCheck,
    check_superset,
    check_transaction_table,
    check_transactions,
    waiting_records,
)
from pk.sim.transaction_history import (
    Transaction,
    TransactionEnd,
    TransactionHistory,
    TransactionRecord,
)
from pk.types import NONE

ABORTED, COMMITTED, UNKNOWN = TransactionEnd
ID, PLACE, STATE = "id0", ("t", 0), ("state", 3)


class Bench:
    """A history whose records are sent, and appear, as a test says."""

    def __init__(self) -> None:
        self.lost: dict[tuple[str, int], float] = {}
        topics = {"t": Topic("t", True, False, life=1, topic_id="id-t", partitions=2)}
        self.history = TransactionHistory(
            topics, lambda *key: self.lost.get(key, NONE), lambda _: STATE
        )
        self.rows: dict[tuple[str, int], list[ReadRow]] = {PLACE: [], ("t", 1): []}
        self._number = self._offset = 0

    def init(self, now_ms: float) -> int:
        return self.history.initialized(ID, now_ms)

    def transaction(
        self,
        end: TransactionEnd,
        *,
        began_ms: float = 10,
        instance: int = 0,
        asked_ms: float = NONE,
    ) -> Transaction:
        pair = 7, len(self.history.transactions)
        found = Transaction(ID, instance, pair, began_ms, end=end, asked_ms=asked_ms)
        self.history.begin(found)
        return found

    def send(self, transaction: Transaction, *, partition: int = 0, at_ms: float = 20) -> RecordId:
        self._number += 1
        name = RecordId("p", self._number)
        self.history.send(transaction, TransactionRecord(name, "t", partition, 5, at_ms))
        return name

    def appears(self, name: RecordId, *, partition: int = 0, digest: int = 5) -> None:
        self._offset += 1
        self.rows["t", partition].append(ReadRow(self._offset, name, digest))

    def check(self, waiting: frozenset[RecordId] = frozenset()) -> None:
        check_transactions(self.history, self.rows, waiting)

    def refused(self, rule: str) -> None:
        with pytest.raises(Violation, match=rf"^{rule}: "):
            self.check()


@pytest.fixture
def bench() -> Bench:
    found = Bench()
    found.init(0)
    return found


# -- all or nothing (V19) --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "there", "allowed"),
    [
        (COMMITTED, 2, True), (COMMITTED, 1, False), (COMMITTED, 0, False),
        (ABORTED, 0, True), (ABORTED, 1, False), (ABORTED, 2, False),
        (UNKNOWN, 0, True), (UNKNOWN, 2, True), (UNKNOWN, 1, False),
    ],
)  # fmt: skip
def test_all_records_of_a_transaction_are_there_or_none(
    bench: Bench, end: TransactionEnd, there: int, allowed: bool
) -> None:
    transaction = bench.transaction(end)
    names = [bench.send(transaction, partition=n) for n in range(2)]
    for partition, name in enumerate(names[:there]):
        bench.appears(name, partition=partition)
    if allowed:
        bench.check()
    else:
        bench.refused("V19")


@pytest.mark.parametrize("end", [COMMITTED, UNKNOWN])
def test_a_record_above_the_last_stable_offset_is_not_missing(
    bench: Bench, end: TransactionEnd
) -> None:
    """Rule L11: an open transaction of another producer holds it back in one of the partitions."""
    transaction = bench.transaction(end)
    names = [bench.send(transaction, partition=n) for n in (0, 1, 1)]
    bench.appears(names[0])
    stood = [ReadRow(8 + n, name, 5) for n, name in enumerate(names[1:])]
    waiting = waiting_records({**bench.rows, ("t", 1): stood}, {PLACE: 8, ("t", 1): 8})
    assert waiting == set(names[1:])
    bench.check(waiting)
    higher = waiting_records({**bench.rows, ("t", 1): stood}, {PLACE: 8, ("t", 1): 9})
    assert higher == {names[2]}
    with pytest.raises(Violation, match=r"^V19: "):
        bench.check(higher)


@pytest.mark.parametrize("key", [("id-t", 0), STATE], ids=["its partition", "its coordinator"])
def test_a_transaction_may_be_torn_only_where_records_may_be_lost_since_it_began(
    bench: Bench, key: tuple[str, int]
) -> None:
    transaction = bench.transaction(TransactionEnd.COMMITTED, began_ms=10)
    bench.send(transaction)
    bench.lost[key] = 9
    bench.refused("V19")
    bench.lost[key] = 10
    bench.check()


@pytest.mark.parametrize(
    "row", [ReadRow(9, RecordId("p", 99), 5), ReadRow(9, RecordId("p", 1), 6)],
    ids=["not sent", "other contents"],
)  # fmt: skip
def test_a_row_that_was_not_sent_is_refused(bench: Bench, row: ReadRow) -> None:
    bench.send(bench.transaction(TransactionEnd.UNKNOWN))
    bench.rows[PLACE].append(row)
    bench.refused("V19")


def test_a_record_that_is_there_twice_or_elsewhere_is_refused(bench: Bench) -> None:
    name = bench.send(bench.transaction(TransactionEnd.COMMITTED))
    bench.appears(name)
    bench.check()
    bench.appears(name)
    bench.refused("V19")
    bench.rows[PLACE].clear()
    bench.appears(name, partition=1)
    bench.refused("V19")


# -- fencing and order (V21, V7) -------------------------------------------------------------------


def test_what_is_sent_after_the_successor_began_never_appears(bench: Bench) -> None:
    transaction = bench.transaction(TransactionEnd.COMMITTED, asked_ms=30)
    bench.appears(bench.send(transaction, at_ms=20))
    bench.init(50)
    bench.check()
    late = bench.transaction(TransactionEnd.UNKNOWN, asked_ms=70)
    bench.appears(bench.send(late, at_ms=60))
    bench.refused("V21")


def test_a_fenced_producer_commits_nothing(bench: Bench) -> None:
    transaction = bench.transaction(TransactionEnd.COMMITTED, asked_ms=60)
    bench.appears(bench.send(transaction, at_ms=20))
    bench.init(50)
    bench.refused("V21")


def test_records_stand_in_the_order_of_their_sends(bench: Bench) -> None:
    first, second = (bench.transaction(TransactionEnd.COMMITTED) for _ in range(2))
    names = [bench.send(first), bench.send(second)]
    for name in reversed(names):
        bench.appears(name)
    bench.refused("V7")
    bench.lost["id-t", 0] = 5  # before the transactions began, and others may stand in their place
    bench.check()


def test_records_of_a_successor_stand_behind_those_of_its_predecessor(bench: Bench) -> None:
    bench.init(50)
    old = bench.transaction(TransactionEnd.COMMITTED, asked_ms=30)
    new = bench.transaction(TransactionEnd.COMMITTED, instance=1, began_ms=60)
    before, after = bench.send(old), bench.send(new, at_ms=60)
    bench.appears(after)
    bench.appears(before)
    bench.refused("V7")


FENCES: list[tuple[str, list[tuple[Any, ...]], bool]] = [
    ("the next epoch", [("batch", 4), ("marker", 5, 1), ("batch", 5), ("marker", 6, 1)], True),
    ("a batch of the old epoch", [("batch", 4), ("marker", 5, 1), ("batch", 4)], False),
    ("a repeated marker", [("marker", 5, 1), ("marker", 5, 1)], True),
    ("one that ends the next", [("marker", 5, 1), ("batch", 5), ("marker", 5, 1)], False),
    ("an older epoch", [("marker", 5, 1), ("marker", 4, 1)], False),
    ("an older coordinator", [("marker", 5, 2), ("marker", 6, 1)], False),
]


@pytest.mark.parametrize(("events", "allowed"), [e[1:] for e in FENCES], ids=[e[0] for e in FENCES])
def test_a_marker_fences_its_producer(events: list[tuple[Any, ...]], allowed: bool) -> None:
    check = FencesCheck("t-0")

    def run() -> None:
        for offset, (kind, *facts) in enumerate(events):
            getattr(check, kind)(offset, 7, *facts)

    if allowed:
        run()
        check.batch(99, 8, 0)  # another producer
        return
    with pytest.raises(Violation, match=r"^V21: "):
        run()


# -- decisions (V20) -------------------------------------------------------------------------------


def test_a_decision_never_changes() -> None:
    check = DecisionsCheck()
    check.decided((7, 0), True, "n1", lossy=False)
    check.decided((7, 0), True, "a marker", lossy=False)
    check.decided((7, 1), False, "a marker", lossy=False)
    check.decided((7, 0), False, "a coordinator that lost its log", lossy=True)
    with pytest.raises(Violation, match=r"^V20: "):
        check.decided((7, 0), False, "n2", lossy=False)


def test_the_caller_hears_what_was_decided(bench: Bench) -> None:
    check = DecisionsCheck()
    transaction = bench.transaction(TransactionEnd.COMMITTED)
    bench.send(transaction)
    check.compare(bench.history)  # no decision was sampled
    check.decided(transaction.pair, False, "n1", lossy=False)
    with pytest.raises(Violation, match=r"^V20: "):
        check.compare(bench.history)
    transaction.end = TransactionEnd.UNKNOWN
    check.compare(bench.history)


def test_a_transaction_without_records_leaves_its_pair_to_the_next(bench: Bench) -> None:
    check = DecisionsCheck()
    empty, next_one = (
        bench.transaction(TransactionEnd.ABORTED),
        bench.transaction(TransactionEnd.COMMITTED),
    )
    next_one.pair = empty.pair
    bench.send(next_one)
    check.decided(empty.pair, True, "n1", lossy=False)
    check.compare(bench.history)


# -- readers and tables (V23, V9) ------------------------------------------------------------------


def rows(*offsets: int) -> list[ReadRow]:
    return [ReadRow(offset, RecordId("p", offset), 5) for offset in offsets]


def test_a_reader_never_goes_back() -> None:
    check = ReadersCheck("rc", committed=True)
    check.took(PLACE, rows(1, 4))
    with pytest.raises(Violation, match=r"^V23: "):
        check.took(PLACE, rows(4))
    check.forget(PLACE)
    check.took(PLACE, rows(1))


@pytest.mark.parametrize("committed", [True, False])
def test_rows_that_a_reader_saw_are_in_the_log(bench: Bench, committed: bool) -> None:
    check = ReadersCheck("r", committed=committed)
    check.took(PLACE, rows(1, 4))
    ends = {PLACE: 5}
    check.compare(bench.history, {PLACE: rows(1, 3, 4)}, ends)
    other = [ReadRow(4, RecordId("q", 1), 5)]
    with pytest.raises(Violation, match=r"^V23: "):
        check.compare(bench.history, {PLACE: [*rows(1), *other]}, ends)
    if committed:
        with pytest.raises(Violation, match=r"^V23: "):
            check.compare(bench.history, {PLACE: rows(1)}, ends)
    else:  # a table has no aborted rows
        check.compare(bench.history, {PLACE: rows(1)}, ends)
    check.compare(bench.history, {PLACE: rows(1)}, {PLACE: 4})  # the reader got further
    bench.lost["id-t", 0] = 0
    check.compare(bench.history, {PLACE: []}, ends)


def test_read_uncommitted_gets_all_committed_rows() -> None:
    check_superset({PLACE: rows(1, 3)}, {PLACE: rows(1, 2, 3)})
    with pytest.raises(Violation, match=r"^V23: "):
        check_superset({PLACE: rows(1, 3)}, {PLACE: rows(1, 2)})


@pytest.mark.parametrize(
    ("table", "allowed"),
    [(rows(3, 5), True), (rows(1, 3, 5), True), (rows(3), False), (rows(3, 4, 5), False),
     (rows(3, 5, 8), False), (rows(3, 5, 5), False)],
    ids=["gaps", "a file from below its start", "a row lacks", "an aborted row", "beyond its end",
         "a row twice"],
)  # fmt: skip
def test_a_table_has_exactly_the_committed_rows_of_its_range(
    table: list[ReadRow], allowed: bool
) -> None:
    log = rows(1, 3, 5, 8)
    if allowed:
        check_transaction_table("t-0", 3, 7, table, log, 9)
        return
    with pytest.raises(Violation, match=r"^V9: "):
        check_transaction_table("t-0", 3, 7, table, log, 9)


def test_a_table_may_have_passed_the_last_reader() -> None:
    """The last stable offset was held back when the reader ended, and has moved since."""
    check_transaction_table("t-0", 3, 9, rows(3, 5, 8), rows(3), 4)
    for table, stable in ((rows(3, 5, 8), 6), (rows(5, 8), 4), (rows(3, 5, 9), 4)):
        with pytest.raises(Violation, match=r"^V9: "):
            check_transaction_table("t-0", 3, 9, table, rows(3), stable)
