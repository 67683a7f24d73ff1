"""The consumer's engine over the simulated network, against a scripted broker."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pk import errors
from pk.client.fetch_engine import FetchEngine
from pk.client.fetcher_events import FetchedPartition, OffsetFound, Pause, Seek
from pk.client.network_client import NetworkClient
from pk.client.offsets import LATEST, lookup_offsets
from pk.client.options import consumer_options
from pk.log.columns import encode_lists
from pk.log.control_rows import Marker, encode_markers
from pk.sim.world import SimWorld
from pk.types import TopicPartition
from tests.kit.fake_broker import FakeBroker, FakeCluster

T0 = TopicPartition("t", 0)


def put(cluster: FakeCluster, place: TopicPartition, values: list[bytes], **more: Any) -> None:
    options = {"default_timestamp": 1000, **more}
    cluster.log(*place).append(b"".join(encode_lists(values, **options)))


class Bench:
    def __init__(self, seed: int = 1, nodes: int = 1, **options: Any) -> None:
        self.sim = SimWorld(seed)
        self.cluster = FakeCluster()
        self.brokers: dict[int, FakeBroker] = {}
        for node in range(1, nodes + 1):
            self.brokers[node] = broker = FakeBroker(
                self.cluster, self.sim.world_of(f"b{node}"), node
            )
            self.sim.spawn(f"b{node}", broker.listen(f"b{node}:9292"))
        self.sim.loop.run_for_ms(10)
        self.world = self.sim.world_of("client")
        merged = {"auto_offset_reset": "earliest", "retry_backoff_ms": 10, **options}
        self.options = consumer_options(merged)
        self.engine = FetchEngine(
            self.world,
            NetworkClient(self.world, "b1:9292", retry_backoff_ms=10, metadata_max_age_ms=1000),
            self.options,
        )
        self.got: dict[TopicPartition, list[tuple[int, bytes | None]]] = {}

    def on_client(self, function: Any, *args: Any) -> Any:
        async def call() -> Any:
            return function(*args)

        task = self.sim.spawn("client", call())
        self.sim.run_until(task.done)
        return task.result()

    def grow(self) -> None:
        for broker in self.brokers.values():
            broker.grew()

    def drain(self) -> None:
        for place, rows in self.on_client(self.engine.drain):
            pairs = zip(
                rows.column("offset").to_pylist(), rows.column("value").to_pylist(), strict=True
            )
            self.got.setdefault(place, []).extend(pairs)

    def drain_for(self, duration_ms: int) -> None:
        for _ in range(duration_ms // 10):
            self.sim.loop.run_for_ms(10)
            self.drain()

    def values(self, place: TopicPartition = T0) -> list[bytes | None]:
        return [value for _, value in self.got.get(place, [])]

    def close(self) -> None:
        task = self.sim.spawn("client", self.engine.close())
        self.sim.run_until(task.done)
        self.sim.close()
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


def test_reads_everything_and_what_comes_later(bench: Any) -> None:
    b = bench()
    b.cluster.create("t")
    put(b.cluster, T0, [b"0", b"1"])
    b.on_client(b.engine.assign, [T0])
    b.drain_for(500)
    put(b.cluster, T0, [b"2"])
    b.grow()
    b.drain_for(100)
    assert b.got[T0] == [(0, b"0"), (1, b"1"), (2, b"2")]


def test_latest_begins_behind_the_end(bench: Any) -> None:
    b = bench(auto_offset_reset="latest")
    b.cluster.create("t")
    put(b.cluster, T0, [b"old"])
    b.on_client(b.engine.assign, [T0])
    b.drain_for(300)
    put(b.cluster, T0, [b"new"])
    b.grow()
    b.drain_for(100)
    assert b.got[T0] == [(1, b"new")]


def test_none_without_a_position_is_said_once_and_a_seek_helps(bench: Any) -> None:
    b = bench(auto_offset_reset="none")
    b.cluster.create("t")
    put(b.cluster, T0, [b"0", b"1"])
    b.on_client(b.engine.assign, [T0])
    with pytest.raises(errors.NoOffsetForPartition, match="seek"):
        b.drain_for(300)
    b.drain_for(300)
    b.on_client(b.engine.step, Seek(T0, 1))
    b.drain_for(100)
    assert b.got[T0] == [(1, b"1")]


def test_no_complaint_is_dropped_unsaid(bench: Any) -> None:
    b = bench(auto_offset_reset="none")
    b.cluster.create("t", 1_050)
    b.on_client(b.engine.assign, [TopicPartition("t", each) for each in range(1_050)])
    b.sim.loop.run_for_ms(300)
    b.on_client(b.engine._raise, b.engine.problems[-1])  # a repeated error takes no room
    assert [told.place.partition for told in b.engine.problems] == list(range(1_050))


def test_a_seek_into_a_batch_cuts_the_rows_before_it(bench: Any) -> None:
    b = bench()
    b.cluster.create("t")
    put(b.cluster, T0, [b"%d" % i for i in range(10)])
    b.on_client(b.engine.assign, [T0])
    b.on_client(b.engine.step, Seek(T0, 7))
    b.drain_for(300)
    assert b.got[T0] == [(7, b"7"), (8, b"8"), (9, b"9")]


def test_retention_passing_the_position_resets_by_policy(bench: Any, caplog: Any) -> None:
    b = bench()
    b.cluster.create("t")
    put(b.cluster, T0, [b"0", b"1"])
    put(b.cluster, T0, [b"2"])
    log = b.cluster.log("t")
    log.log_start = 2
    del log.batches[0]
    b.on_client(b.engine.assign, [T0])
    b.on_client(b.engine.step, Seek(T0, 1))
    b.drain_for(500)
    assert b.got[T0] == [(2, b"2")]
    assert "reset to earliest" in caplog.text


def test_control_and_aborted_batches_are_dropped_a_batch_at_a_time(bench: Any) -> None:
    b = bench()
    b.cluster.create("t")
    put(
        b.cluster,
        T0,
        [b"aborted"] * 2,
        producer_id=7,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
    )
    put(
        b.cluster,
        T0,
        [b"kept"],
        producer_id=8,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
    )
    log = b.cluster.log("t")
    log.append(b"".join(encode_markers([Marker(7, 0, False)], 1000)))
    put(b.cluster, T0, [b"plain"])
    log.aborted.append((7, 0, 2))
    b.on_client(b.engine.assign, [T0])
    b.drain_for(300)
    assert b.got[T0] == [(2, b"kept"), (4, b"plain")]


def test_read_uncommitted_sees_aborted_records_but_no_markers(bench: Any) -> None:
    b = bench(isolation_level="read_uncommitted")
    b.cluster.create("t")
    put(
        b.cluster,
        T0,
        [b"aborted"],
        producer_id=7,
        producer_epoch=0,
        base_sequence=0,
        transactional=True,
    )
    log = b.cluster.log("t")
    log.append(b"".join(encode_markers([Marker(7, 0, False)], 1000)))
    log.aborted.append((7, 0, 1))
    b.on_client(b.engine.assign, [T0])
    b.drain_for(300)
    assert b.values() == [b"aborted"]


def test_the_frontier_follows_next_offset_over_a_hole(bench: Any) -> None:
    """Rule L12: a range without rows does not stall, and no code computes last offset + 1."""
    b = bench()
    b.cluster.create("t")
    put(b.cluster, T0, [b"0"])
    log = b.cluster.log("t")
    log.end = 50
    put(b.cluster, T0, [b"50"])
    b.on_client(b.engine.assign, [T0])
    b.drain_for(300)
    assert b.got[T0] == [(0, b"0"), (50, b"50")]


def test_what_is_fetched_and_not_taken_is_bounded(bench: Any) -> None:
    b = bench(fetch_buffer_bytes=4096)
    b.cluster.create("t")
    for i in range(100):
        put(b.cluster, T0, [b"%03d" % i + b"x" * 900])
    b.on_client(b.engine.assign, [T0])
    b.sim.loop.run_for_ms(1000)
    waiting = sum(len(f.payload) for f in b.engine.ready)
    assert 0 < waiting <= 4096 + 1000
    b.drain_for(3000)
    assert [v[:3] for v in b.values()] == [b"%03d" % i for i in range(100)]


def test_pause_keeps_what_was_fetched_and_resume_goes_on(bench: Any) -> None:
    b = bench()
    b.cluster.create("t", 2)
    put(b.cluster, T0, [b"0"])
    b.on_client(b.engine.assign, [T0, TopicPartition("t", 1)])
    b.drain_for(200)
    b.on_client(b.engine.step, Pause([T0], True))
    b.sim.loop.run_for_ms(50)
    assert b.brokers[1].forgotten == 1
    put(b.cluster, T0, [b"1"])
    put(b.cluster, TopicPartition("t", 1), [b"other"])
    b.grow()
    b.drain_for(200)
    assert b.values() == [b"0"]
    assert b.values(TopicPartition("t", 1)) == [b"other"]
    b.on_client(b.engine.step, Pause([T0], False))
    b.drain_for(200)
    assert b.values() == [b"0", b"1"]


def test_subscribe_takes_new_partitions_from_their_beginning(bench: Any) -> None:
    b = bench(auto_offset_reset="latest")
    b.cluster.create("t")
    put(b.cluster, T0, [b"old"])
    b.on_client(b.engine.subscribe, ["t"], None)
    b.drain_for(300)
    b.cluster.create("t", 2)
    put(b.cluster, TopicPartition("t", 1), [b"first"])
    b.drain_for(2500)
    assert b.got == {TopicPartition("t", 1): [(0, b"first")]}


def test_subscribe_by_pattern_takes_new_topics(bench: Any) -> None:
    b = bench(auto_offset_reset="latest")
    b.cluster.create("a1")
    put(b.cluster, TopicPartition("a1", 0), [b"old"])
    b.on_client(b.engine.subscribe, None, re.compile("a.*"))
    b.drain_for(300)
    b.cluster.create("a2")
    b.cluster.create("b")
    put(b.cluster, TopicPartition("a2", 0), [b"x"])
    put(b.cluster, TopicPartition("b", 0), [b"y"])
    b.drain_for(2500)
    assert b.got == {TopicPartition("a2", 0): [(0, b"x")]}


def test_a_subscribed_topic_that_does_not_exist_is_said_once_and_taken_when_it_comes(
    bench: Any,
) -> None:
    b = bench(auto_offset_reset="latest")
    b.on_client(b.engine.subscribe, ["t"], None)
    with pytest.raises(errors.UnknownTopicOrPartition):
        b.drain_for(5000)
    b.cluster.create("t")
    put(b.cluster, T0, [b"x"])
    b.drain_for(3000)
    assert b.values() == [b"x"]


def test_a_recreated_topic_is_told_and_read_from_its_beginning(bench: Any) -> None:
    # rule L8
    b = bench(auto_offset_reset="latest")
    b.cluster.create("t")
    b.on_client(b.engine.assign, [T0])
    b.drain_for(200)
    b.cluster.delete("t")
    b.cluster.create("t")
    put(b.cluster, T0, [b"new"])
    b.grow()
    with pytest.raises(errors.TopicRecreated):
        b.drain_for(3000)
    b.drain_for(3000)
    assert b.got[T0] == [(0, b"new")]


def test_leader_changes_lose_and_repeat_nothing(bench: Any) -> None:
    b = bench(nodes=2)
    b.cluster.create("t")
    b.on_client(b.engine.assign, [T0])
    for i in range(40):
        put(b.cluster, T0, [b"%d" % i])
        if i % 10 == 5:
            log = b.cluster.log("t")
            log.leader, log.epoch = 3 - log.leader, log.epoch + 1
        b.grow()
        b.drain_for(20)
    b.drain_for(3000)
    assert b.got[T0] == [(i, b"%d" % i) for i in range(40)]


def test_a_truncated_log_is_told_with_where_it_was_cut(bench: Any) -> None:
    """KIP-320: the error names the offset of the truncation."""
    b = bench()
    b.cluster.create("t")
    b.on_client(b.engine.assign, [T0])
    b.drain_for(200)
    slot_id = b.engine.fetcher.position_id(T0)
    key = b.cluster.log("t").key
    set_id = b.engine.fetcher._partitions[T0].set_id
    arrived = FetchedPartition(1, key, set_id, memoryview(b""), 0, diverging=(3, 0))
    b.on_client(b.engine.step, arrived)
    with pytest.raises(errors.LogTruncated) as told:
        b.drain()
    assert told.value.details["end_offset"] == "0"
    assert b.engine.fetcher.position_id(T0) != slot_id, "what was fetched before counts no more"


# -- what is said of a position is void once there is another (client/fetcher F4) ----------------


def truncate(b: Bench) -> None:
    """Let the broker report that the log was truncated at offset 0."""
    key, set_id = b.cluster.log("t").key, b.engine.fetcher._partitions[T0].set_id
    truncated = FetchedPartition(1, key, set_id, memoryview(b""), 0, diverging=(3, 0))
    b.on_client(b.engine.step, truncated)


def complain_of_no_offset(b: Bench) -> None:
    b.sim.loop.run_for_ms(300)


def complain_of_the_range(b: Bench) -> None:
    b.on_client(b.engine.step, Seek(T0, 99))
    b.sim.loop.run_for_ms(300)


def complain_of_a_truncation(b: Bench) -> None:
    b.on_client(b.engine.step, Seek(T0, 2))
    b.sim.loop.run_for_ms(300)
    truncate(b)


def complain_of_the_store(b: Bench) -> None:
    b.brokers[1].on_fetch = lambda log, offset: (
        errors.TierUnavailable("the store is down") if offset == 0 else None
    )
    b.on_client(b.engine.step, Seek(T0, 0))
    b.sim.loop.run_for_ms(3000)


COMPLAINTS = [
    complain_of_no_offset, complain_of_the_range, complain_of_a_truncation, complain_of_the_store,
]  # fmt: skip


@pytest.mark.parametrize("complain", COMPLAINTS)
def test_a_seek_settles_what_was_complained_of_before(bench: Any, complain: Any) -> None:
    b = bench(auto_offset_reset="none", request_timeout_ms=1000)
    b.cluster.create("t")
    put(b.cluster, T0, [b"0"])
    put(b.cluster, T0, [b"1"])
    b.on_client(b.engine.assign, [T0])
    complain(b)
    assert b.engine.problems, "it was complained of"
    b.on_client(b.engine.step, Seek(T0, 1))
    b.drain_for(300)
    assert b.got[T0] == [(1, b"1")]


@pytest.mark.parametrize("complain", COMPLAINTS)
def test_an_assignment_settles_what_was_complained_of_before(bench: Any, complain: Any) -> None:
    b = bench(auto_offset_reset="none", request_timeout_ms=1000)
    b.cluster.create("t", 2)
    put(b.cluster, T0, [b"0", b"1", b"2"])
    b.on_client(b.engine.assign, [T0])
    complain(b)
    assert b.engine.problems, "it was complained of"
    b.on_client(b.engine.assign, [])
    assert b.engine.take_error() is None
    complain_again = b.engine.problems
    b.on_client(b.engine.assign, [T0])
    b.on_client(b.engine.step, Seek(T0, 2))
    b.drain_for(300)
    assert not complain_again
    assert b.got[T0] == [(2, b"2")]


def test_a_complaint_waits_for_whom_it_concerns(bench: Any) -> None:
    """A caller may ask for one partition's position while another partition has none yet."""
    b = bench(auto_offset_reset="none")
    b.cluster.create("t", 3)
    places = [TopicPartition("t", number) for number in range(3)]
    b.on_client(b.engine.assign, places)
    b.sim.loop.run_for_ms(300)
    engine = b.engine
    assert [engine.has_error(place) for place in places] == [True] * 3
    b.on_client(engine.step, Seek(places[1], 0))
    assert [engine.has_error(place) for place in places] == [True, False, True]
    assert engine.take_error(places[1]) is None
    assert [engine.take_error().place, engine.take_error().place] == [places[0], places[2]]
    assert engine.take_error() is None


