"""A short `make spark-exactly-once`: deaths in a task, before and after a commit (X5 to X11)."""

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
@pytest.mark.parametrize("together", [False, True], ids=["sink", "together"])
def test_deaths_at_each_step_of_a_batch_write_it_once(tmp_path: Path, together: bool) -> None:
    verdict = tmp_path / "verdict.json"
    mode = ["--together"] if together else []
    done = subprocess.run(
        [sys.executable, str(RUN), *mode, "--short", "--seed", "1", "--json", str(verdict)],
        capture_output=True, text=True, timeout=870, check=False,
    )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    found = json.loads(verdict.read_text())
    assert found["broken"] == [], told
    assert found["driver_deaths"] >= 2, told
    assert found["worker_deaths"] >= 1, told
    assert found["aborted_rows"] > 0, told
    assert found["together_rows"] == (found["records"] if together else None), told
