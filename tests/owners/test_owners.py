"""A short run of `make owners`: owners of one table under retention and a job (T2, T12, T16)."""

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
@pytest.mark.timeout(600)
def test_a_table_of_several_owners_is_optimized_under_retention(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    done = subprocess.run(
        [sys.executable, str(RUN), "--short", "--json", str(verdict), "--dir", str(tmp_path / "o")],
        capture_output=True, text=True, timeout=570, check=False,
    )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    found = json.loads(verdict.read_text())
    assert found["broken"] == []
    assert found["files"] >= 300, told
    assert found["removed"] > 0, told
    assert found["files_after"] < found["files"], told
