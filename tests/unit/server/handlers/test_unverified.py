"""The first batch of a transaction waits for its coordinator: rule X6."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pk import errors, transactional_ids
from pk.log import batch as batches
from pk.log.control_rows import Marker
from pk.server.replica.markers import write_markers
from pk.server.transactions.verifier import Asked
from pk.wire import pk_pb2 as wire
from pk.world import StreamKind

PID = transactional_ids.producer_id(3, 0, 1)


class Coordinator:
    """Answers questions from a script; it waits while `gate` is closed."""

    def __init__(self, rig: Any) -> None:
        self.asked: list[Asked] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusals: list[errors.PkError] = []
        rig.core.verifier.ask = self.ask

    async def ask(self, asked: Asked) -> wire.TxnAnswer:
        self.asked.append(asked)
        await self.gate.wait()
        if self.refusals:
            raise self.refusals.pop(0)
        return wire.TxnAnswer()


def transactional(kit: Any, sequence: int, epoch: int = 0, pid: int = PID) -> bytes:
    raw: bytes = kit.batch(
        producer_id=pid, producer_epoch=epoch, base_sequence=sequence, transactional=True
    )
    return raw


def code(result: wire.ProduceResult) -> int:
    return result.error.code if result.HasField("error") else 0


def test_batches_wait_in_order_for_one_question(rig: Any, kit: Any) -> None:
    """Five in flight: the four behind the first meet no OutOfOrderSequence."""
    partition = rig.partition()

    async def story() -> None:
        coordinator = Coordinator(rig)
        coordinator.gate.clear()
        stream = await rig.stream(StreamKind.PRODUCE)
        for turn in range(5):
            await stream.send(
                kit.produce((0, transactional(kit, 3 * turn)), correlation_id=turn + 1)
            )
        await rig.mine.clock.sleep_ms(200)
        assert partition.log.log_end == 0
        coordinator.gate.set()
        answers = await kit.results(stream, 5)
        assert [(code(a), a.base_offset) for a in answers] == [(0, 3 * n) for n in range(5)]
        assert len(coordinator.asked) == 1
        assert coordinator.asked[0].producer_id == PID
        assert partition.last_stable_offset == 0, "the transaction is open"
        await stream.send(kit.produce((0, transactional(kit, 15)), correlation_id=9))
        assert code((await kit.results(stream, 1))[0]) == 0
        assert len(coordinator.asked) == 1, "it is open in the log"
        stream.close()

    rig.run(story)


def test_others_pass_a_batch_that_waits(rig: Any, kit: Any) -> None:
    rig.partition()
    rig.partition(1)

    async def story() -> None:
        coordinator = Coordinator(rig)
        coordinator.gate.clear()
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, transactional(kit, 0)), correlation_id=1))
        await stream.send(kit.produce((0, kit.batch()), (1, kit.batch()), correlation_id=2))
        answers = await kit.results(stream, 2)
        assert [code(a) for a in answers] == [0, 0]
        coordinator.gate.set()
        (last,) = await kit.results(stream, 1)
        assert (code(last), last.base_offset) == (0, 3)
        stream.close()

    rig.run(story)


def test_a_refusal_refuses_all_behind_it(rig: Any, kit: Any) -> None:
    partition = rig.partition()

    async def story() -> None:
        coordinator = Coordinator(rig)
        coordinator.gate.clear()
        coordinator.refusals = [errors.CoordinatorLoading("being read")]
        stream = await rig.stream(StreamKind.PRODUCE)
        for turn in range(3):
            await stream.send(
                kit.produce((0, transactional(kit, 3 * turn)), correlation_id=turn + 1)
            )
        await rig.mine.clock.sleep_ms(100)
        coordinator.gate.set()
        answers = await kit.results(stream, 3)
        assert {code(a) for a in answers} == {errors.CoordinatorLoading.code}
        assert partition.log.log_end == 0
        stream.close()

    rig.run(story)


def test_a_transaction_that_still_ends_is_asked_about_again(rig: Any, kit: Any) -> None:
    rig.partition()

    async def story() -> None:
        coordinator = Coordinator(rig)
        coordinator.refusals = [errors.ConcurrentTransactions("markers")] * 4
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, transactional(kit, 0))))
        assert code((await kit.results(stream, 1))[0]) == 0
        assert len(coordinator.asked) == 5
        coordinator.refusals = [errors.ConcurrentTransactions("markers")] * 1_000_000
        await stream.send(kit.produce((0, transactional(kit, 0, epoch=2))))
        answered = (await kit.results(stream, 1))[0]
        assert code(answered) == errors.ConcurrentTransactions.code
        stream.close()

    rig.run(story)


@pytest.mark.parametrize(
    ("pid", "control"), [(5, False), (PID, True), (-1, True)], ids=["plain id", "control", "none"]
)
def test_what_no_coordinator_can_be_asked_about_is_refused_at_once(
    rig: Any, kit: Any, pid: int, control: bool
) -> None:
    """A batch with another producer's id, and a marker that a client forges (X6)."""
    partition = rig.partition()

    async def story() -> None:
        coordinator = Coordinator(rig)
        raw = transactional(kit, 0, pid=max(pid, 0))
        header = batches.read_header(raw)._replace(producer_id=pid)
        if control:
            header = header._replace(attributes=header.attributes | batches.CONTROL)
        if pid < 0:
            header = header._replace(producer_epoch=-1, base_sequence=-1)
        raw = b"".join(batches.seal(header, [raw[batches.HEADER_BYTES :]]))
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, raw)))
        assert code((await kit.results(stream, 1))[0]) == errors.InvalidRecord.code
        assert coordinator.asked == []
        assert partition.log.log_end == 0
        stream.close()

    rig.run(story)


