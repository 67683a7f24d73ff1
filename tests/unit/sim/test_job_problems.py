"""Which errors of a job's driver are explained (V25)."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from pk import errors
from pk.sim.job_history import JobHistory
from pk.sim.job_tasks import JobClient
from pk.types import NONE

JOB = "job"


@pytest.mark.parametrize("deposed", [False, True])
def test_a_deposed_coordinator_explains_that_a_batch_is_not_open(deposed: bool) -> None:
    """It may answer from what it knows until it hears that another broker leads (rule X8)."""
    history = JobHistory(
        {}, lambda topic_id, partition: NONE, lambda job: ("id", 0), random.Random,
        lambda job: deposed,
    )  # fmt: skip
    history.begin_run(JOB, 0)
    troubles: list[str] = []
    shared: Any = SimpleNamespace(
        options=SimpleNamespace(together_job_ids=()),
        tell=lambda words: None,
        count=lambda name: None,
        trouble=troubles.append,
    )
    client = JobClient(shared, history)
    client.problem("driver", JOB, errors.InvalidTxnState("batch 1 is not open"))
    assert bool(troubles) is not deposed
    client.problem("driver", JOB, errors.InvalidRequest("named twice"))
    assert "named twice" in troubles[-1]
