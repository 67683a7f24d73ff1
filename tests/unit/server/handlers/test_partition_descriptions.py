"""What a leader says of its producers and their open transactions: KIP-664, rule L11."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors, transactional_ids
from pk.log.control_rows import Marker
from pk.log.plan import Now
from pk.server.handlers import partition_descriptions
from pk.server.replica.markers import write_markers
from pk.wire import pk_pb2 as wire
from pk.world import StreamKind

FIRST = transactional_ids.TRANSACTIONAL


async def begin(rig: Any, kit: Any, producer_id: int) -> None:
    """Append the first batch of a transaction to partition 0."""
    stream = await rig.stream(StreamKind.PRODUCE)
    fields = {"producer_id": producer_id, "producer_epoch": 4, "base_sequence": 0}
    await stream.send(kit.produce((0, kit.batch(transactional=True, **fields))))
    (result,) = await kit.results(stream, 1)
    assert not result.HasField("error")
    stream.close()


async def end(rig: Any, partition: Any, producer_id: int) -> None:
    clock = rig.mine.clock
    now, marker = Now(clock.wall_ms(), clock.wall_ms()), Marker(producer_id, 5, True, 9)
    assert await write_markers(partition, [marker], -1, now, clock.monotonic_ms() + 1_000) == [None]


async def producers(caller: Any, kit: Any, *numbers: int) -> list[wire.DescribedProducers]:
    request = wire.DescribeProducersRequest()
    for number in numbers:
        request.partitions.add(topic_id=kit.topic_id, partition=number)
    answer = await caller.call(request, timeout_ms=1_000)
    return list(answer.head.describe_producers_reply.partitions)


async def oldest(caller: Any) -> wire.PartitionState:
    answer = await caller.call(wire.DescribePartitionsRequest(), timeout_ms=1_000)
    state: wire.PartitionState = answer.head.describe_partitions_reply.partitions[0]
    return state


def test_the_producer_that_holds_the_last_stable_offset_is_named(rig: Any, kit: Any) -> None:
    partition = rig.partition()
    gauges = rig.core.scheduler._gauges

    def metrics() -> dict[str, float]:
        gauges.set()
        lines = rig.metrics.text().decode().splitlines()
        return {
            name: float(value)
            for name, value in (line.split() for line in lines if " " in line and "#" not in line)
            if name.startswith("pk_open_transaction")
        }

    async def story() -> None:
        caller, clock = rig.caller(), rig.mine.clock
        assert not (await oldest(caller)).HasField("oldest_transaction")
        assert metrics() == {"pk_open_transactions": 0, "pk_open_transaction_age_ms": 0}
        began = []
        for producer_id in (FIRST, FIRST + 1):
            await clock.sleep_ms(1_000)
            await begin(rig, kit, producer_id)
            known = partition.log.producers.get(producer_id)
            began.append(known.transaction_began_ms)
            assert 0 <= clock.wall_ms() - began[-1] < 100
        state = await oldest(caller)
        told = state.oldest_transaction
        assert (told.producer_id, told.producer_epoch, told.transaction_start) == (FIRST, 4, 0)
        assert (told.transaction_began_ms, state.last_stable_offset) == (began[0], 0)
        found = metrics()
        assert found["pk_open_transactions"] == 2
        assert 1_000 <= found["pk_open_transaction_age_ms"] < 1_200
        await end(rig, partition, FIRST)
        told = (await oldest(caller)).oldest_transaction
        assert (told.producer_id, told.transaction_start) == (FIRST + 1, 3)
        assert told.transaction_began_ms == began[1]
        partition.step_down(2)
        assert not (await oldest(caller)).HasField("oldest_transaction")
        await caller.close()

    rig.run(story)


def test_a_leader_describes_its_producers(
    rig: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = rig.partition(0)
    other = rig.partition(1)

    async def story() -> None:
        caller = rig.caller()
        await begin(rig, kit, FIRST)
        await begin(rig, kit, FIRST + 1)
        await end(rig, partition, FIRST)
        here, _ = await producers(caller, kit, 0, 1)
        ended, running = here.producers
        assert (ended.producer_id, ended.producer_epoch, ended.coordinator_epoch) == (FIRST, 5, 9)
        assert (ended.transaction_start, ended.transaction_began_ms) == (-1, -1)
        assert ended.last_sequence == -1
        assert (running.producer_id, running.producer_epoch) == (FIRST + 1, 4)
        assert (running.coordinator_epoch, running.transaction_start) == (-1, 3)
        assert (running.last_sequence, running.last_ms) == (2, running.transaction_began_ms)
        other.step_down(2)
        here, elsewhere, unknown = await producers(caller, kit, 0, 1, 7)
        assert len(here.producers) == 2
        assert elsewhere.error.code == errors.NotLeaderOrFollower.code
        assert unknown.HasField("error")
        monkeypatch.setattr(partition_descriptions, "PRODUCERS_MAX", 3)
        first, again = await producers(caller, kit, 0, 0)
        assert len(first.producers) == 2
        assert again.error.code == errors.ThrottledError.code
        assert errors.ThrottledError.retriable
        monkeypatch.setattr(partition_descriptions, "PRODUCERS_MAX", 1)
        (large,) = await producers(caller, kit, 0)
        assert large.error.code == errors.InvalidRequest.code
        await caller.close()

    rig.run(story)
