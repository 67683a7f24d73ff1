"""The lag of a real query, as gauges and by a function; a function that fails costs the query
nothing.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from pk.sparkconnector import LagListener


def gauges(registry: CollectorRegistry, name: str = "pk_spark_lag") -> dict[str, float]:
    return {
        sample.labels["partition"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_the_lag_of_a_query_is_published(spark, cluster, tmp_path, patiently) -> None:
    topic = cluster.topic(2, tier_enable=False)
    cluster.fill_values(topic, [b"%d" % number for number in range(100)])
    registry = CollectorRegistry()
    seen: list[tuple[int, dict[str, float]]] = []

    def fails(lag) -> None:
        raise ConnectionError("not the query's business")

    listeners = [
        LagListener(lambda lag: seen.append((lag.total, gauges(registry))), registry=registry),
        LagListener(fails, registry=None),
    ]
    for each in listeners:
        spark.streams.addListener(each)
    try:
        reader = spark.readStream.format("pk").option("pk.bootstrap.servers", cluster.address)
        reader = reader.option("subscribe", topic).option("startingOffsets", "earliest")
        frame = reader.option("maxOffsetsPerTrigger", 40).load()
        writer = frame.writeStream.format("noop").queryName("behind").trigger(availableNow=True)
        writer = writer.option("checkpointLocation", str(tmp_path))
        query = patiently(writer.start, lambda started: started.awaitTermination(400))
        assert query.exception() is None
        # events come after the batches, in a thread of their own; the end drops the gauges
        cluster.wait("all batches are reported", lambda: bool(seen) and seen[-1][0] == 0)
        cluster.wait("the end is reported", lambda: not gauges(registry))
    finally:
        for each in listeners:
            spark.streams.removeListener(each)
            each.close()
    # an attempt that found no Python worker may have come before (see `patiently`)
    assert seen[-3:] == [(60, {"0": 30, "1": 30}), (20, {"0": 10, "1": 10}), (0, {"0": 0, "1": 0})]
