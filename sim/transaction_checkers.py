"""Checks of transactions, on plain values; no code here knows how pk works inside.

Checked
  V19  All or nothing.  A read_committed reader from offset 0 gets each record of a committed
       transaction exactly once, and no record of an aborted one.  Of a transaction of unknown
       outcome it gets all records or none (rule X1).  A record above the last stable offset is in
       the log and not visible yet (rule L11); V22 says where the offset may still be that low.
  V20  A decision never changes: what a coordinator has decided and committed, what the markers of
       all partitions say, and what the caller heard are the same (rules X1, X3).
  V21  Nothing of a fenced epoch follows its marker, and the coordinator epoch of a producer's
       markers never goes back.  What an instance sends after its successor was initialized never
       appears, and what it asks to commit from then on is not committed (rules X1, X6).
  V22  After all faults have ended, the last stable offset of each partition reaches the high
       watermark within the transaction timeout and a bound (rules L11, X3; campaign.py).  Only a
       transaction whose coordinator may have lost its decision may hold it back for longer: its
       leader waits for an operator, or for `transaction_max_timeout_ms`, before it asks again.
  V23  A read_committed reader gets rows only that the last reader gets, in the same order.  A
       read_uncommitted reader gets these rows, too.

V7 holds for transactions as well: in the order of the log, the records of a transactional id stand
in the order of its instances and of their sends.  So does V9: the table of a topic has exactly the
rows that a read_committed reader gets of the range that the table covers.  Its gaps are the offsets
of aborted records and of markers.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence

from pk.sim.checkers import ReadRow, require
from pk.sim.oracle import RecordId
from pk.sim.transaction_history import Transaction, TransactionEnd, TransactionHistory
from pk.types import NONE, Offset

#: (topic, partition) → the rows that a reader got of it, in their order
Rows = Mapping[tuple[str, int], Sequence[ReadRow]]
#: (topic, partition) → where the last read_committed reader ended: the last stable offset
StableEnds = Mapping[tuple[str, int], Offset]


def waiting_records(uncommitted: Rows, stable: StableEnds) -> frozenset[RecordId]:
    """Return the records that stand above the last stable offset, where no read_committed reader
    gets them yet.

    `uncommitted`: the rows of the last read_uncommitted reader, which ended at the high watermark.
    """
    return frozenset(
        row.id for place, rows in uncommitted.items() for row in rows if row.offset >= stable[place]
    )


def check_transactions(
    history: TransactionHistory, committed: Rows, waiting: Container[RecordId] = ()
) -> None:
    """Check V19, V21 and V7 on the rows of the last read_committed reader.

    `waiting`: the records above the last stable offsets (see `waiting_records`).
    """
    found: dict[object, tuple[str, int]] = {}
    for place, rows in committed.items():
        for row in rows:
            require(row.id in history.sent, "V19", "{}: nobody sent {}", place, row)
            transaction, sent = history.sent[row.id]
            same = (sent.topic, sent.partition, sent.digest) == (*place, row.digest)
            require(same, "V19", "{}: {} is not what was sent: {}", place, row, sent)
            if row.id in found:
                torn = history.may_be_torn(transaction)
                require(torn, "V19", "{}: {} is there twice: {}", place, row, sent)
            found[row.id] = place
    for transaction in history.transactions:
        _check_whole(history, transaction, found, waiting)
    for place, rows in committed.items():
        if not history.may_be_cut(*place):
            _check_order(history, place, rows)


def _check_whole(
    history: TransactionHistory,
    transaction: Transaction,
    found: Mapping[object, object],
    waiting: Container[RecordId],
) -> None:
    """Check that all records of one transaction are there or none, and no fenced one.

    A record that waits for the last stable offset is neither there nor missing.
    """
    if history.may_be_torn(transaction):
        return
    here = [each for each in transaction.records if each.id in found]
    fenced_ms = history.fenced_ms(transaction)
    if fenced_ms is not None:
        late = [each for each in here if each.sent_ms > fenced_ms]
        words = "sent after the successor was initialized at {}: {} of {}"
        require(not late, "V21", words, fenced_ms, late, transaction)
        late_commit = (
            transaction.end is TransactionEnd.COMMITTED and transaction.asked_ms > fenced_ms
        )
        words = "committed for a fenced producer (successor at {}): {}"
        require(not (late_commit and transaction.records), "V21", words, fenced_ms, transaction)
    gone = [each for each in transaction.records if each.id not in found]
    missing = [each for each in gone if each.id not in waiting]
    if transaction.end is TransactionEnd.COMMITTED:
        require(not missing, "V19", "committed, without {}: {}", missing, transaction)
    elif transaction.end is TransactionEnd.ABORTED:
        require(not here, "V19", "aborted, with {}: {}", here, transaction)
    else:
        require(not (here and missing), "V19", "torn, {} without {}", here, missing)


def _check_order(
    history: TransactionHistory, place: tuple[str, int], rows: Iterable[ReadRow]
) -> None:
    """Check V7: the records of each transactional id in one partition."""
    last: dict[str, tuple[tuple[int, int], ReadRow]] = {}
    for row in rows:
        transaction, _ = history.sent[row.id]
        name, mark = transaction.transactional_id, (transaction.instance, row.id.number)
        before = last.get(name)
        if before is not None and not history.coordinator_lost(name):
            require(before[0] < mark, "V7", "{}: {} stands before {}", place, before[1], row)
        last[name] = mark, row


class ReadersCheck:
    """The rows of one reader during the run; `name` says which one it is."""

    def __init__(self, name: str, *, committed: bool) -> None:
        self.name = name
        self.committed = committed
        self.rows: dict[tuple[str, int], list[ReadRow]] = {}

    def took(self, place: tuple[str, int], rows: Iterable[ReadRow]) -> None:
        """Check that the offsets of the next rows increase."""
        seen = self.rows.setdefault(place, [])
        for row in rows:
            if seen:
                words = "{} at {}: {} after {}"
                require(row.offset > seen[-1].offset, "V23", words, self.name, place, row, seen[-1])
            seen.append(row)

    def forget(self, place: tuple[str, int]) -> None:
        """Start again: the log was cut where records may be lost."""
        self.rows.pop(place, None)

    def compare(self, history: TransactionHistory, last: Rows, ends: StableEnds) -> None:
        """Check V23: compare with the rows of the last reader of the same isolation.

        `ends`: where that reader ended; this one may have got further.
        Rows that a read_uncommitted reader saw may be missing there: a table has committed rows
        only.
        """
        for place, rows in self.rows.items():
            if history.may_be_cut(*place):
                continue
            known = {row.offset: row for row in last.get(place, ())}
            for row in rows:
                if row.offset >= ends[place]:
                    break
                now = known.get(row.offset)
                same = now == row or (now is None and not self.committed)
                words = "{} saw {} at {}, the last reader {}"
                require(same, "V23", words, self.name, row, place, now)


def check_superset(committed: Rows, uncommitted: Rows) -> None:
    """Check V23: a read_uncommitted reader gets all committed rows."""
    for place, rows in committed.items():
        more = set(uncommitted.get(place, ()))
        missing = [row for row in rows if row not in more]
        require(not missing, "V23", "{}: read_uncommitted lacks {}", place, missing[:3])


def check_transaction_table(
    where: str,
    start: Offset,
    end: Offset,
    table: Sequence[ReadRow],
    log: Sequence[ReadRow],
    stable: Offset,
) -> None:
    """Check V9 for one partition of a topic of transactions.

    `log`: the rows of the last read_committed reader, which ended at `stable`.  The table may have
    passed that offset since.
    """
    offsets = [row.offset for row in table]
    require(len(offsets) == len(set(offsets)), "V9", "{}: an offset is in the table twice", where)
    read = [row for row in table if not stable <= row.offset < end]
    inside = sorted(row for row in read if row.offset >= start)
    expected = [row for row in log if start <= row.offset < end]
    extra = [row for row in inside if row not in set(expected)]
    missing = [row for row in expected if row not in set(inside)]
    words = "{} of [{}, {}): the table has {} more, and lacks {}"
    require(not extra and not missing, "V9", words, where, start, end, extra[:3], missing[:3])


class DecisionsCheck:
    """Checks V20 on everything that says how a transaction ended."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[bool, str]] = {}

    def decided(self, pair: tuple[int, int], commit: bool, who: str, *, lossy: bool) -> None:
        """Note the decision about the transaction of `pair`; `lossy`: it may be lost."""
        known, first = self._known.setdefault(pair, (commit, who))
        same = known == commit or lossy
        require(same, "V20", "{}: {} says commit={}, {} said {}", pair, who, commit, first, known)

    def said(self, pair: tuple[int, int]) -> tuple[bool, str] | None:
        """Return whether the transaction of `pair` commits, and who said so first; None = it is
        not known."""
        return self._known.get(pair)

    def compare(self, history: TransactionHistory) -> None:
        """Compare with what the callers heard."""
        last = {each.pair: each for each in history.transactions if each.records}
        for each in last.values():  # a transaction of which nothing was sent leaves its pair
            known = self._known.get(each.pair)
            if known is None or history.may_be_torn(each):
                continue
            heard = {TransactionEnd.COMMITTED: True, TransactionEnd.ABORTED: False}.get(
                each.end, known[0]
            )
            require(known[0] == heard, "V20", "{} said {} about {}", known[1], known[0], each)


