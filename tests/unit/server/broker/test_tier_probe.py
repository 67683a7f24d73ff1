"""A store that does not pass its probe (rule T14): how often the tier process logs that, and what
it assumes of the broker's clock while the broker is away (rule L10).
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pk import errors
from pk.server.tier import node as tier_node

Cluster = Any  # conftest.py's


class Lines:
    """A log: event → times, in ms of the world's monotonic clock."""

    def __init__(self, cluster: Cluster) -> None:
        self._clock = cluster.client.clock
        self.said: dict[str, list[int]] = {}

    def error(self, event: str, **facts: Any) -> None:
        self.said.setdefault(event, []).append(self._clock.monotonic_ms())

    info = warning = error

    def bug(self, where: str, bug: BaseException) -> None:
        raise AssertionError(where) from bug


def test_a_probe_that_goes_on_failing_is_said_once_a_minute(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five minutes of failures by the world's clock give five lines; no line is repeated after the
    store is back.
    """
    lines = Lines(cluster)
    probes: list[int] = []

    def away(*_: Any) -> None:
        probes.append(cluster.client.clock.monotonic_ms())
        raise errors.TierUnavailable("the store does not answer")

    made = tier_node.TierNode.__init__
    monkeypatch.setattr(
        tier_node.TierNode, "__init__",
        lambda node, *given, **more: made(node, *given, **more, log=lines),
    )  # fmt: skip
    cluster.start()
    cluster.tables.before_load = away
    cluster.start_tier()
    cluster.world.run_until(lambda: bool(probes))
    cluster.world.loop.run_for_ms(5 * 60_000 - 1_000)
    said = lines.said["store_probe_failed"]
    assert len(said) == 5
    assert all(60_000 <= later - at < 2 * 60_000 for at, later in itertools.pairwise(said))
    assert len(probes) > 4 * len(said), "each probe would have had a line"
    assert "store_probed" not in lines.said
    cluster.tables.before_load = lambda *_: None
    cluster.world.run_until(lambda: "store_probed" in lines.said)
    cluster.world.loop.run_for_ms(2 * 60_000)
    assert len(lines.said["store_probe_failed"]) == 5
    assert len(lines.said["store_probed"]) == 1


def test_the_tier_takes_the_brokers_clock_for_doubted_while_the_broker_is_away(
    cluster: Cluster,
) -> None:
    """Rule L10: the broker's earlier statement about its clock may not be true any more."""
    cluster.start()
    cluster.start_tier()
    cluster.world.run_until(lambda: cluster.tier is not None)
    worker = cluster.tier.worker
    assert worker._clock_doubted, "the broker was not heard yet"
    cluster.world.run_until(lambda: not worker._clock_doubted)
    cluster.kill("broker", "d1")
    assert not asked(cluster, cluster.tier._ask_clock), "nobody answers"
    cluster.world.run_until(lambda: worker._clock_doubted)
    cluster.start_broker()
    cluster.world.run_until(lambda: not worker._clock_doubted)


def asked(cluster: Cluster, question: Callable[[], Awaitable[bool]]) -> bool:
    """Return the answer of the tier process."""
    task = cluster.world.loop.create_task(question())
    cluster.world.run_until(task.done)
    return task.result()


def test_the_tier_hears_of_a_doubt_when_it_is_about_to_delete(cluster: Cluster) -> None:
    """Rule L10: the last poll may be ten seconds old, so the broker reads its clock for the
    answer.
    """
    cluster.start()
    cluster.start_tier()
    cluster.world.run_until(lambda: cluster.tier is not None)
    worker = cluster.tier.worker
    cluster.world.run_until(lambda: not worker._clock_doubted)
    assert asked(cluster, cluster.tier._ask_clock)
    broker = cluster.broker.core
    broker.clocks.trusted_ms = lambda: None
    assert not worker._clock_doubted
    assert not asked(cluster, cluster.tier._ask_clock)
