"""Bad input of transactions to a real node (rules X1 to X9).

Each case is a call that the node refuses with a typed error, which names the cause and who must
act.  Afterwards nothing of the case is visible, half or whole, and its partitions are free again:
a record that is written behind it reaches read_committed readers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from real_cluster import until, values

from pk import AdminClient, Producer, errors
from pk.cli.embedded import EmbeddedServer
from pk.client.batch_committer import BatchCommitter
from pk.client.participant import BatchOfRun
from pk.client.task_producer import TaskProducer
from pk.clock import SystemClock
from pk.log import batch as batches
from pk.log import columns
from pk.log.batch import TRANSACTIONAL
from pk.log.control_rows import Marker, encode_markers
from pk.transactional_ids import PARTITIONS
from pk.transactional_ids import producer_id as producer_id_of
from pk.types import NONE, RowSums
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import PROTOCOL, Caller, head_of, open_stream
from pk.wire.socket_network import PkNetwork
from pk.world import StreamKind

pytestmark = pytest.mark.integration

WAIT_S = 60.0
LONG = "x" * 250
HELLO = wire.Hello(client_id="test", protocol=PROTOCOL)
SETTINGS = {"transaction_max_timeout_ms": 120_000}


@dataclass
class Rig:
    """One case: its topic, its id, and what it has left open."""

    address: str
    admin: AdminClient
    name: str
    opened: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    kept: list[bytes] = field(default_factory=list)  #: what may be visible

    def __post_init__(self) -> None:
        self.admin.create_topic(self.name, partitions=2)

    @property
    def topic_id(self) -> str:
        (state, *_) = self.admin.describe_topics([self.name])
        return str(state.topic_id)

    def producer(self) -> Producer:
        options = {"transactional_id": self.name, "max_block_ms": 10_000}
        return self.opened.enter_context(Producer(self.address, **options))

    def begun(self) -> Producer:
        """A producer with an open transaction and a record in each partition."""
        producer = self.producer()
        producer.init_transactions()
        producer.begin_transaction()
        for partition in (0, 1):
            producer.send(self.name, b"open", partition=partition)
        producer.flush()
        return producer

    def pair(self) -> tuple[int, int]:
        """Initialize the id of the case as a client of another language would."""
        reply = self.ask(
            wire.InitProducerIdRequest(
                transactional_id=self.name,
                producer_id=NONE,
                producer_epoch=NONE,
                transaction_timeout_ms=60_000,
            )
        )
        return reply.producer_id, reply.producer_epoch

    def batch(self, number: int = 0, run: str = "r1", query: str = "q") -> BatchOfRun:
        return BatchOfRun(self.name, query, run, number)

    def task(self, batch: BatchOfRun) -> tuple[TaskProducer, tuple[int, int]]:
        """A task that has joined and written a record to each partition."""
        task = self.opened.enter_context(TaskProducer(self.address, batch))
        reply = task.join([self.name])
        for partition in (0, 1):
            task.send(self.name, b"task", partition=partition)
        task.flush(WAIT_S)
        return task, (reply.producer_id, reply.producer_epoch)

    def driver(self, batch: BatchOfRun) -> BatchCommitter:
        return self.opened.enter_context(BatchCommitter(self.address, batch))

    def sums(self, rows: int = 2) -> dict[str, RowSums]:
        return {self.topic_id: RowSums(rows, 4 * rows, 1)}

    def committed(self, batch: BatchOfRun) -> None:
        _, pair = self.task(batch)
        self.driver(batch).commit([pair], self.sums())
        self.kept += [b"task"] * 2

    def ask(self, request: Any) -> Any:
        """Send one request as a client; return the reply or raise its error."""

        async def main() -> Any:
            network = PkNetwork()
            caller = Caller(network, SystemClock(), self.address, HELLO)
            try:
                head = (await caller.call(request, timeout_ms=30_000)).head
                return getattr(head, head.WhichOneof("body"))
            finally:
                await caller.close()
                await network.close()

        return asyncio.run(main())

    def produce(self, raw: bytes) -> None:
        """Produce one batch to partition 0 as it is; raise its refusal."""

        async def main() -> wire.ProduceResult:
            network = PkNetwork()
            try:
                stream, _ = await open_stream(network, self.address, StreamKind.PRODUCE, HELLO)
                request = wire.ProduceRequest(acks=-1)
                request.partitions.add(
                    topic_id=self.topic_id, current_leader_epoch=-1, batch_bytes=len(raw)
                )
                await stream.send(frames.encode(head_of(request, correlation_id=1), [raw]))
                async with asyncio.timeout(WAIT_S):
                    reply = await stream.recv()
                assert reply is not None
                stream.close()
                return frames.decode(reply).head.produce_reply.results[0]
            finally:
                await network.close()

        result = asyncio.run(main())
        if result.HasField("error"):
            raise frames.raise_error(result.error)

    def settled(self) -> None:
        """Check that nothing of the case is visible, and that nothing holds its partitions."""
        self.opened.close()
        for found in self.admin.list_transactions(["Ongoing"]).transactions:
            if found.transactional_id.startswith(self.name):
                self.admin.abort_transaction(found.transactional_id)
        if self.name not in self.admin.list_topics():
            return
        with Producer(self.address) as plain:
            for partition in (0, 1):
                plain.send(self.name, b"behind", partition=partition).result(timeout=WAIT_S)
        expected = sorted([*self.kept, b"behind", b"behind"])
        until(lambda: sorted(values(self.address, self.name)) == expected, f"not {expected}")


class Case(NamedTuple):
    """A call that fails.  acts: who must act, as the error says"""

    name: str
    act: Callable[[Rig], Any]
    error: type[errors.PkError]
    says: str
    acts: str = "user"


# -- ids -------------------------------------------------------------------------------------------


def init_of(name: str, timeout_ms: int = 60_000) -> Callable[[Rig], Any]:
    def act(rig: Rig) -> None:
        options = {"transactional_id": name, "transaction_timeout_ms": timeout_ms}
        rig.opened.enter_context(Producer(rig.address, **options)).init_transactions()

    return act


def raw_init(name: str, timeout_ms: int) -> Callable[[Rig], Any]:
    return lambda rig: rig.ask(
        wire.InitProducerIdRequest(
            transactional_id=name,
            producer_id=NONE,
            producer_epoch=NONE,
            transaction_timeout_ms=timeout_ms,
        )
    )


def join_of(**changed: Any) -> Callable[[Rig], Any]:
    def act(rig: Rig) -> None:
        batch = rig.batch()._replace(**changed)
        rig.ask(wire.JoinTransactionRequest(batch=batch.to_wire(), topic_ids=[rig.topic_id]))

    return act


def end_of(rig: Rig, pair: tuple[int, int], *, commit: bool = True) -> Any:
    producer_id, epoch = pair
    return rig.ask(
        wire.EndTxnRequest(
            transactional_id=rig.name, producer_id=producer_id, producer_epoch=epoch, commit=commit
        )
    )


def raised(error: errors.PkError | None) -> None:
    assert error is not None
    raise error


IDS = [
    Case("an empty id", init_of(""), errors.InvalidTxnState, "transactional_id"),
    Case("an overlong id", init_of(LONG), errors.InvalidRequest, "249"),
    Case("an overlong id of another client", raw_init(LONG, 60_000), errors.InvalidRequest, "249"),
    Case("an overlong job", join_of(job=LONG), errors.InvalidRequest, "transactional id"),
    Case("an empty job", join_of(job=""), errors.InvalidRequest, "transactional id"),
    Case("an empty query", join_of(query=""), errors.InvalidRequest, "query id"),
    Case("an overlong run", join_of(run=LONG), errors.InvalidRequest, "run id"),
    Case("a batch below 0", join_of(batch=-1), errors.InvalidRequest, "count from 0"),
    Case("an unknown id that ends", lambda rig: end_of(rig, (1 << 62, 0)),
         errors.TransactionalIdNotFound, "init_transactions"),
    Case("an unknown id that is aborted", lambda rig: rig.admin.abort_transaction("nobody-knows"),
         errors.TransactionalIdNotFound, "nobody-knows"),
    Case("an unknown id that is described",
         lambda rig: raised(rig.admin.describe_transactions(["nobody-knows"])[0].error),
         errors.TransactionalIdNotFound, "nobody-knows"),
    Case("an unknown id that is forgotten",
         lambda rig: rig.admin.forget_transactional_id("nobody-knows"),
         errors.TransactionalIdNotFound, "nobody-knows"),
]  # fmt: skip


def of_two_kinds(rig: Rig) -> None:
    rig.begun()
    join_of()(rig)


def fenced(rig: Rig) -> None:
    first = rig.begun()
    rig.producer().init_transactions()
    first.commit_transaction()


def of_two_queries(rig: Rig) -> None:
    rig.task(rig.batch())
    rig.task(rig.batch(query="other"))


OWNERS = [
    Case("two producers under one id", fenced, errors.ProducerFenced, "took over"),
    Case("two queries under one id", of_two_queries, errors.ReplayDiffers, "two queries"),
    Case(
        "a producer and a query under one id",
        of_two_kinds,
        errors.InvalidTxnState,
        "a job needs another one",
    ),
]


# -- order of calls --------------------------------------------------------------------------------


def commit_without_begin(rig: Rig) -> None:
    producer = rig.producer()
    producer.init_transactions()
    producer.commit_transaction()


def stale_end(rig: Rig, *, commit: bool) -> None:
    """The id was initialized again, so the pair is older than the current one."""
    pair = rig.pair()
    rig.pair()
    rig.pair()
    end_of(rig, pair, commit=commit)


def stale_end_of_open(rig: Rig) -> None:
    """A delayed end of an earlier instance must not end the transaction of the present one."""
    pair = rig.pair()
    rig.begun()
    end_of(rig, pair)


CALLS = [
    Case("a commit without begin", commit_without_begin, errors.InvalidTxnState,
         "begin_transaction"),
    Case("a commit of another client without begin", lambda rig: end_of(rig, rig.pair()),
         errors.InvalidTxnState, "nothing to commit"),
    Case("a commit of a stale epoch", lambda rig: stale_end(rig, commit=True),
         errors.ProducerFenced, "took over"),
    Case("an abort of a stale epoch", lambda rig: stale_end(rig, commit=False),
         errors.ProducerFenced, "took over"),
    Case("a commit of a stale epoch in an open transaction", stale_end_of_open,
         errors.ProducerFenced, "took over"),
    Case("a timeout above the maximum", init_of("late", 120_001),
         errors.InvalidTransactionTimeout, "transaction_max_timeout_ms"),
    Case("a timeout of 0", raw_init("zero", 0), errors.InvalidTransactionTimeout,
         "transaction_max_timeout_ms"),
]  # fmt: skip


# -- participants and batches ----------------------------------------------------------------------


def commit_of(name: Callable[[tuple[int, int]], list[tuple[int, int]]]) -> Callable[[Rig], Any]:
    def act(rig: Rig) -> None:
        _, pair = rig.task(rig.batch())
        rig.driver(rig.batch()).commit(name(pair), rig.sums())

    return act


def of_the_batch_before(rig: Rig) -> None:
    """A participant of batch 0 is named in batch 1."""
    _, pair = rig.task(rig.batch())
    rig.driver(rig.batch()).commit([pair], rig.sums())
    rig.kept += [b"task"] * 2
    rig.task(rig.batch(1))
    rig.driver(rig.batch(1)).commit([pair], rig.sums())


def below_the_window(rig: Rig, *, join: bool) -> None:
    for number in range(101):
        rig.driver(rig.batch(number)).commit([], {})
    if join:
        rig.task(rig.batch())
    rig.driver(rig.batch()).commit([], {})


def commit_by_another_query(rig: Rig) -> None:
    _, pair = rig.task(rig.batch())
    rig.driver(rig.batch(query="other")).commit([pair], rig.sums())


def another_batch_of_the_run(rig: Rig) -> None:
    rig.task(rig.batch())
    rig.task(rig.batch(1))


PARTICIPANTS = [
    Case("a participant that has not joined", commit_of(lambda pair: [pair, (1 << 62, 0)]),
         errors.InvalidTxnState, "not part of"),
    Case("a participant of another epoch", commit_of(lambda pair: [(pair[0], pair[1] + 1)]),
         errors.InvalidTxnState, "not part of"),
    Case("a participant that is named twice", commit_of(lambda pair: [pair, pair]),
         errors.InvalidRequest, "twice"),
    Case("a participant of the batch before", of_the_batch_before, errors.InvalidTxnState,
         "not part of"),
    Case("rows without participants", lambda rig: rig.driver(rig.batch()).commit([], rig.sums()),
         errors.InvalidTxnState, "not open"),
    Case("two batches of one run", another_batch_of_the_run, errors.InvalidTxnState,
         "comes after its end"),
    Case("a join below the window", lambda rig: below_the_window(rig, join=True),
         errors.ReplayDiffers, "too far back"),
    Case("a commit below the window", lambda rig: below_the_window(rig, join=False),
         errors.ReplayDiffers, "too far back"),
    Case("a batch that another query commits", commit_by_another_query, errors.ReplayDiffers,
         "belongs to query q"),
]  # fmt: skip


# -- checkpoints of Spark --------------------------------------------------------------------------


def deleted_checkpoint(rig: Rig) -> None:
    """Spark gives the query a new id, and counts its batches from 0 again."""
    rig.committed(rig.batch())
    rig.task(rig.batch(query="q2", run="r2"))


def restored_two_back(rig: Rig, rows: int) -> None:
    """Batches 1 and 2 run again; batch 1 is planned again, with other rows."""
    for number in range(3):
        rig.committed(rig.batch(number))
    task = rig.opened.enter_context(TaskProducer(rig.address, rig.batch(1, "r2")))
    assert task.join([rig.name]).committed
    rig.driver(rig.batch(1, "r2")).commit([], rig.sums(rows))


def shared_checkpoint(rig: Rig) -> None:
    """Two drivers run the same query: the later run fences the earlier one."""
    _, first = rig.task(rig.batch())
    _, second = rig.task(rig.batch(run="r2"))
    with contextlib.suppress(errors.ReplayDiffers):
        rig.driver(rig.batch(run="r2")).commit([second], rig.sums())
    rig.kept += [b"task"] * 2
    rig.driver(rig.batch()).commit([first], rig.sums())


CHECKPOINTS = [
    Case("a deleted checkpoint", deleted_checkpoint, errors.ReplayDiffers,
         "the checkpoint was deleted"),
    Case("a checkpoint two back, with other rows", lambda rig: restored_two_back(rig, 3),
         errors.ReplayDiffers, "restore a newer checkpoint"),
    Case("a shared checkpoint", shared_checkpoint, errors.ProducerFenced, "superseded"),
]  # fmt: skip


# -- topics ----------------------------------------------------------------------------------------


def deleted_inside(rig: Rig) -> None:
    """The refused record is not part of the transaction; its block would abort the others."""
    producer, gone = rig.begun(), f"{rig.name}-gone"
    rig.admin.create_topic(gone, partitions=1)
    producer.send(gone, b"open", partition=0)
    producer.flush()
    rig.admin.delete_topic(gone)
    until(lambda: gone not in rig.admin.list_topics(), "not deleted")
    producer.send(gone, b"late", partition=0)


def join_of_a_deleted_topic(rig: Rig) -> None:
    topic_id = rig.topic_id
    rig.admin.delete_topic(rig.name)
    request = wire.JoinTransactionRequest(batch=rig.batch().to_wire(), topic_ids=[topic_id])
    until(lambda: rig.name not in rig.admin.list_topics(), "not deleted")
    rig.ask(request)


TOPICS = [
    Case("a send to a topic deleted inside the transaction", deleted_inside,
         errors.UnknownTopicOrPartition, "does not exist"),
    Case("a join of a deleted topic", join_of_a_deleted_topic, errors.UnknownTopicOrPartition,
         "was deleted", "client"),
    Case("a join without topics",
         lambda rig: rig.ask(wire.JoinTransactionRequest(batch=rig.batch().to_wire())),
         errors.InvalidRequest, "names no topic"),
]  # fmt: skip


# -- forgeries -------------------------------------------------------------------------------------


def forged_marker(rig: Rig) -> None:
    rig.begun()
    (found,) = rig.admin.describe_transactions([rig.name])
    marker = wire.TxnMarker(
        producer_id=found.producer_id,
        producer_epoch=found.producer_epoch + 1,
        commit=True,
        coordinator_epoch=1_000,
        partition_count=1,
        partitions=[wire.FetchPartition(topic_id=rig.topic_id, partition=0)],
    )
    rig.ask(wire.WriteTxnMarkersRequest(markers=[marker]))


def forged_question(rig: Rig) -> None:
    producer_id, epoch = rig.pair()
    place = wire.TxnPartition(topic_id=rig.topic_id, partition=0)
    asked = wire.TxnQuestion(producer_id=producer_id, producer_epoch=epoch, partitions=[place])
    rig.ask(wire.AddPartitionsToTxnRequest(questions=[asked]))


def rows_of(**fields: Any) -> bytes:
    rows = pa.RecordBatch.from_pydict({"value": pa.array([b"forged"], pa.binary())})
    return b"".join(columns.encode(rows, default_timestamp=SystemClock().wall_ms(), **fields))


def forged_control_batch(rig: Rig) -> None:
    rig.begun()
    (found,) = rig.admin.describe_transactions([rig.name])
    marker = Marker(found.producer_id, found.producer_epoch + 1, True, 1_000, 1, NONE, "")
    rig.produce(b"".join(encode_markers([marker], SystemClock().wall_ms())))


def batch_of(pair: tuple[int, int], attributes: int = TRANSACTIONAL) -> bytes:
    """A batch of a producer, as a client of another language may send it."""
    raw = rows_of()
    header = batches.read_header(raw)
    header = header._replace(
        attributes=header.attributes | attributes,
        producer_id=pair[0],
        producer_epoch=pair[1],
        base_sequence=NONE if pair[0] == NONE else 0,
    )
    return b"".join(batches.seal(header, [raw[batches.HEADER_BYTES :]]))


def offsets_of_a_plain_id(rig: Rig) -> None:
    """The coordinator of the group must not ask anybody about such a producer id."""
    request = wire.TxnOffsetCommitRequest(
        member=wire.GroupMember(group_id=rig.name, generation=NONE),
        producer_id=5,
        topics=[wire.CommitTopic(topic_id=rig.topic_id, partitions=[0], offsets=[0])],
    )
    rig.ask(request)


def plain_batch_of_a_transactional_id(rig: Rig) -> None:
    producer_id, epoch = rig.pair()
    rig.produce(batch_of((producer_id, epoch), 0))


#: A producer id of transactions whose partition does not exist.
NOT_ALLOCATED = producer_id_of(PARTITIONS, 1, 1)

FORGERIES = [
    Case("a marker of a client", forged_marker, errors.InvalidRequest, "broker"),
    Case("a question of a client", forged_question, errors.InvalidRequest, "broker"),
    Case("a control batch of a client", forged_control_batch, errors.InvalidRecord,
         "broker's to set"),
    Case("a transactional batch without a producer id",
         lambda rig: rig.produce(batch_of((NONE, NONE))),
         errors.InvalidRecord, "producer id -1"),
    Case("a transactional batch of a plain producer id",
         lambda rig: rig.produce(batch_of((5, 0))),
         errors.InvalidRecord, "init_transactions"),
    Case("a transactional batch of an id that was not allocated",
         lambda rig: rig.produce(batch_of((NOT_ALLOCATED, 0))),
         errors.InvalidProducerEpoch, "given by no coordinator", "client"),
    Case("offsets of a plain producer id", offsets_of_a_plain_id, errors.InvalidRequest,
         "init_transactions"),
    Case("a plain batch of a transactional producer id", plain_batch_of_a_transactional_id,
         errors.InvalidRecord, "transaction"),
]  # fmt: skip


CASES = [*IDS, *OWNERS, *CALLS, *PARTICIPANTS, *CHECKPOINTS, *TOPICS, *FORGERIES]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path_factory.mktemp("bad") / "pk", settings=SETTINGS)
    with server:
        for number in range(40):  # the coordinator of each id is in service
            with Producer(server.address, transactional_id=f"first{number}") as producer:
                producer.init_transactions()
        yield server
    assert "BUG" not in server.log.read_text(), server.tail()


@pytest.fixture
def rig(server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[Rig]:
    with AdminClient(server.address) as admin:
        number = list(request.session.items).index(request.node)
        yield Rig(server.address, admin, f"case{number}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input_is_refused_by_name_and_leaves_nothing_visible(rig: Rig, case: Case) -> None:
    with pytest.raises(case.error) as raised:
        case.act(rig)
    assert type(raised.value) is case.error, repr(raised.value)
    assert case.says in raised.value.message, raised.value.message
    assert raised.value.acts == case.acts
    rig.settled()


def test_what_becomes_of_topics_inside_a_transaction_is_whole(rig: Rig) -> None:
    """A deleted topic takes its records with it.  The commit makes all others visible (X3)."""
    producer, deleted, again = rig.begun(), f"{rig.name}-deleted", f"{rig.name}-again"
    for name in (deleted, again):
        rig.admin.create_topic(name, partitions=1)
        producer.send(name, b"before", partition=0)
    producer.flush()
    rig.admin.delete_topic(deleted)
    rig.admin.delete_topic(again)
    rig.admin.create_topic(again, partitions=1)
    rig.admin.create_partitions(rig.name, 3)
    until(lambda: len(rig.admin.describe_topics([rig.name])) == 3, "the topic did not grow")

    def sent(topic: str, partition: int) -> bool:
        """Whether the client knows by now what became of the topic."""
        try:
            return producer.send(topic, b"after", partition=partition).exception(WAIT_S) is None
        except (errors.InvalidRequest, errors.UnknownTopicOrPartition):
            return False

    until(lambda: sent(rig.name, 2), "the new partition got nothing")
    until(lambda: sent(again, 0), "the new topic got nothing")
    assert values(rig.address, rig.name) == values(rig.address, again) == []
    producer.commit_transaction()
    until(lambda: values(rig.address, again) == [b"after"], "the new topic lacks its record")
    rig.kept += [b"open", b"open", b"after"]
    rig.settled()
