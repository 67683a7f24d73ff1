"""A short run of `make eos`: exactly once under kills of brokers and of the client (X1, X3, X6)."""

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
def test_a_copy_in_transactions_is_exact(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    done = subprocess.run(
        [sys.executable, str(RUN), "--short", "--json", str(verdict), "--dir", str(tmp_path / "c")],
        capture_output=True, text=True, timeout=570, check=False,
    )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    found = json.loads(verdict.read_text())
    assert found["broken"] == []
    assert found["transactions"] >= 16, told
    assert found["broker_kills"] == 3, told
    assert found["copier_kills"] >= 1, told
