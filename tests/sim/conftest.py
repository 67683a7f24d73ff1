"""Fixtures that several simulated tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.cluster import Kit


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