class FencesCheck:
    """Checks V21 on the batches and markers of one partition, in the order of its log.

    A marker may stand there twice, if the leader forgot its producer in between, but not while the
    producer's next transaction is open.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        #: producer id → the epoch of its newest marker, and its coordinator's epoch
        self._fences: dict[int, tuple[int, int]] = {}
        self._open: dict[int, int] = {}  #: producer id → epoch of its open transaction

    def marker(self, offset: Offset, producer_id: int, epoch: int, coordinator_epoch: int) -> None:
        """Check a marker at `offset`."""
        before = self._fences.get(producer_id, (NONE, NONE))
        ended = self._open.pop(producer_id, NONE)
        words = "{} at {}: a marker of {} with epoch {} of coordinator epoch {}, after {}, open {}"
        facts = self._where, offset, producer_id, epoch, coordinator_epoch, before, ended
        in_order = epoch >= before[0] and coordinator_epoch >= before[1]
        require(in_order and epoch > ended, "V21", words, *facts)
        self._fences[producer_id] = epoch, coordinator_epoch

    def batch(self, offset: Offset, producer_id: int, epoch: int) -> None:
        """Check a transactional batch at `offset`."""
        fence = self._fences.get(producer_id, (NONE, NONE))[0]
        words = "{} at {}: a batch of {} with epoch {}, fenced by a marker of epoch {}"
        require(epoch >= fence, "V21", words, self._where, offset, producer_id, epoch, fence)
        self._open[producer_id] = epoch
