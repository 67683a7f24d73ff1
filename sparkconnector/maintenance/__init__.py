"""Maintenance jobs of tables, as Spark batch jobs: `pk maintenance run`, or these functions.

A job reads one version of a topic's table.  Its executors read and write Parquet files with pk's
own reader and writer.  The driver hands the files over to the owner of the table, which commits
them exactly on a version that still has the files that they replace (rules C5, T3).  A job may be
killed at any point: what it wrote is then named by no version.

    optimize    fewer and larger files with the same rows
    compaction  the latest record of each key stays, in the table of a compacted topic
    audit       rows, row sums and offsets of a version against its counters and the local log
    snapshot    the latest value of each key as of an offset of each partition, as a Delta table
    retention   the brokers apply retention now; vacuum: they delete replaced files now
    sweep       removes uploads that no version names; without Spark
"""

from pk.sparkconnector.maintenance.audit import AuditReport, audit
from pk.sparkconnector.maintenance.compaction import CompactionReport, compaction
from pk.sparkconnector.maintenance.optimize import OptimizeReport, optimize
from pk.sparkconnector.maintenance.snapshot import (
    SnapshotReport,
    read_snapshot,
    snapshot,
    snapshot_version,
)
from pk.sparkconnector.maintenance.sweep import SweepReport, sweep

__all__ = [
    "AuditReport",
    "CompactionReport",
    "OptimizeReport",
    "SnapshotReport",
    "SweepReport",
    "audit",
    "compaction",
    "optimize",
    "read_snapshot",
    "snapshot",
    "snapshot_version",
    "sweep",
]
