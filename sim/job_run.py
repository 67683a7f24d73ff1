"""The jobs of one run: their history, client, and the judgement at the end (transaction_run.py)."""

from __future__ import annotations

from collections.abc import Container

from pk.sim.cluster import SimCluster
from pk.sim.job_checkers import check_decisions, check_jobs, without_jobs
from pk.sim.job_history import JobHistory
from pk.sim.job_tasks import JobClient
from pk.sim.jobs import JobWorkload
from pk.sim.machine import SimMachine
from pk.sim.oracle import Oracle, RecordId
from pk.sim.together_checkers import check_tables, check_visible
from pk.sim.together_jobs import DecidingLake, TogetherWorkload
from pk.sim.transaction_checkers import Rows
from pk.sim.transaction_samples import TransactionSamples
from pk.sim.transactions import TransactionClient
from pk.sim.world import SimWorld
from pk.world import World


class JobRuns:
    """The jobs of a run; the topics are those of its transactions."""

    def __init__(
        self,
        world: SimWorld,
        samples: TransactionSamples,
        shared: TransactionClient,
        oracle: Oracle,
        cluster: SimCluster,
    ) -> None:
        self._world = world
        self._samples = samples
        self._history = JobHistory(
            shared.history.topics, oracle.lost_ms, samples.coordinator_key, world.random,
            samples.deposed,
        )  # fmt: skip
        self._client = JobClient(shared, self._history)
        self._cluster, self._lake = cluster, cluster.lake
        cluster.listeners["prepared_batch_resolved"] = self._resolved
        self._options = shared.options
        most_ms = int(shared.options.server.get("prepared_max_ms", 0))
        self._tables = DecidingLake(cluster.lake, samples.evidence, most_ms)
        self._workload: JobWorkload | None = None
        self._table_workload: TogetherWorkload | None = None

    def start_client(self, world: World, life: int) -> None:
        """Start the drivers of one life of the client; call it in its node."""
        self._workload = JobWorkload(world, self._client, life, self._world.random)
        self._workload.start()
        self._table_workload = TogetherWorkload(
            world, self._client, life, self._world.random, self._tables
        )
        self._table_workload.start()

    def unsettled(self) -> str:
        """Return what is not ended yet; '' = nothing."""
        both = self._workload, self._table_workload
        return next((left for each in both if each is not None and (left := each.unsettled())), "")

    def start_again(self) -> bool:
        """Check what the resolvers decided alone (V34, V35); start the queries of tables again.

        Returns whether there are any.
        """
        if self._table_workload is None or not self._options.together_jobs:
            return False
        self._samples.look()
        self._samples.check_none_waits(self._options.together_job_ids)
        self._check_tables(complete=False)
        self._world.spawn("client", self._table_workload.begin_again())
        return True

    def _check_tables(self, *, complete: bool) -> None:
        names = self._options.together_job_ids
        decided = {name: self._samples.histories.known(name) for name in names}
        check_tables(self._history, names, self._lake.commits, decided, complete=complete)

    def without_jobs(self, rows: Rows) -> Rows:
        """Return the rows that no job has planned."""
        return without_jobs(self._history, rows)

    def judge(self, committed: Rows, waiting: Container[RecordId]) -> None:
        """Check everything that is known at the end.

        `waiting`: the records above the last stable offsets.
        """
        check_jobs(self._history, committed, waiting)
        self._samples.histories.compare(self._history)
        check_decisions(self._history, self._samples.decisions)
        if self._options.together_jobs:
            self._check_tables(complete=True)
            visible = frozenset(row.id for rows in committed.values() for row in rows)
            names, commits = self._options.together_job_ids, self._lake.commits
            check_visible(self._history, names, commits, visible, waiting)

    def figures(self) -> dict[str, int]:
        """Return the counters of the history."""
        batches = list(self._history.batches())
        return {
            "batches planned": len(batches),
            "batches without rows": sum(not any(each.tasks) for each in batches),
            "batches executed again": sum(
                len({attempt.run for attempt in each.attempts}) > 1 for each in batches
            ),
            "attempts joined": sum(len(each.attempts) for each in batches),
            **self._table_figures(),
        }

    def _resolved(self, _: SimMachine, facts: dict[str, object]) -> None:
        self._client.shared.count(f"resolved by {facts['by']}s")

    def _table_figures(self) -> dict[str, int]:
        if not self._options.together_jobs:
            return {}
        ended = self._samples.evidence.ended_by
        return {
            **self._lake.counts,
            "batches in the lake": len(self._lake.commits),
            "prepared batches committed": ended[True],
            "prepared batches aborted": ended[False],
            "unresolved batches": self._cluster.events.get("batch_unresolved", 0),
        }