def test_a_seek_does_not_hide_that_the_topic_is_another(bench: Any) -> None:
    """Rule L8: the offset of the seek belonged to the old topic."""
    b = bench(auto_offset_reset="none")
    b.cluster.create("t")
    b.on_client(b.engine.assign, [T0])
    b.on_client(b.engine.step, Seek(T0, 0))
    b.drain_for(300)
    b.cluster.delete("t")
    b.cluster.create("t")
    b.grow()
    b.sim.loop.run_for_ms(3000)
    b.on_client(b.engine.step, Seek(T0, 0))
    with pytest.raises(errors.TopicRecreated):
        b.drain()
    b.on_client(b.engine.assign, [])
    assert b.engine.take_error() is None


def test_an_answer_to_an_old_question_does_not_overwrite_a_seek(bench: Any) -> None:
    """The look-up of the earliest offset is in progress when the application seeks."""
    b = bench()
    b.cluster.create("t")
    put(b.cluster, T0, [b"0", b"1", b"2"])
    asked: list[Any] = []
    b.engine._find_offset = lambda wanted: asked.append(wanted) or b.world.clock.sleep_ms(0)
    b.on_client(b.engine.assign, [T0])
    b.sim.loop.run_for_ms(300)
    assert [wanted.place for wanted in asked] == [T0]
    b.on_client(b.engine.step, Seek(T0, 2))
    b.on_client(b.engine.step, OffsetFound(T0, asked[0].position_id, 0))
    failed = OffsetFound(T0, asked[0].position_id, error=errors.InvalidRequest("no"))
    b.on_client(b.engine.step, failed)
    b.drain_for(300)
    assert b.got[T0] == [(2, b"2")]


