"""The broker's side of the cleaner process: starts it, sends jobs, reads results.

The process starts with the first job and ends after IDLE_S without one, because it holds some
tens of megabytes and most brokers clean rarely.  It is killed if the broker closes during a job,
and if a job takes longer than its time limit: its result would be discarded.  After a process that
died or was killed, the next one starts after a back-off.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from pk import errors
from pk.backoff import Backoff
from pk.clock import Clock
from pk.compaction import cleaning_job
from pk.compaction.cleaning_job import CleaningJob, CleaningResult
from pk.log.storage import Disk
from pk.tasks import TaskRegistry

IDLE_S = 60.0
#: How long the broker waits for the end of a killed process; a disk that hangs delays it.
KILLED_S = 5.0
#: The waits before a process starts, after processes that died or were killed.
BACKOFF_MS = (1_000, 60_000)
#: The longest line of the process; the result names every segment of a log.
LINE_BYTES_MAX = 64 * 1024 * 1024
COMMAND = (sys.executable, "-m", "pk.compaction.cleaner_process")


class CleanerChild:
    """Runs cleanings in a process of their own, one at a time."""

    least_ms = cleaning_job.CLEANING_MS

    def __init__(
        self,
        clock: Clock,
        command: Sequence[str] = COMMAND,
        backoff_ms: tuple[int, int] = BACKOFF_MS,
    ) -> None:
        self._clock = clock
        self._command = command
        self._backoff = Backoff(backoff_ms)
        self._not_before_ms = 0.0  #: when the next process may start
        self._process: asyncio.subprocess.Process | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._endings = TaskRegistry()  #: of processes that were idle

    @property
    def pid(self) -> int | None:
        """The process id; None = no process runs."""
        return None if self._process is None else self._process.pid

    async def clean(self, disk: Disk, job: CleaningJob) -> CleaningResult:
        """Do one job.  Raises what the process raised, and `InternalError` if it died, or did not
        answer within the time limit of the job.
        """
        if self._idle is not None:
            self._idle.cancel()
        if self._process is None or self._process.returncode is not None:
            self._process = await self._start()
        try:
            async with asyncio.timeout(job.time_limit_ms / 1000):
                found = json.loads(await self._exchange(self._process, job))
        except BaseException as cause:
            await self._failed()
            if isinstance(cause, TimeoutError):
                raise errors.InternalError(
                    f"the cleaner process did not answer within {job.time_limit_ms} ms"
                ) from cause
            if isinstance(cause, OSError | ValueError):
                raise errors.InternalError(f"the cleaner process died: {cause}") from cause
            raise
        self._backoff.reset()
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end_idle)
        return _result(found)

    @staticmethod
    async def _exchange(process: asyncio.subprocess.Process, job: CleaningJob) -> bytes:
        """Send a job and return the line that answers it.  Raises `OSError` if the process died."""
        assert process.stdin is not None
        assert process.stdout is not None
        line = await asyncio.to_thread(cleaning_job.job_to_json, job)  # of up to some megabytes
        process.stdin.write(line.encode() + b"\n")
        await process.stdin.drain()
        answer = await process.stdout.readline()
        if not answer:
            raise ConnectionError(f"exit code {await process.wait()}")
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        wait_ms = self._not_before_ms - self._clock.monotonic_ms()
        if wait_ms > 0:
            await self._clock.sleep_ms(wait_ms)
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            start_new_session=True,
        )

    async def _failed(self) -> None:
        """Kill the process; the next one starts after a back-off."""
        self._not_before_ms = self._clock.monotonic_ms() + self._backoff.next_ms()
        await self.close()

    def _end_idle(self) -> None:
        """Kill a process without a job, and forget it: a job that comes now gets another one.

        A killed process looks alive until its end has been noticed.
        """
        self._kill()
        process, self._process = self._process, None
        self._endings.spawn(_ended(process))

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """End the process."""
        if self._idle is not None:
            self._idle.cancel()
        self._kill()
        process, self._process = self._process, None
        await _ended(process)
        await self._endings.wait()


async def _ended(process: asyncio.subprocess.Process | None) -> None:
    """Wait for the end of a killed process."""
    if process is not None:
        with contextlib.suppress(TimeoutError):  # it ends once its disk answers
            async with asyncio.timeout(KILLED_S):
                await process.wait()


def _result(found: dict[str, Any]) -> CleaningResult:
    if "missing" in found:
        raise FileNotFoundError(found["missing"])
    if "failed" in found:
        details = {str(name): str(value) for name, value in found.get("details", {}).items()}
        raise errors.from_wire(int(found["failed"]), str(found["message"]), details)
    return cleaning_job.result_from_json(found)
