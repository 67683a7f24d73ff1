"""Transactions whose coordinator is offline, or has too few replicas in sync (rules X1, R1)."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from real_cluster import until, values

from pk import AdminClient, Producer, errors, transactional_ids
from pk.cli.embedded import EmbeddedCluster
from pk.client.admin import NewTopic, PartitionDescription

pytestmark = pytest.mark.integration

WAIT_S = 60.0


@pytest.mark.long
@pytest.mark.parametrize("away", ["offline", "below min_insync_replicas"])
def test_a_commit_without_its_coordinator_has_no_outcome_until_it_returns(
    tmp_path: Path, away: str
) -> None:
    """Two of three nodes are down: the third one coordinates the id, or it does not.

    The call says that it may be repeated.  The repeated call commits the whole transaction.
    """
    with EmbeddedCluster(tmp_path, nodes=3) as cluster, contextlib.ExitStack() as stack:
        admin = stack.enter_context(AdminClient(cluster.address))
        (made,) = admin.create_topics([NewTopic("t", 3, {"min_insync_replicas": 1}, 3)])
        assert made.error is None
        options = {"transactional_id": "id", "max_block_ms": 8_000}
        producer = stack.enter_context(Producer(cluster.address, **options))
        until(lambda: _in_service(producer), "no coordinator")
        producer.begin_transaction()
        for partition in range(3):
            producer.send("t", b"open", partition=partition)
        producer.flush(WAIT_S)
        (found,) = admin.describe_transactions(["id"])
        others = [each for each in cluster.nodes if each != found.coordinator_id]
        down = others if away != "offline" else [found.coordinator_id, others[0]]
        for each in down:
            cluster.kill(each)
        with pytest.raises(errors.RequestTimedOut, match="call commit_transaction again") as raised:
            producer.commit_transaction()
        assert raised.value.retriable
        cluster.start_nodes(down)
        until(lambda: _commits(producer), "no outcome")
        until(lambda: values(cluster.address, "t") == [b"open"] * 3, "not whole")


@pytest.mark.long
def test_a_coordinator_without_enough_replicas_names_them(tmp_path: Path) -> None:
    """The coordinator's other two replicas are gone, and the controllers have noticed it.

    The controllers' majority, the transaction's own partitions and the producer are well.
    """
    with EmbeddedCluster(tmp_path, nodes=5) as cluster, contextlib.ExitStack() as stack:
        admin = stack.enter_context(AdminClient(cluster.address))
        options = {"transactional_id": "id", "max_block_ms": 8_000}
        producer = stack.enter_context(Producer(cluster.address, **options))
        until(lambda: _in_service(producer), "no coordinator")

        def replicas() -> PartitionDescription:
            return next(
                each
                for each in admin.describe_topics([transactional_ids.TOPIC], timeout_s=WAIT_S)
                if each.partition == transactional_ids.partition_of_id("id")
            )

        until(lambda: len(replicas().isr) == 3, "three replicas")
        described = replicas()
        down = [each for each in described.replicas if each != described.leader]
        same = [described.leader, *down]
        topics = [
            NewTopic("t", replica_assignment=[[described.leader]] * 2),
            NewTopic("probe", 1, {"min_insync_replicas": 2}, replica_assignment=[same]),
        ]
        made = admin.create_topics(topics, timeout_s=WAIT_S)
        assert [each.error for each in made] == [None, None]
        producer.begin_transaction()
        for partition in range(2):
            producer.send("t", b"open", partition=partition)
        producer.flush(WAIT_S)
        for each in down:
            cluster.kill(each)
        until(lambda: list(replicas().isr) == [described.leader], "the controllers see no death")
        # A commit that the coordinator appends before it knows of the deaths waits without a word.
        until(lambda: _is_refused(cluster.address, "probe"), "the leader sees no death")
        with pytest.raises(errors.RequestTimedOut, match="call commit_transaction again") as raised:
            producer.commit_transaction()
        assert "1 in-sync replicas, 2 are required" in str(raised.value)
        assert raised.value.retriable
        cluster.start_nodes(down)
        until(lambda: _commits(producer), "no outcome")
        until(lambda: values(cluster.address, "t") == [b"open"] * 2, "not whole")


def _is_refused(address: str, topic: str) -> bool:
    """The leader of the topic's partition knows that in-sync replicas are missing."""
    options = {"delivery_timeout_ms": 2_000, "request_timeout_ms": 1_000}
    with Producer(address, **options) as probe:
        problem = probe.send(topic, b"probe", partition=0).exception(WAIT_S)
    return problem is not None and "1 in-sync replicas, 2 are required" in str(problem)


def _in_service(producer: Producer) -> bool:
    with contextlib.suppress(errors.RequestTimedOut):
        producer.init_transactions()
        return True
    return False


def _commits(producer: Producer) -> bool:
    with contextlib.suppress(errors.RequestTimedOut):
        producer.commit_transaction()
        return True
    return False
