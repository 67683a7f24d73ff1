"""The producer's engine over the simulated network, against a scripted broker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pk import errors
from pk.client import produce_engine
from pk.client.futures import SendFuture
from pk.client.network_client import NetworkClient
from pk.client.options import producer_options
from pk.client.produce_engine import ProduceEngine
from pk.client.record_arguments import record_size
from pk.sim.world import SimWorld
from tests.kit.fake_broker import APPEND, BREAK, LOSE_REPLY, SILENT, FakeBroker, FakeCluster


class Bench:
    """A simulated cluster and one producer on it."""

    def __init__(self, seed: int = 1, nodes: int = 1, **options: Any) -> None:
        self.sim = SimWorld(seed)
        self.cluster = FakeCluster()
        self.brokers: dict[int, FakeBroker] = {}
        for node in range(1, nodes + 1):
            broker = FakeBroker(self.cluster, self.sim.world_of(f"b{node}"), node)
            self.brokers[node] = broker
            self.sim.run(self._listen(broker, node))
        self.broker = self.brokers[1]
        self.world = self.sim.world_of("client")
        resolved, _ = producer_options({"linger_ms": 2, "retry_backoff_ms": 10, **options})
        self.engine = self.sim.run(self._build(resolved))

    async def _listen(self, broker: FakeBroker, node: int) -> None:
        await self.sim.spawn(f"b{node}", broker.listen(f"b{node}:9292"))

    async def _build(self, options: Any) -> ProduceEngine:
        async def build() -> ProduceEngine:
            cluster = NetworkClient(self.world, "b1:9292", retry_backoff_ms=10)
            return ProduceEngine(self.world, cluster, options)

        return await self.sim.spawn("client", build())

    def encode_slowly(self, rng: random.Random, small_ms: int = 0) -> list[int]:
        """Make the compression of each frame slow; return a list of how many ran at once.

        small_ms: how much longer a batch of less than 1,000 bytes takes
        """
        at_once: list[int] = []
        running: list[Any] = []

        async def compute(work: Any) -> Any:
            batch = work.func.__self__
            assert batch not in running, "E2"
            running.append(batch)
            at_once.append(len(running))
            try:
                more_ms = small_ms if batch.size < 1_000 else 0
                await self.world.clock.sleep_ms(rng.randint(0, 20) + more_ms)
                return work()
            finally:
                running.remove(batch)

        self.engine.compute = compute
        return at_once

    def run(self, work: Callable[[], Any]) -> Any:
        async def drive() -> Any:
            return await self.sim.spawn("client", work())

        return self.sim.run(drive())

    async def send(
        self, topic: str, value: bytes | None, key: bytes | None = None, **more: Any
    ) -> SendFuture:
        accumulator = await self.engine.open(topic, 5000)
        size = record_size(value, key, None, topic)
        partition, on_delivery = more.get("partition"), more.get("on_delivery")
        future = accumulator.append(value, key, None, partition, None, on_delivery, size=size)
        assert future is not None
        self.engine.poke()
        return future

    async def flush(self, timeout_ms: int) -> None:
        """Wait until every record sent before has an outcome.  Raises `TimeoutError`."""
        for records in self.engine.begin_flush():
            known = asyncio.Event()
            records.call_when_known(None, known.set)
            async with asyncio.timeout(timeout_ms / 1000):
                await known.wait()

    def close(self) -> None:
        self.run(self.engine.close)
        self.sim.close()
        assert self.engine.pool.used == 0, "every reserved byte was released"
        assert not self.sim.loop.failures


@pytest.fixture
def bench():
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_records_arrive_in_order_with_their_offsets(bench: Any) -> None:
    b = bench()
    b.cluster.create("t", 3)

    async def work() -> None:
        futures = [await b.send("t", b"v%d" % i, b"k%d" % (i % 7)) for i in range(300)]
        await b.flush(10_000)
        stored = {(m.partition, m.offset) for m in (f.result(0) for f in futures)}
        assert len(stored) == 300
        for index, future in enumerate(futures):
            meta = future.result(0)
            row = b.cluster.log("t", meta.partition).rows()[meta.offset]
            assert row == (meta.offset, b"k%d" % (index % 7), b"v%d" % index)

    b.run(work)
    for partition in range(3):
        values = [int(v[1:]) for _, _, v in b.cluster.log("t", partition).rows()]
        assert values == sorted(values)


def test_a_batch_that_cannot_be_encoded_fails_alone(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(produce_engine, "INLINE_BYTES", 0)
    b = bench(compression="lz4", batch_size=64, linger_ms=0, max_in_flight=5)
    b.cluster.create("t")
    b.encode_slowly(random.Random(1))
    real, failing = b.engine.compute, iter([False, True])

    async def compute(build: Callable[[], Any]) -> Any:
        if next(failing, False):
            raise errors.SerializationError("drawn")
        return await real(build)

    b.engine.compute = compute

    async def work() -> list[SendFuture]:
        futures = [await b.send("t", b"%03d" % i) for i in range(100)]
        await b.flush(60_000)
        return futures

    futures = b.run(work)
    failed = [i for i, future in enumerate(futures) if future.exception(0) is not None]
    stored = [int(v) for _, _, v in b.cluster.log("t").rows()]
    assert failed
    assert sorted([*failed, *stored]) == list(range(100))
    assert stored == sorted(stored)


def test_a_lost_reply_is_answered_from_the_brokers_memory(bench: Any) -> None:
    """Rule L4: the retry is recognised; the record is stored once."""
    b = bench()
    b.cluster.create("t")
    verdicts = iter([APPEND, LOSE_REPLY, BREAK])
    b.broker.on_produce = lambda log, header: next(verdicts, APPEND)

    async def work() -> None:
        for i in range(5):
            future = await b.send("t", b"%d" % i)
            await b.flush(10_000)
            assert future.result(0).offset == i

    b.run(work)
    assert [v for _, _, v in b.cluster.log("t").rows()] == [b"0", b"1", b"2", b"3", b"4"]


def test_without_idempotence_a_lost_reply_is_outcome_unknown(bench: Any) -> None:
    """Rule L7: the batch is never sent again silently."""
    b = bench(enable_idempotence=False)
    b.cluster.create("t")
    verdicts = iter([LOSE_REPLY])
    b.broker.on_produce = lambda log, header: next(verdicts, APPEND)

    async def work() -> None:
        future = await b.send("t", b"once")
        await b.flush(10_000)
        assert isinstance(future.exception(0), errors.OutcomeUnknown)
        again = await b.send("t", b"next")
        await b.flush(10_000)
        assert again.result(0).offset == 1

    b.run(work)


def test_the_identity_is_what_the_broker_granted(bench: Any) -> None:
    b = bench()
    b.cluster.create("t")
    assert b.engine.sender.granted == (-1, -1)

    async def work() -> None:
        await b.send("t", b"x")
        await b.flush(10_000)

    b.run(work)
    assert b.engine.sender.granted == b.broker.produced[0][1:3]


def test_acks_0_tells_no_offset_and_needs_no_answer(bench: Any) -> None:
    b = bench(acks="0")
    b.cluster.create("t")

    async def work() -> None:
        future = await b.send("t", b"x")
        await b.flush(10_000)
        assert future.result(0).offset == -1

    b.run(work)
    b.sim.loop.run_for_ms(100)
    assert len(b.cluster.log("t").rows()) == 1
    assert b.broker.produced[0][1] == -1, "no producer id without acks=all (rule L6)"


def test_leadership_moves_and_the_records_follow_in_order(bench: Any) -> None:
    b = bench(nodes=2)
    b.cluster.create("t")

    async def work() -> None:
        futures = []
        for i in range(60):
            futures.append(await b.send("t", b"%d" % i))
            if i % 20 == 10:
                log = b.cluster.log("t")
                log.leader, log.epoch = 3 - log.leader, log.epoch + 1
            await b.world.clock.sleep_ms(1)
        await b.flush(20_000)
        assert [f.result(0).offset for f in futures] == list(range(60))

    b.run(work)
    assert [v for _, _, v in b.cluster.log("t").rows()] == [b"%d" % i for i in range(60)]


@pytest.mark.parametrize(
    ("unclean", "tiered"), [(False, True), (True, False), (True, True)],
    ids=["clean", "without a table", "with a table"],
)  # fmt: skip
@pytest.mark.parametrize("first", [False, True])
def test_what_may_lie_below_an_unclean_leaders_log_is_not_sent_again(
    bench: Any, unclean: bool, tiered: bool, first: bool
) -> None:
    """Rule T4: such a leader begins at the table's end, and knows no producer of earlier
    records.
    """
    b = bench(nodes=2, request_timeout_ms=500)
    b.cluster.configs = {"tiered": str(tiered).lower()}
    b.cluster.create("t")
    log = b.cluster.log("t")

    async def work() -> None:
        if not first:
            await b.send("t", b"before")
            await b.flush(1_000)
        b.broker.on_produce = lambda log, header: SILENT
        future = await b.send("t", b"stored")
        b.engine.begin_flush()
        await b.world.clock.sleep_ms(100)
        log.leader, log.epoch = 2, 2
        if unclean:
            log.unclean_epoch = 2
        if unclean and tiered:
            log.producers.clear()
        later = await b.send("t", b"later")
        await b.flush(5_000)
        if unclean and tiered:
            assert isinstance(future.exception(0), errors.OutcomeUnknown)
        else:
            assert future.result(0).offset == log.end - 2
        assert later.result(0).offset == log.end - 1

    b.run(work)
    assert [v for _, _, v in log.rows()] == [b"before"] * (not first) + [b"stored", b"later"]


def test_an_answer_that_never_comes_times_out_and_is_asked_again(bench: Any) -> None:
    b = bench(request_timeout_ms=500, delivery_timeout_ms=5000)
    b.cluster.create("t")
    verdicts = iter([SILENT])
    b.broker.on_produce = lambda log, header: next(verdicts, APPEND)

    async def work() -> None:
        future = await b.send("t", b"x")
        await b.flush(10_000)
        assert future.result(0).offset == 0

    b.run(work)
    assert len(b.cluster.log("t").rows()) == 1


def test_delivery_timeout_names_the_cause_and_the_next_record_still_goes(bench: Any) -> None:
    """A new epoch closes the gap that a timed-out batch leaves (KIP-360)."""
    b = bench(request_timeout_ms=200, delivery_timeout_ms=1000)
    b.cluster.create("t")
    b.broker.on_produce = lambda log, header: BREAK

    async def work() -> None:
        first = await b.send("t", b"lost")
        await b.flush(10_000)
        assert isinstance(first.exception(0), errors.DeliveryTimedOut)
        b.broker.on_produce = lambda log, header: APPEND
        second = await b.send("t", b"kept")
        await b.flush(10_000)
        assert second.result(0).offset == 0

    b.run(work)
    assert b.broker.produced[-1][2:] == (1, 0), "epoch 1, sequence 0"


def test_no_space_is_retried_until_there_is(bench: Any) -> None:
    b = bench()
    b.cluster.create("t")
    full = [True]
    b.broker.on_produce = lambda log, header: errors.StorageFull("no space") if full[0] else APPEND

    async def work() -> None:
        futures = [await b.send("t", b"%d" % i) for i in range(3)]
        await b.world.clock.sleep_ms(3000)
        assert not any(f.done() for f in futures)
        full[0] = False
        await b.flush(10_000)
        assert [f.result(0).offset for f in futures] == [0, 1, 2]

    b.run(work)


def test_acknowledged_loss_is_fatal_and_named(bench: Any) -> None:
    """Rule L6: there is a gap behind an acknowledged batch."""
    b = bench()
    b.cluster.create("t")

    async def work() -> None:
        await b.send("t", b"0")
        await b.send("t", b"1")
        await b.flush(10_000)
        log = b.cluster.log("t")
        log.batches.clear()
        log.producers.clear()
        log.end = 0
        future = await b.send("t", b"2")
        await b.flush(10_000)
        error = future.exception(0)
        assert isinstance(error, errors.OutOfOrderSequence)
        assert "acknowledged records of t-0 up to offset 1" in error.message
        with pytest.raises(errors.OutOfOrderSequence):
            await b.send("t", b"3")

    b.run(work)


def test_state_deleted_with_its_records_is_no_loss(bench: Any) -> None:
    b = bench()
    b.cluster.create("t")

    async def work() -> None:
        await b.send("t", b"0")
        await b.flush(10_000)
        log = b.cluster.log("t")
        log.log_start = 1
        log.batches.clear()
        log.producers.clear()
        future = await b.send("t", b"1")
        await b.flush(10_000)
        assert future.result(0).offset == 1

    b.run(work)


def test_a_recreated_topic_is_another_topic(bench: Any) -> None:
    # rule L8
    b = bench()
    b.cluster.create("t")

    async def work() -> None:
        await b.send("t", b"old")
        await b.flush(10_000)
        b.cluster.delete("t")
        b.cluster.create("t")
        future = await b.send("t", b"meant for the old one")
        await b.flush(10_000)
        assert isinstance(future.exception(0), errors.TopicRecreated)
        future = await b.send("t", b"new")
        await b.flush(10_000)
        assert future.result(0).offset == 0

    b.run(work)
    assert [v for _, _, v in b.cluster.log("t").rows()] == [b"new"]


def test_unknown_topic_is_said_soon(bench: Any) -> None:
    b = bench()

    async def work() -> None:
        with pytest.raises(errors.UnknownTopicOrPartition, match="nosuch"):
            await b.send("nosuch", b"x")

    b.run(work)
    assert b.sim.loop.now_us < 5_000_000


def test_a_callback_that_raises_hurts_nobody(bench: Any, caplog: Any) -> None:
    b = bench()
    b.cluster.create("t")
    seen: list[Any] = []

    def bad(meta: Any, error: Any) -> None:
        seen.append((meta, error))
        raise RuntimeError("mine")

    async def work() -> None:
        future = await b.send("t", b"x", on_delivery=bad)
        await b.flush(10_000)
        assert future.result(0).offset == 0

    b.run(work)
    assert seen == [(seen[0][0], None)]
    assert "a delivery callback failed" in caplog.text


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_exactly_once_in_order_through_any_faults(seed: int) -> None:
    """Lost replies, breaks, refusals, silence, moving leaders: every record is acknowledged once,
    in order, and none is stored twice.
    """
    rng = random.Random(seed)
    b = Bench(
        seed, nodes=2, linger_ms=rng.choice([0, 1, 5]), request_timeout_ms=300,
        delivery_timeout_ms=60_000,
        batch_size=rng.choice([64, 200, 4096]), max_in_flight=rng.randint(1, 5),
        compression=rng.choice(["none", "lz4", "zstd"]),
    )  # fmt: skip
    b.encode_slowly(rng)
    b.cluster.create("t", 3)
    trouble = [True]

    def verdict(log: Any, header: Any) -> Any:
        if not trouble[0]:
            return APPEND
        draw = rng.random()
        if draw < 0.05:
            return LOSE_REPLY
        if draw < 0.1:
            return BREAK
        if draw < 0.13:
            return SILENT
        if draw < 0.25:
            kinds = [errors.StorageFull, errors.NotEnoughReplicas, errors.ThrottledError]
            return rng.choice(kinds)("drawn")
        return APPEND

    for broker in b.brokers.values():
        broker.on_produce = verdict

    async def work() -> list[SendFuture]:
        futures = []
        for i in range(150):
            futures.append(await b.send("t", b"%d" % i, b"%d" % (i % 5)))
            if rng.random() < 0.3:
                await b.world.clock.sleep_ms(rng.randint(0, 5))
            if rng.random() < 0.03:
                log = b.cluster.log("t", rng.randrange(3))
                log.leader, log.epoch = 3 - log.leader, log.epoch + 1
        await b.world.clock.sleep_ms(500)
        trouble[0] = False
        await b.flush(120_000)
        return futures

    futures = b.run(work)
    metas = [future.result(0) for future in futures]
    for partition in range(3):
        mine = [(m.offset, i) for i, m in enumerate(metas) if m.partition == partition]
        rows = b.cluster.log("t", partition).rows()
        assert [(o, b"%d" % i) for o, i in mine] == [(o, v) for o, _, v in rows]
    b.close()


def test_a_broker_that_moved_is_not_waited_for_where_it_was(bench: Any) -> None:
    """The old stream may stay open without an end: a host that vanished closes nothing."""
    b = bench()
    b.cluster.create("t")
    b.broker.on_produce = lambda log, header: SILENT
    elsewhere = FakeBroker(b.cluster, b.sim.world_of("elsewhere"), 1)

    async def work() -> None:
        future = await b.send("t", b"x")
        b.engine.poke()
        await b.world.clock.sleep_ms(100)
        assert not future.done()
        await b.sim.spawn("elsewhere", elsewhere.listen("elsewhere:9292"))
        b.engine.cluster.want_metadata()
        await b.flush(1_000)
        assert future.result(0).offset == 0

    b.run(work)
    assert len(b.broker.produced) == len(elsewhere.produced) == 1


def test_a_leader_that_was_just_elected_is_asked_again_soon(bench: Any) -> None:
    """The leader will learn of its election at once.  Many batches that it refuses together count
    as one refusal.
    """
    b = bench(retry_backoff_ms=1_000, retry_backoff_max_ms=10_000, batch_size=1_024)
    b.cluster.create("t")
    until_ms = b.world.clock.monotonic_ms() + 100

    def verdict(log: Any, header: Any) -> Any:
        early = b.world.clock.monotonic_ms() < until_ms
        return errors.UnknownLeaderEpoch("not yet") if early else APPEND

    b.broker.on_produce = verdict

    async def work() -> None:
        for number in range(5):
            await b.send("t", b"%d" % number * 900)
            b.engine.begin_flush()
        await b.flush(250)

    b.run(work)
    assert len(b.cluster.log("t").rows()) == 5


def test_names_of_headers_are_counted_as_long_as_they_become(bench: Any) -> None:
    """A batch that credits more bytes than were charged would leave its futures without an
    outcome.
    """
    b = bench()
    b.cluster.create("t", 2)
    headers = [("日" * 1_000, b"")]

    async def work() -> None:
        accumulator = await b.engine.open("t", 5_000)
        size = record_size(b"v", None, headers, "t")
        futures = [accumulator.append(b"v", None, headers, n, size=size) for n in (0, 1)]
        await b.flush(10_000)
        assert [future.result(0).partition for future in futures] == [0, 1]

    b.run(work)


def test_a_header_without_utf_8_spoils_no_other_record(bench: Any) -> None:
    with pytest.raises(errors.SerializationError):
        record_size(b"v", None, [("\ud800", b"")], "t")


@pytest.mark.parametrize("answer", ["refused", "unanswered"])
@pytest.mark.parametrize("idempotent", [True, False])
def test_other_partitions_do_not_wait_behind_one_that_is_not_served(
    bench: Any, answer: str, idempotent: bool
) -> None:
    """L16: the partition is refused because of a full disk, or unanswered in every frame that may
    be in flight.
    """
    b = bench(enable_idempotence=idempotent, max_in_flight=5)
    b.cluster.create("t", 2)
    verdict = errors.StorageFull("no space") if answer == "refused" else SILENT
    stuck = [True]
    b.broker.on_produce = lambda log, header: (
        verdict if stuck[0] and log.key.partition == 0 else APPEND
    )
    clock, waits = b.world.clock, []

    async def work() -> None:
        blocked = []
        for _ in range(40):
            blocked.append(await b.send("t", b"0", partition=0))
            await clock.sleep_ms(20)
        assert not any(each.done() for each in blocked)
        for _ in range(20):
            sent_ms = clock.monotonic_ms()
            future = await b.send("t", b"1", partition=1)
            while not future.done():
                await clock.sleep_ms(1)
            waits.append(clock.monotonic_ms() - sent_ms)
        stuck[0] = False

    b.run(work)
    assert max(waits) < 1_000, waits
