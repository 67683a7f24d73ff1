"""The golden traces of tests/data/transactions (see transaction_trace.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.server.raft.raft_trace import rewritten
from tests.unit.server.transactions.transaction_trace import Trace

TRACES = sorted((Path(__file__).parents[3] / "data" / "transactions").glob("*.txt"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_the_coordinator_answers_as_the_trace_says(
    path: Path, request: pytest.FixtureRequest
) -> None:
    text = rewritten(path.read_text(), Trace())
    if request.config.getoption("--rewrite"):
        path.write_text(text)
    assert text == path.read_text()


def test_there_are_traces() -> None:
    assert len(TRACES) >= 4
