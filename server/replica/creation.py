"""Opens the logs in a broker's directories and creates the missing logs of assigned replicas.

World-generic.  This module moves replicas into and out of the states UNOPENED and ABSENT
(replica/state.py).

Invariants
  N1  The broker creates no log, and renames no stray, before the image holds the registration of
      this process (rule Q2).  An older image may name a deleted topic of the same name, and may
      lack the topic whose log is in the directory (log/strays.py).
  N2  A partition whose log cannot be created or opened is UNOPENED with its cause.  The other
      partitions continue.  Creation is tried again while the cause may pass
      (broker/metadata_publisher M4).
  N3  While a directory has failed, no log is created for a partition that is in no working
      directory: its records are in the failed one (broker/metadata_publisher M6).
  N4  A log whose truncation was interrupted by a full disk is OFFLINE until there is room.  Then it
      is opened as at a start of the process, and continues from what its files hold.
  N5  A log that this broker had and that is missing, or that an operator adopted or discarded, is
      offline.  The broker reports it in every heartbeat until the replica is in neither ISR nor
      ELR.  So the replica leaves both before the broker is unfenced (rule L15).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from pk import errors
from pk.log.creation import VISIT_MAX, NewPartition
from pk.log.identity import Identity
from pk.log.manager import LogManager
from pk.log.plan import LogConfig
from pk.server.metadata.cache import MetadataCache
from pk.server.metadata.image import PartitionState
from pk.server.replica.context import ControllerChannel, Environment
from pk.server.replica.corruption import CorruptionManager
from pk.server.replica.directory_reports import DirectoryReports
from pk.server.replica.directory_writers import LogDirWriters
from pk.server.replica.fetcher_manager import ReplicaFetcherManager
from pk.server.replica.host import Host
from pk.server.replica.partition import Partition
from pk.server.replica.state import OPEN, ReplicaEvent, ReplicaState
from pk.types import NONE, NodeId, PartitionKey, TopicPartition

RETRY_CREATE_MS = 5_000


class ReplicaCreator:
    """Opens and creates the logs of one broker's replicas (N1 to N5)."""

    def __init__(
        self,
        env: Environment,
        host: Host[Partition],
        manager: LogManager,
        partitions: dict[PartitionKey, Partition],
        metadata: MetadataCache,
        writers: LogDirWriters,
        fetchers: ReplicaFetcherManager,
        corruption: CorruptionManager,
        controller: ControllerChannel,
        reports: DirectoryReports,
        lead_or_follow: Callable[[Partition, PartitionState], Coroutine[Any, Any, None]],
    ) -> None:
        self._env = env
        self._host = host
        self._manager = manager
        self._replicas = host.replicas
        self._partitions = partitions
        self._metadata = metadata
        self._writers = writers
        self._fetchers = fetchers
        self._corruption = corruption
        self._controller = controller
        self._reports = reports
        self._lead_or_follow = lead_or_follow
        self._creating = asyncio.Lock()
        self._joined = False  #: N1

    # -- what is there ---------------------------------------------------------------------------

    async def load(self) -> None:
        """Open the logs of every partition the image gives this broker."""
        self._manager.gone, self._manager.named = self._gone, self._named
        config_of = cache(self._config_of)  # no record is applied meanwhile
        problems = await self._manager.load(
            lambda topic_id, tp: config_of(topic_id) if self._is_here(topic_id, tp) else None
        )
        for where, why in self._manager.restored.items():
            self._env.warn("identity_restored", directory=where, why=why)
        if self._manager.ignored:
            why = "the name is not <topic>-<number>: left alone"
            self._say_many("directories_ignored", self._manager.ignored, why)
        if self._manager.removed:
            why = "the broker had renamed them before it was stopped: <topic>-<number>.<id>-delete"
            self._say_many("deleted_logs_removed", self._manager.removed, why)
        for key, failure in problems:
            error = typed(failure)
            if isinstance(error, errors.LogUnidentified):  # of an unknown partition: see `joined`
                self._keep(error.details.get("directory", str(key)), error.message)
                continue
            self._replicas.on(key, ReplicaEvent.OPEN_FAILED, error)
            if isinstance(error, errors.CorruptLog):
                self._env.metrics.damaged.inc()
            self._env.warn("partition_offline", partition=str(key), error=error.message)
        opened = sorted(self._manager.logs())
        topics = self._topics_of(opened)
        for key in opened:
            self._adopt(key, topics[key.topic_id][1])
            self._corruption.opened(self._partitions[key])
        self._miss_failed_directories()
        self._miss_the_tier()

    def _miss_the_tier(self) -> None:
        """Warn if records are in the tier only and the server has no `tier_url`.

        Readers of these records are refused; the option may have been left out by mistake.
        """
        logs = self._manager.logs().values()
        cold = sum(log.local_log_start > log.log_start for log in logs)
        if cold and not self._metadata.tier_enabled:
            why = "their older records are in the tier, and this server has no tier_url"
            self._env.warn("tier_url_missing", partitions=cold, why=why)

    def joined(self) -> bool:
        """True once: when the image first holds this process's registration (N1)."""
        if self._joined or not self._metadata.registered():
            return False
        self._joined = True
        self._miss_failed_directories()
        return True

    async def give_up_strays(self) -> None:
        """Rename the strays, once every known log is open (N1, broker/metadata_publisher M3)."""
        try:
            kept, discarded = await self._manager.discard_strays()
            if discarded:
                why = "deleted, or moved away, while this broker was away"
                self._say_many("directories_discarded", discarded, why)
            for where in kept:
                self._keep(where, "a partition that these metadata never knew")
        except errors.PkError as error:
            self._env.warn("delete_failed", partition="strays", error=error.message)

    def _gone(self, found: Identity) -> bool:
        """Whether the image gives this broker no replica of that log's partition (rule L15).

        False if the log is of another cluster or of another branch of its metadata log, or newer
        than the image.  This method only reads the image, so a write lane may call it too.
        """
        image = self._metadata.image
        if found.cluster_id != self._manager.cluster_id:
            return False
        if not image.has_reached(found.genesis, found.created):
            return False
        state = image.partition(found.key)
        return state is None or self._env.node_id not in state.replicas

    def _named(self, key: PartitionKey) -> str:
        """The directory that the image names for the replica here; "" = none (rule R11)."""
        state = self._metadata.image.partition(key)
        return "" if state is None else state.directory_of(self._env.node_id)

    def _say_many(self, event: str, directories: list[str], why: str) -> None:
        facts = {"directories": directories[:20], "count": len(directories), "why": why}
        self._env.warn(event, **facts)

    def _keep(self, where: str, why: str) -> None:
        self._env.metrics.kept_directories.inc()
        self._env.warn("directory_kept", directory=where, why=why)

    def _miss_failed_directories(self) -> None:
        """Partitions that no working directory holds become UNOPENED if one has failed (N3)."""
        failed = [each for each in self._manager.directories if each.failed is not None]
        if not failed:
            return
        root = failed[0].disk.storage.root
        for topic, number, _ in self._metadata.image.partitions_of(self._env.node_id):
            key = PartitionKey(topic.topic_id, number)
            absent = self._replicas.state(key) is ReplicaState.ABSENT
            if absent and not self._manager.is_stray(key):
                error = errors.StorageFailed(
                    f"{topic.name}-{number} is in no directory that works, so it is taken to be in "
                    f"{root}, which failed: {failed[0].failed}",
                    directory=root,
                )
                self._replicas.on(key, ReplicaEvent.OPEN_FAILED, error)
                self._env.warn("partition_offline", partition=str(key), error=error.message)

    # -- what is to be created -------------------------------------------------------------------
    def _is_here(self, topic_id: str, tp: TopicPartition) -> bool:
        """Whether the log is no stray (broker/metadata_publisher M3)."""
        return self._is_mine(PartitionKey(topic_id, tp.partition))

    def _config_of(self, topic_id: str) -> LogConfig:
        """Return the settings of a topic's logs."""
        return LogConfig.of(self._metadata.settings_of(self._metadata.image.topics[topic_id].name))

    def _adopt(self, key: PartitionKey, wanted: dict[str, Any]) -> None:
        """Host the partition `key`, whose log is open now."""
        log = self._manager.get(key)
        assert log is not None
        topic = self._metadata.image.topics[key.topic_id].name
        partition = Partition(
            self._host,
            key,
            log,
            self._writers.of(self._manager.disk_of(key)),
            wanted,
            tiered=self._metadata.is_tiered(topic, wanted),
        )
        self._partitions[key] = partition
        # R4 holds after a restart
        partition.update_high_watermark(self._manager.high_watermark(key))

    async def create_missing(self, keys: Sequence[PartitionKey], *, again: bool = False) -> None:
        """Create the logs of those of `keys` whose replica is assigned to this broker and not open.

        keys: at most `VISIT_MAX`.  again: also UNOPENED replicas (N2).
        """
        if not self._joined:
            return  # N1
        async with self._creating:
            missing = [
                key
                for key in keys
                if (state := self._replicas.state(key)) not in OPEN
                and (again or state is not ReplicaState.UNOPENED)
                and self._is_mine(key)
            ]
            if not missing:
                return
            topics = self._topics_of(missing)
            outcomes = await self._manager.create_all(
                [self._new(key, topics[key.topic_id][2], again) for key in missing]
            )
            made = dict(zip(missing, outcomes, strict=True))
            kept = [key for key in missing if self._is_mine(key)]  # the image may have moved on
            topics = self._topics_of(kept)
            for key in kept:
                outcome = made.pop(key)
                name, wanted, config = topics[key.topic_id]
                if isinstance(outcome, errors.PkError):
                    self._not_created(key, name, outcome)
                    continue
                outcome.config = config
                self._adopt(key, wanted)
            for key, outcome in made.items():
                self._replicas.forget(key)
                if not isinstance(outcome, errors.PkError):
                    await discard(
                        self._env,
                        self._manager,
                        self._reports,
                        key,
                        str(outcome.topic_partition),
                    )

    def _new(self, key: PartitionKey, config: LogConfig, again: bool = False) -> NewPartition:
        image = self._metadata.image
        tp = TopicPartition(image.topics[key.topic_id].name, key.partition)
        return NewPartition(
            tp, key.topic_id, config, again, image.origin, image.offset, self._named(key)
        )

    async def clear_operator_mark(self, key: PartitionKey) -> None:
        """Remove an operator's mark from a replica that has left ISR and ELR (N5).

        An adopted log then serves as usual, and an empty log may replace a discarded one.
        """
        config = self._topics_of([key])[key.topic_id][2]
        try:
            await self._manager.clear_operator_mark(self._new(key, config))
        except errors.PkError as error:  # tried again with the next change
            self._env.warn("adoption_failed", partition=str(key), error=error.message)
            return
        if isinstance(self._replicas.why_unopened(key), errors.LogMissing):
            self._replicas.on(key, ReplicaEvent.DISCARD_KNOWN)
        self._controller.heartbeat_soon()

    def _is_mine(self, key: PartitionKey) -> bool:
        """Whether the image gives this broker a replica of the partition."""
        state = self._metadata.image.partition(key)
        return state is not None and self._env.node_id in state.replicas

    def _topics_of(
        self, keys: Iterable[PartitionKey]
    ) -> dict[str, tuple[str, dict[str, Any], LogConfig]]:
        """Return name and settings of the topics of `keys`, by id; each topic is read once."""
        found = {}
        for topic_id in {key.topic_id: None for key in keys}:
            name = self._metadata.image.topics[topic_id].name
            wanted = self._metadata.settings_of(name)
            found[topic_id] = name, wanted, LogConfig.of(wanted)
        return found

    def _not_created(self, key: PartitionKey, topic: str, error: errors.PkError) -> None:
        """Make the replica UNOPENED and report it to the controller with an early heartbeat
        (N2).
        """
        self._replicas.on(key, ReplicaEvent.OPEN_FAILED, error)
        self._env.warn("create_failed", topic=topic, partition=key.partition, error=error.message)
        self._controller.heartbeat_soon()  # the controller elects another replica

    async def retry_unopened(self) -> None:
        """Reopen incomplete logs and create missing ones again, every RETRY_CREATE_MS (N2, N4)."""
        while True:
            await self._env.clock.sleep_ms(RETRY_CREATE_MS)
            for key in self._replicas.unopened():
                if self._metadata.image.partition(key) is None:
                    self._replicas.forget(key)
            for each in [each for each in self._partitions.values() if each.reopenable]:
                await self._guarded(self._reopen(each))
            unopened = self._replicas.unopened()
            waiting = [key for key, error in unopened.items() if error.retriable]
            for some in together(waiting):
                await self._guarded(self.create_missing(some, again=True))
                for key in some:
                    partition, state = (
                        self._partitions.get(key),
                        self._metadata.image.partition(key),
                    )
                    if partition is not None and state is not None:
                        await self._guarded(self._lead_or_follow(partition, state))

    async def _reopen(self, partition: Partition) -> None:
        """Open a log whose truncation a full disk interrupted, then lead or follow again (N4).

        While there is still no room, the partition stays OFFLINE.
        """
        key = partition.key
        await self._fetchers.wait_until_idle(partition)
        if self._partitions.get(key) is not partition or not partition.reopenable:
            return
        damage: errors.CorruptLog | None = None
        try:
            await self._manager.reopen(key)
        except errors.CorruptLog as found:
            damage = found
        except errors.PkError as error:
            self._env.metrics.refused(error)
            return
        if self._partitions.get(key) is not partition:
            return
        partition.on(ReplicaEvent.REOPENED)
        state = self._metadata.image.partition(key)
        if damage is not None:
            partition.storage_failed(damage)
        elif state is not None:
            self._env.warn(
                "partition_online", partition=str(partition), log_end=partition.log.log_end
            )
            await self._lead_or_follow(partition, state)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """Do `work`; a bug of pk in it does not prevent the retries of the other partitions."""
        try:
            await work
        except Exception as bug:
            self._env.bug("creating a partition", bug)


