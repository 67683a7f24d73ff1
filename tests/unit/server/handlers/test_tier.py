"""The broker's side of the tier protocol: rules P6, T1, T4, T6, T11."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from pk import errors
from pk.log.epochs import LeaderEpochs
from pk.server.metadata.image import LEASE_RESOURCE, MetadataImage
from pk.server.metadata.leases import EXCLUSIVE, Lease
from pk.server.metadata.records import record_of
from pk.server.tier.epoch_fence import agrees, went_on_without
from pk.types import EpochStart
from pk.wire import pk_pb2 as wire
from pk.world import StreamKind


async def produce(rig: Any, kit: Any, partition: int = 0) -> None:
    stream = await rig.stream(StreamKind.PRODUCE)
    await stream.send(kit.produce((partition, kit.batch())))
    await kit.results(stream, 1)
    stream.close()


async def poll(
    caller: Any, session: str, generation: int, wait_ms: int = 2_000
) -> wire.TierPartitionsReply:
    request = wire.TierPartitionsRequest(
        session_id=session, generation=generation, max_wait_ms=wait_ms
    )
    reply: wire.TierPartitionsReply = (
        await caller.call(request, timeout_ms=10_000)
    ).head.tier_partitions_reply
    return reply


def test_the_tier_hears_of_what_changed(rig: Any, kit: Any) -> None:
    one, _two = rig.partition(0, tiered=True), rig.partition(1, tiered=True)
    for partition in rig.core.partitions.values():
        rig.core.feed.restore(partition.key)
    plain = rig.partition(2)

    async def story() -> None:
        caller = rig.caller()
        first = await poll(caller, "", 0)
        assert first.full
        assert [(p.partition, p.ready, p.log_end) for p in first.partitions] == [
            (0, True, 0),
            (1, True, 0),
        ]
        waiting = asyncio.ensure_future(poll(caller, first.session_id, first.generation))
        await rig.mine.clock.sleep_ms(300)
        assert not waiting.done()
        await produce(rig, kit, 1)
        await produce(rig, kit, 2)
        second = await waiting
        assert not second.full
        assert [(p.partition, p.last_stable_offset) for p in second.partitions] == [(1, 3)]
        assert second.partitions[0].path == "d1/topics/t-1"
        assert second.partitions[0].configs["tier_file_bytes"]
        started = rig.mine.clock.monotonic_ms()
        assert not (await poll(caller, second.session_id, second.generation, 1_000)).partitions
        assert rig.mine.clock.monotonic_ms() - started >= 1_000
        await caller.close()

    rig.run(story)
    assert one.tiered
    assert not plain.tiered


def test_reports_move_what_may_be_dropped(rig: Any, kit: Any) -> None:
    partition = rig.partition(0, tiered=True, epoch=2)

    async def story() -> None:
        await produce(rig, kit)
        caller = rig.caller()

        async def report(**fields: int) -> None:
            request = wire.TierProgressRequest()
            request.partitions.add(topic_id=kit.topic_id, partition=0, **fields)
            await caller.call(request, timeout_ms=1_000)

        await report(leader_epoch=1, tiered_end=3, droppable_end=3)
        assert partition.tiered_end == 0  # another epoch's
        await report(leader_epoch=2, tiered_end=3, droppable_end=2)
        assert (partition.tiered_end, partition.log.droppable_end) == (3, 2)
        assert partition.key in rig.core.due.retain_now
        await report(leader_epoch=2, tiered_end=9, droppable_end=9)
        assert isinstance(partition.tier.problem, errors.TierTableChanged)
        assert partition.tiered_end == 3
        await caller.close()

    rig.run(story)


@pytest.mark.parametrize("life", ["old", "new"])
def test_a_deleted_topics_table_is_not_described_as_its_successors(
    rig: Any, monkeypatch: pytest.MonkeyPatch, life: str
) -> None:
    """A tier that led the old topic may not know yet that it leads the new one: Spark would read
    the old topic's rows (rule L8).
    """
    topic = SimpleNamespace(topic_id="new", partitions={0: None})
    told = wire.DescribeTierReply(topic="t", topic_id=life, uri=f"file:///t/{life}", version=7)

    async def describe(_name: str, _suspects: Any) -> wire.DescribeTierReply:
        return told

    follower = SimpleNamespace(
        image=SimpleNamespace(topic=lambda _name: topic),
        settings_of=lambda _name: {},
        is_tiered=lambda *_: True,
    )
    tier = SimpleNamespace(enabled=True, describe=describe)
    monkeypatch.setattr(rig.streams.tier, "_metadata", follower)
    monkeypatch.setattr(rig.streams.tier, "_tier", tier)
    request = wire.DescribeTierRequest(topic="t")
    reply = asyncio.run(rig.streams.tier.describe_tier(request))
    assert reply.topic_id == "new"
    known = life == "new"
    assert (reply.uri, reply.version) == ((told.uri, 7) if known else ("", -1))


def leased(token: int, holder: str = "job") -> MetadataImage:
    """Return an image with a topic whose lease has this token; 0 = there is no lease."""
    image = MetadataImage()
    image.apply(0, record_of(wire.TopicRecord(name="t", topic_id="id")))
    record = wire.ConfigRecord(
        resource_type=LEASE_RESOURCE, resource_name="id", name=EXCLUSIVE,
        value=Lease(token, holder, 5_000).text(),
    )  # fmt: skip
    if token:
        image.apply(token, record_of(record))
    image.offset = 9
    return image


@pytest.mark.parametrize(
    ("newest", "token", "refused"),
    [
        (7, 7, None),
        (7, 5, errors.LeaseHeld),
        (0, 7, errors.LeaseHeld),
        (7, 12, errors.BrokerUnavailable),
        (7, 0, errors.InvalidRequest),
    ],
)
def test_files_are_taken_with_the_newest_lease_only(
    rig: Any,
    monkeypatch: pytest.MonkeyPatch,
    newest: int,
    token: int,
    refused: type[errors.PkError] | None,
) -> None:
    """C5: a job whose lease was granted again hands over nothing."""
    taken = []

    async def commit(request: wire.CommitToTableRequest) -> wire.CommitToTableReply:
        taken.append(request)
        return wire.CommitToTableReply(version=4)

    monkeypatch.setattr(rig.streams.tier, "_metadata", SimpleNamespace(image=leased(newest)))
    monkeypatch.setattr(rig.streams.tier, "_tier", SimpleNamespace(enabled=True, commit=commit))
    request = wire.CommitToTableRequest(topic="t", topic_id="id", lease_token=token)
    if refused is not None:
        with pytest.raises(refused):
            asyncio.run(rig.streams.tier.commit_to_table(request))
    else:
        assert asyncio.run(rig.streams.tier.commit_to_table(request)).version == 4
    assert bool(taken) == (refused is None)


def test_files_of_a_deleted_topic_are_not_taken_by_its_successor(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The id of the hand-over counts, not the name (L8)."""
    monkeypatch.setattr(rig.streams.tier, "_metadata", SimpleNamespace(image=leased(7)))
    request = wire.CommitToTableRequest(topic="t", topic_id="old", lease_token=7)
    with pytest.raises(errors.UnknownTopicId):
        asyncio.run(rig.streams.tier.commit_to_table(request))


