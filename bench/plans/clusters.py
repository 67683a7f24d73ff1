"""Rounds on three nodes: how long a partition has no leader that acknowledges, how fast replicated
produce is, and what a thousand replicated partitions cost.
"""

from __future__ import annotations

import statistics
import time

from bench import processes
from bench.plans import Base
from bench.plans.clients import Produce
from bench.runs import RunFailed, Sample, bare
from bench.sides import ClusterSide, Party, Pulse

PARTITIONS = 1000
#: Failovers of one round, with one and the same topic and client.
FAILOVERS = 4
#: The client's, on both sides: a leader that is silent answers nothing, and a client asks elsewhere
#: only after this.
REQUEST_TIMEOUT_MS = 3_000
_WARM_S = 2.0
_SERVED_S = 120.0
_IDLE_S = 10.0
_REST_S = 5.0


class OnClusters(Base):
    """A plan with clusters in place of the single nodes."""

    def side(self, role: str) -> ClusterSide:
        return self.bench.cluster(role)

    def parties(self, role: str) -> tuple[Party, ...]:
        return (self.side(role),)


class Replicated(OnClusters, Produce):
    """Like `Produce`, on clusters."""


class Failover(OnClusters):
    """Variant `kill -9`: every process of the leader's node; `SIGSTOP`: the same, stopped."""

    def round(self, role: str, mode: str) -> Sample:
        side = self.side(role)
        topic = self.bench.fresh("failover")
        side.create_topic(topic, partitions=1)
        side.whole(topic)
        pulse = side.pulse(topic, REQUEST_TIMEOUT_MS)
        try:
            found = [self._fail(side, topic, pulse) for _ in range(FAILOVERS)]
        finally:
            pulse.close()
            side.delete_topic(topic)
        return bare(statistics.median(found), {"worst": max(found), "least": min(found)})

    def _fail(self, side: ClusterSide, topic: str, pulse: Pulse) -> float:
        time.sleep(_WARM_S)
        leader = side.leader(topic)
        begin = time.monotonic()
        if self.variant.name == "kill -9":
            side.kill(leader)
        else:
            side.freeze_node(leader)
        try:
            took = pulse.served_after(begin, _SERVED_S) - begin
        except TimeoutError as silence:
            raise RunFailed(f"{side.name}: nothing is acknowledged: {silence}") from silence
        finally:
            if self.variant.name == "kill -9":
                side.start_node(leader)
            else:
                side.thaw_node(leader)
        side.whole(topic)
        self.bench.say(f"  {side.name}, node {leader}: {took:.3f} s")
        return took


class ClusterPartitions(OnClusters):
    """A thousand partitions, each on all three nodes."""

    def round(self, role: str, mode: str) -> Sample:
        side = self.side(role)
        topic = self.bench.fresh("replicated")
        begin = time.perf_counter()
        side.create_topic(topic, partitions=PARTITIONS)
        created_s = time.perf_counter() - begin
        side.whole(topic)
        try:
            time.sleep(_REST_S)
            before = processes.cpu_s(side.pids())
            time.sleep(_IDLE_S)
            idle = (processes.cpu_s(side.pids()) - before) / _IDLE_S
            memory = processes.rss_mb(side.pids())
            side.stop_nodes()
            begin = time.perf_counter()
            side.start_nodes()
            side.whole(topic)
            restarted_s = time.perf_counter() - begin
        finally:
            side.delete_topic(topic)
        parts = {
            "create": bare(created_s),
            "restart": bare(restarted_s),
            "memory": bare(memory),
            "idle CPU": bare(100 * idle),
        }
        return Sample(restarted_s, 0, 0, 0, 0, 0, parts=parts)
