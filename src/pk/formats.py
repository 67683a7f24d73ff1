"""The registry of formats: every file, record and frame that a build may read and another build
may have written.

Each entry names the constant with the version that this build writes, and the function that
compares the version of what it reads.  Tests read the table, so a format without an entry, or an
entry that compares nothing, is noticed.

A file has its name, its version and its checksum at the same place in every version.  So damage can
be distinguished from another version: the checksum is compared first, then the version (rule L21).

Format 1 is frozen: what a directory of level 1 holds never changes again, and every later build
reads it (rule Q8).  tests/unit/log/test_frozen_format.py compares the bytes, and tests/golden opens
a directory of the build that froze them.  A change needs the next level.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from pk import errors

#: The feature whose level determines the records and formats that a cluster may use (rule Q6).
FEATURE = "pk.format"
#: The level of `pk.format` that this build knows: the newest records and formats that it reads and
#: may write.  A peer that names no level knows level 1.
LEVEL = 1


def number_of(level: int) -> int:
    """Return the number of a directory in which formats of `level` may be written: the field
    `format` of pk.json and quorum-state (rule Q6).
    """
    return max(1, level)


def level_field(level: int) -> int:
    """Return a level as records and requests carry it: absent for level 1."""
    return level if level > 1 else 0


class KnownFormat(NamedTuple):
    """One line of the registry; `version` and `decode` are "module:attribute"."""

    name: str  #: of the file, record or frame, as docs/ARCHITECTURE.md has it
    version: str  #: the constant with the version that this build writes
    decode: str  #: compares the version; raises `NewerFormat` for another one


_RUN = ("pk.log.directory:RUN_VERSION", "pk.log.directory:decode_run")
_CHECKPOINT = ("pk.log.checkpoints:VERSION", "pk.log.checkpoints:decode")

FORMATS = (
    KnownFormat("pk.json", "pk.log.directory:FORMAT", "pk.log.directory:read_format"),
    KnownFormat("run.json", *_RUN),
    KnownFormat("clean-shutdown", *_RUN),
    KnownFormat("recovery-point-offset-checkpoint", *_CHECKPOINT),
    KnownFormat("replication-offset-checkpoint", *_CHECKPOINT),
    KnownFormat("log-start-offset-checkpoint", *_CHECKPOINT),
    KnownFormat("local-log-start-offset-checkpoint", *_CHECKPOINT),
    KnownFormat("partition-identity-checkpoint", *_CHECKPOINT),
    KnownFormat("clock-checkpoint", *_CHECKPOINT),
    KnownFormat("closed-logs-checkpoint", *_CHECKPOINT),
    KnownFormat("leader-epoch-checkpoint", *_CHECKPOINT),
    KnownFormat("cleaner-offset-checkpoint", *_CHECKPOINT),
    KnownFormat("forgotten-offset-checkpoint", *_CHECKPOINT),
    KnownFormat(".snapshot", "pk.log.producers:VERSION",
                "pk.log.producers:Producers.from_snapshot"),
    KnownFormat(".txnindex", "pk.log.aborted:VERSION", "pk.log.aborted:decode"),
    KnownFormat(".index", "pk.log.index:VERSION", "pk.log.index:decode_entries"),
    KnownFormat(".timeindex", "pk.log.index:VERSION", "pk.log.index:decode_entries"),
    KnownFormat("control row", "pk.log.control_rows:MARKER_VERSION",
                "pk.log.control_rows:decode_markers"),
    KnownFormat("__transaction_state key", "pk.server.transactions.records:KEY_VERSION",
                "pk.server.transactions.records:decode_key"),
    KnownFormat("__consumer_offsets key", "pk.server.groups.records:KEY_VERSION",
                "pk.server.groups.records:decode_key"),
    KnownFormat(".checkpoint", "pk.server.raft.snapshot_framing:FORMAT",
                "pk.server.raft.snapshot_framing:check"),
    KnownFormat("quorum-state", "pk.server.raft.quorum_state_store:FORMAT",
                "pk.server.raft.quorum_state_store:read_state"),
    KnownFormat("directory.json", "pk.server.node.format:METADATA_FORMAT",
                "pk.server.node.format:read_metadata_identity"),
    KnownFormat("table counters", "pk.tiering.layout:COUNTERS_VERSION",
                "pk.tiering.layout:check_version"),
    KnownFormat("copy of committed offsets", "pk.tiering.offset_files:VERSION",
                "pk.tiering.offset_files:decode"),
    KnownFormat("spark checkpoint", "pk.sparkconnector.offsets:VERSION",
                "pk.sparkconnector.offsets:from_json"),
)  # fmt: skip

#: Files of a data directory without a version of their own, and why they need none.  `*` stands for
#: any name.  Processes of one build write and read the directory `run`, which lives for one start.
WITHOUT_VERSION = {
    "*.log": "batches: codecs are numbered (log/batch.py B4), and another header needs a level, "
    "which pk.json names",
    "partition.json": "fields that this build does not know are kept (rule L8)",
    "reserve": "never read: deleted when the disk is full (server/raft/reserve.py)",
    ".lock": "the process id of the owner, for people",
}


def require_version(what: str, found: object, known: int) -> None:
    """Raise `NewerFormat` unless `found` is the version that this build knows (rule L21).

    what: the file, with its path where the caller has one.  Call it once the checksum matches.
    """
    if found != known or isinstance(found, bool):
        raise errors.NewerFormat(
            f"{what} has version {found!r}, this pk knows {known}: use the pk that wrote it. "
            "This file was not changed"
        )


@contextmanager
def named(where: str) -> Iterator[None]:
    """Put the path `where` in front of the message of a `NewerFormat`."""
    try:
        yield
    except errors.NewerFormat as newer:
        raise errors.NewerFormat(f"{where}: {newer.message}", directory=where) from newer
