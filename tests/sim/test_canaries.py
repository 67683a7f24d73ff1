"""Rules broken on purpose: the recorded seed of a canary still notices it (sim/canaries.py).

`python -m pk.sim.canaries [NAME …]` searches the seeds again when a change of the code changed the
histories.
"""

from __future__ import annotations

import pytest

from pk.sim.campaign import Run
from pk.sim.canaries import CANARIES, recorded

pytestmark = [
    pytest.mark.sim,
    # tasks of a killed node are unwound when its world ends, and may raise errors
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SEEDS = recorded()


def test_every_canary_has_a_seed_that_notices() -> None:
    assert set(SEEDS) == set(CANARIES)


@pytest.mark.parametrize("name", CANARIES)
def test_a_canary_is_noticed(name: str) -> None:
    canary = CANARIES[name]
    violation = canary.notices(SEEDS[name])
    assert canary.caught(violation), violation or "nothing was noticed"


@pytest.mark.parametrize(
    "name",
    [
        "a flush that only says so",
        "a broker that leads in the name of its predecessor",
        "a copier that tidies up after a failed commit",
    ],
)
def test_without_a_canary_nothing_is_noticed(name: str) -> None:
    """The options of a canary alone break no rule, and its end restores the rule.

    A seed is recorded for a canary only if this holds; here it is checked for quick canaries.
    """
    with CANARIES[name].broken():
        pass
    assert not Run(SEEDS[name], CANARIES[name].options).execute().violation
