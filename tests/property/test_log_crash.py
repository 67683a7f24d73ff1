"""A run of a partition log that dies at every single write point, by process death and by power
loss (rule L1).

What must hold after each death, whatever the run was doing:
  * WRITTEN survives the death of the process, SYNCED survives a loss of power;
  * everything served matches its checksum and is what was decided for that offset: nothing torn,
    nothing invented;
  * opening again finds nothing left to repair and the same state;
  * a retry of the last batch is recognised (idempotence survives).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from pk import errors, settings
from pk.log import batch as batches
from pk.log import columns
from pk.log.partition_log import PartitionLog
from pk.log.plan import Duplicate, LogConfig
from pk.sim.disk import Crashed, SimStorage
from pk.types import TopicPartition

TP = TopicPartition("t", 0)
PATH = "topics/t-0"
CONFIG = replace(
    LogConfig.of(settings.TOPIC.resolve({"segment_bytes": 14 * 1024, "index_interval_bytes": 700})),
    segment_bytes=11_000,  # several blocks: a power loss tears them inside
)


@dataclass
class Run:
    """One life of a log after another, and the records that each confirmed."""

    seed: int
    flush_on_ack: bool = False
    storage: SimStorage = field(init=False)
    rng: random.Random = field(init=False)
    log: PartitionLog = field(init=False)
    decided: dict[int, set[bytes]] = field(
        default_factory=dict
    )  #: base offset → bodies decided there
    written_end: int = 0
    synced_end: int = 0
    recovery_point: int = 0
    log_start: int = 0
    sequence: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.storage = SimStorage(rng=random.Random(self.seed + 1))
        self.storage.make_dir("topics")
        self.storage.sync_dir("")

    def open(self, *, clean: bool, same_boot: bool) -> PartitionLog:
        return PartitionLog.open(
            self.storage,
            PATH,
            TP,
            "id",
            replace(CONFIG, flush_on_ack=self.flush_on_ack),
            clean=clean,
            same_boot=same_boot,
            recovery_point=self.recovery_point,
            log_start=self.log_start,
            now_ms=1,
        )

    def start(self) -> None:
        self.log = self.open(clean=True, same_boot=True)
        self.storage.sync_dir("topics")

    def append(self, batches_count: int, roll_after: int = -1) -> None:
        log, sequence = self.log, self.sequence
        for number in range(batches_count):
            if number == roll_after:
                log.roll()
            count = self.rng.randint(1, 6)
            values = [self.rng.randbytes(self.rng.randint(0, 900)) for _ in range(count)]
            raw = b"".join(
                columns.encode_lists(
                    values,
                    producer_id=9,
                    producer_epoch=0,
                    base_sequence=sequence,
                    default_timestamp=5,
                )
            )
            done = log.decide(batches.check(raw), raw, leader_epoch=self.epoch, now_ms=10)
            assert not isinstance(done, Duplicate)
            self.decided.setdefault(done.base_offset, set()).add(raw[batches.HEADER_BYTES :])
            sequence += count
        plan = log.take_writes()
        assert plan is not None
        try:
            log.perform(plan)
        except errors.PkError as error:
            failed = log.complete(plan, error).failed
            assert [f.base_offset for f in failed] == [a.base_offset for a in plan.appended]
            return
        done_now = log.complete(plan)
        self.sequence = sequence
        self.written_end, self.synced_end = (
            done_now.written_end,
            max(self.synced_end, done_now.synced_end),
        )

    def step(self) -> None:
        """Do one random thing that brokers do."""
        what = self.rng.choice(
            ["append"] * 6
            + ["flush", "sealed", "checkpoint", "roll", "epoch", "retain", "full", "reopen"]
        )
        log = self.log
        if what == "append":
            self.append(self.rng.randint(1, 4))
        elif what == "flush":
            self.synced_end = max(self.synced_end, log.flush())
        elif what == "sealed":
            log.flush_sealed()
            self.synced_end = max(self.synced_end, log.checkpoint())
        elif what == "checkpoint":
            self.recovery_point = log.checkpoint()
        elif what == "roll":
            log.roll()
        elif what == "epoch":
            self.epoch += 1
        elif what == "retain":
            self.retain()
        elif what == "full":
            self.storage.capacity = self.storage.used_bytes() + self.rng.randint(0, 6000)
            self.append(3, roll_after=1)
            self.storage.capacity = None
        else:
            self.drain()
            log.close(clean=True)
            self.recovery_point = self.synced_end = log.synced_end
            self.log = self.open(clean=True, same_boot=True)

    def drain(self) -> None:
        plan = self.log.take_writes()
        if plan is not None:
            self.log.perform(plan)
            self.log.complete(plan)

    def retain(self) -> None:
        facts = self.log.segments
        if len(facts) < 3:
            return
        self.log_start = max(self.log_start, facts[1].base_offset)  # checkpointed first (rule T9)
        self.log.advance_log_start(self.log_start)
        plan = self.log.retention_plan(20)
        rename, remove = self.log.drop_segments(plan)
        rename()
        if self.rng.random() < 0.5:
            remove()

    def check(self, floor: int) -> None:
        """Check that everything that is served is right, and reaches at least `floor`."""
        log = self.log
        assert log.written_end >= floor, (log.written_end, floor, log.notes)
        offset = max(self.log_start, log.local_log_start)
        assert log.local_log_start <= max(self.log_start, 0)
        last: bytes | None = None
        while offset < log.written_end:
            read = log.read(
                offset,
                bound=log.written_end,
                max_bytes=self.rng.choice([1, 900, 10**6]),
                verify=True,
            )
            assert read.base_offset <= offset < read.next_offset
            for header, raw in batches.iter_batches(read.data):
                assert bytes(raw[batches.HEADER_BYTES :]) in self.decided[header.base_offset], (
                    header
                )
                assert log.epochs.epoch_of(header.base_offset) == header.leader_epoch
                last = bytes(raw)
            offset = read.next_offset
        if last is not None:
            again = log.decide(
                batches.read_header(last), last, leader_epoch=self.epoch + 1, now_ms=11
            )
            assert isinstance(again, Duplicate)
            assert again.last_offset == log.written_end - 1


def play(seed: int, steps: int, crash_at: int | None, flush_on_ack: bool) -> Run:
    run = Run(seed, flush_on_ack)
    run.start()
    run.storage.mutations = 0
    run.storage.crash_at = crash_at
    for _ in range(steps):
        run.step()
    return run


def revive(run: Run, power: bool) -> None:
    run.storage.capacity = None
    floor = run.synced_end if power else run.written_end
    if power:
        run.storage.power_loss()
    else:
        run.storage.crash()
    run.log = run.open(clean=False, same_boot=not power)
    run.check(floor)
    state = (
        run.log.written_end,
        run.log.epochs.entries,
        run.log.producers.items(),
        run.log.segments,
    )
    run.log.close(clean=False)
    files = {k: v for k, v in run.storage.files().items() if not k.endswith(".tmp")}
    again = run.open(clean=False, same_boot=not power)
    assert not [note for note in again.notes if " cut " in note or "removed" in note], again.notes
    assert (
        again.written_end,
        again.epochs.entries,
        again.producers.items(),
        again.segments,
    ) == state
    assert {k: v for k, v in run.storage.files().items() if not k.endswith(".tmp")} == files
    if run.rng.random() < 0.5:
        vouched = run.rng.random() < 0.5  # whose line is lost
        run.storage.sync_all(*again.begin_close(vouched=vouched))
        again.end_close()
        run.recovery_point = again.synced_end
        again = run.open(clean=True, same_boot=True)
    run.log = again
    run.check(floor)


@pytest.mark.parametrize("power", [False, True], ids=["process death", "power loss"])
@pytest.mark.parametrize(("seed", "flush_on_ack"), [(1, False), (2, True)])
def test_nothing_promised_is_lost_at_any_write_point(
    seed: int, flush_on_ack: bool, power: bool
) -> None:
    total = play(seed, 30, None, flush_on_ack).storage.mutations
    assert total > 80
    deaths = 0
    for point in range(total):
        run = Run(seed, flush_on_ack)
        run.start()
        run.storage.crash_at = point
        try:
            for _ in range(30):
                run.step()
        except Crashed:
            deaths += 1
        try:
            revive(run, power)
        except BaseException as failure:
            raise AssertionError(f"seed {seed}, died in mutation {point} of {total}") from failure
    assert deaths == total


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_a_log_goes_on_through_many_lives(seed: int) -> None:
    """The same log dies again and again: records that were confirmed in any life are still there in
    the last.
    """
    rng = random.Random(seed)
    run = Run(seed)
    run.start()
    for life in range(40):
        run.storage.crash_at = rng.randint(0, 60)
        try:
            while True:
                run.step()
        except Crashed:
            pass
        power = rng.random() < 0.5
        revive(run, power)
        run.written_end, run.synced_end = run.log.written_end, run.log.synced_end
        run.sequence = _next_sequence(run)
        assert life == 0 or run.decided
    assert run.written_end > 100


def _next_sequence(run: Run) -> int:
    known = run.log.producers.get(9)
    return 0 if known is None else known.last_sequence + 1
