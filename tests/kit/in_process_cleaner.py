"""A cleaner that works in the process of the test, on the broker's simulated disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from pk.compaction import local_cleaner
from pk.compaction.cleaning_job import CLEANING_MS, CleaningJob, CleaningResult
from pk.log.storage import Disk
from tests.kit.cleaned_log import HASH


class InProcessCleaner:
    """Cleans in the process of the test; `before` runs before the cleaning, `meanwhile` before the
    result is returned.
    """

    least_ms = CLEANING_MS

    def __init__(self) -> None:
        self.jobs: list[CleaningJob] = []
        self.before: Callable[[], Awaitable[None]] | None = None
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        self.error: Exception | None = None

    async def clean(self, disk: Disk, job: CleaningJob) -> CleaningResult:
        self.jobs.append(job)
        if self.before is not None:
            await self.before()
        result = await disk.compute(partial(local_cleaner.clean, disk.storage, job, HASH))
        if self.meanwhile is not None:
            await self.meanwhile()
        if self.error is not None:
            raise self.error
        return result

    async def close(self) -> None:
        """Nothing to end."""
