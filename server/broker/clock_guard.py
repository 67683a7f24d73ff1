"""Retention trusts the wall clock only while it runs like the monotonic one (rule L10).

Sans-IO.  Record time is compared with the broker's clock to decide what has expired; a clock that
jumps a year ahead would delete everything.  The guard adds up the jumps it saw: once their sum
exceeds `clock_step_max_ms` nothing expires by age and an alert is raised, until the clock steps
back or the broker restarts (by which the operator says that the new time is right).  Slewing is no
step.
"""

from __future__ import annotations


class ClockGuard:
    """Compares wall and monotonic clock at every tick."""

    #: A difference between two ticks that a slewed clock may have.
    _SLEW_MS = 500

    def __init__(self, step_max_ms: int, wall_ms: int, monotonic_ms: int) -> None:
        self._step_max_ms = step_max_ms
        self._ahead_ms = wall_ms - monotonic_ms
        self.stepped_ms = 0  #: the sum of the jumps seen

    def observe(self, wall_ms: int, monotonic_ms: int) -> bool:
        """Account for the time now.  True if retention may run."""
        ahead_ms = wall_ms - monotonic_ms
        step_ms = ahead_ms - self._ahead_ms
        self._ahead_ms = ahead_ms
        if abs(step_ms) > self._SLEW_MS:
            self.stepped_ms += step_ms
        return not self.alert

    @property
    def alert(self) -> bool:
        """The wall clock cannot be trusted."""
        return abs(self.stepped_ms) > self._step_max_ms
