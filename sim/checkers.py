"""Checks of what must always hold, on plain values; no code here knows how pk works inside.

`Invariants` checks samples of partitions during the run, and `ReaderCheck` checks every row that a
consumer gets.  At the end `check_log` checks the whole log as a reader from offset 0 sees it, and
`check_table` checks the files of a topic's table.  A failed check raises `Violation`.

Checked
  V1  Each leader epoch has one broker.  log_start ≤ LSO ≤ HW ≤ log_end.  Under flush_on_ack
      HW ≤ synced end (rules L2, L11).
  V2  HW never goes back within a leader epoch.
  V3  log_start never goes back on a broker that keeps its copy.  On the current leader it is never
      behind a deletion by request that was done, unless an era ended.  It moves only as far as a
      client asked for (rule T9): by true time no record of a run expires, whatever the clocks say
      (rule L10).
  V4  The table holds what is no longer local (rules T1, T6): table start ≤ the largest log_start or
      the offset that a client asked to delete to, and local_log_start ≤ table end.  The table never
      passes the LSO of a leader whose HW has caught up.
  V5  A reader sees offsets in order, without gaps above log_start, and no record twice.  It gets
      the error of a lost range (rule L9) only where too few whole copies are left, and the error of
      missing rows (rule T17) only where another engine deleted them; it goes on behind the range.
      The last reader gets neither error.  A process reports such damage only where a fault caused
      it (damage_reports.py).
  V6  Every acknowledged record is in the log once, at the acknowledged offset.  A record of unknown
      outcome is there at most once.  No record is there that no producer sent.  Contents are
      unchanged (rules L4, L6, L7).  Where an unclean election lost the acknowledged copy, the copy
      of an earlier attempt may have come back: it was in the log of an old leader that was replaced
      before any follower had fetched it.
  V7  The records of an idempotent producer stand in send order (rule L6).
  V8  Where acknowledged records may be lost (an era ended), only a suffix is lost: the survivors of
      an era are a prefix of it.
  V9  The table holds each offset of [start, end) exactly once, with the record of the log.  Rows
      and row sums of its live files are those of its counters (T2).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pk.sim.oracle import Oracle, Outcome, RecordId, Sent, Topic
from pk.types import NONE, NodeId, Offset, PartitionKey


class Violation(AssertionError):
    """A check failed: pk broke a promise."""


def require(holds: bool, rule: str, words: str, *facts: object) -> None:
    """Raise `Violation` unless `holds`.

    `words` is a format string for `facts`; it is filled in only on failure, because checks run
    after every event.
    """
    if not holds:
        raise Violation(f"{rule}: {words.format(*facts)}")


class ReadRow(NamedTuple):
    """One record, as a reader or a table file returned it."""

    offset: Offset
    id: RecordId
    digest: int


@dataclass(slots=True)  # creating a frozen instance takes three times as long
class PartitionSample:
    """The state of one partition on its leader at one moment."""

    key: PartitionKey
    topic: str
    broker: int
    leader_epoch: int
    log_start: Offset
    local_log_start: Offset
    last_stable_offset: Offset
    high_watermark: Offset
    log_end: Offset
    synced_end: Offset
    tiered: bool
    flushed: bool
    ready: bool  #: its HW covers everything that earlier leaders committed
    current: bool  #: the metadata log holds no later leader epoch
    table_start: Offset = NONE
    table_end: Offset = NONE


@dataclass(slots=True)
class _Seen:
    """The values of a partition in earlier samples of one broker."""

    era: int
    epoch: int = NONE
    high_watermark: Offset = 0
    known_synced: Offset = 0
    log_start: Offset = 0


class Invariants:
    """Checks V1 to V4 on the samples of a run."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._seen: dict[tuple[PartitionKey, int], _Seen] = {}
        self._leaders: dict[tuple[PartitionKey, int], int] = {}
        self._starts: dict[PartitionKey, Offset] = {}  # the largest log_start sampled on any broker
        self.samples = 0

    def log_start(self, key: PartitionKey) -> Offset:
        """Return the largest log_start that any broker has had of a partition; 0 = none.

        A reader was served by any of them.  A new leader may not know yet how far retention had
        moved log_start on the leader before it.
        """
        return self._starts.get(key, 0)

    def check(self, sample: PartitionSample) -> None:
        self.samples += 1
        s = sample
        self._starts[s.key] = max(s.log_start, self.log_start(s.key))
        leads = self._leaders.setdefault((s.key, s.leader_epoch), s.broker)
        require(leads == s.broker, "V1", "broker {} leads this epoch too: {}", leads, s)
        ordered = s.log_start <= s.last_stable_offset <= s.high_watermark <= s.log_end
        require(ordered, "V1", "log_start ≤ LSO ≤ HW ≤ log_end: {}", s)
        era = self._oracle.era(*s.key)
        seen = self._seen.get((s.key, s.broker))
        if seen is None:
            seen = self._seen[s.key, s.broker] = _Seen(era)
        if s.leader_epoch != seen.epoch:  # a restarted process need not know what was SYNCED
            seen.known_synced = s.high_watermark
        if s.flushed:
            synced = max(s.synced_end, seen.known_synced)
            require(s.high_watermark <= synced, "V1", "not SYNCED: {}", s)
        if s.leader_epoch == seen.epoch:
            was = seen.high_watermark
            require(s.high_watermark >= was, "V2", "HW was {}: {}", was, s)
        if s.log_start < seen.log_start:
            require(era > seen.era, "V3", "log_start was {}: {}", seen.log_start, s)
            seen.era += 1
        self._check_log_start(s, era)
        self._check_tier(s)
        seen.epoch, seen.high_watermark, seen.log_start = (
            s.leader_epoch,
            s.high_watermark,
            s.log_start,
        )

    def forget(self, broker: NodeId, key: PartitionKey | None = None) -> None:
        """Reset the log_start of `broker`, whose copy of `key` (None: every copy) is lost.

        The next copy begins at its leader's log_start, and that leader may not know yet how far
        retention had moved log_start on this broker.
        """
        for place, seen in self._seen.items():
            if place[1] == broker and key in (None, place[0]):
                seen.log_start = 0

    def _check_log_start(self, s: PartitionSample, era: int) -> None:
        topic = self._oracle.topics.get(s.topic)
        if topic is None or topic.topic_id != s.key.topic_id:
            return
        done = 0 if era else topic.deleted.get(s.key.partition, 0)
        kept = s.log_start >= done or not s.current
        require(kept, "V3", "deleted below {}, is back: {}", done, s)
        if topic.expires:
            return
        asked = self._asked(s)
        words = "deletion was asked for up to {} only: {}"
        require(s.log_start <= asked, "V3", words, asked, s)

    def _asked(self, s: PartitionSample) -> Offset:
        """Return the offset up to which clients asked to delete records of the sampled partition.

        All requests of the topic's present life count: the table may follow a broker that is no
        longer a replica and that has no samples.
        """
        topic = self._oracle.topics.get(s.topic)
        if topic is None or topic.topic_id != s.key.topic_id:
            return 0
        return topic.deletions.get(s.key.partition, 0)

    @staticmethod
    def check_local(
        log_start: Offset, local_log_start: Offset, table_end: Offset, tiered: bool, what: object
    ) -> None:
        """Check V4 of any replica: what is no longer local is in the table."""
        if local_log_start > log_start:
            require(tiered, "V4", "dropped from the disk, and no tier has it: {}", what)
            require(table_end >= local_log_start, "V4", "dropped before it was tiered: {}", what)

    def _check_tier(self, s: PartitionSample) -> None:
        self.check_local(s.log_start, s.local_log_start, s.table_end, s.tiered, s)
        if s.local_log_start > s.log_start:
            start = max(self._starts[s.key], self._asked(s))
            words = "the table lacks what is not local from {} on: {}"
            require(s.table_start <= start, "V4", words, start, s)
        if s.ready and s.current:
            stable = max(s.last_stable_offset, s.log_start)
            require(s.table_end <= stable, "V4", "the table is ahead of the LSO: {}", s)


