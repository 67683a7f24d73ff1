"""The produce stream against a simulated disk and network: rules L2, L4, L5, L7, R6."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pk import errors, limits
from pk.server.replica.leader import Leader
from pk.transactional_ids import producer_id
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of
from pk.world import StreamKind


def code(result: wire.ProduceResult) -> int:
    return result.error.code if result.HasField("error") else 0


@pytest.mark.parametrize("acks", [1, -1])
@pytest.mark.parametrize("size", [10, 200_000])
def test_a_batch_is_answered_with_its_offsets(rig: Any, kit: Any, acks: int, size: int) -> None:
    partition = rig.partition()

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        for turn in range(3):
            await stream.send(
                kit.produce((0, kit.batch(size=size)), acks=acks, correlation_id=turn + 1)
            )
        answers = await kit.results(stream, 3)
        assert [(a.base_offset, a.last_offset) for a in answers] == [(0, 2), (3, 5), (6, 8)]
        assert partition.high_watermark == 9
        assert rig.manager.watermarks[partition.key] == 9
        stream.close()

    rig.run(story)


def test_nothing_is_visible_before_it_is_written(rig: Any, kit: Any) -> None:
    """No code path takes the log's end for the high watermark."""
    partition = rig.partition()

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(
            kit.produce(
                (0, kit.batch()),
            )
        )
        while partition.log.log_end == 0:
            await rig.mine.clock.sleep_ms(0.01)
        assert (
            partition.log.written_end,
            partition.high_watermark,
            partition.bound(0),
            partition.bound(1),
        ) == (0, 0, 0, 0)
        await kit.results(stream, 1)
        assert partition.bound(0) == 3

    rig.run(story)


def test_many_partitions_share_a_round(rig: Any, kit: Any) -> None:
    """Rule P2: one wake-up of the writer writes many partitions."""
    partitions = [rig.partition(number) for number in range(20)]

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce(*((number, kit.batch()) for number in range(20))))
        answers = await kit.results(stream, 20)
        assert sorted(a.index for a in answers) == list(range(20))
        assert partitions[0].writer.rounds <= 2
        assert partitions[0].writer.queued_bytes == 0

    rig.run(story)


def test_each_bad_entry_has_its_own_error(rig: Any, kit: Any) -> None:
    rig.partition(0)
    rig.partition(1, epoch=4)
    rig.partition(2, max_message_bytes=1024)
    good = kit.batch()
    corrupt = bytearray(good)
    corrupt[-1] ^= 1

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(
            kit.produce((0, bytes(corrupt)), (0, good), (2, kit.batch(500)), (9, good))
        )
        await stream.send(kit.produce((1, good), epoch=3, correlation_id=2))
        await stream.send(kit.produce((1, good), epoch=5, correlation_id=3))
        await stream.send(kit.produce((0, good), topic_id="x" * 36, correlation_id=4))
        answers = await kit.results(stream, 7)
        refused = [errors.CorruptBatch, errors.RecordTooLarge, errors.FencedLeaderEpoch]
        refused += [errors.UnknownLeaderEpoch, errors.UnknownTopicId, errors.UnknownTopicId]
        assert sorted(code(a) for a in answers) == sorted([0, *(kind.code for kind in refused)])

    rig.run(story)


