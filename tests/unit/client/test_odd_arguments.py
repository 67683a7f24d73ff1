"""Every public call with arguments that are nearly valid, or not at all.

A call works, or it raises an error of `pk.errors` or a `TypeError`.  A `TypeError` names the
argument, and is raised before anything is sent.  The test finds the calls and their arguments in
the classes: a new call needs a line here.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.client import serializers
from pk.client.admin import NewTopic
from pk.client.arguments import shown
from pk.client.network_client import UNKNOWN_TOPIC_MS
from pk.client.registry import HttpRegistry
from pk.settings import CONSUMER, PRODUCER, TOPIC
from tests.unit.client.ill_broker import (
    BEYOND_MS,
    LIMIT_MS,
    World,
    make_admin,
    make_consumer,
    make_producer,
)  # fmt: skip

T0 = TopicPartition("t", 0)
S = LIMIT_MS / 1000


class Odd:
    """A type that no call accepts."""

    def __repr__(self) -> str:
        return "<odd>"


ODD: tuple[Any, ...] = (
    None, 5, -1, 2**70, 10**5_000, 1.5, float("inf"), float("nan"), True, "", "a/b", "\ud800",
    "x" * 300, b"x", [], ["\ud800"], [5], [None], {}, {5: 5}, {"\ud800": "\ud800"}, (1, 2, 3), T0,
    TopicPartition("t", 7), TopicPartition("t", -1), TopicPartition("\ud800", 2**70), [("t", 0.5)],
    {T0: None}, {T0: float("nan")}, {T0: 2**70}, {T0: "\ud800"}, {T0: [2**70]}, Odd(), len,
)  # fmt: skip

ROWS = pa.record_batch([pa.array([b"v"], pa.binary())], names=["value"])
TIMED = {"timeout_s": S}

#: Class → call → arguments that it takes.
GOOD: dict[type, dict[str, dict[str, Any]]] = {
    Producer: {
        "send": {
            "topic": "t", "value": b"v", "key": b"k", "headers": [("h", b"v")], "partition": 0,
            "timestamp_ms": 1, "on_delivery": lambda metadata, error: None,
        },
        "send_batch": {"topic": "t", "batch": ROWS},
        "partitions_for": {"topic": "t", **TIMED},
        "metrics": {},
        "flush": TIMED,
        "close": TIMED,
        "init_transactions": TIMED,
        "begin_transaction": {},
        "commit_transaction": TIMED,
        "abort_transaction": TIMED,
        "transaction": TIMED,
    },
    Consumer: {
        "subscribe": {
            "topics": ["t"], "pattern": None, "on_assigned": None, "on_revoked": None,
            "on_lost": None,
        },
        "unsubscribe": {},
        "assign": {"partitions": [T0]},
        "assignment": {},
        "seek": {"partition": T0, "offset": 0},
        "seek_to_beginning": {"partitions": T0},
        "seek_to_end": {"partitions": T0},
        "seek_to_snapshot": {"topic": "t", **TIMED},
        "pause": {"partitions": T0},
        "resume": {"partitions": T0},
        "paused": {},
        "current_lag": {"partition": T0},
        "metrics": {},
        "poll": TIMED,
        "poll_batches": TIMED,
        "position": {"partition": T0, **TIMED},
        "beginning_offsets": {"partitions": [T0], **TIMED},
        "end_offsets": {"partitions": [T0], **TIMED},
        "offsets_for_times": {"timestamps": {T0: 1}, **TIMED},
        "partitions_for": {"topic": "t", **TIMED},
        "close": {},
    },
    AdminClient: {
        "create_topic": {
            "name": "u", "partitions": 1, "configs": {"retention.ms": 1}, "replication_factor": 1,
            "replica_assignment": [[1]], "validate_only": True, **TIMED,
        },
        "create_topics": {"topics": [NewTopic("u")], "validate_only": True, **TIMED},
        "delete_topic": {"name": "u", "purge_tier": False, **TIMED},
        "delete_topics": {"names": ["u"], "purge_tier": False, **TIMED},
        "create_partitions": {"topic": "t", "total": 3, "replica_assignment": [[1]], **TIMED},
        "set_schedule": {"topic": "t", "job": "audit", "every_ms": 10_000, "cron": "", **TIMED},
        "delete_schedule": {"topic": "t", "job": "audit", **TIMED},
        "list_schedules": {"topic": "t", **TIMED},
        "retain_tier": {"topic": "t", **TIMED},
        "vacuum_tier": {"topic": "t", **TIMED},
        "list_topics": {"internal": False, **TIMED},
        "describe_topics": {"names": ["t"], **TIMED},
        "describe_configs": {"name": "t", "resource": "topic", **TIMED},
        "alter_configs": {
            "name": "t", "set": {"retention_ms": 1}, "unset": ["segment.ms"], "resource": "topic",
            "validate_only": True, **TIMED,
        },
        "list_offsets": {
            "partitions": {T0: "latest"}, "isolation_level": "read_committed", **TIMED,
        },
        "offsets": {"topic": "t", "spec": "latest", **TIMED},
        "delete_records": {"before": {T0: 0}, **TIMED},
        "alter_partition_reassignments": {
            "reassignments": {T0: [1]}, "topic_ids": {"t": "id"}, "expected": {T0: [1]},
            "force": True, **TIMED,
        },
        "topic_ids": {"topics": ["t"], **TIMED},
        "list_partition_reassignments": {"topics": ["t"], **TIMED},
        "partition_replicas": {"topics": ["t"], **TIMED},
        "elect_leaders": {"partitions": [T0], "unclean": False, **TIMED},
        "unregister_broker": {"broker_id": 2, **TIMED},
        "list_brokers": TIMED,
        "confirm_clock": {"broker_id": 1, **TIMED},
        "describe_cluster": TIMED,
        "upgrade_cluster": {"to": 2, "validate_only": True, **TIMED},
        "describe_tier": {"topic": "t", **TIMED},
        "repair_tier": {"topic": "t", **TIMED},
        "accept_tier": {"topic": "t", **TIMED},
        "describe_metadata_quorum": TIMED,
        "list_groups": {"states": ["Stable"], **TIMED},
        "describe_group": {"group_id": "g", **TIMED},
        "group_offsets": {"group_id": "g", **TIMED},
        "alter_group_offsets": {"group_id": "g", "offsets": {T0: 1}, **TIMED},
        "delete_group_offsets": {"group_id": "g", "partitions": [T0], **TIMED},
        "delete_group": {"group_id": "g", **TIMED},
        "list_transactions": {
            "states": ["Ongoing"], "producer_ids": [1], "open_longer_ms": 1, **TIMED,
        },
        "describe_transactions": {"transactional_ids": ["a"], **TIMED},
        "abort_transaction": {"transactional_id": "a", **TIMED},
        "resolve_transaction": {"transactional_id": "a", "commit": True, **TIMED},
        "forget_transactional_id": {"transactional_id": "a", **TIMED},
        "describe_producers": {"partitions": [T0], **TIMED},
        "find_hanging_transactions": {"topics": ["t"], "max_timeout_ms": 1, **TIMED},
        "add_raft_voter": {"node_id": 1, "directory_id": "d", "address": "b1:9292", **TIMED},
        "remove_raft_voter": {"node_id": 1, "directory_id": "d", **TIMED},
        "close": {},
    },
}  # fmt: skip

#: Calls that accept anything, and raise that they are not in this build.
NOT_YET = {
    "send_offsets_to_transaction", "commit", "committed", "group_metadata",
}  # fmt: skip

MAKERS: dict[type, Callable[[], Any]] = {
    Producer: make_producer, Consumer: make_consumer, AdminClient: make_admin,
}  # fmt: skip


@pytest.mark.parametrize("kind", list(GOOD))
def test_every_argument_of_every_call_has_a_line_here(kind: type) -> None:
    calls = {
        name: set(inspect.signature(found).parameters) - {"self"}
        for name in dir(kind)
        if not name.startswith("_") and callable(found := getattr(kind, name))
    }
    assert calls.keys() - NOT_YET == GOOD[kind].keys()
    assert {name: set(given) for name, given in GOOD[kind].items()} == {
        name: names for name, names in calls.items() if name not in NOT_YET
    }


def called(client: Any, name: str, given: dict[str, Any]) -> Any:
    """Make the call; the outcome of a future counts as its outcome."""
    if name in ("seek", "position", "pause", "resume"):
        client.assign([T0])
    if name in ("seek_to_beginning", "seek_to_end", "pause", "resume"):
        return getattr(client, name)(given["partitions"])
    found = getattr(client, name)(**given)
    return found.result(2 * S) if name in ("send", "send_batch") else found


def judged(world: World, client: Any, name: str, given: dict[str, Any], odd: str) -> str:
    """Return how a call with an odd argument violated the rule; "" if it did not."""
    steps, begun = world.broker.steps, world.sim.loop.time()
    wrong = ""
    try:
        called(client, name, given)
    except errors.InternalError as error:
        if "results came for one request" not in error.message:  # the broker answers emptily
            wrong = f"{error!r}"
    except errors.PkError as error:
        if isinstance(error, errors.InvalidOption) and odd not in str(error):
            wrong = f"{error!r} does not name {odd}"
    except TypeError as error:
        if not re.search(rf"\b{odd}\b", str(error)):
            wrong = f"{error!r} does not name {odd}"
        elif name != "position" and "assign" not in name and world.broker.steps > steps + 2:
            wrong = f"{error!r} after {world.broker.steps - steps} requests"
    except TimeoutError as error:
        wrong = "" if name == "flush" else f"{error!r}"
    except Exception as error:
        wrong = f"{error!r}"
    took_ms = (world.sim.loop.time() - begun) * 1000
    limit_ms = max(UNKNOWN_TOPIC_MS, LIMIT_MS) + 2 * BEYOND_MS
    if not wrong and took_ms > limit_ms and odd != "timeout_s":
        wrong = f"took {took_ms:.0f} ms"
    return wrong


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, calls in GOOD.items() for name in calls]
)
def test_an_odd_argument_is_refused_by_name(
    kind: type, name: str, sim_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = []
    good = GOOD[kind][name]
    for odd in good:
        world = World(sim_thread, monkeypatch, "hangs", 1 << 30)
        try:
            for value in ODD:
                if odd == "timeout_s" and value == 5:
                    continue  # five seconds, of which some calls need all
                client = MAKERS[kind]()
                said = judged(world, client, name, {**good, odd: value}, odd)
                client.close()
                if said:
                    wrong.append(f"{name}({odd}={shown(value)}): {said}"[:300])
            assert not world.sim.loop.failures
        finally:
            world.sim.close()
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_fast_path_of_send_is_as_careful(
    sim_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(sim_thread, monkeypatch, "hangs", 1 << 30)
    try:
        with make_producer() as producer:
            futures = [producer.send("t", b"first")]
            for odd in (5, "x", {}, Odd()):
                with pytest.raises(TypeError, match="on_delivery must be a function"):
                    producer.send("t", b"bad", b"k", on_delivery=odd)
            for name in (5, [], {}, "a/b", "\ud800"):
                with pytest.raises(errors.InvalidTopic, match="topic"):
                    producer.send(name, b"bad")  # type: ignore[arg-type]
            futures.append(producer.send("t", b"second", b"k"))
            assert all(future.result(S) for future in futures)
            producer.flush(S)
            assert sum(each.end for each in world.cluster.logs.values()) == 2
    finally:
        world.sim.close()


@pytest.mark.parametrize("kind", [Producer, Consumer])
def test_an_odd_option_is_refused_by_name(
    kind: Any, sim_thread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(sim_thread, monkeypatch, "hangs", 1 << 30)
    words = {Producer: "serializer", Consumer: "deserializer"}[kind]
    wrong = []
    try:
        for name in [
            *{Producer: PRODUCER, Consumer: CONSUMER}[kind].by_name,
            f"key_{words}", f"value_{words}",
        ]:  # fmt: skip
            for value in ODD:
                try:
                    kind("b1:9292", **{name: value}).close()
                except errors.PkError as error:
                    if name not in str(error) and "contradictory" not in str(error):
                        wrong.append(f"{name}={shown(value)}: {error!r}")
                except Exception as error:
                    wrong.append(f"{name}={shown(value)}: {error!r}")
    finally:
        world.sim.close()
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", ["client_id", "acks", "compression"])
def test_text_is_not_made_of_anything(name: str) -> None:
    for value in ({}, [], None, b"x", Odd(), len):
        with pytest.raises(errors.InvalidConfig, match=f"{name} takes text"):
            Producer("127.0.0.1:1", **{name: value})


def test_a_number_has_an_end(sim_thread: Any) -> None:
    """An argument that is sent as 32 or 64 bits is refused beyond its range."""
    for name in ("request_timeout_ms", "delivery_timeout_ms", "max_block_ms", "linger_ms"):
        for value in (2**31, 2**70):
            with pytest.raises(errors.InvalidConfig, match=f"{name} must be at most {2**31 - 1}"):
                Producer("127.0.0.1:1", **{name: value})
    for value in (float("inf"), float("nan")):
        with pytest.raises(errors.InvalidConfig, match="linger_ms takes a number"):
            Producer("127.0.0.1:1", linger_ms=value)
    with pytest.raises(errors.InvalidConfig, match=f"retention_ms must be at most {2**63 - 1}"):
        TOPIC.parse({"retention.ms": 2**70})


@pytest.mark.parametrize("kind", [Producer, Consumer, AdminClient])
@pytest.mark.parametrize(
    "bootstrap",
    [
        5, b"b1:9292", [5], [b"b1:9292"], [None], {}, {"bootstrap.servers": "b1:9292"}, Odd(),
        "\ud800", "\ud800:9292", "b1:²", "b1:9292\x00", "b1:" + "9" * 5_000, ":1", "b1:0",
    ],
)  # fmt: skip
def test_a_bootstrap_server_is_host_and_port(kind: Any, bootstrap: Any) -> None:
    with pytest.raises(errors.InvalidOption, match=r"bootstrap.* HOST:PORT"):
        kind(bootstrap)


@pytest.mark.parametrize("kind", [Producer, Consumer, AdminClient])
def test_options_in_a_dict_are_answered_with_the_right_call(kind: Any) -> None:
    with pytest.raises(errors.InvalidOption, match=r'Producer\(\*\*\{"bootstrap.servers"'):
        kind({"bootstrap.servers": "b1:9292", "client.id": "me"})


def makers() -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return the makers of the serializers with arguments that they accept."""
    registry = HttpRegistry("http://127.0.0.1:1", timeout_s=0.1)
    url = "http://127.0.0.1:1"
    found: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "HttpRegistry": (
            HttpRegistry, {"urls": url, "user": "u", "password": "p", "timeout_s": 1.0},
        ),
        "register": (
            registry.register, {"subject": "s", "schema": "{}", "schema_type": "AVRO"},
        ),
        "get": (registry.get, {"schema_id": 1}),
        "RegistrySerializer": (
            serializers.RegistrySerializer,
            {"registry": registry, "schema": "{}", "encode": bytes, "schema_type": "AVRO",
             "is_key": False, "subject": serializers.subject_of},
        ),
        "RegistryDeserializer": (
            serializers.RegistryDeserializer, {"registry": registry, "decode": max},
        ),
        "frame": (serializers.frame, {"schema_id": 1, "payload": b""}),
        "unframe": (serializers.unframe, {"data": b"\x00\x00\x00\x00\x01"}),
    }  # fmt: skip
    for name in ("bytes", "string", "json"):
        found[f"{name}_serializer"] = (
            getattr(serializers, f"{name}_serializer"), {"topic": "t", "value": None},
        )  # fmt: skip
        found[f"{name}_deserializer"] = (
            getattr(serializers, f"{name}_deserializer"), {"topic": "t", "data": b"1"},
        )  # fmt: skip
    return found


@pytest.mark.parametrize("name", list(makers()))
def test_serializers_and_registries_refuse_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpRegistry, "_call", lambda self, method, path, body: {})
    call, good = makers()[name]
    assert set(inspect.signature(call).parameters) == set(good)
    wrong = []
    for odd, value in itertools.product(good, ODD):
        try:
            call(**{**good, odd: value})
        except (errors.PkError, TypeError) as error:
            typed = isinstance(error, errors.PkError)
            if isinstance(error, errors.InternalError) or not (typed or odd in str(error)):
                wrong.append(f"{name}({odd}={shown(value)}): {error!r}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_a_password_is_not_quoted() -> None:
    for password in (b"secret", "secret\ud800"):
        with pytest.raises((TypeError, errors.InvalidOption)) as told:
            HttpRegistry("http://r:1", user="u", password=password)  # type: ignore[arg-type]
        assert "secret" not in str(told.value)
