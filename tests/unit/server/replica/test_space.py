"""L16: room for the appends of clients: what is refused, and when a directory counts as full."""

from __future__ import annotations

from typing import Any

from pk import errors
from pk.server.broker.free_space import SPACE_MS
from pk.server.broker.retention import TICK_MS
from pk.server.replica.space import FAILED_MS, ROOM_LEAST_BYTES, DirectorySpace
from pk.types import PartitionKey
from pk.world import StreamKind

MIB = 1 << 20
RESERVE = 100 * MIB


def space(reserve: int = RESERVE) -> tuple[DirectorySpace, list[int]]:
    changes: list[int] = []
    return DirectorySpace("/d1", reserve, lambda: changes.append(1)), changes


def test_below_the_reserve_clients_are_refused_and_told_why() -> None:
    room, changes = space()
    assert room.refusal(2**40) is None, "nothing was measured yet"
    assert not room.roomy
    room.measured(RESERVE + 10, 0)
    assert room.refusal(10) is None
    room.spend(1)
    assert room.refusal(9) is None
    refusal = room.refusal(10)
    assert isinstance(refusal, errors.StorageFull)
    assert "/d1" in refusal.message
    assert "disk_reserve_bytes" in refusal.message
    assert room.full
    assert len(changes) == 1, "the controller hears of it once"
    assert room.refusal(10) is not None
    assert len(changes) == 1


def test_a_full_directory_stays_full_until_it_has_twice_the_reserve() -> None:
    """replica/space D1; clients may append as soon as the reserve is free."""
    room, changes = space()
    room.measured(RESERVE - 1, 0)
    room.measured(2 * RESERVE - 1, 1)
    assert room.full
    assert not room.roomy
    assert room.refusal(10) is None
    room.measured(2 * RESERVE, 2)
    assert (room.full, room.roomy, len(changes)) == (False, True, 2)
    room.measured(2 * RESERVE - 1, 3)
    assert (room.full, room.roomy, len(changes)) == (False, False, 3), "it takes no leadership"


def test_an_append_without_room_counts_whatever_is_measured() -> None:
    """For example because of a quota."""
    room, _ = space()
    room.measured(2**40, 0)
    room.storage_full(1_000)
    room.measured(2**40, 1_000 + FAILED_MS - 1)
    assert room.full
    assert room.refusal(10) is None, "each append is tried"
    room.measured(2**40, 1_000 + FAILED_MS)
    assert not room.full


def test_without_a_reserve_a_new_leader_has_room_for_a_batch_at_least() -> None:
    room, _ = space(0)
    room.measured(0, 0)
    assert room.refusal(10) is None
    assert not room.full
    assert not room.roomy
    room.measured(2 * ROOM_LEAST_BYTES, 0)
    assert room.roomy


def code(answer: Any) -> int:
    return answer.error.code if answer.HasField("error") else 0


def reserve(rig: Any, free: int, kept: int) -> Any:
    """Return a partition whose directory has `free` bytes, of which `kept` are reserved."""
    rig.core.env.server["disk_reserve_bytes"] = kept
    partition = rig.partition()
    rig.storage.capacity = rig.storage.used_bytes() + free
    return partition


def test_the_reserve_binds_clients_before_the_disk_is_full(rig: Any, kit: Any) -> None:
    """No measurement runs between the frames: decided appends are subtracted."""
    partition = reserve(rig, 35_000, 20_000)
    scheduler = rig.core.scheduler
    raw = kit.batch(1, size=6_000)

    async def story() -> None:
        await rig.core.free_space.measure_all()
        stream = await rig.stream(StreamKind.PRODUCE)
        codes = []
        for turn in range(1, 6):
            await stream.send(kit.produce((0, raw), correlation_id=turn))
            codes += [code(each) for each in await kit.results(stream, 1)]
        assert codes == [0, 0, *[errors.StorageFull.code] * 3]
        assert rig.storage.free_bytes() > 20_000
        (said,) = rig.core.report.unfit()
        assert (said.reason, said.all, said.gives_up) == ("storage_full", True, True)
        scheduler.start()
        rig.storage.capacity = None
        await rig.mine.clock.sleep_ms(3 * TICK_MS)
        await stream.send(kit.produce((0, raw), correlation_id=6))
        (answer,) = await kit.results(stream, 1)
        assert (code(answer), answer.base_offset) == (0, 2)
        assert rig.core.report.unfit() == []
        await scheduler.close()

    rig.run(story)
    assert partition.log.written_end == 3


