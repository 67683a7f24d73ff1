"""Do cold readers slow producers down?  pk is compared with itself: 128 readers of the tier beside
a producer, and 16.
"""

from __future__ import annotations

import time
from typing import Any

from bench import cold_client, runs
from bench.plans import Base
from bench.runs import RunFailed, Sample
from bench.sides import PARTITIONS, Side

#: The local log keeps its open segment only.
_CONFIGS = {
    "tier_max_lag_ms": "1000",
    "segment_bytes": "4194304",
    "local_retention_bytes": "1",
}
_DROP_TIMEOUT_S = 300.0
#: Less than this share of the records may still be in the local logs.
_LOCAL_SHARE = 0.2
_SECONDS = 15.0


class ColdIsolation(Base):
    """A mode is the number of readers."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._cold = ""
        self._ends: list[int] = []

    def side(self, role: str) -> Side:
        return self.bench.tiered

    def prepare(self) -> None:
        """Fill a topic and wait until the local logs have dropped what the tier has."""
        side, bench = self.bench.tiered, self.bench
        bench.wake(side)
        self._cold = bench.fresh("cold")
        side.create_topic(self._cold, configs=_CONFIGS)
        records = self.counts["pk"]
        side.produce(self._cold, bench.values, records, "none", "lists")
        side.tier(self._cold)
        deadline = time.monotonic() + _DROP_TIMEOUT_S
        while sum(self._ends) < (1 - _LOCAL_SHARE) * records:
            if time.monotonic() > deadline:
                raise RunFailed(f"the local logs of {self._cold} begin at {self._ends}")
            time.sleep(0.5)
            self._ends = side.local_starts(self._cold)

    def round(self, role: str, mode: str) -> Sample:
        side, hot = self.bench.tiered, self.bench.fresh("hot")
        side.create_topic(hot, partitions=1)
        try:
            command = cold_client.command(
                side.address, self._cold, hot, int(mode), self._ends[:PARTITIONS], _SECONDS
            )
            return runs.watch(command, runs.read_line, side.pids())
        finally:
            side.delete_topic(hot)

    def close(self) -> None:
        if self._cold:
            self.bench.tiered.delete_topic(self._cold)
