"""The cluster's soak for a few seconds: it measures what it should, whatever the machine does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import alarms

RUN = Path(__file__).parent / "cluster_run.py"


@pytest.mark.integration
@pytest.mark.alone
def test_a_short_soak_reports_everything(tmp_path: Path) -> None:
    verdict = tmp_path / "verdict.json"
    command = [sys.executable, str(RUN), "--minutes", "0.03", "--rate", "20000"]
    done = subprocess.run(
        [*command, "--json", str(verdict), "--dir", str(tmp_path / "nodes")],
        capture_output=True, text=True, timeout=270, check=False,
    )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}"
    assert verdict.exists(), told
    found = json.loads(verdict.read_text())
    assert found["violations"] == [], told
    consumer, loads = found["children"]["consumer"], ("load 0", "load 1")
    sent = sum(found["children"][load]["records"] for load in loads)
    assert consumer["records"] + consumer["lost_to_retention"] >= sent > 0, told
    assert found["children"]["probe"]["records"] > 0, told
    assert found["samples"]["node 1 broker"]
    broken = [each["what"] for each in found["verdicts"] if each["kept"] is False]
    assert set(alarms.KINDS) <= {each["what"] for each in found["verdicts"]}
    seen = {k for each in found["counts"].values() for k, count in each.items() if count}
    assert set(broken) & set(alarms.KINDS) == seen
    assert done.returncode == int(bool(broken)), told
