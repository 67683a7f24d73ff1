"""The pages made from tables are the tables (`make docs`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GENERATE = Path(__file__).resolve().parents[3] / "docs" / "generate.py"


def test_settings_and_errors_pages_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(GENERATE), "--check"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
