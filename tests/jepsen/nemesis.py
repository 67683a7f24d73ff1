"""The faults of a run, one after the other, drawn from a seed: kills, pauses and cut links.

A fault begins, lasts for a while and ends; then the cluster has some quiet seconds.  Every fault of
the deck happens before one is repeated.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))

from cluster import TestedCluster

from pk import errors
from pk.clock import block_s, monotonic_s


@dataclass(slots=True, frozen=True)
class Pace:
    """How long faults last, and how long it is quiet after each; seconds."""

    lasts_s: tuple[float, float]
    quiet_s: tuple[float, float]


FULL = Pace((0.5, 9.0), (2.0, 8.0))
SHORT = Pace((0.5, 2.5), (0.5, 1.5))


@dataclass(slots=True)
class Happened:
    """A fault that happened; seconds since the beginning of the load."""

    name: str
    victims: tuple[int, ...]
    began_s: float
    ended_s: float = -1.0


class Nemesis:
    """Disturbs a cluster, in the thread of its caller: nodes end with the thread that started
    them.
    """

    def __init__(self, cluster: TestedCluster, rng: random.Random, pace: Pace) -> None:
        self.happened: list[Happened] = []
        self._cluster, self._rng, self._pace = cluster, rng, pace
        self._begun = self._until = 0.0

    def disturb(self, seconds: float) -> None:
        """Make faults for so long; when it returns, the last one has ended."""
        self._begun = monotonic_s()
        self._until = self._begun + seconds
        deck: list[str] = []
        self._wait(self._pace.quiet_s)
        while monotonic_s() < self._until:
            if not deck:
                deck = list(FAULTS)
                self._rng.shuffle(deck)
            self._one(deck.pop())
            self._wait(self._pace.quiet_s)

    def _one(self, name: str) -> None:
        count, begin = FAULTS[name]
        victims = tuple(self._rng.sample(sorted(self._cluster.nodes), count))
        happened = Happened(name, victims, monotonic_s() - self._begun)
        self.happened.append(happened)
        end = begin(self._cluster, victims)
        try:
            self._wait(self._pace.lasts_s)
        finally:
            end()
            happened.ended_s = monotonic_s() - self._begun

    def _wait(self, bounds_s: tuple[float, float]) -> None:
        left_s = max(0.0, self._until - monotonic_s())
        block_s(min(self._rng.uniform(*bounds_s), left_s))


End = Callable[[], object]
Victims = tuple[int, ...]


def _kill(cluster: TestedCluster, victims: Victims) -> End:
    """kill -9 of all processes of the victims."""
    cluster.kill(*victims)
    return lambda: cluster.start_nodes(victims)


def _kill_broker(cluster: TestedCluster, victims: Victims) -> End:
    """kill -9 of the broker's process; the supervisor starts it again."""
    for victim in victims:
        cluster.nodes[victim].kill("broker")
    return lambda: None


def _kill_controller(cluster: TestedCluster, victims: Victims) -> End:
    """kill -9 of the active controller's process, if there is one."""
    try:
        victims = (cluster.active_controller(5.0),)
    except errors.PkError:
        pass  # no controller is active: the victim that was drawn
    for victim in victims:
        cluster.nodes[victim].kill("controller")
    return lambda: None


def _bounce(cluster: TestedCluster, victims: Victims) -> End:
    """A clean stop, which hands over the leaderships first."""
    for victim in victims:
        cluster.nodes[victim].stop()
    return lambda: cluster.start_nodes(victims)


def _pause(cluster: TestedCluster, victims: Victims) -> End:
    """SIGSTOP of all processes of the victims."""
    pids = {victim: cluster.pids_of(victim) for victim in victims}
    for victim in victims:
        cluster.freeze(victim, pids[victim])
    return lambda: [cluster.thaw(victim, pids[victim]) for victim in victims]


def _pause_broker(cluster: TestedCluster, victims: Victims) -> End:
    """SIGSTOP of the broker's process alone."""
    found = {victim: cluster.nodes[victim].pids() for victim in victims}
    pids = {victim: [each["broker"]] for victim, each in found.items() if "broker" in each}
    for victim, own in pids.items():
        cluster.freeze(victim, own)
    return lambda: [cluster.thaw(victim, own) for victim, own in pids.items()]


def _isolate(cluster: TestedCluster, victims: Victims) -> End:
    """Cut all links of the victims to other nodes; clients still reach every broker."""
    for victim in victims:
        cluster.network.isolate(victim, cluster.others(victim))
    return cluster.network.heal


def _mute(cluster: TestedCluster, victims: Victims) -> End:
    """Cut what the victims send; they still receive."""
    for victim in victims:
        for other in cluster.others(victim):
            cluster.network.cut(victim, other)
    return cluster.network.heal


def _deaf(cluster: TestedCluster, victims: Victims) -> End:
    """Cut what the victims receive; they still send."""
    for victim in victims:
        for other in cluster.others(victim):
            cluster.network.cut(other, victim)
    return cluster.network.heal


def _cut_link(cluster: TestedCluster, victims: Victims) -> End:
    """Cut the link between two nodes; the third one reaches both."""
    cluster.network.isolate(victims[0], victims[1:])
    return cluster.network.heal


def _cut_and_kill(cluster: TestedCluster, victims: Victims) -> End:
    """Isolate one node and kill another."""
    heal = _isolate(cluster, victims[:1])
    restart = _kill(cluster, victims[1:])
    return lambda: (heal(), restart())


def _pause_and_kill_broker(cluster: TestedCluster, victims: Victims) -> End:
    """Pause one broker and kill another one's process."""
    thaw = _pause_broker(cluster, victims[:1])
    _kill_broker(cluster, victims[1:])
    return thaw


#: name → how many nodes it hits, and how it begins.  It returns how it ends.
FAULTS: dict[str, tuple[int, Callable[[TestedCluster, Victims], End]]] = {
    "kill one": (1, _kill),
    "kill two": (2, _kill),
    "kill all": (3, _kill),
    "kill broker": (1, _kill_broker),
    "kill two brokers": (2, _kill_broker),
    "kill controller": (1, _kill_controller),
    "bounce": (1, _bounce),
    "pause one": (1, _pause),
    "pause two": (2, _pause),
    "pause all": (3, _pause),
    "pause broker": (1, _pause_broker),
    "isolate one": (1, _isolate),
    "isolate all": (3, _isolate),
    "mute": (1, _mute),
    "deaf": (1, _deaf),
    "cut link": (2, _cut_link),
    "cut and kill": (2, _cut_and_kill),
    "pause and kill": (2, _pause_and_kill_broker),
}