def test_an_error_begins_to_last_anew_behind_a_seek(bench: Any) -> None:
    b = bench(request_timeout_ms=1000)
    b.cluster.create("t")
    put(b.cluster, T0, [b"0", b"1"])
    b.brokers[1].on_fetch = lambda log, offset: errors.TierUnavailable("the store is down")
    b.on_client(b.engine.assign, [T0])
    b.sim.loop.run_for_ms(900)
    b.on_client(b.engine.step, Seek(T0, 1))
    b.drain_for(900)
    with pytest.raises(errors.TierUnavailable):
        b.drain_for(2000)


def test_a_missing_topic_is_not_told_to_another_subscription(bench: Any) -> None:
    b = bench(auto_offset_reset="latest")
    b.cluster.create("there")
    b.on_client(b.engine.subscribe, ["t"], None)
    b.sim.loop.run_for_ms(5000)
    assert b.engine.problems
    b.on_client(b.engine.subscribe, ["there"], None)
    b.drain_for(300)


def test_an_error_that_lasts_is_told(bench: Any) -> None:
    b = bench(request_timeout_ms=1000)
    b.cluster.create("t")
    b.brokers[1].on_fetch = lambda log, offset: errors.TierUnavailable("the store is down")
    b.on_client(b.engine.assign, [T0])
    with pytest.raises(errors.TierUnavailable):
        b.drain_for(5000)