def may_take_part(state: PartitionState, me: NodeId, *, has_log: bool) -> bool:
    """Whether this broker may serve a replica again that an operator adopted or discarded (N5).

    A discarded log may begin empty if a leader fills it, or if no other replica has records.
    Otherwise, if no broker leads and this is the only last-known replica, a recovery election (rule
    R3) would take the empty log for the longest one, and the other replicas would be cut to it.
    """
    if me in (*state.isr, *state.elr):
        return False
    return has_log or state.leader not in (NONE, me) or state.replicas == (me,)


async def discard(
    env: Environment,
    manager: LogManager,
    reports: DirectoryReports,
    key: PartitionKey,
    name: str,
) -> None:
    """Delete the log of a replica that this broker should not have; `name` is for the log."""
    reports.forget(key)
    try:
        await manager.delete(key)
    except errors.PkError as error:
        env.warn("delete_failed", partition=name, error=error.message)


def together(keys: list[PartitionKey]) -> Iterator[list[PartitionKey]]:
    """Yield the keys in groups of `VISIT_MAX`, the number of logs that a single visit creates."""
    return (keys[at : at + VISIT_MAX] for at in range(0, len(keys), VISIT_MAX))


def typed(failure: BaseException) -> errors.PkError:
    """Return `failure` as an error of pk; an exception of any other class is an internal error."""
    return failure if isinstance(failure, errors.PkError) else errors.InternalError(repr(failure))
