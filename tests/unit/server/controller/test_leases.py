"""Leases of maintenance jobs: one holder, tokens that grow, liveness as soft state (rule C5)."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.client.maintenance_lease import lowest_holds, lowest_starts
from pk.server.controller import commands as c
from pk.server.controller.leases import RenewedLeases
from pk.server.metadata.image import MetadataImage
from pk.server.metadata.leases import check_token, lease_of
from pk.server.metadata.snapshot import rows_of
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import Bench


def bench_of() -> tuple[Bench, str]:
    bench = Bench()
    bench.up(1)
    bench.topic("t")
    topic = bench.image.topic("t")
    assert topic is not None
    return bench, topic.topic_id


def acquire(bench: Bench, holder: str, *live: str, **more: Any) -> wire.AcquireLeaseReply:
    fields: dict[str, Any] = {"topic": "t", "kind": "exclusive", "ttl_ms": 5_000, **more}
    request = wire.AcquireLeaseRequest(holder=holder, **fields)
    renewed = frozenset((each, request.kind) for each in live)
    reply: wire.AcquireLeaseReply = bench.do(c.AcquireLease(request, renewed))
    return reply


def test_another_holder_gets_the_lease_once_it_is_no_longer_renewed() -> None:
    bench, topic_id = bench_of()
    first = acquire(bench, "a")
    with pytest.raises(errors.LeaseHeld, match="a holds the lease of t"):
        acquire(bench, "b", topic_id)
    second = acquire(bench, "b")
    assert second.token > first.token
    with pytest.raises(errors.LeaseHeld):
        bench.do(c.RenewLease(wire.RenewLeaseRequest(topic_id=topic_id, token=first.token)))
    bench.do(c.RenewLease(wire.RenewLeaseRequest(topic_id=topic_id, token=second.token)))


def test_a_repeated_request_gets_the_same_lease() -> None:
    """The answer to the first request may have been lost."""
    bench, topic_id = bench_of()
    first = acquire(bench, "a")
    before = len(bench.log)
    assert acquire(bench, "a", topic_id).token == first.token
    assert len(bench.log) == before


def test_a_released_lease_is_no_record_and_its_token_is_refused() -> None:
    bench, topic_id = bench_of()
    token = acquire(bench, "a").token
    check_token(bench.image, topic_id, token)
    bench.do(c.ReleaseLease(wire.ReleaseLeaseRequest(topic_id=topic_id, token=token)))
    assert lease_of(bench.image, topic_id) is None
    with pytest.raises(errors.LeaseHeld):
        check_token(bench.image, topic_id, token)
    assert acquire(bench, "b", topic_id).token > token


def test_an_old_release_does_not_end_the_lease_of_another_job() -> None:
    bench, topic_id = bench_of()
    first = acquire(bench, "a").token
    second = acquire(bench, "b").token
    bench.do(c.ReleaseLease(wire.ReleaseLeaseRequest(topic_id=topic_id, token=first)))
    check_token(bench.image, topic_id, second)


def test_a_broker_that_does_not_know_the_grant_yet_is_asked_again() -> None:
    bench, topic_id = bench_of()
    with pytest.raises(errors.BrokerUnavailable):
        check_token(bench.image, topic_id, bench.image.offset + 1)


def test_a_snapshot_has_the_lease_and_a_deleted_topic_has_none() -> None:
    bench, topic_id = bench_of()
    lease = lease_of(bench.image, acquire(bench, "a").topic_id)
    again = MetadataImage()
    for offset, record in rows_of(bench.image):
        again.apply(offset, record)
    assert lease_of(again, topic_id) == lease is not None
    assert again.unknown_settings() == []
    bench.do(c.DeleteTopics(wire.DeleteTopicsRequest(names=["t"])))
    assert lease_of(bench.image, topic_id) is None


@pytest.mark.parametrize(
    ("holder", "more", "why"),
    [
        ("", {}, errors.InvalidRequest),
        ("x" * 201, {}, errors.InvalidRequest),
        ("a", {"ttl_ms": 999}, errors.InvalidRequest),
        ("a", {"ttl_ms": 3_600_001}, errors.InvalidRequest),
        ("a", {"kind": "shared"}, errors.InvalidRequest),
        ("a", {"topic": "none"}, errors.UnknownTopicOrPartition),
    ],
)
def test_bad_requests(holder: str, more: dict[str, Any], why: type[errors.PkError]) -> None:
    bench, _ = bench_of()
    with pytest.raises(why):
        acquire(bench, holder, **more)


def test_a_lease_lives_for_its_ttl_after_the_last_renewal() -> None:
    bench, topic_id = bench_of()
    token = acquire(bench, "a").token
    heard = RenewedLeases()
    heard.heard(topic_id, "exclusive", token, 1_000)
    assert heard.live(bench.image, 5_999) == {(topic_id, "exclusive")}
    heard.heard(topic_id, "exclusive", token, 5_000)
    assert heard.live(bench.image, 9_999) == {(topic_id, "exclusive")}
    assert heard.live(bench.image, 10_000) == frozenset()


def test_a_new_term_grants_one_more_ttl() -> None:
    """It has not heard the renewals that the term before answered."""
    bench, topic_id = bench_of()
    acquire(bench, "a")
    heard = RenewedLeases()
    assert heard.live(bench.image, 100_000) == {(topic_id, "exclusive")}
    assert heard.live(bench.image, 104_999) == {(topic_id, "exclusive")}
    assert heard.live(bench.image, 105_000) == frozenset()


def state(partition: int, start: int, replicas: list[int], **more: Any) -> wire.PartitionState:
    return wire.PartitionState(
        topic_id="t", partition=partition, local_log_start=start, replicas=replicas, **more
    )


def test_the_lowest_local_start_counts_every_assigned_replica() -> None:
    """C4: a tombstone ages only where no replica may have an older record."""
    views = {
        1: wire.DescribePartitionsReply(partitions=[state(0, 50, [1, 2]), state(1, 60, [1, 3])]),
        2: wire.DescribePartitionsReply(partitions=[state(0, 40, [1, 2]), state(2, 9, [2])]),
    }
    assert lowest_starts("t", views) == {0: 40, 1: 0, 2: 9}  # broker 3 does not answer
    views[2].partitions[1].error.code = 1
    assert lowest_starts("t", views)[2] == 0
    views[3] = wire.DescribePartitionsReply(partitions=[state(1, 70, [1, 3, 4])])
    assert lowest_starts("t", views)[1] == 0  # it knows of a replica that is being added
    assert lowest_starts("other", views) == {}


def test_a_job_knows_the_lowest_hold_of_each_partition_or_does_not_run() -> None:
    def view(*states: tuple[int, int, int | None]) -> wire.DescribePartitionsReply:
        reply = wire.DescribePartitionsReply()
        for partition, leader, hold in states:
            reply.partitions.add(
                topic_id="t", partition=partition, leader=leader, retention_hold=hold
            )
        return reply

    views = {1: view((0, 1, 40), (1, 2, None)), 2: view((0, 1, 30), (1, 2, None))}
    assert lowest_holds("t", views, [0, 1]) == {0: 30}
    for asked, missing in (([0, 1], {1: views[1]}), ([0, 1, 2], views)):
        with pytest.raises(errors.BrokerUnavailable, match="retention holds"):
            lowest_holds("t", missing, asked)
