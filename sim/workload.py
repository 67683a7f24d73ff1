"""The client of a simulated run: producers and an administrator over pk's own engines.

They run in the nodes "client" and "admin" and know the cluster by its addresses only.  Their
results go to the oracle and to the reader checks.  An error that the faults of the run cannot
explain is a violation.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pk import errors
from pk.client.accumulator import RecordAccumulator
from pk.client.network_client import NetworkClient
from pk.client.options import producer_options
from pk.client.produce_engine import ProduceEngine
from pk.client.record_arguments import record_size
from pk.client.record_set import OnDelivery
from pk.sim.options import BROKER, NEWER_LEVEL, SimOptions, TopicPlan
from pk.sim.oracle import Oracle, Sent, digest_of, value_of
from pk.types import NONE
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.world import World

RETRIES = {
    "request_timeout_ms": 2_000,
    "retry_backoff_ms": 20,
    "retry_backoff_max_ms": 300,
}
DELIVERY_MS = (2_500, 30_000)
OPEN_MS = 500
#: Factors of the pause of a producer: SLOWER if the run is ahead of its planned acknowledgements,
#: UNPROMISED without acks=all, because such acknowledgements promise nothing.
SLOWER = 4
UNPROMISED = 3
ADMIN_TIMEOUT_MS = 1_500
#: How often the chore "upgrade" asks: a level is raised once in a run, so not in its first moment.
UPGRADES = 0.1

#: Errors of a replica that rotted, or whose directory is lost (rules L9, L15).
DAMAGE = (errors.CorruptLog, errors.LogMissing)

#: Errors while brokers still register, or while the broker asked does not know the topic yet.
_NOT_YET = (errors.InvalidReplicationFactor, errors.UnknownTopicId)
#: Errors of a partition that cannot be moved.
CANNOT_MOVE = (
    errors.InvalidReplicaAssignment,  # a broker is not registered yet, or none could lead
    errors.NoReassignmentInProgress,
    errors.NotEnoughReplicas,  # too few would stay in sync (rule R8)
    errors.UnknownTopicOrPartition,
)

OnTrouble = Callable[[str], None]


def cluster_of(world: World, bootstrap: str, name: str) -> NetworkClient:
    return NetworkClient(world, bootstrap, client_id=name, metadata_max_age_ms=5_000, **RETRIES)


def watched(work: Coroutine[Any, Any, None], trouble: OnTrouble) -> asyncio.Task[None]:
    """Create a task; `trouble` is called if the task ends with an exception."""

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (bug := task.exception()) is not None:
            trouble(f"{task.get_coro()} ended: {bug!r}")

    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(ended)
    return task


class SimProducer:
    """A producer that sends bursts of records and reports their outcomes to the oracle."""

    def __init__(
        self,
        world: World,
        bootstrap: str,
        name: str,
        oracle: Oracle,
        options: SimOptions,
        rng: random.Random,
        given: dict[str, Any],
        trouble: OnTrouble,
    ) -> None:
        self._trouble = trouble
        self.name = name
        self._world = world
        self._oracle = oracle
        self._options = options
        self._rng = rng
        delivery = {"delivery_timeout_ms": rng.choice(DELIVERY_MS), "linger_ms": 2, **RETRIES}
        settings, self._ordered = producer_options(
            {"batch_size": rng.choice([1_000, 20_000]), **delivery, **given}
        )
        self.engine = ProduceEngine(world, cluster_of(world, bootstrap, name), settings)
        self.over = False  #: a fatal error ended it
        self._task: asyncio.Task[None] | None = None
        self._replicated = {plan.name: plan.replication_factor > 1 for plan in options.topics}

    def start(self) -> None:
        self.engine.cluster.start()
        self._task = watched(self._run(), self._trouble)

    def stop(self) -> None:
        """Stop sending new records; records already sent are still delivered."""
        if self._task is not None:
            self._task.cancel()
        self.engine.begin_flush()

    async def _run(self) -> None:
        rng, options = self._rng, self._options
        while True:
            slower = SLOWER if self._oracle.ahead else 1
            slower *= 1 if self._ordered else UNPROMISED
            await self._world.clock.sleep_ms(slower * rng.uniform(*options.pace_ms))
            topic = rng.choice(options.topics).name
            if not self._oracle.topics[topic].life:
                continue
            try:
                accumulator = await self.engine.open(topic, OPEN_MS)
            except errors.PkError:
                if self.engine.fatal is None:
                    continue  # the topic was deleted, or no broker answers
                self._ended(self.engine.fatal)
                return
            known = self.engine.cluster.metadata.topics.get(topic)
            for _ in range(rng.randint(*options.burst)):
                partition = rng.randrange(known.partitions) if known is not None else None
                self._send(accumulator, topic, partition if rng.random() < 0.7 else None)
            self.engine.poke()
            if self.engine.fatal is not None:
                self._ended(self.engine.fatal)
                return

    def _ended(self, error: errors.PkError) -> None:
        """Check a fatal error: only a gap after lost acknowledged records is allowed (rule L6)."""
        self.over = True
        if not (isinstance(error, errors.OutOfOrderSequence) and self._oracle.lossy):
            self._trouble(f"V6: {self.name} can send no more: {error!r}")

    def _send(self, accumulator: RecordAccumulator, topic: str, partition: int | None) -> None:
        rng = self._rng
        name = self._oracle.next_id(self.name)
        value = value_of(name, rng.randint(*self._options.value_bytes))
        key = f"k{rng.randrange(20)}".encode() if rng.random() < 0.6 else None
        headers: list[tuple[str, bytes | None]] = []
        if rng.random() < 0.2:
            headers = [("h", b"1"), ("h", None)]
        digest = digest_of(key, value, headers)
        sent = self._oracle.send(name, topic, digest, ordered=self._ordered)
        known = self.engine.cluster.metadata.topics.get(topic)
        size = record_size(value, key, headers, topic)
        told = self._told(sent, "" if known is None else known.topic_id)
        try:
            future = accumulator.append(
                value, key, headers or None, partition, None, told, size=size
            )
        except errors.PkError as error:  # a fatal error ended the producer
            self._oracle.failed(sent, repr(error))
            return
        if future is None:
            self._oracle.failed(sent, "buffer_memory is full")

    def _told(self, sent: Sent, topic_id: str) -> OnDelivery:
        def told(metadata: Any, error: errors.PkError | None) -> None:
            if error is not None:
                self._oracle.failed(sent, repr(error))
            elif not self._ordered and (
                self._replicated[sent.topic] or self._oracle.topics[sent.topic].moved
            ):
                self._oracle.failed(sent, "acks=1: the next leader may not have it")
            elif topic_id in self._oracle.topics[sent.topic].former:
                self._oracle.failed(sent, "by a leader that has not heard of the deletion yet")
            else:
                self._oracle.acknowledged(sent, metadata.partition, metadata.offset)

        return told


class Result(enum.Enum):
    """The outcome of a chore's request."""

    DONE = "done"
    MOOT = "moot"  #: it was done before, or is not needed any more
    REFUSED = "refused"


