"""What must always hold, checked on plain values; nothing here knows how pk works inside.

`Invariants` looks at samples of partitions while the run goes on; `ReaderCheck` at every row a
consumer is given; `check_log` and `check_table` at the end, at the whole log as a reader from
offset 0 sees it and at the files of a topic's table.  A failed check raises `Violation`.

Checked
  V1  one broker serves a leader epoch; log_start ≤ LSO ≤ HW ≤ log_end; under flush_on_ack HW ≤
      synced end (rules L2, L11)
  V2  HW never goes back within a leader epoch
  V3  log_start never goes back on one broker that keeps its copy, of an only replica never behind
      what was deleted by request, and moves only as far as somebody asked for (rule T9): by true
      time no record of a run expires, whatever the clocks say (rule L10)
  V4  what is not local any more is in the table: table start ≤ the largest log_start or what was
      asked to be deleted, local_log_start ≤ table end (rules T1, T6); the table never passes the
      LSO of a leader whose HW has caught up
  V5  a reader sees offsets in order, without gaps above log_start, no record twice.  It is told
      of a lost range (rule L9) only where too few whole copies are left, of missing rows (rule T17)
      only where others deleted them, goes on behind it, and the last reader is told of none.
      Processes report such damage only where it was done (damage_reports.py)
  V6  every acknowledged record is in the log once, where the acknowledgement said; a record of
      unknown outcome at most once; nothing that nobody sent; contents unchanged (rules L4, L6, L7).
      Where an unclean election took the copy that was acknowledged, that of an earlier attempt may
      have come back: an old leader's, whom nobody had followed before it was replaced
  V7  an idempotent producer's records stand in send order (rule L6)
  V8  where acknowledged records may be lost (the end of an era) a suffix is, and only that: what
      survives of an era is a prefix of it
  V9  the table holds each offset of [start, end) exactly once, with the log's record in it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pk.sim.oracle import Oracle, Outcome, RecordId, Sent, Topic
from pk.types import NONE, NodeId, Offset, PartitionKey


class Violation(AssertionError):
    """A promise was broken."""


def require(holds: bool, rule: str, words: str, *facts: object) -> None:
    """`words` are a format of `facts`: what is looked at after every event is put into words only
    where it matters.
    """
    if not holds:
        raise Violation(f"{rule}: {words.format(*facts)}")


class Row(NamedTuple):
    """One record as a reader or a table file has it."""

    offset: Offset
    id: RecordId
    digest: int


@dataclass(slots=True)  # frozen ones take three times as long to make
class PartitionSample:
    """One led partition at one moment."""

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
    ready: bool  #: its HW covers what its predecessors committed
    current: bool  #: no later epoch is committed
    table_start: Offset = NONE
    table_end: Offset = NONE


@dataclass(slots=True)
class _Seen:
    """What earlier samples of a partition showed."""

    era: int
    epoch: int = NONE
    high_watermark: Offset = 0
    known_synced: Offset = 0
    log_start: Offset = 0


class Invariants:
    """V1 to V4 over the samples of a run."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._seen: dict[tuple[PartitionKey, int], _Seen] = {}
        self._leaders: dict[tuple[PartitionKey, int], int] = {}
        self._starts: dict[PartitionKey, Offset] = {}  # the largest log_start there was
        self.samples = 0

    def check(self, sample: PartitionSample) -> None:
        self.samples += 1
        s = sample
        self._starts[s.key] = max(s.log_start, self._starts.get(s.key, 0))
        leads = self._leaders.setdefault((s.key, s.leader_epoch), s.broker)
        require(leads == s.broker, "V1", "broker {} leads this epoch too: {}", leads, s)
        ordered = s.log_start <= s.last_stable_offset <= s.high_watermark <= s.log_end
        require(ordered, "V1", "log_start ≤ LSO ≤ HW ≤ log_end: {}", s)
        era = self._oracle.era(*s.key)
        seen = self._seen.get((s.key, s.broker))
        if seen is None:
            seen = self._seen[s.key, s.broker] = _Seen(era)
        if s.leader_epoch != seen.epoch:  # what was SYNCED before a restart need not be known after
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
        """Its copy is gone, or all of them: the next begins where its leader's does, who may not
        have heard how far retention had come here.
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
        """Up to where deletion was asked for, of whoever leads or has not heard that it does not:
        the table may follow one that is no replica any more, which nobody looks at.
        """
        topic = self._oracle.topics.get(s.topic)
        if topic is None or topic.topic_id != s.key.topic_id:
            return 0
        return topic.deletions.get(s.key.partition, 0)

    @staticmethod
    def check_local(
        log_start: Offset, local_log_start: Offset, table_end: Offset, tiered: bool, what: object
    ) -> None:
        """V4 of any replica."""
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
    """What one reader has seen of one partition, in one life."""

    life: int
    era: int
    doubtful: bool = False  #: begun while the topic went: of this life or the next
    next: Offset | None = None
    offsets: dict[Offset, Row] = field(default_factory=dict)
    ids: dict[RecordId, Offset] = field(default_factory=dict)


class ReaderCheck:
    """V5 over everything one consumer is given."""

    def __init__(self, name: str, oracle: Oracle, *, tail: bool = False) -> None:
        self.name = name
        self._tail = tail  #: when records below it were deleted it goes on at the end
        self._oracle = oracle
        self.lines: dict[tuple[str, int], _Line] = {}
        self.rows = 0
        self.told: dict[str, int] = {}  #: how often of what is damaged or lost

    def reported(self, of: str) -> None:
        self.told[of] = self.told.get(of, 0) + 1

    def took(self, topic: str, partition: int, rows: Sequence[Row], log_start: Offset) -> None:
        """The next rows; `log_start` is the largest the partition has had."""
        known = self._oracle.topics[topic]
        place = (topic, partition)
        line = self.lines.get(place)
        if line is None or (rows and self._begins_anew(line, rows[0].offset, known, partition)):
            doubtful = line is not None and known.going
            life = known.life + doubtful
            era = self._oracle.era(known.topic_id, partition)
            if line is not None and life == line.life:
                era = line.era + 1  # each era that ended may turn a reader back once
            line = self.lines[place] = _Line(life, era, doubtful)
        for row in rows:
            if (line.next is not None and row.offset != line.next) or row.id in line.ids:
                where = f"{self.name} at {topic}-{partition}: {row} after {line.next}"
                self._check_step(line, row, log_start, where)
            line.offsets[row.offset] = row
            line.ids[row.id] = row.offset
            line.next = row.offset + 1
        self.rows += len(rows)

    def _check_step(self, line: _Line, row: Row, log_start: Offset, where: str) -> None:
        """`row` is not the next one, or is there already."""
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
            return True  # created again, perhaps before whoever asked for it has heard of that;
            # or deleted, and a broker that has not heard of it led the reader there once more, and
            # what came then is taken for the next life's until that begins
        return self._oracle.era(topic.topic_id, partition) > line.era and offset < line.next

    def passes(self, topic: str, partition: int, end: Offset) -> None:
        """The reader was told that what it has not seen below `end` is lost, and goes on there."""
        line = self.lines.get((topic, partition))
        if line is not None and line.next is not None:
            line.next = max(line.next, end)

    def forget(self, topic: str, partition: int | None = None) -> None:
        """The topic was re-created, or the log was cut: another line begins."""
        for place in [p for p in self.lines if p[0] == topic and partition in (None, p[1])]:
            del self.lines[place]

    def compare(self, topic: Topic, partition: int, log: Mapping[Offset, Row]) -> None:
        """What was seen is what is there."""
        line = self.lines.get((topic.name, partition))
        if line is None or line.life != topic.life or line.doubtful:
            return
        if line.era != self._oracle.era(topic.topic_id, partition):
            return  # V8 says what may have gone
        for offset, row in line.offsets.items():
            if offset in log:
                words, where = "{} saw {} at {}, now {}", f"{topic.name}-{partition}"
                require(log[offset] == row, "V6", words, self.name, row, where, log[offset])


def after_last_gap(rows: Sequence[Row]) -> list[Row]:
    """What a reader saw of a topic that expires: retention may have passed it while it read, and
    whether that is what a gap is was asked when it met it (`ReaderCheck`).
    """
    begins = [at for at in range(1, len(rows)) if rows[at].offset != rows[at - 1].offset + 1]
    return list(rows[begins[-1] :] if begins else rows)


def check_log(
    oracle: Oracle, topic: Topic, logs: Mapping[int, Sequence[Row]], starts: Mapping[int, Offset]
) -> None:
    """V6 to V8 of one topic: every partition from its log_start, as the last reader saw it."""
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
                continue  # deleted, or aged out
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
    """V8: no survivor above a lost record is of its era.  What was acknowledged after the loss may
    stand there; so may what an earlier era had cost, if the next leader is one that kept it.

    Where one copy of an earlier attempt came back, others did, and some may have come to stand
    where the lost ones did: who survived there nobody can tell.
    """
    unsure = {gone.partition for gone in lost if gone.id in found}
    survivors = [
        sent
        for sent in mine
        if sent.acked_life == topic.life and sent.id in found and lost
        if sent.partition not in unsure
    ]
    gone_first = sorted(lost, key=lambda gone: (gone.partition, gone.offset), reverse=True)
    below: dict[int, dict[int, Sent]] = {}  # partition → of the lost below, one of each era
    for kept in sorted(survivors, key=lambda kept: (kept.partition, kept.offset)):
        while gone_first and (
            (gone_first[-1].partition, gone_first[-1].offset) < (kept.partition, kept.offset)
        ):
            gone = gone_first.pop()
            below.setdefault(gone.partition, {})[gone.acked_era] = gone
        worst = below.get(kept.partition, {}).get(kept.acked_era_max)
        require(worst is None, "V8", "{} outlived {}", kept, worst)


def _check_order(mine: Iterable[Sent], found: Mapping[RecordId, tuple[int, Offset]]) -> None:
    """V7: by producer and partition, later numbers stand at larger offsets."""
    last: dict[tuple[str, int], tuple[Offset, RecordId]] = {}
    for sent in mine:  # in send order
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
    where: str, start: Offset, end: Offset, rows: Iterable[Row], log: Mapping[Offset, Row]
) -> None:
    """V9 for one partition."""
    seen: dict[Offset, Row] = {}
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
