"""The quorum machine in seeded histories: cuts, losses, power, snapshots, changes of voters.

The judge of `quorum_world` checks after every event.  The tests here run the worlds, end the
faults, and check that the quorum works again.  `PK_QUORUM_SEEDS=N` runs N seeds instead of the
usual few.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.unit.server.raft.quorum_world import World

SEEDS = int(os.environ.get("PK_QUORUM_SEEDS", "40"))


def history(seed: int) -> World:
    """Run a minute with faults, then half a minute without."""
    world = World(seed, voters=[1, 3, 3, 5][seed % 4])
    rng = world.rng
    until = 60_000
    pace_ms = rng.choice([60, 300, 3_000])
    at = rng.randrange(3_000)
    while at < until:
        world.at(at, world.fault)
        at += rng.randrange(10, pace_ms)
    for n in range(600):
        world.at(rng.randrange(until), lambda n=n: [x.append(n) for x in world.leaders()])
    world.run(until)
    world.heal()
    world.run(until + 30_000)
    return world


def alive(world: World) -> None:
    """After the faults: there is one leader, and every node commits what the leader appends."""
    leaders = world.leaders()
    newest = max(leaders, key=lambda node: node.machine.epoch)
    assert all(n is newest or n.me not in newest.machine.voters for n in leaders), "two leaders"
    before = len(world.judge.truth)
    newest.append("after")
    world.run(world.now + 5_000)
    assert len(world.judge.truth) > before, "nothing is committed"
    for node in world.nodes.values():
        if node.me in newest.machine.voters:
            assert node.machine.high_watermark == len(world.judge.truth), node.me


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_history_is_safe_and_ends_alive(seed: int) -> None:
    alive(history(seed))


def test_the_histories_hold_what_they_are_for() -> None:
    counts: Counter[str] = Counter()
    for seed in range(12):
        counts += history(seed).judge.counts
    for name in (
        "elections",
        "committed",
        "power losses",
        "cuts",
        "snapshots loaded",
        "voters changed",
    ):
        assert counts[name] > 0, counts