def test_what_is_written_while_free_space_is_measured_is_taken_off(rig: Any, kit: Any) -> None:
    """The measurement may be older than appends that were written before it ended."""
    partition = reserve(rig, 35_000, 20_000)
    raw = kit.batch(1, size=6_000)

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        read = rig.disk.read

        async def slow(work: Any) -> Any:
            found = work()
            for turn in (1, 2):
                await stream.send(kit.produce((0, raw), correlation_id=turn))
                assert [code(each) for each in await kit.results(stream, 1)] == [0]
            return found

        rig.disk.read = slow
        await rig.core.free_space.measure_all()
        rig.disk.read = read
        assert partition.writer.queued_bytes == 0
        await stream.send(kit.produce((0, raw), correlation_id=3))
        assert [code(each) for each in await kit.results(stream, 1)] == [errors.StorageFull.code]
        assert rig.storage.free_bytes() > 20_000

    rig.run(story)


def test_what_is_stored_already_is_answered_without_room(rig: Any, kit: Any) -> None:
    """L4: the duplicate of a stored batch is not appended again."""
    partition = reserve(rig, 100_000, 50_000)
    raw = kit.batch(1, producer_id=7, producer_epoch=0, base_sequence=0)
    following = kit.batch(1, producer_id=7, producer_epoch=0, base_sequence=1)

    async def story() -> None:
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, raw)))
        await kit.results(stream, 1)
        rig.storage.capacity = rig.storage.used_bytes() + 10
        await rig.core.free_space.measure_all()
        await stream.send(kit.produce((0, raw), (0, following), correlation_id=2))
        first, second = sorted(await kit.results(stream, 2), key=lambda each: each.index)
        assert (code(first), first.base_offset) == (0, 0)
        assert code(second) == errors.StorageFull.code

    rig.run(story)
    assert partition.log.written_end == 1


def test_a_full_directory_is_measured_at_every_tick_others_now_and_then(rig: Any) -> None:
    reserve(rig, 100_000, 50_000)
    scheduler, looks = rig.core.scheduler, [0]
    free = rig.storage.free_bytes

    def counted() -> int:
        looks[0] += 1
        found: int = free()
        return found

    rig.storage.free_bytes = counted

    async def story() -> None:
        scheduler.start()
        await rig.mine.clock.sleep_ms(10 * SPACE_MS)
        assert 8 <= looks[0] <= 11
        rig.storage.capacity = rig.storage.used_bytes()
        await rig.mine.clock.sleep_ms(2 * SPACE_MS)
        looks[0] = 0
        await rig.mine.clock.sleep_ms(10 * TICK_MS)
        assert 8 <= looks[0] <= 11
        await scheduler.close()

    rig.run(story)


def test_of_several_directories_only_the_full_one_gives_up(kit: Any, make_cluster: Any) -> None:
    """L16: the report names its partitions; a failed directory is not named, because it is
    offline.
    """
    cluster = make_cluster(5, disks=2, disk_reserve_bytes=50_000)
    cluster.start()
    ids = [cluster.do(cluster.create(name)) for name in ("one", "two")]
    core = cluster.broker.core
    homes = {key.topic_id: each.writer.disk.storage.root for key, each in core.partitions.items()}
    assert sorted(homes.values()) == ["d1", "d2"]
    cluster.storages["d2"].capacity = cluster.storages["d2"].used_bytes() + 60_000
    cluster.world.loop.run_for_ms(2 * SPACE_MS)
    (short,) = core.report.unfit()
    there = next(each for each in ids if homes[each] == "d2")
    assert [each.topic_id for each in short.replicas] == [there]
    assert (short.all, short.gives_up) == (False, False)
    cluster.storages["d2"].capacity = cluster.storages["d2"].used_bytes()
    cluster.world.loop.run_for_ms(2 * SPACE_MS)
    (full,) = core.report.unfit()
    assert (full.all, full.gives_up, len(full.replicas)) == (False, True, 1)
    cluster.storages["d2"].failed = errors.StorageFailed("gone")
    assert core.report.unfit() == []
    assert PartitionKey(there, 0) in core.partitions
    cluster.storages["d2"].failed = None