@dataclass(slots=True)
class _Line:
    """The rows of one partition that a reader has seen, in one life of the topic."""

    life: int
    era: int
    doubtful: bool = False  #: begun during a deletion: of this life or the next
    next: Offset | None = None
    offsets: dict[Offset, ReadRow] = field(default_factory=dict)
    ids: dict[RecordId, Offset] = field(default_factory=dict)


class ReaderCheck:
    """Check V5 on every row of one consumer."""

    def __init__(self, name: str, oracle: Oracle, *, tail: bool = False) -> None:
        self.name = name
        #: Whether the reader goes on at the end of the log after a deletion of records.
        self._tail = tail
        self._oracle = oracle
        self.lines: dict[tuple[str, int], _Line] = {}
        self.rows = 0
        self.told: dict[str, int] = {}  #: number of errors that reported damage or loss, by kind

    def reported(self, of: str) -> None:
        self.told[of] = self.told.get(of, 0) + 1

    def took(self, topic: str, partition: int, rows: Sequence[ReadRow], log_start: Offset) -> None:
        """Check the next rows; `log_start` is the largest log_start of the partition so far."""
        known = self._oracle.topics[topic]
        place = (topic, partition)
        line = self.lines.get(place)
        if line is None or (rows and self._begins_anew(line, rows[0].offset, known, partition)):
            doubtful = line is not None and known.going
            life = known.life + doubtful
            era = self._oracle.era(known.topic_id, partition)
            if line is not None and life == line.life:
                era = line.era + 1  # each ended era may send a reader back once
            line = self.lines[place] = _Line(life, era, doubtful)
        if rows and line.next is None:
            line.life = min(line.life, self._life_of(rows[0], line.life))
        for row in rows:
            if (line.next is not None and row.offset != line.next) or row.id in line.ids:
                where = f"{self.name} at {topic}-{partition}: {row} after {line.next}"
                self._check_step(line, row, log_start, where)
            line.offsets[row.offset] = row
            line.ids[row.id] = row.offset
            line.next = row.offset + 1
        self.rows += len(rows)

    def _life_of(self, row: ReadRow, default: int) -> int:
        """Return the life of the topic in which a record was sent.

        A broker that is cut off serves the former life to a reader that has just begun.
        """
        sent = self._oracle.sent.get(row.id)
        return default if sent is None else max(1, sent.life)

    def _check_step(self, line: _Line, row: ReadRow, log_start: Offset, where: str) -> None:
        """Check a `row` that is not the next one, or that the reader has seen already."""
        if line.next is not None and row.offset != line.next:
            require(row.offset > line.next, "V5", "{}: went back", where)
            jumped = self._tail and line.next < log_start
            gap = f"{where}: a gap (log_start {log_start})"
            require(row.offset <= log_start or jumped, "V5", "{}", gap)
        before = line.ids.get(row.id)
        require(before is None, "V5", "{}: twice, at {} too", where, before)

    def _begins_anew(self, line: _Line, offset: Offset, topic: Topic, partition: int) -> bool:
        if line.next is None or offset == line.next:
            return False
        if topic.life > line.life or ((topic.going or line.doubtful) and offset == 0):
            return True  # The topic was created again, perhaps before its administrator knows.
            # Or the topic was deleted, and the reader read again from a broker that did not know
            # this yet.  Those rows count as rows of the next life until it begins.
        return self._oracle.era(topic.topic_id, partition) > line.era and offset < line.next

    def passes(self, topic: str, partition: int, end: Offset) -> None:
        """Note that the reader goes on at `end`, because the range before it is reported lost."""
        line = self.lines.get((topic, partition))
        if line is not None and line.next is not None:
            line.next = max(line.next, end)

    def forget(self, topic: str, partition: int | None = None) -> None:
        """Start the history of the reader again: the topic was re-created, or its log was cut."""
        for place in [p for p in self.lines if p[0] == topic and partition in (None, p[1])]:
            del self.lines[place]

    def compare(self, topic: Topic, partition: int, log: Mapping[Offset, ReadRow]) -> None:
        """Check that the rows this reader saw are the rows of the log."""
        line = self.lines.get((topic.name, partition))
        if line is None or line.life != topic.life or line.doubtful:
            return
        if line.era != self._oracle.era(topic.topic_id, partition):
            return  # V8 checks what may be lost
        for offset, row in line.offsets.items():
            if offset in log:
                words, where = "{} saw {} at {}, now {}", f"{topic.name}-{partition}"
                require(log[offset] == row, "V6", words, self.name, row, where, log[offset])


