"""Runs the tier's machines (owners, copiers, cold reads) over a World, real or simulated.

One `TopicTier` per topic holds the table's owner and a copier for each partition led on this node.
Each effect becomes a task: a store call, a table call or a message.  The task's result is the
machine's next event.

Invariants
  E1  Machines are stepped only on the event loop, one event at a time; effects are performed in
      order.
  E2  Uploads and cold reads run in separate executors; at most UPLOADS_MAX uploads run at once.
  E3  A failure of the store reaches the machines as an event, never as an exception outside this
      module.  Other topics' tiers and the broker go on.
  E4  Reports to the broker are coalesced per partition: the outbox is bounded by the number of
      partitions.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pk import errors
from pk.effects import Effect, Publish, Respond, Send, SetTimer
from pk.log.storage import Storage
from pk.machine_timers import MachineTimers
from pk.tasks import TaskRegistry
from pk.tiering import accounting, layout, refill, rewrites, uploads
from pk.tiering import copier as copying
from pk.tiering import owner_events as owning
from pk.tiering.copier import Copier
from pk.tiering.data_files import DataFile
from pk.tiering.file_checker import FileChecker
from pk.tiering.objects import Executor, ObjectStore, remove_all
from pk.tiering.output_buffer import OutputBuffer
from pk.tiering.owner import Owner, OwnerSettings
from pk.tiering.partition_views import (
    aborted_of,
    log_start_of,
    partition_directory_of,
    stable_limit,
    view_of,
)
from pk.tiering.plan import LogStart
from pk.tiering.reader import FetchedBatches, TablePartition, TierReader, TimeFound, never
from pk.tiering.row_sums import row_sums
from pk.tiering.table import Commit, MayDelete, Snapshot, TableFactory, always
from pk.tiering.topic_tier import Counts, LedPartition, TopicTier, answer
from pk.types import NONE, Epoch, Offset, PartitionKey
from pk.wire import pk_pb2 as wire
from pk.world import World

UPLOADS_MAX = 3  #: shell.py builds two files at a time while a third one is uploaded
#: Maximum number of files checked per report of a reader.
SUSPECTS_MAX = 16
#: Maximum number of topics that are only read here (no partition is led); the least recently used
#: is forgotten.
IDLE_TOPICS_MAX = 256
#: How long a reader waits for a look; then it reads from the version that is known.
LOOK_WAIT_MS = 2_000

#: Finds a partition's live segments: the path that a broker names → a storage and a path in it.
StorageViews = Callable[[str], tuple[Storage, str]]


@dataclass(slots=True, frozen=True)
class Executors:
    """Executors for blocking work; cold reads and uploads never share one (E2)."""

    read: Executor
    upload: Executor


class TierWorker:
    """The tier of all topics of one tier process."""

    def __init__(
        self,
        world: World,
        store: ObjectStore,
        tables: TableFactory,
        views: StorageViews,
        executors: Executors,
        *,
        cold_bytes: tuple[int, int],  #: of the read cache; its part for read-ahead
        owner_settings: OwnerSettings,
        on_report: Callable[[], None],
        on_bug: Callable[[str, BaseException], None],
        on_rows_missing: Callable[[TopicTier], None] = lambda topic: None,
        clock_trusted: MayDelete = always,
    ) -> None:
        self.world = world
        self.store = store
        self.tables = tables
        self.topics: dict[str, TopicTier] = {}
        self.outbox: dict[PartitionKey, wire.TierProgress] = {}
        self.counts = Counts()
        self.reader = TierReader(store, executors.read, world.clock, *cold_bytes)
        self._views = views
        self._executors = executors
        self.owner_settings = owner_settings
        self.lands_within_ms = rewrites.LANDS_WITHIN_MS
        self._on_report = on_report
        self._on_bug = on_bug
        self._on_rows_missing = on_rows_missing
        self._clock_trusted = clock_trusted
        self._tasks = TaskRegistry(functools.partial(on_bug, "tier"))
        self._watch = FileChecker(
            store, self.reader, world.clock, self._place, self._damage_changed, self._tasks
        )
        self._uploading = asyncio.Semaphore(UPLOADS_MAX)
        self._buffers: list[OutputBuffer] = []  #: idle ones, at most UPLOADS_MAX
        self._timers = MachineTimers(world.clock)
        self._closed = False
        self._clock_doubted = True  #: L10: True until the broker says that it trusts its clock

    def _now_ms(self) -> int:
        return self.world.clock.monotonic_ms()

    # -- what the broker says ----------------------------------------------------------------------

    def partitions(self, reply: wire.TierPartitionsReply) -> None:
        """Takes the changed partitions of one long poll; `full` = all partitions are listed."""
        self._clock_doubted = reply.clock_doubted
        named: dict[PartitionKey, None] = {}
        changed: dict[str, list[wire.TierPartition]] = {}
        for told in reply.partitions:
            key = PartitionKey(told.topic_id, told.partition)
            if told.gone:
                self._forget(key)
                continue
            named[key] = None
            changed.setdefault(told.topic_id, []).append(told)
        if reply.full:
            for topic in list(self.topics.values()):
                for partition in list(topic.led):
                    if PartitionKey(topic.topic_id, partition) not in named:
                        self._forget(PartitionKey(topic.topic_id, partition))
        for topic_id, partitions in changed.items():
            topic = self.topic(topic_id, partitions[0].topic)
            self._view_all(topic, partitions, session_lost=reply.full)

    def out_of_contact(self) -> None:
        """Notes that the broker does not answer: its last statement about its clock may be outdated
        (rule L10)."""
        self._clock_doubted = True

    def _view_all(
        self, topic: TopicTier, partitions: Sequence[wire.TierPartition], *, session_lost: bool
    ) -> None:
        starts: dict[int, LogStart] = {}
        for told in partitions:
            led = topic.led.get(told.partition)
            if led is None:
                led = LedPartition(Copier(topic.topic, topic.topic_id, told.partition), told)
                topic.led[told.partition] = led
                self._show_table(topic, led)
            led.description, view = told, view_of(told, self.owner_settings.retry_backoff_ms)
            starts[told.partition] = log_start_of(told)
            if session_lost:
                self._step_copier(topic, led, copying.SessionLost())
            self._step_copier(topic, led, copying.Viewed(view))
        seen = owning.PartitionsSeen(starts, lease_token=partitions[0].lease_token)
        self._step_owner(topic, seen)

    def _forget(self, key: PartitionKey) -> None:
        topic = self.topics.get(key.topic_id)
        if topic is None or topic.led.pop(key.partition, None) is None:
            return
        self.outbox.pop(key, None)
        self._timers.set((topic.topic_id, key.partition), None, lambda: None)
        self._step_owner(topic, owning.PartitionsSeen({}, gone=[key.partition]))

    def topic(self, topic_id: str, name: str) -> TopicTier:
        """Returns the topic's entry, made on first use."""
        known = self.topics.get(topic_id)
        if known is not None:
            return known
        idle = [each for each in self.topics.values() if not each.led]
        if len(idle) >= IDLE_TOPICS_MAX:
            self._drop_topic(idle[0].topic_id)
        table = self.tables.table(name, topic_id)
        made = TopicTier(
            topic=name,
            topic_id=topic_id,
            home=layout.table_path(name, topic_id),
            table=table,
            owner=Owner(name, topic_id, table.uri, self.owner_settings),
        )
        self.topics[topic_id] = made
        return made

    def _drop_topic(self, topic_id: str) -> None:
        topic = self.topics.pop(topic_id, None)
        if topic is None:
            return
        self._perform_owner(topic, topic.owner.step(owning.Close(), self._now_ms()))
        for partition in topic.led:
            self.outbox.pop(PartitionKey(topic_id, partition), None)
            self._timers.set((topic_id, partition), None, lambda: None)
        topic.damaged.keep(())
        topic.led.clear()  # its copiers end: answers that still arrive for them create no table
        self._timers.set((topic_id, NONE), None, lambda: None)

    # -- requests ----------------------------------------------------------------------------------

    async def commit_to_table(self, request: wire.CommitToTableRequest) -> wire.CommitToTableReply:
        """Hands a change to the topic's owner (rule T3); raises the owner's refusal."""
        now_ms = None if self._clock_doubted else self.world.clock.wall_ms()
        rewrites.check_deadline(request, now_ms, self.lands_within_ms)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        topic = self.topic(request.topic_id, request.topic)
        await self._watch.check_uploads(topic, request)
        self._step_owner(topic, owning.Submit(future, request))
        reply: wire.CommitToTableReply = await future
        return reply

    async def claim(
        self, topic_id: str, name: str, partition: int, epoch: Epoch, *, commit: bool
    ) -> wire.TierClaimReply:
        """Claims a partition (rule T4); without `commit` only loads the table's newest state."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        topic = self.topic(topic_id, name)
        self._step_owner(topic, owning.ClaimPartition(future, partition, epoch, commit))
        reply: wire.TierClaimReply = await future
        return reply

    async def look(self, topic: TopicTier) -> None:
        """Looks at a known table, unless the owner has done so less than `refresh_interval_ms` ago:
        other engines may have changed it (T17).  Waits at most LOOK_WAIT_MS."""
        if topic.owner.snapshot is None or topic.owner.is_fresh(self._now_ms()):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._step_owner(topic, owning.Look(future))
        await asyncio.wait([future], timeout=LOOK_WAIT_MS / 1000)

    async def _place(
        self,
        topic: TopicTier,
        partition: int,
        upto: Offset = 0,
        *,
        fresh: bool = False,
        known: bool = False,
    ) -> TablePartition:
        """Returns a version that reaches `upto`: the `known` one, or one that the owner has looked
        at a short time ago (`look`), or with `fresh` the newest one.

        Raises the reason if the table cannot be read (T8).  A table in a store that refuses writes
        can be read.
        """
        if not (fresh or known):
            await self.look(topic)
        if isinstance(topic.owner.problem, errors.TierTableChanged):
            raise topic.owner.problem.with_traceback(None)
        snapshot = topic.owner.snapshot
        if (
            fresh
            or snapshot is None
            or partition not in snapshot.counters
            or snapshot.partition(partition).end < upto
        ):
            await self.claim(topic.topic_id, topic.topic, partition, NONE, commit=False)
            snapshot = topic.owner.snapshot
        if snapshot is None:
            raise errors.UnknownTierRange(f"{topic.table.uri}: nothing is tiered yet")
        if (end := snapshot.partition(partition).end) < upto:
            raise errors.UnknownTierRange(
                f"{topic.table.uri}: partition {partition} ends at {end}, not at {upto}"
            )
        return TablePartition(topic.home, partition, snapshot)

    async def fetch(
        self,
        topic_id: str,
        name: str,
        partition: int,
        offset: Offset,
        end: Offset,
        max_bytes: int,
        late: Callable[[], bool] = never,
        reader: int = 0,
    ) -> FetchedBatches:
        """Serves a cold read of a client; once it is `late` it returns the rows found so far."""
        topic = self.topic(topic_id, name)
        place = await self._place(topic, partition, offset + 1)
        fetched: FetchedBatches = await self._read(
            topic, place, lambda each: self.reader.fetch(each, offset, end, max_bytes, late, reader)
        )
        self.counts.cold_fetches += 1
        self.counts.cold_bytes += sum(map(len, fetched.batches))
        return fetched

    async def offset_for_time(
        self,
        topic_id: str,
        name: str,
        partition: int,
        timestamp_ms: int,
        from_offset: Offset,
        end: Offset = 0,
        *,
        known: bool = False,
    ) -> tuple[TimeFound | None, Offset]:
        """Returns the first offset for a timestamp (T11), None only if the table reaches `end`; and
        the first offset that may be missing in that version (T17): with `known`, however old."""
        topic = self.topic(topic_id, name)
        place = await self._place(topic, partition, end, known=known)

        async def look_up(each: TablePartition) -> tuple[TimeFound | None, Offset]:
            found = await self.reader.offset_for_time(each, timestamp_ms, from_offset)
            return found, accounting.first_missing(each.snapshot, partition)

        answer: tuple[TimeFound | None, Offset] = await self._read(topic, place, look_up)
        return answer

    async def _read(
        self,
        topic: TopicTier,
        place: TablePartition,
        read: Callable[[TablePartition], Awaitable[Any]],
    ) -> Any:
        """Reads from the table; after a damaged file it plans once more on the newest version,
        which may name another file."""
        try:
            return await read(place)
        except errors.DamagedTierFile:
            place = await self._place(topic, place.partition, fresh=True)
        try:
            return await read(place)
        except errors.DamagedTierFile as error:
            self._watch.damage_found(topic, place.snapshot.files[error.details["path"]], error)
            raise

    def verify_files(self, topic: TopicTier, paths: Sequence[str]) -> None:
        """Checks files that a reader outside the broker (Spark) found damaged."""
        snapshot = topic.owner.snapshot
        if snapshot is None:
            return
        files = [snapshot.files[path] for path in paths[:SUSPECTS_MAX] if path in snapshot.files]
        mine = [file for file in files if file.partition in topic.led]
        if mine:
            self._tasks.spawn(self._watch.look_at(topic, mine))

    def _damage_changed(self, topic: TopicTier, partition: int) -> None:
        led = topic.led.get(partition)
        if led is not None:
            self._step_copier(topic, led, copying.Checked(topic.damaged.of(partition)))

    async def confirm(
        self, topic_id: str, name: str, partition: int, start: Offset, end: Offset
    ) -> list[DataFile]:
        """Returns the files covering `[start, end)` that do not answer a HEAD or are damaged (rule
        T6), and reports them to the copier."""
        topic = self.topic(topic_id, name)
        missing = await self._watch.missing(topic, partition, start, end)
        self._damage_changed(topic, partition)
        return [each.file for each in missing]

    async def rows_missing(self, request: wire.TierRowsRequest) -> wire.TierRowsReply:
        """Copies missing rows again or settles them (rule T17); only on the leader, which has the
        log."""
        topic = self.topic(request.topic_id, request.topic)
        led = topic.led.get(request.partition)
        if led is None:
            raise errors.NotLeaderOrFollower(f"{request.topic}-{request.partition}: not led here")
        told, place = (
            led.description,
            functools.partial(self._place, topic, led.description.partition, fresh=True),
        )

        async def copy(asked: copying.Upload) -> copying.Uploaded:
            return await self._copy(topic, told, asked, lambda event: None, again=True)

        return await refill.carry_out(self, told, request.accept, place, copy)

    async def purge(self, topic_id: str, name: str) -> tuple[str, int]:
        """Removes a deleted topic's table and snapshot (T7); returns its URI and the number of
        objects.  Raises `TierUnavailable` if any are left."""
        table = self.tables.table(name, topic_id)
        self._drop_topic(topic_id)
        paths = layout.table_path(name, topic_id), layout.snapshot_path(name, topic_id)
        removed = await remove_all(self.store, paths)
        if removed is None:
            raise errors.TierUnavailable(f"{table.uri}: objects still come into a purged table")
        return table.uri, removed

    # -- machines ----------------------------------------------------------------------------------

    def _step_owner(self, topic: TopicTier, event: owning.OwnerEvent) -> None:
        if self._closed or self.topics.get(topic.topic_id) is not topic:
            return  # the topic was purged or forgotten: its table must not be created again
        self._perform_owner(topic, topic.owner.step(event, self._now_ms()))

    def _step_copier(self, topic: TopicTier, led: LedPartition, event: copying.CopierEvent) -> None:
        if self._closed or topic.led.get(led.copier.partition) is not led:
            return  # the partition now has another leader
        self._perform_copier(topic, led, led.copier.step(event, self._now_ms()))

    def _perform_owner(self, topic: TopicTier, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message=operation):
                    self._tasks.spawn(self._on_table(topic, operation))
                case Respond(request=request, reply=reply):
                    answer(request, reply)
                case SetTimer(at_ms=at_ms):
                    wake = functools.partial(self._step_owner, topic, owning.Wake())
                    self._timers.set((topic.topic_id, NONE), at_ms, wake)
                case Publish(name=owning.SNAPSHOT, value=snapshot):
                    self.reader.keep_files(topic.home, snapshot.files)
                    for partition in topic.damaged.keep(snapshot.files):
                        self._damage_changed(topic, partition)
                    for led in list(topic.led.values()):
                        self._show_table(topic, led)
                    self._count_missing(topic, snapshot)
                case Publish(value=problem):
                    for led in list(topic.led.values()):
                        self._step_copier(topic, led, copying.TableProblem(problem))
                case _:
                    raise AssertionError(effect)

    def _count_missing(self, topic: TopicTier, snapshot: Snapshot) -> None:
        now = accounting.missing_of(snapshot, topic.led)  # T17: logged once for each change
        if now != topic.missing:
            topic.missing = now
            self._on_rows_missing(topic)

    def _show_table(self, topic: TopicTier, led: LedPartition) -> None:
        partition = led.copier.partition
        snapshot = topic.owner.snapshot
        if topic.owner.problem is not None:
            self._step_copier(topic, led, copying.TableProblem(topic.owner.problem))
        if snapshot is None or partition not in snapshot.counters:
            return
        counters = snapshot.partition(partition)
        seen = copying.TableSeen(
            counters.start,
            counters.end,
            snapshot.bytes_of(partition),
            snapshot.version,
            counters.epoch,
            accounting.first_missing(snapshot, partition),
        )
        self._step_copier(topic, led, seen)

    def _perform_copier(
        self, topic: TopicTier, led: LedPartition, effects: Sequence[Effect]
    ) -> None:
        for effect in effects:
            match effect:
                case Send(peer=copying.STORE, message=copying.Upload() as upload):
                    self._tasks.spawn(self._upload(topic, led, upload))
                case Send(peer=copying.STORE, message=copying.Measure() as measure):
                    self._tasks.spawn(self._measure(topic, led, measure))
                case Send(peer=copying.STORE, message=copying.Confirm() as confirm):
                    self._tasks.spawn(self._confirm(topic, led, confirm))
                case Send(peer=copying.OWNER, message=hand_over):
                    self._tasks.spawn(self._hand_over(topic, led, hand_over))
                case Send(peer=copying.BROKER, message=progress):
                    progress.uri = topic.table.uri
                    self.outbox[PartitionKey(topic.topic_id, led.copier.partition)] = progress
                    self._on_report()
                case SetTimer(key=key, at_ms=at_ms):
                    wake = functools.partial(self._step_copier, topic, led, copying.Wake())
                    self._timers.set((topic.topic_id, key), at_ms, wake)
                case _:
                    raise AssertionError(effect)

    # -- tasks -------------------------------------------------------------------------------------

    async def _on_table(self, topic: TopicTier, operation: Any) -> None:
        event: owning.OwnerEvent
        try:
            match operation:
                case owning.Load():
                    event = owning.TableLoaded(await topic.table.load(operation.partitions))
                case owning.Create():
                    event = owning.TableLoaded(await topic.table.create())
                case Commit():
                    event = owning.Committed(await topic.table.commit(operation))
                    self.counts.commits += 1
                case owning.SumRows():
                    found = functools.partial(self._watch.damage_found, topic)
                    where = topic.home, operation.snapshot, operation.files
                    event = owning.RowsSummed(await row_sums(self.reader, *where, found))
                case _ if self._clock_doubted:  # L10: the age of a removal is unknown
                    event = owning.Vacuumed(0, put_off=True)
                case _:
                    removed = await topic.table.vacuum(operation.retention_ms, self._clock_trusted)
                    self.counts.vacuumed_files += removed or 0
                    event = owning.Vacuumed(removed or 0, put_off=removed is None)
        except errors.PkError as error:
            self.counts.failed_commits += isinstance(operation, Commit)
            event = owning.Failed(error)
        except Exception as bug:
            self._on_bug("the table", bug)
            event = owning.Failed(errors.TierUnavailable(f"{topic.table.uri}: {bug!r}"))
        self._step_owner(topic, event)

    async def _guarded(
        self, topic: TopicTier, led: LedPartition, asked: Any, work: Awaitable[Any]
    ) -> None:
        """Runs `work` and returns its event; any failure becomes an event, too (E3)."""
        event: copying.CopierEvent
        try:
            event = await work
        except errors.PkError as error:
            event = copying.OperationFailed(asked, error)
        except Exception as bug:
            self._on_bug("the copier", bug)
            event = copying.OperationFailed(asked, errors.InternalError(repr(bug)))
        self._step_copier(topic, led, event)

    def _partition_directory(self, told: wire.TierPartition) -> uploads.PartitionDirectory:
        return partition_directory_of(told, *self._views(told.path))

    async def _measure(self, topic: TopicTier, led: LedPartition, asked: copying.Measure) -> None:
        async def work() -> copying.Measured:
            told = led.description
            size = await self._executors.upload(
                lambda: uploads.measure(
                    self._partition_directory(told), asked.start, asked.limit, told.log_end
                )
            )
            return copying.Measured(asked, size)

        await self._guarded(topic, led, asked, work())

    async def _upload(self, topic: TopicTier, led: LedPartition, asked: copying.Upload) -> None:
        built = functools.partial(self._step_copier, topic, led)
        await self._guarded(topic, led, asked, self._copy(topic, led.description, asked, built))

    async def _copy(
        self,
        topic: TopicTier,
        told: wire.TierPartition,
        asked: copying.Upload,
        on_built: Callable[[copying.Built], None],
        again: bool = False,
    ) -> copying.Uploaded:
        async with self._uploading:
            again = again or asked.replaces is not None
            source = self._partition_directory(told)
            aborted = aborted_of(told)
            limit = stable_limit(told, asked.start, asked.limit, whole=again)
            buffer = self._buffers.pop() if self._buffers else OutputBuffer()

            def make() -> uploads.Copied:
                if again:
                    aborted.extend(uploads.aborted_from(source, asked.start))
                return uploads.copy(source, asked.start, limit, asked.max_bytes, aborted, buffer)

            try:
                copied = await self._executors.upload(make)
                add = None
                if copied.file is not None:
                    attempt, now_ms = self.world.new_id(), self.world.clock.wall_ms()
                    attempt = attempt.replace("-", "")[:16]
                    add = uploads.named(
                        copied, told.partition, asked.start, asked.leader_epoch, attempt, now_ms
                    )
                    if not again:
                        on_built(copying.Built(asked, copied.end, copied.epoch))
                    await self.store.put(f"{topic.home}/{add.path}", copied.file.data)
                    self.counts.uploaded(copied.file.rows, len(copied.file.data), repaired=again)
            except errors.PkError:
                self.counts.failed_uploads += 1
                raise
            buffer.rest()
            # not after a failure: a write under way may still read it (tiering/output_buffer B1)
            self._buffers.append(buffer)
            return copying.Uploaded(asked, copied.end, copied.epoch, add)

    async def _hand_over(
        self, topic: TopicTier, led: LedPartition, asked: copying.CommitToTable
    ) -> None:
        async def work() -> copying.HandedOver:
            await self.commit_to_table(asked.request)
            return copying.HandedOver(asked)

        await self._guarded(topic, led, asked, work())

    async def _confirm(self, topic: TopicTier, led: LedPartition, asked: copying.Confirm) -> None:
        async def work() -> copying.Confirmed:
            partition = led.copier.partition
            missing = await self._watch.missing(topic, partition, asked.start, asked.end)
            return copying.Confirmed(asked, missing)

        await self._guarded(topic, led, asked, work())

    async def close(self) -> None:
        """Stops everything; commits under way may or may not land (rule T5)."""
        self._closed = True
        self._timers.close()
        await self._tasks.close()
        await self.reader.close()
