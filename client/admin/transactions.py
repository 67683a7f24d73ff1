"""The calls of `AdminClient` that concern transactions (KIP-664).

A coordinator knows the transactional ids of the `__transaction_state` partitions that it leads, so
a list combines the replies of all brokers.  The leader of a partition knows the producers that
write to it.  `find_hanging_transactions` compares both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import Message

from pk import errors
from pk.client import arguments
from pk.client.admin.connection import AdminConnection
from pk.client.admin.described import OpenTransaction, everyone, oldest_transaction
from pk.client.admin.prepared_batches import (
    AWAITING_TABLE,
    AwaitedTable,
    awaited_of,
    resolution,
)
from pk.client.coordinator_calls import TRANSACTION
from pk.client.network_client import NetworkClient
from pk.transactional_ids import is_transactional, partition_of_id, partition_of_producer
from pk.types import NONE, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: Transactional ids, or partitions, in one request.
CHUNK = 500
#: States of a transactional id with an open transaction.
OPEN = ("Ongoing", AWAITING_TABLE, "PrepareCommit", "PrepareAbort")
#: The kinds of transactional ids.
PRODUCER, PARTICIPANTS = "producer", "participants"


@dataclass(slots=True, frozen=True)
class TransactionListing:
    """A transactional id: its producer id, its state, its coordinator and its kind.

    kind: "producer", or "participants" for a job, which many tasks write.  The producer id of a job
    is -1; a list of given producer ids has the job once for each of them that it owns.
    """

    transactional_id: str
    producer_id: int
    state: str
    coordinator_id: int
    kind: str = PRODUCER


@dataclass(slots=True, frozen=True)
class TransactionListings:
    """The transactional ids that match, and what is missing from the list.

    loading: partitions of `__transaction_state` whose coordinator still reads them.
    silent: brokers that did not answer.
    """

    transactions: tuple[TransactionListing, ...]
    loading: tuple[int, ...]
    silent: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether every coordinator answered."""
        return not self.loading and not self.silent


@dataclass(slots=True, frozen=True)
class ParticipantDescription:
    """An attempt of a task that joined the open transaction of a job.

    heard_ago_ms: since its last join or heartbeat.  None = its coordinator was elected later and
    has received none; then `finished` is None, too.
    """

    producer_id: int
    producer_epoch: int
    finished: bool | None
    heard_ago_ms: int | None


@dataclass(slots=True, frozen=True)
class JobDescription:
    """What a job has besides the state of its transaction.

    batch: of the open transaction, or else of the last one.  last_committed: the highest committed
    batch.  Both: None = there is none.  batch_write: one batch write, not a streaming query.
    participants: of the open transaction.  awaited: the table that decides it, in the state
    "AwaitingTable".
    """

    query: str
    run: str
    batch: int | None
    last_committed: int | None
    batch_write: bool
    participants: tuple[ParticipantDescription, ...]
    awaited: AwaitedTable | None = None


@dataclass(slots=True, frozen=True)
class HeldPartition:
    """A partition whose last stable offset an open transaction holds back."""

    partition: TopicPartition
    transaction: OpenTransaction


