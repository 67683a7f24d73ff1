"""Files of a table that were never merged: what one more commit costs (bench/aged_table).

The owner of the table runs alone, in a process of its own without a server.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.growth.nodes import PATIENCE_S
from bench.growth.rows import Figures
from bench.runs import ROOT
from bench.sides import SideFailed

COMMITS = 100


def pk(files: int, folder: Path) -> Figures:
    """Measure 100 commits of one file each to a table of so many files."""
    command = [sys.executable, "-m", "bench.aged_table", "--files", str(files)]
    done = subprocess.run(
        [*command, "--commits", str(COMMITS)], cwd=ROOT, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False, env={**os.environ, "TMPDIR": str(folder)},
    )  # fmt: skip
    if done.returncode:
        raise SideFailed(done.stderr[-2000:])
    found = json.loads(done.stdout)
    empty_mb, filled_mb, end_mb = found["peak_mb"]
    return {
        "commit_cpu_s": found["mean_s"],
        "median_commit_cpu_s": found["median_s"],
        "most_commit_cpu_s": found["most_s"],
        "checkpoints": found["checkpoints"],
        "files_mb": filled_mb - empty_mb,
        "growth_mb": end_mb - empty_mb,
    }
