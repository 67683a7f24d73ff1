"""The administration of transactions: which broker is asked what, and how answers are combined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pk import errors, transactional_ids
from pk.client.admin import (
    AdminClient,
    AwaitedTable,
    HeldPartition,
    JobDescription,
    OpenTransaction,
    ParticipantDescription,
    TransactionListing,
)
from pk.sim.world import SimWorld
from pk.types import TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from tests.kit.fake_broker import FakeBroker, FakeCluster

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
MIN = 60_000


def pid(partition: int, number: int = 1) -> int:
    return transactional_ids.producer_id(partition, 1, number)


class Coordinator(FakeBroker):
    """A broker that coordinates the ids of `known`, and whose producers are `producers`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.known: dict[str, wire.TransactionDescription] = {}
        self.loading: list[int] = []
        self.producers: dict[int, list[wire.ProducerState]] = {}  #: partition → producers
        self.asked: list[Any] = []
        self.refusals: list[errors.PkError] = []
        self.silent = False
        self.deleting = False  #: topic t

    def knows(self, name: str, producer_id: int, state: str = "Ongoing", *places: int) -> None:
        found = self.known[name] = wire.TransactionDescription(
            transactional_id=name, producer_id=producer_id, state=state, timeout_ms=MIN,
            started_ms=1_000, coordinator_id=self.node,
        )  # fmt: skip
        for place in places:
            found.partitions.add(topic_id=self.cluster.topics["t"], partition=place)

    def runs(self, name: str, *joined: wire.JoinedParticipant, state: str = "Ongoing") -> None:
        """Know a job whose open batch 4 has these participants and writes to topic t."""
        self.knows(name, -1, state, 0, 1)
        job = wire.JobDescription(query="q", run="r", batch=4, last_committed=-1, joined=joined)
        self.known[name].job.CopyFrom(job)

    def opens(self, partition: int, producer_id: int, began_ms: int, start: int = 5) -> None:
        state = wire.ProducerState(
            producer_id=producer_id, producer_epoch=3, last_sequence=1, last_ms=began_ms,
            transaction_start=start, transaction_began_ms=began_ms,
        )  # fmt: skip
        self.producers.setdefault(partition, []).append(state)

    def _handlers(self) -> dict[str, Any]:
        def handler(answer: Callable[[Any], Any]) -> Any:
            async def handle(request: Any, frame: Any) -> Any:
                self.asked.append(request)
                if self.silent:
                    await self.world.clock.sleep_ms(10_000)
                if self.refusals:
                    raise self.refusals.pop(0)
                return answer(request)

            return handle

        more = {
            "list_transactions": self._list,
            "describe_transactions": self._describe,
            "abort_transaction": lambda request: wire.AbortTransactionReply(),
            "commit_participants": lambda request: wire.CommitParticipantsReply(),
            "abort_participants": lambda request: wire.AbortParticipantsReply(),
            "forget_transaction": lambda request: wire.ForgetTransactionReply(),
            "describe_producers": self._describe_producers,
            "describe_partitions": self._describe_partitions,
        }
        return super()._handlers() | {name: handler(answer) for name, answer in more.items()}

    def _list(self, request: wire.ListTransactionsRequest) -> wire.ListTransactionsReply:
        reply = wire.ListTransactionsReply(loading=self.loading)
        for each in self.known.values():
            is_job, owned = each.HasField("job"), {each.producer_id}
            if is_job and request.producer_ids:
                owned = {pid(1), pid(1, 2)}
            for producer_id in sorted(owned & set(request.producer_ids or owned)):
                reply.transactions.add(
                    transactional_id=each.transactional_id, producer_id=producer_id,
                    state=each.state, job=is_job,
                )  # fmt: skip
        return reply

    def _describe(self, request: Any) -> wire.DescribeTransactionsReply:
        reply = wire.DescribeTransactionsReply()
        for name in request.transactional_ids:
            found = reply.transactions.add(transactional_id=name)
            if name in self.known:
                found.CopyFrom(self.known[name])
            else:
                found.error.CopyFrom(frames.error_of(errors.TransactionalIdNotFound(name)))
        return reply

    def _describe_producers(self, request: Any) -> wire.DescribeProducersReply:
        reply = wire.DescribeProducersReply()
        for each in request.partitions:
            reply.partitions.add(
                topic_id=each.topic_id, partition=each.partition,
                producers=self.producers.get(each.partition, ()),
            )  # fmt: skip
        return reply

    def _describe_partitions(self, request: Any) -> wire.DescribePartitionsReply:
        if self.deleting:
            raise errors.UnknownTopicOrPartition("topic 't' does not exist")
        reply = wire.DescribePartitionsReply()
        for place, (oldest, *_) in self.producers.items():
            reply.partitions.add(topic="t", partition=place, oldest_transaction=oldest)
        reply.partitions.add(topic="t", partition=7)
        return reply


