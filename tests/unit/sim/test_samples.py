"""What the observer takes for a follower that relies on its topic's table (V4)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pk.sim.samples import relies_on_tier


@pytest.mark.parametrize(
    ("log_start", "local", "high_watermark", "blank", "relies"),
    [
        (0, 63, 63, False, True),
        (63, 63, 63, False, False),
        (0, 63, 62, False, False),  # it is being truncated
        (0, 63, 63, True, False),  # its process died as it began again (log/loading O2)
    ],
)
def test_who_relies_on_the_tier(
    log_start: int, local: int, high_watermark: int, blank: bool, relies: bool
) -> None:
    log: Any = SimpleNamespace(log_start=log_start, local_log_start=local, blank=blank)
    assert relies_on_tier(log, high_watermark) is relies
