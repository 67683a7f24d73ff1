"""The log of a coordinator over a led partition, with its host, on simulated disks."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from pk import errors
from pk.effects import Decision
from pk.log import batch
from pk.log.control_rows import Marker
from pk.log.encoding import encode_lists
from pk.log.plan import Now
from pk.server.metadata.image import PartitionState
from pk.server.replica import replay_log
from pk.server.replica.markers import write_markers
from pk.server.replica.replay_log import PartitionReplayLog, ProducerStamp
from pk.server.runtime.replayed_host import ReplayedHost
from pk.transactional_ids import producer_id
from pk.types import NONE

Row = tuple[str, int | None]  #: a key, and its number; None = a tombstone


def encode(row: Row) -> tuple[bytes, bytes | None]:
    key, number = row
    return key.encode(), None if number is None else str(number).encode()


def decode(key: bytes | None, value: bytes | None) -> Row:
    assert key is not None
    return key.decode(), None if value is None else int(value)


class Table:
    """A machine of numbers by key: a row is appended, "?" reads the table."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.offsets: list[int] = []

    def decide(self, command: Any, now_ms: int) -> Decision[Row]:
        if command == "?":
            return Decision([], dict(self.rows))
        return Decision(list(command), len(self.offsets) + len(command))

    def apply(self, offset: int, record: Row) -> None:
        self.offsets.append(offset)
        key, number = record
        if number is None:
            self.rows.pop(key, None)
        else:
            self.rows[key] = number


Host = ReplayedHost[Any, Row]


def log_of(rig: Any, partition: Any, epoch: int = 0) -> PartitionReplayLog[Row]:
    return PartitionReplayLog(partition, epoch, rig.mine.clock, encode, decode)


def host_of(rig: Any, log: PartitionReplayLog[Row], fatal: list[BaseException]) -> Host:
    return ReplayedHost(
        Table, log, rig.mine.clock, on_fatal=fatal.append,
        unavailable=errors.CoordinatorUnavailable,
    )  # fmt: skip


async def confirm(rig: Any, partition: Any, end: int) -> None:
    """Let broker 2 confirm everything below `end`, once it is written here."""
    while partition.log.written_end < end:
        await rig.mine.clock.sleep_ms(1)
    if partition.leader.on_follower_end(2, end):
        partition.watermark_moved()


def test_a_host_serves_what_an_earlier_one_left(rig: Any) -> None:
    """Rows come back with their offsets, tombstones and batches of several rows included."""
    partition = rig.partition()

    async def story() -> None:
        host = host_of(rig, log_of(rig, partition), [])
        await host.start()
        assert await host.ask([("a", 1), ("b", 2)]) == 2
        await asyncio.gather(*(host.ask([(f"k{n}", n)]) for n in range(5)))
        await host.ask([("a", None)])
        assert partition.log.log_end == 8
        await host.close()
        again = host_of(rig, log_of(rig, partition), [])
        await again.start()
        assert await again.ask("?") == {"b": 2} | {f"k{n}": n for n in range(5)}
        replayed: Any = again.machine
        assert replayed.offsets == list(range(8))
        await again.close()

    rig.run(story)


def batches_of(partition: Any) -> list[tuple[int, int, bool]]:
    """Return (first offset, rows, whether transactional) of each batch of the log."""
    raw = partition.log.read(0, bound=partition.log.written_end, max_bytes=1 << 20).data
    return [
        (header.base_offset, header.record_count, header.transactional)
        for header, _ in batch.iter_batches(raw)
    ]


@pytest.mark.parametrize(
    ("gather_bytes", "expected"),
    [
        (1_000, [(0, 5, False)]),
        (6, [(0, 3, False), (3, 2, False)]),  # two bytes a row
        (1, [(n, 1, False) for n in range(5)]),
    ],
)
def test_the_records_of_a_round_are_one_batch_within_a_bound(
    rig: Any, monkeypatch: pytest.MonkeyPatch, gather_bytes: int, expected: Any
) -> None:
    """replica/replay_log J6: and each command has its own offsets at once."""
    monkeypatch.setattr(replay_log, "GATHER_BYTES", gather_bytes)
    partition = rig.partition()

    async def story() -> None:
        host = host_of(rig, log_of(rig, partition), [])
        await host.start()
        found = await asyncio.gather(*(host.ask([(f"{n}", n)]) for n in range(5)))
        assert found == [1, 2, 3, 4, 5]
        assert batches_of(partition) == expected
        machine: Any = host.machine
        assert machine.offsets == list(range(5))
        await host.close()
        again = host_of(rig, log_of(rig, partition), [])
        await again.start()
        assert await again.ask("?") == {f"{n}": n for n in range(5)}
        await again.close()

    rig.run(story)