class SimAdmin:
    """An administrator that creates the topics and then does one chore after the other."""

    def __init__(
        self,
        world: World,
        bootstrap: str,
        oracle: Oracle,
        options: SimOptions,
        rng: random.Random,
        bounds_of: Callable[[str, int], tuple[int, int]],
        trouble: OnTrouble,
    ) -> None:
        self._world = world
        self._oracle = oracle
        self._options = options
        self._rng = rng
        self._bounds_of = bounds_of  #: returns (log_start, high watermark) of the last sample
        self._trouble = trouble
        self._cluster = cluster_of(world, bootstrap, "admin")
        self.resting = False
        self.counts: dict[str, int] = {}  #: completed chores by name
        self._planned: dict[str, str] = {}  #: topic → its id at the last `_resize`

    async def run(self) -> None:
        self._cluster.start()
        for plan in self._options.topics:
            await self._create(plan)
        while not self.resting and self._options.chores:
            await self._world.clock.sleep_ms(self._rng.uniform(*self._options.chore_every_ms))
            if not self.resting:
                plan = self._rng.choice(self._options.topics)
                chore = self._rng.choice(self._options.chores)
                await getattr(self, f"_{chore}")(plan)
                self.counts[chore] = self.counts.get(chore, 0) + 1

    async def close(self) -> None:
        await self._cluster.close()

    async def _ask(self, request: Any, node: int = NONE) -> Any:
        """Ask until a broker answers, first `node`; the caller handles errors in the reply."""
        cluster = self._cluster
        while True:
            try:
                if node != NONE:
                    return await cluster.call_node(node, request, timeout_ms=ADMIN_TIMEOUT_MS)
                return await cluster.call_any(request, timeout_ms=ADMIN_TIMEOUT_MS)
            except errors.RetriableError:
                node = NONE
                await self._world.clock.sleep_ms(self._rng.uniform(20, 200))
            except errors.PkError as error:
                self._trouble(f"admin: {request.DESCRIPTOR.name}: {error!r}")
                await self._world.clock.sleep_ms(1_000)

    async def _until_done(
        self,
        make: Callable[[], Any],
        moot: tuple[type[errors.PkError], ...],
        passes: Callable[[errors.PkError], bool] = lambda error: isinstance(error, _NOT_YET),
    ) -> Result:
        """Repeat a request with one result while its error is retriable or `passes(error)`.

        Errors of the classes `moot` mean that there is nothing to do.
        """
        leader = NONE
        while True:
            reply = await self._ask(make(), leader)
            (result,) = reply.results
            if not result.HasField("error"):
                return Result.DONE
            error = frames.raise_error(result.error)
            if isinstance(error, moot):
                return Result.MOOT
            # the error names it if only the leader may answer
            leader = int(error.details.get("leader", NONE))
            if not error.retriable and not passes(error):
                self._trouble(f"admin: {make().DESCRIPTOR.name}: {error!r}")
                return Result.REFUSED
            await self._world.clock.sleep_ms(self._rng.uniform(20, 200))

    # -- chores ------------------------------------------------------------------------------------

    async def _create(self, plan: TopicPlan) -> None:
        request = wire.CreateTopicsRequest()
        request.topics.add(
            name=plan.name,
            partitions=plan.partitions,
            replication_factor=plan.replication_factor,
            configs={"flush_on_ack": "false", **plan.configs},
        )
        result = await self._until_done(lambda: request, (errors.TopicAlreadyExists,))
        if result is not Result.REFUSED:
            before = self._oracle.topics[plan.name].topic_id
            while (info := await self._info(plan.name)).topic_id == before:
                # the broker asked does not know the new topic yet
                await self._world.clock.sleep_ms(50)
            self._oracle.created(plan.name, info.topic_id, plan.partitions)

    async def _info(self, name: str) -> wire.TopicInfo:
        while True:
            reply = await self._ask(wire.MetadataRequest(topics=[name]))
            info: wire.TopicInfo = reply.topics[0]
            if not info.HasField("error"):
                return info
            await self._world.clock.sleep_ms(50)

    async def _recreate(self, plan: TopicPlan) -> None:
        self._oracle.deleting(plan.name)
        # the id keeps a late retry from deleting the next topic
        topic_id = self._oracle.topics[plan.name].topic_id
        purge = self._rng.random() < 0.5
        request = wire.DeleteTopicsRequest(topic_ids=[topic_id], purge_tier=purge)
        gone = (errors.UnknownTopicOrPartition, errors.UnknownTopicId)
        if await self._until_done(lambda: request, gone) is not Result.REFUSED:
            await self._world.clock.sleep_ms(self._rng.uniform(0, 300))
            await self._create(plan)

    async def _grow(self, plan: TopicPlan) -> None:
        topic = self._oracle.topics[plan.name]
        total = topic.partitions + 1
        if total > 4:
            return
        request = wire.CreatePartitionsRequest()
        request.topics.add(name=plan.name, total_count=total)
        result = await self._until_done(lambda: request, (errors.InvalidPartitions,))
        if result is not Result.REFUSED:
            while len((await self._info(plan.name)).partitions) < total:
                # the broker asked does not know the new partitions yet
                await self._world.clock.sleep_ms(50)
            self._oracle.grown(plan.name, total)

    async def _delete_records(self, plan: TopicPlan) -> None:
        topic = self._oracle.topics[plan.name]
        partition = self._rng.randrange(topic.partitions)
        start, end = self._bounds_of(topic.topic_id, partition)
        if end <= start:
            return
        before = self._rng.randint(start, end)
        self._oracle.deleting_records(plan.name, partition, before)
        request = wire.DeleteRecordsRequest()
        request.items.add(topic_id=topic.topic_id, partition=partition, before_offset=before)
        out = (errors.OffsetOutOfRange,)  # records were lost, or retention was faster

        def passes(error: errors.PkError) -> bool:
            return isinstance(error, _NOT_YET) or self._explained(error, plan.name, partition)

        if await self._until_done(lambda: request, out, passes) is Result.DONE:
            self._oracle.deleted_records(plan.name, topic.topic_id, partition, before)

    def _explained(self, error: errors.PkError, topic: str, partition: int) -> bool:
        """Return whether known damage explains the error.

        The leader looked for an offset and met a damaged log (rule L9), or a damaged log of the
        table (rule T8).
        """
        if isinstance(error, errors.TierTableChanged):
            return self._oracle.may_have_changed(error.details.get("uri", ""))
        return isinstance(error, DAMAGE) and self._oracle.may_be_damaged(topic, partition)

    async def _reassign(self, plan: TopicPlan) -> None:
        """Move a partition to other brokers, or cancel its reassignment (KIP-455)."""
        topic, rng = self._oracle.topics[plan.name], self._rng
        brokers = [node.number for node in self._options.with_role(BROKER)]
        request = wire.AlterReassignmentsRequest()
        asked = request.reassignments.add(
            topic=plan.name,
            topic_id=topic.topic_id,
            partition=rng.randrange(topic.partitions),
        )
        if rng.random() < 0.2:
            asked.cancel = True
        else:
            asked.replicas.extend(rng.sample(brokers, plan.replication_factor))
            self._oracle.moving(plan.name)
        await self._until_done(lambda: request, CANNOT_MOVE)

    async def _reassign_back(self, plan: TopicPlan) -> None:
        """Move a partition to other brokers, and back while that reassignment goes on."""
        topic, rng = self._oracle.topics[plan.name], self._rng
        partition = rng.randrange(topic.partitions)
        infos = {each.partition: each for each in (await self._info(plan.name)).partitions}
        if partition not in infos:
            return  # the broker asked does not know the partition yet
        home = list(infos[partition].replicas)
        brokers = [node.number for node in self._options.with_role(BROKER)]
        away = rng.sample(brokers, plan.replication_factor)
        for replicas in (away, home):
            await self._move(plan.name, partition, replicas)
            await self._world.clock.sleep_ms(rng.uniform(0, 400))

    async def _resize(self, plan: TopicPlan) -> None:
        """Move a partition to fewer or more replicas, and cancel some of these moves midway.

        A plan of the last such chore is executed first if its topic was deleted since: the
        controller must refuse it (rule R10).
        """
        topic, rng = self._oracle.topics[plan.name], self._rng
        partition = rng.randrange(topic.partitions)
        brokers = [node.number for node in self._options.with_role(BROKER)]
        replicas = rng.sample(brokers, rng.randint(min(plan.copies, len(brokers)), len(brokers)))
        planned = self._planned.get(plan.name, topic.topic_id)
        self._planned[plan.name] = topic.topic_id
        if planned != topic.topic_id:
            old = wire.AlterReassignmentsRequest()
            old.reassignments.add(topic=plan.name, topic_id=planned, partition=0, replicas=replicas)
            refused = (errors.UnknownTopicId, errors.UnknownTopicOrPartition)
            if await self._until_done(lambda: old, refused) is Result.DONE:
                self._trouble(f"V18: a plan for {planned} moved topic {topic.topic_id}")
        await self._move(plan.name, partition, replicas)
        await self._world.clock.sleep_ms(rng.uniform(0, 1_500))
        if rng.random() < 0.6:
            back = wire.AlterReassignmentsRequest()
            back.reassignments.add(
                topic=plan.name, topic_id=topic.topic_id, partition=partition, cancel=True
            )
            await self._until_done(lambda: back, CANNOT_MOVE)

    async def _upgrade(self, _plan: TopicPlan) -> None:
        """Raise the level of `pk.format` now and then, as far as every node knows it (rule Q6)."""
        if self._rng.random() > UPGRADES:
            return
        request = wire.UpgradeClusterRequest(to=NEWER_LEVEL)
        while not self.resting:
            try:
                await self._cluster.call_any(request, timeout_ms=ADMIN_TIMEOUT_MS)
                return
            except errors.UnsupportedFeature:
                return  # a node does not know the level, or was not heard in this term
            except errors.RetriableError:
                await self._world.clock.sleep_ms(self._rng.uniform(20, 200))

    async def _move(self, topic: str, partition: int, replicas: Sequence[int]) -> None:
        request = wire.AlterReassignmentsRequest()
        request.reassignments.add(
            topic=topic,
            topic_id=self._oracle.topics[topic].topic_id,
            partition=partition,
            replicas=replicas,
        )
        self._oracle.moving(topic)
        await self._until_done(lambda: request, CANNOT_MOVE)

    async def _toggle(self, plan: TopicPlan) -> None:
        """Change the durability settings of a topic while records are in flight."""
        rng = self._rng
        copies = rng.randint(1, plan.replication_factor)
        self._oracle.weakening(plan.name, min(copies, plan.copies))
        changes = {
            "flush_on_ack": rng.choice(["true", "false"]),
            "min_insync_replicas": str(copies),
        }
        request = wire.AlterConfigsRequest()
        change = request.changes.add(set=changes)
        change.resource.type, change.resource.name = "topic", plan.name
        await self._until_done(lambda: request, ())

    async def _elect(self, plan: TopicPlan) -> None:
        """Ask for the election of the preferred leaders of all partitions."""
        await self._ask(wire.ElectLeadersRequest())

    async def _configure(self, plan: TopicPlan) -> None:
        rng = self._rng
        changes = {"segment_bytes": str(rng.choice([14_336, 30_000]))}
        if plan.tiered:
            changes["tier_max_lag_ms"] = str(rng.choice([50, 500]))
            changes["local_retention_bytes"] = str(rng.choice([0, 15_000, 40_000]))
        request = wire.AlterConfigsRequest()
        change = request.changes.add(set=changes)
        change.resource.type, change.resource.name = "topic", plan.name
        await self._until_done(lambda: request, ())
