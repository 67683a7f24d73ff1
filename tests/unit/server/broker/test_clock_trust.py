"""Rule L10: when a broker trusts its wall clock (clock_trust.py)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pk.clock import MedianTime
from pk.log.last_run import LastRun
from pk.running_since import RunningSince
from pk.server.broker.clock_trust import ClockTrust, Doubt, Limits, Sample

SECOND, HOUR, DAY = 1_000, 3_600_000, 86_400_000
LIMITS = Limits(
    step_max=60 * SECOND, gap_max=DAY, grace=HOUR, fresh=6 * SECOND, producer_expiration=DAY
)
NOW = 1_800_000_000_000


class Clocks:
    """The clocks of a node, for `RunningSince`."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def sleep_ms(self, ms: float) -> None:
        self._node.passes(int(ms))

    def wall_ms(self) -> int:
        return self._node.wall_ms

    def boottime_ms(self) -> int:
        return self._node.boottime_ms

    def monotonic_ms(self) -> int:
        return self._node.boottime_ms


class Node:
    """One broker's clocks, set by the test; each life of the process begins with `start`."""

    def __init__(self, node_id: int = 1, wall_ms: int = NOW) -> None:
        self.node_id = node_id
        self.wall_ms, self.boottime_ms, self.boot = wall_ms, 1_000_000, 1
        self.last: LastRun | None = None
        self.fresh = True
        self.appended_ms: int | None = None
        self.trust: ClockTrust
        self.expected: tuple[int, ...] = (node_id,)
        self.start()

    def start(self, *, off_ms: int = 0, reboot: bool = False, step_ms: int = 0) -> None:
        """Start another process `off_ms` later; the machine was off for that time if it was booted
        again.
        """
        self.wall_ms += off_ms + step_ms
        self.boottime_ms = 50_000 if reboot else self.boottime_ms + off_ms
        self.boot += reboot
        self.running_since = RunningSince(Clocks(self))
        self.trust = ClockTrust(self.node_id, LIMITS, self.wall_ms, self.boottime_ms)
        self.trust.begin(
            self.last, f"boot-{self.boot}", fresh=self.fresh, appended_ms=self.appended_ms
        )
        self.fresh = False

    def passes(self, ms: int = 0, *, step_ms: int = 0) -> Doubt:
        """Let time pass, or set the wall clock; store the trust that results."""
        self.boottime_ms += ms
        self.wall_ms += ms + step_ms
        self.trust.observe(self.wall_ms, self.boottime_ms)
        self.last = self.trust.last_run(f"boot-{self.boot}") or self.last
        return self.trust.doubt

    def hears(self, *others: Sample) -> Doubt:
        """Pass the cluster's clocks in, as the reply to a heartbeat does."""
        self.trust.observe(self.wall_ms, self.boottime_ms)
        self.trust.compare(others, self.expected)
        return self.passes()

    def alone(self, ms: int = SECOND, *, step_ms: int = 0) -> Doubt:
        """Compare a single node: its controller knows no other clock."""
        self.passes(ms, step_ms=step_ms)
        return self.hears()

    def sees(self, other: Node) -> Sample:
        """Return the clock of another node at this very moment."""
        line_ms = other.wall_ms - self.boottime_ms
        trusted = other.trust.doubt is Doubt.NONE
        return Sample(other.node_id, line_ms, trusted, other.running_since())


def running(node_id: int = 1, wall_ms: int = NOW) -> Node:
    """Return a node that trusts its clock."""
    node = Node(node_id, wall_ms)
    assert node.alone() is Doubt.NONE
    return node


def cluster(size: int = 3) -> list[Node]:
    nodes = [running(number) for number in range(1, size + 1)]
    for node in nodes:
        node.expected = tuple(range(1, size + 1))
    exchange(nodes)
    assert all(node.trust.doubt is Doubt.NONE for node in nodes)
    return nodes


def exchange(nodes: Iterable[Node], ms: int = SECOND) -> list[Doubt]:
    """Let all nodes hear each other twice: the second time, each says what it trusts."""
    nodes = list(nodes)
    for _ in range(2):
        for node in nodes:
            node.passes(ms)
        for node in nodes:
            node.hears(*(node.sees(each) for each in nodes if each is not node))
    return [node.trust.doubt for node in nodes]


# -- one process -----------------------------------------------------------------------------------


def test_nothing_is_trusted_before_other_nodes_were_heard() -> None:
    node = Node()
    assert node.passes(HOUR) is Doubt.NOT_COMPARED
    assert not node.trust.alert
    assert node.last is None
    assert node.hears() is Doubt.NONE
    assert node.last is not None


