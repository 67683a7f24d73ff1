"""The cleaner of a simulated broker: the production code of a cleaning, in the simulated world.

A cleaning takes a drawn time, and its result may come too late.  Faults hit the machine when a
cleaning begins, or when its files are about to be put in place (compaction_faults.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

from pk.clock import Clock
from pk.compaction import local_cleaner
from pk.compaction.cleaning_job import CleaningJob, CleaningResult
from pk.compaction.offset_map import key_hasher
from pk.log.storage import Disk

#: How long a cleaning works before and after it writes its files; drawn log-uniformly.
WORK_MS = (1.0, 200.0)
#: Called with the path of the log that is cleaned.
CleaningTrap = Callable[[str], None]


class SimCleaner:
    """Cleans the logs of one broker; `begun` and `written` are called in each cleaning."""

    #: So short that tombstones age within a run: their horizons count from the time limit.
    least_ms = 300

    def __init__(
        self, clock: Clock, rng: random.Random, begun: CleaningTrap, written: CleaningTrap
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._begun = begun
        self._written = written
        self._hash_keys = key_hasher(bytes(range(32)))

    async def clean(self, disk: Disk, job: CleaningJob) -> CleaningResult:
        """Do one job; see `broker/cleaning.Cleaner`."""
        self._begun(job.path)
        await self._work()
        clean = partial(local_cleaner.clean, disk.storage, job, self._hash_keys)
        result = await disk.compute(clean)
        await self._work()
        self._written(job.path)
        return result

    async def _work(self) -> None:
        low, high = map(math.log, WORK_MS)
        await self._clock.sleep_ms(math.exp(self._rng.uniform(low, high)))

    async def close(self) -> None:
        """Nothing to end."""
