"""Checks what the processes of a run report as damaged or missing against the faults of the run.

A report that no fault explains is a violation, even before a reader meets the damage: the event
`damaged_range` of a broker whose copy never rotted (rule L9), and the event `tier_rows_missing` of
a tier where no other engine deleted rows (rule T17).
"""

from __future__ import annotations

import re

from pk.sim.cluster import SimCluster
from pk.sim.machine import SimMachine
from pk.sim.oracle import Oracle
from pk.sim.samples import Observer
from pk.types import PartitionKey

_RANGE = re.compile(r"\[(\d+), (\d+)\)")


def watch_reports(cluster: SimCluster, observer: Observer, oracle: Oracle) -> None:
    """Listen to the processes' logs; add unexplained reports of damage to `problems`."""

    def damaged_range(machine: SimMachine, told: dict[str, object]) -> None:
        name, _, number = str(told["partition"]).rpartition("-")
        topic = oracle.topics.get(name)  # no copy of a topic that it does not know rots
        if topic is not None:
            keys = [PartitionKey(life, int(number)) for life in (topic.topic_id, *topic.former)]
            if topic.going or any(observer.losses.was_rotten(key, machine.node_id) for key in keys):
                return
        problem = f"V5: {machine.name} reports a damaged range where nothing rotted: {told}"
        cluster.problems.append(problem)

    def rows_missing(machine: SimMachine, told: dict[str, object]) -> None:
        name, partition = str(told["topic"]), int(str(told["partition"]))
        for low, high in _RANGE.findall(str(told["ranges"])):
            if not oracle.may_be_missing(name, partition, int(low), int(high)):
                problem = f"V5: {machine.name} misses rows that nobody deleted: {told}"
                cluster.problems.append(problem)

    cluster.listeners["damaged_range"] = damaged_range
    cluster.listeners["tier_rows_missing"] = rows_missing
