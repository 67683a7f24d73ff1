"""A producer's transactions over the simulated network, against a scripted broker and a naive
coordinator.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pk import errors
from pk.client.futures import SendFuture
from pk.client.transaction_engine import TransactionEngine
from pk.client.transaction_manager import ManagerState, TransactionCall
from pk.log import batch as batches
from tests.kit.fake_broker import APPEND, BREAK, LOSE_REPLY, SILENT
from tests.unit.client.test_produce_engine import Bench

INIT, BEGIN, SEND, COMMIT, ABORT = TransactionCall
ID = "orders-1"
S = 1_000


class TransactionBench(Bench):
    """A simulated cluster, and one producer with a transactional id."""

    def __init__(self, seed: int = 1, nodes: int = 1, **options: Any) -> None:
        super().__init__(seed, nodes, transactional_id=ID, **options)
        options_ = self.engine.options
        self.transactions = self.run(self._with_transactions(options_))
        self.coordinator = self.cluster.coordinator
        self.faults = self.cluster.coordinator_faults

    def _with_transactions(self, options: Any) -> Callable[[], Awaitable[TransactionEngine]]:
        async def build() -> TransactionEngine:
            return TransactionEngine(self.world, self.engine.cluster, self.engine, options)

        return build

    async def call(self, call: TransactionCall, timeout_ms: int = 60 * S) -> None:
        await self.transactions.call(call, timeout_ms)

    async def begun(self) -> None:
        """Begin a transaction; the first one needs an init."""
        if self.transactions.manager.state is ManagerState.UNINITIALIZED:
            await self.call(INIT)
        await self.call(BEGIN)

    async def sends(self, *values: bytes, topic: str = "t", key: bytes | None = None) -> Any:
        return [await self.send(topic, value, key) for value in values]

    @property
    def decisions(self) -> list[bool]:
        return [each.commit for each in self.coordinator.ended]

    def close(self) -> None:
        self.run(self.transactions.close)
        self.sim.loop.run_for_ms(10 * S)  # lost replies come to nothing
        super().close()


@pytest.fixture
def bench():
    made: list[TransactionBench] = []

    def make(**options: Any) -> TransactionBench:
        made.append(TransactionBench(**options))
        made[-1].cluster.create("t", 3)
        return made[-1]

    yield make
    for each in made:
        each.close()


def errors_of(futures: list[SendFuture]) -> list[type | None]:
    found = [future.exception(0) for future in futures]
    return [None if each is None else type(each) for each in found]


def test_transactions_commit_and_abort_under_pairs_of_their_own(bench: Any) -> None:
    """Every batch has the attribute and the pair; each partition begins at sequence 0."""
    b = bench()

    async def work() -> None:
        for number in range(6):
            await b.begun()
            futures = [await b.send("t", b"%d" % number, partition=place) for place in (0, 1, 2)]
            if number % 3 == 2:
                await b.flush(S)
            await b.call(ABORT if number % 3 == 2 else COMMIT)
            if number % 3 != 2:
                assert errors_of(futures) == [None] * 3, "acknowledged before commit returns"

    b.run(work)
    assert b.decisions == [True, True, False, True, True, False]
    assert sorted(b.cluster.committed("t")) == sorted([b"0", b"1", b"3", b"4"] * 3)
    pairs = {(pid, epoch) for _, pid, epoch, _ in b.broker.produced}
    assert len(pairs) >= 4
    firsts: dict[Any, int] = {}
    for key, pid, epoch, sequence in b.broker.produced:
        firsts.setdefault((key, pid, epoch), sequence)
    assert set(firsts.values()) == {0}
    for log in b.cluster.logs_of("t"):
        assert all(batches.read_header(raw).transactional for raw in log.stored)


def test_sequences_go_on_within_a_transaction(bench: Any) -> None:
    b = bench(linger_ms=0)

    async def work() -> None:
        await b.begun()
        for number in range(5):
            await b.send("t", b"%d" % number, partition=0)
            await b.flush(10 * S)
        await b.call(COMMIT)

    b.run(work)
    assert [sequence for _, _, _, sequence in b.broker.produced] == [0, 1, 2, 3, 4]


def test_flush_in_a_transaction_acknowledges_and_does_not_commit(bench: Any) -> None:
    b = bench()

    async def work() -> None:
        await b.begun()
        futures = await b.sends(b"x")
        await b.flush(10 * S)
        assert errors_of(futures) == [None]
        assert not b.decisions
        await b.call(COMMIT)
        assert b.decisions == [True]

    b.run(work)


def test_records_outside_a_transaction_are_refused(bench: Any) -> None:
    b = bench()

    async def refused() -> None:
        with pytest.raises(errors.InvalidTxnState):
            await b.send("t", b"x")

    async def work() -> None:
        await refused()
        await b.call(INIT)
        await refused()
        await b.call(BEGIN)
        await b.sends(b"in")
        await b.call(COMMIT)
        await refused()

    b.run(work)
    assert b.cluster.committed("t") == [b"in"]


def test_a_transaction_without_records_asks_the_coordinator_nothing(bench: Any) -> None:
    b = bench()

    async def work() -> None:
        for call in (COMMIT, ABORT, COMMIT):
            await b.begun()
            await b.call(call)
        assert b.engine.sender.granted[1] == 0

    b.run(work)
    assert not b.coordinator.ended


def test_abort_discards_what_was_not_sent(bench: Any) -> None:
    b = bench(linger_ms=1_000)

    async def work() -> None:
        await b.begun()
        futures = await b.sends(b"a", b"b")
        await b.call(ABORT)
        assert errors_of(futures) == [errors.TransactionAborted] * 2

    b.run(work)
    assert not b.broker.produced
    assert not b.coordinator.ended, "no broker may have got a batch"


def test_abort_fails_records_of_a_topic_that_is_not_there_any_more(bench: Any) -> None:
    """They would wait for the topic (client/produce_engine E4)."""
    b = bench(linger_ms=0)

    async def work() -> None:
        await b.begun()
        await b.sends(b"before")
        await b.flush(S)
        b.cluster.delete("t")
        b.engine.cluster.want_metadata()
        await b.world.clock.sleep_ms(2 * S)
        futures = await b.sends(b"after") if "t" in b.engine.cluster.metadata.topics else []
        await b.call(ABORT, 5 * S)
        assert errors_of(futures) in ([], [errors.TransactionAborted])

    b.run(work)
    assert b.decisions == [False]


@pytest.mark.parametrize("call", [COMMIT, ABORT])
@pytest.mark.parametrize(
    "faults",
    [
        [LOSE_REPLY], [SILENT], [LOSE_REPLY, LOSE_REPLY], [errors.CoordinatorLoading()] * 3,
        [errors.CoordinatorUnavailable(), LOSE_REPLY, errors.BrokerUnavailable()],
    ],
    ids=str,
)  # fmt: skip
def test_a_lost_end_is_asked_again_and_decided_once(
    bench: Any, call: TransactionCall, faults: Any
) -> None:
    b = bench(request_timeout_ms=500, delivery_timeout_ms=5 * S)

    async def work() -> None:
        await b.begun()
        await b.sends(b"x")
        await b.flush(S)
        b.faults.extend(faults)
        await b.call(call)
        await b.begun()
        await b.sends(b"y")
        await b.call(COMMIT)

    b.run(work)
    assert b.decisions == [call is COMMIT, True]
    assert b.cluster.committed("t") == ([b"x", b"y"] if call is COMMIT else [b"y"])


def test_the_previous_transaction_may_still_be_ended(bench: Any) -> None:
    """ConcurrentTransactions of the coordinator, and of a leader that asks it."""
    b = bench()

    async def work() -> None:
        b.coordinator.busy = 3
        await b.begun()
        await b.sends(b"x")
        b.coordinator.busy = 3
        await b.call(COMMIT)
        await b.begun()
        b.coordinator.busy = 3
        futures = await b.sends(b"y", b"z")
        await b.flush(10 * S)
        assert errors_of(futures) == [None, None]
        await b.call(COMMIT)

    b.run(work)
    assert sorted(b.cluster.committed("t")) == [b"x", b"y", b"z"]


def test_the_coordinator_moves(bench: Any) -> None:
    b = bench(nodes=2)

    async def work() -> None:
        await b.begun()
        await b.sends(b"x")
        b.cluster.coordinator_node = 2
        await b.call(COMMIT)
        await b.begun()
        await b.sends(b"y")
        await b.flush(S)
        b.cluster.coordinator_node = 7  # not in service yet
        b.sim.loop.call_later(2, lambda: setattr(b.cluster, "coordinator_node", 1))
        await b.call(COMMIT)

    b.run(work)
    assert sorted(b.cluster.committed("t")) == [b"x", b"y"]


def test_a_newer_instance_fences(bench: Any) -> None:
    b = bench()

    async def work() -> None:
        await b.begun()
        futures = await b.sends(b"old")
        await b.flush(S)
        with pytest.raises(errors.ConcurrentTransactions):
            b.coordinator.init(ID)
        b.coordinator.init(ID)
        with pytest.raises(errors.ProducerFenced, match="close this producer"):
            await b.call(COMMIT)
        for call in (INIT, BEGIN, COMMIT, ABORT):
            with pytest.raises(errors.ProducerFenced):
                await b.call(call)
        with pytest.raises(errors.ProducerFenced):
            await b.send("t", b"later")
        assert errors_of(futures) == [None]

    b.run(work)
    assert b.decisions == [False]
    assert b.cluster.committed("t") == []


def test_a_record_of_a_fenced_producer_fails_and_the_abort_says_fenced(bench: Any) -> None:
    """A leader answers InvalidProducerEpoch; only the coordinator knows the reason."""
    b = bench()

    async def work() -> None:
        await b.begun()
        b.coordinator.init(ID)
        futures = await b.sends(b"old")
        await b.flush(S)
        assert errors_of(futures) == [errors.InvalidProducerEpoch]
        with pytest.raises(errors.TransactionAborted, match="InvalidProducerEpoch"):
            await b.call(COMMIT)
        with pytest.raises(errors.ProducerFenced):
            await b.call(ABORT)

    b.run(work)


def test_a_transaction_that_timed_out_is_aborted_and_the_next_one_commits(bench: Any) -> None:
    b = bench()

    async def work() -> None:
        await b.begun()
        await b.sends(b"late")
        await b.flush(S)
        b.coordinator.time_out(ID)
        with pytest.raises(errors.TransactionTimedOut):
            await b.call(COMMIT)
        with pytest.raises(errors.InvalidTxnState, match="abort_transaction first"):
            await b.call(BEGIN)
        await b.call(ABORT)
        await b.begun()
        await b.sends(b"again")
        await b.call(COMMIT)

    b.run(work)
    assert b.decisions == [False, True]
    assert b.cluster.committed("t") == [b"again"]


def test_a_record_after_the_time_out_makes_the_transaction_abortable(bench: Any) -> None:
    b = bench()

    async def work() -> None:
        await b.begun()
        await b.sends(b"first")
        await b.flush(S)
        b.coordinator.time_out(ID)
        futures = await b.sends(b"late")
        await b.flush(S)
        assert errors_of(futures) == [errors.InvalidProducerEpoch]
        with pytest.raises(errors.TransactionAborted):
            await b.send("t", b"refused")
        await b.call(ABORT)
        await b.begun()
        await b.sends(b"again")
        await b.call(COMMIT)

    b.run(work)
    assert b.cluster.committed("t") == [b"again"]


@pytest.mark.parametrize(
    "error",
    [errors.RecordTooLarge("huge"), errors.OutOfOrderSequence("gap"), errors.UnknownProducerId()],
    ids=lambda error: type(error).__name__,
)
def test_a_refused_batch_fails_the_whole_transaction(bench: Any, error: errors.PkError) -> None:
    """The records behind it are not sent, in no partition, and no epoch is increased."""
    b = bench(linger_ms=0, batch_size=64)
    verdicts = iter([APPEND, error])
    b.broker.on_produce = lambda log, header: next(verdicts, APPEND)

    async def work() -> None:
        await b.begun()
        first = await b.sends(b"first")
        await b.flush(S)
        rest = [await b.send("t", b"%d" % i, partition=i % 3) for i in range(60)]
        with pytest.raises(errors.TransactionAborted, match=type(error).__name__):
            await b.call(COMMIT)
        await b.call(ABORT)
        assert errors_of(first) == [None]
        assert type(error) in errors_of(rest)
        assert errors.TransactionAborted in errors_of(rest)
        assert len(b.broker.produced) < 60
        await b.begun()
        await b.sends(b"again")
        await b.call(COMMIT)

    b.run(work)
    assert b.decisions == [False, True]
    assert b.cluster.committed("t") == [b"again"]
    assert {epoch for _, _, epoch, _ in b.broker.produced} == {0, 1}


def test_a_lost_reply_of_a_batch_is_no_failure(bench: Any) -> None:
    b = bench(linger_ms=0, batch_size=64)
    verdicts = iter([LOSE_REPLY, APPEND, BREAK, errors.NotLeaderOrFollower("moving")] * 3)
    b.broker.on_produce = lambda log, header: next(verdicts, APPEND)

    async def work() -> None:
        await b.begun()
        for number in range(20):
            await b.send("t", b"%02d" % number, partition=0)
            await b.world.clock.sleep_ms(3)
        await b.call(COMMIT)

    b.run(work)
    assert b.cluster.committed("t") == [b"%02d" % number for number in range(20)]


def test_a_record_that_expires_fails_the_transaction(bench: Any) -> None:
    b = bench(delivery_timeout_ms=2 * S, request_timeout_ms=S, linger_ms=0)
    b.broker.on_produce = lambda log, header: SILENT if header.producer_epoch == 0 else APPEND

    async def work() -> None:
        await b.begun()
        futures = await b.sends(b"late")
        with pytest.raises(errors.TransactionAborted, match="DeliveryTimedOut"):
            await b.call(COMMIT)
        assert errors_of(futures) == [errors.DeliveryTimedOut]
        await b.call(ABORT)
        await b.begun()
        await b.sends(b"again")
        await b.call(COMMIT)

    b.run(work)
    assert b.cluster.committed("t") == [b"again"]


def test_a_commit_that_times_out_is_repeated_or_aborted(bench: Any) -> None:
    b = bench(request_timeout_ms=5 * S)

    async def work() -> None:
        await b.begun()
        await b.sends(b"x")
        await b.flush(S)
        b.faults.append(LOSE_REPLY)
        with pytest.raises(errors.RequestTimedOut, match="call commit_transaction again"):
            await b.call(COMMIT, 300)
        with pytest.raises(errors.InvalidTxnState):
            await b.call(ABORT)
        await b.world.clock.sleep_ms(10 * S)
        assert b.transactions.manager.state is ManagerState.READY
        with pytest.raises(errors.InvalidTxnState, match="call it again for its outcome"):
            await b.call(BEGIN)
        await b.call(COMMIT)
        await b.begun()
        b.broker.on_produce = lambda log, header: errors.NotEnoughReplicas("one is missing")
        await b.sends(b"y")
        with pytest.raises(errors.RequestTimedOut, match="not acknowledged yet"):
            await b.call(COMMIT, 300)
        await b.call(ABORT)
        b.broker.on_produce = lambda log, header: APPEND
        await b.begun()
        await b.sends(b"z")
        await b.call(COMMIT)

    b.run(work)
    assert b.cluster.committed("t") == [b"x", b"z"]


def test_two_threads_may_wait_for_one_commit(bench: Any) -> None:
    b = bench()

    async def work() -> None:
        await b.begun()
        await b.sends(b"x")
        b.faults.append(errors.CoordinatorLoading())
        tasks = [b.sim.spawn("client", b.call(COMMIT)) for _ in range(2)]
        for each in tasks:
            await each

    b.run(work)
    assert b.decisions == [True]


def test_leadership_moves_in_a_transaction(bench: Any) -> None:
    b = bench(nodes=2)

    async def work() -> None:
        for number in range(6):
            await b.begun()
            for i in range(10):
                await b.send("t", b"%d-%d" % (number, i), partition=0)
                if i == 5:
                    log = b.cluster.log("t")
                    log.leader, log.epoch = 3 - log.leader, log.epoch + 1
                await b.world.clock.sleep_ms(1)
            await b.call(COMMIT)

    b.run(work)
    expected = [b"%d-%d" % (number, i) for number in range(6) for i in range(10)]
    assert b.cluster.committed("t") == expected


def test_an_abort_does_not_wait_for_a_leader_that_was_replaced(bench: Any) -> None:
    b = bench(nodes=2)
    b.broker.on_produce = lambda log, header: SILENT

    async def work() -> None:
        await b.begun()
        futures = [await b.send("t", b"x", partition=0)]
        b.engine.poke(flush=True)
        await b.world.clock.sleep_ms(100)
        b.sim.loop.call_later(1, lambda: setattr(b.cluster.log("t"), "leader", 2))
        b.sim.loop.call_later(1, lambda: setattr(b.cluster.log("t"), "epoch", 2))
        b.sim.loop.call_later(1, b.engine.cluster.want_metadata)
        begun = b.world.clock.monotonic_ms()
        await b.call(ABORT)
        assert b.world.clock.monotonic_ms() - begun < 5 * S
        assert errors_of(futures) == [errors.TransactionAborted]

    b.run(work)
    assert b.decisions == [False]


def test_closing_aborts_an_open_transaction(bench: Any) -> None:
    b = bench()

    async def work() -> None:
        await b.begun()
        await b.sends(b"x")
        await b.flush(S)
        await b.transactions.finish(5 * S)

    b.run(work)
    assert b.decisions == [False]


def test_closing_waits_for_a_commit_that_timed_out(bench: Any) -> None:
    b = bench(request_timeout_ms=S)

    async def work() -> None:
        await b.begun()
        await b.sends(b"x")
        await b.flush(S)
        b.faults.append(SILENT)
        with pytest.raises(errors.RequestTimedOut):
            await b.call(COMMIT, 100)
        await b.transactions.finish(5 * S)

    b.run(work)
    assert b.decisions == [True]


def test_closing_is_bounded_without_a_coordinator(bench: Any) -> None:
    b = bench()

    async def work() -> None:
        await b.begun()
        await b.sends(b"x")
        await b.flush(S)
        b.cluster.coordinator_node = 7
        begun = b.world.clock.monotonic_ms()
        await b.transactions.finish(2 * S)
        assert b.world.clock.monotonic_ms() - begun <= 2 * S + 100

    b.run(work)
    assert not b.decisions


def test_the_next_producer_aborts_what_the_last_one_left_open(bench: Any) -> None:
    b = bench()

    async def work() -> None:
        with pytest.raises(KeyError):
            b.coordinator.ids[ID]
        first = b.coordinator.init(ID)
        b.coordinator.verify(*first, b.cluster.log("t").key, 0)
        await b.begun()
        await b.sends(b"x")
        await b.call(COMMIT)

    b.run(work)
    assert b.decisions == [False, True]