def test_a_jump_counts_until_the_clock_is_set_back() -> None:
    node = running()
    assert node.passes(SECOND, step_ms=365 * DAY) is Doubt.STEP
    assert node.trust.alert
    assert node.trust.stepped_ms == 365 * DAY
    assert node.alone(10 * DAY) is Doubt.STEP  # no grace: it is known that it was set
    assert node.passes(SECOND, step_ms=-365 * DAY) is Doubt.NONE


def test_small_jumps_add_up() -> None:
    node = running()
    assert node.passes(step_ms=40 * SECOND) is Doubt.NONE
    assert node.passes(step_ms=40 * SECOND) is Doubt.STEP


def test_slewing_is_no_step() -> None:
    node = running()
    for _ in range(2_000):
        assert node.passes(SECOND, step_ms=400) is Doubt.NONE


def test_suspend_is_no_step() -> None:
    """CLOCK_BOOTTIME also counts the time in which the machine sleeps."""
    node = running()
    assert node.passes(3 * DAY) is Doubt.NONE


# -- a single node, across starts ------------------------------------------------------------------


def test_a_short_stop_is_no_gap() -> None:
    node = running()
    node.start(off_ms=10 * HOUR, reboot=True)
    assert node.alone() is Doubt.NONE


def test_a_day_ahead_at_the_start_waits_for_the_grace_and_goes_on() -> None:
    node = running()
    node.start(off_ms=2 * SECOND, reboot=True, step_ms=DAY)
    assert node.alone() is Doubt.START
    for _ in range(3_590):
        assert node.alone() is Doubt.START
    assert node.alone(20 * SECOND) is Doubt.NONE
    assert node.last is not None
    assert node.last.wall_ms == node.wall_ms


def test_in_the_same_boot_a_step_between_two_processes_is_seen_to_the_minute() -> None:
    """CLOCK_BOOTTIME shows for how long no process ran."""
    node = running()
    node.start(off_ms=5 * SECOND, step_ms=10 * 60 * SECOND)
    assert node.alone() is Doubt.START
    node.start(off_ms=5 * DAY, step_ms=-10 * 60 * SECOND)  # it was really away
    assert node.alone() is Doubt.NONE


@pytest.mark.parametrize("reboot", [False, True])
def test_the_clock_that_is_set_right_in_the_grace_is_trusted_at_once(reboot: bool) -> None:
    node = running()
    node.start(off_ms=SECOND, reboot=reboot, step_ms=2 * DAY)
    assert node.alone() is Doubt.START
    assert node.alone(step_ms=-2 * DAY) is Doubt.NONE


def test_a_clock_that_was_set_to_another_wrong_time_waits_anew() -> None:
    node = running()
    node.start(off_ms=SECOND, reboot=True, step_ms=2 * DAY)
    assert node.alone(HOUR - 10 * SECOND) is Doubt.START
    assert node.alone(step_ms=9 * DAY) is Doubt.START
    assert node.alone(20 * SECOND) is Doubt.START


def test_the_grace_does_not_defeat_itself() -> None:
    """The last run does not advance under the wrong clock, so each restart finds the same gap.
    This also holds if records got LogAppendTime from that clock.
    """
    node = running()
    node.start(off_ms=SECOND, reboot=True, step_ms=2 * DAY)
    for _ in range(5):
        assert node.alone(10 * 60 * SECOND) is Doubt.START
        node.appended_ms = node.wall_ms
        node.start(off_ms=SECOND, reboot=True)
        assert node.alone() is Doubt.START
    assert node.last is not None
    assert node.last.wall_ms < NOW + HOUR


def test_a_clock_that_was_set_in_a_process_is_doubted_by_the_next_one() -> None:
    """A restart does not confirm the clock."""
    node = running()
    assert node.alone(step_ms=30 * 60 * SECOND) is Doubt.STEP
    node.start(off_ms=SECOND)
    assert node.alone() is Doubt.START


def test_without_a_last_run_logs_wait_and_an_empty_directory_does_not() -> None:
    node = running()
    node.last = None  # the file is missing, or damaged
    node.appended_ms = node.wall_ms
    node.start()
    assert node.alone() is Doubt.START
    node.fresh = True
    node.start()
    assert node.alone() is Doubt.NONE


def test_an_operator_ends_every_doubt() -> None:
    node = running()
    node.alone(step_ms=DAY)
    assert node.trust.confirm() is Doubt.STEP
    assert node.alone() is Doubt.NONE
    node.start(off_ms=SECOND, step_ms=DAY)
    assert node.trust.confirm() is Doubt.START
    assert node.passes(SECOND) is Doubt.NONE
    assert node.alone(step_ms=DAY) is Doubt.STEP  # the confirmation was for that time only
    assert node.trust.confirm() is Doubt.STEP
    assert node.trust.confirm() is Doubt.NONE


