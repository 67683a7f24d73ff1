"""How a producer reports batches that were refused or never answered, and missing topics."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pk import errors, limits
from pk.client.producer_batch import InFlightRequest
from tests.kit.fake_broker import APPEND, LOSE_REPLY, SILENT
from tests.unit.client.test_fetch_engine import Bench as FetchBench
from tests.unit.client.test_produce_engine import Bench


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def fetching():
    made: list[FetchBench] = []

    def make(**options: Any) -> FetchBench:
        made.append(FetchBench(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("keys", [False, True])
def test_what_was_sent_together_fits_a_topic_of_small_batches(bench: Any, keys: bool) -> None:
    """A chunk may be larger than max_message_bytes allows; none of its records is."""
    b = bench(linger_ms=20)
    b.cluster.create("t", 2)
    b.cluster.configs["max_message_bytes"] = "4096"
    lengths: list[int] = []

    def judge(log: Any, header: Any) -> Any:
        lengths.append(header.length)
        return APPEND if header.length <= 4096 else errors.RecordTooLarge("for the topic")

    b.broker.on_produce = judge
    called: list[int] = []

    async def work() -> None:
        futures = []
        for number in range(300):
            key = b"%d" % number if keys else None
            value = b"%03d" % number * (700 if number == 150 else 30)
            told = lambda *_, number=number: called.append(number)  # noqa: E731
            futures.append(await b.send("t", value, key, on_delivery=told))
        await b.flush(10_000)
        stored = {
            (place, offset): value
            for place in (0, 1)
            for offset, _, value in b.cluster.log("t", place).rows()
        }
        for number, future in enumerate(futures):
            at = future.result(0)
            assert stored[at.partition, at.offset][:3] == b"%03d" % number
        assert len(stored) == 300

    b.run(work)
    assert sorted(called) == list(range(300))
    assert len(lengths) > 10


def test_a_refusal_says_nothing_of_an_attempt_whose_answer_was_lost(bench: Any) -> None:
    """The first attempt is stored; before the second one the topic's limit is lowered."""
    b = bench()
    b.cluster.create("t")
    verdicts = iter([LOSE_REPLY, errors.RecordTooLarge("10 bytes are allowed")])
    b.broker.on_produce = lambda log, header: next(verdicts, APPEND)

    async def work() -> None:
        lost = await b.send("t", b"0")
        await b.world.clock.sleep_ms(500)
        refused = await b.send("t", b"1")
        await b.flush(10_000)
        error = lost.exception(0)
        assert isinstance(error, errors.OutcomeUnknown)
        assert "10 bytes are allowed; an earlier attempt" in error.message
        assert refused.result(0).offset == 1

    b.run(work)
    assert [value for _, _, value in b.cluster.rows("t")] == [b"0", b"1"]


def test_what_was_under_way_when_the_producer_closed_may_be_stored(bench: Any) -> None:
    b = bench(linger_ms=50)
    b.cluster.create("t", 2)
    b.broker.on_produce = lambda log, header: SILENT

    async def work() -> None:
        asked = await b.send("t", b"0", partition=0)
        await b.world.clock.sleep_ms(500)
        waiting = await b.send("t", b"1", partition=1)
        await b.engine.close()
        told = [each.exception(0) for each in (asked, waiting)]
        assert all(isinstance(each, errors.ClosedError) for each in told)
        assert ["it may have been stored" in str(each) for each in told] == [True, False]

    b.run(work)


@pytest.mark.parametrize(
    "refusal",
    [
        errors.BrokerUnavailable("this broker is shutting down"),
        errors.ControllerUnavailable("only acks=all is accepted (rule R6)"),
    ],
)
def test_without_idempotence_what_was_merely_refused_is_sent_again(
    bench: Any, refusal: errors.PkError
) -> None:
    """A broker that shuts down, or has no contact to the controller, refuses before it appends (L5,
    L7).
    """
    b = bench(acks="1")
    b.cluster.create("t")
    verdicts = iter([refusal, refusal])
    b.broker.on_produce = lambda log, header: next(verdicts, APPEND)

    async def work() -> None:
        sent = await b.send("t", b"0")
        await b.flush(10_000)
        assert sent.result(0).offset == 0

    b.run(work)
    assert [value for _, _, value in b.cluster.rows("t")] == [b"0"]


