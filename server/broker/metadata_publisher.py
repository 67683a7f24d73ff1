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
  M9  A replica is settled once for each chunk that concerns it: a record of its partition, the
      registration of this process (M2), or the end of that registration.  The fence of this broker
      concerns none: the leader is elected by a record of the partition.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Mapping
from functools import partial
from typing import Any

from pk import errors
from pk.backoff import Backoff, equal_jitter
from pk.log.directory import raise_format
from pk.log.manager import LogManager
from pk.server.broker.lifecycle import BrokerLifecycleManager
from pk.server.broker.replica_manager import ReplicaManager
from pk.server.metadata import records
from pk.server.metadata.cache import MetadataCache
from pk.server.metadata.delta import difference
from pk.server.metadata.image import LEASE_RESOURCE, MAINTENANCE_RESOURCES, TOPIC_RESOURCE
from pk.server.metadata.snapshot_loader import load_image
from pk.server.raft.log_reader import SLICE_RECORDS
from pk.server.replica.alter_partition import AlterPartitionManager
from pk.server.replica.context import Environment
from pk.server.replica.creation import ReplicaCreator, together, typed
from pk.server.replica.fetcher_manager import ReplicaFetcherManager
from pk.server.replica.partition import Partition
from pk.server.tier.purges import Purges
from pk.tasks import TaskRegistry
from pk.types import NONE, NodeId, Offset, PartitionKey
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
        self.leased: dict[str, None] = {}  #: ids of topics whose maintenance lease changed
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
            elif record.config.resource_type == LEASE_RESOURCE:
                self.leased[record.config.resource_name] = None
            elif record.config.resource_type not in MAINTENANCE_RESOURCES:
                self.all_configured = True
        elif kind in ("register_broker", "broker_change", "unregister_broker"):
            self.brokers = True
            self.me = self.me or getattr(record, kind).broker_id == node_id


