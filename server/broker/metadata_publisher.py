"""Applies the committed metadata log to the broker: it creates, leads, follows, removes replicas.

World-generic.  A long poll fetches a chunk of committed batches.  The publisher applies every
record to the image, and then the broker reacts to the changes, in the order of the log, before the
next chunk is applied.  `reached` gives admin replies read-your-writes: it waits until the reaction
to an offset is done, not only until the image has it.

Invariants
  M1  The image is built by `apply` alone, from committed records, each once and in order, or from
      a snapshot and the records behind it.
  M2  A partition is led only under this process's own registration (rule Q2).  A leadership in an
      image from before the restart belongs to the previous process.
  M3  A log directory whose topic id is not in the image is a stray.  It is renamed once the image
      holds this process's own registration, and removed later (replica/creation.py; rules Q2, L8).
  M4  A partition whose log cannot be opened or created is UNOPENED with its cause
      (replica/state.py).  The other partitions continue.  The broker tries again while the cause
      may pass (replica/creation N2).
  M5  A leader that was elected uncleanly serves a tiered partition only after it has claimed the
      tier's table (rule T4).
  M6  While a directory has failed, no log is created for a partition that is in no working
      directory: its records are in the failed one, and the partition is UNOPENED.
  M7  A damaged log (rule L9), or a missing one (rule L15), is set aside and rebuilt once another
      broker leads, this replica is in neither ISR nor ELR, and the image includes the controller's
      reaction to the report that the replica is offline.  From then on this replica cannot be the
      last copy.
  M8  The broker reports a rebuilt replica as offline until the leader of that epoch has compared
      its new log.  Before that, the leader may ask to add the replica to the ISR because of the
      records that its old log had (rule R2).
"""

from __future__ import annotations

import asyncio
import heapq
from functools import partial
from typing import Any, Protocol

from pk import errors
from pk.backoff import Backoff, equal_jitter
from pk.log.directory import raise_format
from pk.log.plan import LogConfig
from pk.server.broker.lifecycle import BrokerLifecycleManager
from pk.server.broker.snapshot_loader import load_image
from pk.server.metadata import records
from pk.server.metadata.delta import difference
from pk.server.metadata.image import TOPIC_RESOURCE, MetadataImage, PartitionState
from pk.server.raft.log_reader import SLICE_RECORDS
from pk.server.replica.alter_partition import AlterPartitionManager
from pk.server.replica.corruption import CorruptionManager
from pk.server.replica.creation import ReplicaCreator, may_take_part, together, typed
from pk.server.replica.fetcher import ReplicaFetcherManager
from pk.server.replica.partition import Partition
from pk.server.replica.purgatory import TimerHeap
from pk.server.replica.state import ReplicaEvent, ReplicaState
from pk.server.tier.context import TierContext
from pk.server.tier.epoch_fence import EpochFence
from pk.server.tier.purges import Purges
from pk.server.tier.view import TierFeed
from pk.tasks import TaskRegistry
from pk.types import NONE, NodeId, Offset, PartitionKey, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire

POLL_WAIT_MS = 2_000
POLL_TIMEOUT_MS = 6_000
POLL_BYTES = 4 * 1024 * 1024
BACKOFF_MS = (20, 1_000)
#: The most names that a log line lists.
NAMED_MAX = 20


