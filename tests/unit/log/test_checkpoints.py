"""Checkpoints state only what is true, also while a log is truncated or begun again (log/manager
M2).
"""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.log.house import CONFIG, KEY, TP, House, append, run


@pytest.mark.parametrize("crash", [True, False])
def test_a_log_start_that_is_moved_beside_a_cut_does_not_pass_the_end(crash: bool) -> None:
    """log/manager M2: records that are appended below it later belong to another history (rule R4),
    and would be hidden.
    """

    async def main() -> None:
        house = House()
        manager = await house.opened()
        log = await manager.create(TP, "tid", CONFIG)
        await append(manager, KEY, 40)
        moving = asyncio.ensure_future(manager.move_log_starts({KEY: 25}))
        await asyncio.sleep(0)
        await manager.cut(KEY, 12)
        await moving
        await append(manager, KEY, 40)
        if crash:
            house.storages[0].crash()
            manager = await house.opened()
            found = manager.get(KEY)
            assert found is not None
            log = found
        assert log.log_start <= 12
        await manager.close()

    run(main)
