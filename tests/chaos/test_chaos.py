"""Five rounds of kill -9, one of each victim, judged by the ledger (rules L1, L4, T3)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"


@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.timeout(600)
def test_five_rounds_lose_and_double_nothing(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    done = subprocess.run(
        [sys.executable, str(RUN), "--rounds", "5", "--json", str(verdict), "--dir", str(tmp_path)],
        capture_output=True, text=True, timeout=570, check=False,
    )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    found = json.loads(verdict.read_text())
    assert found["violations"] == []
    assert found["rounds"] == 5
    assert found["records"]["acknowledged"] > 1000, told
    assert found["log_end"] >= found["records"]["acknowledged"]
