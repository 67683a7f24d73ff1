"""A streaming query over an unclean election of three real nodes (rule S4).

The log is cut below the query's offset and then grows beyond it, so its length shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from real_cluster import until

from pk import AdminClient, Producer, TopicPartition
from pk.cli.embedded import EmbeddedCluster
from pk.client.admin import NewTopic

TOPIC = "cut"
CONFIGS = {"tier_enable": False, "min_insync_replicas": 1, "retention_ms": -1}


@pytest.fixture
def three(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    made = EmbeddedCluster(
        tmp_path / "nodes",
        settings={"broker_session_timeout_ms": 3000, "replica_lag_time_max_ms": 3000},
    )
    with made:
        yield made


def fill(bootstrap: str, first: int, count: int) -> None:
    with Producer(bootstrap, acks="all") as producer:
        sent = [
            producer.send(TOPIC, value=b"%d" % n, partition=0) for n in range(first, first + count)
        ]
        producer.flush(90)
    for future in sent:
        future.result(0)


def described(bootstrap: str) -> Any:
    with AdminClient(bootstrap) as admin:
        (one,) = admin.describe_topics([TOPIC], timeout_s=60)
        return one


def elected(bootstrap: str, replica: int) -> bool:
    """Whether an unclean election took place: not before the controller fences the old leader.

    After a lost reply a second call answers that no election is needed.
    """
    place = TopicPartition(TOPIC, 0)
    with AdminClient(bootstrap) as admin:
        if admin.elect_leaders([place], unclean=True, timeout_s=60)[place] is None:
            return True
    return described(bootstrap).leader == replica


def frame(spark: Any, bootstrap: str, **options: str) -> Any:
    given = {"subscribe": TOPIC, "startingOffsets": "earliest", **options}
    reader = spark.readStream.format("pk").option("pk.bootstrap.servers", bootstrap)
    return reader.options(**given).load()


def test_a_query_is_told_what_an_unclean_election_cut(
    spark: Any, run_available: Any, seen: Any, three: EmbeddedCluster, tmp_path: Path
) -> None:
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    with AdminClient(three.address) as admin:
        (made,) = admin.create_topics([NewTopic(TOPIC, 1, CONFIGS, 2)], timeout_s=60)
        assert made.error is None, made.error
    fill(three.address, 0, 100)
    until(lambda: len(described(three.address).isr) == 2, "both replicas are in sync")
    leader = described(three.address).leader
    (follower,) = set(described(three.address).replicas) - {leader}

    frozen = [three.nodes[follower].pids()["broker"]]
    three.freeze(follower, frozen)
    until(lambda: described(three.nodes[leader].listen).isr == (leader,), "the follower left")
    fill(three.nodes[leader].listen, 100, 50)
    run_available(frame(spark, three.nodes[leader].listen), checkpoint, out)
    assert seen(out) == [(0, n) for n in range(150)]

    three.kill(leader)
    three.thaw(follower, frozen)
    bystander = next(n for n in three.nodes if n not in (leader, follower))
    bootstrap = f"{three.nodes[follower].listen},{three.nodes[bystander].listen}"
    until(lambda: elected(bootstrap, follower), "an unclean election")
    fill(bootstrap, 200, 100)
    with AdminClient(bootstrap) as admin:
        assert admin.offsets(TOPIC)[TopicPartition(TOPIC, 0)] == 200, "longer than it was"

    with pytest.raises(StreamingQueryException, match=r"\[100, 150\) of cut-0 were cut by an un"):
        run_available(frame(spark, bootstrap), checkpoint, out)
    run_available(frame(spark, bootstrap, failOnDataLoss="false"), checkpoint, out)
    replaced = [(0, n) for n in range(100, 200)]
    assert seen(out) == sorted([(0, n) for n in range(150)] + replaced)
