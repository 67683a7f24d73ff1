"""What a campaign of many seeds keeps, skips and prints."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest

from pk.errors import CorruptBatch
from pk.sim import long
from pk.sim.campaign import Run, RunResult
from pk.sim.long import MET, CampaignProgress, main, rare_collections, verdict
from pk.sim.options import drawn
from pk.sim.world import SimWorld

MINUTE_MS = 60_000


def row(seed: int, verdict: str = "ok") -> dict[str, Any]:
    return {
        "seed": seed, "verdict": verdict, "events": 20_000, "virtual_ms": 1, "acknowledged": 2_000,
        "cpu_s": 2.0, "counters": dict.fromkeys(MET, 1),
    }  # fmt: skip


class Campaign:
    """`main` with seeds that take a minute each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.ran: list[int] = []
        self.bad: set[int] = set()
        self.now_ms = 0
        self.tested = "one"
        self.results = tmp_path / "results.jsonl"
        self.summary = tmp_path / "summary.md"
        monkeypatch.setattr(long, "finished", self._finished)
        monkeypatch.setattr(long, "tested", lambda *_: self.tested)
        monkeypatch.setattr(long, "commit", lambda: f"commit{len(self.ran)}")

    def _finished(self, _jobs: int, seeds: list[int], _given: object) -> Iterator[dict[str, Any]]:
        for seed in seeds:
            self.ran.append(seed)
            self.now_ms += MINUTE_MS
            yield row(seed, "V6: lost" if seed in self.bad else "ok")

    def run(self, seeds: int, *more: str) -> int:
        arguments = ["--seeds", str(seeds), "--fault-ms", "7", "--results", str(self.results)]
        return main([*arguments, *more], lambda: self.now_ms)


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Campaign:
    return Campaign(monkeypatch, tmp_path)


def test_a_commit_that_changes_nothing_that_is_tested_runs_no_seed_again(
    campaign: Campaign,
) -> None:
    assert campaign.run(2) == 0
    assert campaign.run(3) == 0
    assert campaign.ran == [1, 2, 3]
    rows = [json.loads(line) for line in campaign.results.read_text().splitlines()]
    assert [each["commit"] for each in rows] == ["commit0", "commit0", "commit2"]
    campaign.tested = "another"
    campaign.run(1)
    assert campaign.ran == [1, 2, 3, 1]


def test_the_summary_says_what_was_tested_and_how_it_ended(campaign: Campaign) -> None:
    """The rows stay out of the repository: the page must name sources, seeds, verdict, counters."""
    assert campaign.run(2) == 0
    assert not campaign.summary.exists()  # only where it is asked for
    assert campaign.run(3, "--summary", str(campaign.summary)) == 0
    page = campaign.summary.read_text()
    assert page.startswith("# ")
    assert "| sources, by content | `one` |" in page
    assert "| commit | commit0, commit2 |" in page
    assert "| seeds | 3, from 1 to 3 |" in page
    assert "| verdict | **ok** |" in page
    assert "| ISR expand | 3 |" in page
    assert "## Failures" not in page


def test_the_summary_names_the_seeds_that_failed(campaign: Campaign) -> None:
    campaign.bad = {2}
    assert campaign.run(2, "--summary", str(campaign.summary)) == 1
    page = campaign.summary.read_text()
    assert "| verdict | **FAILED** |" in page
    assert "- seed 2: V6: lost" in page


