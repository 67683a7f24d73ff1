"""Queries hold retention at the brokers (broker/hold_keeper, groups/hold_reports; rule S1)."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.group_ids import TOPIC
from pk.server.handlers.coordinators import GROUP
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire

ID = "query"
SETTINGS = {"log_retention_check_interval_ms": 500, "hold_grace_ms": 8_000}
#: Every batch is a segment, which expires at once.
SHORT = {
    "segment_bytes": "14336", "retention_ms": "500", "segment_ms": "100",
    "file_delete_delay_ms": "0",
}  # fmt: skip


class Query:
    """A streaming query that publishes its progress in partition 0 of a topic."""

    def __init__(self, cluster: Any, topic_id: str, *, holds: bool = True, run: str = "r") -> None:
        self.caller = cluster.caller()
        self.topic_id = topic_id
        self.holds, self.run, self.first = holds, run, True

    async def ask(self, request: Any) -> Any:
        while True:
            try:
                frame = await self.caller.call(request, timeout_ms=20_000)
                return getattr(frame.head, frame.head.WhichOneof("body"))
            except (errors.CoordinatorLoading, errors.NotCoordinator):
                find = wire.FindCoordinatorRequest(key=ID, key_type=GROUP)
                await self.caller.call(find, timeout_ms=20_000)

    async def says(self, offset: int) -> None:
        """One commit of the query."""
        request = wire.OffsetCommitRequest(
            member=wire.GroupMember(group_id=ID, generation=NONE),
            query=wire.QueryRun(run_id=self.run, first=self.first, holds_retention=self.holds),
        )
        self.first = False
        request.topics.add(topic_id=self.topic_id, partitions=[0], offsets=[offset])
        reply = await self.ask(request)
        assert not reply.refused

    async def described(self) -> wire.DescribedGroup:
        (found,) = (await self.ask(wire.DescribeGroupsRequest(group_ids=[ID]))).groups
        return found  # type: ignore[no-any-return]


async def produce(cluster: Any, kit: Any, topic_id: str, count: int) -> list[int]:
    """Write so many segments; return the offsets at which they begin."""
    found = []
    for _ in range(count):
        found += await cluster.produce(kit, topic_id, 1)
        await cluster.client.clock.sleep_ms(200)
    return found


def log_of(cluster: Any, topic_id: str) -> Any:
    return cluster.broker.core.partitions[PartitionKey(topic_id, 0)].log


def fallen(cluster: Any) -> int:
    core = cluster.broker.core
    return int(core.env.metrics.retention_holds_fallen._value.get())


def test_rows_that_a_query_holds_do_not_expire(make_cluster: Any, kit: Any) -> None:
    """They go when the query has gone on, or has given its hold up."""
    cluster = make_cluster(**SETTINGS)
    cluster.start()
    clock = cluster.client.clock

    async def story() -> None:
        topic_id = await cluster.create("t", **SHORT)
        query = Query(cluster, topic_id)
        await query.says(0)
        await clock.sleep_ms(10_000)  # the hold is known
        bases = await produce(cluster, kit, topic_id, 6)
        await clock.sleep_ms(20_000)
        log = log_of(cluster, topic_id)
        assert (log.log_start, log.retention_hold) == (0, 0)
        await query.says(bases[3])
        await clock.sleep_ms(10_000)
        assert (log.log_start, log.retention_hold) == (bases[3], bases[3])
        assert cluster.broker.core.env.metrics.retention_holds._value.get() == 1
        describe = wire.DescribePartitionsRequest(topics=["t"])
        (state,) = (await query.ask(describe)).partitions
        assert state.retention_hold == bases[3]
        assert (await query.described()).holds_retention
        again = Query(cluster, topic_id, holds=False, run="r2")  # the option was removed
        await again.says(bases[3])
        await clock.sleep_ms(10_000)
        assert log.log_start > bases[5]
        assert log.retention_hold is None
        assert not (await again.described()).holds_retention
        await query.caller.close()
        await again.caller.close()

    cluster.do(story())
    assert fallen(cluster) == 0


@pytest.mark.parametrize("bound", ["hold_max_ms", "hold_max_bytes"])
def test_a_hold_falls_at_its_bound(make_cluster: Any, kit: Any, bound: str) -> None:
    given = {"hold_max_ms": 30_000} if bound == "hold_max_ms" else {"hold_max_bytes": 1_500}
    cluster = make_cluster(**SETTINGS, **given)
    cluster.start()
    clock = cluster.client.clock

    async def story() -> None:
        topic_id = await cluster.create("t", **SHORT)
        query = Query(cluster, topic_id)
        await query.says(0)
        await clock.sleep_ms(10_000)
        await produce(cluster, kit, topic_id, 3)
        await clock.sleep_ms(10_000)
        log = log_of(cluster, topic_id)
        assert log.log_start == 0
        if bound == "hold_max_ms":
            await clock.sleep_ms(20_000)
        else:
            size = log.size_bytes // 3
            assert size * 3 < 1_500
            await produce(cluster, kit, topic_id, 1_500 // size + 1)
            await clock.sleep_ms(10_000)
        assert log.log_start > 0
        assert fallen(cluster) == 1
        (said,) = (await query.described()).fallen
        assert (said.topic_id, said.partition) == (topic_id, 0)
        assert bound in said.why
        await query.says(log.log_start)  # the query lives
        await clock.sleep_ms(10_000)
        assert log.retention_hold == log.log_start
        assert not (await query.described()).fallen
        await query.caller.close()

    cluster.do(story())


def test_a_broker_that_starts_again_lets_nothing_expire_before_it_knows_the_holds(
    make_cluster: Any, kit: Any
) -> None:
    """replica/retention_holds H1: for the time of the grace, if no coordinator reports."""
    cluster = make_cluster(**SETTINGS)
    cluster.start()
    clock = cluster.client.clock

    async def before() -> str:
        topic_id = await cluster.create("t", **SHORT)
        query = Query(cluster, topic_id)
        await query.says(0)
        await clock.sleep_ms(10_000)
        await produce(cluster, kit, topic_id, 3)
        await query.caller.close()
        return topic_id

    topic_id = cluster.do(before())
    cluster.kill("broker", "d1")
    cluster.start_broker()

    async def after() -> None:
        await clock.sleep_ms(4_000)
        log = log_of(cluster, topic_id)
        reports = cluster.broker.core.hold_reports
        assert log.retention_hold == 0
        await clock.sleep_ms(20_000)
        assert (log.log_start, log.retention_hold) == (0, 0)
        await reports.close()
        cluster.broker.core.holds._holds._leases.clear()  # as if they had been given up
        await clock.sleep_ms(2_000)
        assert log.log_start > 0

    cluster.do(after())


def test_a_deletion_by_hand_passes_a_hold_and_says_whose(make_cluster: Any, kit: Any) -> None:
    cluster = make_cluster(**SETTINGS)
    cluster.start()
    clock = cluster.client.clock

    async def story() -> None:
        topic_id = await cluster.create("t", **SHORT)
        query = Query(cluster, topic_id)
        await query.says(0)
        await clock.sleep_ms(10_000)
        bases = await produce(cluster, kit, topic_id, 3)
        request = wire.DeleteRecordsRequest()
        request.items.add(topic_id=topic_id, partition=0, before_offset=bases[1])
        (result,) = (await query.ask(request)).results
        assert (result.log_start, list(result.holds)) == (bases[1], [ID])
        await clock.sleep_ms(10_000)
        assert log_of(cluster, topic_id).log_start == bases[1], "what it has not passed is held"
        await query.caller.close()

    cluster.do(story())


def test_only_brokers_report_and_a_deposed_coordinator_does_not(
    make_cluster: Any, kit: Any
) -> None:
    cluster = make_cluster(**SETTINGS)
    cluster.start()
    clock = cluster.client.clock

    async def story() -> None:
        topic_id = await cluster.create("t", **SHORT)
        query = Query(cluster, topic_id)
        await query.says(0)
        await clock.sleep_ms(10_000)
        await produce(cluster, kit, topic_id, 3)
        keeper = cluster.broker.core.holds
        request = wire.ReportHoldsRequest()
        with pytest.raises(errors.InvalidRequest, match="between brokers"):
            await query.caller.call(request, timeout_ms=5_000)
        await cluster.broker.core.hold_reports.close()
        image = cluster.broker.core.metadata.image
        epochs = {n: each.leader_epoch for n, each in image.topic(TOPIC).partitions.items()}
        for number, epoch in epochs.items():
            request.coordinators.add(coordinator_partition=number, leader_epoch=epoch - 1)
        keeper.report(request)
        await clock.sleep_ms(2_000)
        log = log_of(cluster, topic_id)
        assert log.log_start == 0
        request.coordinators.add(coordinator_partition=99)
        with pytest.raises(errors.InvalidRequest, match="partition 99"):
            keeper.report(request)
        del request.coordinators[:]
        for number, epoch in epochs.items():
            request.coordinators.add(coordinator_partition=number, leader_epoch=epoch)
        keeper.report(request)
        await clock.sleep_ms(2_000)
        assert log.log_start > 0
        bad = request.coordinators[0].groups.add(group_id="x").topics.add(topic_id=topic_id)
        bad.partitions.append(0)
        with pytest.raises(errors.InvalidRequest, match="lists"):
            keeper.report(request)
        await query.caller.close()

    cluster.do(story())
