"""One seeded run of the whole cluster: fault phase, liveness phase, validation.

Phases
  1  fault phase: producers, consumers and an administrator work while faults begin and end; the
     invariants are checked after every event (safety)
  2  liveness phase: all faults end and the producers stop; within `heal_ms` every record has an
     outcome, every partition has a leader, and every stable record is in its table (liveness); more
     time passes only while the tables go on to cover more offsets
  3  validation: the rows that a reader from offset 0 gets, and the files of the tables, are
     compared with the oracle

The same seed gives the same trace in any process; `RunResult.digest` is the hash of that trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pk.sim.checkers import (
    PartitionSample,
    ReaderCheck,
    ReadRow,
    Violation,
    after_last_gap,
    check_log,
    check_table,
)
from pk.sim.cluster import SimCluster
from pk.sim.compaction_run import CompactionRun
from pk.sim.damage_reports import watch_reports
from pk.sim.faults import Faults
from pk.sim.full_disk_check import FullDiskCheck
from pk.sim.groups import GroupRun, group_run
from pk.sim.holds import HoldRun
from pk.sim.loop import Stuck
from pk.sim.operations import Operator
from pk.sim.options import BROKER, CONTROLLER, SimOptions, drawn
from pk.sim.oracle import Oracle, Outcome, Topic
from pk.sim.readers import SimConsumer, read_all, rows_of
from pk.sim.samples import Observer
from pk.sim.transaction_run import STABLE_MS, TransactionRun
from pk.sim.workload import SimAdmin, SimProducer
from pk.sim.world import SimClock, SimWorld
from pk.tiering import layout
from pk.types import NONE, PartitionKey, TopicPartition

#: Sessions and rebalances of a run are short.
GROUP_SETTINGS = {"group_initial_rebalance_delay_ms": 200, "group_min_session_timeout_ms": 500}
LOOK_EVERY = 20  #: in ticks
GROUPS_EVERY = 4  #: in ticks
IMAGES_EVERY = 400
LIVENESS_TICK_MS = 50
EVENTS_MAX = 5_000_000
#: Producers slow down once they have this multiple of the acknowledgements expected so far.
AHEAD = 1.2
#: If the run still lacks acknowledgements after LATE times the planned fault phase, the pauses
#: between faults become RARER times longer.
LATE, RARER = 1.5, 20
#: Longer than any broker is down in a run, and at most as long as a clock jump (rule L10).
GAP_MAX_MS = 100_000
#: Longer than any clock is wrong in a run (faults.CLOCK_WRONG_MS).
GRACE_MS = 30_000


@dataclass(slots=True)
class RunResult:
    """The result of a run: violation, digest and counters."""

    seed: int
    digest: str
    violation: str = ""
    events: int = 0
    virtual_ms: int = 0
    samples: int = 0
    sent: int = 0
    acknowledged: int = 0
    acknowledgements: int = 0  #: of all producers: those of keyed and committed records, too
    unknown: int = 0
    rows_read: int = 0
    tiered_rows: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def line(self) -> str:
        verdict = f"FAILED {self.violation.splitlines()[0]}" if self.violation else "ok"
        faults, counts = (
            ", ".join(f"{name} {count}" for name, count in sorted(each.items())) or "none"
            for each in (self.faults, self.counts)
        )
        return (
            f"seed {self.seed}: {verdict}; {self.events} events in {self.virtual_ms} virtual ms, "
            f"{self.samples} samples, {self.sent} records ({self.acknowledged} acknowledged, "
            f"{self.unknown} unknown), {self.rows_read} rows read, {self.tiered_rows} in tables; "
            f"faults: {faults}; counts: {counts}; digest {self.digest[:16]}"
        )


class Run:
    """One simulated run of a seed.  `options` replace the options that the seed would draw."""

    def __init__(self, seed: int, options: SimOptions | None = None) -> None:
        self.seed = seed
        self.world = SimWorld(seed)
        self.options = options or drawn(self.world.random("options"))
        self.world.loop.grain_us = self.options.grain_us
        server: dict[str, Any] = {
            "log_retention_check_interval_ms": 300,
            "log_flush_offset_checkpoint_interval_ms": 1_000,
            "broker_session_timeout_ms": 1_500,
            "broker_heartbeat_interval_ms": 300,
            "unclean_recovery_wait_ms": 500,
            "clock_gap_max_ms": GAP_MAX_MS,
            "clock_grace_ms": GRACE_MS,
            "remote_fetch_max_wait_ms": 2_000,
            "tier_retry_backoff_ms": 50,
            "tier_merge_interval_ms": 400,
            "cold_cache_bytes": 200_000,
            **(GROUP_SETTINGS if self.options.groups else {}),
            **self.options.server,
        }
        if self.options.vacuum:
            server.update(tier_vacuum_interval_ms=1_000, tier_vacuum_retention_ms=0)
        self.counts: dict[str, int] = {}
        self.oracle = Oracle(self.options.topics)
        self.oracle.now_ms = lambda: self.world.loop.now_us / 1000
        self.cluster = SimCluster(self.world, self.options, **server)
        self.observer = Observer(self.cluster, self.oracle, self.counts)
        self.operator = Operator(
            self.world.world_of("operator"),
            self.cluster.bootstrap,
            self.observer,
            self.world.random("operator"),
            self.counts,
        )
        self.faults = Faults(
            self.world,
            self.cluster,
            self.observer,
            self.options,
            self._restart_client,
            self.operator,
            self.oracle,
        )
        watch_reports(self.cluster, self.observer, self.oracle)
        self.full_disks = FullDiskCheck(self.cluster, int(server.get("disk_reserve_bytes", 0)))
        self.producers: list[SimProducer] = []
        self.consumers: list[SimConsumer] = []
        self.checks: list[ReaderCheck] = []
        self.admin: SimAdmin | None = None
        self.troubles: list[str] = []
        self.tiered_rows = 0
        self.transactions: TransactionRun | None = None
        if self.options.transaction_topics:
            self.transactions = TransactionRun(
                self.world,
                self.cluster,
                self.observer,
                self.oracle,
                self.counts,
                self._trouble,
                self._bounds_of,
            )
            self.faults.transactions.coordinator_of = self.transactions.samples.coordinator_of
        self.groups = self._group_run() if self.options.groups else None
        self.holds = self._hold_run() if self.options.holds else None
        self.compaction = self._compaction_run()
        self._clock = SimClock(self.world.loop)
        self._bounds: dict[PartitionKey, PartitionSample] = self.observer.latest
        self._ticks = 0
        self._lives = 0

    def _group_run(self) -> GroupRun:
        return group_run(
            self.cluster,
            self.oracle,
            self.options,
            self._trouble,
            self.world.random,
            self._lost_ms,
        )

    def _lost_ms(self, topic: str, partition: int) -> float:
        """Return the end of the last era of a partition; NONE = none ended."""
        found = self.observer.image.topic(topic)
        return NONE if found is None else self.oracle.lost_ms(found.topic_id, partition)

    def _hold_run(self) -> HoldRun:
        return HoldRun(
            self.cluster,
            self.oracle,
            self.observer.latest,
            self.world.random("holds"),
            self._trouble,
            self._lost_ms,
        )

    def _compaction_run(self) -> CompactionRun | None:
        """Return the part of the run that has compacted topics; None = it has none."""
        if not self.options.compacted_topics:
            return None
        return CompactionRun(
            self.world,
            self.cluster,
            self.observer,
            self.oracle,
            self.counts,
            self._trouble,
            self._bounds_of,
        )

    # -- the client --------------------------------------------------------------------------------

    def _trouble(self, words: str) -> None:
        self.troubles.append(words)

    def _log_start_of(self, topic: str, partition: int) -> int:
        """Return the largest known log_start of the partition in the topic's present life."""
        known = self.oracle.topics[topic]
        asked = known.deletions.get(partition, 0)
        start = self.observer.invariants.log_start(PartitionKey(known.topic_id, partition))
        return max(asked, start)

    def _bounds_of(self, topic_id: str, partition: int) -> tuple[int, int]:
        sample = self._bounds.get(PartitionKey(topic_id, partition))
        return (0, 0) if sample is None else (sample.log_start, sample.high_watermark)

    def _start_client(self) -> None:
        self._lives += 1
        life = self._lives

        async def main(world: Any) -> None:
            kinds: list[dict[str, Any]] = [
                *({"compression": codec} for codec in self.options.codecs),
                {"acks": "1"},
            ]
            for number, given in enumerate(kinds):
                name = f"p{number}.{life}"
                rng = self.world.random(name)
                self.producers.append(
                    SimProducer(
                        world,
                        self.cluster.bootstrap,
                        name,
                        self.oracle,
                        self.options,
                        rng,
                        given,
                        self._trouble,
                    )
                )
            for name in (f"c0.{life}", f"c1.{life}"):
                check = ReaderCheck(name, self.oracle, tail=name.startswith("c1"))
                self.checks.append(check)
                self.consumers.append(self._consumer(world, check))
            for producer in self.producers:
                producer.start()
            for consumer in self.consumers:
                consumer.start()
            if self.transactions is not None:
                self.transactions.start_client(world, life)
            if self.groups is not None:
                self.groups.start_client(world, life)
            if self.holds is not None:
                self.holds.start_client(world, life)
            if self.compaction is not None:
                self.compaction.start_client(world, life)

        self.producers.clear()
        self.consumers.clear()
        self.world.start("client", main)

    def _consumer(self, world: Any, check: ReaderCheck) -> SimConsumer:
        tail = {"auto_offset_reset": "latest"} if check.name.startswith("c1") else {}
        return SimConsumer(
            world,
            self.cluster.bootstrap,
            check,
            self.oracle,
            self.options.topics,
            self._log_start_of,
            self._trouble,
            self.world.record,
            **tail,
        )

    def _restart_client(self) -> None:
        self.world.kill("client")
        self.oracle.forget_pending("the client was killed")
        self._start_client()

    def _replace_producers(self) -> None:
        """Restart the client if a producer cannot go on because acknowledged records were lost."""
        writers = self.compaction is not None and self.compaction.over
        if writers or any(producer.over for producer in self.producers):
            self.counts["producers gone"] = self.counts.get("producers gone", 0) + 1
            self._restart_client()

    # -- phases ------------------------------------------------------------------------------------

    def execute(self) -> RunResult:
        """Run all phases and return the report, which holds the violation if there is one."""
        report = RunResult(self.seed, "")
        try:
            self._whole()
        except (Violation, Stuck) as violation:
            report.violation = str(violation) or repr(violation)
        except AssertionError as failed:  # an assertion inside pk failed
            report.violation = f"assertion: {failed!r}"
        finally:
            self._fill(report)
            self.world.close()
        return report

    def _fill(self, report: RunResult) -> None:
        outcomes = [sent.outcome for sent in self.oracle.sent.values()]
        report.digest = self.world.digest
        report.events = self.world.loop.events
        report.virtual_ms = self.world.loop.now_us // 1000
        report.samples = self.observer.invariants.samples
        report.sent = len(outcomes)
        report.acknowledged = outcomes.count(Outcome.ACKNOWLEDGED)
        report.acknowledgements = self._acknowledgements()
        report.unknown = report.sent - report.acknowledged
        report.rows_read = sum(check.rows for check in self.checks)
        report.tiered_rows = self.tiered_rows
        report.faults = dict(self.faults.counts)
        chores = self.admin.counts if self.admin is not None else {}
        told: dict[str, int] = {}
        for check in self.checks:
            for of, count in check.told.items():
                told[f"told of {of}"] = told.get(f"told of {of}", 0) + count
        report.counts = {
            **self.counts,
            **(self.transactions.figures() if self.transactions is not None else {}),
            **(self.groups.figures() if self.groups is not None else {}),
            **(self.holds.figures() if self.holds is not None else {}),
            **(self.compaction.figures() if self.compaction is not None else {}),
            **told,
            **self.cluster.store.counts,
            **self.faults.met,
            **{f"chore {name}": count for name, count in chores.items()},
            "eras": self.observer.losses.eras,
            "late frames": self.world.network.late_frames,
            "stalled frames": self.world.network.stalled_frames,
            "replicas made anew": self.cluster.events.get("replica_made_anew", 0),
            "snapshot loads of voters": self.cluster.snapshot_loads[CONTROLLER],
            "snapshot loads of brokers": self.cluster.snapshot_loads[BROKER],
        }

    def _whole(self) -> None:
        self.world.record(f"options {self.options}")
        self.world.run(self._fault_phase(), EVENTS_MAX)
        self.world.run(self._liveness_phase(), EVENTS_MAX)
        self.world.run(self._validation(), EVENTS_MAX)
        self._look()
        if self.world.loop.failures:
            raise Violation(f"unhandled: {self.world.loop.failures[0]}")

    def _look(self) -> None:
        """Check everything that must always hold, once."""
        self.observer.look_at_all()
        if self.transactions is not None:
            self.transactions.samples.look()
        if self.holds is not None:
            self.holds.look()
        self._complain()

    def _complain(self) -> None:
        for words in (*self.cluster.problems, *self.troubles):
            raise Violation(words)

    def _tick(self) -> None:
        self._ticks += 1
        self.cluster.supervise()
        self.observer.tick()
        self._complain()
        if self.groups is not None and self._ticks % GROUPS_EVERY == 0:
            self.groups.look(self.world.loop.now_us / 1000)
        if self._ticks % LOOK_EVERY == 0:
            self._look()
            self.full_disks.look(self.world.loop.now_us / 1000, self.faults.calm_since_ms)
        if self._ticks % IMAGES_EVERY == 0:
            self.observer.check_images()

    async def _fault_phase(self) -> None:
        self.cluster.supervise()
        self._start_client()
        admin_world = self.world.world_of("admin")
        self.admin = SimAdmin(
            admin_world,
            self.cluster.bootstrap,
            self.oracle,
            self.options,
            self.world.random("admin/chores"),
            self._bounds_of,
            self._trouble,
        )
        chores = self.world.spawn("admin", self.admin.run())
        self.world.spawn("operator", self.operator.run())
        if self.transactions is not None:
            self.transactions.start()
        if self.compaction is not None:
            self.compaction.start()
        options = self.options
        ticks, left_ms = 0, options.fault_ms
        while left_ms > 0 and ticks * options.tick_ms < 4 * options.fault_ms:
            await self._clock.sleep_ms(options.tick_ms)
            self.faults.tick()
            self._replace_producers()
            self._tick()
            ticks += 1
            begun = all(topic.life for topic in self.oracle.topics.values())
            enough = self._enough(ticks * options.tick_ms)
            if begun and (enough or left_ms > options.tick_ms):
                left_ms -= options.tick_ms  # time counts only once all topics exist
        self.faults.heal()
        self.operator.clocks_are_right()
        self.admin.resting = True
        if self.transactions is not None:
            self.transactions.rest()
        if self.groups is not None:
            self.groups.rest()
        if self.compaction is not None:
            self.compaction.rest()
        await self._until("chores end", lambda: "" if chores.done() else "a chore goes on")
        chores.result()

    def _enough(self, elapsed_ms: int) -> bool:
        """Return whether `acknowledged_min` acknowledgements are reached.

        Plain producers far ahead of it slow down.  If they are late, faults become rare.
        """
        oracle, least = self.oracle, self.options.acknowledged_min
        share = elapsed_ms / self.options.fault_ms
        oracle.ahead = bool(least) and oracle.acknowledgements > AHEAD * least * share
        self.faults.rarer = 1 if oracle.acknowledgements >= least or share < LATE else RARER
        return self._acknowledgements() >= least

    def _acknowledgements(self) -> int:
        keyed = self.compaction.history.acknowledgements if self.compaction else 0
        committed = self.transactions.history.acknowledgements if self.transactions else 0
        return self.oracle.acknowledgements + keyed + committed

    async def _until(
        self, what: str, why_not: Any, within_ms: int | None = None, rule: str = "liveness"
    ) -> None:
        within_ms = self.options.heal_ms if within_ms is None else within_ms
        deadline, covered = self._clock.monotonic_ms() + within_ms, self.cluster.store.covered()
        while why_not():
            if self._clock.monotonic_ms() >= deadline:
                # A tier that is far behind and goes on is alive.
                if rule != "liveness" or covered == self.cluster.store.covered():
                    raise Violation(f"{rule}: {what}: not within {within_ms} ms: {why_not()}")
                deadline, covered = deadline + within_ms, self.cluster.store.covered()
            await self._clock.sleep_ms(LIVENESS_TICK_MS)
            self._tick()

    async def _liveness_phase(self) -> None:
        for producer in self.producers:
            producer.stop()
        await self._until("outcomes", self._unsettled)
        run = self.transactions
        if run is not None:
            await self._until("transactions", run.unsettled)
        if self.compaction is not None:
            await self._until("keyed records", self.compaction.unsettled)
        await self._until("well", lambda: self.operator.waits() or self.cluster.unwell())
        if run is not None:
            await self._until("stable", run.samples.unstable, STABLE_MS, "V22")
            if run.start_again():
                await self._until("queries", run.unsettled)
                await self._until("stable", run.samples.unstable, STABLE_MS, "V22")
            await self._until("well", lambda: self.operator.waits() or self.cluster.unwell())
        if self.groups is not None:
            await self._until("the group", self.groups.unsettled)
        self.observer.check_images()

    def _unsettled(self) -> str:
        pending = self.oracle.pending()
        return f"{len(pending)} records wait, the first: {pending[0]}" if pending else ""

    # -- validation --------------------------------------------------------------------------------

    async def _validation(self) -> None:
        samples = self.observer.latest
        ends: dict[TopicPartition, int] = {}
        for topic in self.oracle.topics.values():
            for partition in range(topic.partitions):
                sample = samples.get(PartitionKey(topic.topic_id, partition))
                if sample is None:
                    raise Violation(f"V6: {topic.name}-{partition} ({topic.topic_id}) is gone")
                ends[TopicPartition(topic.name, partition)] = sample.high_watermark
        last = ReaderCheck("last", self.oracle)
        self.checks.append(last)
        reader = self.world.world_of("reader")
        every = read_all(reader, self.cluster.bootstrap, last, ends, self._log_start_of)
        reading = self.world.spawn("reader", every)
        await self._until("reading all", lambda: "" if reading.done() else f"{last.rows} rows read")
        reading.result()
        for topic in self.oracle.topics.values():
            self._validate(topic, last, ends)
        if self.transactions is not None:
            await self._validate_transactions(self.transactions, reader)
        if self.groups is not None:
            judging = self.world.spawn("reader", self.groups.judge(reader))
            await self._until("offsets", lambda: "" if judging.done() else "no answer")
            judging.result()
        if self.compaction is not None:
            reading = self.world.spawn("reader", self.compaction.read(reader))
            await self._until("reading", lambda: "" if reading.done() else "it goes on")
            reading.result()
            self.compaction.judge()

    async def _validate_transactions(self, run: TransactionRun, reader: Any) -> None:
        reading = self.world.spawn("reader", run.read(reader))
        await self._until("reading transactions", lambda: "" if reading.done() else "it goes on")
        self._look()
        self.tiered_rows += run.judge(*reading.result(), self._table_of)

    def _table_of(
        self, topic: str, topic_id: str, partition: int
    ) -> tuple[int, int, list[ReadRow]] | None:
        """Return start, end and rows of a partition's table; None = there is no table."""
        snapshot = self.cluster.store.snapshot(topic, topic_id)
        if snapshot is None:
            return None
        counters = snapshot.partition(partition)
        rows = list(self._table_rows(topic, topic_id, partition))
        return counters.start, counters.end, rows

    def _validate(self, topic: Topic, last: ReaderCheck, ends: dict[TopicPartition, int]) -> None:
        logs: dict[int, list[ReadRow]] = {}
        starts: dict[int, int] = {}
        self._look()
        now = self.observer.latest
        for partition in range(topic.partitions):
            place = TopicPartition(topic.name, partition)
            line = last.lines.get(place)
            logs[partition] = list(line.offsets.values()) if line is not None else []
            if topic.expires:
                logs[partition] = after_last_gap(logs[partition])
            first = logs[partition][0].offset if logs[partition] else ends[place]
            starts[partition] = first if topic.expires else self._start_of(topic, partition, now)
            seen = logs[partition][-1].offset + 1 if logs[partition] else first
            if seen < ends[place]:
                raise Violation(f"V5: {place}: read up to {seen} of {ends[place]}")
        check_log(self.oracle, topic, logs, starts)
        for partition, rows in logs.items():
            log = {row.offset: row for row in rows}
            for check in self.checks:
                check.compare(topic, partition, log)
            self._validate_table(topic, partition, log)

    def _start_of(
        self, topic: Topic, partition: int, now: dict[PartitionKey, PartitionSample]
    ) -> int:
        return now[PartitionKey(topic.topic_id, partition)].log_start

    def _validate_table(self, topic: Topic, partition: int, log: dict[int, ReadRow]) -> None:
        snapshot = self.cluster.store.snapshot(topic.name, topic.topic_id)
        if snapshot is None:
            return
        counters = snapshot.partition(partition)
        rows = list(self._table_rows(topic.name, topic.topic_id, partition))
        self.tiered_rows += len(rows)
        check_table(f"{topic.name}-{partition}", counters.start, counters.end, rows, log)
        files = snapshot.files_of(partition)
        # files below the table's start count as removed (T17)
        left = sum(file.rows for file in files if file.max_offset < counters.start)
        if counters.rows - counters.removed != len(rows) - left:
            raise Violation(f"V9: {topic.name}-{partition}: {counters}, but {len(rows)} rows")
        live = [file.path for file in files if file.max_offset >= counters.start]
        total = self.cluster.store.row_sum(topic.name, topic.topic_id, live)
        if total != (counters.sum - counters.removed_sum) % layout.SUM_MODULUS:  # T2
            raise Violation(f"V9: {topic.name}-{partition}: {counters}, but row sum {total}")

    def _table_rows(self, topic: str, topic_id: str, partition: int) -> Iterator[ReadRow]:
        snapshot = self.cluster.store.snapshot(topic, topic_id)
        assert snapshot is not None
        home = layout.table_path(topic, topic_id)
        for file in snapshot.files_of(partition):
            raw = self.cluster.store.memory.objects.get(f"{home}/{file.path}")
            if raw is None:
                raise Violation(f"V9: {home}/{file.path} is not in the store")
            # No threads, not even Arrow's: an Arrow thread that still holds Python's bytes when the
            # process ends aborts the process.
            file = pq.ParquetFile(pa.BufferReader(raw), pre_buffer=False)
            for batch in file.read(use_threads=False).to_batches():
                yield from rows_of(batch)


def run(seed: int, options: SimOptions | None = None) -> RunResult:
    """Run one seed and return its report."""
    return Run(seed, options).execute()
