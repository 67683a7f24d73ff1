"""A short `make spark-exactly-once`: deaths in a task, and before and after a commit (X5 to X9)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"


@pytest.mark.spark
@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.timeout(900)
def test_deaths_at_each_step_of_a_batch_write_it_once(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    done = subprocess.run(
        [sys.executable, str(RUN), "--short", "--seed", "1", "--json", str(verdict)],
        capture_output=True, text=True, timeout=870, check=False,
    )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    found = json.loads(verdict.read_text())
    assert found["broken"] == [], told
    assert found["driver_deaths"] >= 2, told
    assert found["worker_deaths"] >= 1, told
    assert found["aborted_rows"] > 0, told
