"""In a cluster, local replicas take only edges of the table (replica/state.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pk import errors
from pk.server.replica import state as states
from pk.server.replica.state import (
    TRANSITIONS,
    HostedReplica,
    HostedReplicas,
    ReplicaEvent,
    ReplicaState,
)
from pk.types import PartitionKey
from tests.kit.cluster import written
from tests.sim.test_replicas_made_anew import damage, outside

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

Edge = tuple[ReplicaState, ReplicaEvent, ReplicaState]
S, E = ReplicaState, ReplicaEvent


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Edge, int]]:
    """Count every transition of every broker; check that each is in the table."""
    seen: dict[Edge, int] = {}
    on = HostedReplicas.on

    def noted(
        self: HostedReplicas,
        key: PartitionKey,
        event: ReplicaEvent,
        cause: errors.PkError | None = None,
    ) -> HostedReplica:
        before = self.state(key)
        replica = on(self, key, event, cause)
        edge = (before, event, self.state(key))
        seen[edge] = seen.get(edge, 0) + 1
        return replica

    monkeypatch.setattr(HostedReplicas, "on", noted)
    yield seen
    assert all(TRANSITIONS[before, event] is after for before, event, after in seen)


def test_a_replica_is_followed_damaged_rebuilt_and_removed(
    make: Any, taken: dict[Edge, int]
) -> None:
    """A replica passes through leadership, a restart, damage (rule L9) and the deletion of its
    topic.
    """
    kit = make(21, auto_leader_rebalance_enable=False)
    kit.create("t", min_insync_replicas=2)
    ledger = written(kit, "t", 100)
    leader, n = outside(kit, "t")
    damage(kit, "t", n)
    assert kit.replica(n, "t").state is S.OFFLINE
    kit.sim.network.heal(f"b{n}", "controller")
    kit.until(lambda: len(kit.state("t").isr) == 3)
    assert kit.replica(n, "t").state is S.FOLLOWING
    kit.kill(leader)
    kit.until(lambda: kit.state("t").leader not in (leader, -1))
    kit.boot(leader)
    kit.until(lambda: len(kit.state("t").isr) == 3)
    ledger.check()
    kit.delete("t")
    kit.until(lambda: not any(list(each.core.replicas) for each in kit.brokers.values()))
    for edge in (
        (S.ABSENT, E.OPENED, S.UNATTACHED),
        (S.UNATTACHED, E.FOLLOWED, S.FOLLOWING),
        (S.UNATTACHED, E.ELECTED, S.LEADING),
        (S.FOLLOWING, E.DETACHED, S.UNATTACHED),
        (S.UNATTACHED, E.FAILED, S.OFFLINE),
        (S.OFFLINE, E.SET_ASIDE, S.REBUILDING),
        (S.REBUILDING, E.OPENED, S.UNATTACHED),
        (S.LEADING, E.REMOVED, S.ABSENT),
    ):
        assert edge in taken, edge


def test_a_step_without_an_edge_is_a_bug_of_its_broker(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator notices: a broker that takes a transition outside of the table stops at it."""
    kit = make(21, auto_leader_rebalance_enable=False)
    kit.create("t")
    monkeypatch.delitem(states.TRANSITIONS, (S.UNATTACHED, E.FOLLOWED))
    kit.kill(kit.state("t").leader)
    with pytest.raises(AssertionError, match="no transition for FOLLOWED"):
        kit.wait(10_000)
    kit.bugs.clear()
