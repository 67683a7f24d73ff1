"""Decides whether a broker trusts its wall clock.  Only then may records and producers expire by
age (rule L10).

Sans-IO.  The broker compares the time of records with its own clock to decide what has expired, so
a clock that is far ahead would delete everything.  Therefore the wall clock itself is checked
against four sources: CLOCK_BOOTTIME in the same process, the last run (`LastRun`, which a broker
stores while it trusts its clock), the clocks of the other nodes (`Sample`), and an operator's
confirmation.  `log/retention.py` and `log/producers.py` get the time from here, or none while the
clock is not trusted.

Words
  line    wall clock − CLOCK_BOOTTIME.  It is constant unless the wall clock is set.  Changes of
          less than SLEW_MS between two observations are slewing and are accepted.
  median  the median of the recent clock readings of all nodes, this one included.
  doubt   why the clock is not trusted.  `START`: it does not fit the last run.  `STEP`: it was set
          by more than `clock_step_max_ms`.  `AHEAD`: it is ahead of the median by more than that.
          `NOT_COMPARED`: no clocks of other nodes have been received since the start.

How a doubt ends
  | doubt        | by itself                  | by agreement | by time               | by confirm |
  |--------------|----------------------------|--------------|-----------------------|------------|
  | NOT_COMPARED | other clocks are received  | –            | –                     | yes        |
  | START        | the clock is set right     | yes          | after clock_grace_ms  | yes        |
  | STEP         | the clock is set back      | yes          | –                     | yes        |
  | AHEAD        | the clock is set right     | –            | –                     | yes        |

*Agreement* means that this clock is at the median, and so is the clock of a *witness*.  A witness
is another node that trusts its own clock, or whose process has run, without its clock being set,
since before this broker's last run.  In a cluster that was restarted as a whole, or whose clocks
were set together, the clocks agree, but no node is a witness: every broker waits.

CLOCK_BOOTTIME decides whether another process began before the last run, because by a clock that is
behind every process seems to have begun earlier.  If the last run was in another boot, the process
must have begun before this boot and, by its wall clock, before the last run; and that wall clock
must not be before the last run.

The grace does not end while a witness's clock differs, or while no clocks of the cluster are
received.

Invariants
  W1  The last run advances only while the clock is trusted.  So every restart under the same wrong
      clock finds the same gap again.
  W2  Times that clients wrote (CreateTime) are not evidence.  Times that brokers wrote
      (LogAppendTime) come from a clock that may have been wrong: they only help to find the clock
      that is off (`behind_ms`), and end no doubt.
  W3  After a doubt no producer is forgotten for `producer_id_expiration_ms`, because the times of
      the producers' last batches were read from a clock that may have been behind.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import NamedTuple

from pk.clock import MedianTime
from pk.log.last_run import LastRun
from pk.running_since import SLEW_MS
from pk.types import NodeId

#: A reply that took longer measures the other nodes' clocks too inaccurately.
DELAY_MAX_MS = 5_000


class Doubt(enum.Enum):
    """Why the wall clock is not trusted (see the table above).  Logs show the value."""

    NONE = ""
    NOT_COMPARED = "not_compared"
    START = "start"
    STEP = "step"
    AHEAD = "ahead"


class Sample(NamedTuple):
    """One node's clock, as a heartbeat's reply reported it."""

    node_id: NodeId
    line_ms: int  #: its wall clock − CLOCK_BOOTTIME of this node
    trusted: bool  #: by the node itself
    #: since when its process has run and its clock was not set, by that clock; 0 = not reported
    running_since_ms: int = 0


class Limits(NamedTuple):
    """The settings that matter here, in ms."""

    step_max: int
    gap_max: int
    grace: int
    fresh: int  #: older clock samples do not count
    producer_expiration: int


class ClockTrust:
    """Decides whether one broker trusts its wall clock.

    The broker calls `begin` once it knows the last run and the logs on its disks.
    """

    def __init__(self, node_id: NodeId, limits: Limits, wall_ms: int, boottime_ms: int) -> None:
        self._node_id = node_id
        self._limits = limits
        self.tolerance_ms = max(limits.step_max, SLEW_MS)
        self._line_ms = wall_ms - boottime_ms
        self._now_ms = boottime_ms  #: CLOCK_BOOTTIME at the last look
        self._true_line_ms = self._line_ms  #: the line when the clock was last trusted
        self.stepped_ms = 0  #: the sum of the jumps seen since the clock was last accepted
        self._own = Doubt.NONE  #: START or STEP
        self._ahead = False  #: ahead of the median, by the last samples that counted
        self._compared = False
        self._confirmed = False
        self._expected_line: tuple[int, int] | None = None  #: where the last run allows the line
        self._grace_ends_ms = 0
        self._last_trusted_ms: int | None = None  #: wall clock of the last run
        self._last_trusted_boottime_ms: int | None = None  #: None = not in this boot
        self._appended_ms: int | None = None
        self._keep_producers_ms = 0  #: W3: until then by CLOCK_BOOTTIME
        self._samples: dict[NodeId, Sample] = {}
        self._compared_ms: int | None = None  #: CLOCK_BOOTTIME
        self._missing: frozenset[NodeId] = frozenset()  #: expected, and not in the samples
        self._missing_since_ms = 0
        self._brokers = 1  #: of the cluster
        self._doubted = False  #: since `_keep_producers_ms` was last set (W3)

    # -- the start ---------------------------------------------------------------------------------

    def begin(
        self, last: LastRun | None, boot_id: str, *, fresh: bool, appended_ms: int | None = None
    ) -> None:
        """Compare the clock with the last run.

        `fresh`: there is no log, so there is nothing that could expire.  `appended_ms`: the newest
        time that a broker wrote into these logs.
        """
        wall_ms, tolerance = self._line_ms + self._now_ms, self.tolerance_ms
        self._appended_ms = appended_ms
        if last is None:
            if not fresh:
                self._doubt_start()
            return
        self._last_trusted_ms = last.wall_ms
        if boot_id and last.boot_id == boot_id:
            line = last.wall_ms - last.boottime_ms
            self._last_trusted_boottime_ms = last.boottime_ms
            self._expected_line = (line - tolerance, line + tolerance)
        else:
            line = last.wall_ms - self._now_ms
            self._expected_line = (line - tolerance, line + self._limits.gap_max)
        self._true_line_ms = line
        left_ms = min(last.keep_producers_ms - wall_ms, self._limits.producer_expiration)
        self._keep_producers_ms = self._now_ms + max(0, left_ms)
        if not self._fits_last_run():
            self._doubt_start()

    def _doubt_start(self) -> None:
        self._own, self._doubted = Doubt.START, True
        self._grace_ends_ms = self._now_ms + self._limits.grace

    def _fits_last_run(self) -> bool:
        expected = self._expected_line
        return expected is not None and expected[0] <= self._line_ms <= expected[1]

    # -- what is seen ------------------------------------------------------------------------------

    def observe(self, wall_ms: int, boottime_ms: int) -> bool:
        """Check a new reading of both clocks.  True if the wall clock is trusted."""
        line_ms = wall_ms - boottime_ms
        jump_ms, self._line_ms, self._now_ms = line_ms - self._line_ms, line_ms, boottime_ms
        if abs(jump_ms) > SLEW_MS:
            self._jumped(jump_ms)
        self._judge()
        if self.doubt is not Doubt.NONE:
            return False
        self._true_line_ms, self._last_trusted_ms = line_ms, wall_ms
        self._last_trusted_boottime_ms = boottime_ms
        if self._doubted:
            self._doubted = False
            self._keep_producers_ms = boottime_ms + self._limits.producer_expiration  # W3
        return True

    def _jumped(self, by_ms: int) -> None:
        self.stepped_ms += by_ms
        if self._own is Doubt.START:
            self._grace_ends_ms = self._now_ms + self._limits.grace  # the grace begins again
            if self._fits_last_run():
                self._accept()
        elif abs(self.stepped_ms) > self._limits.step_max:
            self._own, self._confirmed, self._doubted = Doubt.STEP, False, True
        else:
            self._own = Doubt.NONE

    def compare(self, samples: Iterable[Sample], expected: Collection[NodeId]) -> None:
        """Compare the clock with those of all nodes that the active controller knows.

        expected: the brokers, whose clocks should be among the samples.
        """
        self._brokers = len({self._node_id, *expected})
        found = {each.node_id: each for each in samples if each.node_id != self._node_id}
        self._samples, self._compared_ms = found, self._now_ms
        missing = frozenset(each for each in expected if each != self._node_id) - found.keys()
        if not missing <= self._missing:
            self._missing_since_ms = self._now_ms
        self._missing = missing
        self._judge()

    def confirm(self) -> Doubt:
        """Trust the clock because an operator confirms it; return the doubt that this ends."""
        before = self.doubt
        self._accept()
        self._compared = self._confirmed = True
        self._ahead, self._appended_ms = False, None
        return before

    def _accept(self) -> None:
        self._own, self.stepped_ms = Doubt.NONE, 0

    # -- the decision -----------------------------------------------------------------------------

    def _fresh(self) -> bool:
        compared_ms = self._compared_ms
        return compared_ms is not None and self._now_ms - compared_ms <= self._limits.fresh

    def _settled(self) -> bool:
        """Whether the samples are recent, and any missing nodes were waited for long enough."""
        waited_ms = self._now_ms - self._missing_since_ms
        return self._fresh() and (not self._missing or waited_ms >= self._limits.fresh)

    def _lines(self) -> list[int]:
        return [self._line_ms, *(each.line_ms for each in self._samples.values())]

    def _median_ms(self) -> int:
        return MedianTime.of(self._lines()).middle_ms

    def _judge(self) -> None:
        if not self._settled():
            return  # the earlier decision stays
        self._compared = True
        tolerance, median_ms = self.tolerance_ms, self._median_ms()
        self._ahead = not self._confirmed and self._line_ms - median_ms > tolerance
        self._doubted = self._doubted or self._ahead
        if self._own is Doubt.NONE:
            return
        witnesses = [each.line_ms for each in self._samples.values() if self._is_witness(each)]
        at_median = any(abs(line - median_ms) <= tolerance for line in witnesses)
        agreed = at_median and abs(self._line_ms - median_ms) <= tolerance
        waited = self._own is Doubt.START and self._now_ms >= self._grace_ends_ms
        contradicted = any(abs(line - self._line_ms) > tolerance for line in witnesses)
        if agreed or (waited and not contradicted):
            self._accept()

    def _is_witness(self, sample: Sample) -> bool:
        return sample.trusted or (bool(sample.running_since_ms) and self._ran_before(sample))

    def _ran_before(self, sample: Sample) -> bool:
        """Whether its process has run since before the last run, its clock unchanged."""
        # by CLOCK_BOOTTIME of this node, and as late as the delay of the sample allows
        began_ms = sample.running_since_ms - sample.line_ms + DELAY_MAX_MS
        if self._last_trusted_boottime_ms is not None:
            return began_ms <= self._last_trusted_boottime_ms
        last_ms, expected = self._last_trusted_ms, self._expected_line
        if last_ms is None or expected is None or sample.line_ms < expected[0]:
            return False
        return began_ms <= 0 and sample.running_since_ms <= last_ms

    # -- what is known -----------------------------------------------------------------------------

    @property
    def doubt(self) -> Doubt:
        if self._own is not Doubt.NONE:
            return self._own
        if not self._compared:
            return Doubt.NOT_COMPARED
        return Doubt.AHEAD if self._ahead else Doubt.NONE

    @property
    def alert(self) -> bool:
        """Whether the clock is not trusted and an operator should check it."""
        return self.doubt not in (Doubt.NONE, Doubt.NOT_COMPARED)

    @property
    def skew_ms(self) -> int | None:
        """Return how far the clock is ahead of the median; None = no recent samples."""
        if not self._samples or not self._fresh():
            return None
        return self._line_ms - self._median_ms()

    @property
    def nodes(self) -> int:
        """Return how many nodes' clocks the median is computed from."""
        return 1 + len(self._samples) if self._fresh() else 1

    @property
    def gap_ms(self) -> int | None:
        """How far the clock is past the last run; None = no last run is known."""
        last = self._last_trusted_ms
        return None if last is None else self._line_ms + self._now_ms - last

    @property
    def behind_ms(self) -> int:
        """How far the clock is behind what brokers wrote before; 0 = it is not."""
        known = [each for each in (self._last_trusted_ms, self._appended_ms) if each is not None]
        wall_ms = self._line_ms + self._now_ms
        behind_ms = max(known, default=wall_ms) - wall_ms
        expected_ms = self._true_line_ms - self._line_ms
        return max(behind_ms, expected_ms, 0)

    @property
    def gives_up_leadership(self) -> bool:
        """Whether the clock is off the median while those of two thirds of the nodes are not.

        If more clocks are off, it is not known which ones are right.
        """
        if not self._settled():
            return False
        median_ms, lines = self._median_ms(), self._lines()
        off = sum(abs(line - median_ms) > self.tolerance_ms for line in lines)
        return abs(self._line_ms - median_ms) > self.tolerance_ms and 3 * off <= len(lines)

    # -- times to use ------------------------------------------------------------------------------

    def median_time(self, wall_ms: int) -> MedianTime | None:
        """Return the time by the median of the clocks that their own brokers trust, for times that
        two brokers compare (C4).

        None = it is not known: this broker does not trust its clock, or it is off the median by
        more than the tolerance, or half of the brokers' clocks were not received recently or are
        not trusted.  Two clocks that are trusted may differ by almost twice the tolerance.
        """
        if self.doubt is not Doubt.NONE or not self._fresh():
            return None
        trusted = [each.line_ms for each in self._samples.values() if each.trusted]
        trusted.append(self._line_ms)
        if 2 * len(trusted) <= self._brokers:
            return None
        earliest_ms, latest_ms = MedianTime.of(trusted)
        tolerance = self.tolerance_ms
        if not earliest_ms - tolerance <= self._line_ms <= latest_ms + tolerance:
            return None
        return MedianTime.of(trusted, self._brokers).plus(wall_ms - self._line_ms)

    def forget_before_ms(self, wall_ms: int) -> int | None:
        """Return the time by which idle producers expire; None = none may expire now (W3)."""
        trusted = self.doubt is Doubt.NONE and self._now_ms >= self._keep_producers_ms
        return wall_ms if trusted else None

    def producer_activity_ms(self, wall_ms: int, boottime_ms: int) -> int:
        """Return the time to store as a producer's last activity.

        After the clock was set back, producers therefore do not look idle for longer (W3).
        """
        return max(wall_ms, self._true_line_ms + boottime_ms)

    def last_run(self, boot_id: str) -> LastRun | None:
        """Return the last run to store; None while the clock is not trusted (W1)."""
        if self.doubt is not Doubt.NONE:
            return None
        wall_ms = self._line_ms + self._now_ms
        left_ms = self._keep_producers_ms - self._now_ms
        return LastRun(wall_ms, self._now_ms, boot_id, wall_ms + left_ms if left_ms > 0 else 0)