# -- a cluster -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reboot", [False, True])
def test_a_wrong_node_among_right_ones_waits_longer_than_the_grace(reboot: bool) -> None:
    wrong, *others = nodes = cluster()
    wrong.start(off_ms=SECOND, reboot=reboot, step_ms=DAY)
    assert exchange(nodes) == [Doubt.START, Doubt.NONE, Doubt.NONE]
    assert exchange(nodes, 2 * HOUR) == [Doubt.START, Doubt.NONE, Doubt.NONE]
    assert exchange(others) == [Doubt.NONE, Doubt.NONE]
    wrong.passes(step_ms=-DAY)
    assert exchange(nodes) == [Doubt.NONE] * 3


def test_ten_minutes_ahead_of_the_others_is_no_gap_and_too_much() -> None:
    nodes = cluster()
    nodes[0].start(off_ms=HOUR, reboot=True, step_ms=10 * 60 * SECOND)
    for other in nodes[1:]:
        other.passes(HOUR)
    assert exchange(nodes) == [Doubt.AHEAD, Doubt.NONE, Doubt.NONE]
    assert nodes[0].trust.skew_ms == 10 * 60 * SECOND
    assert nodes[0].trust.confirm() is Doubt.AHEAD
    assert exchange(nodes) == [Doubt.NONE] * 3


def test_two_brokers_count_by_the_median_what_both_compare() -> None:
    """Rule C4: one broker sets a delete horizon, and another removes the tombstone.  Two clocks
    within the tolerance may differ by more than `delete_retention_ms`.
    """
    nodes = cluster()
    nodes[0].start(off_ms=HOUR, reboot=True, step_ms=55 * SECOND)
    for other in nodes[1:]:
        other.passes(HOUR)
    assert exchange(nodes) == [Doubt.NONE] * 3
    right_ms = nodes[1].wall_ms
    assert nodes[0].wall_ms == right_ms + 55 * SECOND
    right = MedianTime(right_ms, right_ms)
    assert [each.trust.median_time(each.wall_ms) for each in nodes] == [right] * 3
    assert nodes[0].passes(7 * SECOND) is Doubt.NONE
    assert nodes[0].trust.median_time(nodes[0].wall_ms) is None  # the other clocks are old readings
    nodes[0].passes(step_ms=DAY)
    assert nodes[0].trust.median_time(nodes[0].wall_ms) is None


def test_half_of_the_clocks_may_be_wrong_for_what_two_brokers_compare() -> None:
    """Rule C4: of three clocks, one is 148 s ahead, which its broker does not trust, and another
    55 s, which is tolerated.  The median of the last two lies between them: both are returned.
    """
    nodes = cluster(3)
    nodes[0].passes(step_ms=148 * SECOND)
    nodes[1].passes(step_ms=55 * SECOND)
    exchange(nodes)
    right_ms = nodes[2].wall_ms
    for node in nodes[1:]:
        found = node.trust.median_time(node.wall_ms)
        assert found == MedianTime(right_ms, right_ms + 55 * SECOND)
    assert nodes[0].trust.median_time(nodes[0].wall_ms) is None
    exchange(nodes[:2])  # one broker of three trusts its clock
    assert nodes[1].trust.median_time(nodes[1].wall_ms) is None


def test_brokers_that_know_different_clocks_agree_on_what_they_compare() -> None:
    """Rule C4: two of five clocks are behind.  A new controller has heard three brokers so far, and
    the median of these three is behind, too.
    """
    nodes = cluster(5)
    for behind in nodes[:2]:
        behind.passes(step_ms=-30 * SECOND)
    exchange(nodes)
    right = MedianTime(nodes[4].wall_ms, nodes[4].wall_ms)
    assert [each.trust.median_time(each.wall_ms) for each in nodes] == [right] * 5
    exchange(nodes[:3])
    vague = MedianTime(nodes[0].wall_ms, nodes[2].wall_ms)
    assert [each.trust.median_time(each.wall_ms) for each in nodes[:3]] == [vague] * 3


def test_a_clock_behind_the_others_counts_no_time_that_brokers_compare() -> None:
    """Rule C4: its own clock is trusted, and all others are an hour ahead."""
    nodes = cluster()
    for other in nodes[1:]:
        other.passes(step_ms=HOUR)
    exchange(nodes)
    assert nodes[0].trust.doubt is Doubt.NONE
    assert nodes[0].trust.median_time(nodes[0].wall_ms) is None


