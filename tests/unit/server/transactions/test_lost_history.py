"""What a restored cluster does not know of batches (rules X9, T13)."""

from __future__ import annotations

from pk import errors, generations
from tests.unit.server.transactions.test_participants import WRITTEN, JobBench, refused


def test_a_batch_that_the_lost_cluster_may_have_committed_is_refused() -> None:
    """T13: the history of batches is lost with the cluster; only batch 0 begins a new query."""
    bench = JobBench()
    bench.leader_epoch = generations.EPOCHS
    words = refused(bench, lambda: bench.join(7), errors.ReplayDiffers)
    assert "restored from its tier" in words
    assert "onLostHistory=write" in words
    pair = bench.join(7, write_unknown=True)
    bench.join(7)
    bench.commit(7, pair, sums=WRITTEN)
    assert bench.marked()
    bench.committed(8)
    for more in ({"batch": 0}, {"batch": 7, "batch_write": True}):
        other = JobBench()
        other.leader_epoch = generations.EPOCHS
        other.join(**more)
    JobBench().join(7)
