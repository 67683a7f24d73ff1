"""A server that a program starts for itself ends with that program, however the program ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pk import errors
from pk.cli.embedded import EmbeddedServer

pytestmark = [pytest.mark.integration, pytest.mark.executed]

OWNER = """
import json, sys
from pathlib import Path
from pk.cli.embedded import EmbeddedServer
server = EmbeddedServer(Path(sys.argv[1]))
server.start()
print(json.dumps(server.pids()), flush=True)
sys.stdin.read()
"""


def test_the_server_dies_with_its_owner(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with owner:
        assert owner.stdout is not None
        pids = json.loads(owner.stdout.readline())
        assert {"supervisor", "controller", "broker"} <= set(pids)
        os.kill(owner.pid, signal.SIGKILL)
    EmbeddedServer(tmp_path).wait_gone(pids, timeout_s=30)


def test_start_stop_start_on_the_same_port(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    first = server.start()["address"]
    before = server.pids()
    assert server.stop() == 0
    server.wait_gone(before)
    try:
        assert server.start()["address"] == first
    finally:
        assert server.stop() == 0


def test_the_servers_own_error_comes_out(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path), pytest.raises(errors.DirectoryLocked):
        EmbeddedServer(tmp_path).start()