class Rig:
    """Two brokers; the second one leads partition 1 of topic t."""

    def __init__(self, sim_thread: Any) -> None:
        self.sim = SimWorld(1)
        self.cluster = FakeCluster()
        self.brokers = [Coordinator(self.cluster, self.sim.world_of(f"b{n}"), n) for n in (1, 2)]
        for broker in self.brokers:
            self.sim.spawn(f"b{broker.node}", broker.listen(f"b{broker.node}:9292"))
        self.sim.loop.run_for_ms(10)
        self.cluster.create("t", 2)
        self.cluster.log("t", 1).leader = 2
        self.first, self.second = self.brokers
        self.thread = sim_thread(self.sim)
        self.admin = AdminClient("b1:9292,b2:9292")

    @property
    def now_ms(self) -> int:
        found: int = self.thread.world.clock.wall_ms()
        return found


@pytest.fixture
def rig(sim_thread: Any):
    made = Rig(sim_thread)
    yield made
    made.admin.close()
    made.sim.close()


def test_a_list_combines_all_coordinators(rig: Rig) -> None:
    rig.first.knows("b", pid(1))
    rig.second.knows("a", pid(2), "Empty")
    found = rig.admin.list_transactions()
    assert found.transactions == (
        TransactionListing("a", pid(2), "Empty", 2), TransactionListing("b", pid(1), "Ongoing", 1),
    )  # fmt: skip
    assert found.complete
    rig.admin.list_transactions(["Ongoing"], [pid(1)], open_longer_ms=7)
    (asked,) = rig.first.asked[1:]
    assert (list(asked.states), list(asked.producer_ids)) == (["Ongoing"], [pid(1)])
    assert asked.open_longer_ms == 7


def test_a_list_says_what_it_lacks(rig: Rig) -> None:
    rig.first.loading = [3, 9]
    rig.second.silent = True
    found = rig.admin.list_transactions(timeout_s=8)
    assert (found.loading, found.silent) == ((3, 9), (2,))
    assert not found.complete


def test_a_description_comes_from_the_coordinator(rig: Rig) -> None:
    rig.cluster.coordinator_node = 2
    rig.second.knows("a", pid(1), "Ongoing", 1, 0)
    rig.second.knows("b", pid(2), "CompleteAbort")
    rig.second.known["b"].reason = "timed out"
    rig.second.refusals = [errors.CoordinatorLoading()]
    first, unknown, last = rig.admin.describe_transactions(["a", "x", "b"])
    assert first.partitions == (T0, T1)
    assert (first.started_ms, first.coordinator_id, first.timeout_ms) == (1_000, 2, MIN)
    assert isinstance(unknown.error, errors.TransactionalIdNotFound)
    assert (last.started_ms, last.reason) == (None, "timed out")
    assert [type(each) for each in rig.first.asked] == [wire.DescribePartitionsRequest]


def joined(producer_id: int, heard_ago_ms: int = -1, **said: Any) -> wire.JoinedParticipant:
    return wire.JoinedParticipant(
        producer_id=producer_id, producer_epoch=3, heard_ago_ms=heard_ago_ms, **said
    )


