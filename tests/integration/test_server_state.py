"""`pk server status` and `pk server stop` on real nodes."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from node_starts import completed

from pk import errors
from pk.cli.embedded import pk_command
from pk.server.node import running

pytestmark = pytest.mark.integration


def pk(*arguments: str) -> subprocess.CompletedProcess[str]:
    return completed(pk_command(*arguments), 120)


def status(home: Path, *more: str) -> tuple[int, dict[str, Any]]:
    done = pk("server", "status", "--dir", str(home), "--json", *more)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@contextmanager
def started(home: Path) -> Iterator[subprocess.Popen[str]]:
    node = subprocess.Popen(
        [sys.executable, "-m", "pk.cli", "server", "start", "--json", "--dir", str(home),
         "--listen", "127.0.0.1:0"],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    with node:
        try:
            assert node.stdout is not None
            assert json.loads(node.stdout.readline())["ready"] == "server"
            yield node
        finally:
            node.kill()


def wait(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def test_a_node_is_seen_while_it_serves_and_stops_when_asked(tmp_path: Path) -> None:
    home = tmp_path / "node"
    with started(home) as node:
        code, found = status(home)
        assert (code, found["state"], found["problem"]) == (0, "serving", "")
        assert found["pid"] == node.pid
        assert {each["role"] for each in found["processes"]} == {
            "supervisor",
            "controller",
            "broker",
        }
        assert all(each["memory_bytes"] > 1 << 20 for each in found["processes"])
        assert found["directories"][0]["free_bytes"] > 0
        assert found["broker_state"] == "active"
        shown = pk("server", "status", "--dir", str(home))
        assert f"serves on {found['address']}" in shown.stdout

        broker = next(each["pid"] for each in found["processes"] if each["role"] == "broker")
        os.kill(broker, signal.SIGSTOP)  # it hangs
        code, hung = status(home, "--timeout-ms", "1s")
        os.kill(broker, signal.SIGCONT)
        assert (code, hung["state"]) == (1, "not serving")
        assert "does not answer" in hung["problem"]

        done = pk("server", "stop", "--dir", str(home), "--json")
        assert (done.returncode, json.loads(done.stdout)["stopped"]) == (0, True), done.stderr
        assert node.wait(30) == 0
    assert status(home) == (1, {"state": "stopped", "dir": str(home)})
    assert pk("server", "stop", "--dir", str(home)).returncode == 1


def test_a_node_that_does_not_drain_is_killed_only_if_asked(tmp_path: Path) -> None:
    home = tmp_path / "node"
    with started(home) as node:
        _, found = status(home)
        broker = next(each["pid"] for each in found["processes"] if each["role"] == "broker")
        os.kill(broker, signal.SIGSTOP)
        late = pk("server", "stop", "--dir", str(home), "--timeout-ms", "1s")
        assert late.returncode != 0
        assert "--kill" in late.stderr
        assert node.poll() is None
        assert status(home)[1]["state"] == "stopping"
        again = pk("server", "stop", "--dir", str(home), "--timeout-ms", "1s")
        assert again.returncode != 0
        assert node.poll() is None  # asked twice, it still drains
        done = pk("server", "stop", "--dir", str(home), "--timeout-ms", "1s", "--kill")
        assert done.returncode == 0, done.stderr
        assert node.wait(30) == 137
    assert status(home)[1]["state"] == "stopped"


def test_a_supervisor_that_was_killed_counts_as_stopped(tmp_path: Path) -> None:
    home = tmp_path / "node"
    with started(home) as node:
        node.kill()
    wait("its children end", lambda: running.find(str(home)) is None)
    assert status(home)[1]["state"] == "stopped"


def test_no_other_process_is_taken_for_the_node(tmp_path: Path) -> None:
    """The lock is held, and the pid in it is that of a process that has another file open."""
    lock = tmp_path / "run" / ".lock"
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write(f"{os.getppid()}\n")
        held.flush()
        with pytest.raises(errors.DirectoryLocked, match="does not hold it"):
            running.find(str(tmp_path))


def test_what_is_no_nodes_directory_is_said(tmp_path: Path) -> None:
    for command in ("status", "stop"):
        done = pk("server", command, "--dir", str(tmp_path))
        assert done.returncode != 0
        assert "no run directory" in done.stderr
        done = pk("server", command)
        assert "give --dir" in done.stderr