def after_last_gap(rows: Sequence[ReadRow]) -> list[ReadRow]:
    """Return the rows after the last gap, for a topic whose records expire.

    Retention may have passed the reader while it read.  `ReaderCheck` has already checked that this
    explains each gap.
    """
    begins = [at for at in range(1, len(rows)) if rows[at].offset != rows[at - 1].offset + 1]
    return list(rows[begins[-1] :] if begins else rows)


def check_log(
    oracle: Oracle,
    topic: Topic,
    logs: Mapping[int, Sequence[ReadRow]],
    starts: Mapping[int, Offset],
) -> None:
    """Check V6 to V8 of one topic: all records from log_start, as the last reader saw them."""
    found: dict[RecordId, tuple[int, Offset]] = {}
    for partition, rows in logs.items():
        expected, where = starts[partition], f"{topic.name}-{partition}"
        for row in rows:
            words = "{}: {}, expected offset {}"
            require(row.offset == expected, "V5", words, where, row, expected)
            expected += 1
            sent = oracle.sent.get(row.id)
            require(sent is not None, "V6", "{}: nobody sent {}", where, row)
            assert sent is not None
            require(sent.topic == topic.name, "V6", "{}: {} is of another topic", where, sent)
            words = "{}: {} is not what was sent: {}"
            require(sent.digest == row.digest, "V6", words, where, row, sent)
            before = found.get(row.id)
            require(before is None, "V6", "{}: {} is also at {}", where, row, before)
            found[row.id] = (partition, row.offset)
    mine = [sent for sent in oracle.sent.values() if sent.topic == topic.name]
    lost: list[Sent] = []
    for sent in mine:
        if sent.outcome is Outcome.ACKNOWLEDGED and sent.acked_life == topic.life:
            place = found.get(sent.id)
            if place == (sent.partition, sent.offset):
                continue
            if place is None and sent.offset < starts.get(sent.partition, 0):
                continue  # deleted, or expired
            if _may_be_lost(oracle, topic, sent) and (place is None or place[0] == sent.partition):
                lost.append(sent)
                continue
            words = "acknowledged, and now at {}: {}, starts {}"
            require(False, "V6", words, place, sent, starts)
    _check_prefix(topic, mine, lost, found)
    _check_order(mine, found)