def test_a_job_is_described_with_what_it_holds(rig: Rig) -> None:
    """Partition 0 waits for the job; partition 1 waits for a producer of another id."""
    rig.first.runs("j", joined(pid(1), 700, finished=True), joined(pid(1, 2)))
    rig.first.knows("a", pid(9), "Ongoing", 0, 1)
    rig.first.knows("b", pid(1, 2), "CompleteCommit")
    rig.first.opens(0, pid(1, 2), 1_234, start=11)
    rig.second.opens(1, pid(9), 1_235, start=22)
    found, plain, ended = rig.admin.describe_transactions(["j", "a", "b"])
    assert (found.kind, plain.kind) == ("participants", "producer")
    assert found.job == JobDescription(
        "q", "r", 4, None, False,
        (ParticipantDescription(pid(1), 3, True, 700),
         ParticipantDescription(pid(1, 2), 3, None, None)),
    )  # fmt: skip
    assert found.held == (HeldPartition(T0, OpenTransaction(pid(1, 2), 3, 11, 1_234)),)
    assert plain.held == (HeldPartition(T1, OpenTransaction(pid(9), 3, 22, 1_235)),)
    assert (plain.job, ended.held) == (None, ())
    rig.first.deleting = rig.second.deleting = True
    (found,) = rig.admin.describe_transactions(["j"])
    assert (found.held, found.job is None) == ((), False)


def test_a_list_names_the_kind(rig: Rig) -> None:
    rig.first.runs("j")
    rig.second.knows("a", pid(2))
    found = rig.admin.list_transactions()
    assert [(e.transactional_id, e.kind) for e in found.transactions] == [
        ("a", "producer"), ("j", "participants"),
    ]  # fmt: skip
    found = rig.admin.list_transactions(producer_ids=[pid(1), pid(1, 2)])
    assert [e.producer_id for e in found.transactions] == sorted([pid(1), pid(1, 2)])


def test_abort_and_forget_go_to_the_coordinator_and_follow_it(rig: Rig) -> None:
    rig.cluster.coordinator_node = 2
    rig.second.refusals = [errors.NotCoordinator("moved"), errors.CoordinatorUnavailable()]
    rig.admin.abort_transaction("a")
    rig.admin.forget_transactional_id("a")
    names = [each.DESCRIPTOR.name for each in rig.second.asked]
    assert names == ["AbortTransactionRequest"] * 3 + ["ForgetTransactionRequest"]
    assert {each.transactional_id for each in rig.second.asked} == {"a"}


def test_an_operator_resolves_the_batch_that_the_coordinator_described(rig: Rig) -> None:
    awaited = wire.AwaitedTable(
        table=wire.PreparedTable(url="s3://b/t", table_id="d", app="app", version=4),
        transaction=9, since_ms=1_700,
    )  # fmt: skip
    rig.first.runs("j", wire.JoinedParticipant(producer_id=pid(1)), state="AwaitingTable")
    rig.first.known["j"].job.awaited.CopyFrom(awaited)
    rig.first.runs("open", wire.JoinedParticipant(producer_id=pid(1)))
    rig.first.opens(0, pid(1), rig.now_ms)
    [found] = rig.admin.describe_transactions(["j"])
    assert found.started_ms == 1_000
    assert found.job is not None
    assert found.job.awaited == AwaitedTable("s3://b/t", "d", "app", 4, 1_700)
    for commit in (True, False):
        rig.admin.resolve_transaction("j", commit=commit)
        request = rig.first.asked[-1]
        kind = wire.CommitParticipantsRequest if commit else wire.AbortParticipantsRequest
        assert isinstance(request, kind)
        assert (request.batch.job, request.batch.batch) == ("j", 4)
        assert request.evidence.table == awaited.table
        assert (request.evidence.transaction, request.evidence.found_by) == (9, 3)
    with pytest.raises(errors.InvalidTxnState, match="no prepared batch"):
        rig.admin.resolve_transaction("open", commit=True)
    with pytest.raises(errors.TransactionalIdNotFound):
        rig.admin.resolve_transaction("none", commit=True)


def test_an_abort_of_a_transaction_that_is_being_ended_is_not_repeated(rig: Rig) -> None:
    rig.first.refusals = [errors.ConcurrentTransactions("it is being committed")]
    with pytest.raises(errors.ConcurrentTransactions, match="committed"):
        rig.admin.abort_transaction("a")
    assert len(rig.first.asked) == 1


