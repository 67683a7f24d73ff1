"""Rule L10: the clocks of all nodes, as the active controller measures them."""

from __future__ import annotations

from pk.clock import MedianTime
from pk.server.controller.clocks import Clocks
from pk.wire import pk_pb2 as wire

WALL = 1_800_000_000_000
DAY = 86_400_000


def clocks() -> Clocks:
    return Clocks(1, 6_000)


def tell(
    to: Clocks, node: int, ahead_ms: int, now_ms: int = 0, *, broker: bool = True, **said: object
) -> None:
    reading = wire.ClockReading(wall_ms=WALL + ahead_ms, trusted=True)
    for name, value in said.items():
        setattr(reading, name, value)
    reading.wall_ms += now_ms
    to.observe(node, reading, now_ms, broker=broker)


def ahead(of: Clocks, now_ms: int = 0, set_by_ms: int = 0) -> dict[int, int]:
    """Return by node how far its clock is ahead.  `set_by_ms`: how far this controller's wall clock
    was set meanwhile.
    """
    samples = of.samples(WALL + now_ms + set_by_ms, now_ms, WALL)
    return {each.node_id: each.ahead_ms for each in samples}


def test_other_clocks_do_not_follow_the_clock_of_this_node_when_it_is_set() -> None:
    """Otherwise old readings would confirm the wrong clock of a broker on this node."""
    known = clocks()
    tell(known, 2, 3)
    tell(known, 3, -4)
    assert ahead(known, 100, DAY) == {1: 0, 2: 3 - DAY, 3: -4 - DAY}
    assert ahead(known, 100) == {1: 0, 2: 3, 3: -4}


def test_a_late_request_makes_no_clock_look_behind() -> None:
    known = clocks()
    tell(known, 2, -3)
    tell(known, 2, -90_000)  # this process stood still
    assert ahead(known) == {1: 0, 2: -3}
    for _ in range(3):
        tell(known, 2, -DAY)  # it was set back
    assert ahead(known)[2] == -DAY


def trusted(of: Clocks, now_ms: int = 0, set_by_ms: int = 0) -> dict[int, bool]:
    """Return by node whether the reading that counts was trusted."""
    samples = of.samples(WALL + now_ms + set_by_ms, now_ms, WALL)
    return {each.node_id: each.trusted for each in samples}


def test_a_clock_that_was_set_right_does_not_vouch_for_the_wrong_one() -> None:
    """The node trusts its clock at once; its last readings are still those of the wrong clock."""
    known = clocks()
    tell(known, 2, DAY, trusted=False, running_since_ms=WALL + DAY)
    tell(known, 2, 0, running_since_ms=WALL)
    (sample,) = (each for each in known.samples(WALL, 0, WALL) if each.node_id == 2)
    assert (sample.ahead_ms, sample.trusted, sample.running_since_ms) == (DAY, False, WALL + DAY)
    for _ in range(2):
        tell(known, 2, 0)
    assert (ahead(known)[2], trusted(known)[2]) == (0, True)


def test_a_controller_whose_clock_is_set_does_not_vouch_for_it() -> None:
    """Its broker said that it trusts the clock as it was before."""
    known = clocks()
    tell(known, 1, 0)
    assert trusted(known)[1]
    assert not trusted(known, 100, DAY)[1]


def test_what_was_heard_long_ago_is_not_counted() -> None:
    known = clocks()
    tell(known, 2, 5)
    assert ahead(known, 6_000) == {1: 0, 2: 5}
    assert ahead(known, 6_001) == {1: 0}
    tell(known, 2, -7, 7_000)
    assert ahead(known, 7_000)[2] == -7  # its earlier readings are dropped


def test_a_broker_speaks_for_its_node_and_a_controller_for_one_without() -> None:
    known = clocks()
    tell(known, 1, -2)  # the broker of this node: the controller reads the same clock
    tell(known, 2, 10)
    tell(known, 2, -20, broker=False, trusted=False)
    tell(known, 3, 30, broker=False, trusted=False, running_since_ms=17)
    samples = {each.node_id: each for each in known.samples(WALL, 0, WALL - DAY)}
    assert [samples[n].ahead_ms for n in (1, 2, 3)] == [0, 10, 30]
    assert [samples[n].trusted for n in (1, 2, 3)] == [True, True, False]
    assert (samples[1].running_since_ms, samples[3].running_since_ms) == (WALL - DAY, 17)


def test_a_broker_that_tells_no_clock_is_not_at_1970() -> None:
    known = clocks()
    known.observe(2, wire.ClockReading(), 0, broker=True)
    assert ahead(known) == {1: 0}


def test_the_skew_is_of_the_median() -> None:
    known = clocks()
    for node, skew in ((1, 0), (2, 100), (3, DAY)):
        tell(known, node, skew)
    tell(known, 3, DAY, trusted=False, doubt="ahead")
    listed = [wire.BrokerDescription(broker_id=n) for n in (1, 2, 3, 4)]
    known.describe(listed, WALL, 0)
    assert [each.clock_skew_ms for each in listed[:3]] == [-100, 0, DAY - 100]
    assert [each.clock_trusted for each in listed] == [True, True, False, False]
    assert listed[2].clock_doubt == "ahead"
    assert not listed[3].HasField("clock_skew_ms")


def test_the_time_is_the_median_of_the_clocks_that_brokers_trust() -> None:
    """A maintenance job compares lags and delete horizons with it (C4)."""
    known = clocks()
    assert known.trusted_time(WALL, 0, 3) is None
    tell(known, 2, DAY, trusted=False)
    assert known.trusted_time(WALL, 0, 3) is None
    tell(known, 3, 40)
    assert known.trusted_time(WALL, 0, 3) is None  # one broker of three
    assert known.trusted_time(WALL, 0, 1) == MedianTime(WALL + 40, WALL + 40)
    tell(known, 1, 0)
    assert known.trusted_time(WALL, 0, 3) == MedianTime(WALL, WALL + 40)
    set_meanwhile = known.trusted_time(WALL + DAY, 0, 1)  # this node's clock
    assert set_meanwhile == MedianTime(WALL + 40, WALL + 40)
    assert known.trusted_time(WALL, 6_001, 3) is None  # the readings are old


def test_clocks_that_are_not_known_may_be_behind_or_ahead() -> None:
    """Rule C4: the median lies between what it is if all the others are behind, or all ahead."""
    known = clocks()
    for node, skew in ((1, 0), (2, 40), (3, -70)):
        tell(known, node, skew)
    assert known.trusted_time(WALL, 0, 3) == MedianTime(WALL, WALL)
    assert known.trusted_time(WALL, 0, 4) == MedianTime(WALL - 70, WALL + 40)
    tell(known, 4, 90)
    assert known.trusted_time(WALL, 0, 5) == MedianTime(WALL, WALL + 40)
    tell(known, 5, DAY, trusted=False)
    assert known.trusted_time(WALL, 0, 5) == MedianTime(WALL, WALL + 40)
