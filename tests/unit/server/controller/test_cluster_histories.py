"""Histories of a cluster under constant change (cluster_model.py), with decisions of few changes.

`PK_CLUSTER_SEEDS=1000` runs more histories.
"""

from __future__ import annotations

import os

import pytest

from pk.server.controller.batched_decision import BatchedDecision
from pk.server.controller.machine import Controller
from tests.unit.server.controller.cluster_model import Model
from tests.unit.server.controller.controller_bench import snapshot

SEEDS = int(os.environ.get("PK_CLUSTER_SEEDS", "40"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_committed_is_lost_and_everything_heals(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decision that changes more than one or two partitions is made in several steps
    (batched_decision.py).
    """
    monkeypatch.setattr(BatchedDecision.__init__, "__defaults__", (1 + seed % 3,))
    model = Model(seed)
    for _ in range(400):
        model.step()
    model.heal()
    replayed = Controller(model.bench.rules)
    for offset, record in enumerate(model.bench.log):
        replayed.apply(offset, record)
    assert snapshot(replayed.image) == snapshot(model.image)
