"""A short run of `make jepsen`: transactions under kills, pauses and cut links (X1, X3, X6)."""

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
def test_transactions_under_faults_have_no_anomaly(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    done = subprocess.run(
        [
            sys.executable, str(RUN), "--short", "--seconds", "15", "--rounds", "1",
            "--json", str(verdict), "--dir", str(tmp_path / "rounds"),
        ],
        capture_output=True, text=True, timeout=570, check=False,
    )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    (found,) = json.loads(verdict.read_text())
    assert found["valid"], told
    assert found["transactions committed"] >= 5, told
    assert found["transactions aborted"] >= 5, told
    assert found["records polled"] > found["records sent"] > 50, told
    assert found["copies of a group"] >= 3, told
    assert found["commits of a group"] >= 3, told
    assert found["faults"] >= 2, told
