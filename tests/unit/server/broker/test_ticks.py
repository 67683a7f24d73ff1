"""What a tick of the broker's scheduler costs."""

from __future__ import annotations

from collections.abc import ItemsView
from typing import Any

from pk.server.broker.retention import TICK_MS
from pk.server.broker.scheduler import BrokerScheduler
from pk.types import PartitionKey


def test_partitions_without_followers_are_not_looked_through_in_each_tick(
    rig: Any,
) -> None:
    """30,000 partitions took 4 % of a core."""
    rig.partition()
    scheduler: BrokerScheduler = rig.core.scheduler
    looks = 0

    class Counted(dict[PartitionKey, Any]):
        def items(self) -> ItemsView[PartitionKey, Any]:  # type: ignore[override]  # a view
            nonlocal looks
            looks += 1
            return super().items()

    scheduler._partitions = Counted(scheduler._partitions)
    ticks = 2 * rig.core.env.server["replica_lag_time_max_ms"] // TICK_MS

    async def story() -> None:
        scheduler.start()
        await rig.mine.clock.sleep_ms(ticks * TICK_MS)
        await scheduler.close()

    rig.run(story)
    assert 2 <= looks <= 6
