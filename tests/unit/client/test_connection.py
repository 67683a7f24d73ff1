"""The loop thread under the synchronous clients: calls end with typed errors, also when the thread
is busy or has ended.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator

import pytest

from pk import errors
from pk.client import connection
from pk.client.connection import LoopThread


@pytest.fixture
def held() -> Iterator[LoopThread]:
    thread = connection.acquire()
    yield thread
    connection.release(thread)


@pytest.fixture
def busy(held: LoopThread, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopThread]:
    """Let the loop run code that does not end, as a delivery callback may."""
    monkeypatch.setattr(connection, "_BUSY_S", 0.01)
    release = threading.Event()
    held.loop.call_soon_threadsafe(release.wait)
    yield held
    release.set()


async def nothing() -> str:
    return "done"


def test_a_call_on_a_busy_loop_times_out(busy: LoopThread) -> None:
    with pytest.raises(errors.RequestTimedOut, match=r"not within 0\.01 s.*busy"):
        busy.run(nothing(), 0.01)


def test_closing_on_a_busy_loop_raises_nothing_and_goes_on(
    held: LoopThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection, "_BUSY_S", 0.01)
    release, closed = threading.Event(), threading.Event()

    async def close() -> None:
        closed.set()

    held.loop.call_soon_threadsafe(release.wait)
    with caplog.at_level(logging.WARNING, "pk.client"):
        held.finish(close(), 0.01)
    assert "closing a client takes longer" in caplog.text
    assert not closed.is_set()
    release.set()
    assert closed.wait(10), "it was not abandoned"


def test_what_overlooks_its_own_deadline_times_out(
    held: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_LATE_S", 0.01)

    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(errors.RequestTimedOut, match=r"within 0\.01 s"):
        held.run(forever(), 0.01)


def test_a_bug_is_an_internal_error_with_its_cause(held: LoopThread) -> None:
    async def bug() -> None:
        raise KeyError("x")

    with pytest.raises(errors.InternalError, match="KeyError") as told:
        held.run(bug())
    assert isinstance(told.value.__cause__, KeyError)


def test_a_loop_that_has_ended_is_a_closed_client() -> None:
    thread = LoopThread()
    thread.stop()
    with pytest.raises(errors.ClosedError):
        thread.run(nothing())
    thread.finish(nothing())
