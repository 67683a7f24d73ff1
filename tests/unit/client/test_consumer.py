"""The consumer as an application sees it, in a simulated world without threads."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from pk import Consumer, TopicPartition, errors
from pk.client.fetcher_events import FetchError
from pk.log.columns import encode
from pk.sim.world import SimWorld
from tests.kit.fake_broker import FakeBroker, FakeCluster

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class World:
    """A broker with topic t, and its consumers."""

    def __init__(self, thread_of: Any) -> None:
        self.sim = SimWorld(1)
        self.cluster = FakeCluster()
        self.broker = FakeBroker(self.cluster, self.sim.world_of("b1"), 1)
        self.sim.spawn("b1", self.broker.listen("b1:9292"))
        self.sim.loop.run_for_ms(10)
        self.cluster.create("t", 2)
        thread_of(self.sim)
        self.consumers: list[Consumer] = []

    def consumer(self, **options: Any) -> Consumer:
        made = Consumer("b1:9292", **{"retry_backoff_ms": 10, **options})
        self.consumers.append(made)
        return made

    def put(self, place: TopicPartition, *values: bytes) -> None:
        """Append one batch."""
        rows = pa.record_batch([pa.array(values, pa.binary())], names=["value"])
        self.cluster.log(*place).append(b"".join(encode(rows, default_timestamp=1000)))
        self.broker.grew()

    def pass_ms(self, duration_ms: int) -> None:
        """Let everything arrive that is on its way."""
        self.sim.loop.run_for_ms(duration_ms)

    def close(self) -> None:
        for consumer in self.consumers:
            consumer.close()
        self.sim.close()
        assert not self.sim.loop.failures


@pytest.fixture
def world(sim_thread: Any) -> Any:
    made = World(sim_thread)
    yield made
    made.close()


def seen(records: list[Any]) -> list[tuple[int, int]]:
    return [(record.partition, record.offset) for record in records]


def test_a_seek_right_behind_an_assignment_is_never_too_late(world: Any) -> None:
    """As in Kafka, where only a poll applies auto_offset_reset."""
    world.put(T0, b"0", b"1")
    world.put(T1, b"0", b"1")
    consumer = world.consumer(auto_offset_reset="none")
    consumer.assign([T0, T1])
    world.pass_ms(500)  # the fetcher found that it has no position, and reported it
    consumer.seek(T0, 1)
    assert consumer.position(T0) == 1
    consumer.seek(T1, 0)
    world.pass_ms(500)
    assert consumer.position(T1) == 0
    assert seen(consumer.poll(1.0) + consumer.poll(1.0)) == [(0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize("offset", [1.5, float("inf"), "1", None, 2**70, -5])
def test_a_seek_to_what_is_no_offset_is_refused(world: Any, offset: Any) -> None:
    world.put(T0, b"0", b"1")
    consumer = world.consumer(auto_offset_reset="earliest")
    consumer.assign([T0])
    with pytest.raises(errors.InvalidOption if isinstance(offset, int) else TypeError):
        consumer.seek(T0, offset)
    assert seen(consumer.poll(1.0)) == [(0, 0), (0, 1)]


def test_who_does_not_seek_is_told_by_the_next_poll(world: Any) -> None:
    consumer = world.consumer(auto_offset_reset="none")
    consumer.assign([T0, T1])
    consumer.seek(T0, 0)
    world.pass_ms(500)
    with pytest.raises(errors.NoOffsetForPartition, match="t-1 has no position"):
        consumer.position(T1)
    assert consumer.poll(0.1) == [], "once"
    consumer.assign([T0])
    consumer.assign([T0, T1])
    world.pass_ms(500)
    with pytest.raises(errors.NoOffsetForPartition, match="t-1 has no position"):
        consumer.poll(1.0)


@pytest.mark.parametrize("policy", ["earliest", "latest"])
def test_a_position_that_was_looked_up_does_not_overwrite_a_seek(world: Any, policy: str) -> None:
    world.put(T0, *[b"x"] * 10)
    consumer = world.consumer(auto_offset_reset=policy)
    consumer.assign([T0])
    world.pass_ms(500)  # the answer came, and no poll took it
    consumer.seek(T0, 7)
    world.pass_ms(500)
    assert consumer.position(T0) == 7
    assert seen(consumer.poll(1.0)) == [(0, 7), (0, 8), (0, 9)]


def test_a_position_that_was_looked_up_is_not_that_of_a_later_assignment(world: Any) -> None:
    world.put(T0, b"0")
    consumer = world.consumer(auto_offset_reset="latest")
    consumer.assign([T0])
    world.pass_ms(500)
    consumer.assign([])
    world.put(T0, b"1")
    consumer.assign([T0])
    assert consumer.position(T0) == 2
    consumer.seek_to_beginning()
    assert consumer.position(T0) == 0


def test_a_reset_takes_effect_behind_what_was_fetched_before_it(world: Any) -> None:
    """Retention passes the position while older records still wait to be polled."""
    world.put(T0, b"0", b"1")
    consumer = world.consumer(auto_offset_reset="latest", max_poll_records=1)
    consumer.assign([T0])
    consumer.seek(T0, 0)
    world.pass_ms(500)
    log = world.cluster.log("t")
    log.end = log.log_start = 50
    world.sim.network.break_streams("client", "b1")
    world.pass_ms(5000)
    assert consumer.position(T0) == 0
    assert seen(consumer.poll(1.0)) == [(0, 0)]
    assert consumer.position(T0) == 1
    assert seen(consumer.poll(1.0)) == [(0, 1)]
    assert consumer.poll(0.1) == []
    assert consumer.position(T0) == 50


def test_what_was_read_of_a_deleted_topic_does_not_move_the_position_in_its_successor(
    world: Any,
) -> None:
    # rule L8
    world.put(T0, *[b"old"] * 5)
    consumer = world.consumer(auto_offset_reset="earliest", max_poll_records=2)
    consumer.assign([T0])
    assert seen(consumer.poll(1.0)) == [(0, 0), (0, 1)]
    world.cluster.delete("t")
    world.cluster.create("t", 2)
    world.broker.grew()
    world.pass_ms(5000)
    with pytest.raises(errors.TopicRecreated):
        consumer.poll(1.0)
    assert consumer.position(T0) == 0
    world.put(T0, b"new")
    assert [record.value for record in consumer.poll(1.0)] == [b"new"]


@pytest.mark.parametrize("early", [True, False])
def test_what_was_read_of_a_deleted_topic_is_not_seen_of_its_successor(
    world: Any, early: bool
) -> None:
    """Rule L8, KIP-320: the new log is truncated before any of it was read."""
    world.put(T0, *[b"old"] * 5)
    consumer = world.consumer(auto_offset_reset="earliest")
    consumer.assign([T0])
    assert len(consumer.poll(1.0)) == 5
    world.cluster.delete("t")
    world.cluster.create("t", 2)
    world.broker.grew()
    world.put(T0, *[b"new"] * 6)
    world.pass_ms(5000)
    fetcher = consumer._engine.fetcher

    def truncate() -> None:
        consumer._call(lambda: fetcher._truncated(fetcher._partitions[T0], 3, 4))
        consumer._engine._raise(fetcher._effects.pop().value)

    if early:
        truncate()
    with pytest.raises(errors.TopicRecreated):
        consumer.poll(1.0)
    world.pass_ms(500)
    if not early:
        truncate()
        with pytest.raises(errors.LogTruncated):
            consumer.poll(1.0)
    assert consumer.position(T0) == 0


def test_a_pause_does_not_change_the_order_of_what_was_fetched(world: Any) -> None:
    """Frames of two partitions wait, interleaved; one partition is skipped for a while."""
    consumer = world.consumer(auto_offset_reset="earliest", max_poll_records=1)
    consumer.assign([T0, T1])
    for number in range(4):
        world.put(T0, b"%d" % number)
        world.pass_ms(100)
        world.put(T1, b"%d" % number)
        world.pass_ms(100)
    assert seen(consumer.poll(1.0)) == [(0, 0)]
    consumer.pause(T0)
    assert consumer.paused() == [T0]
    assert seen(consumer.poll(1.0)) == [(1, 0)]
    assert seen(consumer.poll(1.0)) == [(1, 1)]
    consumer.resume(T0)
    rest = [seen(consumer.poll(1.0))[0] for _ in range(5)]
    assert [place for place in rest if place[0] == 0] == [(0, 1), (0, 2), (0, 3)]
    assert [place for place in rest if place[0] == 1] == [(1, 2), (1, 3)]


def test_asking_for_the_position_while_iterating_skips_nothing_of_a_truncated_log(
    world: Any,
) -> None:
    """KIP-320: the consumer continues with the first record that the application has not seen."""
    from pk.client.fetcher_events import FetchedPartition

    world.put(T0, *[b"x"] * 5)
    consumer = world.consumer(auto_offset_reset="earliest")
    consumer.assign([T0])
    assert next(consumer).offset == 0
    engine = consumer._engine
    set_id = engine.fetcher._partitions[T0].set_id
    cut = FetchedPartition(
        1, world.cluster.log("t").key, set_id, memoryview(b""), 0, diverging=(3, 4)
    )
    consumer._call(lambda: engine.step(cut))
    with pytest.raises(errors.LogTruncated):
        consumer.position(T0)
    assert next(consumer).offset == 1


@pytest.mark.parametrize("polled", [0, 2])
@pytest.mark.parametrize("between", ["told", "assign", "taken"])
def test_several_logs_that_are_truncated_at_once_lose_nothing_unseen(
    world: Any, polled: int, between: str
) -> None:
    """KIP-320: reporting the first truncation, another assignment, or a poll that meets void data
    does not lose the reader's position in the second log.
    """
    world.put(T0, *[b"x"] * 6)
    world.put(T1, *[b"x"] * 6)
    consumer = world.consumer(auto_offset_reset="earliest", max_poll_records=polled or 1)
    consumer.assign([T0, T1])
    world.pass_ms(500)  # all of it was fetched
    if polled:
        consumer.pause(T1)
        assert seen(consumer.poll(1.0)) == [(0, 0), (0, 1)]
        consumer.pause(T0)
        consumer.resume(T1)
        world.pass_ms(500)
        assert seen(consumer.poll(1.0)) == [(1, 0), (1, 1)]
        consumer.resume(T0)
        world.pass_ms(500)
    engine = consumer._engine
    for place in (T0, T1):
        consumer._call(lambda place=place: engine.fetcher._truncated(
            engine.fetcher._partitions[place], 3, 4
        ))  # fmt: skip
        told = engine.fetcher._effects.pop().value
        if between == "taken":
            consumer._fetch_buffer.waits(())
        engine._raise(told)
    if between == "assign":
        consumer.assign([T0, T1])
    for _ in range(2):
        with pytest.raises(errors.LogTruncated):
            consumer.poll(0.1)
    assert [consumer.position(place) for place in (T0, T1)] == [polled, polled]


def test_iteration_goes_on_where_a_poll_or_a_seek_in_its_midst_left_it(world: Any) -> None:
    world.put(T0, *[b"%d" % number for number in range(10)])
    consumer = world.consumer(auto_offset_reset="earliest", max_poll_records=6)
    consumer.assign([T0])
    found = []
    for record in consumer:
        found.append(record.offset)
        if record.offset == 2:
            assert consumer.position(T0) == 3
            found += [each.offset for each in consumer.poll()]
            assert consumer.position(T0) == 6
        elif record.offset == 7 and len(found) == 8:
            consumer.seek(T0, 5)
        elif record.offset == 9:
            break
    assert found == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9]


def test_a_poll_behind_an_iteration_that_a_seek_cut_off_waits_for_records(world: Any) -> None:
    world.put(T0, b"0", b"1", b"2")
    consumer = world.consumer(auto_offset_reset="earliest")
    consumer.assign([T0])
    assert next(consumer).offset == 0
    consumer.seek(T0, 2)
    assert seen(consumer.poll(1.0)) == [(0, 2)]
    world.put(T0, b"3")
    assert next(iter(consumer)).offset == 3
    consumer.assign([T1])
    world.put(T1, b"0")
    assert seen(consumer.poll(1.0)) == [(1, 0)]
    consumer.close()
    assert list(consumer) == []


@pytest.mark.parametrize("buffer_bytes", [1, 2000, 1 << 20])
def test_credit_is_given_back_in_portions_and_never_too_late(
    world: Any, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = world.consumer(auto_offset_reset="earliest", fetch_buffer_bytes=buffer_bytes)
    given: list[int] = []
    post = consumer._post
    monkeypatch.setattr(consumer, "_post", lambda event: given.append(event.size) or post(event))
    consumer.assign([T0, T1])
    found: list[Any] = []
    for number in range(60):
        world.put((T0, T1)[number % 2], b"%d" % number * 20)
        if number % 5 == 4:
            while len(found) <= number:
                more = consumer.poll(1.0)
                assert more, f"{len(found)} of {number + 1} came"
                found += more
    assert len(found) == 60
    if buffer_bytes == 1 << 20:
        assert not given, "there was credit enough: nobody had to be woken"


def test_credit_kept_back_is_given_when_a_paused_partition_used_up_the_rest(world: Any) -> None:
    consumer = world.consumer(auto_offset_reset="earliest", fetch_buffer_bytes=8000)
    consumer.assign([T0, T1])
    world.put(T1, b"x" * 500)
    assert seen(consumer.poll(1.0)) == [(1, 0)]
    assert consumer._eaten, "kept back"
    for _ in range(7):
        world.put(T0, b"x" * 900)
    world.pass_ms(100)
    consumer.pause(T0)
    assert consumer.poll(0.1) == []
    assert not consumer._eaten


@pytest.mark.parametrize("inside", [-1, 16], ids=["body", "header"])
def test_a_batch_that_is_damaged_is_told_until_a_seek_passes_it(world: Any, inside: int) -> None:
    """Rule L13: no row of the bad batch is returned, and the batch is never skipped.  Earlier rows
    of the same frame are returned, even if the bad batch does not parse.
    """
    for value in (b"0", b"1", b"2"):
        world.put(T0, value)
    log = world.cluster.log("t")
    base, following, raw = log.batches[1]
    bad = bytearray(raw)
    bad[inside] ^= 1
    log.batches[1] = (base, following, bytes(bad))
    consumer = world.consumer(auto_offset_reset="earliest", max_poll_records=1)
    consumer.assign([T0])
    assert seen(consumer.poll(1.0)) == [(0, 0)]
    for _ in range(2):
        with pytest.raises(errors.CorruptBatch, match=r"t-0 at offset 1: .*; seek past it"):
            consumer.poll(1.0)
        assert consumer.position(T0) == 1
    consumer.seek(T0, 2)
    assert seen(consumer.poll(1.0)) == [(0, 2)]


@pytest.mark.parametrize("way", ["poll", "poll_batches"])
def test_what_was_gathered_before_an_error_is_returned_first(world: Any, way: str) -> None:
    """An error comes behind good rows: the rows are returned, and the next call raises."""

    def read() -> list[tuple[int, int]]:
        if way == "poll":
            return seen(consumer.poll(1.0))
        return [
            (place.partition, offset)
            for place, rows in consumer.poll_batches(1.0)
            for offset in rows.column("offset").to_pylist()
        ]

    for value in (b"0", b"1", b"2"):
        world.put(T0, value)
    world.put(T1, b"3", b"4")
    log = world.cluster.log("t")
    base, following, raw = log.batches[1]
    log.batches[1] = (base, following, raw[:-1] + bytes([raw[-1] ^ 1]))
    consumer = world.consumer(auto_offset_reset="earliest")
    consumer.assign([T0, T1])
    world.pass_ms(500)
    found: list[tuple[int, int]] = []
    while len(found) < 3:
        found += read()
    with pytest.raises(errors.CorruptBatch, match="t-0 at offset 1"):
        read()
    assert sorted(found) == [(0, 0), (1, 0), (1, 1)]
    assert consumer.position(T0) == 1


def test_a_complaint_does_not_cost_the_rows_of_the_call_that_meets_it(world: Any) -> None:
    world.put(T0, b"0")
    world.put(T1, b"1")
    consumer = world.consumer(auto_offset_reset="earliest")
    consumer.assign([T0, T1])
    world.pass_ms(500)
    backlog, engine = consumer._fetch_buffer, consumer._engine
    take = backlog.take

    def take_and_complain(*arguments: Any) -> Any:
        """Take rows, and let the loop report an error while the application's thread gathers."""
        backlog.take = take
        found = take(*arguments)
        about = engine.fetcher.position_id(T1)
        engine._raise(FetchError(T1, about, errors.CorruptLog("the disk of t-1 failed")))
        return found

    backlog.take = take_and_complain
    first = consumer.poll(1.0)
    with pytest.raises(errors.CorruptLog):
        consumer.poll(1.0)
    assert sorted(seen([*first, *consumer.poll(1.0)])) == [(0, 0), (1, 0)]


