"""Addresses without a server: a timeout bounds connecting, too, and the error names the address.

A dead port refuses the connection; a black hole accepts it and never answers.  The message of the
error contains how long the command waited, so the tests read no clock.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors

pytestmark = pytest.mark.integration

BIN = Path(sys.executable).parent / "pk"
#: Without the bound every one of these commands takes a minute.
HANGS_S = 45
COMMANDS = [
    ["consume", "t"],
    ["consume", "t", "--partition", "0", "--from-beginning"],
    ["produce", "t"],
    ["topics", "list"],
    ["topics", "describe", "t"],
    ["tier", "describe", "t"],
    ["tier", "repair", "t"],
    ["tier", "accept", "t"],
    ["perf", "produce", "t"],
    ["perf", "consume", "t"],
    ["quorum", "describe"],
]


@pytest.fixture(params=["dead port", "black hole"])
def nowhere(request: pytest.FixtureRequest) -> Iterator[str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        if request.param == "black hole":
            sock.listen(64)  # the kernel accepts; no process reads
        yield f"127.0.0.1:{sock.getsockname()[1]}"


def test_a_command_gives_up_in_its_time_and_says_where_it_tried(nowhere: str) -> None:
    """Most of the time is waiting: several commands wait at once."""

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN), *command, "--bootstrap", nowhere, "--timeout-ms", "4000"],
            input="line\n", capture_output=True, text=True, timeout=HANGS_S, check=False,
            env={**os.environ, "PK_BOOTSTRAP": ""},
        )  # fmt: skip

    with ThreadPoolExecutor(6) as pool:
        for done in pool.map(run, COMMANDS):
            assert done.returncode == 1, done
            told, error = done.stderr.splitlines()
            assert told == f"connecting to {nowhere} …", done
            assert error.startswith("error: "), done
            assert nowhere in error, done
            assert "tried for 4000 ms" in error, done


def test_clients_give_up_in_their_time(nowhere: str) -> None:
    """Each call names its own time-out, so none of them waited for another one's."""
    with AdminClient(nowhere) as admin:
        with pytest.raises(errors.RetriableError, match="tried for 700 ms"):
            admin.describe_topics(timeout_s=0.7)
        with pytest.raises(errors.RetriableError, match="tried for 700 ms"):
            admin.create_topic("t", timeout_s=0.7)
    with Consumer(nowhere) as consumer:
        with pytest.raises(errors.RetriableError, match="tried for 700 ms"):
            consumer.end_offsets([TopicPartition("t", 0)], timeout_s=0.7)
        consumer.subscribe(["t"])
        assert consumer.poll(0.1) == []
    producer = Producer(nowhere, max_block_ms=700)
    with pytest.raises(errors.RetriableError, match="tried for 700 ms"):
        producer.send("t", b"v")
    producer.close()
