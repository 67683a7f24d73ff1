"""The readers of a simulated run: consumers of all topics, and the last reader of everything.

Every row passes through a `ReaderCheck`.  An error, or a reported loss, that the faults of the run
cannot explain is a violation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from pk import errors
from pk.client.fetch_engine import FetchEngine
from pk.client.fetcher_events import Consumed, Seek
from pk.client.offsets import EARLIEST
from pk.client.options import consumer_options
from pk.sim.checkers import ReaderCheck, ReadRow, Violation
from pk.sim.disk import NO_DESCRIPTOR, NO_ROOM
from pk.sim.options import TopicPlan
from pk.sim.oracle import Oracle, digest_of, id_of
from pk.sim.workload import DAMAGE, RETRIES, OnTrouble, cluster_of, watched
from pk.types import TopicPartition
from pk.world import World

DRAIN_MS = 20

#: Errors that a consumer may get while nodes die and topics are deleted and created.
_EXPLAINED = (
    errors.RetriableError,
    errors.TopicRecreated,
    errors.UnknownTopicId,
)

#: Errors that the last reader may get: it can be the first to read a damaged batch.
_ANOTHER_WILL_LEAD = (errors.RetriableError, *DAMAGE)


class ReportedDamage(NamedTuple):
    """A batch that a reader could not read, or a range that the broker reported as lost."""

    place: TopicPartition
    error: errors.PkError
    position: int


def rows_of(batch: pa.RecordBatch) -> list[ReadRow]:
    """Return offset, identity and checksum of each row."""
    columns = [batch.column(name).to_pylist() for name in ("offset", "key", "value", "headers")]
    found = []
    for offset, key, value, headers in zip(*columns, strict=True):
        pairs = [(each["key"], each["value"]) for each in headers or ()]
        found.append(ReadRow(offset, id_of(value), digest_of(key, value, pairs)))
    return found


def taken(
    engine: FetchEngine, *, insist: bool = False
) -> tuple[list[tuple[TopicPartition, pa.RecordBatch]], list[ReportedDamage]]:
    """Return the decoded batches that are ready, and the damaged ranges.

    As in the consumer of `pk.client`, the reader never skips a batch that it cannot read: it seeks
    back to the batch and fetches again.  It goes on behind a range that the broker reports as lost
    (rule L9), except with `insist`.
    """
    found: list[tuple[TopicPartition, pa.RecordBatch]] = []
    refused: list[ReportedDamage] = []
    while engine.ready:
        fetched = engine.ready.popleft()
        if engine.fetcher.position_id(fetched.place) == fetched.position_id:
            position = fetched.position
            try:
                for following, rows in engine.decoded(fetched):
                    position = following
                    if rows is not None:
                        found.append((fetched.place, rows))
            except (errors.CorruptBatch, errors.InvalidRecord) as damage:
                refused.append(ReportedDamage(fetched.place, damage, position))
                engine.step(Seek(fetched.place, position))
            except errors.DataLoss as loss:
                refused.append(ReportedDamage(fetched.place, loss, position))
                behind = position if insist else int(loss.details["next_offset"])
                engine.step(Seek(fetched.place, behind))
        engine.step(Consumed(fetched.node, len(fetched.payload)))
    return found, refused


class SimConsumer:
    """A consumer of all topics; every row passes through its `ReaderCheck`."""

    def __init__(
        self,
        world: World,
        bootstrap: str,
        check: ReaderCheck,
        oracle: Oracle,
        topics: Sequence[TopicPlan],
        log_start_of: Callable[[str, int], int],
        trouble: OnTrouble,
        tell: OnTrouble,
        **given: Any,
    ) -> None:
        self.check = check
        self._tell = tell
        self._world = world
        self._oracle = oracle
        self._topics = topics
        self._log_start_of = log_start_of
        self._trouble = trouble
        settings = consumer_options(
            {
                "auto_offset_reset": "earliest",
                "fetch_max_wait_ms": 200,
                "fetch_buffer_bytes": 40_000,
                "fetch_max_bytes": 20_000,
                "max_partition_fetch_bytes": 8_000,
                **RETRIES,
                **given,
            }
        )
        self.engine = FetchEngine(world, cluster_of(world, bootstrap, check.name), settings)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.engine.subscribe([plan.name for plan in self._topics], None)
        self._task = watched(self._run(), self._trouble)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.engine.close()

    async def _run(self) -> None:
        while True:
            await self._world.clock.sleep_ms(DRAIN_MS)
            try:
                self.drain()
            except Violation as violation:
                self._trouble(str(violation))

    def drain(self) -> int:
        """Check the rows and errors that are ready; return the number of rows."""
        told = self.engine.take_error()
        if told is not None:
            self._problem(told.error, told.place)
            return 0
        found, refused = taken(self.engine)
        for place, batch in found:
            rows = rows_of(batch)
            start = self._log_start_of(place.topic, place.partition)
            self.check.took(place.topic, place.partition, rows, start)
        for damage in refused:  # only after the rows before it
            if isinstance(damage.error, errors.DataLoss):
                self._lost(*damage)
            else:
                self._problem(damage.error, damage.place)
        return sum(batch.num_rows for _, batch in found)

    def _lost(self, place: TopicPartition, error: errors.PkError, position: int) -> None:
        """Check that a reported loss is explained, and go on behind the range.

        The range is damaged in the only copy (rule L9), or another engine deleted its rows from the
        table (rule T17: the error then names a partition).
        """
        self._tell(f"{self.check.name} was told {error!r}")
        start, end = int(error.details["offset"]), int(error.details["next_offset"])
        where = f"{self.check.name} at {place}, position {position}"
        if not start <= position < end:
            self._trouble(f"V5: {where}, is told of another range: {error!r}")
        missing = "partition" in error.details
        self.check.reported("missing rows" if missing else "damaged ranges")
        explained = (
            self._oracle.may_be_missing(*place, start, end)
            if missing
            else self._oracle.may_be_lost(*place)
        )
        if not explained:
            self._trouble(f"V5: {where}, is told of a loss that nothing explains: {error!r}")
        self.check.passes(place.topic, place.partition, end)

    def _problem(self, error: errors.PkError, place: TopicPartition | None) -> None:
        self._tell(f"{self.check.name} was told {error!r}")
        if isinstance(error, (errors.CorruptBatch, *DAMAGE)):
            if place is None or not self._oracle.may_be_damaged(place.topic, place.partition):
                self._trouble(f"V5: {self.check.name} at {place}, where nothing rotted: {error!r}")
            return
        if isinstance(error, errors.DamagedTierFile):
            rotten = any(error.details["path"] in path for path in self._oracle.rotten_files)
            if not rotten:
                self._trouble(f"V5: {self.check.name}: no file of a table rotted: {error!r}")
            return
        if isinstance(error, errors.TierTableChanged):
            self.check.reported("rotten Delta logs")
            if not self._oracle.may_have_changed(error.details.get("uri", "")):
                self._trouble(f"V5: {self.check.name}: no log of a table rotted: {error!r}")
            return
        if isinstance(error, errors.LogTruncated):
            self._truncated(error)
        elif isinstance(error, errors.TopicRecreated | errors.UnknownTopicId):
            for plan in self._topics:
                if f"topic {plan.name} " in error.message:
                    self.check.forget(plan.name)
        elif not isinstance(error, _EXPLAINED) and not _out_of_resources(error):
            self._trouble(f"V5: {self.check.name} was told {error!r}")

    def _truncated(self, error: errors.LogTruncated) -> None:
        topic, partition = error.details["topic"], int(error.details["partition"])
        if not self._oracle.may_be_cut(topic, partition):
            self._trouble(f"V8: {self.check.name}: {error!r}")
        self.check.forget(topic, partition)
        place = TopicPartition(topic, partition)
        if place in self.engine.fetcher.assignment:  # otherwise the topic was deleted meanwhile
            self.engine.step(Seek(place, EARLIEST))


def _out_of_resources(error: errors.PkError) -> bool:
    """Return whether the error comes from a full disk, or from a lack of descriptors.

    A log that either of them left incomplete is offline until it can be opened again; until then it
    is a matter for an operator (replica/creation N4).  The simulated disk raises these errors only
    while the fault lasts.
    """
    lacking = NO_ROOM in error.message or NO_DESCRIPTOR in error.message
    return isinstance(error, errors.StorageFailed) and lacking


async def read_all(
    world: World,
    bootstrap: str,
    check: ReaderCheck,
    ends: dict[TopicPartition, int],
    log_start_of: Callable[[str, int], int],
) -> None:
    """Read every partition from its beginning to `ends`, through `check`.

    Every replica is in sync by now, so a range that is damaged in one replica is whole in another
    one, which will become leader.  Therefore this reader skips nothing.
    """
    settings = consumer_options({"auto_offset_reset": "earliest", **RETRIES})
    engine = FetchEngine(world, cluster_of(world, bootstrap, check.name), settings)
    engine.assign(ends)
    try:
        while True:
            told = engine.take_error()
            if told is not None and not isinstance(told.error, _ANOTHER_WILL_LEAD):
                raise told.error
            for place, batch in taken(engine, insist=True)[0]:
                start = log_start_of(place.topic, place.partition)
                check.took(place.topic, place.partition, rows_of(batch), start)
            if all((engine.fetcher.frontier(place) or 0) >= end for place, end in ends.items()):
                return
            await world.clock.sleep_ms(DRAIN_MS)
    finally:
        await engine.close()
