"""A log on a simulated disk that is cleaned with the production code, and its naive oracle.

The oracle keeps every record that was written, and decides with dictionaries.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from pk import settings
from pk.clock import MedianTime
from pk.compaction import local_cleaner
from pk.compaction.cleaning_job import CleaningJob, CleaningResult, make_job, swap_of
from pk.compaction.offset_map import key_hasher
from pk.compaction.plan import CleanablePart, CompactionLimits, CompactionPlan, plan
from pk.log import batch as batches
from pk.log import columns, control_rows, swap
from pk.log.aborted import AbortedRanges
from pk.log.control_rows import Marker
from pk.log.index import NO_TIMESTAMP
from pk.log.partition_log import PartitionLog
from pk.log.plan import LogConfig
from pk.sim.disk import SimStorage
from pk.types import NONE, TopicPartition

PATH = "topics/t-0"
HASH = key_hasher(bytes(range(32)))
RETENTION_MS = 100
FAR = 2**62
KEYS = (b"", b"a", b"b", b"key-of-16-bytes!")
CONFIG = replace(
    LogConfig.of(settings.TOPIC.resolve({"cleanup_policy": "compact"})),
    segment_bytes=600,
    index_interval_bytes=150,
)
LIMITS = CompactionLimits(0.0, 0, 2**63 - 1)


class Record(NamedTuple):
    offset: int
    key: bytes | None
    value: bytes | None


class CleanedLog:
    """The log, and every record of its history.

    Producer 0 has no id, 1 and 2 are idempotent, 3 and 4 write transactions.
    """

    def __init__(self, **config: Any) -> None:
        self.storage = SimStorage()
        self.storage.make_dir(PATH)
        for path in (PATH, "topics", ""):
            self.storage.sync_dir(path)
        self.config = replace(CONFIG, **config)
        self.ids = itertools.count()
        self.now_ms = 1_700_000_000_000
        self.every: dict[int, Record] = {}
        self.committed: set[int] = set()
        self.open: dict[int, list[int]] = {}
        self.epochs = dict.fromkeys(range(5), 0)
        self.sequences = dict.fromkeys(range(5), 0)
        self.first_cleaned_ms: dict[int, int] = {}
        self.leader_epoch = 0
        self.log = self.reopen(clean=True)

    def reopen(self, *, clean: bool = False, same_boot: bool = True) -> PartitionLog:
        """Open the log, as after the death of the process."""
        self.log = PartitionLog.open(
            self.storage, PATH, TopicPartition("t", 0), "id", self.config,
            clean=clean, same_boot=same_boot, now_ms=self.now_ms,
        )  # fmt: skip
        return self.log

    # -- producers ---------------------------------------------------------------------------------

    def write(self, who: int, rows: Sequence[tuple[bytes | None, bytes | None]]) -> None:
        keys, values = zip(*rows, strict=True)
        raw = b"".join(
            columns.encode_lists(
                values, keys,
                codec="zstd" if len(rows) % 2 else "none",
                timestamps=[self.now_ms + n for n in range(len(rows))],
                producer_id=who or NONE,
                producer_epoch=self.epochs[who] if who else NONE,
                base_sequence=self.sequences[who] if who else NONE,
                transactional=who > 2,
            )
        )  # fmt: skip
        self.sequences[who] += len(rows)
        base = self._append(raw)
        records = [Record(base + n, *row) for n, row in enumerate(rows)]
        self.every.update((each.offset, each) for each in records)
        if who > 2:
            self.open.setdefault(who, []).extend(each.offset for each in records)
        else:
            self.committed.update(each.offset for each in records)

    def finish(self, *several: int, commit: bool) -> None:
        """End the transactions of these producers by one control batch."""
        markers = []
        for who in several:
            self.epochs[who] += 1
            self.sequences[who] = 0
            markers.append(Marker(who, self.epochs[who], commit))
            offsets = self.open.pop(who, [])
            if commit:
                self.committed.update(offsets)
        self._append(b"".join(control_rows.encode_markers(markers, self.now_ms)))

    def _append(self, raw: bytes) -> int:
        log, header = self.log, batches.check(raw)
        done = log.decide(
            header, raw, leader_epoch=self.leader_epoch, now_ms=self.now_ms, from_client=False
        )
        made = log.take_writes()
        assert made is not None
        log.perform(made)
        log.complete(made)
        return done.base_offset

    def roll(self) -> None:
        if self.log.roll():
            made = self.log.take_writes()
            assert made is not None
            self.log.perform(made)
            self.log.complete(made)

    # -- the cleaner -------------------------------------------------------------------------------

    def plan(self) -> CompactionPlan:
        parts = [
            CleanablePart(*each[:3], NO_TIMESTAMP, each.max_timestamp) for each in self.log.segments
        ]
        end = self.log.last_stable_offset(self.log.written_end)
        return plan(
            parts[:-1], LIMITS, active=parts[-1], log_start=self.log.log_start,
            cleaned_end=self.log.cleaned.end, last_stable_offset=end, hold=None, now_ms=self.now_ms,
        )  # fmt: skip

    def job(
        self,
        *,
        memory: int = 1 << 20,
        settled_end: int = FAR,
        clock: bool = True,
        spread_ms: int = 0,
    ) -> CleaningJob:
        return make_job(
            self.log, self.plan(), root="", tail=swap.tail_of(f"c{next(self.ids)}"),
            settled_end=settled_end, delete_retention_ms=RETENTION_MS, map_bytes=memory,
            now=MedianTime(self.now_ms, self.now_ms + spread_ms) if clock else None,
        )  # fmt: skip

    def written(self, job: CleaningJob) -> CleaningResult:
        return local_cleaner.clean(self.storage, job, HASH)

    def put_in_place(
        self, job: CleaningJob, result: CleaningResult, meanwhile: Callable[[], None] | None = None
    ) -> None:
        made = swap_of(job, result)
        work = self.log.cleaned.begin(made, self.log.cleaned.open_written(made))
        assert work is not None
        work()
        if meanwhile is not None:
            meanwhile()
        self.log.cleaned.end_job()
        for record in self.records():
            if record.offset < result.end:
                self.first_cleaned_ms.setdefault(record.offset, self.now_ms)

    def clean(self, **options: Any) -> CleaningResult:
        job = self.job(**options)
        result = self.written(job)
        self.put_in_place(job, result)
        return result

    # -- what readers get --------------------------------------------------------------------------

    def raw(self, start: int | None = None, *, max_bytes: int = 1) -> list[bytes]:
        """Return the batches from `start` on, as a consumer reads them."""
        log, found = self.log, []
        offset = log.local_log_start if start is None else start
        while offset < log.written_end:
            read = log.read(offset, bound=log.written_end, max_bytes=max_bytes, verify=True)
            assert read.next_offset > offset
            found += [bytes(raw) for _, raw in batches.iter_batches(read.data)]
            offset = read.next_offset
        return found

    def records(self, start: int | None = None, *, committed: bool = False) -> list[Record]:
        """Return the records from `start` on.

        committed: only those that a read_committed reader gets
        """
        ranges = AbortedRanges(self.log.aborted_in(0, self.log.written_end).transactions)
        stable = self.log.last_stable_offset(self.log.written_end)
        found: list[Record] = []
        for raw in self.raw(start):
            header = batches.read_header(raw)
            if header.control or (committed and ranges.contains(header)):
                continue
            rows = columns.decode(raw, decoded_bytes_max=10**7)
            found += [
                Record(*row)
                for row in zip(*(rows.column(n).to_pylist() for n in range(4)), strict=True)
                for row in [(row[0], row[2], row[3])]
                if row[0] >= (start or 0) and (not committed or row[0] < stable)
            ]
        return found

    # -- the oracle --------------------------------------------------------------------------------

    def latest(self, end: int) -> dict[bytes, Record]:
        """Return the newest committed record of each key below `end`."""
        found: dict[bytes, Record] = {}
        for offset in sorted(self.committed):
            record = self.every[offset]
            if record.key is not None and offset < end:
                found[record.key] = record
        return found

    def check(self) -> None:
        log, cleaned = self.log, self.log.cleaned.end
        found = self.records()
        offsets = [each.offset for each in found]
        assert offsets == sorted(set(offsets))
        assert all(each == self.every[each.offset] for each in found)
        tail = {offset for offset in self.every if offset >= cleaned}
        assert tail == {offset for offset in offsets if offset >= cleaned}
        stable = log.last_stable_offset(log.written_end)
        self._check_latest(self.records(committed=True), stable)
        newest = self.latest(cleaned)
        for each in found:  # nothing more is kept than necessary
            if each.offset < cleaned:
                assert each.key is not None
                assert newest[each.key] == each
        known = [(each.epoch, each.start_offset) for each in log.epochs.entries]
        assert self.copied_epochs() == known, "compaction/local_cleaner N7"
        facts = log.segments
        for before, after in itertools.pairwise(facts):
            assert before.next_offset == after.base_offset

    def copied_epochs(self) -> list[tuple[int, int]]:
        """Return the leader epochs and their starts, as a follower learns them from the batches."""
        found: list[tuple[int, int]] = []
        for header in map(batches.read_header, self.raw()):
            if not found or found[-1][0] != header.leader_epoch:
                found.append((header.leader_epoch, header.base_offset))
        return found

    def _check_latest(self, found: Sequence[Record], stable: int) -> None:
        assert {each.offset for each in found} <= self.committed
        values = {each.key: each.value for each in found}
        offsets = {each.offset for each in found}
        for key, record in self.latest(stable).items():
            assert values.get(key) == record.value, (key, record)
            if record.offset not in offsets:
                assert record.value is None
                assert self.now_ms - self.first_cleaned_ms[record.offset] > RETENTION_MS


def random_step(log: CleanedLog, rng: random.Random) -> None:
    """Do one step of a producer, or roll the log."""
    kind = rng.choices(["write", "end", "roll", "epoch"], [70, 20, 6, 4])[0]
    log.now_ms += rng.choice([0, 0, 30])
    if kind == "write":
        count = rng.randint(1, 3)
        rows = [(rng.choice(KEYS), rng.choice([b"1", b"2" * 40, None])) for _ in range(count)]
        log.write(rng.randrange(5), rows)
    elif kind == "end":
        log.finish(*rng.choice([(3,), (4,), (3, 4)]), commit=rng.random() < 0.6)
    elif kind == "roll":
        log.roll()
    else:
        log.leader_epoch += 1