@pytest.mark.parametrize("change", ["new epoch", "resigned"])
def test_an_answer_counts_only_in_the_leader_epoch_of_the_question(
    rig: Any, kit: Any, change: str
) -> None:
    """A delayed answer must not open a transaction in a later epoch: its marker went elsewhere."""
    partition = rig.partition()

    async def story() -> None:
        coordinator = Coordinator(rig)
        coordinator.gate.clear()
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, transactional(kit, 0))))
        await rig.mine.clock.sleep_ms(100)
        if change == "resigned":
            partition.step_down(2)
        else:
            rig.lead(partition, 1)
        coordinator.gate.set()
        (answered,) = await kit.results(stream, 1)
        assert code(answered) == errors.NotLeaderOrFollower.code
        assert partition.log.log_end == 0
        stream.close()

    rig.run(story)


def test_a_marker_that_overtakes_the_answer_keeps_the_batch_out(rig: Any, kit: Any) -> None:
    """The marker leaves its epoch in the log, which refuses the late batch."""
    partition = rig.partition()

    async def story() -> None:
        coordinator = Coordinator(rig)
        coordinator.gate.clear()
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, transactional(kit, 0))))
        await rig.mine.clock.sleep_ms(100)
        now, deadline_ms = rig.core.clocks.now(), rig.mine.clock.monotonic_ms() + 5_000
        marker = Marker(PID, 1, commit=False, coordinator_epoch=1)
        assert await write_markers(partition, [marker], -1, now, deadline_ms) == [None]
        coordinator.gate.set()
        (answered,) = await kit.results(stream, 1)
        assert code(answered) == errors.InvalidProducerEpoch.code
        assert partition.last_stable_offset == partition.high_watermark == 1
        stream.close()

    rig.run(story)


def test_a_stream_that_was_given_up_stores_nothing_after_the_wait(rig: Any, kit: Any) -> None:
    partition = rig.partition()

    async def story() -> None:
        coordinator = Coordinator(rig)
        coordinator.gate.clear()
        old = await rig.stream(StreamKind.PRODUCE)
        await old.send(kit.produce((0, transactional(kit, 0))))
        await rig.mine.clock.sleep_ms(100)
        new = await rig.stream(StreamKind.PRODUCE)
        await new.send(kit.produce((0, transactional(kit, 0))))
        await rig.mine.clock.sleep_ms(100)
        coordinator.gate.set()
        (first,) = await kit.results(old, 1)
        (second,) = await kit.results(new, 1)
        assert code(first) == errors.BrokerUnavailable.code
        assert (code(second), second.base_offset) == (0, 0)
        assert partition.log.log_end == 3
        old.close()
        new.close()

    rig.run(story)


def test_a_coordinator_that_does_not_answer_delays_until_the_deadline(rig: Any, kit: Any) -> None:
    partition = rig.partition()

    async def story() -> None:
        coordinator = Coordinator(rig)
        coordinator.gate.clear()
        stream = await rig.stream(StreamKind.PRODUCE)
        await stream.send(kit.produce((0, transactional(kit, 0)), timeout_ms=2_000))
        (answered,) = await kit.results(stream, 1)
        assert code(answered) == errors.CoordinatorUnavailable.code
        assert partition.log.log_end == 0
        stream.close()

    rig.run(story)
