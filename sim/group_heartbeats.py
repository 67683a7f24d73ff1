"""The check that members learn a rebalance at once: no heartbeat waits while it has news.

V36  A heartbeat that waits at a coordinator is answered within WAKE_MS once its group has what the
     member has not stated: a rebalance began, the member was removed or fenced, or the group is in
     another generation (rule P5).

The check reads the groups and the waiting heartbeats of each running broker.  A coordinator may be
late while its newest decisions are not committed, while it replays, and before it has begun the
sessions after a replay: then nothing is checked.
"""

from __future__ import annotations

from collections import Counter

from pk import errors
from pk.server.groups.groups import ConsumerGroup
from pk.server.groups.hosted_groups import HostedGroups
from pk.server.groups.waiting_heartbeats import check
from pk.sim.checkers import Violation
from pk.sim.cluster import SimCluster
from pk.sim.options import BROKER

#: Longer than the turns of the busiest event loop between a change and its answers.
WAKE_MS = 100.0


class HeartbeatCheck:
    """Checks V36 from time to time."""

    def __init__(self, cluster: SimCluster, counts: Counter[str]) -> None:
        self._cluster = cluster
        self._counts = counts
        self._since_ms: dict[object, float] = {}  #: since when a wait has news

    def look(self, now_ms: float) -> None:
        """Look at every waiting heartbeat once.  Raises `Violation`."""
        before, self._since_ms = self._since_ms, {}
        for machine in self._cluster.with_role(BROKER):
            node = self._cluster.world.nodes.get(machine.processes[BROKER].name)
            broker = machine.broker
            if broker is None or node is None or node.paused or not node.alive:
                continue
            for hosted in broker.core.groups._hosted.values():
                if _settled(hosted):
                    self._look_at(machine.node_id, hosted, before, now_ms)

    def _look_at(
        self, node_id: int, hosted: HostedGroups, before: dict[object, float], now_ms: float
    ) -> None:
        for group_id, members in hosted.heartbeats._groups.items():
            group = hosted.groups.get(group_id) or ConsumerGroup(group_id)
            for member_id, waiting in members.items():
                self._counts["looks at waiting heartbeats"] += 1
                if waiting.over.done():
                    continue
                try:
                    check(group, waiting.asked)
                    continue
                except errors.PkError as news:
                    name = type(news).__name__
                since_ms = self._since_ms[waiting] = before.get(waiting, now_ms)
                if now_ms - since_ms > WAKE_MS:
                    raise Violation(
                        f"V36: a heartbeat of {member_id} waits for {now_ms - since_ms:g} ms at "
                        f"node {node_id}, which has {name} for it"
                    )


def _settled(hosted: HostedGroups) -> bool:
    """Whether everything that is decided is committed, and the sessions run."""
    if hosted.reading or hosted.resumed is not hosted.host.machine:
        return False
    return hosted.committed == hosted._log.end