def test_the_tier_process_hears_of_a_lease(
    rig: Any, monkeypatch: pytest.MonkeyPatch, kit: Any
) -> None:
    """C5: its owner merges no files meanwhile, and refuses an older lease."""
    rig.partition(0, tiered=True)
    for partition in rig.core.partitions.values():
        rig.core.feed.restore(partition.key)

    async def story() -> None:
        caller = rig.caller()
        first = await poll(caller, "", 0)
        assert [each.lease_token for each in first.partitions] == [0]
        image = rig.streams.tier._metadata.image
        image.configs[(LEASE_RESOURCE, kit.topic_id)] = {EXCLUSIVE: Lease(7, "a", 5_000).text()}
        rig.core.replica_manager.lease_changed(kit.topic_id)
        second = await poll(caller, first.session_id, first.generation)
        assert [each.lease_token for each in second.partitions] == [7]
        await caller.close()

    rig.run(story)


def test_a_table_above_a_watermark_that_lags_is_no_problem(rig: Any, kit: Any) -> None:
    partition = rig.partition(0, tiered=True, replicas=(1, 2))

    async def story() -> None:
        producer = await rig.stream(StreamKind.PRODUCE)
        await producer.send(kit.produce((0, kit.batch()), acks=1))
        await kit.results(producer, 1)
        rig.lead(partition, 1, replicas=(1, 2))
        caller = rig.caller()
        request = wire.TierProgressRequest()
        request.partitions.add(
            topic_id=kit.topic_id, partition=0, leader_epoch=1, tiered_end=3, droppable_end=0
        )
        await caller.call(request, timeout_ms=1_000)
        assert (partition.tiered_end, partition.tier.problem) == (0, None)
        partition.leader.on_follower_end(2, 3)
        partition.watermark_moved()
        await caller.call(request, timeout_ms=1_000)
        assert partition.tiered_end == 3
        await caller.close()

    rig.run(story)


