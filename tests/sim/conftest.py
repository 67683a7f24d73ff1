"""What several simulated tests begin with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.sim.replication_kit import Kit


@pytest.fixture
def make() -> Iterator[Any]:
    """Clusters of `replication_kit`, closed at the end."""
    made: list[Kit] = []

    def one(seed: int, **given: Any) -> Kit:
        made.append(Kit(seed, **given))
        return made[-1]

    yield one
    for kit in made:
        kit.sim.close()
