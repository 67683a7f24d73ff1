"""The transactions of one run: their topics, client, samples, and the judgement at the end.

A run with transactions has topics of its own for them (options.py).  They are not in the oracle of
the other topics, whose offsets have no gaps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pk.server.controller.internal_topics import REPLICATION_FACTOR
from pk.sim.checkers import ReadRow, Violation
from pk.sim.cluster import SimCluster
from pk.sim.job_run import JobRuns
from pk.sim.options import BROKER, SimOptions, TopicPlan
from pk.sim.oracle import Oracle
from pk.sim.samples import Observer
from pk.sim.transaction_checkers import (
    ReadersCheck,
    Rows,
    StableEnds,
    check_superset,
    check_transaction_table,
    check_transactions,
    waiting_records,
)
from pk.sim.transaction_history import TransactionEnd, TransactionHistory
from pk.sim.transaction_samples import TransactionSamples
from pk.sim.transactions import (
    TIMEOUT_MS,
    TransactionClient,
    TransactionWorkload,
    read_transactions,
)
from pk.sim.workload import CANNOT_MOVE, OnTrouble, SimAdmin
from pk.sim.world import SimWorld
from pk.transactional_ids import TOPIC, partition_of_id
from pk.types import PartitionKey, TopicPartition
from pk.wire import pk_pb2 as wire
from pk.world import World

NODE = "admin/transactions"
#: The chores of the topics of transactions, of those that the run has.
CHORES = ("grow", "reassign", "reassign_back", "elect", "configure", "resize")
#: After the end of all faults, transactions end within the longest timeout and this time: a
#: coordinator replays its log, looks for timeouts, and sends markers; a leader asks again.
BOUND_MS = 30_000
STABLE_MS = max(TIMEOUT_MS) + BOUND_MS
#: Reads the rows of a table: (topic, topic id, partition) → table start, table end and rows.
TableOf = Callable[[str, str, int], tuple[int, int, list[ReadRow]] | None]


class TransactionAdmin(SimAdmin):
    """An administrator of the topics of transactions, who also moves coordinators."""

    state_topic_id: Callable[[], str]

    async def _move_coordinator(self, _plan: TopicPlan) -> None:
        """Give the partition of a coordinator other replicas, or another preferred leader."""
        topic_id, rng = self.state_topic_id(), self._rng
        if not topic_id:
            return
        partition = partition_of_id(rng.choice(self._options.transactional_ids))
        infos = {each.partition: each for each in (await self._info(TOPIC)).partitions}
        if partition not in infos:
            return
        replicas = list(infos[partition].replicas)
        brokers = [node.number for node in self._options.with_role(BROKER)]
        rng.shuffle(replicas)
        if rng.random() < 0.4:
            replicas = rng.sample(brokers, min(len(replicas), len(brokers)))
        request = wire.AlterReassignmentsRequest()
        request.reassignments.add(
            topic=TOPIC, topic_id=topic_id, partition=partition, replicas=replicas
        )
        await self._until_done(lambda: request, CANNOT_MOVE)
        await self._ask(wire.ElectLeadersRequest())


class TransactionRun:
    """The transactions of one run; `counts` takes what happened."""

    def __init__(
        self,
        world: SimWorld,
        cluster: SimCluster,
        observer: Observer,
        oracle: Oracle,
        counts: dict[str, int],
        trouble: OnTrouble,
        bounds_of: Callable[[str, int], tuple[int, int]],
    ) -> None:
        self._world = world
        self._cluster = cluster
        self._observer = observer
        self._counts = counts
        options: SimOptions = cluster.options
        self._known = Oracle(options.transaction_topics)  #: topic ids and numbers of partitions
        self._known.now_ms = oracle.now_ms
        self.samples = TransactionSamples(cluster, observer, oracle, counts)
        self.history = TransactionHistory(
            self._known.topics, oracle.lost_ms, self.samples.coordinator_key
        )
        self.shared = TransactionClient(
            cluster.bootstrap,
            self.history,
            oracle,
            options,
            trouble,
            world.record,
            self._count,
            self._enough,
        )
        chores = [name for name in CHORES if name in options.chores]
        own = replace(
            options,
            topics=options.transaction_topics,
            chores=("grow", "move_coordinator", *chores),
        )
        self.admin = TransactionAdmin(
            world.world_of(NODE),
            cluster.bootstrap,
            self._known,
            own,
            world.random(f"{NODE}/chores"),
            bounds_of,
            trouble,
        )
        self.admin.state_topic_id = lambda: self.samples.state_topic_id
        self.chores: Any = None
        self.workload: TransactionWorkload | None = None
        self.jobs: JobRuns | None = None
        if options.jobs or options.together_jobs:
            self.jobs = JobRuns(world, self.samples, self.shared, oracle, cluster)
        self._readers: list[ReadersCheck] = []
        #: where the last reader of each isolation ended; `True` = read_committed
        self._read_ends: dict[bool, StableEnds] = {}

    def _enough(self) -> bool:
        brokers = self._observer.image.brokers.values()
        wanted = min(REPLICATION_FACTOR, len(self._cluster.with_role(BROKER)))
        return sum(each.available for each in brokers) >= wanted

    def _count(self, name: str) -> None:
        self._counts[name] = self._counts.get(name, 0) + 1

    # -- phases ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the administrator."""
        self._world.record(f"transactions {self._cluster.options.transactions}: "
                           f"{self._cluster.options.transaction_topics}")  # fmt: skip
        if self.jobs is not None:
            self._world.record(f"jobs {self._cluster.options.jobs}")
            if self._cluster.options.together_jobs:
                self._world.record(f"jobs of log and table {self._cluster.options.together_jobs}")
        self.chores = self._world.spawn(NODE, self.admin.run())

    def start_client(self, world: World, life: int) -> None:
        """Start the producers and readers of one life of the client; call it in its node."""
        self.workload = TransactionWorkload(world, self.shared, life, self._world.random)
        self._readers += [reader.check for reader in self.workload.readers]
        self.workload.start()
        if self.jobs is not None:
            self.jobs.start_client(world, life)

    def rest(self) -> None:
        """Let the administrator and the producers end what they do, and begin nothing."""
        self.admin.resting = self.shared.stopping = True

    def unsettled(self) -> str:
        """Return what is not ended yet; '' = nothing."""
        if not self.chores.done():
            return "a chore of transactions goes on"
        plain = "" if self.workload is None else self.workload.unsettled()
        return plain or ("" if self.jobs is None else self.jobs.unsettled())

    def start_again(self) -> bool:
        """Check what the resolvers left, and start the queries of tables again; False: none."""
        return self.jobs is not None and self.jobs.start_again()

    # -- validation --------------------------------------------------------------------------------

    def ends(self, *, committed: bool) -> dict[TopicPartition, int]:
        """Return where readers of every partition end: at the LSO or at the high watermark.

        The LSO is lower only where the coordinator may have lost the decision (V22).
        """
        found = {}
        for topic, partition in self.history.partitions():
            sample = self._observer.latest.get(PartitionKey(topic.topic_id, partition))
            if sample is None:
                raise Violation(f"V19: {topic.name}-{partition} ({topic.topic_id}) is gone")
            end = sample.last_stable_offset if committed else sample.high_watermark
            found[TopicPartition(topic.name, partition)] = end
        return found

    async def read(self, world: World) -> tuple[Rows, Rows]:
        """Return all rows as read_committed and as read_uncommitted readers from 0 get them."""
        found: list[Rows] = []
        for name in ("last committed", "last uncommitted"):
            check = ReadersCheck(name, committed=name == "last committed")
            ends = self.ends(committed=check.committed)
            self._read_ends[check.committed] = dict(ends.items())
            await read_transactions(world, self.shared, check, ends)
            found.append(check.rows)
        return found[0], found[1]

    def judge(self, committed: Rows, uncommitted: Rows, table_of: TableOf) -> int:
        """Check everything that is known at the end; return the number of rows in tables."""
        self.samples.look()
        stable = self._read_ends[True]
        waiting = waiting_records(uncommitted, stable)
        if self.jobs is not None:
            self.jobs.judge(committed, waiting)
        plain = committed if self.jobs is None else self.jobs.without_jobs(committed)
        check_transactions(self.history, plain, waiting)
        check_superset(committed, uncommitted)
        for check in self._readers:
            last = committed if check.committed else uncommitted
            check.compare(self.history, last, self._read_ends[check.committed])
        self.samples.decisions.compare(self.history)
        tiered = 0
        for topic, partition in self.history.partitions():
            table = table_of(topic.name, topic.topic_id, partition)
            if table is None:
                continue
            start, end, rows = table
            tiered += len(rows)
            log = committed.get((topic.name, partition), ())
            if not self.history.may_be_cut(topic.name, partition):
                place = TopicPartition(topic.name, partition)
                check_transaction_table(str(place), start, end, rows, log, stable[place])
        return tiered

    def figures(self) -> dict[str, int]:
        """Return the counters of the history."""
        ends: list[TransactionEnd] = list(self.history.ends())
        named = {f"transactions {end.value}": ends.count(end) for end in TransactionEnd}
        chores = {f"chore {name} of transactions": n for name, n in self.admin.counts.items()}
        jobs = {} if self.jobs is None else self.jobs.figures()
        return {**named, **chores, **jobs}