def test_a_gap_is_told_once_all_in_sync_were_heard(
    rig: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule L6: until then the producer asks again, with the same epoch and sequence."""
    partition = rig.partition()
    later = kit.batch(producer_id=7, producer_epoch=1, base_sequence=5)
    known = kit.batch(producer_id=7, producer_epoch=1, base_sequence=0)
    older = kit.batch(producer_id=7, producer_epoch=0, base_sequence=0)

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        monkeypatch.setattr(Leader, "settled", False)
        await stream.send(kit.produce((0, later), (0, known), (0, older)))
        answers = sorted(await kit.results(stream, 3), key=lambda each: each.index)
        wait = errors.OffsetNotAvailable.code
        assert [code(each) for each in answers] == [wait, 0, wait]
        monkeypatch.setattr(Leader, "settled", True)
        await stream.send(kit.produce((0, later), (0, older), correlation_id=2))
        answers = sorted(await kit.results(stream, 2), key=lambda each: each.index)
        told = [errors.OutOfOrderSequence.code, errors.InvalidProducerEpoch.code]
        assert [code(each) for each in answers] == told
        assert partition.log.written_end == 3

    rig.run(story)


def test_a_duplicate_is_answered_with_its_original_never_before(rig: Any, kit: Any) -> None:
    # rule L4
    partition = rig.partition()
    raw = kit.batch(producer_id=7, producer_epoch=0, base_sequence=0)

    async def story() -> None:
        one, two = await rig.stream(StreamKind.PRODUCE), await rig.stream(StreamKind.PRODUCE)
        await one.send(kit.produce((0, raw)))
        while partition.log.log_end == 0:
            await rig.mine.clock.sleep_ms(0.01)
        await two.send(kit.produce((0, raw)))
        (first,), (second,) = await kit.results(one, 1), await kit.results(two, 1)
        assert (first.base_offset, second.base_offset) == (0, 0)
        assert partition.high_watermark == 3
        await two.send(kit.produce((0, raw), correlation_id=2))
        (third,) = await kit.results(two, 1)
        assert third.last_offset == 2
        assert partition.log.written_end == 3

    rig.run(story)


def test_acks_all_waits_for_the_followers_and_dies_with_the_epoch(rig: Any, kit: Any) -> None:
    """Rules L4, L5: a request that is parked in an epoch is answered NOT_LEADER_OR_FOLLOWER when
    the epoch ends.
    """
    partition = rig.partition(replicas=(1, 2))

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, kit.batch())))
        while not len(rig.core.purgatory):
            await rig.mine.clock.sleep_ms(1)
        assert partition.high_watermark == 0
        partition.leader.on_follower_end(2, 3)
        partition.watermark_moved()
        assert [code(a) for a in await kit.results(stream, 1)] == [0]
        await stream.send(kit.produce((0, kit.batch()), correlation_id=2))
        while not len(rig.core.purgatory):
            await rig.mine.clock.sleep_ms(1)
        rig.lead(partition, 1, replicas=(1, 2))
        (parked,) = await kit.results(stream, 1)
        assert code(parked) == errors.NotLeaderOrFollower.code
        partition.step_down(2)
        await stream.send(kit.produce((0, kit.batch()), correlation_id=3))
        (refused,) = await kit.results(stream, 1)
        assert code(refused) == errors.NotLeaderOrFollower.code
        appended = ["appended" in each.error.details for each in (parked, refused)]
        assert appended == [True, False], "its producer must know which of them may be stored"

    rig.run(story)


@pytest.mark.parametrize("offline", [False, True])
def test_what_is_being_written_when_leadership_goes_was_not_refused(
    rig: Any, kit: Any, offline: bool
) -> None:
    """Rule L7: after NOT_LEADER a producer without acks=all would send the batch again, and store
    it twice.
    """
    partition = rig.partition(replicas=(1, 2))

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, kit.batch()), acks=1))
        while partition.log.log_end == 0:
            await rig.mine.clock.sleep_ms(0.01)
        assert partition.log.written_end == 0
        if offline:
            partition.fail(errors.StorageFailed("d1 is gone"))
        else:
            partition.step_down(2)
        assert [code(a) for a in await kit.results(stream, 1)] == [errors.OutcomeUnknown.code]
        await partition.writer.idle()
        assert partition.log.written_end == 3, "it was stored"

    rig.run(story)


def test_a_parked_reply_times_out(rig: Any, kit: Any) -> None:
    rig.partition(replicas=(1, 2))

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, kit.batch()), timeout_ms=200))
        assert [code(a) for a in await kit.results(stream, 1)] == [errors.RequestTimedOut.code]
        assert 200 <= rig.mine.clock.monotonic_ms() < 300

    rig.run(story)


def test_too_few_in_sync_replicas(rig: Any, kit: Any) -> None:
    partition = rig.partition(replicas=(1, 2), min_insync_replicas=2)
    partition.leader.isr = (1,)

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, kit.batch())))
        assert [code(a) for a in await kit.results(stream, 1)] == [errors.NotEnoughReplicas.code]
        assert partition.log.log_end == 0

    rig.run(story)


def test_without_the_controller_only_acks_all(rig: Any, kit: Any) -> None:
    # rule R6
    rig.partition()
    rig.contact = False

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, kit.batch()), acks=1))
        await stream.send(kit.produce((0, kit.batch()), acks=-1, correlation_id=2))
        assert sorted([code(a) for a in await kit.results(stream, 2)]) == [
            0,
            errors.ControllerUnavailable.code,
        ]

    rig.run(story)


def test_acks_0_is_appended_and_never_answered(rig: Any, kit: Any) -> None:
    partition = rig.partition()

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        for _ in range(10):
            await stream.send(kit.produce((0, kit.batch()), acks=0))
        await stream.send(kit.produce((0, kit.batch()), acks=1, correlation_id=5))
        (answer,) = await kit.results(stream, 1)
        assert answer.base_offset == 30
        assert partition.log.written_end == 33

    rig.run(story)


def test_a_full_disk_refuses_and_serves_again_by_itself(rig: Any, kit: Any) -> None:
    """Rule L2: no part of the batch is stored; the same stream continues once there is space."""
    partition = rig.partition()

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, kit.batch())))
        await kit.results(stream, 1)
        rig.storage.capacity = rig.storage.used_bytes() + 50
        await stream.send(kit.produce((0, kit.batch()), (0, kit.batch()), correlation_id=2))
        answers = await kit.results(stream, 2)
        assert [code(a) for a in answers] == [errors.StorageFull.code] * 2
        assert (partition.log.written_end, partition.high_watermark) == (3, 3)
        rig.storage.capacity = None
        await stream.send(kit.produce((0, kit.batch()), correlation_id=3))
        (answer,) = await kit.results(stream, 1)
        assert (code(answer), answer.base_offset) == (0, 3)
        assert partition.writer.queued_bytes == 0

    rig.run(story)


def test_a_dead_directory_takes_its_partitions_offline_typed(rig: Any, kit: Any) -> None:
    # rule L2
    one, two = rig.partition(0), rig.partition(1)

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        rig.storage.fault = lambda operation, path: (
            OSError("I/O") if operation == "append" else None
        )
        await stream.send(kit.produce((0, kit.batch())))
        assert [code(a) for a in await kit.results(stream, 1)] == [errors.StorageFailed.code]
        assert isinstance(one.hosted.cause, errors.StorageFailed)
        assert isinstance(two.hosted.cause, errors.StorageFailed)

    rig.run(story)


def test_sizes_that_do_not_add_up_end_the_stream(rig: Any, kit: Any) -> None:
    rig.partition()

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        request = wire.ProduceRequest(acks=-1)
        request.partitions.add(topic_id=kit.topic_id, batch_bytes=1_000)
        await stream.send(frames.encode(head_of(request, correlation_id=1), [b"short"]))
        with pytest.raises(errors.CorruptBatch):
            await kit.results(stream, 1)
        assert await stream.recv() is None

    rig.run(story)


def test_a_broken_stream_cancels_what_is_queued_not_what_is_appended(rig: Any, kit: Any) -> None:
    # rule L7
    partition = rig.partition(replicas=(1, 2))

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, kit.batch())))
        while not len(rig.core.purgatory):
            await rig.mine.clock.sleep_ms(1)
        rig.world.network.break_streams("client", "broker")
        await rig.mine.clock.sleep_ms(50)
        assert len(rig.core.purgatory) == 0
        assert partition.log.written_end == 3

    rig.run(story)


def test_a_slow_disk_stops_the_reading_of_the_socket(rig: Any, kit: Any) -> None:
    """The write queue is bounded; further batches stay with the producer."""
    partition = rig.partition()
    partition.writer._bytes_max = 300_000
    rig.disk._write_ms = (100.0, 100.0)
    raw = kit.batch(1, size=100_000)

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)

        async def send() -> None:
            for turn in range(60):
                await stream.send(kit.produce((0, raw), correlation_id=turn + 1))

        sender = rig.world.spawn("client", send())
        most = 0
        for _ in range(100):
            await rig.mine.clock.sleep_ms(5)
            most = max(most, partition.writer.queued_bytes)
        assert 300_000 <= most <= 300_000 + 2 * len(raw)
        assert not sender.done()
        answers = await kit.results(stream, 60)
        assert [a.base_offset for a in answers] == list(range(60))
        assert limits.PRODUCE_FRAMES_QUEUED_MAX < 60

    rig.run(story)


def test_what_a_stream_that_was_given_up_still_holds_is_not_decided_any_more(
    rig: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule L6: the producer learns on its newer stream that a batch is not stored, and sends it
    again in another epoch.  A batch that is still being validated on the old stream must not be
    appended in between.
    """
    first, other = rig.partition(0), rig.partition(1)
    checked, compute = asyncio.Event(), rig.disk.compute

    async def slowly(work: Any) -> Any:
        await checked.wait()
        return await compute(work)

    monkeypatch.setattr(rig.disk, "compute", slowly)
    given_up = kit.batch(producer_id=7, producer_epoch=0, base_sequence=3)
    asked_for = kit.batch(producer_id=7, producer_epoch=0, base_sequence=6)
    anew = kit.batch(producer_id=7, producer_epoch=1, base_sequence=0)
    large = kit.batch(3, size=limits.MIB, producer_id=7, producer_epoch=0, base_sequence=0)

    async def story() -> None:
        old = await rig.stream(StreamKind.PRODUCE)
        begun = kit.batch(producer_id=7, producer_epoch=0, base_sequence=0)
        await old.send(kit.produce((0, begun)))
        await kit.results(old, 1)
        await old.send(kit.produce((0, given_up), (0, asked_for), (1, large), correlation_id=2))
        await rig.mine.clock.sleep_ms(50)
        old.close()
        new = await rig.stream(StreamKind.PRODUCE)
        await new.send(kit.produce((0, asked_for)))
        (answer,) = await kit.results(new, 1)
        assert code(answer) == errors.OutOfOrderSequence.code
        checked.set()
        await rig.mine.clock.sleep_ms(50)
        await new.send(kit.produce((0, anew), correlation_id=2))
        (answer,) = await kit.results(new, 1)
        assert (code(answer), answer.base_offset) == (0, 3)
        assert (first.log.written_end, other.log.written_end) == (6, 0)
        new.close()
        await rig.mine.clock.sleep_ms(50)
        assert not rig.streams.producers.speakers

    rig.run(story)


@pytest.mark.parametrize("heard", [True, False], ids=["heard before", "never heard"])
def test_an_older_stream_does_not_silence_a_newer_one(rig: Any, kit: Any, heard: bool) -> None:
    partition = rig.partition()

    def batch(sequence: int) -> bytes:
        return kit.batch(producer_id=7, producer_epoch=0, base_sequence=sequence)

    async def story() -> None:
        old, new = await rig.stream(StreamKind.PRODUCE), await rig.stream(StreamKind.PRODUCE)
        for stream, sequence in [(old, 0)] * heard + [(new, 3 * heard)]:
            await stream.send(kit.produce((0, batch(sequence))))
            await kit.results(stream, 1)
        end = partition.log.written_end
        await old.send(kit.produce((0, batch(end)), correlation_id=2))
        (answer,) = await kit.results(old, 1)
        assert code(answer) == errors.BrokerUnavailable.code
        await new.send(kit.produce((0, batch(end)), correlation_id=2))
        (answer,) = await kit.results(new, 1)
        assert (code(answer), answer.base_offset) == (0, end)

    rig.run(story)


def test_a_producer_id_of_transactions_may_pass_from_stream_to_stream(rig: Any, kit: Any) -> None:
    """Rule X5: the producer ids of a job pass between tasks.  Each pair has its newest stream.

    The leader refuses the plain batches of this test (X3), but only after it has heard their pair.
    """
    rig.partition()
    first, second = producer_id(0, 1, 1), producer_id(0, 1, 2)

    async def story() -> None:
        streams = [await rig.stream(StreamKind.PRODUCE) for _ in range(2)]

        async def heard(stream: int, number: int, epoch: int) -> bool:
            raw = kit.batch(producer_id=number, producer_epoch=epoch, base_sequence=0)
            await streams[stream].send(kit.produce((0, raw)))
            (answer,) = await kit.results(streams[stream], 1)
            if code(answer) == errors.BrokerUnavailable.code:
                return False
            assert code(answer) == errors.InvalidRecord.code
            return True

        assert await heard(1, first, 0)
        assert await heard(0, second, 0)
        # the tasks of the next batch have each other's producer ids
        assert await heard(0, first, 1)
        assert await heard(1, second, 1)
        # one pair on two streams: the newer one counts
        assert await heard(0, first, 2)
        assert await heard(1, first, 2)
        assert not await heard(0, first, 2)
        assert await heard(0, second, 3), "the older stream may have another pair"
        for stream in streams:
            stream.close()
        await rig.mine.clock.sleep_ms(50)
        assert not rig.streams.producers.speakers

    rig.run(story)


def test_what_a_dying_disk_had_taken_is_not_said_to_be_refused(rig: Any, kit: Any) -> None:
    """Rules L2, L5: the batch was written and could not be synced; the next start finds it."""
    rig.partition(flush_on_ack="true")

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        rig.storage.fault = lambda operation, path: (
            OSError("I/O") if operation == "sync" and path.endswith(".log") else None
        )
        answers = []
        for turn in (1, 2):  # while it is written; and when the partition is offline already
            await stream.send(kit.produce((0, kit.batch()), correlation_id=turn))
            answers += await kit.results(stream, 1)
        assert [code(a) for a in answers] == [errors.StorageFailed.code] * 2
        assert ["appended" in a.error.details for a in answers] == [True, False]

    rig.run(story)
    rig.storage.fault = rig.storage.failed = None
    rig.forget_partitions()
    assert rig.partition().log.written_end == 3


def test_what_a_full_disk_took_before_it_could_not_roll_is_not_said_to_be_refused(
    rig: Any, kit: Any
) -> None:
    """Rule L2: the next append cuts the batch off; if the process dies before that, the batch stays
    stored.
    """
    partition = rig.partition(segment_bytes=14 * 1024)
    first, second = kit.batch(1, size=12_000), kit.batch(1, size=12_000)

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)

        def full(operation: str, path: str) -> Exception | None:
            return errors.StorageFull("full") if path.endswith("1.log") else None

        rig.storage.fault = full
        await stream.send(kit.produce((0, first), (0, second)))
        answers = await kit.results(stream, 2)
        assert [code(a) for a in answers] == [errors.StorageFull.code] * 2
        assert all("appended" in a.error.details for a in answers)
        assert partition.log.written_end == 0

    rig.run(story)
    rig.storage.fault = None
    rig.forget_partitions()
    assert rig.partition().log.written_end == 1
