"""The code that breaks rule L10 (clocks) for its canaries (canaries.py)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from pk.log.manager import LogManager
from pk.server.broker.clock_trust import ClockTrust, Sample
from pk.server.controller.active import ActiveController
from pk.server.controller.clocks import Clocks
from pk.sim.world import EPOCH_MS
from pk.wire import pk_pb2 as wire


def trusted_for_producers(stack: ExitStack) -> None:
    """Let producers expire by the time of a clock that jumped."""
    checkpoint = LogManager.checkpoint

    async def trusting(self: LogManager, directory: Any = None, _now_ms: Any = None) -> None:
        await checkpoint(self, directory, self._world.clock.wall_ms())

    stack.enter_context(patch.object(LogManager, "checkpoint", trusting))


def believed_after_a_start(stack: ExitStack) -> None:
    """Trust the clock at every start; the broker still notices a step while it runs."""

    def begin(self: ClockTrust, *_: Any, **_more: Any) -> None:
        self._compared = True

    stack.enter_context(patch.object(ClockTrust, "begin", begin))
    stack.enter_context(patch.object(ClockTrust, "_judge", lambda self: None))


def older_by_a_wrong_clock(stack: ExitStack) -> None:
    """Ask the wall clock, not CLOCK_BOOTTIME, whether a process began before the last run."""

    def ran_before(self: ClockTrust, sample: Sample) -> bool:
        last_ms = self._last_trusted_ms
        return last_ms is not None and sample.running_since_ms <= last_ms

    stack.enter_context(patch.object(ClockTrust, "_ran_before", ran_before))


def relative_to_the_controllers_wall_clock(stack: ExitStack) -> None:
    """Keep each clock reading relative to the wall clock of the active controller.

    The old readings then follow that clock when it is set, and so agree with it.
    """
    init, observe, samples = ActiveController.__init__, Clocks.observe, Clocks.samples

    def with_clock(self: ActiveController, *args: Any, **more: Any) -> None:
        init(self, *args, **more)
        setattr(self.clocks, "clock", self._world.clock)  # noqa: B010 - the class has none

    def from_wall(
        self: Any, node: int, reading: wire.ClockReading, boottime_ms: int, **more: Any
    ) -> None:
        known = wire.ClockReading()
        known.CopyFrom(reading)
        if known.wall_ms:
            known.wall_ms += boottime_ms - self.clock.wall_ms() + EPOCH_MS
        observe(self, node, known, boottime_ms, **more)

    def to_wall(self: Any, _wall_ms: int, boottime_ms: int, *more: Any) -> Any:
        return samples(self, boottime_ms + EPOCH_MS, boottime_ms, *more)

    stack.enter_context(patch.object(ActiveController, "__init__", with_clock))
    stack.enter_context(patch.object(Clocks, "observe", from_wall))
    stack.enter_context(patch.object(Clocks, "samples", to_wall))
