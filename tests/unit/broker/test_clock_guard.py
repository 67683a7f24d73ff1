"""Rule L10: retention stops when the wall clock jumps."""

from __future__ import annotations

from pk.server.broker.clock_guard import ClockGuard

YEAR = 365 * 86_400_000


def test_a_jump_stops_retention_until_the_clock_is_back() -> None:
    guard = ClockGuard(60_000, 1_000_000, 0)
    assert guard.observe(1_010_000, 10_000)
    assert not guard.observe(1_020_000 + YEAR, 20_000)
    assert not guard.observe(1_030_000 + YEAR, 30_000)
    assert guard.stepped_ms == YEAR
    assert guard.observe(1_040_000, 40_000)


def test_small_jumps_add_up() -> None:
    guard = ClockGuard(60_000, 0, 0)
    assert guard.observe(40_000, 0)
    assert not guard.observe(80_000, 0)


def test_slewing_is_no_step() -> None:
    guard = ClockGuard(60_000, 0, 0)
    wall = 0
    for tick in range(1, 2_000):
        wall += 1_000 + 400
        assert guard.observe(wall, tick * 1_000)