def test_offsets_by_time_and_special(bench: Any) -> None:
    b = bench()
    b.cluster.create("t")
    for stamp in (100, 200, 300):
        put(b.cluster, T0, [b"v"], default_timestamp=stamp)

    def ask(stamp: int) -> int:
        work = lookup_offsets(b.engine.cluster, [T0], {T0: stamp}, 1, 1000)
        task = b.sim.spawn("client", work)
        b.sim.run_until(task.done)
        return task.result()[T0][0]

    assert [ask(s) for s in (-2, LATEST, 0, 150, 300, 301)] == [0, 3, 0, 1, 2, -1]


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_every_record_once_in_order_through_breaks_and_moves(seed: int) -> None:
    rng = random.Random(seed)
    b = Bench(seed, nodes=2, fetch_buffer_bytes=rng.choice([1, 300, 10_000]))
    b.cluster.create("t", 3)
    places = [TopicPartition("t", p) for p in range(3)]
    for broker in b.brokers.values():
        broker.frame_bytes = rng.choice([1, 200, 5000])
    b.on_client(b.engine.subscribe, ["t"], None)
    b.sim.loop.run_for_ms(300)
    counts = dict.fromkeys(places, 0)
    for _ in range(60):
        place = rng.choice(places)
        n = rng.randint(1, 4)
        put(b.cluster, place, [b"%d" % (counts[place] + i) for i in range(n)])
        counts[place] += n
        draw = rng.random()
        if draw < 0.1:
            b.sim.network.break_streams("client", f"b{rng.randint(1, 2)}")
        elif draw < 0.2:
            log = b.cluster.log(*place)
            log.leader, log.epoch = 3 - log.leader, log.epoch + 1
        elif draw < 0.3:
            b.on_client(b.engine.step, Pause([place], rng.random() < 0.5))
        b.grow()
        b.sim.loop.run_for_ms(rng.randint(0, 20))
        if rng.random() < 0.5:
            b.drain()
    b.on_client(b.engine.step, Pause(places, False))
    b.drain_for(5000)
    for place in places:
        assert b.got.get(place, []) == [(i, b"%d" % i) for i in range(counts[place])]
    b.close()


