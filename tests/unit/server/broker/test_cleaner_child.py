"""The cleaner process as the broker sees it: answers, deaths, and a process that hangs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pk import errors
from pk.clock import SystemClock
from pk.compaction.cleaner_process import NICENESS
from pk.compaction.cleaning_job import CleaningJob
from pk.server.broker import cleaner_child
from pk.server.broker.cleaner_child import CleanerChild
from tests.kit.cleaned_log import CleanedLog

ANSWERS = "import sys\nfor line in sys.stdin: print('{}', flush=True)".format
BACKOFF_MS = (300, 600)


class StoppedClock(SystemClock):
    """Notes what is waited for, and does not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def monotonic_ms(self) -> int:
        return 1000

    async def sleep_ms(self, duration_ms: float) -> None:
        self.waits.append(duration_ms)


def job(time_limit_ms: int = 60_000) -> CleaningJob:
    log = CleanedLog()
    log.write(0, [(b"a", b"1")])
    log.roll()
    log.write(0, [(b"a", b"2")])
    return log.job()._replace(time_limit_ms=time_limit_ms)


def run(story: Callable[[StoppedClock], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(story(StoppedClock()))


def child(clock: StoppedClock, program: str) -> CleanerChild:
    return CleanerChild(clock, (sys.executable, "-c", program), BACKOFF_MS)


def test_a_process_that_hangs_is_killed_and_the_next_one_waits() -> None:
    async def story(clock: StoppedClock) -> None:
        mine = child(clock, "import time\ntime.sleep(3600)")
        for waits in ([], [300], [300, 600], [300, 600, 600]):
            with pytest.raises(errors.InternalError, match="did not answer within 50 ms"):
                await mine.clean(None, job(50))  # type: ignore[arg-type]
            assert mine.pid is None
            assert clock.waits == waits

    run(story)


def test_a_process_that_died_is_replaced_after_a_back_off() -> None:
    async def story(clock: StoppedClock) -> None:
        mine = child(clock, "import sys\nsys.stdin.readline()\nsys.exit(3)")
        for waits in ([], [300]):
            with pytest.raises(errors.InternalError, match="died"):
                await mine.clean(None, job())  # type: ignore[arg-type]
            assert clock.waits == waits
            assert mine.pid is None

    run(story)


def test_an_error_of_the_process_keeps_its_details() -> None:
    """The broker surveys the log at the offset of the damage (rule L9)."""
    code = errors.CorruptLog.code
    told = f'{{"failed": {code}, "message": "bad", "details": {{"offset": "7"}}}}'

    async def story(clock: StoppedClock) -> None:
        mine = child(clock, ANSWERS(told))
        for _ in range(2):
            with pytest.raises(errors.CorruptLog, match="bad") as found:
                await mine.clean(None, job())  # type: ignore[arg-type]
            assert found.value.details == {"offset": "7"}
        assert mine.pid is not None
        assert not clock.waits
        await mine.close()

    run(story)


def test_a_job_that_comes_as_the_idle_process_is_killed_gets_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The idle time is a multiple of the default back-off of the cleaner, so this is common."""
    monkeypatch.setattr(cleaner_child, "IDLE_S", 0)
    told = f'{{"failed": {errors.CorruptLog.code}, "message": "bad"}}'

    async def story(clock: StoppedClock) -> None:
        mine = child(clock, ANSWERS(told))
        for _ in range(3):
            with pytest.raises(errors.CorruptLog, match="bad"):
                await mine.clean(None, job())  # type: ignore[arg-type]
            for _ in range(3):  # the timer fires; the end of the process is not noticed yet
                await asyncio.sleep(0)
            assert mine.pid is None
        assert not clock.waits
        await mine.close()

    run(story)


def test_the_real_process_leaves_the_cpu_to_others_and_so_does_its_session() -> None:
    """Niceness counts within a session, and the process has one of its own."""

    async def story(clock: StoppedClock) -> None:
        mine = CleanerChild(clock)
        with pytest.raises(FileNotFoundError):
            await mine.clean(None, job())  # type: ignore[arg-type]
        assert mine.pid is not None
        assert os.getpriority(os.PRIO_PROCESS, mine.pid) == NICENESS
        group = Path(f"/proc/{mine.pid}/autogroup")
        if group.exists():
            assert group.read_text().split()[-1] == str(NICENESS)
        await mine.close()

    run(story)


def test_a_process_whose_broker_died_during_a_job_ends_without_a_word() -> None:
    """The input of this process is still open: so it ends by the answer that cannot be written."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pk.compaction.cleaner_process"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write(b"no job\n")
    process.stdin.flush()
    assert process.wait(60) == 0
    assert process.stderr.read() == b""
    process.stdin.close()
    process.stderr.close()
