"""What does a far object store cost?  pk is compared with itself: a store behind a round trip of
30 ms, and the same store without it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from bench import runs
from bench.far_store import ACCESS_KEY, BUCKET, SECRET_KEY, FarStore
from bench.pk_side import SETTINGS, PkSide
from bench.plans import Base
from bench.runs import RunFailed, Sample

#: The local log keeps its open segment only, so nearly all records are in the tier only.
_COLD = {
    "tier_max_lag_ms": "100",
    "segment_bytes": "4194304",
    "local_drop_delay_ms": "0",
    "local_retention_bytes": "1",
}
_HOT = {"tier_max_lag_ms": "100", "tier_enable": "false"}
#: Smaller than what a round reads, so that no round finds the rows of the one before it.
_CACHE_BYTES = 96 * 1024 * 1024
_DROP_TIMEOUT_S = 300.0
_LOCAL_SHARE = 0.1
#: An uploaded backlog has so many times the records: the rate is measured, not the first commit.
_BACKLOG = 3
#: The tier keeps memory for a reader until it has not asked for 10 s (design 0027).
_READER_GONE_S = 11.0


class FarSide(PkSide):
    """One pk node whose tier is on an S3 server behind a proxy."""

    def __init__(self) -> None:
        super().__init__(tiered=True)
        self.name = "pk with a far tier"
        self.description = (
            "pk, one node with a tier on an S3 server (versitygw) behind a proxy, a read cache of "
            "96 MiB, else default settings, its Python client"
        )
        self.store: FarStore | None = None

    def start(self, folder: Path) -> None:
        from pk.cli.embedded import ReservedPorts

        self._ports = ReservedPorts()
        self.store = FarStore(folder, self._ports.draw(), self._ports.draw())
        super().start(folder)

    def stop(self) -> None:
        super().stop()
        if self.store is not None:
            self.store.close()
            self.store = None

    def pids(self) -> list[int]:
        return [*super().pids(), *(self.store.pids if self.store is not None else [])]

    def _tier(self) -> tuple[str, dict[str, Any]]:
        assert self.store is not None
        return f"s3://{BUCKET}/tier", {
            **SETTINGS,
            "tier_endpoint_url": self.store.endpoint,
            "tier_access_key_id": ACCESS_KEY,
            "tier_secret_access_key": SECRET_KEY,
            "cold_cache_bytes": _CACHE_BYTES,
        }


class ColdDistance(Base):
    """A mode is the round trip in ms; variants read a number of partitions, or upload."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._topic = ""
        self._partitions = 4 if self.variant.name == "upload" else int(self.variant.name[0])

    def side(self, role: str) -> FarSide:
        return self.bench.party("far", FarSide)

    def prepare(self) -> None:
        """Fill a topic and wait until the local logs have dropped what the tier has."""
        if self.variant.name == "upload":
            return
        self._topic = self._filled(_COLD)
        side, records = self.side("pk"), self.counts["pk"]
        side.await_tiered(self._topic)
        deadline = time.monotonic() + _DROP_TIMEOUT_S
        while sum(ends := side.local_starts(self._topic)) < (1 - _LOCAL_SHARE) * records:
            if time.monotonic() > deadline:
                raise RunFailed(f"the local logs of {self._topic} begin at {ends}")
            time.sleep(0.5)

    def _filled(self, configs: dict[str, str], times: int = 1) -> str:
        side, bench = self.side("pk"), self.bench
        bench.wake(side)
        topic = bench.fresh("far")
        side.create_topic(topic, partitions=self._partitions, configs=configs)
        for _ in range(times):
            side.produce(topic, bench.values, self.counts["pk"], "none", "lists")
        return topic

    def round(self, role: str, mode: str) -> Sample:
        side = self.side(role)
        assert side.store is not None
        if self.variant.name != "upload":
            time.sleep(_READER_GONE_S)
        side.store.delay(float(mode))
        try:
            if self.variant.name == "upload":
                return self._upload(side)
            return side.consume(self._topic, self.counts["pk"], "batches", self._partitions)
        finally:
            side.store.delay(0)

    def _upload(self, side: FarSide) -> Sample:
        """Time how long a backlog takes until the table has it."""
        topic = self._filled(_HOT, _BACKLOG)
        try:
            begin = time.monotonic()
            side.alter_topic(topic, {"tier_enable": "true"})
            side.await_tiered(topic)
            return runs.bare(_BACKLOG * self.counts["pk"] / (time.monotonic() - begin))
        finally:
            side.delete_topic(topic)

    def close(self) -> None:
        if self._topic:
            self.side("pk").delete_topic(self._topic)
