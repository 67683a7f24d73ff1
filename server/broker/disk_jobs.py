"""Jobs of the scheduler that need a disk or a store.

World-generic.  One job of a kind runs at a time for each directory.  Work that becomes due during a
job waits for the next one.

Invariants
  J1  No caller waits for a job.  A directory whose disk hangs delays its own jobs only.
  J2  A job that fails affects no other job: errors of pk are counted, other exceptions reported.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from pk import errors
from pk.log.storage import Disk
from pk.server.replica.context import Environment
from pk.tasks import TaskRegistry


class DiskJobs:
    """The jobs of one broker, by kind of work and directory."""

    def __init__(self, env: Environment) -> None:
        self._env = env
        self._jobs = TaskRegistry()

    def beside(self, what: str, disk: Disk, work: Callable[[], Awaitable[None]]) -> None:
        """Start a job, unless the previous job of its kind still runs in that directory."""
        job = (what, disk)
        if job not in self._jobs:
            self._jobs.spawn(self.guarded(what, work()), job)

    async def guarded(self, what: str, work: Awaitable[None]) -> None:
        """Await `work`; count errors of pk as refusals and report other exceptions as bugs (J2)."""
        try:
            await work
        except errors.PkError as error:
            self._env.metrics.refused(error)
        except Exception as bug:
            self._env.bug(what, bug)

    async def close(self) -> None:
        await self._jobs.close()