def test_records_of_transactions_are_batches_of_their_own(rig: Any) -> None:
    """replica/replay_log J6: the records of a round keep their order."""
    partition = rig.partition()

    async def story() -> None:
        host = host_of(rig, transactional(rig, partition), [])
        await host.start()
        rows = [[("a", 1)], [("b", 2)], [("c", 1_000)], [("d", 4)]]
        await asyncio.gather(*(host.ask(each) for each in rows))
        assert batches_of(partition) == [(0, 2, False), (2, 1, True), (3, 1, False)]
        machine: Any = host.machine
        assert machine.offsets == [0, 1, 2, 3]
        await host.close()

    rig.run(story)


def test_a_round_whose_write_fails_leaves_nothing(rig: Any) -> None:
    """runtime/replayed_host H4: all its commands fail, and what comes after begins there."""
    partition = rig.partition()

    async def story() -> None:
        host = host_of(rig, log_of(rig, partition), [])
        await host.start()
        await host.ask([("a", 1)])
        rig.storage.fault = lambda operation, path: (
            errors.StorageFull("full") if operation != "read" else None
        )
        failed = await asyncio.gather(
            *(host.ask([(f"{n}", n)]) for n in range(3)), return_exceptions=True
        )
        assert [type(each) for each in failed] == [errors.StorageFull] * 3
        rig.storage.fault = None
        await rig.mine.clock.sleep_ms(replay_log.FULL_MS)
        await host.ask([("c", 4)])
        assert await host.ask("?") == {"a": 1, "c": 4}
        assert batches_of(partition) == [(0, 1, False), (1, 1, False)]
        await host.close()

    rig.run(story)


