"""A measured client process: windows, costs, failures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench import processes, runs, values

BUSY = """
import json, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
print("noise", flush=True)
burn(0.06)
print("open {}", flush=True)
time.sleep(0.01)
burn(0.1)
print("close", json.dumps({"value": 5.0, "records": 1000000, "p99_ms": 3.0}), flush=True)
"""


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


@pytest.mark.slow
def test_the_window_counts_its_own_cpu_only() -> None:
    sample = runs.watch(_python(BUSY), runs.read_line, [os.getpid()])
    assert (sample.value, sample.records, sample.figures) == (5.0, 1_000_000, {"p99_ms": 3.0})
    assert sample.client_cpu_s >= 0.08  # ticks are 10 ms
    assert sample.client_peak_mb > 1
    assert sample.server_peak_mb > 1


def test_a_clients_peak_is_its_own_and_not_that_of_who_started_it() -> None:
    """`ru_maxrss` begins with the value of the parent at the fork."""
    ballast = bytearray(b"x") * (150 << 20)
    sample = runs.watch(_python(BUSY), runs.read_line, [])
    assert len(ballast) == 150 << 20
    assert 5 < sample.client_peak_mb < 100


def test_a_failing_client_shows_its_last_words() -> None:
    with pytest.raises(runs.RunFailed, match=r"(?s)exited with 3.*hello.*oh no"):
        runs.watch(
            _python("import sys; print('hello'); sys.stderr.write('oh no'); sys.exit(3)"),
            runs.read_line,
            [],
        )


def test_a_client_without_a_result_failed() -> None:
    with pytest.raises(runs.RunFailed, match="exited with 0"):
        runs.watch(_python("print('open {}')"), runs.read_line, [])


def test_a_silent_client_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SILENCE_S", 0.05)
    with pytest.raises(runs.RunFailed, match="printed nothing"):
        runs.watch(_python("import time; time.sleep(60)"), runs.read_line, [])


def test_descendants_are_found_and_the_gone_cost_nothing() -> None:
    assert processes.children(os.getpid())[0] == os.getpid()
    assert processes.cpu_s([2**22 + 1]) == 0
    assert processes.peak_rss_mb([2**22 + 1]) == 0
    assert processes.cpu_s([os.getpid()]) > 0


def test_values_are_distinct_lines_of_100_bytes(tmp_path: Path) -> None:
    made = values.make(500)
    assert {len(value) for value in made} == {values.VALUE_BYTES}
    assert len(set(made)) == 500
    values.write(tmp_path / "values", made)
    assert values.read(tmp_path / "values") == made