class MetadataPublisher:
    """Fetches the metadata log, keeps the broker's image, and carries out its changes."""

    def __init__(
        self,
        env: Environment,
        manager: LogManager,
        metadata: MetadataCache,
        lifecycle: BrokerLifecycleManager,
        partitions: Mapping[PartitionKey, Partition],
        replica_manager: ReplicaManager,
        creator: ReplicaCreator,
        fetchers: ReplicaFetcherManager,
        alter_partition: AlterPartitionManager,
        purges: Purges,
    ) -> None:
        self._env = env
        self._manager = manager
        self._metadata = metadata
        self._lifecycle = lifecycle
        self._partitions = partitions
        self._replica_manager = replica_manager
        self._creator = creator
        self._fetchers = fetchers
        self._alter_partition = alter_partition
        self._purges = purges
        self.committed: Offset = 0  #: the controller's high watermark, as of its last reply
        self.next_offset: Offset = 0
        self.reacted: Offset = NONE  #: everything up to this record was carried out
        self.listeners: dict[
            Any, None
        ] = {}  #: called with the names of changed topics, None = brokers or all
        self._waiting: list[tuple[Offset, int, asyncio.Future[None]]] = []
        self._wait_number = 0
        self._loaded = False
        self._registered = False  #: whether the roles that were settled last are those of M2
        self._raised = 1  #: the level that every pk.json allows
        self._unknown_settings: list[str] = []
        self._tasks = TaskRegistry()

    # -- what others ask -------------------------------------------------------------------------

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
                await self._env.clock.sleep_ms(self._env.world.rng.uniform(50, 200))
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
        changes.purges = dict(self._metadata.image.purges)  # unfinished work of an earlier process
        await self._react(changes)

    def start(self) -> None:
        """Begin to follow the metadata log from the current offset."""
        self._tasks.spawn(self._run())
        self._tasks.spawn(self._creator.retry_unopened())

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self) -> None:
        try:
            while True:
                await self._react(await self._next())
        except Exception as bug:  # the chunk may be half applied: only a restart is safe
            self._env.bug("following the metadata log", bug)
            self._lifecycle.fatal(typed(bug))

    async def _next(self) -> _Changes:
        """Fetch until the controller answers; return the changes."""
        backoff = Backoff(BACKOFF_MS, equal_jitter(self._env.world.rng))
        while True:
            try:
                return await self._poll(POLL_WAIT_MS)
            except errors.RetriableError:
                await self._env.clock.sleep_ms(backoff.next_ms())

    async def _poll(self, wait_ms: int) -> _Changes:
        """Fetch once and apply the reply; return the changes (M1)."""
        request = wire.FetchMetadataLogRequest(
            from_offset=self.next_offset,
            max_wait_ms=wait_ms,
            max_bytes=POLL_BYTES,
            replica_id=self._env.node_id,
            last_fetched_epoch=NONE,
        )
        reports = self._lifecycle.offline_reports
        acknowledged = reports.acknowledged  # the controller's records for them are committed
        frame = await self._lifecycle.call(request, POLL_TIMEOUT_MS)
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
        image = await load_image(
            self._lifecycle, self._env.clock, self._manager.level, reply.snapshot, self.next_offset
        )
        changes = _Changes()
        rows = difference(self._metadata.image, image) if self._loaded else ()
        for count, (_offset, record) in enumerate(rows, 1):
            if count % SLICE_RECORDS == 0:  # lets heartbeats run (rule P1)
                await self._env.clock.sleep_ms(0)
            if record.WhichOneof("record") == "remove_topic":
                changes.topics[record.remove_topic.name] = None
            changes.note(record, self._env.node_id)
        self._metadata.image = image
        self.next_offset = image.offset + 1
        self.committed = max(self.committed, reply.high_watermark)
        self._env.warn("metadata_snapshot_loaded", snapshot=reply.snapshot)
        return changes

    def _apply(self, frame: frames.Frame) -> _Changes:
        changes = _Changes()
        reply = frame.head.fetch_metadata_log_reply
        for offset, record in records.decode_batches(frame.payload, self.next_offset):
            if record.WhichOneof("record") == "remove_topic":
                topic = self._metadata.image.topics.get(record.remove_topic.topic_id)
                if topic is not None:
                    changes.topics[topic.name] = None
            records.level_in(record, self._manager.level)  # Q6: refuses unknown levels
            self._metadata.image.apply(offset, record)
            if self._loaded:  # before that, nothing reacts to single changes
                changes.note(record, self._env.node_id)
            self.next_offset = offset + 1
        self.next_offset = max(self.next_offset, reply.next_offset)
        self.committed = max(self.committed, reply.high_watermark)
        return changes

    # -- reaction --------------------------------------------------------------------------------

    async def _raise_format(self) -> None:
        """Raise the number in each pk.json, SYNCED, before anything of the level is written (rule
        Q6).  On a full disk this waits for space.
        """
        level = self._metadata.image.format_level
        for directory in self._manager.directories if level > self._raised else ():
            while directory.failed is None:
                storage = directory.disk.storage
                try:
                    await directory.disk.write(partial(raise_format, storage, level))
                    break
                except errors.StorageFull as full:
                    self._env.warn("format_waits_for_room", directory=storage.root, why=str(full))
                    await self._env.clock.sleep_ms(BACKOFF_MS[1])
                except errors.StorageFailed:
                    break  # offline until the next start, which raises it
        self._raised = level

    async def _react(self, changes: _Changes) -> None:
        if not self._loaded:
            return
        await self._raise_format()
        upto = self.next_offset - 1
        for topic_id, record in changes.removed.items():
            await self._replica_manager.remove_topic(topic_id, record)
        for topic_id, name in changes.purges.items():
            self._purges.begin(topic_id, name)
        keys = changes.partitions
        joined = self._creator.joined()
        if self._registered is not self._metadata.registered():  # M9
            self._registered = not self._registered
            keys |= {
                PartitionKey(topic.topic_id, n): None
                for topic, n, _ in self._metadata.image.partitions_of(self._env.node_id)
            }
        reports = self._lifecycle.offline_reports
        keys |= {
            key: None for key in reports.acknowledged if self._replica_manager.rebuildable(key)
        }
        if changes.brokers:
            self._fetchers.brokers_changed()
        # Settings first: under the older min_insync_replicas the high watermark could pass a member
        # that the same records keep in the ELR (rule R1).  A leader of an earlier epoch ignores
        # them.
        if changes.configured or changes.all_configured:
            self._report_unknown_settings()
            self._replica_manager.reconfigure(
                None if changes.all_configured else changes.configured
            )
        for topic_id in changes.leased:
            self._replica_manager.lease_changed(topic_id)
        for some in together(list(keys)):
            await self._creator.create_missing(some)
            for key in some:
                await self._replica_manager.settle(key)
        if joined:
            await self._creator.give_up_strays()
        named = (
            self._metadata.image.topics.get(topic_id)
            for topic_id in {key.topic_id: None for key in keys}
        )
        changes.topics.update((topic.name, None) for topic in named if topic is not None)
        self.reacted = max(self.reacted, upto)
        while self._waiting and self._waiting[0][0] <= self.reacted:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
        self._notify_listeners(changes)

    def _report_unknown_settings(self) -> None:
        """Log one line that names the stored settings that this build skips (rule Q7)."""
        unknown = self._unknown_settings
        self._unknown_settings = self._metadata.image.unknown_settings()
        if self._unknown_settings not in ([], unknown):
            self._env.warn("settings_unknown", settings=self._unknown_settings[:NAMED_MAX])

    def _notify_listeners(self, changes: _Changes) -> None:
        """Notify the parts of the broker that wait for what the chunk changed."""
        if changes.me:
            self._lifecycle.heartbeat_soon()
        if changes.brokers:  # a broker that returned may join an ISR (R2)
            for partition in self._partitions.values():
                self._alter_partition.consider(partition)
        if changes.topics or changes.configured or changes.brokers or changes.all_configured:
            names = (
                None
                if changes.brokers or changes.all_configured
                else {**changes.topics, **changes.configured}
            )
            for listener in list(self.listeners):
                listener(names)
