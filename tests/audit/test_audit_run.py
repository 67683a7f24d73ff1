"""A short run of `make audit`: maintained tables under kills (C2 to C6, T2, T3, T5, T16)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"
KILLED = ("tier", "broker", "compaction", "optimize", "snapshot", "sweep")


@pytest.mark.spark
@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.timeout(900)
def test_killed_jobs_leave_each_committed_record_once(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    done = subprocess.run(
        [sys.executable, str(RUN), "--short", "--json", str(verdict), "--dir", str(tmp_path / "a")],
        capture_output=True, text=True, timeout=870, check=False,
    )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    found = json.loads(verdict.read_text())
    assert found["broken"] == []
    assert all(found["kills"][name] == 2 for name in KILLED), told
    assert found["aborted"] > 0, told
    assert found["uploads_left"] > 0, told
