"""Three nodes, four faults, judged by the ledger and by the replicas' bytes (rules R1-R7, L1)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "cluster_run.py"


@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_cluster_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    done = subprocess.run(
        [sys.executable, str(RUN), "--short", "--json", str(verdict), "--dir", str(tmp_path / "c")],
        capture_output=True, text=True, timeout=570, check=False,
    )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    found = json.loads(verdict.read_text())
    assert found["violations"] == []
    assert found["rounds"] == 4
    assert found["records"]["acknowledged"] > 1000, told
    assert found["log_end"] >= found["records"]["acknowledged"]
