"""Names and schema of a topic's tier: the objects in the store, and the meaning of the columns.

A topic's tier is one Delta table at `<tier>/<topic>/<topic id>/` (rule T7).  A topic that is
deleted and created again has another id, hence another table.  Data files are in Hive directories
`partition=N/`.

Invariants
  N1  A data file's name is unique per (partition, start, end, leader epoch, attempt).  An upload
      never overwrites another, so a late write of a deposed leader does no damage (rule T5).
  N2  The name of a file made by the copier states its offset range, the CRC-32C of its footer and
      its row sum.  Files of outside maintenance have other names, for which `parse_data_path`
      returns None.  So have the files of pk's maintenance jobs (rule C6), which `parse_job_path`
      knows: a lost one is never copied again from the local log, which may hold rows that a
      compaction removed.
  N3  Per-partition facts are Delta `txn` actions (rule T2): they survive checkpoints, OPTIMIZE and
      VACUUM.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pyarrow as pa

from pk.formats import require_version
from pk.types import NONE, Epoch, Offset, TopicId

#: Columns of the table (rule T10), the partition column included.
TABLE_SCHEMA = pa.schema(
    [
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestamp_type", pa.int32()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field(
            "headers",
            pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])),
        ),
        pa.field("leader_epoch", pa.int32()),
        pa.field("delete_horizon_ms", pa.int64()),
    ]
)
#: Columns inside a data file; the partition is in the directory's name instead.
FILE_SCHEMA = pa.schema([field for field in TABLE_SCHEMA if field.name != "partition"])
PARTITION_COLUMN = "partition"

#: Added to errors about an unexpected protocol, schema or property: no checksum covers these, so
#: the log may also be damaged.
OR_DAMAGED = (
    "; if no engine changed the table, its log is damaged: remove a damaged checkpoint, or restore "
    "_delta_log"
)
#: The one protocol pk accepts (rule T8): reader version, writer version, no features.
READER_VERSION = 1
WRITER_VERSION = 2

#: Properties of a table made by pk.  Spark cannot set the first one, but honours it.  deltalake
#: reads all commits since the last checkpoint at once, each in a thread of its own that stays.
#: Checkpoints bound the threads, the descriptors, and the cost of opening a table.  Other engines
#: follow this interval; pk makes fewer checkpoints of a large table (delta_checkpoint).
TABLE_PROPERTIES = {
    "delta.isolationLevel": "WriteSerializable",
    "delta.checkpointInterval": "5",
    "delta.logRetentionDuration": "interval 30 days",
    "delta.deletedFileRetentionDuration": "interval 7 days",
}

#: Names the topic that owns the table (rule L8).
TOPIC_ID_PROPERTY = "pk.topic_id"
#: Properties that break rule T2: the first one makes Delta forget txn actions.
REFUSED_PROPERTIES = ("delta.setTransactionRetentionDuration",)

#: Modulus of row sums (rule T2): the largest range that a txn version can hold.
SUM_MODULUS = 2**63

#: Names of the per-partition facts, in the order of `PartitionCounters` (rule T2).
COUNTERS = (
    "start", "end", "epoch", "claim", "rows", "sum", "removed",
    "cleaned", "removed_sum", "forgotten",
)  # fmt: skip
#: The first ones; a table whose later ones are all 0 has the hash of version 1 over them.
COUNTERS_OF_VERSION_1 = 7
#: The version of a partition's counters that this build writes, and the name of its txn action.  It
#: is absent while the later counters are 0: then an earlier build can read them, too.
COUNTERS_VERSION = 2
VERSION_NAME = "version"
#: Name of the hash over them (log_check.py).
COUNTERS_CHECK = "check"

_PROBE_DIRECTORY = "_pk_probe"
SNAPSHOT_SUFFIX = "__snapshot"
_NAME = re.compile(
    r"^partition=(?P<partition>\d+)/(?P<start>\d{20})-(?P<end>\d{20})"
    r"-e(?P<epoch>\d+)-(?P<attempt>[0-9a-zA-Z]+)-c(?P<crc>[0-9a-f]{8})-s(?P<sum>[0-9a-f]{16})"
    r"\.parquet$"
)
_JOB_NAME = re.compile(
    r"^partition=(?P<partition>\d+)/(?P<start>\d{20})-(?P<end>\d{20})"
    r"-job-(?P<attempt>[0-9a-zA-Z]+)-c(?P<crc>[0-9a-f]{8})-s(?P<sum>[0-9a-f]{16})"
    r"\.parquet$"
)


class DataName(NamedTuple):
    """The facts in the name of a file that pk wrote; `epoch` is NONE if a job wrote it."""

    partition: int
    start: Offset
    end: Offset
    epoch: Epoch
    attempt: str
    footer_crc: int  #: CRC-32C of the footer, its length and the magic behind it
    row_sum: int  #: of all its rows (rowhash.py)


def table_path(topic: str, topic_id: TopicId) -> str:
    """Returns the directory of the topic's table below the tier's root."""
    return f"{topic}/{topic_id}"


def snapshot_path(topic: str, topic_id: TopicId) -> str:
    """Returns the directory of the topic's snapshot (tiering/snapshot_table)."""
    return f"{topic}{SNAPSHOT_SUFFIX}/{topic_id}"


