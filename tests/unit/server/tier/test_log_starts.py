"""The start of a log whose checkpoint does not name it (tier/view.py, log/manager.py)."""

from __future__ import annotations

import pytest

from pk.log.directory import LOG_STARTS
from pk.log.plan import RetentionPlan
from pk.server.replica.tier_state import tier_has_what_left
from tests.unit.log.house import CONFIG, KEY, TP, House, append, run


@pytest.mark.parametrize("tiered", [False, True])
def test_a_checkpoint_that_rotted_deletes_nothing_from_the_tier(tiered: bool) -> None:
    """Rule T9: if the log start were taken for that of the local log, the table's older rows would
    be deleted.
    """

    async def main() -> None:
        house = House()
        manager = await house.opened()
        log = await manager.create(TP, "tid", CONFIG)
        for _ in range(6):
            await append(manager, KEY, 10)
        gone = tuple(each.base_offset for each in log.segments[:2])
        await manager.move_log_starts({KEY: 0})
        for job in log.drop_segments(RetentionPlan(0, gone, False)):
            job()
        local = log.local_log_start
        assert log.log_start == 0 < local
        await manager.close()
        house.storages[0].rot(LOG_STARTS, 45, 1)
        for _ in range(2):  # a process that dies before the start is known leaves no file about it
            again = await house.opened()
            await again.checkpoint()
            house.storages[0].crash()
        last = await house.opened()
        opened = last.get(KEY)
        assert opened is not None
        assert opened.local_log_start == local
        tier_has_what_left(opened, tiered=tiered)
        assert opened.log_start == (0 if tiered else local)
        await last.checkpoint()
        tier_has_what_left(opened, tiered=tiered)
        await last.close()
        known = (await house.opened()).get(KEY)
        assert known is not None
        assert (known.start_unknown, known.log_start) == (False, 0 if tiered else local)

    run(main)
