"""Nodes that the tests fork from a loaded process are as those that are executed (node_starts.py).

`tests/integration/test_supervisor.py`, test_deploy.py, test_cluster.py, test_embedded.py,
test_monitoring.py and tests/chaos execute their nodes.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from node_starts import STARTS, Started, completed, launch

from pk.cli.app import run
from pk.cli.embedded import EmbeddedServer, pk_command

pytestmark = pytest.mark.integration


def started(server: EmbeddedServer) -> Any:
    return server._process


def test_a_forked_node_is_a_child_of_the_test(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server:
        assert isinstance(started(server), Started), STARTS.why
        found = server.pids()
        assert set(found) == {"supervisor", "controller", "broker"}
        supervisor = psutil.Process(found["supervisor"])
        assert supervisor.ppid() == os.getpid()
        shown = [each for each in supervisor.cmdline() if each]
        assert shown == [*pk_command("server", "start", "--json", "--config"), str(server.config)]
        assert os.getsid(supervisor.pid) == supervisor.pid
        loaded = psutil.Process(STARTS.loaded().process.pid)
        assert supervisor.pid not in {each.pid for each in loaded.children(recursive=True)}
        links = [Path(f"/proc/{supervisor.pid}/fd/{number}") for number in range(3)]
        assert os.readlink(links[0]) == os.devnull
        assert os.readlink(links[2]) == str(server.log)
        supervisor.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
        server.wait_gone(found)
        server.start()
        assert server.kill(), "and its processes are gone"


def test_a_command_has_its_code_and_output(tmp_path: Path) -> None:
    done = completed(pk_command("version"), 60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "pyarrow" in done.stdout
    refused = completed(pk_command("log", "dump", str(tmp_path / "none"), "--json"), 60)
    assert refused.returncode == 1
    assert json.loads(refused.stdout)["error"]["acts"] == "user"


def test_what_a_fork_would_change_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    same = launch(pk_command("version"), **quiet)
    preloaded = launch(pk_command("version"), env={**os.environ, "LD_BIND_NOW": "1"}, **quiet)
    other = launch(["true"], **quiet)
    monkeypatch.setattr(STARTS, "executed", True)
    asked = launch(pk_command("version"), **quiet)
    assert [each.wait(60) for each in (same, preloaded, other, asked)] == [0] * 4
    kinds = [type(each) for each in (same, preloaded, other, asked)]
    assert kinds == [Started, subprocess.Popen, subprocess.Popen, subprocess.Popen]


def test_a_command_within_this_process_changes_no_start() -> None:
    """A variable that the command left behind would execute each later node of this process."""
    STARTS.loaded()
    assert run(["topics", "list", "--bootstrap", "127.0.0.1:1", "--nonsense"]) == 2
    same = launch(pk_command("version"), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    assert (same.wait(60), type(same), STARTS.why) == (0, Started, "")


def test_loading_deltalake_in_this_process_changes_no_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """deltalake sets a variable when it is loaded."""
    STARTS.loaded()
    monkeypatch.setenv("_RJEM_MALLOC_CONF", "dirty_decay_ms:500,muzzy_decay_ms:1000")
    importlib.import_module("deltalake")
    same = launch(pk_command("version"), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    assert (same.wait(60), type(same), STARTS.why) == (0, Started, "")
