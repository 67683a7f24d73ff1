"""Tasks of a batch in a cluster of several production brokers (rules X4 to X9)."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.client.options import producer_options
from pk.client.participant import BatchCalls, BatchOfRun, ParticipantEngine
from pk.client.produce_engine import ProduceEngine
from tests.kit.cluster import Kit

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

BATCH = BatchOfRun("job", "q", "r1", 0)
S = 1_000


class Task:
    """One attempt of a task, and the driver's calls, on a host of its own."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        options, _ = producer_options({"transactional_id": BATCH.job, "linger_ms": 0})
        world = kit.sim.world_of("task")

        async def build() -> None:
            cluster = kit.cluster("task")
            engine = ProduceEngine(world, cluster, options)
            self.participant = ParticipantEngine(world, cluster, engine, options, BATCH)
            self.driver = BatchCalls(world, cluster, BATCH, 5 * S)

        self.do(build())

    def do(self, work: Any) -> Any:
        return self.kit.done("task", work)


def test_a_task_hears_at_its_finish_that_its_batch_was_aborted(make: Any) -> None:
    kit: Kit = make(1)
    kit.create("t", 1)
    task = Task(kit)
    task.do(task.participant.join(["t"], 20 * S))
    assert not task.do(task.driver.abort(20 * S))
    with pytest.raises(errors.TransactionAborted, match="its batch was ended"):
        task.do(task.participant.finish(20 * S))


def test_a_task_of_an_open_batch_finishes(make: Any) -> None:
    kit: Kit = make(1)
    kit.create("t", 1)
    task = Task(kit)
    task.do(task.participant.join(["t"], 20 * S))
    task.do(task.participant.finish(20 * S))
