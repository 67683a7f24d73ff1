"""The query of a run that holds retention: it lags behind the topics, whose size is bounded.

The query keeps its positions in a checkpoint that survives its client.  Each life of the client is
another run of the query.  It commits its positions again and again, and goes on a little after
each acknowledged commit.  Records that expired before its hold was known are skipped.

V33  No record at or above the highest position that the query has committed is gone, once the hold
     was known to the leader.  So no leader forgets a hold, and no coordinator gives one up.
     Records that a client asked to delete are gone.  The check of a partition begins again when an
     era of it ends, and ends with the era of the partition that has the query's offsets.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pk import errors
from pk.client.coordinator_calls import GROUP, CoordinatorCalls
from pk.group_ids import TOPIC, partition_of_group
from pk.sim.checkers import PartitionSample, Violation
from pk.sim.cluster import SimCluster
from pk.sim.oracle import Oracle
from pk.sim.workload import RETRIES, OnTrouble, cluster_of, watched
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from pk.world import World

GROUP_ID = "held"
#: Between two commits of the query.
PACE_MS = (300.0, 1_500.0)
COMMIT_MS = 2_000
#: How many offsets the query processes between two commits, at most.
STEP = 6


class HoldHistory:
    """What the query has committed, and where its hold was known."""

    def __init__(self) -> None:
        self.committed: dict[PartitionKey, int] = {}  #: the highest position that was sent
        self.known: set[PartitionKey] = set()
        self.counts: Counter[str] = Counter()

    def sends(self, positions: Mapping[PartitionKey, int]) -> None:
        """Note a commit before it is sent: it may count although its reply is lost."""
        for key, position in positions.items():
            self.committed[key] = max(position, self.committed.get(key, 0))

    def forget(self, key: PartitionKey) -> None:
        """Begin the check of a partition again: its records may be lost."""
        self.committed.pop(key, None)
        self.known.discard(key)

    def look(self, key: PartitionKey, log_start: int, leader_knows: bool, asked: int = 0) -> None:
        """Check V33 with a sample of the leader; clients asked to delete what is below `asked`."""
        committed = self.committed.get(key)
        if committed is None:
            return
        if log_start > max(committed, asked):
            if key in self.known:
                raise Violation(f"V33: {key} starts at {log_start}; a query holds {committed}")
            return
        if leader_knows:
            self.known.add(key)
            self.counts["looks at holds"] += 1


@dataclass(slots=True)
class HoldRun:
    """The query of one run."""

    cluster: SimCluster
    oracle: Oracle
    latest: Mapping[PartitionKey, PartitionSample]  #: samples of the leaders
    rng: random.Random
    trouble: OnTrouble
    #: The end of the last era of a partition of a topic, by name; NONE = none ended.
    lost_ms: Callable[[str, int], float]
    history: HoldHistory = field(default_factory=HoldHistory)
    positions: dict[PartitionKey, int] = field(default_factory=dict)  #: the checkpoint
    eras: dict[PartitionKey, int] = field(default_factory=dict)

    def start_client(self, world: World, life: int) -> None:
        """Start a run of the query; call it in the client's node."""
        watched(self._query(world, life), self.trouble)

    async def _query(self, world: World, life: int) -> None:
        network = cluster_of(world, self.cluster.bootstrap, f"query.{life}")
        attempt_ms = int(RETRIES["request_timeout_ms"])
        calls = CoordinatorCalls(world, network, GROUP_ID, attempt_ms, GROUP)
        first = True
        while True:
            await world.clock.sleep_ms(self.rng.uniform(*PACE_MS))
            positions = self._positions()
            if not positions:
                continue
            request = wire.OffsetCommitRequest(
                member=wire.GroupMember(group_id=GROUP_ID, generation=NONE),
                query=wire.QueryRun(run_id=f"run{life}", first=first, holds_retention=True),
            )
            for key, position in sorted(positions.items()):
                request.topics.add(
                    topic_id=key.topic_id, partitions=[key.partition], offsets=[position]
                )
            self.history.sends(positions)
            try:
                await calls.call(request, COMMIT_MS)
            except errors.PkError as refusal:
                self.history.counts[f"commits refused: {type(refusal).__name__}"] += 1
                continue
            first = False
            self.history.counts["commits of the query"] += 1
            for key, position in positions.items():
                end = self.latest[key].high_watermark
                self.positions[key] = min(end, position + self.rng.randint(0, STEP))

    def _positions(self) -> dict[PartitionKey, int]:
        """Return the positions to commit: those that have expired are at the start of the log."""
        current = dict[PartitionKey, int]()
        for topic in self.oracle.topics.values():
            for number in range(topic.partitions):
                key = PartitionKey(topic.topic_id, number)
                sample = self.latest.get(key)
                if sample is not None:
                    at = self.positions.get(key, 0)
                    known = key in self.history.known
                    current[key] = at if known else max(at, sample.log_start)
        self.positions.update(current)
        return current

    def look(self) -> None:
        """Check V33 with the newest samples."""
        if self.lost_ms(TOPIC, partition_of_group(GROUP_ID)) != NONE:
            return
        for key in list(self.history.committed):
            sample, era = self.latest.get(key), self.oracle.era(*key)
            if era != self.eras.get(key, 0):
                self.eras[key] = era
                self.history.forget(key)
            elif sample is not None and not self.oracle.deletes(key):
                asked = self.oracle.topics[sample.topic].deletions.get(key.partition, 0)
                self.history.look(key, sample.log_start, self._leader_knows(key), asked)

    def _leader_knows(self, key: PartitionKey) -> bool:
        for machine in self.cluster.machines:
            broker = machine.broker
            partition = None if broker is None else broker.core.partitions.get(key)
            if broker is not None and partition is not None and partition.leader is not None:
                leases = broker.core.holds._holds._leases.get(key, {})
                return GROUP_ID in leases
        return False

    def figures(self) -> dict[str, int]:
        """Return the counters of the history."""
        return dict(self.history.counts)
