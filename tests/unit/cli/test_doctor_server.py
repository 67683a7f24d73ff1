"""`pk doctor server`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pk import limits
from pk.cli import doctor_server
from pk.cli.doctor_server import look_at_descriptors, look_at_memory


@pytest.mark.parametrize(
    ("hard", "verdict"), [(100, "too little"), (4096, "warning"), (1 << 20, "ok"), (-1, "ok")]
)
def test_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch, hard: int, verdict: str) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (hard, hard))
    found = look_at_descriptors()
    assert found.verdict == verdict
    assert bool(found.advice) == (verdict != "ok")
    if hard == 4096:
        assert found.found == "4096: 2252 partitions keep their file open, 477 connections"


def test_a_small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_server, "memory_bytes", lambda: 512 * limits.MIB)
    found = look_at_memory()
    assert found.verdict == "warning"
    assert found.found == "512 MiB: partitions_max is 5461 unless it is set"


def test_too_few_descriptors_are_an_error_of_the_command() -> None:
    command = f"ulimit -n 100 && exec {sys.executable} -m pk.cli doctor server --json"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1, ended.stderr
    assert json.loads(ended.stdout)[0]["verdict"] == "too little"