def test_ctrl_c_while_rows_are_gathered_costs_none(world: Any) -> None:
    world.put(T0, b"0")
    world.put(T1, b"1")
    consumer = world.consumer(auto_offset_reset="earliest")
    consumer.assign([T0, T1])
    world.pass_ms(500)
    backlog = consumer._fetch_buffer
    take, taken = backlog.take, []

    def take_one(*arguments: Any) -> Any:
        if taken:
            backlog.take = take
            raise KeyboardInterrupt
        taken.append(take(*arguments))
        return taken[0]

    backlog.take = take_one
    with pytest.raises(KeyboardInterrupt):
        consumer.poll(1.0)
    assert sorted(seen([*consumer.poll(1.0), *consumer.poll(0.1)])) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("later_ms", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("then", [{"topics": ["b"]}, {"pattern": "b"}])
def test_another_subscription_is_asked_for_while_the_first_one_is_not_answered(
    world: Any, later_ms: int, then: Any
) -> None:
    """The answer about a does not contain b, and must not end the wait for b."""
    place = TopicPartition("b", 0)
    world.cluster.create("a")
    world.cluster.create("b")
    world.put(place, b"0")
    consumer = world.consumer(auto_offset_reset="earliest")
    consumer.subscribe(["a"])
    world.pass_ms(later_ms)
    consumer.subscribe(**then)
    assert [record.topic for record in consumer.poll(10.0)] == ["b"]


def test_a_push_that_overtakes_the_first_answer_is_not_lost(world: Any) -> None:
    """Both answers are in the socket: the push is handled before the waiting call continues."""
    from pk.wire import frames
    from pk.wire import pk_pb2 as wire
    from pk.wire.calls import head_of

    consumer = world.consumer(auto_offset_reset="earliest")
    cluster = consumer._cluster
    call_at = cluster.call_at

    async def call_and_push(address: str, request: Any, *, timeout_ms: int) -> Any:
        reply = await call_at(address, request, timeout_ms=timeout_ms)
        cluster.call_at = call_at
        world.cluster.create("b")
        world.put(TopicPartition("b", 0), b"0")
        news = head_of(world.cluster.metadata(wire.MetadataRequest()))
        cluster._updater.pushed(address, frames.decode(frames.encode(news)))
        return reply

    cluster.call_at = call_and_push
    consumer.subscribe(pattern="b")
    assert [record.topic for record in consumer.poll(10.0)] == ["b"]


def test_a_pause_that_is_refused_pauses_nothing(world: Any) -> None:
    world.put(T0, b"0")
    consumer = world.consumer(auto_offset_reset="earliest")
    consumer.assign([T0])
    with pytest.raises(errors.InvalidRequest, match="t-1 is not assigned"):
        consumer.pause(T0, T1)
    assert seen(consumer.poll(1.0)) == [(0, 0)]
    consumer.pause(T0)
    with pytest.raises(errors.InvalidRequest, match="t-1 is not assigned"):
        consumer.resume(T0, T1)
    assert consumer.paused() == [T0]


@pytest.mark.parametrize("order", ["pause, seek", "seek, pause", "assign, pause"])
def test_the_position_of_a_paused_partition_is_looked_up(world: Any, order: str) -> None:
    world.put(T0, b"0", b"1", b"2")
    consumer = world.consumer(auto_offset_reset="latest")
    consumer.assign([T0])
    if order == "seek, pause":
        world.pass_ms(500)
        consumer.seek_to_end(T0)
    consumer.pause(T0)
    if order == "pause, seek":
        world.pass_ms(500)
        consumer.seek_to_end(T0)
    assert consumer.position(T0, 5.0) == 3
    world.put(T0, b"3")
    assert consumer.poll(1.0) == []
    consumer.resume(T0)
    assert seen(consumer.poll(1.0)) == [(0, 3)]


@pytest.mark.parametrize(
    ("way", "ask"),
    [
        ("partitions_for", lambda consumer, place: consumer.partitions_for(place.topic, 10.0)),
        ("position", lambda consumer, place: consumer.position(place, 10.0)),
        ("subscribe", lambda consumer, place: consumer.poll(10.0)),
        ("poll", lambda consumer, place: consumer.poll(10.0)),
        ("partition", lambda consumer, place: consumer.poll(10.0)),
    ],
)
def test_what_does_not_exist_is_told_however_it_is_asked_for(
    world: Any, way: str, ask: Any
) -> None:
    """This includes a consumer that asked for all topics before, and one partition of a topic."""
    consumer = world.consumer(request_timeout_ms=3000)
    if way != "partition":
        consumer.subscribe(pattern="none of them")
        assert consumer.poll(1.0) == []
    place = TopicPartition("t", 7) if way == "partition" else TopicPartition("nosuch", 0)
    if way == "subscribe":
        consumer.subscribe(["nosuch"])
    elif way != "partitions_for":
        consumer.assign([place])
    advice = "it has 2 partitions, 0 to 1" if way == "partition" else "create it first"
    with pytest.raises(errors.UnknownTopicOrPartition, match=advice) as told:
        ask(consumer, place)
    assert told.value.acts == "user"
