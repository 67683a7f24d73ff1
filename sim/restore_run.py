"""`python -m pk.sim.restore_run SEED …`: clusters that are restored from their tier (rule T13).

A world of its own: two or three clusters of production processes, one after the other, over one
store.  Each reaches the store by a path with faults of its own.

Phases
  1  the first cluster works: producers, a reader, kills of processes, faults of its path
  2  all its disks are lost, or all but those of one broker, or none: what is left lives behind a
     cut, with a producer and a reader that stay with it.  An operator restores: the plan, the
     claims and the first metadata are production code, the format of a simulated disk is not.
     Producers and the readers go on with the restored cluster, and both clusters may create the
     same new partition.  Some runs do this twice; the second restore may begin while the first
     restored cluster has no copy of its metadata
  3  the faults end.  Each record of the last cluster gets an outcome and reaches the table, readers
     end at the same offsets, and the table is judged (restore_history.py)

The draws of a run come from the seed; a run without a restore is in campaign.py.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pk import errors, generations
from pk.server.node.format import Seed
from pk.server.node.settings import voter_directory_id
from pk.server.raft.quorum_state_store import QUORUM_STATE, first_state
from pk.server.tier.restore import Restore, Wishes
from pk.sim.campaign import EVENTS_MAX
from pk.sim.checkers import ReadRow, Violation
from pk.sim.cluster import SimCluster, SimIdentity
from pk.sim.loop import Stuck
from pk.sim.machine import DISKS, SimMachine
from pk.sim.objects import SimObjects
from pk.sim.options import BROKER, CONTROLLER, KEPT, TIER, NodePlan, SimOptions
from pk.sim.readers import rows_of
from pk.sim.restore_clients import RestoreAdmin, RestoreProducer, RestoreReader
from pk.sim.restore_history import Kept, Place, RestoreHistory
from pk.sim.world import SimClock, SimWorld
from pk.tiering import layout, restore_records
from pk.tiering.restore_fence import partitions_of
from pk.tiering.table import Snapshot

TOPIC = "t"
TICK_MS = 5
WORK_MS, ALIVE_MS = (1_500.0, 5_000.0), (500.0, 4_000.0)
FAULT_EVERY_MS = (200.0, 1_500.0)
RESTART_MS, PATH_MS = (20.0, 1_500.0), (200.0, 2_500.0)
#: Faults of the path of an operator who restores.
PATH_FAULTS = ("away", "flaky", "flaky", "flaky")
SETTLE_MS, RESTORE_MS = 40_000, 60_000
#: The shares of runs that restore twice, in which both clusters add a partition, and of restores of
#: a cluster whose brokers are not asked for: it is restored again from the copies of the first one.
TWICE, GROWS, SAME_COPY = 0.4, 0.5, 0.3
#: The share of restores that begin on a disturbed path to the store.
FLAKY = 0.5
#: What is left of a lost cluster behind the cut, by how often.
NOTHING, ONE_BROKER, ALL = "nothing", "one broker", "all"
LEFT = (NOTHING, ONE_BROKER, ONE_BROKER, ALL)
SERVER: dict[str, Any] = {
    "log_retention_check_interval_ms": 300,
    "broker_session_timeout_ms": 1_500,
    "broker_heartbeat_interval_ms": 300,
    "unclean_recovery_wait_ms": 500,
    "replica_lag_time_max_ms": 1_000,
    "remote_fetch_max_wait_ms": 2_000,
    "tier_retry_backoff_ms": 50,
    "tier_metadata_interval_ms": 300,
    "tier_merge_interval_ms": 400,
    "cold_cache_bytes": 200_000,
}


@dataclass(slots=True)
class RestoreResult:
    """What a run found and did."""

    seed: int
    violation: str = ""
    digest: str = ""
    events: int = 0
    virtual_ms: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def line(self) -> str:
        verdict = f"FAILED {self.violation.splitlines()[0]}" if self.violation else "ok"
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        return (
            f"seed {self.seed}: {verdict}; {self.events} events in {self.virtual_ms} virtual ms; "
            f"{counts}; digest {self.digest[:16]}"
        )


@dataclass(slots=True)
class _Stage:
    """One cluster of the run, and its clients."""

    number: int
    cluster: SimCluster
    producers: list[RestoreProducer] = field(default_factory=list)
    begun: bool = False  #: its directories are formatted
    left: str = ALL
    growing: Any = None  #: the task that adds a partition


class RestoreRun:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.world = SimWorld(seed)
        self.rng: random.Random = self.world.random("restores")
        self.history = RestoreHistory()
        self.counts: dict[str, int] = {}
        self.troubles: list[str] = []
        self.stages: list[_Stage] = []
        self._store = SimObjects(self.world)
        self._clock = SimClock(self.world.loop)
        self._topic_id = ""
        self._readers: list[RestoreReader] = []
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._due_ms = 0.0
        self._calm = False
        self._copies = self.rng.choice([1, 1, 3])
        self._partitions = self.rng.choice([1, 2])

    # -- small parts -------------------------------------------------------------------------------

    @property
    def _now_ms(self) -> float:
        return self.world.loop.now_us / 1000

    def _count(self, name: str, by: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + by

    def _stage(self, identity: SimIdentity) -> _Stage:
        """Return the next cluster, not started yet."""
        rng, number = self.rng, len(self.stages)
        nodes = tuple(
            NodePlan(each, cluster=f"r{number}") for each in range(1, rng.choice([1, 3, 3]) + 1)
        )
        options = SimOptions(nodes=nodes, faults=(), chores=(), topics=())
        path = SimObjects(self.world, self._store, f"store/{number}")
        made = _Stage(number, SimCluster(self.world, options, path, identity, **SERVER))
        self.stages.append(made)
        return made

    def _hosts(self, stage: _Stage) -> list[str]:
        clients = [f"client{stage.number}", f"reader{stage.number}"]
        return [machine.name for machine in stage.cluster.machines] + clients

    # -- driving -----------------------------------------------------------------------------------

    def execute(self) -> RestoreResult:
        """Run all phases; the report holds the violation, if there is one."""
        report = RestoreResult(self.seed)
        try:
            self.world.run(self._judged(), EVENTS_MAX)
            if self.world.loop.failures:
                raise Violation(f"unhandled: {self.world.loop.failures[0]}")
        except (Violation, Stuck) as violation:
            report.violation = str(violation) or repr(violation)
        except AssertionError as failed:
            report.violation = f"assertion: {failed!r}"
        finally:
            report.digest, report.events = self.world.digest, self.world.loop.events
            report.virtual_ms = int(self._now_ms)
            report.counts = {
                **self.counts,
                "acknowledged": len(self.history.acknowledged),
                "rows read": sum(each.rows for each in self._readers),
                "losses told": sum(each.told for each in self._readers),
            }
            self.world.close()
        return report

    async def _judged(self) -> None:
        """Run all phases.  If the last one does not end, the table is judged first."""
        try:
            await self._whole()
        except Violation as violation:
            if self._calm and str(violation).startswith("liveness"):
                self._judge()
            raise

    async def _whole(self) -> None:
        rng = self.rng
        first = self._stage(SimIdentity())
        self._open(first)
        await self._create(first)
        self._attend(first)
        for number in range(1, 3 if rng.random() < TWICE else 2):
            await self._work(rng.uniform(*WORK_MS))
            await self._until("a copy", self._no_copy, SETTLE_MS)
            self._lose(self.stages[-1])
            await self._work(rng.uniform(*ALIVE_MS))
            await self._restore(number)
            self._attend(self.stages[-1])
            if rng.random() < GROWS:
                self._grow()
        await self._work(rng.uniform(*WORK_MS))
        await self._settle()
        self._judge()

    async def _work(self, ms: float) -> None:
        """Let everything run for a while."""
        end_ms = self._now_ms + ms
        while self._now_ms < end_ms:
            await self._clock.sleep_ms(TICK_MS)
            self._tick()

    async def _until(self, what: str, why_not: Callable[[], str], within_ms: float) -> None:
        end_ms = self._now_ms + within_ms
        while words := why_not():
            if self._now_ms >= end_ms:
                raise Violation(f"liveness: {what}: not within {within_ms} ms: {words}")
            await self._clock.sleep_ms(TICK_MS)
            self._tick()

    def _tick(self) -> None:
        for stage in self.stages:
            for machine in stage.cluster.machines:
                if self._lives(stage, machine):
                    machine.supervise()
            self.troubles += stage.cluster.problems
        for words in self.troubles:
            raise Violation(words)
        for due, undo in [each for each in self._undo if each[0] <= self._now_ms]:
            self._undo.remove((due, undo))
            undo()
        if not self._calm and self._now_ms >= self._due_ms:
            self._due_ms = self._now_ms + self.rng.uniform(*FAULT_EVERY_MS)
            self._fault(self.rng.choice(self.stages))

    def _lives(self, stage: _Stage, machine: SimMachine) -> bool:
        if not stage.begun:
            return False
        return stage.left == ALL or (stage.left == ONE_BROKER and machine.node_id == 1)

    def _fault(self, stage: _Stage) -> None:
        """Kill a process, or disturb the cluster's path to the store for a while."""
        rng, path = self.rng, stage.cluster.store
        living = [each for each in stage.cluster.machines if self._lives(stage, each)]
        if stage.begun and not living:
            return
        kind = rng.choice(["kill", "kill", "away", "flaky", "late"] if living else PATH_FAULTS)
        self._count(kind)
        if kind == "kill":
            rng.choice(living).kill(
                rng.choice([BROKER, TIER, TIER, CONTROLLER]), rng.uniform(*RESTART_MS)
            )
        elif kind == "away":
            path.away = True
        elif kind == "flaky":
            path.lost_requests, path.lost_replies, path.stragglers = 0.1, 0.2, 0.2
        else:  # a commit that its owner may not live to see
            path.late_commit = lambda: rng.uniform(100, 3_000)
        self._undo.append((self._now_ms + rng.uniform(*PATH_MS), lambda: _heal(path)))

    # -- the parts of the story --------------------------------------------------------------------

    def _open(self, stage: _Stage) -> None:
        """Let the next tick start the cluster's processes."""
        stage.begun = True
        self.world.record(f"cluster {stage.number} of {len(stage.cluster.machines)}")

    async def _create(self, stage: _Stage) -> None:
        rng, world = self.rng, self.world.world_of("admin")
        admin = RestoreAdmin(world, stage.cluster.bootstrap)
        configs = {
            **KEPT,
            "segment_bytes": "14336",
            "tier_max_lag_ms": str(rng.choice([50, 300, 1_000])),
            "tier_file_bytes": str(rng.choice([4_000, 60_000])),
            "local_drop_delay_ms": "0",
            "local_retention_bytes": str(rng.choice([0, 20_000])),
            "file_delete_delay_ms": "0",
        }
        copies = min(self._copies, len(stage.cluster.machines))
        creating = self.world.spawn("admin", admin.create(TOPIC, self._partitions, copies, configs))
        await self._until("the topic", lambda: "" if creating.done() else "none", SETTLE_MS)
        self._topic_id = creating.result()

    def _attend(self, stage: _Stage) -> None:
        """Start a producer and a reader that stays, and let the reader that moves move here."""
        number, where = stage.number, stage.cluster.bootstrap
        world = self.world.world_of(f"client{number}")
        stays = RestoreReader(
            f"stays{number}", TOPIC, self._topic_id, self.history, self.troubles.append
        )
        self._readers.append(stays)
        if number == 0:
            moves = RestoreReader(
                "moves", TOPIC, self._topic_id, self.history, self.troubles.append
            )
            self._readers.insert(0, moves)
        else:
            self.world.kill(f"mover{number - 1}")
        for each, node in ((stays, f"reader{number}"), (self._readers[0], f"mover{number}")):
            self._spawn(node, partial(each.start, self.world.world_of(node), where))
        rng = self.world.random(f"producer/{number}")
        producer = RestoreProducer(
            world, where, "p", number, TOPIC, self.history, rng, self.troubles.append
        )
        stage.producers.append(producer)
        self._spawn(f"client{number}", producer.start)

    def _spawn(self, node: str, start: Callable[[], None]) -> None:
        async def begin() -> None:
            start()

        self.world.world_of(node)
        self.world.spawn(node, begin())

    def _no_copy(self) -> str:
        """Return why there is nothing to restore; a second restore may use the first copies."""
        if self._source() is not None:
            return ""
        return "no copy of the metadata names the topic"

    def _source(self) -> str | None:
        """Return the id of the newest cluster with a copy that is restored from."""
        known = [each.cluster.identity.cluster_id for each in self.stages]
        found = [
            cluster_id
            for cluster_id in known
            if any(
                path.startswith(f"_cluster/{cluster_id}/0/metadata/")
                and self._topic_id.encode() in raw
                for path, raw in self._store.memory.objects.items()
            )
        ]
        return found[-1] if found else None

    def _lose(self, stage: _Stage) -> None:
        """Lose disks, and cut off what is left."""
        rng = self.rng
        stage.left = rng.choice(LEFT)
        self._count(f"left of a cluster: {stage.left}")
        self.world.record(f"cluster {stage.number} is lost; left: {stage.left}")
        for machine in stage.cluster.machines:
            if not self._lives(stage, machine):
                machine.kill_all(0)
                machine.storages.clear()
        others = [f"mover{each}" for each in range(4)] + ["operator"]
        others += [f"r{stage.number + 1}n{each}" for each in range(1, 4)]
        for one in self._hosts(stage):
            for other in others:
                self.world.network.cut(one, other)
        if stage.left == NOTHING:
            self.world.kill(f"client{stage.number}")
            self.world.kill(f"reader{stage.number}")

    async def _restore(self, number: int) -> None:
        """Make the next cluster of the store, as an operator does who repeats what failed."""
        cluster_id = f"{number}" * 36
        identity = SimIdentity(cluster_id, lambda node: voter_directory_id(cluster_id, node.number))
        newest, first = self._source(), self.stages[0].cluster.identity.cluster_id
        source = first if self.rng.random() < SAME_COPY else newest
        assert source is not None
        before = self._versions()
        stage = self._stage(identity)
        self._count("restores")
        if self.rng.random() < FLAKY:
            self._fault(stage)
        self._count(f"restores of {'an earlier' if source != newest else 'the newest'} copy")
        self.world.world_of("operator")
        work = self.world.spawn("operator", self._restored(stage, source))
        await self._until("the restore", lambda: "" if work.done() else "it goes on", RESTORE_MS)
        seed = work.result()
        self._note_claims(number, before)
        for machine in stage.cluster.machines:
            storage = machine.storages[DISKS[CONTROLLER]]
            storage.replace_file(seed.name, seed.raw)
            storage.replace_file(QUORUM_STATE, first_state())
        self._open(stage)

    async def _restored(self, stage: _Stage, source: str) -> Seed:
        cluster_id, world = stage.cluster.identity.cluster_id, self.world.world_of("operator")
        brokers = tuple(machine.node_id for machine in stage.cluster.machines)
        while True:
            begun = await self._records()
            wishes = Wishes(
                source,
                cluster_id,
                brokers,
                fence=True,
                join=any(each.cluster_id == cluster_id for each in begun),
            )
            resolved = stage.cluster.resolved_of(stage.cluster.machines[0].plan)
            path = stage.cluster.store
            restore = Restore(path, path, world, (), resolved, wishes, self.world.record)
            try:
                report, seed = await restore.begin()
            except errors.TierUnavailable:
                self._count("restores that broke")
                await world.clock.sleep_ms(100)
                continue
            assert seed is not None
            assert report.generation == stage.number, report
            return seed

    async def _records(self) -> list[restore_records.RestoreRecord]:
        """Return the restores of the store, as they are in truth."""
        return await restore_records.restores_in(self._store.memory)

    def _grow(self) -> None:
        """Let every cluster that lives add the same partition."""
        total = self._partitions = self._partitions + 1
        for stage in self.stages:
            node = f"client{stage.number}"
            if stage.left != NOTHING and self.world.nodes[node].alive:
                admin = RestoreAdmin(self.world.world_of(node), stage.cluster.bootstrap)
                stage.growing = self.world.spawn(node, admin.grow(TOPIC, total))
                self._count("partitions added")

    # -- the end -----------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """End the faults; the last cluster must come to rest."""
        self._calm = True
        for _, undo in self._undo:
            undo()
        self._undo.clear()
        last = self.stages[-1]
        for producer in last.producers:
            producer.stop()
        await self._until("outcomes", lambda: self._pending(last), SETTLE_MS)
        await self._until("well", last.cluster.unwell, SETTLE_MS)
        await self._until("the reader", self._behind, SETTLE_MS)

    def _pending(self, stage: _Stage) -> str:
        if stage.growing is not None and not stage.growing.done():
            return "a partition is being added"
        waiting = sum(producer.pending for producer in stage.producers)
        return f"{waiting} records wait" if waiting else ""

    def _behind(self) -> str:
        """Return where the reader that moves has not reached the table's end.

        The last cluster may lack partitions that were added after the copy of the metadata and got
        no rows.
        """
        snapshot, active = self._snapshot(), self.stages[-1].cluster.active()
        if active is None or active.controller is None or active.controller.active is None:
            return "no controller is active"
        topic = active.controller.active.machine.image.topics[self._topic_id]
        for number in topic.partitions:
            at, end = self._readers[0].reached(number), snapshot.partition(number).end
            if at < end:
                return f"partition {number}: {at} of {end}"
        return ""

    # -- the table ---------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot:
        return self._all_versions()[-1]

    def _all_versions(self) -> list[Snapshot]:
        home = layout.table_path(TOPIC, self._topic_id)
        state = self._store.tables.state(f"{self._store.url}/{home}")
        if state is None:
            raise Violation("liveness: the topic has no table")
        return list(state.versions)

    def _versions(self) -> int:
        return len(self._all_versions())

    def _note_claims(self, generation: int, before: int) -> None:
        """Note what the table had when the restore claimed it."""
        claim = generation * generations.EPOCHS
        versions = self._all_versions()
        at = next(
            (n for n in range(before, len(versions)) if versions[n].partition(0).claim >= claim),
            None,
        )
        self.history.generations.append(generation)
        unclaimed = versions[-1 if at is None else at - 1]
        for number in range(max(self._partitions, partitions_of(unclaimed, 0))):
            rows = {row.offset: row for row in self._rows(unclaimed, number)}
            kept = Kept(generation, unclaimed.partition(number).end, rows)
            self.history.claimed(Place(self._topic_id, number), kept)

    def _rows(self, snapshot: Snapshot, partition: int) -> list[ReadRow]:
        home, found = layout.table_path(TOPIC, self._topic_id), []
        for file in snapshot.files_of(partition):
            raw = self._store.memory.objects[f"{home}/{file.path}"]
            parquet = pq.ParquetFile(pa.BufferReader(raw), pre_buffer=False)
            for batch in parquet.read(use_threads=False).to_batches():
                found += rows_of(batch)
        return found

    def _judge(self) -> None:
        snapshot, last = self._snapshot(), self.stages[-1].number
        for number in range(partitions_of(snapshot, self._partitions)):
            place = Place(self._topic_id, number)
            rows = self._rows(snapshot, number)
            self._count("rows in the table", self.history.check_table(place, rows, last))


def _heal(path: SimObjects) -> None:
    path.away, path.late_commit = False, None
    path.lost_requests = path.lost_replies = path.stragglers = 0.0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m pk.sim.restore_run")
    parser.add_argument("seed", type=int)
    parser.add_argument("--count", type=int, default=1, help="so many seeds, from SEED on")
    parser.add_argument("--trace", action="store_true", help="print every event of the run")
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    for seed in range(given.seed, given.seed + given.count):
        print(f"SEED={seed}", flush=True)
        one = RestoreRun(seed)
        report = one.execute()
        if given.trace:
            print("\n".join(one.world.trace))
        if report.violation:
            print(report.violation)
        print(report.line)
        if report.violation:
            print(f"replay: python -m pk.sim.restore_run {seed}")
            return 1
    print(f"replay: python -m pk.sim.restore_run {given.seed} --count {given.count}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