def test_a_replay_goes_on_when_there_is_a_descriptor_again(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """log/storage D2: a lack of descriptors passes, and must not end a coordinator."""
    partition = rig.partition()
    refusals = [errors.StorageFull("too many open files")] * 3
    read = replay_log._read_rows

    def scarce(*given: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return read(*given)

    async def story() -> None:
        host = host_of(rig, log_of(rig, partition), [])
        await host.start()
        await host.ask([("a", 1), ("b", 2)])
        await host.close()
        monkeypatch.setattr(replay_log, "_read_rows", scarce)
        again = host_of(rig, log_of(rig, partition), [])
        await again.start()
        assert not refusals
        assert await again.ask("?") == {"a": 1, "b": 2}
        await again.close()

    rig.run(story)


def test_a_reply_waits_for_the_high_watermark(rig: Any) -> None:
    """replica/replay_log J2: also a read, and also when the batch has left the purgatory."""
    partition = rig.partition(replicas=(1, 2))

    async def story() -> None:
        fatal: list[BaseException] = []
        host = host_of(rig, log_of(rig, partition), fatal)
        await host.start()
        loop = asyncio.get_running_loop()
        asks = [loop.create_task(host.ask(each)) for each in ([("a", 1)], "?")]
        await rig.mine.clock.sleep_ms(2 * replay_log.PARKED_MS)
        assert partition.log.written_end == 1
        assert not len(rig.core.purgatory)
        assert not any(each.done() for each in asks)
        await confirm(rig, partition, 1)
        assert await asyncio.gather(*asks) == [1, {"a": 1}]
        assert not fatal
        await host.close()

    rig.run(story)


def test_records_of_an_earlier_leader_are_committed_before_the_first_reply(rig: Any) -> None:
    """replica/replay_log J2: the new leader's high watermark has not reached them yet."""
    partition = rig.partition(replicas=(1, 2))

    async def story() -> None:
        first = host_of(rig, log_of(rig, partition), [])
        await first.start()
        lost = asyncio.get_running_loop().create_task(first.ask([("a", 1)]))
        while partition.log.log_end < 1:
            await rig.mine.clock.sleep_ms(0)
        assert partition.log.written_end == 0, "the replay must wait for the write"
        rig.lead(partition, 1, replicas=(1, 2), partition_epoch=1)
        with pytest.raises(errors.NotLeaderOrFollower):
            await lost
        host = host_of(rig, log_of(rig, partition, 1), [])
        await host.start()
        read = asyncio.get_running_loop().create_task(host.ask("?"))
        await rig.mine.clock.sleep_ms(1_000)
        assert not read.done()
        await confirm(rig, partition, 1)
        assert await read == {"a": 1}
        await host.close()

    rig.run(story)


@pytest.mark.parametrize("loss", ["epoch", "step down", "fail"])
def test_a_host_ends_with_its_leader_epoch(rig: Any, loss: str) -> None:
    """replica/replay_log J3: no reply says done, and nothing is appended; it is no failure."""
    partition = rig.partition(replicas=(1, 2))

    async def story() -> None:
        fatal: list[BaseException] = []
        log = log_of(rig, partition)
        host = host_of(rig, log, fatal)
        await host.start()
        waiting = asyncio.get_running_loop().create_task(host.ask([("a", 1)]))
        while partition.log.written_end < 1:
            await rig.mine.clock.sleep_ms(1)
        if loss == "epoch":
            rig.lead(partition, 1, replicas=(1, 2), partition_epoch=1)
        elif loss == "step down":
            partition.step_down(2)
        else:
            partition.fail(errors.StorageFailed("no disk"))
        with pytest.raises(errors.NotLeaderOrFollower):
            await waiting
        assert (log.leads, log.committed) == (False, NONE)
        for command in ([("b", 2)], "?"):
            with pytest.raises(errors.CoordinatorUnavailable):
                await host.ask(command)
        assert partition.log.log_end == 1
        assert not fatal
        await host.close()

    rig.run(story)


def test_a_deposed_host_answers_no_read(rig: Any) -> None:
    """replica/replay_log J3: another broker may have appended since."""
    partition = rig.partition()

    async def story() -> None:
        host = host_of(rig, log_of(rig, partition), [])
        await host.start()
        await host.ask([("a", 1)])
        partition.step_down(2)
        with pytest.raises(errors.NotLeaderOrFollower):
            await host.ask("?")
        await host.close()

    rig.run(story)


def test_a_full_disk_starts_the_host_over(rig: Any) -> None:
    """replica/replay_log J2, J5: the machine loses unwritten rows; appends wait for room."""
    partition = rig.partition()

    async def story() -> None:
        fatal: list[BaseException] = []
        host = host_of(rig, log_of(rig, partition), fatal)
        await host.start()
        await host.ask([("a", 1)])
        rig.storage.fault = lambda operation, path: (
            errors.StorageFull("full") if operation != "read" else None
        )
        with pytest.raises(errors.StorageFull):
            await host.ask([("b", 2)])
        assert await host.ask("?") == {"a": 1}  # the log is replayed
        machine = host.machine
        for _ in range(3):
            with pytest.raises(errors.StorageFull, match="no room for the last append"):
                await host.ask([("b", 3)])
        assert host.machine is machine, "each attempt was a replay"
        assert await host.ask("?") == {"a": 1}
        rig.storage.fault = None
        await rig.mine.clock.sleep_ms(replay_log.FULL_MS)
        await host.ask([("c", 4)])
        assert await host.ask("?") == {"a": 1, "c": 4}
        replayed: Any = host.machine
        assert replayed.offsets == [0, 1]
        assert not fatal
        await host.close()

    rig.run(story)


def test_too_few_in_sync_replicas_refuse_an_append(rig: Any) -> None:
    """Rule R1 holds for the broker's own batches; nothing was decided and the host goes on."""
    partition = rig.partition(replicas=(1, 2), min_insync_replicas=2)
    partition.leader.on_isr_committed((1,), (1, 2), 7)

    async def story() -> None:
        host = host_of(rig, log_of(rig, partition), [])
        await host.start()
        with pytest.raises(errors.NotEnoughReplicas):
            await host.ask([("a", 1)])
        assert await host.ask("?") == {}
        await host.close()

    rig.run(story)


def test_the_reserve_of_the_disk_is_for_own_batches(rig: Any) -> None:
    """replica/space D2: a transaction can end although the disk refuses producers."""
    partition = rig.partition()
    partition.writer.space._reserve = 100
    partition.writer.space.free = 50

    async def story() -> None:
        host = host_of(rig, log_of(rig, partition), [])
        await host.start()
        assert await host.ask([("a", 1)]) == 1
        await host.close()

    rig.run(story)


def test_a_replay_begins_at_the_log_start(rig: Any) -> None:
    """Records below it are gone, also when it moves during the replay, and inside of a batch."""
    partition = rig.partition(segment_bytes=14 * 1024)

    async def story() -> None:
        host = host_of(rig, log_of(rig, partition), [])
        await host.start()
        await host.ask([(f"{n:0200}", n) for n in range(100)])
        await host.ask([(f"{n:0200}", n) for n in range(100, 200)])
        await host.close()
        partition.log.advance_log_start(50)
        log = log_of(rig, partition)
        found: list[int] = []
        await log.replay(lambda offset, row: found.append(offset))
        assert found == list(range(50, 200))
        found.clear()

        def apply(offset: int, row: Row) -> None:
            found.append(offset)
            if offset == 60:
                partition.log.advance_log_start(150)

        monkey = replay_log.READ_BYTES
        replay_log.READ_BYTES = 1  # one batch at a time
        try:
            await log.replay(apply)
        finally:
            replay_log.READ_BYTES = monkey
        assert found == [*range(50, 100), *range(150, 200)]

    rig.run(story)


def test_a_replay_yields_to_the_loop(rig: Any) -> None:
    """replica/replay_log J4: a large piece does not hold the loop."""
    partition = rig.partition()

    async def story() -> None:
        host = host_of(rig, log_of(rig, partition), [])
        await host.start()
        await host.ask([(f"{n}", n) for n in range(1_000)])
        await host.close()
        applied: list[int] = []
        seen = [0]
        looking: list[asyncio.Task[None]] = []

        async def look() -> None:
            while len(applied) < 1_000:
                seen.append(len(applied))
                await rig.mine.clock.sleep_ms(0)

        def apply(offset: int, row: Row) -> None:
            applied.append(offset)
            if not looking:
                looking.append(asyncio.get_running_loop().create_task(look()))

        await log_of(rig, partition).replay(apply)
        await looking[0]
        steps = [after - before for before, after in itertools.pairwise(seen)]
        assert 0 < max(steps) <= replay_log.SLICE_RECORDS

    rig.run(story)


def test_a_replay_ends_with_the_leader_epoch(rig: Any) -> None:
    """replica/replay_log J3: the log may be truncated at any moment from then on."""
    partition = rig.partition()

    async def story() -> None:
        host = host_of(rig, log_of(rig, partition), [])
        await host.start()
        await host.ask([("a", 1)])
        await host.close()
        state = PartitionState(replicas=(1,), isr=(1,), leader=1, leader_epoch=1, partition_epoch=1)
        with pytest.raises(errors.NotLeaderOrFollower):
            await log_of(rig, partition).replay(
                lambda offset, row: partition.lead(state, checkpointed=0)
            )

    rig.run(story)


def test_damage_takes_the_replica_offline_instead_of_being_skipped(rig: Any) -> None:
    """Rule L9: a replay reports the damage like a fetch."""
    partition = rig.partition()

    async def story() -> None:
        host = host_of(rig, log_of(rig, partition), [])
        await host.start()
        await host.ask([("a", 1)])
        await host.close()
        told: list[errors.PkError] = []
        partition.storage_failed = told.append
        rig.storage.rot(f"topics/t-0/{0:020}.log", partition.log.size_bytes - 1, 0)
        with pytest.raises(errors.CorruptLog):
            await log_of(rig, partition).replay(lambda offset, row: None)
        assert [type(each) for each in told] == [errors.CorruptLog]

    rig.run(story)


def test_the_batches_are_plain(rig: Any) -> None:
    """They have keys, no producer id and the leader epoch; a client's bounds do not apply."""
    partition = rig.partition(epoch=3, max_message_bytes=1_024)

    async def story() -> None:
        log = log_of(rig, partition, 3)
        assert log.append([("k" * 5_000, 1), ("b", None)], 1_735_689_600_000) == 0
        await log.commit()
        raw = partition.log.read(0, bound=2, max_bytes=1 << 20).data
        wanted = b"".join(
            encode_lists([b"1", None], [b"k" * 5_000, b"b"], default_timestamp=1_735_689_600_000)
        )
        assert batch.read_header(raw) == batch.read_header(wanted)._replace(leader_epoch=3)
        assert raw[batch.HEADER_BYTES :] == wanted[batch.HEADER_BYTES :]
        assert partition.log.epochs.latest == 3
        log.close()
        assert log not in partition._watchers

    rig.run(story)


class Stamped:
    """Rows whose number is 1,000 or more belong to a transaction of producer number // 1,000."""

    def stamp_of(self, record: Row) -> ProducerStamp | None:
        number = record[1] or 0
        return ProducerStamp(PRODUCERS + number // 1_000, 0, 0) if number >= 1_000 else None

    def stamped(self, record: Row, stamp: ProducerStamp) -> Row:
        return f"{record[0]} of {stamp.producer_id - PRODUCERS}", record[1]

    def ended(self, marker: Marker) -> Row:
        return f"end of {marker.producer_id - PRODUCERS}", int(marker.commit)


#: Ids that a transaction coordinator gives.
PRODUCERS = producer_id(0, 0, 0)


def transactional(rig: Any, partition: Any) -> PartitionReplayLog[Row]:
    return PartitionReplayLog(partition, 0, rig.mine.clock, encode, decode, Stamped())


def test_records_of_transactions_and_their_markers_come_back(rig: Any) -> None:
    """replica/replay_log J1: the machine gets a marker once the high watermark covers it."""
    partition = rig.partition(replicas=(1, 2))
    now = Now(1, 1)

    async def story() -> None:
        log = transactional(rig, partition)
        host = host_of(rig, log, [])
        await host.start()
        loop = asyncio.get_running_loop()
        stored = loop.create_task(host.ask([("a", 1_000), ("b", 1_001)]))
        await confirm(rig, partition, 2)
        await stored
        header = next(batch.iter_batches(partition.log.read(0, bound=2, max_bytes=10_000).data))[0]
        assert (header.transactional, header.producer_id) == (True, PRODUCERS + 1)
        ended = write_markers(partition, [Marker(PRODUCERS + 1, 1, True)], 0, now, 60_000)
        while partition.log.written_end < 3:
            await rig.mine.clock.sleep_ms(1)
        assert not log.take_foreign(), "it is not committed"
        await confirm(rig, partition, 3)
        assert await ended == [None]
        assert await host.ask("?") == {"a": 1_000, "b": 1_001, "end of 1": 1}
        await host.close()
        log.close()
        found: list[tuple[int, Row]] = []
        await transactional(rig, partition).replay(lambda at, row: found.append((at, row)))
        assert found == [
            (0, ("a of 1", 1_000)), (1, ("b of 1", 1_001)), (2, ("end of 1", 1)),
        ]  # fmt: skip

    rig.run(story)


def test_a_marker_that_a_failed_write_undid_is_not_applied(rig: Any) -> None:
    """Another record gets its offset afterwards."""
    partition = rig.partition()

    async def story() -> None:
        log = transactional(rig, partition)
        host = host_of(rig, log, [])
        await host.start()
        await host.ask([("a", 1_000)])
        rig.storage.fault = lambda operation, path: (
            errors.StorageFull("full") if operation != "read" else None
        )
        with pytest.raises(errors.PkError):
            await write_markers(partition, [Marker(PRODUCERS + 1, 1, True)], 0, Now(1, 1), 60_000)
        rig.storage.fault = None
        await rig.mine.clock.sleep_ms(replay_log.FULL_MS)
        await host.ask([("c", 4)])
        assert await host.ask("?") == {"a": 1_000, "c": 4}
        await host.close()

    rig.run(story)