def _may_be_lost(oracle: Oracle, topic: Topic, sent: Sent) -> bool:
    return sent.acked_era < oracle.era(topic.topic_id, sent.partition)


def _check_prefix(
    topic: Topic, mine: Iterable[Sent], lost: Sequence[Sent], found: Mapping[RecordId, object]
) -> None:
    """Check V8: no record that stands above a lost record is of the same era.

    An era of a partition ends when records of it may be lost (sim/oracle).  A record of a later era
    may stand above a lost record, because it was acknowledged after the loss.  A record of an
    earlier era may stand there, too, if the leader after that era had kept it.  A partition is not
    checked if one of its lost records was found again, as the copy of an earlier attempt to send
    it: other such copies may stand at the offsets of lost records.
    """
    unsure = {gone.partition for gone in lost if gone.id in found}
    survivors = [
        sent
        for sent in mine
        if sent.acked_life == topic.life and sent.id in found and lost
        if sent.partition not in unsure
    ]
    gone_first = sorted(lost, key=lambda gone: (gone.partition, gone.offset), reverse=True)
    below: dict[int, dict[int, Sent]] = {}  # partition → era → the last lost record below
    for kept in sorted(survivors, key=lambda kept: (kept.partition, kept.offset)):
        while gone_first and (
            (gone_first[-1].partition, gone_first[-1].offset) < (kept.partition, kept.offset)
        ):
            gone = gone_first.pop()
            below.setdefault(gone.partition, {})[gone.acked_era] = gone
        worst = below.get(kept.partition, {}).get(kept.acked_era_max)
        require(worst is None, "V8", "{} outlived {}", kept, worst)


def _check_order(mine: Iterable[Sent], found: Mapping[RecordId, tuple[int, Offset]]) -> None:
    """Check V7: records of a producer in a partition stand in the order of their numbers."""
    last: dict[tuple[str, int], tuple[Offset, RecordId]] = {}
    for sent in mine:  # in the order of sending
        place = found.get(sent.id)
        if place is None or not sent.ordered:
            continue
        line = (sent.id.producer, place[0])
        before = last.get(line)
        if before is not None:
            words = "{} at {} stands before {}"
            require(place[1] > before[0], "V7", words, sent.id, place, before)
        last[line] = (place[1], sent.id)


def check_table(
    where: str, start: Offset, end: Offset, rows: Iterable[ReadRow], log: Mapping[Offset, ReadRow]
) -> None:
    """Check V9 for one partition."""
    seen: dict[Offset, ReadRow] = {}
    for row in rows:
        require(row.offset not in seen, "V9", "{}: {} is in the table twice", where, row)
        require(row.offset < end, "V9", "{}: {} is beyond the table's end {}", where, row, end)
        seen[row.offset] = row
    for offset in range(start, end):
        words = "{}: offset {} of [{}, {}) is missing"
        require(offset in seen, "V9", words, where, offset, start, end)
        if offset in log:
            words = "{}: {} in the table, {} in the log"
            require(seen[offset] == log[offset], "V9", words, where, seen[offset], log[offset])
