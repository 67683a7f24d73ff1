"""`pk server start` as a user runs it: real processes on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pk import Producer, errors
from pk.cli.embedded import ReservedPorts
from pk.clock import SystemClock
from pk.log import directory, sealed
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller
from pk.wire.socket_network import PkNetwork

pytestmark = pytest.mark.integration

PATIENCE_S = 60.0


class Server:
    """One `pk server start --json`."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pk.cli", "server", "start", "--json", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )

    def line(self) -> dict[str, Any]:
        out = self.process.stdout
        assert out is not None
        assert select.select([out], [], [], PATIENCE_S)[0], "no ready line"
        said: dict[str, Any] = json.loads(out.readline())
        return said

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        return self.end()

    def end(self) -> tuple[int, str]:
        _, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, err


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(*arguments: str, env: dict[str, str] | None = None) -> Server:
        servers.append(Server(*arguments, env=env))
        return servers[-1]

    yield make
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()
        for stream in (server.process.stdout, server.process.stderr):
            assert stream is not None
            stream.close()


def until(holds: Callable[[], Any]) -> Any:
    """Return the first true result of `holds`."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if answer := holds():
            return answer
        time.sleep(0.02)
    raise AssertionError("it never came true")


def gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat[stat.rindex(")") + 2] == "Z"


def stopped(pid: int) -> bool:
    """Wait until every thread is stopped: a running one would take the next signal."""
    stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat[stat.rindex(")") + 2] == "T" for stat in stats)


def pending(pid: int) -> set[int]:
    """Return the signals that a stopped process has not handled yet."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [int(line.split()[1], 16) for line in status.splitlines() if line[:7] == "ShdPnd:"]
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def fork_server(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children()
    (found,) = [each for each in children if "forkserver" in each.cmdline()]
    return found


def cpu_s(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def call(address: str, request: Any) -> wire.Head:
    async def main() -> wire.Head:
        network = PkNetwork()
        caller = Caller(network, SystemClock(), address, wire.Hello(protocol=PROTOCOL))
        try:
            return (await caller.call(request, timeout_ms=20_000)).head
        finally:
            await caller.close()
            await network.close()

    return asyncio.run(main())


def create(address: str, name: str) -> None:
    request = wire.CreateTopicsRequest(topics=[wire.NewTopic(name=name, partitions=2)])
    (result,) = call(address, request).create_topics_reply.results
    assert not result.HasField("error"), result.error


def topics(address: str) -> dict[str, list[int]]:
    """Return the topics' names with the leaders of their partitions; {} while no broker answers."""
    try:
        reply = call(address, wire.MetadataRequest()).metadata_reply
    except errors.BrokerUnavailable:
        return {}
    return {t.name: [p.leader for p in t.partitions] for t in reply.topics}


def test_a_life(start: Callable[..., Server], tmp_path: Path) -> None:
    """Ready line, pid files, drain, clean restart with the same identity, health endpoint."""
    ports = ReservedPorts()
    port = ports.draw()
    directory = str(tmp_path / "data")
    server = start("--dir", directory, "--listen", "127.0.0.1:0", "--metrics", f"127.0.0.1:{port}")
    ready = server.line()
    assert ready["ready"] == "server"
    assert set(ready["pids"]) == {"supervisor", "controller", "broker"}
    run = tmp_path / "data" / "run"
    for role, pid in ready["pids"].items():
        assert int((run / f"{role}.pid").read_text()) == pid
    assert (run / "config.json").stat().st_mode & 0o077 == 0
    loader = fork_server(server)  # of the modules, which no child loads again (0028)
    children = [ready["pids"][role] for role in ("controller", "broker")]
    assert sum(map(cpu_s, children)) < cpu_s(loader.pid) / 2
    assert loader.num_threads() == 1
    for role in ("controller", "broker"):
        child = psutil.Process(ready["pids"][role])
        command = [sys.executable, "-m", "pk.server", role, "--run", str(run)]
        assert child.cmdline()[: len(command)] == command
        assert child.ppid() == server.process.pid
    create(ready["address"], "flights")
    assert topics(ready["address"]) == {"flights": [1, 1]}
    base = f"http://127.0.0.1:{port}"
    with urllib.request.urlopen(f"{base}/metrics") as answer:
        assert b"pk_loop_lag_ms_bucket" in answer.read()
    for path in ("healthz", "readyz"):
        with urllib.request.urlopen(f"{base}/{path}") as answer:
            assert answer.read() == b"ok\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{base}/nothing").close()
    code, err = server.stop()
    assert code == 0, err
    assert (tmp_path / "data" / "clean-shutdown").exists()
    assert "flights-0 1 -> none" in err  # the broker led nothing any more, so nothing failed
    assert "broker_fenced" not in err
    # the controller is stopped right after the broker, perhaps before it has looked
    assert "broker_left" in err or "controller_resigned" in err.splitlines()[-1]
    assert all(gone(pid) for pid in (*ready["pids"].values(), loader.pid))
    identity = tmp_path / "data" / "pk.json"  # a newer build that writes the same format continues
    known = sealed.decode(identity.read_bytes())
    identity.write_bytes(sealed.encode({**known, "build": "0.0.1"}))
    again = start("--dir", directory, "--listen", "127.0.0.1:0").line()
    assert again["cluster_id"] == ready["cluster_id"]
    assert topics(again["address"]) == {"flights": [1, 1]}


@pytest.mark.parametrize("role", ["broker", "controller"])
def test_a_dead_child_is_restarted(start: Callable[..., Server], tmp_path: Path, role: str) -> None:
    """kill -9 of a child: the log names it, it is restarted, and no acknowledged record is lost.

    The controller is started without the fork server, which was killed before it.
    """
    server = start("--dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    ready = server.line()
    create(ready["address"], "kept")
    if role == "controller":
        fork_server(server).kill()
    pid_file = tmp_path / "data" / "run" / f"{role}.pid"
    old = ready["pids"][role]
    os.kill(old, signal.SIGKILL)
    until(lambda: pid_file.exists() and int(pid_file.read_text() or old) != old)
    until(lambda: topics(ready["address"]) == {"kept": [1, 1]})
    create(ready["address"], "new")
    code, err = server.stop()
    assert code == 0, err
    assert f'child_died role={role} how="killed by SIGKILL"' in err
    assert ("fork_server_lost" in err) is (role == "controller")


def test_children_die_with_the_supervisor(start: Callable[..., Server], tmp_path: Path) -> None:
    """P1: PR_SET_PDEATHSIG; the next start finds the directory free."""
    server = start("--dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    ready = server.line()
    create(ready["address"], "kept")
    loader = fork_server(server).pid
    server.process.kill()
    server.process.wait()
    for pid in (*ready["pids"].values(), loader):
        until(lambda pid=pid: gone(pid))
    again = start("--dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0").line()
    assert topics(again["address"]) == {"kept": [1, 1]}


def refusal(server: Server) -> dict[str, Any]:
    """Return the typed error of a start that failed."""
    said = server.line()
    code, err = server.end()
    assert code == 1, err
    error: dict[str, Any] = said["error"]
    return error


def test_a_taken_port(start: Callable[..., Server], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = refusal(start("--dir", str(tmp_path / "data"), "--listen", address))
    assert error["name"] == "AddressInUse"
    assert error["acts"] == "operator"
    assert address in error["message"]


def test_two_servers_on_one_directory(start: Callable[..., Server], tmp_path: Path) -> None:
    first = start("--dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    ready = first.line()
    error = refusal(start("--dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0"))
    assert error["name"] == "DirectoryLocked"
    assert topics(ready["address"]) == {}  # the first one is not disturbed
    create(ready["address"], "t")
    other = start(
        "--dir", str(tmp_path / "b"), "--dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0"
    )
    assert refusal(other)["name"] in ("DirectoryLocked", "DirectoryOfAnotherCluster")
    assert first.stop()[0] == 0


def test_a_broker_that_is_refused_as_it_starts_ends_the_start(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """node/supervisor O3, Q2: its metadata are older than its registration, for example from a
    backup.
    """
    quick = ("--set", "broker_session_timeout_ms=500", "--set", "broker_heartbeat_interval_ms=100")
    given = ("--dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0", *quick)
    first = start(*given)
    create(first.line()["address"], "t")
    assert first.stop()[0] == 0
    run = tmp_path / "data" / "run.json"
    known = directory.decode_run(run.name, run.read_bytes())
    for path in (run, run.with_name("clean-shutdown")):
        path.write_bytes(directory.encode_run(known._replace(broker_epoch=1_000_000)))
    error = refusal(start(*given))
    assert (error["name"], error["acts"]) == ("MetadataBehind", "operator")
    assert sorted(os.listdir(tmp_path / "data/topics")) == ["t-0", "t-1"]
    run.unlink()  # as the error says
    # a broker that is ended before it has closed its logs leaves none
    run.with_name("clean-shutdown").unlink(missing_ok=True)
    again = start(*given)
    assert set(topics(again.line()["address"])) == {"t"}
    assert again.stop()[0] == 0


def test_metadata_from_a_backup_cost_no_log_that_they_do_not_know(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    """Rule L15, docs/REPAIR.md: the backup is of the last start, so the broker's registration is in
    it, and the metadata log soon ends behind the offset at which the unknown topic was created.
    """
    data = tmp_path / "data"
    given = ("--dir", str(data), "--listen", "127.0.0.1:0")
    first = start(*given)
    address = first.line()["address"]
    create(address, "old")
    shutil.copytree(data / "metadata", tmp_path / "backup")
    create(address, "newer")
    with Producer(address) as producer:
        producer.send("newer", b"acknowledged", partition=0).result(30)
    assert first.stop()[0] == 0
    shutil.rmtree(data / "metadata")
    shutil.copytree(tmp_path / "backup", data / "metadata")
    for number in range(2):
        again = start(*given)
        address = again.line()["address"]
        for other in range(4):  # more records than the lost part had
            create(address, f"other{number}{other}")
        assert "newer" not in topics(address)
        code, err = again.stop()
        assert code == 0
        assert "directory_kept" in err
        assert "newer-0" in err
        there = [each for each in os.listdir(data / "topics") if each.startswith("newer")]
        assert sorted(there) == ["newer-0", "newer-1"]
        (log,) = (data / "topics/newer-0").glob("*.log")
        assert b"acknowledged" in log.read_bytes()


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (
            '{"format": 0, "build": "BUILD", "cluster_id": "c", "node_id": 1, "directory_id": "d", '
            '"layout": "0123456789abcdef"}',
            "DirectoryOfAnotherBuild",
        ),
        ('{"format": 99}', "NewerFormat"),
        (
            '{"format": 0, "build": "BUILD", "cluster_id": "c", "node_id": 7, "directory_id": "d"}',
            "DirectoryOfAnotherCluster",
        ),
        ("not json", "CorruptLog"),
    ],
)
def test_a_directory_that_is_not_ours(
    start: Callable[..., Server], tmp_path: Path, content: str, name: str
) -> None:
    import pk

    (tmp_path / "pk.json").write_text(content.replace("BUILD", pk.__version__))
    error = refusal(start("--dir", str(tmp_path), "--listen", "127.0.0.1:0"))
    assert error["name"] == name
    assert str(tmp_path) in error["message"]


@pytest.mark.parametrize(
    ("arguments", "name", "text"),
    [
        (["--set", "retention_mss=1"], "InvalidConfig", "did you mean retention_ms?"),
        (["--set", "node_id=-1"], "InvalidConfig", "at least 0"),
        (["--listen", "nonsense"], "InvalidConfig", "HOST:PORT"),
        (["--listen", "0.0.0.0:0"], "InvalidConfig", "advertise"),
        (["--set", "broker_heartbeat_interval_ms=5000"], "InvalidConfig", "half"),
        (["--config", "/nonexistent.toml"], "InvalidConfig", "cannot read"),
    ],
)
def test_wrong_settings(
    start: Callable[..., Server], tmp_path: Path, arguments: list[str], name: str, text: str
) -> None:
    error = refusal(start("--dir", str(tmp_path / "data"), *arguments))
    assert error["name"] == name
    assert text in error["message"]


def test_a_second_interrupt_kills(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start("--dir", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    ready = server.line()
    os.kill(ready["pids"]["broker"], signal.SIGSTOP)  # it cannot drain
    until(lambda: stopped(ready["pids"]["broker"]))
    server.process.send_signal(signal.SIGINT)
    until(lambda: signal.SIGTERM in pending(ready["pids"]["broker"]))  # the drain has begun
    code, _ = server.stop(signal.SIGINT)
    assert code != 0
    assert all(gone(pid) for pid in ready["pids"].values())


def test_file_environment_and_flags(start: Callable[..., Server], tmp_path: Path) -> None:
    """The later source wins; topic settings become the cluster's defaults; an address that others
    can reach causes a warning.
    """
    config = tmp_path / "pk.toml"
    config.write_text(
        f'dir = "{tmp_path}/data"\nlisten = "127.0.0.1:1"\nnode_id = 3\nretention.ms = 60000\n'
        "[topic]\nsegment_bytes = 20000\n"
    )
    server = start(
        "--config", str(config), "--listen", "0.0.0.0:0", "--advertise", "127.0.0.1:19999",
        env={"PK_SEGMENT_BYTES": "30000"},
    )  # fmt: skip
    ready = server.line()
    assert (ready["node_id"], ready["address"]) == (3, "127.0.0.1:19999")
    saved = json.loads((tmp_path / "data" / "run" / "config.json").read_text())
    assert saved["topic_defaults"] == {"retention_ms": 60000, "segment_bytes": 30000}
    code, err = server.stop()
    assert code == 0
    assert "no TLS" in err
