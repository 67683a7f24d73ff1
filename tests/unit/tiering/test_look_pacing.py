"""When an owner looks at its table although no request asks for it (tiering/look_pacing)."""

from __future__ import annotations

from pk.tiering.look_pacing import SPREAD, LookPace


def waits(pace: LookPace, looks: int) -> list[int]:
    found = []
    for _ in range(looks):
        found.append(pace.wait_ms)
        pace.found_nothing()
    return found


def test_each_look_that_finds_nothing_doubles_the_wait_up_to_the_most() -> None:
    found = waits(LookPace("t", 5_000, 300_000), 20)
    assert found[:6] == [5_000, 10_000, 20_000, 40_000, 80_000, 160_000]
    (most,) = set(found[7:])
    assert 300_000 * (1 - SPREAD) <= most <= 300_000


def test_two_calls_a_look_are_at_most_half_a_call_a_minute() -> None:
    for name in map(str, range(200)):
        assert 2 * 60_000 / waits(LookPace(name, 5_000, 300_000), 20)[-1] <= 0.5


def test_a_request_brings_the_quick_pace_back() -> None:
    pace = LookPace("t", 5_000, 300_000)
    waits(pace, 20)
    pace.asked()
    assert pace.wait_ms == 5_000


def test_the_looks_of_many_tables_are_spread() -> None:
    most = {waits(LookPace(str(i), 5_000, 300_000), 20)[-1] for i in range(1_000)}
    assert len(most) > 800


def test_a_most_below_the_least_is_the_least() -> None:
    assert set(waits(LookPace("t", 5_000, 100), 5)) == {5_000}
