"""The jobs of one run: their history, client, and the judgement at the end (transaction_run.py)."""

from __future__ import annotations

from collections.abc import Container

from pk.sim.job_checkers import check_decisions, check_jobs, without_jobs
from pk.sim.job_history import JobHistory
from pk.sim.job_tasks import JobClient
from pk.sim.jobs import JobWorkload
from pk.sim.oracle import Oracle, RecordId
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
    ) -> None:
        self._world = world
        self._samples = samples
        self._history = JobHistory(
            shared.history.topics, oracle.lost_ms, samples.coordinator_key, world.random
        )
        self._client = JobClient(shared, self._history)
        self._workload: JobWorkload | None = None

    def start_client(self, world: World, life: int) -> None:
        """Start the drivers of one life of the client; call it in its node."""
        self._workload = JobWorkload(world, self._client, life, self._world.random)
        self._workload.start()

    def unsettled(self) -> str:
        """Return what is not ended yet; '' = nothing."""
        return "" if self._workload is None else self._workload.unsettled()

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
        }
