"""The code that breaks rule L10 (clocks) for its canaries (canaries.py)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from pk.log.manager import LogManager
from pk.server.broker.clock_trust import ClockTrust


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
