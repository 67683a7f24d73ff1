"""Partitions of a Spark query: a batch, and a micro-batch, over partitions with few rows.

Each partition has 20 records, as in the case `spark_narrow`.  A query runs once untimed; the
figures are medians of `_ROUNDS`.  CPU is the server's; the session's is `…_client_cpu_s`.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench import processes
from bench.growth.nodes import PkNode, roles_of
from bench.growth.rows import Figures, told
from bench.kafka.side import KafkaSide
from bench.plans.spark import NARROW_RECORDS, source
from bench.sides import Side
from bench.spark.worker import SparkSession

TOPIC = "narrow"
_ROUNDS = 3


def pk(partitions: int, folder: Path) -> Figures:
    """Measure pk's connector, with its defaults."""
    return _measured(PkNode(), "pk", partitions, folder)


def kafka(partitions: int, folder: Path) -> Figures:
    """Measure Spark's Kafka connector."""
    return _measured(KafkaSide(), "peer", partitions, folder)


def _measured(side: Side, role: str, partitions: int, folder: Path) -> Figures:
    session = SparkSession(side.kind)
    side.start(folder / "server")
    try:
        side.create_topic(TOPIC, partitions)
        side.fill_evenly(TOPIC, partitions, NARROW_RECORDS)
        session.start(folder / "spark")
        where = source(side, role, TOPIC, "", tuned=False)
        found: Figures = {"tasks": int(session.ask(do="tasks", **where)["tasks"])}
        records = partitions * NARROW_RECORDS
        found |= told(_timed(session, side, "batch", records, do="read", **where))
        where |= {"folder": str(folder)}
        return found | told(_timed(session, side, "stream", records, do="stream", **where))
    finally:
        session.stop()
        side.stop()


def _timed(session: SparkSession, side: Side, part: str, records: int, **command: Any) -> Figures:
    pids = list(roles_of(side).values())
    session.timed(pids, records, **command)
    before = processes.cpu_s(pids)
    samples = [session.timed(pids, records, **command) for _ in range(_ROUNDS)]
    cpu_s = (processes.cpu_s(pids) - before) / _ROUNDS
    found = {
        f"{part}_s": statistics.median(each.figures["seconds"] for each in samples),
        f"{part}_cpu_s": cpu_s,
        f"{part}_client_cpu_s": statistics.median(each.client_cpu_s for each in samples),
    }
    if part == "stream":
        triggers = (each.figures["trigger_s"] for each in samples)
        found["trigger_s"] = statistics.median(triggers)
    return found
