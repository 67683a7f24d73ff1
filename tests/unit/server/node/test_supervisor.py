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


def test_a_child_that_cannot_be_started_now_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A child that floods its stdout is still read."""
    config: Any = SimpleNamespace(run_dir=str(tmp_path), roles=("broker",), tier_url="")
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


def test_a_child_that_is_being_started_is_told_to_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise it would live until the drain is over, or without an end if the start itself has
    failed.
    """
    config: Any = SimpleNamespace(run_dir=str(tmp_path), roles=("broker",), tier_url="")

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
