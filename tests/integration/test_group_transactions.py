"""Offsets of consumer groups in transactions of producers, on real processes (KIP-447, rule X2)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_cluster import until

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedServer

pytestmark = pytest.mark.integration

WAIT_S = 60
PLACE = TopicPartition("t", 0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    made = EmbeddedServer(
        tmp_path,
        settings={
            "group_initial_rebalance_delay_ms": "100",
            "group_min_session_timeout_ms": "500",
        },
    )
    made.start(WAIT_S)
    try:
        with AdminClient(made.address) as admin, Producer(made.address) as producer:
            admin.create_topic("t")
            for number in range(10):
                producer.send("t", b"%d" % number)
        yield made
    finally:
        made.stop(WAIT_S)


def reader(server: EmbeddedServer, **options: object) -> Consumer:
    return Consumer(
        server.address, group_id="g", enable_auto_commit=False, auto_offset_reset="earliest",
        session_timeout_ms=3_000, heartbeat_interval_ms=300, **options,
    )  # fmt: skip


def writer(server: EmbeddedServer) -> Producer:
    made = Producer(server.address, transactional_id="id", transaction_timeout_ms=30_000)
    made.init_transactions(WAIT_S)
    return made


def joined(server: EmbeddedServer, **options: object) -> Consumer:
    """A member that has got its partition."""
    consumer = reader(server, **options)
    consumer.subscribe(["t"])
    until(lambda: consumer.poll(timeout_s=0.2), "no records come")
    return consumer


def test_offsets_count_with_the_commit_and_never_after_an_abort(server: EmbeddedServer) -> None:
    with joined(server) as consumer, writer(server) as producer:
        producer.begin_transaction()
        producer.send_offsets_to_transaction({PLACE: 7}, consumer.group_metadata())
        with reader(server, isolation_level="read_uncommitted") as impatient:
            assert impatient.committed(PLACE) is None
        producer.abort_transaction()
        assert consumer.committed(PLACE) is None
        producer.begin_transaction()
        producer.send_offsets_to_transaction({PLACE: 3}, consumer.group_metadata())
        producer.send_offsets_to_transaction({PLACE: 4}, consumer.group_metadata())
        producer.commit_transaction()
        assert consumer.committed(PLACE) == 4


def test_a_reader_waits_for_the_outcome_and_tools_are_refused(server: EmbeddedServer) -> None:
    """Also after the coordinators were killed: the offsets of the transaction are in the log."""
    with joined(server) as consumer, writer(server) as producer, AdminClient(server.address) as it:
        producer.begin_transaction()
        producer.send_offsets_to_transaction({PLACE: 7}, consumer.group_metadata())
        consumer.close()
        old = server.pids()["broker"]
        server.kill("broker")
        server.wait_restarted("broker", old)
        with pytest.raises(errors.UnstableOffsetCommit, match="transaction"):
            reader(server).committed(PLACE, timeout_s=3)
        with reader(server, isolation_level="read_uncommitted") as impatient:
            assert impatient.committed(PLACE) is None
        with pytest.raises((errors.UnstableOffsetCommit, errors.RequestTimedOut)):
            it.delete_group("g", timeout_s=2)
        found: list[int | None] = []
        waiting = threading.Thread(
            target=lambda: found.append(reader(server).committed(PLACE, timeout_s=WAIT_S))
        )
        waiting.start()
        producer.commit_transaction(WAIT_S)
        waiting.join()
        assert found == [7]


def test_a_member_that_was_removed_commits_nothing(server: EmbeddedServer) -> None:
    """Its transaction is aborted, with its records; the next owner reads them again."""
    with joined(server) as consumer, writer(server) as producer:
        zombie = consumer.group_metadata()
        consumer.close()
        with joined(server):
            producer.begin_transaction()
            producer.send("t", b"of the zombie")
            with pytest.raises(errors.TransactionAborted, match="UnknownMemberId"):
                producer.send_offsets_to_transaction({PLACE: 7}, zombie)
            with pytest.raises(errors.TransactionAborted):
                producer.commit_transaction()
            producer.abort_transaction()
        assert reader(server).committed(PLACE) is None


def test_odd_calls_are_refused_by_name(server: EmbeddedServer) -> None:
    with joined(server) as consumer:
        group = consumer.group_metadata()
        with (
            Producer(server.address) as plain,
            pytest.raises(errors.InvalidTxnState, match="transactional_id"),
        ):
            plain.send_offsets_to_transaction({PLACE: 1}, group)
        with writer(server) as producer:
            with pytest.raises(errors.InvalidTxnState, match="begin_transaction"):
                producer.send_offsets_to_transaction({PLACE: 1}, group)
            producer.begin_transaction()
            with pytest.raises(errors.InvalidOption, match="group_metadata"):
                producer.send_offsets_to_transaction({PLACE: 1}, "g")  # type: ignore[arg-type]
            with pytest.raises(errors.InvalidOption):
                producer.send_offsets_to_transaction({PLACE: -1}, group)
            producer.send_offsets_to_transaction({}, group)
            producer.send_offsets_to_transaction({PLACE: 2}, group)
            producer.commit_transaction()
            producer.begin_transaction()
            with pytest.raises(errors.TransactionAborted, match=r"NotPartitionOwner|UnknownTopic"):
                producer.send_offsets_to_transaction({TopicPartition("t2", 0): 1}, group)
            producer.abort_transaction()
            producer.begin_transaction()
            none = TopicPartition(PLACE.topic, 99)
            with pytest.raises(errors.TransactionAborted, match="UnknownTopicOrPartition"):
                producer.send_offsets_to_transaction({none: 1}, group, 20)