def test_producers_are_described_by_the_leaders(rig: Rig) -> None:
    rig.first.opens(0, pid(1), 1_234)
    rig.second.producers[1] = [wire.ProducerState(producer_id=5, transaction_start=-1)]
    found = rig.admin.describe_producers([T0, T1])
    (opened,), (plain,) = found[T0], found[T1]
    assert (opened.transaction_start, opened.transaction_began_ms) == (5, 1_234)
    assert (plain.producer_id, plain.transaction_start) == (5, None)
    with pytest.raises(errors.UnknownTopicOrPartition):
        rig.admin.describe_producers([TopicPartition("t", 7)], timeout_s=3)


def hanging(rig: Rig, **given: Any) -> list[tuple[str, str]]:
    found = rig.admin.find_hanging_transactions(**given)
    return [(str(each.partition), each.reason) for each in found]


def test_a_transaction_that_its_coordinator_knows_does_not_hang(rig: Rig) -> None:
    rig.first.opens(0, pid(1), rig.now_ms - MIN)
    rig.second.knows("a", pid(1), "Ongoing", 0)
    rig.cluster.coordinator_node = 2
    assert hanging(rig) == []


@pytest.mark.parametrize(
    ("state", "places", "reason"),
    [
        ("CompleteCommit", [0], "has ended the transaction (CompleteCommit)"),
        ("Ongoing", [1], "has not registered the partition"),
        ("", [], "does not know the producer id"),
    ],
)
def test_a_transaction_that_its_coordinator_does_not_know_hangs(
    rig: Rig, state: str, places: list[int], reason: str
) -> None:
    rig.first.opens(0, pid(1), rig.now_ms - MIN)
    if state:
        rig.first.knows("a", pid(1), state, *places)
    ((place, said),) = hanging(rig)
    assert place == "t-0"
    assert reason in said
    assert hanging(rig, topics=["t"]) == [(place, said)]


def test_a_participant_of_an_open_job_does_not_hang(rig: Rig) -> None:
    rig.first.opens(0, pid(1), rig.now_ms - MIN)
    rig.second.opens(1, pid(1, 2), rig.now_ms - MIN)
    rig.first.runs("j", joined(pid(1)))
    ((place, reason),) = hanging(rig)
    assert (place, reason) == ("t-1", "its producer is not part of the open transaction of the job")
    rig.first.runs("j", joined(pid(1)), joined(pid(1, 2)))
    assert hanging(rig) == []


def test_a_transaction_older_than_the_maximum_hangs(rig: Rig) -> None:
    rig.first.opens(0, pid(1), rig.now_ms - 16 * MIN)
    rig.first.opens(0, pid(1, 2), rig.now_ms - 14 * MIN)
    rig.first.knows("a", pid(1), "Ongoing", 0)
    rig.first.knows("b", pid(1, 2), "Ongoing", 0)
    (found,) = rig.admin.find_hanging_transactions()
    assert (found.transactional_id, found.start_offset) == ("a", 5)
    assert "longer than 900000 ms" in found.reason
    assert found.open_ms >= 16 * MIN
    assert len(rig.admin.find_hanging_transactions(max_timeout_ms=MIN)) == 2


def test_a_coordinator_that_loads_makes_it_uncertain(rig: Rig) -> None:
    rig.first.opens(0, pid(4), rig.now_ms)
    rig.second.loading = [4]
    (found,) = rig.admin.find_hanging_transactions()
    assert not found.certain
    assert "loads __transaction_state-4" in found.reason


def test_a_transaction_that_ends_meanwhile_does_not_hang(rig: Rig) -> None:
    """The coordinator's answer is newer than the leader's."""
    rig.first.opens(0, pid(1), rig.now_ms)
    broker: Any = rig.first
    answer = broker._list

    def ended(request: Any) -> Any:
        rig.first.producers.clear()
        return answer(request)

    broker._list = ended
    rig.admin.close()
    rig.admin = AdminClient("b1:9292,b2:9292")
    assert hanging(rig) == []
