"""The types that every layer shares: topics, partitions, offsets, epochs.

Ranges are half-open, `[start, end)`.  Times are integers of milliseconds since the Unix epoch
unless a name says otherwise.  A topic id is the canonical 36-character text of a uuid.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

Offset = int
Epoch = int
ProducerId = int
TopicId = str
NodeId = int

#: "no value" where Kafka's formats use -1: no producer id, no sequence, no leader, no epoch yet
NONE = -1

#: The limit of a reader: the high watermark, or the last stable offset.
READ_UNCOMMITTED, READ_COMMITTED = 0, 1

METADATA_TOPIC = "__cluster_metadata"
#: The topic id of the metadata log itself.
METADATA_TOPIC_ID = "00000000-0000-0000-0000-000000000001"


class TopicPartition(NamedTuple):
    """A partition by topic *name*, as users write it."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class PartitionKey(NamedTuple):
    """A partition by topic *id*, as the protocol names it.

    A topic that is created again under its old name is another topic (rule L8).
    """

    topic_id: TopicId
    partition: int

    def __str__(self) -> str:
        return f"{self.topic_id}:{self.partition}"


class RowSums(NamedTuple):
    """What a batch of a query has in one topic.  row_sum: of the rows' hashes, modulo 2^64."""

    rows: int = 0
    bytes: int = 0
    row_sum: int = 0

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.bytes} bytes (sum {self.row_sum:#x})"

    def plus(self, other: RowSums) -> RowSums:
        """Return the sums of both sets of rows."""
        rows, size = self.rows + other.rows, self.bytes + other.bytes
        return RowSums(rows, size, (self.row_sum + other.row_sum) % 2**64)


class EpochStart(NamedTuple):
    """`epoch` began at `start_offset` (KIP-101): one entry of the leader-epoch cache."""

    epoch: Epoch
    start_offset: Offset


class AbortedTransaction(NamedTuple):
    """Records of `producer_id` in `[first_offset, last_offset]` were aborted (KIP-98)."""

    producer_id: ProducerId
    first_offset: Offset
    last_offset: Offset


class RecordMetadata(NamedTuple):
    """Where a record was stored."""

    topic: str
    partition: int
    offset: Offset
    timestamp_ms: int


class BatchMetadata(NamedTuple):
    """Where a part of a `send_batch` was stored: `record_count` records from `base_offset` on."""

    topic: str
    partition: int
    base_offset: Offset
    record_count: int


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record as a consumer sees it; `headers` keep their order and may repeat a key.

    It is not a tuple: use the fields by name.  Records are equal if their fields are, and have
    equal hashes if key and value can be hashed.  They match patterns, can be pickled and are
    immutable (`msgspec.structs.replace` makes a changed copy).

    The garbage collector does not track records; with tracking, a poll would take a sixth longer.
    A record and its values are freed with the last reference to it, with one exception: if a
    deserialised value is changed so that it refers back to its own record, neither is ever freed.
    """

    topic: str
    partition: int
    offset: Offset
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
