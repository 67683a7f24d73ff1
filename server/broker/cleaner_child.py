"""The broker's side of the cleaner process: starts it, sends jobs, reads results.

The process starts with the first job and ends after IDLE_S without one, because it holds some
tens of megabytes and most brokers clean rarely.  It is killed if the broker closes during a job.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import Any

from pk import errors
from pk.compaction import cleaning_job
from pk.compaction.cleaning_job import CleaningJob, CleaningResult
from pk.log.storage import Disk

IDLE_S = 60.0
#: The longest line of the process; the result names every segment of a log.
LINE_BYTES_MAX = 64 * 1024 * 1024


class CleanerChild:
    """Runs cleanings in a process of their own, one at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._idle: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None = no process runs."""
        return None if self._process is None else self._process.pid

    async def clean(self, disk: Disk, job: CleaningJob) -> CleaningResult:
        """Do one job.  Raises what the process raised, and `InternalError` if it died."""
        if self._idle is not None:
            self._idle.cancel()
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(cleaning_job.job_to_json(job).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
        except BaseException as cause:
            await self.close()
            if isinstance(cause, OSError | ValueError):
                raise errors.InternalError(f"the cleaner process died: {cause}") from cause
            raise
        if not line:
            code = await process.wait()
            self._process = None
            raise errors.InternalError(f"the cleaner process died with exit code {code}")
        self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._kill)
        return _result(json.loads(line))

    @staticmethod
    async def _start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pk.compaction.cleaner_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=LINE_BYTES_MAX,
            start_new_session=True,
        )

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
        if process is not None:
            await process.wait()


def _result(found: dict[str, Any]) -> CleaningResult:
    if "missing" in found:
        raise FileNotFoundError(found["missing"])
    if "failed" in found:
        raise errors.from_wire(int(found["failed"]), str(found["message"]))
    return cleaning_job.result_from_json(found)
