"""A short run of `make groups`: consumer groups under kills of members and brokers (X2, X12)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "run.py"


@pytest.mark.chaos
@pytest.mark.long
@pytest.mark.timeout(900)
def test_groups_skip_nothing_and_copy_exactly_once(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    done = subprocess.run(
        [sys.executable, str(RUN), "--short", "--json", str(verdict), "--dir", str(tmp_path / "g")],
        capture_output=True, text=True, timeout=870, check=False,
    )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    found = json.loads(verdict.read_text())
    assert found["broken"] == []
    assert found["members_stopped"] + found["members_killed"] == 10, told
    assert (found["nodes_killed"], found["coordinators_killed"]) == (3, 2), told
