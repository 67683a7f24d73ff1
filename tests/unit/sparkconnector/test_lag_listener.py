"""The lag in recorded progress of Spark 4.2, and what the listener makes of odd ones."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from prometheus_client import CollectorRegistry

from pk import errors
from pk.sparkconnector import LagListener, PartitionLag, QueryLag
from pk.sparkconnector.lag_listener import NAME_MAX, QUERIES_MAX, lag_of
from pk.sparkconnector.planner import PkWarning

FLIGHTS = "0cac77ea-6ef8-4789-b07b-c358bb712545"
#: Of a query over a pk topic with maxOffsetsPerTrigger, and over Spark's rate source.
RECORDED = json.loads(
    """{"id": "327ad22c-8bd0-44ef-a033-4b66a2139d9a",
    "runId": "2461ab5c-913d-49bf-b198-39374018f6b1", "name": "by carrier",
    "timestamp": "2026-11-28T11:15:28.169Z", "batchId": 7, "batchDuration": 9674,
    "numInputRows": 40, "inputRowsPerSecond": 0.0, "processedRowsPerSecond": 4.1,
    "durationMs": {"addBatch": 7190, "latestOffset": 427, "triggerExecution": 9657},
    "stateOperators": [], "sources": [{"description": "org.apache.spark.sql.execution.datasources.\
v2.python.PythonMicroBatchStreamWithTriggerAvailableNow@1f4a31f4", "startOffset": null,
    "endOffset": {"v": 1, "topics": {"flights": {"id": "0cac77ea-6ef8-4789-b07b-c358bb712545",
    "offsets": {"0": 20, "1": 20}, "epochs": {"0": 0, "1": 0}}}},
    "latestOffset": {"v": 1, "topics": {"flights": {"id": "0cac77ea-6ef8-4789-b07b-c358bb712545",
    "offsets": {"0": 50, "1": 45}}}}, "numInputRows": 40, "inputRowsPerSecond": 0.0,
    "processedRowsPerSecond": 4.1}, {"description": "RateStreamV2[rowsPerSecond=1]",
    "startOffset": null, "endOffset": 0, "latestOffset": 0, "numInputRows": 0}],
    "sink": {"description": "NoopTable", "numOutputRows": 40}}"""
)


def changed(path: str = "", value: Any = None, **top: Any) -> dict[str, Any]:
    """Return the recorded progress with another value at `path` of its first source."""
    found = copy.deepcopy(RECORDED) | top
    *parents, last = path.split("/")
    at = found["sources"][0]
    for name in parents:
        at = at[name]
    if last:
        at[last] = value
    return found


def offsets(**partitions: int) -> dict[str, Any]:
    return {
        "v": 1,
        "topics": {
            "flights": {"id": FLIGHTS, "offsets": {p[1:]: o for p, o in partitions.items()}}
        },
    }


def event(progress: Any) -> Any:
    text = progress if isinstance(progress, str) else json.dumps(progress)
    return SimpleNamespace(progress=SimpleNamespace(json=text))


def report(listener: LagListener, *events: Any) -> None:
    for each in events:
        listener.onQueryProgress(each)


def ended(progress: dict[str, Any]) -> Any:
    return SimpleNamespace(id=progress["id"], exception=None)


def samples(
    registry: CollectorRegistry, name: str = "pk_spark_lag"
) -> dict[tuple[str, ...], float]:
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == name:
                found[tuple(sample.labels.values())] = sample.value
    return found


def test_the_lag_of_each_partition_is_latest_minus_end() -> None:
    lag = lag_of(RECORDED)
    assert lag is not None
    assert lag.partitions == (
        PartitionLag(0, "flights", 0, 20, 50, 30),
        PartitionLag(0, "flights", 1, 20, 45, 25),
    )
    assert (lag.total, lag.batch_id, lag.name) == (55, 7, "by carrier")
    # Spark Connect, and a JVM without the offsets as objects, give them as text
    text = changed("endOffset", json.dumps(RECORDED["sources"][0]["endOffset"]))
    assert lag_of(text) == lag


@pytest.mark.parametrize(
    ("path", "value", "partitions"),
    [
        # partition 2 has no position yet (sparkconnector/lag_listener W4)
        ("latestOffset", offsets(p0=20, p1=20, p2=9), {0: 0, 1: 0}),
        # an unclean election cut the log: the lag is never negative
        ("latestOffset", offsets(p0=5), {0: 0}),
        # the topic was created again (sparkconnector/lag_listener W4)
        ("latestOffset/topics/flights/id", "another", None),
        ("latestOffset", None, None),
        ("latestOffset", "None", None),
        ("endOffset", None, None),
        ("endOffset", {"flights": {"0": 20}}, None),  # of Kafka's connector
        ("endOffset", {"v": 2, "topics": {}}, None),  # of a newer pk
        ("endOffset", [1, 2], None),
        ("endOffset", {"v": 1, "topics": {"flights": 3}}, None),
        ("endOffset/topics/flights/offsets", {"0": float("inf")}, None),
    ],
)
def test_what_has_no_position_has_no_lag(path: str, value: Any, partitions: Any) -> None:
    lag = lag_of(changed(path, value))
    found = None if lag is None else {each.partition: each.lag for each in lag.partitions}
    assert found == partitions


@pytest.mark.parametrize(
    "odd",
    [
        "", "not json", "[]", "null", "{}", '{"sources": 3}', '{"sources": [3]}', "1e999",
        json.dumps(changed(batchId="x")), json.dumps(changed(batchId=None)),
    ],
)  # fmt: skip
def test_odd_progress_is_a_warning_and_no_error(odd: str) -> None:
    """A kind of failure is one warning, not one for a trigger (sparkconnector/lag_listener W1)."""
    registry = CollectorRegistry()
    listener = LagListener(registry=registry)
    with pytest.warns(PkWarning, match="not published") as warned:
        report(listener, *[event(odd)] * 3)
    assert len(warned) == 1
    listener.onQueryProgress(event(RECORDED))
    assert len(samples(registry)) == 2
    listener.onQueryProgress(event(odd))  # pytest makes errors of warnings


def test_a_function_that_raises_costs_one_warning() -> None:
    seen: list[QueryLag] = []

    def fails(lag: QueryLag) -> None:
        seen.append(lag)
        raise ConnectionError("the metrics' store is away")

    registry = CollectorRegistry()
    listener = LagListener(fails, registry=registry)
    with pytest.warns(PkWarning, match="store is away") as warned:
        report(listener, *[event(RECORDED)] * 2)
    assert (len(seen), len(warned)) == (2, 1)
    assert sum(samples(registry).values()) == 55
    # also where a program makes errors of warnings, as pytest does here
    LagListener(fails, registry=None).onQueryProgress(event(RECORDED))


def test_series_are_bounded_and_end_with_their_query() -> None:
    registry = CollectorRegistry()
    listener = LagListener(registry=registry, partition_limit=3)
    queries = [changed(id=f"id-{n}", name=f"query {n}") for n in range(QUERIES_MAX + 2)]
    for each in queries:
        listener.onQueryProgress(event(each))
    assert set(samples(registry)) == {
        ("query 0", "0", "flights", "0"),
        ("query 0", "0", "flights", "1"),
        ("query 1", "0", "flights", "0"),
    }
    assert samples(registry, "pk_spark_partitions_without_metrics") == {(): 2 * QUERIES_MAX - 3}
    topics = samples(registry, "pk_spark_topic_lag")
    assert len(topics) == QUERIES_MAX
    assert set(topics.values()) == {55}
    assert samples(registry, "pk_spark_progress_left_out_total") == {(): 2}
    for each in queries:
        listener.onQueryTerminated(ended(each))
    assert samples(registry) == {}
    assert samples(registry, "pk_spark_last_event_timestamp_seconds") == {}


def test_labels_of_queries_differ() -> None:
    """Two sessions may each have a query of one name (sparkconnector/lag_listener W5)."""
    registry = CollectorRegistry()
    listener = LagListener(registry=registry)
    for query, name in [("a", "one"), ("b", "one"), ("c", None), ("d", "x" * (NAME_MAX + 1))]:
        listener.onQueryProgress(event(changed(id=query, name=name)))
    assert {labels[0] for labels in samples(registry)} == {"one", "b", "c", "d"}
    listener.onQueryProgress(event(changed(id="b", name="one")))
    assert len(samples(registry)) == 8


def test_a_registry_has_one_listener() -> None:
    registry = CollectorRegistry()
    first = LagListener(registry=registry)
    with pytest.raises(errors.InvalidOption, match="another LagListener"):
        LagListener(registry=registry)
    first.close()
    first.close()
    LagListener(registry=registry)


@pytest.mark.parametrize("wrong", [{"on_lag": 3}, {"partition_limit": -1}])
def test_wrong_arguments_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidOption, match=next(iter(wrong))):
        LagListener(registry=None, **wrong)
