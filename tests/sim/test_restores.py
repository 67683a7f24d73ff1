"""Restores from the tier in simulated worlds of several clusters (rule T13, sim/restore_run.py)."""

from __future__ import annotations

import pytest

from pk.sim.restore_run import RestoreRun

pytestmark = [
    pytest.mark.sim,
    # tasks of a killed node are unwound when its world ends, and may raise errors
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_no_offset_is_given_twice_and_histories_do_not_interleave() -> None:
    """V38 to V41: one broker lives, then nothing; both clusters create the same partition."""
    report = RestoreRun(2).execute()
    assert not report.violation, f"{report.violation}\n{report.line}"
    counts = report.counts
    assert (counts["restores"], counts["left of a cluster: one broker"]) == (2, 1)
    for name in ("partitions added", "restores that broke", "losses told", "rows in the table"):
        assert counts[name], name


def test_a_run_is_a_function_of_its_seed() -> None:
    one, two = (RestoreRun(8).execute() for _ in range(2))
    assert (one.digest, one.counts) == (two.digest, two.counts)
