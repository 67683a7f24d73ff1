"""Schedules on real processes: a node's own runner with real Spark, and what needs no Spark."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pk import AdminClient, Producer
from pk.cli import app
from pk.cli.embedded import EmbeddedServer
from pk.client.maintenance_lease import MaintenanceLease
from pk.clock import block_s, monotonic_s
from pk.schedules import DONE, FAILED

pytestmark = [pytest.mark.integration, pytest.mark.long]

HOUR = 3_600_000

#: `pk maintenance …` in this process: exit code and output
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def pk(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(server: EmbeddedServer, *arguments: str) -> tuple[int, str]:
        code = app.run(["maintenance", *arguments, "--bootstrap", server.address])
        return code, capsys.readouterr().out

    return run


def wait(server: EmbeddedServer, what: str, holds: Callable[[], Any]) -> None:
    deadline = monotonic_s() + 120
    while not holds():
        assert monotonic_s() < deadline, f"{what}\n{server.tail()}"
        block_s(0.1)


def filled(server: EmbeddedServer, topic: str, files: int) -> None:
    """Create a topic whose table has this many small files."""
    with AdminClient(server.address) as admin, Producer(server.address) as producer:
        configs = {"tier_max_lag_ms": 100, "tier_small_file_bytes": 0, "local_drop_delay_ms": 0}
        admin.create_topic(topic, 1, configs)
        for number in range(files):
            producer.send(topic, value=b"%d" % number).result(30)
            wait(server, "tiered", lambda: admin.describe_tier(topic).partitions[0].lag == 0)


@pytest.mark.spark
def test_a_nodes_runner_runs_a_schedule_and_stops(tmp_path: Path, pk: Command) -> None:
    (tmp_path / "tier").mkdir()
    settings = {"maintenance.runner": True, "maintenance.master": "local[1]"}
    tier = (tmp_path / "tier").as_uri()
    with EmbeddedServer(tmp_path, tier_url=tier, settings=settings) as server:
        filled(server, "small", 4)
        assert pk(server, "schedule", "set", "small", "optimize", "--every", "1h")[0] == 0
        with AdminClient(server.address) as admin:
            wait(server, "the runner ran", lambda: admin.list_schedules("small").entries[0].last)
            (entry,) = admin.list_schedules("small").entries
        assert entry.last is not None
        assert entry.last.outcome == DONE
        assert "4 files before, 1 after" in entry.last.detail
        code, out = pk(server, "list", "--json")
        (row,) = json.loads(out)["schedules"]
        assert (code, row["next_ms"]) == (0, row["last"]["started_ms"] + HOUR)
        assert pk(server, "run", "--due") == (0, "nothing is due\n")

        runner = psutil.Process(int((server.data / "run" / "maintenance.pid").read_text()))
        everyone = [runner, *runner.children(recursive=True)]
        assert any("java" in each.name() for each in everyone)
        runner.terminate()
        wait(server, "a clean end", lambda: 'role=maintenance how="exit code 0"' in server.tail())
        _, alive = psutil.wait_procs(everyone, timeout=30)
        assert not alive, alive
        assert server.stop() == 0


def test_bad_input_and_a_machine_without_java(
    tmp_path: Path, pk: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EmbeddedServer(tmp_path / "node") as server, AdminClient(server.address) as admin:
        admin.create_topic("t", 1)
        for bad in (
            ("schedule", "set", "t", "polish", "--every", "1h"),
            ("schedule", "set", "none", "audit", "--every", "1h"),
            ("schedule", "set", "t", "audit", "--every", "9s"),
            ("schedule", "set", "t", "audit", "--every", "often"),
            ("schedule", "set", "t", "audit", "--cron", "0 25 * * *"),
            ("schedule", "set", "t", "audit", "--cron", "* * * * *", "--every", "1h"),
            ("schedule", "set", "t", "audit"),
            ("schedule", "delete", "t", "audit"),
            ("list", "none"),
            ("run", "audit", "t", "--due"),
            ("run", "audit", "t", "--every", "1s"),
            ("run", "audit"),
        ):
            code, out = pk(server, *bad, "--json")
            assert (code, bool(json.loads(out)["error"]["message"])) == (2, True), bad
        assert pk(server, "schedule", "set", "t", "audit", "--cron", "0 3 * * *")[0] == 0
        code, out = pk(server, "schedule", "set", "t", "audit", "--every", "1h")
        assert (code, "(before: cron 0 3 * * *)" in out) == (0, True)

        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
        code, out = pk(server, "run", "--due", "--json")
        assert (code, json.loads(out)["error"]["name"]) == (2, "JavaMissing")
        (entry,) = admin.list_schedules("t").entries
        assert entry.last is not None
        assert (entry.last.outcome, entry.last.failures) == (FAILED, 1)
        assert "JavaMissing" in pk(server, "list")[1]
        assert pk(server, "schedule", "delete", "t", "audit")[0] == 0
        assert "none" in pk(server, "schedule", "list", "t")[1]


def test_a_sweep_removes_an_upload_that_no_version_names(tmp_path: Path, pk: Command) -> None:
    (tmp_path / "tier").mkdir()
    with EmbeddedServer(tmp_path / "node", tier_url=(tmp_path / "tier").as_uri()) as server:
        filled(server, "t", 2)
        files = sorted((tmp_path / "tier").glob("t/*/partition=0/*.parquet"))
        left = files[0].with_name(files[0].name.replace("-e0-", "-e0-dead"))
        left.write_bytes(files[0].read_bytes())
        assert left not in files
        for each in (*files, left):
            stat = each.stat()
            os.utime(each, (stat.st_atime - 7_000, stat.st_mtime - 7_000))  # almost two hours
        assert pk(server, "run", "sweep", "t", "--older-than", "59m")[0] == 2
        code, out = pk(server, "run", "sweep", "t", "--json")
        assert (code, json.loads(out)["removed_files"], left.exists()) == (0, 0, True)
        code, out = pk(server, "run", "sweep", "t", "--older-than", "1h", "--json")
        assert (code, json.loads(out)["removed_files"], left.exists()) == (0, 1, False)
        assert all(each.exists() for each in files)
        with AdminClient(server.address) as admin:
            (entry,) = admin.list_schedules("t").entries
            assert entry.last is not None
            assert entry.last.detail.startswith("version ")
            with MaintenanceLease(server.address, "t", "another job"):
                assert pk(server, "run", "sweep", "t")[0] == 3


def test_retention_and_vacuum_now(tmp_path: Path, pk: Command) -> None:
    """Their intervals are a day here."""
    (tmp_path / "tier").mkdir()
    day = 86_400_000
    settings = {"log_retention_check_interval_ms": day, "tier_vacuum_interval_ms": day}
    settings |= {"tier_vacuum_retention_ms": 0}
    tier = (tmp_path / "tier").as_uri()
    with EmbeddedServer(tmp_path / "node", tier_url=tier, settings=settings) as server:
        filled(server, "t", 3)
        files = set((tmp_path / "tier").glob("t/*/partition=0/*.parquet"))
        with AdminClient(server.address) as admin:
            admin.create_topic("local", 1, {"tier_enable": False})
            admin.alter_configs("t", {"retention_ms": 1})
        assert pk(server, "run", "vacuum", "local", "--json")[0] == 2
        code, out = pk(server, "run", "retention", "t", "--json")
        found = json.loads(out)
        assert (code, found["settled"], found["starts"]) == (0, True, {"0": 3}), found
        code, out = pk(server, "run", "vacuum", "t", "--json")
        assert (code, json.loads(out)["deleted_files"] > 0) == (0, True), out
        assert set((tmp_path / "tier").glob("t/*/partition=0/*.parquet")) < files
