"""A process with an open pk client may start other programs.  Spark's launcher forks with a
`preexec_fn`, and grpc's own fork handlers used to kill one such child in four.
"""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from pk import AdminClient
from pk.cli.embedded import EmbeddedServer

CHILDREN = 40


def ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@pytest.mark.integration
def test_children_forked_beside_a_client_live(tmp_path: Path) -> None:
    with EmbeddedServer(tmp_path) as server, AdminClient(server.address) as admin:
        ended = []
        for _ in range(CHILDREN):
            admin.list_topics()
            child = subprocess.Popen(["true"], preexec_fn=ignore_interrupts)
            ended.append(child.wait(timeout=30))
    assert ended == [0] * CHILDREN
