"""Fixtures that several simulated tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from pk.sim.long import GC_YOUNG
from tests.kit.cluster import Kit


@pytest.fixture(autouse=True)
def _rare_collections() -> Iterator[None]:
    """Collect garbage rarely in a test, as a campaign does, and at its end.

    The end of a test collects what the test left, so that its filters apply to the warnings.
    """
    before = gc.get_threshold()
    gc.set_threshold(GC_YOUNG, *before[1:])
    yield
    gc.set_threshold(*before)
    gc.collect()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Make clusters of `replication_kit`, and close them at the end."""
    made: list[Kit] = []
    defaults = getattr(request.module, "KIT", {})

    def one(seed: int, **given: Any) -> Kit:
        made.append(Kit(seed, **{**defaults, **given}))
        return made[-1]

    yield one
    for kit in made:
        kit.sim.close()
