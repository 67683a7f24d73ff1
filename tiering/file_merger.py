"""Merges small files of the partitions that this tier process copies, without Spark.

World-generic.  At every interval it looks at each topic once, and makes at most one commit of a
topic, so commits an hour are bounded.  A merge reads whole files, builds one file with the same
rows in memory, puts it into the store, and hands it over to the owner (tiering/plan), which commits
it exactly.  merge_plan.py chooses the files.

Invariants
  M1  Nothing is merged while a maintenance job holds the lease of the table (C5), while a file of
      the table is known as damaged, or while rows are missing (T17).
  M2  A failure changes nothing: the next interval plans again on the newest version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

from pk import errors
from pk.tiering import convert, footers, merge_plan, row_groups, uploads
from pk.tiering.data_files import DataFile
from pk.tiering.footers import UnreadableFile
from pk.tiering.layout import parse_data_path
from pk.tiering.merge_plan import SmallFileRun
from pk.tiering.objects import Executor, ObjectStore
from pk.tiering.output_buffer import OutputBuffer
from pk.tiering.table import Snapshot
from pk.tiering.topic_tier import LedPartition, TopicTier
from pk.wire import pk_pb2 as wire
from pk.world import World

#: Maximum number of runs that a commit merges.
RUNS_MAX = 16


class TopicTiers(Protocol):
    """The tier worker, as the merger needs it."""

    @property
    def topics(self) -> Mapping[str, TopicTier]: ...

    async def commit_to_table(
        self, request: wire.CommitToTableRequest
    ) -> wire.CommitToTableReply: ...


class FileMerger:
    """Merges small files of all topics at an interval."""

    def __init__(
        self,
        world: World,
        store: ObjectStore,
        compute: Executor,
        worker: TopicTiers,
        interval_ms: int,
        on_bug: Callable[[str, BaseException], None],
    ) -> None:
        self._world = world
        self._store = store
        self._compute = compute
        self._worker = worker
        self._interval_ms = interval_ms
        self._on_bug = on_bug
        self.run_files = merge_plan.RUN_FILES  #: fewer in the simulator
        self.merged_files = 0
        self.merged_bytes = 0

    async def run(self) -> None:
        """Merges at every interval until it is cancelled."""
        while True:
            await self._world.clock.sleep_ms(self._interval_ms)
            for topic in list(self._worker.topics.values()):
                try:
                    await self.merge(topic)
                except errors.PkError:
                    continue  # M2
                except Exception as bug:
                    self._on_bug("the file merger", bug)

    async def merge(self, topic: TopicTier) -> int:
        """Merges the next runs of a topic in one commit; returns how many files were replaced."""
        snapshot = topic.owner.snapshot
        if snapshot is None or topic.owner.problem is not None or topic.owner.leased:
            return 0
        if len(topic.damaged) or topic.missing:
            return 0  # M1
        change = wire.CommitToTableRequest(
            topic_id=topic.topic_id, topic=topic.topic, version_read=snapshot.version
        )
        for run, led in self._runs(topic, snapshot):
            change.adds.append(await self._merged(topic, run))
            for file in run.files:
                name = parse_data_path(file.path)
                assert name is not None
                change.removes.add(
                    path=file.path,
                    partition=run.partition,
                    rows=file.rows,
                    row_sum=name.row_sum,
                )
            change.counters.add(partition=run.partition, claim=led.description.leader_epoch)
        if not change.adds or topic.owner.leased:
            return 0
        await self._worker.commit_to_table(change)
        self.merged_files += len(change.removes)
        self.merged_bytes += sum(add.size for add in change.adds)
        return len(change.removes)

    def _runs(
        self, topic: TopicTier, snapshot: Snapshot
    ) -> list[tuple[SmallFileRun, LedPartition]]:
        found: list[tuple[SmallFileRun, LedPartition]] = []
        for partition, led in sorted(topic.led.items()):
            configs = led.description.configs
            if len(found) >= RUNS_MAX or "compact" in configs["cleanup_policy"]:
                continue
            sizes = int(configs["tier_small_file_bytes"]), int(configs["tier_file_bytes"])
            run = merge_plan.plan(snapshot, partition, *sizes, self.run_files)
            if run is not None:
                found.append((run, led))
        return found

    async def _merged(self, topic: TopicTier, run: SmallFileRun) -> wire.AddFile:
        """Builds the file of a run and puts it into the store.  Raises `DamagedTierFile`."""
        size = sum(file.size for file in run.files)
        builder = convert.FileBuilder(buffer=OutputBuffer(4 * size + (4 << 20)))
        for file in run.files:
            data = await self._read(topic, file)
            await self._compute(functools.partial(_add_rows, builder, file, data))
        built = await self._compute(builder.finish)
        assert built is not None
        attempt = merge_plan.attempt_of(run.generation, self._world.new_id().replace("-", ""))
        add = uploads.named(
            uploads.Copied(run.end, run.epoch, built),
            run.partition,
            run.start,
            run.epoch,
            attempt,
            self._world.clock.wall_ms(),
        )
        await self._store.put(f"{topic.home}/{add.path}", built.data)
        return add

    async def _read(self, topic: TopicTier, file: DataFile) -> bytes:
        try:
            return await self._store.get_range(f"{topic.home}/{file.path}", 0, file.size)
        except FileNotFoundError as cause:
            raise errors.TierUnavailable(f"{file.path} is not in the store: plan again") from cause


def _add_rows(builder: convert.FileBuilder, file: DataFile, data: bytes) -> None:
    """Adds the rows of a whole file, in offset order.  Raises `TierUnavailable` if it is
    damaged."""
    try:
        footer = footers.open_footer(file, data)
        for group in footer.groups:
            part = data[group.start : group.start + group.size]
            builder.add(row_groups.read_group(footer, group, part, file.size))
    except UnreadableFile as cause:
        raise errors.TierUnavailable(f"{file.path}: {cause}") from cause
