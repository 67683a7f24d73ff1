"""`pk log list` and `pk log dump` on the data directory of a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pk import AdminClient, Producer, errors
from pk.cli.embedded import EmbeddedServer
from pk.log import batch as batches
from pk.log import checkpoints, epochs

PK = Path(sys.executable).parent / "pk"


def listed(data: Path) -> dict[str, Any]:
    """Return what `pk log list` shows of the only log."""
    done = subprocess.run(
        [PK, "log", "list", data, "--json"], capture_output=True, text=True, check=True
    )
    (found,) = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def dumped(path: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run([PK, "log", "dump", path, "--json"], capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[0])
    assert isinstance(found, dict)
    return done.returncode, found


def test_a_file_of_a_newer_pk_is_newer_and_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule L21: list, dump and the broker say the same, and none of them changes the file."""
    server = EmbeddedServer(tmp_path)
    with server:
        with AdminClient(server.address) as admin:
            admin.create_topic("t", 1, {"retention_ms": -1})
        with Producer(server.address) as producer:
            producer.send("t", b"value", partition=0).result(30)
    path = server.data / "topics" / "t-0" / epochs.FILE
    lines = checkpoints.decode(epochs.FILE, path.read_bytes())
    with monkeypatch.context() as newer:
        newer.setattr(checkpoints, "VERSION", checkpoints.VERSION + 1)
        path.write_bytes(checkpoints.encode(epochs.FILE, lines))
    raw = path.read_bytes()

    found = listed(server.data)
    assert found["status"] == "newer"
    assert f"{epochs.FILE}: " in found["problem"]
    done = subprocess.run([PK, "log", "dump", path], capture_output=True, text=True)
    assert done.returncode != 0
    assert "CORRUPT" not in done.stdout
    assert f"{path}: {epochs.FILE} has version" in done.stderr
    with server, AdminClient(server.address) as admin:
        (state,) = admin.describe_topics(["t"])
        assert isinstance(state.error, errors.NewerFormat)
    assert path.read_bytes() == raw


def test_a_damaged_log_is_listed_and_identities_are_printed(tmp_path: Path) -> None:
    # rules L9 and L15
    server = EmbeddedServer(tmp_path)
    with server:
        with AdminClient(server.address) as admin:
            admin.create_topic("t", 1, {"retention_ms": -1})
        for number in range(4):
            with Producer(server.address) as producer:
                producer.send("t", b"value %d" % number, partition=0).result(30)
    whole = listed(server.data)
    assert (whole["status"], whole["damaged_ranges"], whole["problem"]) == ("ok", 0, "")

    path = server.data / "topics" / "t-0" / f"{0:020}.log"
    raw = bytearray(path.read_bytes())
    position, header = list(batches.iter_headers(bytes(raw)))[1]
    raw[position + header.length - 1] ^= 1
    path.write_bytes(raw)
    hit = listed(server.data)
    assert (hit["status"], hit["damaged_ranges"]) == ("damaged", 1)
    assert "offsets [1, 2) are damaged" in hit["problem"]

    first = server.data / "topics" / "t-0" / "partition.json"
    second = server.data / "partition-identity-checkpoint"
    for file in (first, second):
        code, found = dumped(file)
        assert (code, found["topic"], found["partition"]) == (0, "t", 0)
        assert found["topic_id"] == hit["topic_id"]
        content = bytearray(file.read_bytes())
        content[8] ^= 1
        file.write_bytes(content)
        code, found = dumped(file)
        assert code == 1
        assert "checksum" in found["corrupt"]
