"""File, environment, flags: which source wins, and which settings are refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from pk import errors
from pk.server.node.run_config import UNIX_PATH_MAX, RunConfig, remove_sockets, socket_address
from pk.server.node.settings import is_loopback, resolve


def test_the_later_layer_wins_and_names_have_spellings() -> None:
    file = tomllib.loads(
        'dirs = ["/a", "/b"]\nlisten = "127.0.0.1:1"\nrack = "file"\nretention.ms = 1\n'
        "[server]\nnode-id = 4\n[topic]\nsegment.bytes = 20000\n"
    )
    environment = {"PK_RACK": "env", "PK_LISTEN": "127.0.0.1:2", "PK_UNKNOWN": "x", "HOME": "/"}
    found = resolve(file, environment, {"listen": "127.0.0.1:3"})
    assert found.dirs == ("/a", "/b")
    assert (found.server["listen"], found.server["rack"]) == ("127.0.0.1:3", "env")
    assert found.server["node_id"] == 4
    assert found.topic_defaults == {"retention_ms": 1, "segment_bytes": 20000}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"retention.mss": 1}, "did you mean retention_ms"),
        ({"listen": ""}, "listen is empty"),
        ({"listen": "host"}, "HOST:PORT"),
        ({"listen": "host:99999"}, "HOST:PORT"),
        ({"listen": "::1:80"}, "HOST:PORT"),
        ({"listen": "[::]:80"}, "advertise"),
        ({"metrics": "x"}, "HOST:PORT"),
        ({"retention_ms": 1, "retention.ms": 2}, "same setting"),
        ({"retention_ms": -5}, "at least -1"),
        ({"local_retention_ms": 10, "retention_ms": 5}, "local_retention_ms"),
    ],
)
def test_refusals(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=text):
        resolve({}, {}, flags)


@pytest.mark.parametrize("given", [5, ["/a", 5], {"a": "b"}])
def test_a_directory_is_a_path(given: Any) -> None:
    with pytest.raises(
        errors.InvalidConfig, match="dir is the path of a data directory, or a list"
    ):
        resolve({"dir": given}, {}, {})


def test_compaction_is_no_default() -> None:
    with pytest.raises(errors.UnsupportedFeature, match="single topics"):
        resolve({}, {}, {"cleanup_policy": "compact"})


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1:1", True), ("localhost:1", True), ("[::1]:1", True), ("10.0.0.1:1", False)],
)
def test_loopback(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_a_run_configuration_survives_its_file(tmp_path: Any) -> None:
    resolved = resolve({}, {}, {"retention_ms": 5})
    run = RunConfig(
        dirs=("/a",),
        directory_ids=("d",),
        run_dir=str(tmp_path),
        cluster_id="c",
        node_id=1,
        server=resolved.server,
        topic_defaults=resolved.topic_defaults,
    )
    run.save()
    assert RunConfig.load(str(tmp_path)) == run
    assert run.controller_address == f"unix:{tmp_path}/controller.sock"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(errors.InvalidConfig):
        RunConfig.load(str(tmp_path))


def test_a_long_path_gets_a_short_socket(tmp_path: Any) -> None:
    deep = str(tmp_path / ("x" * UNIX_PATH_MAX))
    address = socket_address(deep, "broker")
    assert address.startswith("unix:/tmp/pk-")
    assert len(address) < UNIX_PATH_MAX
    assert address == socket_address(deep, "broker")
    assert address != socket_address(deep + "y", "broker")
    for run_dir in (deep, deep + "y"):
        path = Path(socket_address(run_dir, "broker").removeprefix("unix:"))
        path.touch()
        remove_sockets(run_dir, ["broker", "tier"])
        assert not path.parent.exists()