class _Changes:
    """The topics, partitions and brokers that a chunk of records changed, in log order."""

    def __init__(self) -> None:
        self.partitions: dict[PartitionKey, None] = {}
        self.removed: dict[str, wire.RemoveTopicRecord] = {}
        self.purges: dict[str, str] = {}  #: deleted topics with tables to remove: names
        self.topics: dict[str, None] = {}  #: names whose metadata reply changed
        self.configured: dict[str, None] = {}  #: names whose settings changed
        self.all_configured = False
        self.brokers = False
        self.me = False

    def note(self, record: wire.MetadataRecord, node_id: NodeId) -> None:
        kind = record.WhichOneof("record")
        if kind in ("partition", "partition_change"):
            body: Any = getattr(record, kind)
            self.partitions[PartitionKey(body.topic_id, body.partition)] = None
        elif kind == "topic":
            self.topics[record.topic.name] = None
        elif kind == "remove_topic":
            self.removed[record.remove_topic.topic_id] = record.remove_topic
            if record.remove_topic.purge_tier:
                self.purges[record.remove_topic.topic_id] = record.remove_topic.name
        elif kind == "tier_purge" and not record.tier_purge.done:
            self.purges[record.tier_purge.topic_id] = record.tier_purge.name
        elif kind == "config":
            if record.config.resource_type == TOPIC_RESOURCE:
                self.configured[record.config.resource_name] = None
            else:
                self.all_configured = True
        elif kind in ("register_broker", "broker_change", "unregister_broker"):
            self.brokers = True
            self.me = self.me or getattr(record, kind).broker_id == node_id


class PublisherContext(TierContext, Protocol):
    """The interface of the broker that its publisher uses: every part that a change may concern."""

    @property
    def lifecycle(self) -> BrokerLifecycleManager: ...

    @property
    def fetchers(self) -> ReplicaFetcherManager: ...

    @property
    def alter_partition(self) -> AlterPartitionManager: ...

    @property
    def corruption(self) -> CorruptionManager: ...

    @property
    def purges(self) -> Purges: ...

    @property
    def feed(self) -> TierFeed: ...

    @property
    def feed_moved(self) -> asyncio.Event: ...

    @property
    def flushes(self) -> TimerHeap[PartitionKey]: ...