@dataclass(slots=True, frozen=True)
class TransactionDescription:
    """The state of a transactional id.

    producer_id, producer_epoch, timeout_ms: of the kind "producer"; -1, -1 and 0 for a job.
    started_ms: when the open transaction began; None = no transaction is open.
    partitions: of the open transaction; a deleted topic has its id as its name.
    reason: why the coordinator aborted the last transaction; "" = the producer asked.
    job: None = the kind is "producer".  held: the partitions in which the open transaction holds
    back the last stable offset; the leaders that answered name them.
    """

    transactional_id: str
    coordinator_id: int
    state: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    started_ms: int | None
    partitions: tuple[TopicPartition, ...]
    reason: str
    error: errors.PkError | None = None
    job: JobDescription | None = None
    held: tuple[HeldPartition, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of the id: "producer" or "participants"."""
        return PRODUCER if self.job is None else PARTICIPANTS

    def writes_as(self, producer_id: int, producer_epoch: int) -> bool:
        """Return whether a participant of the open transaction has this pair.

        A producer's pair changes while its transaction is ended, so only a job compares it.
        """
        pair = (producer_id, producer_epoch)
        return self.job is None or any(
            (each.producer_id, each.producer_epoch) == pair for each in self.job.participants
        )


@dataclass(slots=True, frozen=True)
class ProducerDescription:
    """A producer that the leader of a partition knows.

    transaction_start: the first offset of its open transaction; None = it has none.
    transaction_began_ms: when the leader appended that offset.
    """

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_ms: int
    coordinator_epoch: int
    transaction_start: int | None
    transaction_began_ms: int | None


@dataclass(slots=True, frozen=True)
class HangingTransaction:
    """An open transaction of a partition that its coordinator will not end in time.

    reason: what is wrong with it.  certain: False = its coordinator did not answer.
    transactional_id: "" = not known.
    """

    partition: TopicPartition
    producer_id: int
    producer_epoch: int
    start_offset: int
    open_ms: int
    transactional_id: str
    reason: str
    certain: bool = True


class TransactionCalls:
    """The calls that concern transactions; `AdminClient` documents their arguments."""

    def __init__(self, connection: AdminConnection) -> None:
        self._connection = connection

    def list_transactions(
        self,
        states: Iterable[str],
        producer_ids: Iterable[int],
        open_longer_ms: int,
        timeout_s: float,
    ) -> TransactionListings:
        """List the transactional ids of all coordinators."""
        request = wire.ListTransactionsRequest(
            states=[arguments.text(each, "states") for each in arguments.items(states, "states")],
            producer_ids=[
                arguments.whole(each, "producer_ids", 0, 2**63 - 1)
                for each in arguments.items(producer_ids, "producer_ids")
            ],
            open_longer_ms=arguments.whole(open_longer_ms, "open_longer_ms", 0, 2**63 - 1),
        )
        cluster = self._connection.cluster
        return self._connection.retrying(lambda ms: _listed(cluster, request, ms), timeout_s)

    def describe_transactions(
        self, transactional_ids: Iterable[str], timeout_s: float
    ) -> list[TransactionDescription]:
        """Describe transactional ids, each by its coordinator; the leaders add what is held."""
        given = arguments.items(transactional_ids, "transactional_ids")
        names = [_id(each, "transactional_ids") for each in given]
        deadline_s = self._connection.deadline_s(timeout_s)
        described = self._of_coordinators(names, timeout_s)
        topics = {each.topic for known in described for each in known.partitions}
        if not topics:
            return described
        held = self._held(topics, self._connection.left_s(deadline_s))
        return [replace(each, held=_held_by(each, held)) for each in described]

    def _of_coordinators(
        self, names: Sequence[str], timeout_s: float
    ) -> list[TransactionDescription]:
        """Return the coordinators' descriptions."""
        found = dict[str, wire.TransactionDescription]()
        cluster = self._connection.cluster
        deadline_s = self._connection.deadline_s(timeout_s)
        self._connection.retrying(lambda ms: _describe(cluster, names, found, ms), timeout_s)
        topics = self._topic_names(self._connection.left_s(deadline_s))
        return [_description_of(found[name], topics) for name in names]

    def _held(self, topics: Collection[str], timeout_s: float) -> list[HeldPartition]:
        """Return the partitions of these topics with the open transaction that begins first."""
        existing = set(topics).intersection(self._topic_names(timeout_s).values())
        if not existing:
            return []
        request = wire.DescribePartitionsRequest(topics=sorted(existing))
        cluster = self._connection.cluster
        try:
            views = self._connection.retrying(lambda ms: everyone(cluster, request, ms), timeout_s)
        except errors.UnknownTopicOrPartition:
            return []  # one of them was deleted at this moment: a second call finds the others
        return [
            HeldPartition(TopicPartition(view.topic, view.partition), oldest)
            for reply in views.values()
            for view in reply.partitions
            if (oldest := oldest_transaction(view)) is not None
        ]

    def _topic_names(self, timeout_s: float) -> dict[str, str]:
        """Return topic id → name of every topic."""
        reply = self._connection.ask(wire.MetadataRequest(), wire.MetadataReply, timeout_s)
        return {topic.topic_id: topic.name for topic in reply.topics}

    def abort_transaction(self, transactional_id: str, timeout_s: float) -> None:
        """Abort the open transaction of an id."""
        name = _id(transactional_id)
        self._ask_coordinator(wire.AbortTransactionRequest(transactional_id=name), name, timeout_s)

    def resolve_transaction(self, transactional_id: str, commit: bool, timeout_s: float) -> None:
        """End a prepared batch as an operator decided."""
        arguments.flag(commit, "commit")
        name = _id(transactional_id)
        found = dict[str, wire.TransactionDescription]()
        deadline_s = self._connection.deadline_s(timeout_s)
        cluster = self._connection.cluster
        self._connection.retrying(lambda ms: _describe(cluster, [name], found, ms), timeout_s)
        if found[name].HasField("error"):
            raise frames.raise_error(found[name].error)
        request = resolution(found[name], commit=commit)
        self._ask_coordinator(request, name, self._connection.left_s(deadline_s))

    def forget_transactional_id(self, transactional_id: str, timeout_s: float) -> None:
        """Remove a transactional id."""
        name = _id(transactional_id)
        self._ask_coordinator(wire.ForgetTransactionRequest(transactional_id=name), name, timeout_s)

    def _ask_coordinator(self, request: Message, name: str, timeout_s: float) -> None:
        """Ask the coordinator of an id; it is looked up again for each attempt.

        A transaction that is being ended is not waited for: its end decides what the call may do.
        """
        cluster = self._connection.cluster

        async def attempt(one_ms: int) -> Message:
            address = await _coordinator(cluster, name, one_ms)
            return await cluster.call_at(address, request, timeout_ms=one_ms)

        final = errors.ConcurrentTransactions
        self._connection.run(lambda ms: cluster.retrying(attempt, ms, final=final), timeout_s)

    def describe_producers(
        self, partitions: Iterable[TopicPartition], timeout_s: float
    ) -> dict[TopicPartition, list[ProducerDescription]]:
        """Describe the producers of partitions, as their leaders know them."""
        places = arguments.places(partitions)
        cluster = self._connection.cluster
        return self._connection.run(lambda ms: _producers(cluster, places, ms), timeout_s)

    def find_hanging_transactions(
        self, topics: Iterable[str] | None, max_timeout_ms: int, timeout_s: float
    ) -> list[HangingTransaction]:
        """Find open transactions that their coordinators will not end in time."""
        max_timeout_ms = arguments.whole(max_timeout_ms, "max_timeout_ms", 1, 2**63 - 1)
        wanted = None if topics is None else arguments.topics(topics, "topics")
        deadline_s = self._connection.deadline_s(timeout_s)

        def left_s() -> float:
            return self._connection.left_s(deadline_s)

        request = wire.MetadataRequest(topics=wanted)
        reply = self._connection.ask(request, wire.MetadataReply, left_s())
        for topic in reply.topics:
            if topic.HasField("error") and wanted is not None:
                raise frames.raise_error(topic.error)
        places = [
            TopicPartition(topic.name, info.partition)
            for topic in reply.topics
            if not topic.internal and not topic.HasField("error")
            for info in topic.partitions
        ]
        opened = _open_ones(self.describe_producers(places, left_s()))
        if not opened:
            return []
        producer_ids = sorted({each.producer_id for _, each in opened})
        listings = self.list_transactions([], producer_ids, 0, left_s())
        names = {each.producer_id: each.transactional_id for each in listings.transactions}
        described = self._of_coordinators(sorted({*names.values()}), left_s())
        by_id = {each.transactional_id: each for each in described if each.error is None}
        now_ms = self._connection.cluster.world.clock.wall_ms()
        found = []
        for place, producer in opened:
            name = names.get(producer.producer_id, "")
            began_ms = producer.transaction_began_ms or producer.last_ms
            open_ms = max(0, now_ms - began_ms)
            reason, certain = _judged(place, producer, by_id.get(name), listings)
            if not reason and open_ms > max_timeout_ms:
                reason = f"open for longer than {max_timeout_ms} ms"
            if reason:
                assert producer.transaction_start is not None
                found.append(
                    HangingTransaction(
                        place, producer.producer_id, producer.producer_epoch,
                        producer.transaction_start, open_ms, name, reason, certain,
                    )
                )  # fmt: skip
        return self._still_open(found, left_s())

    def _still_open(
        self, found: list[HangingTransaction], timeout_s: float
    ) -> list[HangingTransaction]:
        """Return the transactions that are open at a second look.  The others ended between the
        leader's answer and the coordinator's.
        """
        if not found:
            return []
        places = list(dict.fromkeys(each.partition for each in found))
        again = _open_ones(self.describe_producers(places, timeout_s))
        left = {(place, each.producer_id, each.transaction_start) for place, each in again}
        return [e for e in found if (e.partition, e.producer_id, e.start_offset) in left]


def _id(value: Any, name: str = "transactional_id") -> str:
    found = arguments.text(value, name)
    if not found:
        raise errors.InvalidRequest(f"{name}: a transactional id is not empty")
    return found


# -- coordinators ----------------------------------------------------------------------------------


async def _coordinator(cluster: NetworkClient, transactional_id: str, timeout_ms: int) -> str:
    """Return the address of the coordinator of a transactional id."""
    request = wire.FindCoordinatorRequest(key=transactional_id, key_type=TRANSACTION)
    reply = await cluster.call_any(request, timeout_ms=timeout_ms)
    assert isinstance(reply, wire.FindCoordinatorReply)
    return reply.address


async def _listed(
    cluster: NetworkClient, request: wire.ListTransactionsRequest, timeout_ms: int
) -> TransactionListings:
    """Combine the lists of all brokers.  A partition that moves meanwhile may be in two of them."""
    views = await everyone(cluster, request, timeout_ms)
    found: dict[tuple[str, int], TransactionListing] = {}
    loading: dict[int, None] = {}
    for node, reply in sorted(views.items()):
        loading |= dict.fromkeys(reply.loading)
        for each in reply.transactions:
            kind = PARTICIPANTS if each.job else PRODUCER
            found[each.transactional_id, each.producer_id] = TransactionListing(
                each.transactional_id, each.producer_id, each.state, node, kind
            )
    silent = sorted(set(cluster.metadata.brokers) - set(views))
    listed = tuple(each for _, each in sorted(found.items()))
    return TransactionListings(listed, tuple(sorted(loading)), tuple(silent))


async def _describe(
    cluster: NetworkClient,
    names: Sequence[str],
    found: dict[str, wire.TransactionDescription],
    timeout_ms: int,
) -> None:
    """Add the descriptions that `found` lacks.  Raises the error of one that may succeed later."""
    addresses: dict[int, str] = {}
    asked: defaultdict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(names):
        if name not in found:
            number = partition_of_id(name)
            if number not in addresses:
                addresses[number] = await _coordinator(cluster, name, timeout_ms)
            asked[addresses[number]].append(name)
    for address, of_it in asked.items():
        for start in range(0, len(of_it), CHUNK):
            request = wire.DescribeTransactionsRequest(
                transactional_ids=of_it[start : start + CHUNK]
            )
            reply: Any = await cluster.call_at(address, request, timeout_ms=timeout_ms)
            for each in reply.transactions:
                if not (each.HasField("error") and frames.raise_error(each.error).retriable):
                    found[each.transactional_id] = each
            for each in reply.transactions:
                if each.transactional_id not in found:
                    raise frames.raise_error(each.error)
    for name in names:
        if name not in found:
            raise errors.InternalError(f"0 results came for one request about {name!r}")


def _description_of(
    said: wire.TransactionDescription, topics: Mapping[str, str]
) -> TransactionDescription:
    """Convert the reply."""
    error = frames.raise_error(said.error) if said.HasField("error") else None
    return TransactionDescription(
        said.transactional_id, said.coordinator_id, said.state, said.producer_id,
        said.producer_epoch, said.timeout_ms, said.started_ms if said.state in OPEN else None,
        tuple(
            sorted(
                TopicPartition(topics.get(each.topic_id, each.topic_id), each.partition)
                for each in said.partitions
            )
        ),
        said.reason, error, _job_of(said.job) if said.HasField("job") else None,
    )  # fmt: skip


def _job_of(said: wire.JobDescription) -> JobDescription:
    """Convert the reply."""
    return JobDescription(
        said.query, said.run, None if said.batch == NONE else said.batch,
        None if said.last_committed == NONE else said.last_committed, said.batch_write,
        tuple(
            ParticipantDescription(each.producer_id, each.producer_epoch, None, None)
            if each.heard_ago_ms == NONE
            else ParticipantDescription(
                each.producer_id, each.producer_epoch, each.finished, each.heard_ago_ms
            )
            for each in said.joined
        ),
        awaited_of(said),
    )  # fmt: skip


def _held_by(
    known: TransactionDescription, held: Iterable[HeldPartition]
) -> tuple[HeldPartition, ...]:
    """Return the partitions that the open transaction of an id holds back, sorted."""
    if known.job is None:
        writers = {known.producer_id}
    else:
        writers = {each.producer_id for each in known.job.participants}
    places = set(known.partitions)
    found = (
        each
        for each in held
        if each.partition in places and each.transaction.producer_id in writers
    )
    return tuple(sorted(found, key=lambda each: each.partition))


# -- leaders ---------------------------------------------------------------------------------------


async def _producers(
    cluster: NetworkClient, places: Sequence[TopicPartition], timeout_ms: int
) -> dict[TopicPartition, list[ProducerDescription]]:
    """Ask the leader of each partition, repeated while leaders change."""
    found: dict[TopicPartition, list[ProducerDescription]] = {}
    clock = cluster.world.clock
    deadline = clock.monotonic_ms() + timeout_ms
    await cluster.check_partitions(places, timeout_ms)

    async def attempt(one_ms: int) -> None:
        left = [place for place in places if place not in found]
        by_leader: defaultdict[int, list[TopicPartition]] = defaultdict(list)
        for place in left:
            leader = cluster.metadata.leader(cluster.metadata.key(place))
            if leader is None:
                cluster.want_metadata()
                raise cluster.metadata.leaderless(place)
            by_leader[leader.node].append(place)
        for node, of_it in by_leader.items():
            for start in range(0, len(of_it), CHUNK):
                await _add_producers(cluster, node, of_it[start : start + CHUNK], found, one_ms)

    await cluster.retrying(attempt, max(1, deadline - clock.monotonic_ms()))
    return found


async def _add_producers(
    cluster: NetworkClient,
    node: int,
    places: Sequence[TopicPartition],
    found: dict[TopicPartition, list[ProducerDescription]],
    timeout_ms: int,
) -> None:
    """Add the answer of one leader.  Raises the error of a partition that it does not lead."""
    request = wire.DescribeProducersRequest()
    for place in places:
        key = cluster.metadata.key(place)
        request.partitions.add(topic_id=key.topic_id, partition=key.partition)
    reply: Any = await cluster.call_node(node, request, timeout_ms=timeout_ms)
    if len(reply.partitions) != len(places):
        raise errors.InternalError(
            f"{len(reply.partitions)} results came for one request of {len(places)} partitions"
        )
    for place, described in zip(places, reply.partitions, strict=True):
        if described.HasField("error"):
            cluster.want_metadata()
            raise frames.raise_error(described.error)
        found[place] = [_producer_of(each) for each in described.producers]


def _producer_of(said: wire.ProducerState) -> ProducerDescription:
    """Convert the reply."""
    opened = said.transaction_start != NONE
    return ProducerDescription(
        said.producer_id, said.producer_epoch, said.last_sequence, said.last_ms,
        said.coordinator_epoch, said.transaction_start if opened else None,
        said.transaction_began_ms if opened and said.transaction_began_ms > 0 else None,
    )  # fmt: skip


# -- both ------------------------------------------------------------------------------------------


def _open_ones(
    described: Mapping[TopicPartition, Iterable[ProducerDescription]],
) -> list[tuple[TopicPartition, ProducerDescription]]:
    """Return the producers with an open transaction."""
    return [
        (place, each)
        for place, producers in described.items()
        for each in producers
        if each.transaction_start is not None
    ]


def _judged(
    place: TopicPartition,
    producer: ProducerDescription,
    known: TransactionDescription | None,
    listings: TransactionListings,
) -> tuple[str, bool]:
    """Return why the coordinator will not end a transaction ("" = it will), and whether that is
    certain.
    """
    if not is_transactional(producer.producer_id):
        return "no coordinator allocated this producer id", True
    if known is None:
        number = partition_of_producer(producer.producer_id)
        if number in listings.loading:
            return f"its coordinator still loads __transaction_state-{number}", False
        if listings.silent:
            brokers = ", ".join(map(str, listings.silent))
            return f"brokers {brokers} did not answer: one may be its coordinator", False
        return "its coordinator does not know the producer id", True
    if known.state not in OPEN:
        return f"its coordinator has ended the transaction ({known.state})", True
    if place not in known.partitions:
        return "its coordinator has not registered the partition", True
    if not known.writes_as(producer.producer_id, producer.producer_epoch):
        return "its producer is not part of the open transaction of the job", True
    if known.job is not None and known.job.awaited is not None:
        return f"it waits for the table {known.job.awaited.url}: pk transactions resolve", True
    return "", True
