"""Parsing of a metrics endpoint's text and of /proc."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import measuring

TEXT = """# HELP pk_loop_lag_ms how late
# TYPE pk_loop_lag_ms histogram
pk_loop_lag_ms_bucket{le="0.5"} 3.0
pk_loop_lag_ms_bucket{le="+Inf"} 4.0
pk_loop_lag_ms_bucket{role="controller",le="0.5"} 7.0
pk_isr_changes_total{kind="shrunk"} 1.0
pk_isr_changes_total{kind="grown"} 2.0
pk_isr_changes_total_of_another 5.0
pk_age_ms_bucket{le="1000.0"} 2.0
pk_age_ms_bucket{le="+Inf"} 2.0
pk_tier_lag 12.0
"""


def test_a_text_of_metrics_is_read() -> None:
    told = measuring.parsed(TEXT)
    assert told.lag == {"broker": {0.5: 3.0, math.inf: 4.0}, "controller": {0.5: 7.0}}
    assert told.value("pk_isr_changes_total") == 3.0
    assert told.value("pk_tier_lag") == 12.0
    assert told.value("pk_nothing") == 0.0
    assert told.buckets("pk_age_ms") == {1000.0: 2.0, math.inf: 2.0}
    assert told.buckets("pk_nothing") == {}


def test_a_process_and_a_folder_are_measured(tmp_path: Path) -> None:
    pids = {"me": os.getpid()}
    found = measuring.sample(os.getpid(), 1.0, measuring.descriptors_of(pids, looks=1)["me"])
    assert found.rss_anon_bytes > 0
    assert found.descriptors > 0
    assert found.threads > 0
    (tmp_path / "file").write_bytes(b"x" * 10_000)
    assert measuring.disk_bytes(tmp_path) >= 10_000
    assert measuring.disk_bytes(tmp_path / "nothing") == 0
    assert measuring.pressure("nothing", "some") == 0
