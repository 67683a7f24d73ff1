"""A leader asks about the transactions that are open in its logs: rule X3."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from pk import transactional_ids
from pk.log.producers import ProducerStateEntry
from pk.server.transactions.open_transactions import CHECK_MS, OpenTransactionChecks
from pk.server.transactions.verifier import Asked
from pk.sim.world import SimWorld
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

HANGS, ANSWERS, CLOSED = (PartitionKey(f"topic-{n}", 0) for n in range(3))
OPEN = 1


def led(coordinator: int | None) -> Any:
    """Return a led partition with a transaction of this coordinator partition; None = with none."""
    opened = {}
    if coordinator is not None:
        opened[transactional_ids.producer_id(coordinator, 0, 1)] = ProducerStateEntry(0)
    producers = SimpleNamespace(
        open_count=len(opened), open_transactions=dict.fromkeys(opened, 0), get=opened.get
    )
    log = SimpleNamespace(producers=producers)
    return SimpleNamespace(leader=object(), leader_epoch=4, log=log)


def test_a_coordinator_that_hangs_delays_the_questions_of_its_partition_only() -> None:
    world = SimWorld(1)
    mine = world.world_of("broker")
    asked: list[PartitionKey] = []
    partitions = {HANGS: led(1), ANSWERS: led(2), CLOSED: led(None)}

    async def ask(question: Asked) -> wire.TxnAnswer:
        asked.append(question.key)
        if question.key == HANGS:
            await asyncio.Event().wait()
        return wire.TxnAnswer(status=OPEN)

    env = SimpleNamespace(
        clock=mine.clock, server={"transaction_max_timeout_ms": 10**15}, bug=lambda where, bug: None
    )
    clocks: Any = SimpleNamespace(now=lambda: SimpleNamespace(wall_ms=0))

    async def main() -> None:
        checks = OpenTransactionChecks(
            cast("Any", env), partitions, clocks, cast("Any", SimpleNamespace(ask=ask))
        )
        checks.start()
        await mine.clock.sleep_ms(3 * CHECK_MS + 100)
        assert asked == [HANGS, ANSWERS], "each once: the epoch is the same"
        partitions[ANSWERS].leader_epoch = 5
        await mine.clock.sleep_ms(CHECK_MS)
        assert asked == [HANGS, ANSWERS, ANSWERS]
        del partitions[CLOSED]
        await mine.clock.sleep_ms(CHECK_MS)
        assert CLOSED not in checks._asked
        await checks.close()

    task = world.spawn("broker", main())
    world.run_until(task.done)
    task.result()
    world.close()
