"""How a user of Spark sees an error of pk: the sentence, without a traceback above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as fn


def mistyped(spark: Any, address: str, topic: str) -> None:
    spark.read.format("pk").options(
        **{"pk.bootstrap.servers": address, "subscribe": topic, "startingOffset": "earliest"}
    ).load().count()


def missing(spark: Any, address: str, topic: str) -> None:
    spark.read.format("pk").options(
        **{"pk.bootstrap.servers": address, "subscribe": "nosuch"}
    ).load().count()


def overwriting(spark: Any, address: str, topic: str) -> None:
    frame = spark.createDataFrame([("v",)], "value string")
    given = {"pk.bootstrap.servers": address, "topic": topic}
    frame.write.format("pk").options(**given).mode("overwrite").save()


@pytest.mark.parametrize(
    ("work", "sentence"),
    [
        (mistyped, "pk.errors.InvalidOption: "),
        (missing, "pk.errors.UnknownTopicOrPartition: topic 'nosuch'"),
        (overwriting, 'pk.errors.InvalidOption: mode("overwrite") would delete'),
    ],
)
def test_the_sentence_stands_alone(
    spark: Any, cluster: Any, work: Callable[[Any, str, str], None], sentence: str
) -> None:
    topic = cluster.topic(1, tier_enable=False)
    with pytest.raises(PySparkException) as told:
        work(spark, cluster.address, topic)
    first = str(told.value).splitlines()[0]
    assert sentence in first
    assert "Traceback" not in str(told.value)


def test_a_stream_shows_the_sentence(spark: Any, cluster: Any, tmp_path: Any) -> None:
    """Without it Spark shows an UnboundLocalError of its own (sparkconnector/refused_stream)."""
    topic = cluster.topic(1, tier_enable=False)
    given = {
        "pk.bootstrap.servers": cluster.address,
        "subscribe": topic,
        "endingOffsets": "latest",
    }
    frame = spark.readStream.format("pk").options(**given).load()
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path))
    for trigger in ({"processingTime": "0 seconds"}, {"availableNow": True}):
        query = writer.trigger(**trigger).start()
        with pytest.raises(PySparkException, match="endingOffsets has no meaning") as told:
            query.awaitTermination(60)
        assert "UnboundLocalError" not in str(told.value)


def test_a_users_own_function_keeps_its_traceback(spark: Any, cluster: Any) -> None:
    """In the same session, after an error of pk."""
    with pytest.raises(PySparkException):
        mistyped(spark, cluster.address, "t")

    @fn.udf("string")
    def broken(_):
        raise ValueError("mine")

    with pytest.raises(PySparkException, match="Traceback"):
        spark.range(1).select(broken("id")).collect()
