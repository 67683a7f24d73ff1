"""Every public call on a broker that hangs, dies or answers garbage, at each of its steps.

A call ends with an error of `pk.errors`, or a built-in that its docstring names, within its own
time-out.  The test finds the calls in the classes: a new call needs a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.client.admin import NewTopic
from pk.sim.world import SimWorld
from pk.sparkconnector import connection
from pk.sparkconnector.offsets import Range
from tests.unit.client.ill_broker import (
    BEYOND_MS,
    LIMIT_MS,
    World,
    make_admin,
    make_admin_of_controllers,
    make_consumer,
    make_producer,
    make_spark,
    make_transactional,
)  # fmt: skip

T0 = TopicPartition("t", 0)
#: No call takes more steps of its broker before it is done.
STEPS_MAX = 16
MODES = ("hangs", "dies", "garbage", "wrong kind", "empty")

S = LIMIT_MS / 1000


def sent(p: Producer) -> Any:
    """Send a record and return its outcome, which is known within delivery_timeout_ms."""
    return p.send("t", b"v").result(2 * S)


def batch_sent(p: Producer) -> Any:
    import pyarrow as pa

    rows = pa.record_batch([pa.array([b"v"], pa.binary())], names=["value"])
    return p.send_batch("t", rows).result(2 * S)


def flushed(p: Producer) -> None:
    p.send("t", b"v")
    p.flush(S)


def closed(p: Producer) -> None:
    p.send("t", b"v")
    p.close(S)


def left(client: Any) -> None:
    with client:
        pass


def assigned(c: Consumer, work: Callable[[], Any]) -> Any:
    c.assign([T0])
    return work()


def next_of(c: Consumer) -> Any:
    """Iterate: this waits as long as the consumer is open, until another thread closes it."""
    c.subscribe(["t"])
    sim: SimWorld = c._thread.sim  # type: ignore[attr-defined]
    sim.loop.call_later(S, lambda: setattr(c, "_closed", True))
    try:
        return next(c)
    finally:
        c._closed = False


def transacting(name: str) -> Callable[[Any], Any]:
    return lambda client: getattr(client, name)()


PRODUCER: dict[str, Callable[[Any], Any]] = {
    "send": sent,
    "send_batch": batch_sent,
    "partitions_for": lambda p: p.partitions_for("t", timeout_s=S),
    "identity": lambda p: p.identity,
    "flush": flushed,
    "metrics": lambda p: p.metrics(),
    "close": closed,
    "__enter__": left,
    "__exit__": left,
    **{
        name: transacting(name)
        for name in (
            "init_transactions", "begin_transaction", "commit_transaction", "abort_transaction",
        )
    },
    "transaction": lambda p: p.transaction().__enter__(),
    "send_offsets_to_transaction": lambda p: p.send_offsets_to_transaction({}, None),
}  # fmt: skip


def in_transaction(work: Callable[[Producer], Any]) -> Callable[[Producer], Any]:
    """A call of a producer with an open transaction."""

    def call(producer: Producer) -> Any:
        producer.init_transactions()
        producer.begin_transaction()
        return work(producer)

    return call


def sent_and_ended(name: str) -> Callable[[Any], Any]:
    def call(producer: Producer) -> Any:
        producer.send("t", b"v")
        getattr(producer, name)()

    return in_transaction(call)


#: Calls of a producer with a transactional id.
TRANSACTIONS: dict[str, Callable[[Any], Any]] = {
    "send": in_transaction(sent),
    "send_batch": in_transaction(batch_sent),
    "flush": in_transaction(flushed),
    "metrics": lambda p: p.metrics(),
    "close": in_transaction(closed),
    "init_transactions": transacting("init_transactions"),
    "begin_transaction": in_transaction(lambda p: None),
    "commit_transaction": sent_and_ended("commit_transaction"),
    "abort_transaction": sent_and_ended("abort_transaction"),
}

CONSUMER_CALLS: dict[str, Callable[[Any], Any]] = {
    "subscribe": lambda c: c.subscribe(["t"]),
    "unsubscribe": lambda c: c.unsubscribe(),
    "assign": lambda c: c.assign([T0]),
    "assignment": lambda c: c.assignment(),
    "seek": lambda c: assigned(c, lambda: c.seek(T0, 1)),
    "seek_to_beginning": lambda c: assigned(c, c.seek_to_beginning),
    "seek_to_end": lambda c: assigned(c, c.seek_to_end),
    "seek_to_snapshot": lambda c: assigned(c, lambda: c.seek_to_snapshot("t", S)),
    "current_lag": lambda c: assigned(c, lambda: c.current_lag(T0)),
    "metrics": lambda c: c.metrics(),
    "pause": lambda c: assigned(c, lambda: c.pause(T0)),
    "resume": lambda c: assigned(c, lambda: c.resume(T0)),
    "paused": lambda c: c.paused(),
    "poll": lambda c: assigned(c, lambda: c.poll(S)),
    "poll_batches": lambda c: assigned(c, lambda: c.poll_batches(S)),
    "__iter__": iter,
    "__next__": next_of,
    "position": lambda c: assigned(c, lambda: c.position(T0, timeout_s=S)),
    "beginning_offsets": lambda c: c.beginning_offsets([T0], timeout_s=S),
    "end_offsets": lambda c: c.end_offsets([T0], timeout_s=S),
    "offsets_for_times": lambda c: c.offsets_for_times({T0: 1}),
    "partitions_for": lambda c: c.partitions_for("t", timeout_s=S),
    "close": lambda c: assigned(c, c.close),
    "__enter__": left,
    "__exit__": left,
    "commit": lambda c: c.commit({T0: 1}, timeout_s=S),
    "committed": lambda c: c.committed(T0, timeout_s=S),
    "group_metadata": lambda c: c.group_metadata(),
}

QUORUM: dict[str, Callable[[Any], Any]] = {
    "describe_metadata_quorum": lambda a: a.describe_metadata_quorum(timeout_s=S),
    "add_raft_voter": lambda a: a.add_raft_voter(1, "d", "b1:9292", timeout_s=S),
    "remove_raft_voter": lambda a: a.remove_raft_voter(1, timeout_s=S),
}

ADMIN: dict[str, Callable[[Any], Any]] = {
    **QUORUM,
    "create_topic": lambda a: a.create_topic("u", timeout_s=S),
    "create_topics": lambda a: a.create_topics([NewTopic("u")], timeout_s=S),
    "delete_topic": lambda a: a.delete_topic("t", timeout_s=S),
    "delete_topics": lambda a: a.delete_topics(["t"], timeout_s=S),
    "create_partitions": lambda a: a.create_partitions("t", 3, timeout_s=S),
    "set_schedule": lambda a: a.set_schedule("t", "audit", every_ms=10_000, timeout_s=S),
    "delete_schedule": lambda a: a.delete_schedule("t", "audit", timeout_s=S),
    "list_schedules": lambda a: a.list_schedules(timeout_s=S),
    "retain_tier": lambda a: a.retain_tier("t", timeout_s=S),
    "vacuum_tier": lambda a: a.vacuum_tier("t", timeout_s=S),
    "list_topics": lambda a: a.list_topics(timeout_s=S),
    "describe_topics": lambda a: a.describe_topics(timeout_s=S),
    "describe_configs": lambda a: a.describe_configs("t", timeout_s=S),
    "alter_configs": lambda a: a.alter_configs("t", {"retention_ms": 1}, timeout_s=S),
    "list_offsets": lambda a: a.list_offsets({T0: "latest"}, timeout_s=S),
    "offsets": lambda a: a.offsets("t", timeout_s=S),
    "delete_records": lambda a: a.delete_records({T0: 0}, timeout_s=S),
    "alter_partition_reassignments": lambda a: a.alter_partition_reassignments(
        {T0: [1]}, timeout_s=S
    ),
    "list_partition_reassignments": lambda a: a.list_partition_reassignments(timeout_s=S),
    "partition_replicas": lambda a: a.partition_replicas(["t"], timeout_s=S),
    "topic_ids": lambda a: a.topic_ids(["t"], timeout_s=S),
    "elect_leaders": lambda a: a.elect_leaders([T0], timeout_s=S),
    "unregister_broker": lambda a: a.unregister_broker(2, timeout_s=S),
    "list_brokers": lambda a: a.list_brokers(timeout_s=S),
    "confirm_clock": lambda a: a.confirm_clock(1, timeout_s=S),
    "describe_cluster": lambda a: a.describe_cluster(timeout_s=S),
    "upgrade_cluster": lambda a: a.upgrade_cluster(2, timeout_s=S),
    "describe_tier": lambda a: a.describe_tier("t", timeout_s=S),
    "repair_tier": lambda a: a.repair_tier("t", timeout_s=S),
    "accept_tier": lambda a: a.accept_tier("t", timeout_s=S),
    "list_groups": lambda a: a.list_groups(timeout_s=S),
    "describe_group": lambda a: a.describe_group("g", timeout_s=S),
    "group_offsets": lambda a: a.group_offsets("g", timeout_s=S),
    "alter_group_offsets": lambda a: a.alter_group_offsets("g", {T0: 1}, timeout_s=S),
    "delete_group_offsets": lambda a: a.delete_group_offsets("g", [T0], timeout_s=S),
    "delete_group": lambda a: a.delete_group("g", timeout_s=S),
    "list_transactions": lambda a: a.list_transactions(timeout_s=S),
    "describe_transactions": lambda a: a.describe_transactions(["a"], timeout_s=S),
    "abort_transaction": lambda a: a.abort_transaction("a", timeout_s=S),
    "resolve_transaction": lambda a: a.resolve_transaction("a", commit=True, timeout_s=S),
    "forget_transactional_id": lambda a: a.forget_transactional_id("a", timeout_s=S),
    "describe_producers": lambda a: a.describe_producers([T0], timeout_s=S),
    "find_hanging_transactions": lambda a: a.find_hanging_transactions(
        max_timeout_ms=1, timeout_s=S
    ),
    "close": lambda a: a.close(),
    "__enter__": left,
    "__exit__": left,
}


def known(work: Callable[[Any, str], Any]) -> Callable[[Any], Any]:
    """A call about a topic whose leader this process knows already."""
    return lambda c: work(c, c.topics(["t"])[0].topic_id)


def range_of(topic_id: str) -> Range:
    return Range("t", topic_id, 0, 0, 9)


SPARK: dict[str, Callable[[Any], Any]] = {
    "patience_ms": lambda c: c.patience_ms,
    "decoded_bytes_max": lambda c: c.decoded_bytes_max,
    "topics": lambda c: c.topics(["t"]),
    "bounds": lambda c: c.bounds(c.topics(["t"]), read_committed=True),
    "first_at": known(lambda c, topic_id: c.first_at({(topic_id, 0): 1})),
    "delete_before": known(lambda c, topic_id: c.delete_before({(topic_id, 0): 1})),
    "prepared": known(lambda c, topic_id: c.prepared([range_of(topic_id)], read_committed=True)),
    "curves": known(lambda c, topic_id: c.curves([range_of(topic_id)], 4)),
    "tier_bounds": known(lambda c, topic_id: c.tier_bounds([range_of(topic_id)])),
    "tier": lambda c: c.tier("t"),
    "scan": known(lambda c, topic_id: list(c.scan(range_of(topic_id), read_committed=True))),
    # a failure leaves ranges over, for scans of their own
    "joint_scan": known(
        lambda c, topic_id: list(c.joint_scan([range_of(topic_id)], read_committed=True).batches(0))
    ),
    "publish": lambda c: c.publish("g", {}, print),  # without waiting: no failure of a broker shows
}

WALKS: dict[str, tuple[type, Callable[[], Any], dict[str, Callable[[Any], Any]]]] = {
    "Producer": (Producer, make_producer, PRODUCER),
    "Producer of transactions": (Producer, make_transactional, TRANSACTIONS),
    "Consumer": (Consumer, make_consumer, CONSUMER_CALLS),
    "AdminClient": (AdminClient, make_admin, ADMIN),
    "spark": (connection.ClusterClient, make_spark, SPARK),
    "AdminClient of controllers": (AdminClient, make_admin_of_controllers, QUORUM),
}

#: Built-ins that a docstring names.
DOCUMENTED: dict[str, tuple[type[BaseException], ...]] = {
    "flush": (TimeoutError,),
    "__next__": (StopIteration,),
}


@pytest.mark.parametrize("walk", [name for name in WALKS if " of " not in name])
def test_every_public_call_has_a_line_here(walk: str) -> None:
    kind, _, calls = WALKS[walk]
    dunder = {"__enter__", "__exit__", "__iter__", "__next__"}
    public = {name for name in dir(kind) if not name.startswith("_") or name in dunder}
    assert set(calls) == public


def steps_of(walk: str, name: str, world: World) -> int:
    """Make the call; return how many steps its broker took."""
    _, make, calls = WALKS[walk]
    client = make()
    begun = world.sim.loop.time()
    try:
        calls[name](client)
    except errors.PkError:
        pass
    except DOCUMENTED.get(name, ()):
        pass
    took_ms = (world.sim.loop.time() - begun) * 1000
    assert took_ms <= LIMIT_MS + BEYOND_MS, f"{name} took {took_ms:.0f} ms"
    steps = world.broker.steps
    if hasattr(client, "close"):
        client.close()
    return steps


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("walk", list(WALKS))
def test_a_call_ends_in_time_with_an_error_of_pk(
    walk: str, mode: str, sim_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WALKS[walk][2]:
        for well in range(STEPS_MAX):
            world = World(sim_thread, monkeypatch, mode, well)
            try:
                steps = steps_of(walk, name, world)
                assert not world.sim.loop.failures, (name, well, world.sim.loop.failures)
            except Exception as cause:
                raise AssertionError(f"{name}, a broker that {mode} after {well} steps") from cause
            finally:
                world.sim.close()
            if steps <= well:
                break
