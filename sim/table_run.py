"""The maintained tables of one run: their jobs, and the judgement of the newest versions (V30)."""

from __future__ import annotations

import random

from pk import errors
from pk.sim.checkers import Violation
from pk.sim.cluster import SimCluster
from pk.sim.compaction import CompactionClient
from pk.sim.compaction_history import keyed_rows_of
from pk.sim.samples import Observer
from pk.sim.table_history import LeaseHistory, TableFacts, check_table_rows
from pk.sim.table_jobs import CALL_MS, SimCompaction, TableJobs
from pk.sim.table_place import TableClient, place_of, rows_of
from pk.sim.table_snapshots import SnapshotRuns
from pk.sim.world import SimWorld
from pk.tiering import layout
from pk.types import NONE, PartitionKey, TopicPartition
from pk.world import World


class TableRun:
    """The maintained tables of a run; without such topics it does nothing."""

    def __init__(
        self,
        world: SimWorld,
        cluster: SimCluster,
        observer: Observer,
        shared: CompactionClient,
        counts: dict[str, int],
    ) -> None:
        self._world, self._cluster, self._observer = world, cluster, observer
        self._counts = counts
        self._plans = list(cluster.options.maintained_topics)
        self._snapshots = SnapshotRuns()
        self._client = TableClient(
            shared, cluster.store, LeaseHistory(), self._leader_epoch, self._count
        )
        self._jobs: list[TableJobs] = []

    def _count(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1

    def _leader_epoch(self, topic: str) -> int:
        """Return the leader epoch of the partition whose leader names the owner."""
        key = PartitionKey(self._client.topic_id(topic), 0)
        state = self._observer.image.partition(key)
        return NONE if state is None else int(state.leader_epoch)

    def start_client(self, world: World, life: int) -> None:
        """Start the jobs of one life of the client; call it in its node."""
        if self._plans:
            jobs = TableJobs(world, self._client, life, self._world.random, self._snapshots)
            jobs.start(self._plans)
            self._jobs = [jobs]

    def unsettled(self) -> str:
        """Return what is not ended yet; '' = nothing."""
        return next((words for each in self._jobs if (words := each.unsettled())), "")

    async def finish(self, world: World) -> None:
        """Run a last compaction and a last snapshot of each table to their ends: jobs land."""
        for plan in self._plans:
            rng: random.Random = self._world.random(f"tables/last/{plan.name}")
            done = False
            number = 0
            while not done:
                number += 1
                name = f"{plan.name}.last.{number}"
                job = SimCompaction(world, self._client, plan, name, rng)
                try:
                    await job.run()
                    await self._snapshots.run(world, self._client, plan, rng)
                    done = True
                except (errors.RetriableError, errors.LeaseHeld, errors.DamagedTierFile):
                    await world.clock.sleep_ms(CALL_MS)
                except errors.PkError as error:
                    raise Violation(f"V30: the last job of {plan.name}: {error!r}") from error

    def judge(self) -> None:
        """Check the newest version of each table."""
        for plan in self._plans:
            topic_id = self._client.topic_id(plan.name)
            for partition in range(plan.partitions):
                self._judge(TopicPartition(plan.name, partition), topic_id)

    def _judge(self, where: TopicPartition, topic_id: str) -> None:
        store, shared = self._cluster.store, self._client.shared
        snapshot = store.snapshot(where.topic, topic_id)
        if snapshot is None:
            return
        rng = self._world.random("tables/judge")
        place = place_of(store, self._world.world_of("judge"), rng, where.topic, topic_id)
        counters = snapshot.partition(where.partition)
        live = [f for f in snapshot.files_of(where.partition) if f.max_offset >= counters.start]
        rows = []
        for file in live:
            try:
                for batch in rows_of(place, file):
                    rows += keyed_rows_of(batch, shared.now_ms())
            except errors.DamagedTierFile as error:
                raise Violation(f"V30: {where}: {error.message}") from None
        facts = TableFacts(
            counters.start,
            counters.end,
            counters.rows - counters.removed,
            (counters.sum - counters.removed_sum) % layout.SUM_MODULUS,
            sorted(rows),
            store.row_sum(where.topic, topic_id, [file.path for file in live]),
        )
        check_table_rows(shared.history, where, facts, shared.now_ms())