def test_missing_topics_are_asked_for_at_a_steady_pace(fetching: Any) -> None:
    """Two brokers answer about all topics each time; that must not double the next request."""
    b = fetching(nodes=3)
    asked = []
    metadata = b.cluster.metadata
    b.cluster.metadata = lambda *given: asked.append(given) or metadata(*given)
    b.on_client(b.engine.subscribe, [f"t{number}" for number in range(5)], None)
    b.sim.loop.run_for_ms(10_000)
    assert len(asked) < 70, "two brokers, twice a second"
    assert len(b.engine.problems) == 5


@pytest.mark.parametrize("begun", [True, False])
def test_a_leader_that_fails_while_it_writes_has_not_refused(bench: Any, begun: bool) -> None:
    b = bench()
    b.cluster.create("t")
    details = {"appended": "true"} if begun else {}
    b.broker.on_produce = lambda log, header: errors.StorageFailed("d1 is offline", **details)

    async def work() -> None:
        future = await b.send("t", b"x")
        await b.flush(1_000)
        told = future.exception(0)
        assert type(told) is (errors.OutcomeUnknown if begun else errors.StorageFailed)
        assert ("may have been stored" in told.message) == begun

    b.run(work)


@pytest.mark.parametrize("acks", ["1", "all"])
def test_what_a_full_disk_may_have_taken_is_not_sent_anew(bench: Any, acks: str) -> None:
    """Without idempotence it is never sent again (rule L7); with idempotence only under the same
    sequence, until the outcome is known (client/sender N2).  Here the first batch is given up
    meanwhile, and the second had been stored.
    """
    b = bench(acks=acks, linger_ms=0, delivery_timeout_ms=2_000, request_timeout_ms=1_000)
    b.cluster.create("t")
    asked: list[tuple[int, int]] = []

    def verdict(log: Any, header: Any) -> Any:
        asked.append((header.producer_epoch, header.base_sequence))
        return errors.StorageFull("no space", appended="true")

    b.broker.on_produce = verdict

    async def work() -> None:
        futures = [await b.send("t", b"0")]
        await b.world.clock.sleep_ms(500)
        futures.append(await b.send("t", b"1"))
        await b.world.clock.sleep_ms(1_900)
        assert futures[0].done()
        await b.flush(5_000)
        told = {type(future.exception(0)) for future in futures}
        assert told == {errors.OutcomeUnknown if acks == "1" else errors.DeliveryTimedOut}
        for future in futures:
            assert "may have been stored" in future.exception(0).message

    b.run(work)
    if acks == "1":
        assert len(asked) == 2
    else:
        assert set(asked) == {(0, 0), (0, 1)}


def test_a_thread_that_waits_for_memory_wakes_when_the_producer_ends(bench: Any) -> None:
    """The end fails all records, which releases their memory; the accumulator then refuses more."""
    b = bench(buffer_memory=4_096, batch_size=1_024)
    b.cluster.create("t")
    b.broker.on_produce = lambda log, header: SILENT

    async def work() -> None:
        accumulator = await b.engine.open("t", 5_000)
        while accumulator.append(bytes(1_000), size=1_000) is not None:
            b.engine.poke()
        await b.world.clock.sleep_ms(100)
        waiter = threading.Thread(target=b.engine.pool.wait, args=(1_000, 30))
        waiter.start()
        await b.engine.close()
        waiter.join(10)
        assert not waiter.is_alive()
        with pytest.raises(errors.ClosedError):
            accumulator.append(b"x", size=17)

    b.run(work)


def test_a_frame_has_as_many_batches_as_a_broker_accepts(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker refuses a larger frame, and the refusal would end the stream."""
    monkeypatch.setattr(limits, "PRODUCE_BATCHES_MAX", 3)
    b = bench(linger_ms=20)
    b.cluster.create("t", 8)
    sent: list[int] = []
    add = InFlightRequest.add

    def note(self: InFlightRequest, *given: Any) -> None:
        add(self, *given)
        sent.append(len(self.batches))

    monkeypatch.setattr(InFlightRequest, "add", note)

    async def work() -> None:
        futures = [await b.send("t", b"v", partition=place) for place in range(8)]
        await b.flush(10_000)
        assert [future.result(0).partition for future in futures] == list(range(8))

    b.run(work)
    assert sorted(sent) == [1, 1, 1, 2, 2, 2, 3, 3]