def test_a_broker_that_moved_is_not_waited_for_where_it_was(bench: Any) -> None:
    b = bench()
    b.cluster.create("t")
    put(b.cluster, T0, [b"1"])
    b.on_client(b.engine.assign, [T0])
    b.drain_for(200)
    elsewhere = FakeBroker(b.cluster, b.sim.world_of("elsewhere"), 1)
    b.sim.spawn("elsewhere", elsewhere.listen("elsewhere:9292"))
    b.sim.loop.run_for_ms(10)
    put(b.cluster, T0, [b"2"])
    b.on_client(b.engine.cluster.want_metadata)
    b.drain_for(500)
    assert b.values() == [b"1", b"2"]
    assert elsewhere.positions_set == 1


def test_a_leader_that_was_just_elected_is_asked_again_soon(bench: Any) -> None:
    """It catches up within moments (KIP-207)."""
    b = bench(retry_backoff_ms=1_000, retry_backoff_max_ms=10_000)
    b.cluster.create("t")
    put(b.cluster, T0, [b"1"])
    refusals = [errors.OffsetNotAvailable("not yet"), errors.UnknownLeaderEpoch("not yet")]
    b.brokers[1].on_fetch = lambda log, offset: refusals.pop() if refusals else None
    b.on_client(b.engine.assign, [T0])
    b.drain_for(200)
    assert b.values() == [b"1"]


def test_a_new_leader_ends_a_back_off(bench: Any) -> None:
    b = bench(nodes=2, retry_backoff_ms=5_000, retry_backoff_max_ms=10_000)
    b.cluster.create("t")
    put(b.cluster, T0, [b"1"])
    b.brokers[1].on_fetch = lambda log, offset: errors.ThrottledError("busy")
    b.on_client(b.engine.assign, [T0])
    b.drain_for(100)
    log = b.cluster.log("t")
    log.leader, log.epoch = 2, log.epoch + 1
    b.on_client(b.engine.cluster.want_metadata)
    b.drain_for(200)
    assert b.values() == [b"1"]
