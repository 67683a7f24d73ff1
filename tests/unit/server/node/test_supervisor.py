"""The supervisor's tasks that keep children running, without processes: what must not end them."""

from __future__ import annotations

import asyncio
import signal
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pk import tracing
from pk.server.node.fork_server import ForkServerLostError
from pk.server.node.supervisor import Supervisor


class FakeProcess:
    """A process that prints a line and ends."""

    returncode = 0

    def __init__(self, said: bytes = b"") -> None:
        self.signals: list[int] = []
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_data(said)
        self.stdout.feed_eof()

    async def wait(self) -> int:
        return 1

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


class LivingProcess(FakeProcess):
    """A process that prints a line and ends at a signal."""

    returncode: Any = None
    pid = 7

    def __init__(self, said: bytes) -> None:
        super().__init__()
        self.stdout = asyncio.StreamReader()
        self.stdout.feed_data(said)

    def send_signal(self, number: int) -> None:
        super().send_signal(number)
        self.stdout.feed_eof()


def test_a_child_that_cannot_be_started_now_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A child that floods its stdout is still read."""
    config: Any = SimpleNamespace(
        run_dir=str(tmp_path), roles=("broker",), tier_url="", server={"maintenance_runner": False}
    )
    lines = StringIO()

    async def main() -> None:
        supervisor = Supervisor(
            config, log=tracing.Log("supervisor", lambda: 0, lines), on_ready=lambda _: None
        )
        supervisor._served = True
        child = supervisor.children["broker"]
        child.backoff.bounds_ms = (0, 0)
        tries: list[Any] = []

        async def start(*command: str, **_options: Any) -> Any:
            tries.append(command)
            if len(tries) == 1:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            supervisor._stopping.set()
            noise = b"x" * 100_000 + b"\n" + b"7\n" + b'"ready"\n'
            return FakeProcess(noise + b'{"ready": "broker", "pid": 7}\n')

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        await supervisor._keep(child)
        assert len(tries) == 2
        assert child.ready == {"ready": "broker", "pid": 7}

    asyncio.run(main())
    assert "did not start" in lines.getvalue()


@pytest.mark.parametrize("stops", [False, True])
def test_without_a_fork_server_a_child_is_spawned(
    stops: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """node/fork_server E2.  A child that waits for a fork server while the node stops is none."""
    config: Any = SimpleNamespace(
        run_dir=str(tmp_path), roles=("broker",), tier_url="", server={"maintenance_runner": False}
    )
    lines, events = StringIO(), list[str]()

    async def main() -> None:
        class Lost:
            async def fork(self, role: str, run_dir: str) -> Any:
                events.append(f"fork {role}")
                if stops:
                    supervisor.request_stop()
                raise ForkServerLostError("it has ended")

            def close(self) -> None:
                events.append("close")

        forks: Any = Lost()
        supervisor = Supervisor(
            config, log=tracing.Log("supervisor", lambda: 0, lines), on_ready=lambda _: None,
            forks=forks,
        )  # fmt: skip
        child = supervisor.children["broker"]
        child.backoff.bounds_ms = (0, 0)

        async def start(*command: str, **_options: Any) -> Any:
            events.append(f"spawn {command[3]}")
            if events.count("spawn broker") == 2:
                supervisor.request_stop()
            return FakeProcess()

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        await supervisor._keep(child)

    asyncio.run(main())
    spawned = ["fork broker", "close", "spawn broker", "spawn broker"]
    assert events == (["fork broker"] if stops else spawned)
    assert ("fork_server_lost" in lines.getvalue()) is not stops


def test_a_child_that_is_being_started_is_told_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise it would live until the drain is over, or without an end if the start itself has
    failed.
    """
    config: Any = SimpleNamespace(
        run_dir=str(tmp_path), roles=("broker",), tier_url="", server={"maintenance_runner": False}
    )

    async def main() -> list[int]:
        supervisor = Supervisor(
            config, log=tracing.Log("supervisor", lambda: 0, StringIO()), on_ready=lambda _: None
        )
        process = FakeProcess()

        async def start(*_command: str, **_options: Any) -> Any:
            supervisor._stopping.set()
            supervisor._signal("broker", signal.SIGTERM)
            return process

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        await supervisor._keep(supervisor.children["broker"])
        return process.signals

    assert asyncio.run(main()) == [signal.SIGTERM]


def test_the_runner_of_maintenance_schedules_starts_after_the_ready_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is a client of the broker, so it gets the address that the broker reported."""
    server = {"maintenance_runner": True, "maintenance_master": "local[1]", "metrics": ""}
    server |= {"listen": "127.0.0.1:0", "shutdown_timeout_ms": 1_000}
    config: Any = SimpleNamespace(
        run_dir=str(tmp_path), roles=("broker",), tier_url="", server=server, cluster_id="c",
        node_id=1, dirs=(), broker_address="127.0.0.1:7", advertise="",
    )  # fmt: skip
    events: list[str] = []

    async def main() -> None:
        supervisor = Supervisor(
            config,
            log=tracing.Log("supervisor", lambda: 0, StringIO()),
            on_ready=lambda _: events.append("ready"),
        )

        async def start(*command: str, **_options: Any) -> Any:
            events.append(" ".join(command[2:]))
            if "runner" in command:
                supervisor.request_stop()
            return LivingProcess(b'{"ready": "broker", "address": "127.0.0.1:7"}\n')

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        await supervisor.run()

    asyncio.run(main())
    runner = "pk.cli maintenance runner --bootstrap 127.0.0.1:7 --supervised --master local[1]"
    assert events[:3] == [f"pk.server broker --run {tmp_path}", "ready", runner]


@pytest.mark.parametrize("stubborn", ["broker", "controller"])
def test_a_process_that_does_not_end_is_killed_and_named(
    stubborn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pk.server.node.supervisor.CONTROLLER_STOP_MS", 50)
    config: Any = SimpleNamespace(
        run_dir=str(tmp_path), roles=("controller", "broker"), tier_url="",
        server={"maintenance_runner": False, "shutdown_timeout_ms": 50},
    )  # fmt: skip
    lines = StringIO()

    class Stubborn(LivingProcess):
        def send_signal(self, number: int) -> None:
            self.signals.append(number)
            if number == signal.SIGKILL:
                self.stdout.feed_eof()

    async def main() -> tuple[int, dict[str, FakeProcess]]:
        supervisor = Supervisor(
            config, log=tracing.Log("supervisor", lambda: 0, lines), on_ready=lambda _: None
        )
        started: dict[str, FakeProcess] = {}

        async def start(*command: str, **_options: Any) -> Any:
            role = command[3]
            kind = Stubborn if role == stubborn else LivingProcess
            started[role] = kind(b"")
            return started[role]

        monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
        for role in config.roles:
            supervisor._keepers.spawn(supervisor._keep(supervisor.children[role]), role)
        while len(started) < 2:
            await asyncio.sleep(0)
        supervisor.request_stop()
        return await supervisor._drain(), started

    code, started = asyncio.run(main())
    assert code == 1
    assert started[stubborn].signals == [signal.SIGTERM, signal.SIGKILL]
    assert f"killed={stubborn} after_ms=50" in lines.getvalue()
    (other,) = started.keys() - {stubborn}
    assert started[other].signals == [signal.SIGTERM]
