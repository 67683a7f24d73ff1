"""How a round of a case is run: one class per kind of round, found by the name in the case.

A plan gets the bench, its case and variant, and the number of records of each role's run.
`parties` returns the parties that run while a role is measured; all others are stopped (bench M2).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from bench.cases import Case, Variant
from bench.runs import Sample
from bench.sides import Party, Side

if TYPE_CHECKING:
    from bench.measuring import Bench

#: The name of a plan → its module and its class.
HOMES = {
    "produce": ("clients", "Produce"),
    "consume": ("clients", "Consume"),
    "latency": ("clients", "Latency"),
    "produce_own": ("clients", "ProduceOwn"),
    "transaction_latency": ("clients", "TransactionLatency"),
    "small": ("clients", "Small"),
    "commits": ("commits", "Commits"),
    "rebalance": ("rebalance", "Rebalance"),
    "partitions": ("partitions", "Partitions"),
    "deep": ("deep", "Deep"),
    "cold_isolation": ("cold", "ColdIsolation"),
    "cold_distance": ("distance", "ColdDistance"),
    "failover": ("clusters", "Failover"),
    "replicated": ("clusters", "Replicated"),
    "cluster_partitions": ("clusters", "ClusterPartitions"),
    "spark_read": ("spark", "HotRead"),
    "spark_stream": ("spark", "HotStream"),
    "spark_stream_own": ("spark", "StreamOwn"),
    "spark_narrow": ("spark", "Narrow"),
    "spark_sink": ("spark", "Sink"),
    "spark_sink_own": ("spark", "SinkOwn"),
    "spark_cold": ("spark", "ColdRead"),
    "spark_parquet": ("spark", "ParquetRead"),
    "topic_table": ("spark", "TopicTable"),
    "topic_log": ("spark", "TopicLog"),
    "cleaning": ("compaction", "Cleaning"),
    "cleaning_isolation": ("compaction", "CleaningIsolation"),
    "stored": ("stored", "Segments"),
    "stored_tier": ("stored", "Table"),
}


class Plan(Protocol):
    """One case and variant under measurement."""

    def prepare(self) -> None: ...

    def parties(self, role: str) -> tuple[Party, ...]: ...

    def round(self, role: str, mode: str) -> Sample: ...

    def close(self) -> None: ...


class Base:
    """The common part of most plans: pk compared with the peer, without preparation."""

    def __init__(
        self, bench: Bench, case: Case, variant: Variant, counts: Mapping[str, int]
    ) -> None:
        self.bench, self.case, self.variant, self.counts = bench, case, variant, counts

    def side(self, role: str) -> Side:
        return self.bench.pk if role == "pk" else self.bench.peer

    def parties(self, role: str) -> tuple[Party, ...]:
        return (self.side(role),)

    def prepare(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def load(name: str) -> Callable[..., Plan]:
    """Return the class of a plan; its imports (Spark) are loaded only with it."""
    module, which = HOMES[name]
    found: Callable[..., Plan] = getattr(import_module(f"bench.plans.{module}"), which)
    return found
