"""A broker's replicas on its disks: what is there, what is to be created, what cannot be.

World-generic; a part of following the metadata log (broker/metadata_publisher.py, whose image and
`unopened` it works on).

Invariants
  N1  nothing is created, and no stray given up, before the image holds this very process's
      registration (rule Q2): an older image may name an earlier life of a topic, and not know the
      one that stands here (log/strays.py)
  N2  a partition that cannot be created or opened is offline with its cause; the others go on, and
      creation is tried again while the cause may pass (broker/metadata_publisher M4)
  N3  a partition that is in no working directory is not created anew while a directory has failed:
      it is offline, its records are there (broker/metadata_publisher M6)
  N4  a log that a full disk left half-way is offline until there is room; then it is opened as a
      start of the process would, and goes on from what is there
  N5  a log that this broker had and that is missing, adopted or discarded by hand is offline, and
      its broker says so in every heartbeat, until the replica is in neither ISR nor ELR: so it
      leaves both before the broker is unfenced (rule L15)
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any

from pk import errors
from pk.log.creation import VISIT_MAX, NewPartition
from pk.log.identity import Identity
from pk.log.plan import LogConfig
from pk.server.metadata.image import PartitionState
from pk.server.replica.context import BrokerContext, MetadataView
from pk.server.replica.partition import Partition
from pk.types import NONE, NodeId, PartitionKey, TopicPartition

RETRY_CREATE_MS = 5_000


class ReplicaCreator:
    """See the module's docstring."""

    def __init__(self, core: BrokerContext, publisher: MetadataView) -> None:
        self._core = core
        self._publisher = publisher
        self._creating = asyncio.Lock()
        self._joined = False  #: N1

    # -- what is there ---------------------------------------------------------------------------

    async def load(self) -> None:
        """Open the logs of every partition the image gives this broker."""
        core, unopened = self._core, self._publisher.unopened
        core.manager.gone = self._gone
        problems = await core.manager.load(self._config_of)
        for where, why in core.manager.restored.items():
            core.warn("identity_restored", directory=where, why=why)
        for key, failure in problems:
            error = typed(failure)
            if isinstance(error, errors.LogUnidentified):  # of what partition: see `joined`
                self._keep(error.details.get("directory", str(key)), error.message)
                continue
            unopened[key] = error
            if isinstance(error, errors.CorruptLog):
                core.metrics.damaged.inc()
            core.warn("partition_offline", partition=str(key), error=error.message)
        opened = sorted(core.manager.logs())
        topics = self._topics_of(opened)
        for key in opened:
            self._adopt(key, topics[key.topic_id][1])
            core.corruption.opened(core.partitions[key])
        self._miss_failed_directories()
        self._miss_the_tier()

    def _miss_the_tier(self) -> None:
        """A flag that was left out, say: readers are refused, so whoever started it is told."""
        logs = self._core.manager.logs().values()
        cold = sum(log.local_log_start > log.log_start for log in logs)
        if cold and not self._core.tier.enabled:
            why = "their older records are in the tier, and this server has no tier_url"
            self._core.warn("tier_url_missing", partitions=cold, why=why)

    def joined(self) -> bool:
        """N1: True once, when the image first holds this process's registration."""
        if self._joined or not self._publisher.registered():
            return False
        self._joined = True
        self._miss_failed_directories()
        return True

    async def give_up_strays(self) -> None:
        """N1, broker/metadata_publisher M3: once everything that is known was opened."""
        try:
            kept = await self._core.manager.discard_strays()
            for where in kept:
                self._keep(where, "a partition that these metadata never knew")
        except errors.PkError as error:
            self._core.warn("delete_failed", partition="strays", error=error.message)

    def _gone(self, found: Identity) -> bool:
        """Rule L15: the metadata can know the partition of that log, and this broker is to have no
        log of it.  Asked on a write lane, too: it reads the image and changes nothing.
        """
        core, image = self._core, self._publisher.image
        if (found.cluster_id, found.genesis) != (core.manager.cluster_id, image.genesis):
            return False
        if not 0 <= found.created <= image.offset:
            return False
        state = image.partition(found.key)
        return state is None or core.node_id not in state.replicas

    def _keep(self, where: str, why: str) -> None:
        self._core.metrics.kept_directories.inc()
        self._core.warn("directory_kept", directory=where, why=why)

    def _miss_failed_directories(self) -> None:
        """broker/metadata_publisher M6: what no working directory holds lies in the failed one."""
        failed = [each for each in self._core.manager.directories if each.failed is not None]
        if not failed:
            return
        root = failed[0].disk.storage.root
        for topic, number, _ in self._publisher.image.partitions_of(self._core.node_id):
            key = PartitionKey(topic.topic_id, number)
            known = key in self._core.partitions or key in self._publisher.unopened
            if not known and not self._core.manager.is_stray(key):
                error = errors.StorageFailed(
                    f"{topic.name}-{number} is in no directory that works, so it is taken to be in "
                    f"{root}, which failed: {failed[0].failed}",
                    directory=root,
                )
                self._publisher.unopened[key] = error
                self._core.warn("partition_offline", partition=str(key), error=error.message)

    # -- what is to be created -------------------------------------------------------------------
    def _config_of(self, topic_id: str, tp: TopicPartition) -> LogConfig | None:
        """For `LogManager.load`: None = a stray (broker/metadata_publisher M3)."""
        state = self._publisher.image.partition(PartitionKey(topic_id, tp.partition))
        if state is None or self._core.node_id not in state.replicas:
            return None
        return LogConfig.of(
            self._publisher.settings_of(self._publisher.image.topics[topic_id].name)
        )

    def _adopt(self, key: PartitionKey, wanted: dict[str, Any]) -> None:
        core = self._core
        log = core.manager.get(key)
        assert log is not None
        topic = self._publisher.image.topics[key.topic_id].name
        partition = Partition(
            core,
            key,
            log,
            core.writer_of(core.manager.disk_of(key)),
            wanted,
            tiered=self._publisher.is_tiered(topic, wanted),
        )
        core.partitions[key] = partition
        partition.heard_watermark(core.manager.high_watermark(key))  # R4 holds over a restart

    async def create_missing(self, keys: Sequence[PartitionKey], *, again: bool = False) -> None:
        """Create those of `keys` that this broker is to have and has not, together
        (broker/metadata_publisher M4).

        At most `VISIT_MAX`.  `again`: also those that could not be created before.
        """
        core = self._core
        if not self._joined:
            return  # N1
        async with self._creating:
            missing = [
                key
                for key in keys
                if key not in core.partitions
                and (again or key not in self._publisher.unopened)
                and self._is_mine(key)
            ]
            if not missing:
                return
            topics = self._topics_of(missing)
            outcomes = await core.manager.create_all(
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
                self._publisher.unopened.pop(key, None)
                self._adopt(key, wanted)
            for key, outcome in made.items():
                self._publisher.unopened.pop(key, None)
                if not isinstance(outcome, errors.PkError):
                    await self._publisher.discard(key, str(outcome.topic_partition))

    def _new(self, key: PartitionKey, config: LogConfig, again: bool = False) -> NewPartition:
        image = self._publisher.image
        tp = TopicPartition(image.topics[key.topic_id].name, key.partition)
        return NewPartition(tp, key.topic_id, config, again, image.genesis, image.offset)

    async def told(self, key: PartitionKey) -> None:
        """N5: the cluster counts no more on what an operator adopted or discarded here."""
        core = self._core
        config = self._topics_of([key])[key.topic_id][2]
        try:
            await core.manager.told(self._new(key, config))
        except errors.PkError as error:  # tried again with the next change
            core.warn("adoption_failed", partition=str(key), error=error.message)
            return
        if isinstance(self._publisher.unopened.get(key), errors.LogMissing):
            del self._publisher.unopened[key]
        core.lifecycle.heartbeat_soon()

    def _is_mine(self, key: PartitionKey) -> bool:
        """The image gives this broker a replica of it."""
        state = self._publisher.image.partition(key)
        return state is not None and self._core.node_id in state.replicas

    def _topics_of(
        self, keys: Iterable[PartitionKey]
    ) -> dict[str, tuple[str, dict[str, Any], LogConfig]]:
        """Name and settings of the topics of `keys`, by id: of a thousand partitions once."""
        found = {}
        for topic_id in {key.topic_id: None for key in keys}:
            name = self._publisher.image.topics[topic_id].name
            wanted = self._publisher.settings_of(name)
            found[topic_id] = name, wanted, LogConfig.of(wanted)
        return found

    def _not_created(self, key: PartitionKey, topic: str, error: errors.PkError) -> None:
        self._publisher.unopened[key] = error
        self._core.warn("create_failed", topic=topic, partition=key.partition, error=error.message)
        self._core.lifecycle.heartbeat_soon()  # the controller elects another replica

    async def retry_unopened(self) -> None:
        """N4, broker/metadata_publisher M4: what could not be done for want of space is tried
        again."""
        while True:
            await self._core.clock.sleep_ms(RETRY_CREATE_MS)
            for key in [
                key
                for key in self._publisher.unopened
                if self._publisher.image.partition(key) is None
            ]:
                del self._publisher.unopened[key]
            for torn in [each for each in self._core.partitions.values() if _half_way(each)]:
                await self._guarded(self._reopen(torn))
            waiting = [key for key, error in self._publisher.unopened.items() if error.retriable]
            for some in together(waiting):
                await self._guarded(self.create_missing(some, again=True))
                for key in some:
                    partition, state = (
                        self._core.partitions.get(key),
                        self._publisher.image.partition(key),
                    )
                    if partition is not None and state is not None:
                        await self._guarded(self._publisher.lead_or_follow(partition, state))

    async def _reopen(self, partition: Partition) -> None:
        """Open a log that a full disk left half-way, now that there is room (N4)."""
        core, key = self._core, partition.key
        await core.fetchers.stand_still(partition)
        if core.partitions.get(key) is not partition or not _half_way(partition):
            return
        damage: errors.CorruptLog | None = None
        try:
            await core.manager.reopen(key)
        except errors.CorruptLog as found:
            damage = found
        except errors.PkError as error:
            core.metrics.refused(error)
            return
        if core.partitions.get(key) is not partition:
            return
        partition.problem = None
        state = self._publisher.image.partition(key)
        if damage is not None:
            core.storage_failed(partition, damage)
        elif state is not None:
            core.warn("partition_online", partition=str(partition), log_end=partition.log.log_end)
            await self._publisher.lead_or_follow(partition, state)

    async def _guarded(self, work: Coroutine[Any, Any, None]) -> None:
        """What goes wrong with some is no matter of the others."""
        try:
            await work
        except Exception as bug:
            self._core.bug("creating a partition", bug)


def may_take_part(state: PartitionState, me: NodeId, *, has_log: bool) -> bool:
    """N5: whether a replica that an operator adopted or discarded may be served from here again.

    A discarded log begins empty where it is filled from a leader, or where no other replica has
    anything.  With nobody leading, a recovery election (rule R3) would take the empty log for the
    greatest if this replica is the only last-known one; the others would be cut to it.
    """
    if me in (*state.isr, *state.elr):
        return False
    return has_log or state.leader not in (NONE, me) or state.replicas == (me,)


def _half_way(partition: Partition) -> bool:
    """N4: for want of space; what is damaged is nobody's to open."""
    return partition.log.torn and isinstance(partition.problem, errors.StorageFailed)


def together(keys: list[PartitionKey]) -> Iterator[list[PartitionKey]]:
    """As many as are created in one visit."""
    return (keys[at : at + VISIT_MAX] for at in range(0, len(keys), VISIT_MAX))


def typed(failure: BaseException) -> errors.PkError:
    """What is not ours to know is a bug."""
    return failure if isinstance(failure, errors.PkError) else errors.InternalError(repr(failure))
