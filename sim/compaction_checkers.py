"""Checks of what readers of compacted topics get, on plain values (rules C1, C4, C7, C8).

Checked
  V28  A reader from any offset gets offsets in order, no record twice, and only records that were
       sent, with their contents, at the offset that was acknowledged.  Of each key it gets the
       newest record that was acknowledged before it began, or a later one.  A tombstone may be
       missing only if delete_retention_ms have passed since it was acknowledged, and then the
       reader gets no older record of its key, unless it got that record delete_retention_ms ago.
  V29  The same holds for the rows below the high watermark of every replica, once the cluster is in
       sync: each may lead next.  No replica has cleaned what was not committed (C1): it would
       refuse to follow the next leader, which lacks it.

A partition that may have lost acknowledged records is checked for order and contents only.  A key
with a tombstone of unknown outcome may have no record at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from pk.sim.checkers import require
from pk.sim.compaction_history import CompactionHistory, Keyed, KeyedRow
from pk.sim.oracle import Outcome
from pk.types import Offset, TopicPartition


def check_rows(
    history: CompactionHistory,
    place: TopicPartition,
    rows: Sequence[KeyedRow],
    *,
    start: Offset,
    end: Offset | None = None,
    began_ms: float,
    now_ms: float,
    rule: str = "V28",
    who: str = "a reader",
) -> None:
    """Check all rows of `[start, HW)` of one reader or one replica.

    start: offsets below it are not expected; a log that has expired begins later
    end: where the reader stopped; None = behind every record.  The high watermark of a new leader
        stays below acknowledged records while too few replicas are in sync (rule R1)
    began_ms: when the reader began; now_ms: when it reached the high watermark
    """
    where = f"{who} of {place} from {start}"
    check_contents(history, place, rows, rule, where)
    if history.may_be_cut(place):
        return
    last = {row.key: row for row in rows}
    retention_ms = history.retention_ms(place)
    for key, record in newest_of(history, place, start, end, began_ms).items():
        row = last.get(key)
        if row is not None and row.offset >= record.offset:
            continue
        require(record.tombstone, rule, "{}: {} is missing, the key has {}", where, record, row)
        age_ms = now_ms - record.acked_ms
        words = "{}: {} is missing after {} ms"
        require(age_ms > retention_ms, rule, words, where, record, age_ms)
        late = row is None or now_ms - row.read_ms > retention_ms
        require(late, rule, "{}: {} without its tombstone {}", where, row, record)


def newest_of(
    history: CompactionHistory,
    place: TopicPartition,
    start: Offset,
    end: Offset | None,
    acked_ms: float,
) -> dict[bytes, Keyed]:
    """Return of each key the newest record of `[start, end)` that was acknowledged by `acked_ms`.

    Keys with a tombstone of unknown outcome are missing: it may stand behind that record.
    """
    newest: dict[bytes, Keyed] = {}
    sent = history.of(place)
    vague = {each.key for each in sent if each.tombstone and _unknown(each)}
    start = max(start, history.log_start(place))
    for each in sent:
        known = each.outcome is Outcome.ACKNOWLEDGED and each.acked_ms <= acked_ms
        inside = each.offset >= start and (end is None or each.offset < end)
        if known and inside and each.key not in vague:
            before = newest.get(each.key)
            newest[each.key] = each if before is None or before.offset < each.offset else before
    return newest


def _unknown(record: Keyed) -> bool:
    return record.outcome is not Outcome.ACKNOWLEDGED


def check_contents(
    history: CompactionHistory,
    place: TopicPartition,
    rows: Sequence[KeyedRow],
    rule: str,
    where: str,
) -> None:
    """Check that each row is a record that was sent, once, in the order of the offsets."""
    cut = history.may_be_cut(place)
    before = -1
    seen: dict[object, KeyedRow] = {}
    for row in rows:
        require(row.offset > before, rule, "{}: {} after offset {}", where, row, before)
        before = row.offset
        again = seen.setdefault(row.id, row)
        require(again is row, rule, "{}: {} twice, at {} too", where, row, again.offset)
        sent = history.sent.get(row.id)
        require(sent is not None, rule, "{}: nobody sent {}", where, row)
        assert sent is not None
        same = (sent.place, sent.key, sent.digest) == (place, row.key, row.digest)
        require(same, rule, "{}: {} is not what was sent: {}", where, row, sent)
        there = sent.outcome is not Outcome.ACKNOWLEDGED or sent.offset == row.offset
        require(there or cut, rule, "{}: {} was acknowledged elsewhere: {}", where, row, sent)