def test_who_was_off_for_a_week_agrees_with_those_that_ran() -> None:
    nodes = cluster()
    nodes[0].start(off_ms=7 * DAY, reboot=True)
    for other in nodes[1:]:
        other.passes(7 * DAY)
    assert nodes[0].passes(SECOND) is Doubt.START
    assert exchange(nodes) == [Doubt.NONE] * 3


def test_a_cluster_that_was_restarted_together_agrees_with_itself_and_waits() -> None:
    nodes = cluster()
    for node in nodes:
        node.start(off_ms=SECOND, reboot=True, step_ms=2 * DAY)
    assert exchange(nodes) == [Doubt.START] * 3
    for node in nodes:  # no file shows the next start that the clock was right
        node.appended_ms = node.wall_ms
        node.start(off_ms=SECOND, reboot=True)
    assert exchange(nodes) == [Doubt.START] * 3
    assert exchange(nodes, HOUR) == [Doubt.NONE] * 3


@pytest.mark.parametrize("reboot", [False, True])
@pytest.mark.parametrize("step_ms", [-6 * 60 * SECOND, -2 * DAY, 2 * DAY])
def test_no_node_is_a_witness_in_a_cluster_that_was_restarted_with_wrong_clocks(
    step_ms: int, reboot: bool
) -> None:
    """By a clock that is behind, each process began before the last run of the others."""
    nodes = cluster()
    for node in nodes:
        node.start(off_ms=SECOND, reboot=reboot, step_ms=step_ms)
    assert exchange(nodes) == [Doubt.START] * 3
    assert exchange(nodes, HOUR // 4) == [Doubt.START] * 3
    for node in nodes:
        node.passes(step_ms=-step_ms)
    assert exchange(nodes) == [Doubt.NONE] * 3


@pytest.mark.parametrize("step_ms", [-DAY, DAY])
def test_nodes_whose_clocks_were_set_together_are_no_witnesses(step_ms: int) -> None:
    """Neither for each other nor for one that is started again, however long they have run."""
    nodes = cluster()
    exchange(nodes, 3 * DAY)
    for node in nodes:
        node.passes(SECOND, step_ms=step_ms)
    assert exchange(nodes) == [Doubt.STEP] * 3
    nodes[0].start(off_ms=SECOND)
    assert exchange(nodes) == [Doubt.START, Doubt.STEP, Doubt.STEP]


def test_the_time_of_a_process_begins_again_when_its_clock_is_set() -> None:
    node = Node()
    began_ms = node.wall_ms
    for _ in range(10):
        node.passes(HOUR, step_ms=400)  # slewed
        node.running_since()
    assert node.running_since() == began_ms + 10 * 400
    node.passes(HOUR, step_ms=-DAY)
    assert node.running_since() == node.wall_ms
    node.passes(HOUR)
    assert node.running_since() == node.wall_ms - HOUR


def test_two_wrong_ones_do_not_outvote_who_has_run_all_along() -> None:
    """The median counts only if a witness is at it; a witness elsewhere stops the grace."""
    *wrong, right = nodes = cluster()
    for node in wrong:
        node.start(off_ms=SECOND, reboot=True, step_ms=2 * DAY)
    assert exchange(nodes) == [Doubt.START, Doubt.START, Doubt.NONE]
    assert exchange(nodes, 2 * HOUR) == [Doubt.START, Doubt.START, Doubt.NONE]
    assert right.trust.skew_ms is not None
    assert right.trust.skew_ms <= -2 * DAY


def test_a_controller_that_has_run_since_before_the_gap_is_a_witness() -> None:
    node = running()
    node.expected = (1,)
    node.start(off_ms=3 * DAY, reboot=True)
    line_ms = node.wall_ms - node.boottime_ms
    young = [Sample(9, line_ms, False, node.wall_ms - DAY)]
    assert node.hears(*young) is Doubt.START
    old = [Sample(9, line_ms, False, NOW - DAY)]
    assert node.hears(*old) is Doubt.NONE


def test_a_step_of_one_ends_by_agreement_and_of_all_it_does_not() -> None:
    nodes = cluster()
    nodes[0].passes(step_ms=-DAY)
    assert exchange(nodes) == [Doubt.STEP, Doubt.NONE, Doubt.NONE]
    nodes[0].trust.confirm()  # it was accepted a day behind; then time synchronisation sets it
    exchange(nodes)
    assert nodes[0].passes(step_ms=DAY) is Doubt.NONE  # the samples are fresh: it agrees at once
    assert nodes[0].trust.forget_before_ms(nodes[0].wall_ms) is None  # broker/clock_trust W3
    assert exchange(nodes) == [Doubt.NONE] * 3
    for node in nodes:
        node.passes(step_ms=DAY)
    assert exchange(nodes) == [Doubt.STEP] * 3
    assert exchange(nodes, 2 * HOUR) == [Doubt.STEP] * 3


def test_nodes_that_are_not_heard_yet_have_their_time() -> None:
    """The first reply may know this node alone; a new controller knows no node at first."""
    nodes = cluster()
    nodes[0].start(off_ms=HOUR, reboot=True, step_ms=10 * 60 * SECOND)
    assert nodes[0].hears() is Doubt.NOT_COMPARED
    nodes[0].passes(5 * SECOND)
    assert nodes[0].hears() is Doubt.NOT_COMPARED
    for other in nodes[1:]:
        other.passes(HOUR)
    assert exchange(nodes)[0] is Doubt.AHEAD
    nodes[0].passes(SECOND)
    assert nodes[0].hears() is Doubt.AHEAD  # the new controller's first samples
    nodes[0].passes(7 * SECOND)
    # it is alone: no other node contradicts for a whole session
    assert nodes[0].hears() is Doubt.NONE


def test_without_the_cluster_the_grace_does_not_run_out() -> None:
    node = running()
    node.start(off_ms=SECOND, reboot=True, step_ms=2 * DAY)
    assert node.alone() is Doubt.START
    assert node.passes(2 * HOUR) is Doubt.START
    assert node.hears() is Doubt.NONE


def test_a_new_broker_that_is_ahead_of_the_cluster_is_not_trusted() -> None:
    nodes = cluster()
    new = Node(4, nodes[0].wall_ms + DAY)
    new.expected = (1, 2, 3, 4)
    for node in nodes:
        node.expected = new.expected
    assert exchange([*nodes, new])[3] is Doubt.AHEAD


# -- leadership ------------------------------------------------------------------------------------


def test_who_is_off_the_median_gives_up_leadership() -> None:
    nodes = cluster()
    nodes[0].passes(step_ms=-DAY)
    exchange(nodes)
    assert [node.trust.gives_up_leadership for node in nodes] == [True, False, False]


@pytest.mark.parametrize(("size", "off"), [(2, 1), (3, 2), (5, 2)])
def test_where_more_than_a_third_are_off_nobody_gives_up(size: int, off: int) -> None:
    nodes = cluster(size)
    for number, node in enumerate(nodes[:off]):
        node.passes(step_ms=(-1) ** number * DAY)
    exchange(nodes)
    assert not any(node.trust.gives_up_leadership for node in nodes)


# -- producers -------------------------------------------------------------------------------------


def test_after_a_doubt_no_producer_is_forgotten_for_a_whole_expiration() -> None:
    """broker/clock_trust W3: the producers' times were read from a clock that may have been
    behind.
    """
    node = running()
    assert node.trust.forget_before_ms(node.wall_ms) == node.wall_ms
    node.alone(step_ms=HOUR)
    assert node.trust.forget_before_ms(node.wall_ms) is None
    node.trust.confirm()
    node.alone()
    assert node.trust.forget_before_ms(node.wall_ms) is None
    node.start(off_ms=SECOND)  # also not by the next process
    node.alone(DAY - 10 * SECOND)
    assert node.trust.doubt is Doubt.NONE
    assert node.trust.forget_before_ms(node.wall_ms) is None
    node.alone(20 * SECOND)
    assert node.trust.forget_before_ms(node.wall_ms) == node.wall_ms


def test_a_clock_that_falls_back_makes_no_producer_older() -> None:
    node = running()
    node.passes(SECOND, step_ms=-DAY)
    assert node.trust.producer_activity_ms(node.wall_ms, node.boottime_ms) == node.wall_ms + DAY
    node.start(off_ms=SECOND, reboot=True)
    assert node.trust.producer_activity_ms(node.wall_ms, node.boottime_ms) >= NOW


# -- whose clock -----------------------------------------------------------------------------------


def test_behind_its_own_last_run() -> None:
    node = running()
    assert node.trust.behind_ms == 0
    node.start(off_ms=SECOND, reboot=True, step_ms=-DAY)
    assert node.alone() is Doubt.START
    assert DAY - HOUR < node.trust.behind_ms <= DAY
    node.last = None
    node.appended_ms = node.wall_ms + DAY  # a broker wrote that time before
    node.start()
    assert node.trust.behind_ms == DAY
