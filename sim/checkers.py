"""What must always hold, checked on plain values; nothing here knows how pk works inside.

`Invariants` looks at samples of partitions while the run goes on; `ReaderCheck` at every row a
consumer is given; `check_log` and `check_table` at the end, at the whole log as a reader from
offset 0 sees it and at the files of a topic's table.  A failed check raises `Violation`.

Checked
  V1  one broker serves a leader epoch; log_start ≤ LSO ≤ HW ≤ log_end; under flush_on_ack HW ≤
      synced end (rules L2, L11)
  V2  HW never goes back within a leader epoch
  V3  log_start never goes back on one broker, of an only replica never behind what was deleted by
      request, and moves only as far as somebody asked for (rule T9)
  V4  what is not local any more is in the table: table start ≤ the largest log_start,
      local_log_start ≤ table end (rules T1, T6); the table never passes the LSO of a leader whose
      HW has caught up
  V5  a reader sees offsets in order, without gaps above log_start, no record twice
  V6  every acknowledged record is in the log once, where the acknowledgement said; a record of
      unknown outcome at most once; nothing that nobody sent; contents unchanged (rules L4, L6, L7)
  V7  an idempotent producer's records stand in send order (rule L6)
  V8  where acknowledged records may be lost (the end of an era) a suffix is, and only that: what
      survives is a prefix
  V9  the table holds each offset of [start, end) exactly once, with the log's record in it
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pk.sim.oracle import Oracle, Outcome, RecordId, Sent, Topic
from pk.types import NONE, Offset, PartitionKey


class Violation(AssertionError):
    """A promise was broken."""


def require(holds: bool, rule: str, words: object) -> None:
    if not holds:
        raise Violation(f"{rule}: {words}")


class Row(NamedTuple):
    """One record as a reader or a table file has it."""

    offset: Offset
    id: RecordId
    digest: int


@dataclass(slots=True, frozen=True)
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
        require(leads == s.broker, "V1", f"broker {leads} leads this epoch too: {s}")
        order = (s.log_start, s.last_stable_offset, s.high_watermark, s.log_end)
        require(list(order) == sorted(order), "V1", f"log_start ≤ LSO ≤ HW ≤ log_end: {s}")
        era = self._oracle.era(*s.key)
        seen = self._seen.setdefault((s.key, s.broker), _Seen(era))
        if s.leader_epoch != seen.epoch:  # what was SYNCED before a restart need not be known after
            seen.known_synced = s.high_watermark
        if s.flushed:
            synced = max(s.synced_end, seen.known_synced)
            require(s.high_watermark <= synced, "V1", f"not SYNCED: {s}")
        if s.leader_epoch == seen.epoch:
            words = f"HW was {seen.high_watermark}: {s}"
            require(s.high_watermark >= seen.high_watermark, "V2", words)
        if s.log_start < seen.log_start:
            require(era > seen.era, "V3", f"log_start was {seen.log_start}: {s}")
            seen.era += 1
        self._check_log_start(s, era)
        self._check_tier(s)
        seen.epoch, seen.high_watermark, seen.log_start = (
            s.leader_epoch,
            s.high_watermark,
            s.log_start,
        )

    def _check_log_start(self, s: PartitionSample, era: int) -> None:
        topic = self._oracle.topics.get(s.topic)
        if topic is None or topic.topic_id != s.key.topic_id:
            return
        done = 0 if era else topic.deleted.get(s.key.partition, 0)
        require(s.log_start >= done or not s.current, "V3", f"deleted below {done}, is back: {s}")
        if topic.expires:
            return
        asked = topic.deletions.get(s.key.partition, 0)
        require(s.log_start <= asked, "V3", f"deletion was asked for up to {asked} only: {s}")

    @staticmethod
    def check_local(
        log_start: Offset, local_log_start: Offset, table_end: Offset, tiered: bool, words: object
    ) -> None:
        """V4 of any replica."""
        if local_log_start > log_start:
            require(tiered, "V4", f"dropped from the disk, and no tier has it: {words}")
            require(table_end >= local_log_start, "V4", f"dropped before it was tiered: {words}")

    def _check_tier(self, s: PartitionSample) -> None:
        self.check_local(s.log_start, s.local_log_start, s.table_end, s.tiered, s)
        if s.local_log_start > s.log_start:
            start = self._starts[s.key]
            words = f"the table lacks what is not local from {start} on: {s}"
            require(s.table_start <= start, "V4", words)
        if s.ready and s.current:
            stable = max(s.last_stable_offset, s.log_start)
            require(s.table_end <= stable, "V4", f"the table is ahead of the LSO: {s}")


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
            words = f"{self.name} at {topic}-{partition}: {row} after {line.next}"
            if line.next is not None and row.offset != line.next:
                require(row.offset > line.next, "V5", f"{words}: went back")
                jumped = self._tail and line.next < log_start
                words = f"{words}: a gap (log_start {log_start})"
                require(row.offset <= log_start or jumped, "V5", words)
            require(row.id not in line.ids, "V5", f"{words}: twice, at {line.ids.get(row.id)} too")
            line.offsets[row.offset] = row
            line.ids[row.id] = row.offset
            line.next = row.offset + 1
        self.rows += len(rows)

    def _begins_anew(self, line: _Line, offset: Offset, topic: Topic, partition: int) -> bool:
        if line.next is None or offset == line.next:
            return False
        if topic.life > line.life or (topic.going and offset == 0):
            return True  # created again, perhaps before whoever asked for it has heard of that;
            # or deleted, and a broker that has not heard of it led the reader there once more
        return self._oracle.era(topic.topic_id, partition) > line.era and offset < line.next

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
                require(
                    log[offset] == row,
                    "V6",
                    f"{self.name} saw {row} at {topic.name}-{partition}, now {log[offset]}",
                )


def check_log(
    oracle: Oracle, topic: Topic, logs: Mapping[int, Sequence[Row]], starts: Mapping[int, Offset]
) -> None:
    """V6 to V8 of one topic: every partition from its log_start, as the last reader saw it."""
    found: dict[RecordId, tuple[int, Offset]] = {}
    for partition, rows in logs.items():
        expected = starts[partition]
        for row in rows:
            where = f"{topic.name}-{partition}"
            require(row.offset == expected, "V5", f"{where}: {row}, expected offset {expected}")
            expected += 1
            sent = oracle.sent.get(row.id)
            require(sent is not None, "V6", f"{where}: nobody sent {row}")
            assert sent is not None
            require(sent.topic == topic.name, "V6", f"{where}: {sent} is of another topic")
            require(sent.digest == row.digest, "V6", f"{where}: {row} is not what was sent: {sent}")
            require(row.id not in found, "V6", f"{where}: {row} is also at {found.get(row.id)}")
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
            if place is None and _may_be_lost(oracle, topic, sent):
                lost.append(sent)
                continue
            require(False, "V6", f"acknowledged, and now at {place}: {sent}, starts {starts}")
    _check_prefix(topic, mine, lost, found)
    _check_order(mine, found)


def _may_be_lost(oracle: Oracle, topic: Topic, sent: Sent) -> bool:
    return sent.acked_era < oracle.era(topic.topic_id, sent.partition)


def _check_prefix(
    topic: Topic, mine: Iterable[Sent], lost: Sequence[Sent], found: Mapping[RecordId, object]
) -> None:
    """V8: a survivor above a lost record was acknowledged after the loss."""
    survivors = [
        sent for sent in mine if sent.acked_life == topic.life and sent.id in found and lost
    ]
    for gone in lost:
        for kept in survivors:
            if kept.partition == gone.partition and kept.offset > gone.offset:
                require(kept.acked_era_max > gone.acked_era, "V8", f"{kept} outlived {gone}")


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
            require(place[1] > before[0], "V7", f"{sent.id} at {place} stands before {before}")
        last[line] = (place[1], sent.id)


def check_table(
    where: str, start: Offset, end: Offset, rows: Iterable[Row], log: Mapping[Offset, Row]
) -> None:
    """V9 for one partition."""
    seen: dict[Offset, Row] = {}
    for row in rows:
        require(row.offset not in seen, "V9", f"{where}: {row} is in the table twice")
        require(row.offset < end, "V9", f"{where}: {row} is beyond the table's end {end}")
        seen[row.offset] = row
    for offset in range(start, end):
        require(offset in seen, "V9", f"{where}: offset {offset} of [{start}, {end}) is missing")
        if offset in log:
            words = f"{where}: {seen[offset]} in the table, {log[offset]} in the log"
            require(seen[offset] == log[offset], "V9", words)