class MetadataPublisher:
    """Fetches the metadata log, keeps the broker's image, and carries out its changes."""

    def __init__(
        self, core: PublisherContext, incarnation_id: str, topic_defaults: dict[str, Any]
    ) -> None:
        self._core = core
        self._incarnation_id = incarnation_id
        self._topic_defaults = topic_defaults
        self.image = MetadataImage()
        self.committed: Offset = 0  #: the controller's high watermark, as of its last reply
        self.next_offset: Offset = 0
        self.reacted: Offset = NONE  #: everything up to this record was carried out
        self.epoch_fence = EpochFence(core)
        self.listeners: dict[
            Any, None
        ] = {}  #: called with the names of changed topics, None = brokers or all
        self._waiting: list[tuple[Offset, int, asyncio.Future[None]]] = []
        self._wait_number = 0
        self._creator = ReplicaCreator(core, self)
        self._loaded = False
        self._unknown_settings: list[str] = []
        self._raised = 1  #: the level that every pk.json allows
        self._tasks = TaskRegistry()

    # -- what others ask -------------------------------------------------------------------------

    def why_not_here(self, key: PartitionKey) -> errors.PkError:
        """Return the error that says why this broker does not have the partition."""
        unopened = self._core.replicas.why_unopened(key)
        if unopened is not None:
            return unopened
        topic = self.image.topics.get(key.topic_id)
        if topic is None:
            return errors.UnknownTopicId(
                f"no topic has the id {key.topic_id}: it was deleted, or is not known here yet"
            )
        state = topic.partitions.get(key.partition)
        if state is None:
            return errors.UnknownTopicOrPartition(f"{topic.name} has no partition {key.partition}")
        return errors.NotLeaderOrFollower(
            f"{topic.name}-{key.partition}: broker {state.leader} leads", leader=str(state.leader)
        )

    def leader_of(self, key: PartitionKey) -> NodeId:
        state = self.image.partition(key)
        return NONE if state is None else state.leader

    def settings_of(self, topic: str) -> dict[str, Any]:
        """Return the current value of every setting of a topic."""
        return self.image.topic_config(topic, self._topic_defaults)

    def is_tiered(self, topic: str, wanted: dict[str, Any]) -> bool:
        return (
            self._core.tier.enabled and bool(wanted["tier_enable"]) and not topic.startswith("__")
        )

    async def reached(self, offset: Offset, timeout_ms: int) -> None:
        """Wait until the broker has reacted to everything up to record `offset`.

        Raises `RequestTimedOut`.
        """
        if self.reacted >= offset:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wait_number += 1
        heapq.heappush(self._waiting, (offset, self._wait_number, future))
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await future
        except TimeoutError:
            raise errors.RequestTimedOut(
                f"the controller made the change at metadata offset {offset}, this broker has "
                f"applied the metadata up to {self.reacted}"
            ) from None

    # -- life ------------------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Apply every committed record; retry until the controller answers."""
        while True:
            try:
                await self._poll(0)
            except errors.RetriableError:
                await self._core.clock.sleep_ms(self._core.world.rng.uniform(50, 200))
                continue
            if self.next_offset >= self.committed:
                return

    async def load(self) -> None:
        """Open the logs of every partition the image gives this broker (M3)."""
        self._report_unknown_settings()
        await self._raise_format()
        await self._creator.load()
        self._loaded = True
        changes = _Changes()
        changes.me = True
        changes.purges = dict(self.image.purges)  # unfinished work of an earlier process
        await self._react(changes)

    def start(self) -> None:
        """Begin to follow the metadata log from the current offset."""
        self._tasks.spawn(self._run())
        self._tasks.spawn(self._creator.retry_unopened())

    async def close(self) -> None:
        await self._tasks.close()
        await self.epoch_fence.close()

    async def _run(self) -> None:
        try:
            while True:
                await self._react(await self._next())
        except Exception as bug:  # the chunk may be half applied: only a restart is safe
            self._core.bug("following the metadata log", bug)
            self._core.lifecycle.fatal(typed(bug))

    async def _next(self) -> _Changes:
        """Fetch until the controller answers; return the changes."""
        backoff = Backoff(BACKOFF_MS, equal_jitter(self._core.world.rng))
        while True:
            try:
                return await self._poll(POLL_WAIT_MS)
            except errors.RetriableError:
                await self._core.clock.sleep_ms(backoff.next_ms())

    async def _poll(self, wait_ms: int) -> _Changes:
        """Fetch once and apply the reply; return the changes (M1)."""
        request = wire.FetchMetadataLogRequest(
            from_offset=self.next_offset,
            max_wait_ms=wait_ms,
            max_bytes=POLL_BYTES,
            replica_id=self._core.node_id,
            last_fetched_epoch=NONE,
        )
        reports = self._core.lifecycle.offline_reports
        acknowledged = reports.acknowledged  # the controller's records for them are committed
        frame = await self._core.lifecycle.call(request, POLL_TIMEOUT_MS)
        reply = frame.head.fetch_metadata_log_reply
        if reply.snapshot:
            return await self._load_snapshot(reply)
        changes = self._apply(frame)
        if self.next_offset >= self.committed:
            reports.on_image(acknowledged)
        return changes

    async def _load_snapshot(self, reply: wire.FetchMetadataLogReply) -> _Changes:
        """Replace the image by a snapshot's, as the log no longer has the next record (rule Q2).

        Returns the differences in both directions: additions and removals.
        """
        image = await load_image(self._core, reply.snapshot, self.next_offset)
        changes = _Changes()
        rows = difference(self.image, image) if self._loaded else ()
        for count, (_offset, record) in enumerate(rows, 1):
            if count % SLICE_RECORDS == 0:  # lets heartbeats run (rule P1)
                await self._core.clock.sleep_ms(0)
            if record.WhichOneof("record") == "remove_topic":
                changes.topics[record.remove_topic.name] = None
            changes.note(record, self._core.node_id)
        self.image = image
        self.next_offset = image.offset + 1
        self.committed = max(self.committed, reply.high_watermark)
        self._core.warn("metadata_snapshot_loaded", snapshot=reply.snapshot)
        return changes

    def _apply(self, frame: frames.Frame) -> _Changes:
        changes = _Changes()
        reply = frame.head.fetch_metadata_log_reply
        for offset, record in records.decode_batches(frame.payload, self.next_offset):
            if record.WhichOneof("record") == "remove_topic":
                topic = self.image.topics.get(record.remove_topic.topic_id)
                if topic is not None:
                    changes.topics[topic.name] = None
            records.level_in(record, self._core.manager.level)  # Q6: refuses unknown levels
            self.image.apply(offset, record)
            changes.note(record, self._core.node_id)
            self.next_offset = offset + 1
        self.next_offset = max(self.next_offset, reply.next_offset)
        self.committed = max(self.committed, reply.high_watermark)
        return changes

    # -- reaction --------------------------------------------------------------------------------

    async def _raise_format(self) -> None:
        """Raise the number in each pk.json, SYNCED, before anything of the level is written (rule
        Q6).  On a full disk this waits for space.
        """
        level = self.image.format_level
        for directory in self._core.manager.directories if level > self._raised else ():
            while directory.failed is None:
                storage = directory.disk.storage
                try:
                    await directory.disk.write(partial(raise_format, storage, level))
                    break
                except errors.StorageFull as full:
                    self._core.warn("format_waits_for_room", directory=storage.root, why=str(full))
                    await self._core.clock.sleep_ms(BACKOFF_MS[1])
                except errors.StorageFailed:
                    break  # offline until the next start, which raises it
        self._raised = level

    async def _react(self, changes: _Changes) -> None:
        if not self._loaded:
            return
        await self._raise_format()
        upto = self.next_offset - 1
        for topic_id, record in changes.removed.items():
            await self._remove(topic_id, record)
        for topic_id, name in changes.purges.items():
            self._core.purges.begin(topic_id, name)
        keys = changes.partitions
        joined = self._creator.joined()
        if changes.me or joined:
            keys = {
                PartitionKey(topic.topic_id, n): None
                for topic, n, _ in self.image.partitions_of(self._core.node_id)
            }
        reports = self._core.lifecycle.offline_reports
        keys |= {key: None for key in reports.acknowledged if self._damaged(key)}
        if changes.brokers:
            self._core.fetchers.brokers_changed()
        # Settings first: under the older min_insync_replicas the high watermark could pass a member
        # that the same records keep in the ELR (rule R1).  A leader of an earlier epoch ignores
        # them.
        self._reconfigure(changes)
        for some in together(list(keys)):
            await self._creator.create_missing(some)
            for key in some:
                await self._settle(key)
        if joined:
            await self._creator.give_up_strays()
        named = (
            self.image.topics.get(topic_id) for topic_id in {key.topic_id: None for key in keys}
        )
        changes.topics.update((topic.name, None) for topic in named if topic is not None)
        self.reacted = max(self.reacted, upto)
        while self._waiting and self._waiting[0][0] <= self.reacted:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
        self._notify_listeners(changes)

    def _notify_listeners(self, changes: _Changes) -> None:
        """Notify the parts of the broker that wait for what the chunk changed."""
        if changes.me:
            self._core.lifecycle.heartbeat_soon()
        if changes.brokers:  # a broker that returned may join an ISR (R2)
            for partition in self._core.partitions.values():
                self._core.alter_partition.consider(partition)
        if changes.topics or changes.configured or changes.brokers or changes.all_configured:
            names = (
                None
                if changes.brokers or changes.all_configured
                else {**changes.topics, **changes.configured}
            )
            for listener in list(self.listeners):
                listener(names)

    def registered(self) -> bool:
        """Whether the image has the registration of this process (M2)."""
        me = self.image.brokers.get(self._core.node_id)
        return me is not None and me.incarnation_id == self._incarnation_id

    async def _settle(self, key: PartitionKey) -> None:
        """Make this broker's replica of `key` what the image requires."""
        core = self._core
        state = self.image.partition(key)
        partition = core.partitions.get(key)
        if state is None:
            return
        if core.node_id not in state.replicas:
            if partition is not None:
                await self._drop(
                    partition, errors.NotLeaderOrFollower(f"{partition} was reassigned")
                )
            core.replicas.forget(key)
            return
        marked = key in core.manager.operator_marked and self.registered()
        if marked and may_take_part(state, core.node_id, has_log=partition is not None):
            await self._creator.clear_operator_mark(key)
        if self._damaged(key) and self._others_have_it(state):
            await self._set_aside(key, partition)
            partition = None
        if partition is None:
            if core.replicas.state(key) is ReplicaState.UNOPENED:
                return
            await self._creator.create_missing([key])  # rebuilt (M7)
            partition = core.partitions.get(key)
            if partition is None:
                return
        await self.lead_or_follow(partition, state)

    def _damaged(self, key: PartitionKey) -> bool:
        """Whether a damaged or missing log may be rebuilt, as far as its report is concerned (M7).

        The controller must have acknowledged that the replica is offline, and the image must
        include the controller's reaction.
        """
        replica = self._core.replicas.get(key)
        reported = self._core.lifecycle.offline_reports.in_image(key)
        return replica is not None and replica.rebuildable and reported

    def compared(self, key: PartitionKey) -> None:
        """End the offline report of a rebuilt replica, as the leader has compared its log (M8)."""
        if self._core.replicas.compared(key):
            # If it is damaged again, it is reported again.
            self._core.lifecycle.offline_reports.withdraw(key)
            self._core.lifecycle.heartbeat_soon()

    def _others_have_it(self, state: PartitionState) -> bool:
        """Whether another broker leads and this replica is in neither ISR nor ELR (L9)."""
        me = self._core.node_id
        return state.leader not in (NONE, me) and me not in (*state.isr, *state.elr)

    async def _set_aside(self, key: PartitionKey, partition: Partition | None) -> None:
        """Move a damaged or missing log away, so that a new one is created (M7).

        The broker reports the replica as offline throughout, first as lost and then as not yet
        compared (M8).
        """
        core = self._core
        topic, state = self.image.topics[key.topic_id].name, self.image.partition(key)
        assert state is not None
        core.replicas.uncompared[key] = state.leader_epoch
        core.warn("replica_made_anew", partition=f"{topic}-{key.partition}")
        self.epoch_fence.cancel(key)  # else it would continue with the new log
        if partition is not None:
            core.partitions.pop(key, None)
            core.fetchers.leave(partition)
            core.replicas.on(key, ReplicaEvent.SET_ASIDE)
            await core.fetchers.wait_until_idle(partition)
        delay_ms = self.settings_of(topic)["file_delete_delay_ms"]
        try:
            tp = TopicPartition(topic, key.partition)
            await core.manager.set_aside(tp, key.topic_id, delay_ms)
        except errors.PkError as error:
            core.warn("delete_failed", partition=f"{topic}-{key.partition}", error=error.message)
            return
        if partition is None:
            core.replicas.on(key, ReplicaEvent.SET_ASIDE)

    async def lead_or_follow(self, partition: Partition, state: PartitionState) -> None:
        """Make this broker leader or follower of `partition`, or neither, as `state` requires."""
        core = self._core
        core.corruption.settle(partition, state)
        key, directory = partition.key, core.manager.directory_of(partition.key)
        named = state.directory_of(core.node_id)
        core.lifecycle.directory_reports.note(key, named, directory.directory_id)  # R11
        if state.leader != core.node_id or not self.registered():
            leads_elsewhere = state.leader != core.node_id
            if partition.leader is not None and partition.tiered:
                core.feed.remove(partition.key, partition.topic)
            self.epoch_fence.give_up(partition)
            partition.step_down(state.leader if leads_elsewhere else NONE)
            self._follow_or_not(partition, state)
            return
        fresh = partition.leader_epoch != state.leader_epoch
        recovering = partition.state is ReplicaState.RECOVERING
        if not partition.online and not recovering:
            return  # OFFLINE: an election mends neither damage nor a failed disk (rules L2, L9)
        core.fetchers.leave(partition)
        if recovering or (fresh and state.unclean and partition.tiered):
            # M5: `take_office` follows when the table is claimed
            if self.epoch_fence.epoch(partition.key) != state.leader_epoch:
                self.epoch_fence.begin(partition, state)
            return
        if partition.leader is None:  # until a former leader's data is written or undone
            await core.fetchers.wait_until_idle(partition)
        # The image may have changed during the waits above (`retry_unopened` waits, too).  States
        # are compared by value: a loaded snapshot has its own objects, and an unchanged state
        # causes no further reaction.
        if partition.online and self.image.partition(partition.key) == state:
            self.take_office(partition, state)

    def _follow_or_not(self, partition: Partition, state: PartitionState) -> None:
        """Fetch from the leader that `state` names, or stop fetching if there is none."""
        core = self._core
        if state.leader in (NONE, core.node_id) or not partition.online or not self.registered():
            core.fetchers.leave(partition)
        else:
            partition.others = True
            core.fetchers.follow(partition, state)

    def take_office(self, partition: Partition, state: PartitionState) -> None:
        """Lead `partition` in the epoch `state` names."""
        partition.lead(state, checkpointed=self._core.manager.high_watermark(partition.key))
        if partition.tiered:
            self._core.feed.restore(partition.key)
            self._core.feed_moved.set()
        self._flush_if_asked(partition)

    def _flush_if_asked(self, partition: Partition) -> None:
        """Flush soon under `flush_on_ack`, where only SYNCED records count, on every replica
        (L2).
        """
        if partition.settings["flush_on_ack"]:
            self._core.flushes.set(partition.key, 0)  # or a checkpoint synced unreported

    # -- partitions ------------------------------------------------------------------------------

    async def _remove(self, topic_id: str, record: wire.RemoveTopicRecord) -> None:
        """Delete this broker's replicas of a topic that was deleted."""
        core = self._core
        gone = errors.UnknownTopicId(f"topic {record.name} ({topic_id}) was deleted")
        mine = [partition for key, partition in core.partitions.items() if key.topic_id == topic_id]
        for partition in mine:
            await self._drop(partition, gone)
        for key in core.replicas.unopened():
            if key.topic_id == topic_id:
                core.replicas.forget(key)

    async def _drop(self, partition: Partition, why: errors.PkError) -> None:
        """Delete the replica: the topic was deleted, or the replica reassigned, as `why` says."""
        core = self._core
        self.epoch_fence.cancel(partition.key)
        core.fetchers.leave(partition)
        del core.partitions[partition.key]
        partition.fail(why, ReplicaEvent.REMOVED)
        core.feed.remove(partition.key, partition.topic)
        core.feed_moved.set()
        await core.fetchers.wait_until_idle(partition)
        await self.discard(partition.key, str(partition))

    async def discard(self, key: PartitionKey, partition: str) -> None:
        self._core.lifecycle.directory_reports.forget(key)
        try:
            await self._core.manager.delete(key)
        except errors.PkError as error:
            self._core.warn("delete_failed", partition=partition, error=error.message)

    def _report_unknown_settings(self) -> None:
        """Log one line that names the stored settings that this build skips (rule Q7)."""
        unknown, self._unknown_settings = self._unknown_settings, self.image.unknown_settings()
        if self._unknown_settings not in ([], unknown):
            self._core.warn("settings_unknown", settings=self._unknown_settings[:NAMED_MAX])

    def _reconfigure(self, changes: _Changes) -> None:
        if not changes.configured and not changes.all_configured:
            return
        self._report_unknown_settings()
        for partition in self._core.partitions.values():
            if changes.all_configured or partition.topic in changes.configured:
                wanted = self.settings_of(partition.topic)
                partition.log.config = LogConfig.of(wanted)
                tiered = self.is_tiered(partition.topic, wanted)
                if partition.tiered and not tiered:
                    self._core.feed.remove(partition.key, partition.topic)
                elif tiered and not partition.tiered and partition.leader is not None:
                    self._core.feed.restore(partition.key)
                state = self.image.partition(partition.key)
                epoch = NONE if state is None else state.leader_epoch
                partition.reconfigure(wanted, epoch, tiered=tiered)
                self._flush_if_asked(partition)
                self._core.retain_soon(partition.key)
