"""The curves: what grows, at which points, and who measures a point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from bench.growth.rows import Figures

#: Measures a point: n, and a folder of its own.
Measure = Callable[[int, Path], Figures]


@dataclass(slots=True, frozen=True)
class Curve:
    """sides: kind of server → the largest point that is measured on it."""

    name: str
    what: str
    points: tuple[int, ...]
    module: str
    sides: Mapping[str, int] = field(default_factory=lambda: {"pk": 10**9})

    def measure(self, side: str) -> Measure:
        """Return the function that measures a point of a side."""
        found: Measure = getattr(import_module(f"bench.growth.{self.module}"), side)
        return found


CURVES = (
    Curve(
        "partitions",
        "partitions of one node, in topics of 1,000",
        (1, 10, 100, 1_000, 3_000, 10_000, 30_000),
        "partitions",
        {"pk": 30_000, "kafka": 3_000},
    ),
    Curve(
        "connections",
        "consumers that wait at one node",
        (1, 10, 100, 500, 1_000, 2_000),
        "connections",
        {"pk": 2_000, "kafka": 500},
    ),
    Curve(
        "tables",
        "tables of one node with a tier, one partition each",
        (1, 10, 100, 500, 1_000, 2_000),
        "tables",
    ),
    Curve(
        "files",
        "files of a table that were never merged",
        (100, 1_000, 10_000, 100_000),
        "table_files",
    ),
    Curve(
        "topics",
        "topics that a producer has not seen, one record to each",
        (1, 10, 100, 1_000),
        "first_touch",
        {"pk": 1_000, "kafka": 1_000},
    ),
    Curve(
        "query",
        "partitions of a Spark query, 20 records in each",
        (4, 100, 1_000),
        "queries",
        {"pk": 1_000, "kafka": 100},
    ),
    Curve(
        "failover",
        "partitions of three replicas while one node of three is killed",
        (100, 500, 1_000, 2_000, 4_000),
        "failovers",
        {"pk": 4_000, "kafka": 1_000},
    ),
)
BY_NAME = {curve.name: curve for curve in CURVES}
