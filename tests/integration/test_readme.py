"""Runs the commands of the README: a new user must be able to type them as they stand.

Only places change: the address, the directories under /tmp, and the topic id that a user would copy
from `pk tier describe`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pk import AdminClient
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
ADDRESS = "127.0.0.1:9292"
BIN = Path(sys.executable).parent


def blocks(language: str, under: str) -> list[str]:
    """Return the code blocks of one kind below a heading."""
    section = README.split(f"\n## {under}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    settings = {"tier_max_lag_ms": 200, "group_initial_rebalance_delay_ms": 0}
    with EmbeddedServer(
        tmp_path / "pk", tier_url=(tmp_path / "pk-tier").as_uri(), settings=settings
    ) as running:
        yield running


def run(command: list[str], text: str = "", timeout: float = 120) -> str:
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(
        command, input=text, env=environment, capture_output=True, text=True, timeout=timeout,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_shell(server: EmbeddedServer) -> dict[str, str]:
    """Run the second shell of the quick start; return each command's output."""
    outputs = {}
    for line in blocks("bash", "Quick start")[1].splitlines():
        command = line.split("   #")[0].split("  #")[0].rstrip()
        outputs[command] = run(["bash", "-c", f"{command} --bootstrap {server.address}"])
    return outputs


def python_of(server: EmbeddedServer, text: str, root: Path, uri: str = "") -> str:
    text = text.replace(ADDRESS, server.address)
    text = text.replace("/tmp/pk-checkpoint", str(root / "checkpoint"))
    return re.sub(r"/tmp/pk-tier/flights/<topic id>", uri, text)


def tiered(server: EmbeddedServer) -> str:
    deadline = monotonic_s() + 60
    with AdminClient(server.address) as admin:
        while any(s.tiered_end < s.log_end for s in admin.describe_topics(["flights"])):
            assert monotonic_s() < deadline, server.tail()
            block_s(0.1)
        return str(admin.describe_tier("flights").uri)


@pytest.mark.integration
def test_the_quick_start_works_as_written(server: EmbeddedServer, tmp_path: Path) -> None:
    outputs = run_shell(server)
    consumed = next(out for command, out in outputs.items() if command.startswith("pk consume"))
    assert 'AA\t{"delay": 5}\n' in consumed
    assert '{"delay": 0}' in consumed
    described = next(out for command, out in outputs.items() if "topics describe" in command)
    for name in ("log_start", "local_log_start", "tiered_end", "log_end"):
        assert name in described
    (first, *_) = blocks("python", "Quick start")
    out = run([sys.executable, "-W", "error", "-c", python_of(server, first, tmp_path)])
    assert "b'AA' b'{\"delay\": 7}'" in out
    (offsets,) = blocks("python", "Offsets")
    out = run([sys.executable, "-W", "error", "-c", python_of(server, offsets, tmp_path)])
    assert "b'AA' b'{\"delay\": 7}'" in out
    command = ["pk", "groups", "describe", "report", "--json", "--bootstrap", server.address]
    assert {each["lag"] for each in json.loads(run(command))["offsets"]} == {0}
    (transaction,) = blocks("python", "Transactions")
    run([sys.executable, "-W", "error", "-c", python_of(server, transaction, tmp_path)])
    command = ["pk", "transactions", "list", "--json", "--bootstrap", server.address]
    listed = json.loads(run(command))
    (found,) = listed["transactions"]
    assert found["transactional_id"] == "flights-1"


@pytest.mark.spark
@pytest.mark.long
@pytest.mark.timeout(900)
def test_sparks_lines_and_the_table_without_pk(server: EmbeddedServer, tmp_path: Path) -> None:
    run_shell(server)
    uri = tiered(server)
    spark = "\n".join(blocks("python", "Quick start")[1:])
    table = blocks("python", "The table without pk")[0]
    check = "print('PROVEN', spark.sql('SELECT 1').count(), len(files))"
    text = "\n".join([spark, table, check])
    out = run([sys.executable, "-c", python_of(server, text, tmp_path, uri)], timeout=880)
    assert "PROVEN 1" in out
    assert '{"delay": 5}' in out
    late = ["consume", "late", "--from", "start", "--to", "end", "--print-key"]
    assert run(["pk", *late, "--bootstrap", server.address]) == 'DL\t{"delay": 90}\n'


@pytest.mark.integration
def test_json_is_everywhere(server: EmbeddedServer) -> None:
    run_shell(server)
    for command in (["topics", "list"], ["topics", "describe", "flights"]):
        out = run(["pk", *command, "--json", "--bootstrap", server.address])
        json.loads(out)
    failed = subprocess.run(
        [BIN / "pk", "topics", "describe", "nowhere", "--json", "--bootstrap", server.address],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert failed.returncode == 1
    assert json.loads(failed.stdout)["error"]["name"] == "UnknownTopicOrPartition"