def probe_path(attempt: str) -> str:
    """Returns the directory of the table that probes put-if-absent at start-up (rule T14)."""
    return f"{_PROBE_DIRECTORY}/{attempt}"


def data_path(name: DataName) -> str:
    """Returns the path of a data file relative to its table (N1)."""
    epoch = max(name.epoch, 0)
    return (
        f"partition={name.partition}/{name.start:020d}-{name.end:020d}-e{epoch}"
        f"-{name.attempt}-c{name.footer_crc:08x}-s{name.row_sum:016x}.parquet"
    )


def parse_data_path(path: str) -> DataName | None:
    """Returns the facts in the name, or None if the copier did not make this file (N2)."""
    match = _NAME.match(path)
    if match is None:
        return None
    return DataName(
        int(match["partition"]),
        int(match["start"]),
        int(match["end"]),
        int(match["epoch"]),
        match["attempt"],
        int(match["crc"], 16),
        int(match["sum"], 16),
    )


def job_path(name: DataName) -> str:
    """Returns the path of a job's file relative to its table (rule C6)."""
    return (
        f"partition={name.partition}/{name.start:020d}-{name.end:020d}-job-{name.attempt}"
        f"-c{name.footer_crc:08x}-s{name.row_sum:016x}.parquet"
    )


def parse_job_path(path: str) -> DataName | None:
    """Returns the facts in the name, or None if no job of pk made this file (rule C6)."""
    match = _JOB_NAME.match(path)
    if match is None:
        return None
    return DataName(
        int(match["partition"]),
        int(match["start"]),
        int(match["end"]),
        NONE,
        match["attempt"],
        int(match["crc"], 16),
        int(match["sum"], 16),
    )


def parse_written_path(path: str) -> DataName | None:
    """Returns the facts in the name of a file that the copier or a job of pk wrote; None for the
    files of other engines."""
    return parse_data_path(path) or parse_job_path(path)


def app_id(topic_id: TopicId, partition: int, counter: str) -> str:
    """Returns the application id of a `txn` action (rule T2)."""
    assert counter in (*COUNTERS, COUNTERS_CHECK, VERSION_NAME), counter
    return f"pk:{topic_id}:{partition}:{counter}"


def commit_file(version: int) -> str:
    """Returns the path of a version's commit relative to its table."""
    return f"_delta_log/{version:020d}.json"


class PartitionCounters(NamedTuple):
    """The table's facts of one partition (rule T2); the table covers offsets `[start, end)`."""

    start: Offset = 0
    end: Offset = 0
    epoch: Epoch = NONE  #: leader epoch of the record at `end - 1`
    claim: Epoch = NONE  #: lowest leader epoch that may append; an older one is refused (rule T4)
    rows: int = 0  #: rows ever appended by the copier
    sum: int = 0  #: the sum of their row hashes, modulo SUM_MODULUS
    removed: int = 0  #: rows ever removed by retention or compaction
    cleaned: Offset = 0  #: the first dirty offset: compaction has cleaned the rows below it
    #: the sum of the row hashes of the removed rows, modulo SUM_MODULUS; 0 while `removed` is not 0
    #: = an earlier build removed rows and did not sum them
    removed_sum: int = 0
    forgotten: Offset = 0  #: one above the highest tombstone that compaction ever removed

    @property
    def version(self) -> int:
        """Returns the version of the counters: 1 as long as only those of version 1 are used."""
        return COUNTERS_VERSION if any(self[COUNTERS_OF_VERSION_1:]) else 1


def check_version(uri: str, partition: int, version: int | None) -> None:
    """Raises `NewerFormat` if a newer build wrote the counters of a partition (rule L21)."""
    if version is not None and version > COUNTERS_VERSION:
        require_version(f"{uri}: partition {partition}: its counters", version, COUNTERS_VERSION)