def test_offsets_for_times_ask_the_tier_below_the_local_start(rig: Any, kit: Any) -> None:
    """Rule T11: the answer is the same as before tiering."""
    partition = rig.partition(0, tiered=True, segment_bytes=14 * 1024)

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        for turn in range(3):
            raw = kit.batch(1, size=12_000, timestamp=1_735_689_600_000 + turn)
            await stream.send(kit.produce((0, raw), correlation_id=turn + 1))
        await kit.results(stream, 3)
        partition.log.tiered_end = partition.log.droppable_end = 2
        partition.log.drop_segments(partition.log.retention_plan(0)._replace(drop=(0,)))
        assert (partition.log.log_start, partition.log.local_log_start) == (0, 1)
        caller = rig.caller()

        async def ask(timestamp_ms: int) -> wire.OffsetAnswer:
            request = wire.ListOffsetsRequest(isolation=1)
            request.queries.add(
                topic_id=kit.topic_id, current_leader_epoch=-1, timestamp_ms=timestamp_ms
            )
            (answer,) = (
                await caller.call(request, timeout_ms=1_000)
            ).head.list_offsets_reply.answers
            return answer

        assert (await ask(1_735_689_600_000)).error.code == errors.TierUnavailable.code
        rig.tier.times = lambda at: wire.TierOffsetForTimeReply(
            offset=0, timestamp_ms=at, leader_epoch=0
        )
        assert (await ask(1_735_689_600_000)).offset == 0
        rig.tier.times = lambda at: wire.TierOffsetForTimeReply(
            offset=-1, timestamp_ms=-1, leader_epoch=-1
        )
        assert (await ask(1_735_689_600_002)).offset == 2
        rig.tier.times = lambda at: wire.TierOffsetForTimeReply(
            offset=1, timestamp_ms=at, leader_epoch=0
        )
        assert (await ask(1_735_689_600_001)).offset == 1  # both hold it
        assert (await ask(-1)).offset == 3
        assert (await ask(-4)).offset == 1
        assert (await ask(-5)).offset == 2
        await caller.close()

    rig.run(story)


@pytest.mark.parametrize(
    ("log_end", "epochs", "keeps"),
    [
        (10, [(3, 0)], True),
        (12, [(3, 0), (5, 10)], True),
        (9, [(3, 0)], False),  # shorter than the table
        (10, [(2, 0)], False),  # another epoch's records
        (12, [(3, 0), (4, 8)], False),
    ],
)
def test_tier_wins(log_end: int, epochs: list[tuple[int, int]], keeps: bool) -> None:
    """Rule T4: the local log stays only if it agrees with the table up to the table's end."""
    table = wire.TierClaimReply(exists=True, start=0, end=10, end_epoch=3)
    cache = LeaderEpochs([EpochStart(*entry) for entry in epochs])
    assert agrees(log_end, cache.epoch_of(table.end - 1), table) is keeps
    begun = {"exists": True, "start": 0, "end": 4, "end_epoch": 3}
    assert agrees(9, -1, wire.TierClaimReply(**begun), local_start=4), "begun at the table's end"
    assert not agrees(9, -1, wire.TierClaimReply(**begun), local_start=5)
    assert agrees(0, -1, wire.TierClaimReply(exists=False))
    assert agrees(0, -1, wire.TierClaimReply(exists=True))
    assert agrees(5, -1, wire.TierClaimReply(exists=True, start=4, end=4))
    assert not agrees(3, 3, wire.TierClaimReply(exists=True, start=4, end=4)), "given away before"
    assert agrees(9, -1, wire.TierClaimReply(**begun), local_start=5, log_start=5), "deleted (T9)"
    assert not agrees(9, -1, wire.TierClaimReply(**begun), local_start=5, log_start=3)


@pytest.mark.parametrize(
    ("log_epoch", "went_on"),
    [(4, True), (3, False), (2, False), (-1, False)],
)
def test_a_later_record_than_the_tables_last_one(log_epoch: int, went_on: bool) -> None:
    # rule T15
    table = wire.TierClaimReply(exists=True, start=0, end=10, end_epoch=3)
    assert went_on_without(log_epoch, table) is went_on


def test_retention_and_vacuum_are_asked_for_now(
    rig: Any, monkeypatch: pytest.MonkeyPatch, kit: Any
) -> None:
    asked = []

    async def vacuum(request: wire.TierNowRequest) -> wire.TierNowReply:
        asked.append(request.work)
        return wire.TierNowReply(files=5)

    partition = rig.partition(0, tiered=True)
    rig.partition(1)
    tier = rig.streams.tier

    def now(work: str, number: int = 0) -> wire.TierNowReply:
        request = wire.TierNowRequest(topic_id=kit.topic_id, partition=number, work=work)
        reply: wire.TierNowReply = asyncio.run(tier.tier_now(request))
        return reply

    monkeypatch.setattr(tier, "_tier", SimpleNamespace(enabled=True, vacuum=vacuum))
    tier._due.retain_now.clear()
    assert now("retention").log_start == partition.log.log_start
    assert list(tier._due.retain_now) == [partition.key]
    assert now("vacuum").files == 5
    assert asked == ["vacuum"]
    with pytest.raises(errors.InvalidRequest, match="no work of a tier"):
        now("polish")
    with pytest.raises(errors.InvalidRequest, match="has no tier"):
        now("retention", 1)