def test_rows_of_another_simulator_count_and_are_told_of(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign.run(2)
    assert "another version" not in capsys.readouterr().out
    monkeypatch.setattr(long, "simulator", lambda _: "newer")
    assert campaign.run(3) == 0
    assert "2 seeds were judged by another version of the simulator" in capsys.readouterr().out


def test_a_seed_that_another_simulator_failed_is_run_again(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    campaign.bad = {2}
    assert campaign.run(2) == 1
    assert campaign.run(2) == 1
    assert campaign.ran == [1, 2], "the same one would say the same"
    campaign.bad = set()
    monkeypatch.setattr(long, "simulator", lambda _: "newer")
    assert campaign.run(2) == 0
    assert campaign.ran == [1, 2, 2]


def test_a_seed_that_fails_says_at_once_how_it_is_replayed(
    campaign: Campaign, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign.bad = {1}
    assert campaign.run(2) == 1
    said = capsys.readouterr().out.splitlines()
    at = said.index("V6: lost")
    assert said[at + 1] == "replay: python -m pk.sim 1 --fault-ms 7 --acknowledged-min 2000"
    assert said[at + 2].startswith("1 of 2 seeds, 1 failed"), "before the next seed"
    assert campaign.run(2) == 1
    assert said[at + 1] in capsys.readouterr().out, "a campaign that goes on has not forgotten it"


def test_where_nobody_watches_a_line_a_minute_says_how_far_it_is(
    campaign: Campaign, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign.run(3)
    said = [line for line in capsys.readouterr().out.splitlines() if " of 3 seeds" in line]
    assert [line.partition(" of ")[0] for line in said] == ["1", "2", "3"]
    assert said[-1].startswith("3 of 3 seeds, 0 failed, 2.0 CPU s a seed, 10000 events per CPU s")


def test_rows_come_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pools: list[ThreadPoolExecutor] = []

    def processes(jobs: int) -> ThreadPoolExecutor:
        pools.append(ThreadPoolExecutor(jobs))
        return pools[-1]

    monkeypatch.setattr(long, "processes", processes)
    monkeypatch.setattr(long, "SEEDS_PER_PROCESS", 2)
    monkeypatch.setattr(long, "run_seed", lambda seed, given: (seed, given))
    found = list(long.finished(2, range(9), {"fault_ms": 7}))
    assert sorted(found) == [(seed, {"fault_ms": 7}) for seed in range(9)]
    assert len(pools) == 3, "no process runs more than its share"


def test_the_end_is_where_the_seeds_that_ran_point_to() -> None:
    now_ms = 0
    standing = CampaignProgress(seeds=10, known=4, failed=0, now_ms=lambda: now_ms)
    assert standing.line == "4 of 10 seeds, 0 failed"
    now_ms = 30 * MINUTE_MS  # 2 seeds in half an hour: 4 more take an hour
    standing.add(row(5))
    standing.add(row(6, "V1: two leaders"))
    assert "6 of 10 seeds, 1 failed" in standing.line
    assert standing.line.endswith(f"ends {datetime.fromtimestamp(90 * 60):%H:%M}")
    assert standing.due()
    assert not standing.due(), "once a minute"


def test_collections_are_rare_in_a_run_and_as_before_after_it() -> None:
    before = gc.get_threshold()
    with rare_collections():
        assert gc.get_threshold()[0] == long.GC_YOUNG
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_a_seed_that_acknowledged_too_little_fails_the_campaign() -> None:
    """A history with almost no acknowledged records shows almost nothing."""
    asked = {"acknowledged_min": 2}
    assert verdict([row(1) | {"acknowledged": 2} | asked])[1] == []
    (why,) = verdict([row(1) | asked, row(2) | {"acknowledged": 1} | asked])[1]
    assert why == "seed 2: only 1 were acknowledged"


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels do not tell of a parent's death")
def test_a_killed_campaign_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pk.sim.long", "--seeds", "4", "--jobs", "1"]
    results = ["--results", str(tmp_path / "rows")]
    with subprocess.Popen([*command, *results], stdout=subprocess.DEVNULL) as campaign:
        parent = psutil.Process(campaign.pid)
        workers: list[psutil.Process] = []
        deadline = monotonic() + 60
        while not any("spawn_main" in str(each.cmdline()) for each in workers):
            assert monotonic() < deadline, "no worker began"
            sleep(0.05)
            workers = parent.children(recursive=True)
        campaign.kill()
    assert not psutil.wait_procs(workers, timeout=60)[1]


def test_a_run_that_raises_is_a_failed_seed_of_a_campaign_that_goes_on() -> None:
    class Raises(Run):
        def execute(self) -> RunResult:
            raise CorruptBatch("at 2682")

    result = long.result_of(Raises(3, drawn(SimWorld(3).random("options"))))
    assert result.violation == "raised CorruptBatch: at 2682"
    assert result.seed == 3
    assert not result.acknowledged
