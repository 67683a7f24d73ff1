"""The rows of a control batch: today the markers that end transactions (rules X5, L20).

A control batch is a batch of the broker's own, with the flag CONTROL.  The value of each row is one
control row, little endian:

    head      type u8 | version u8 | the fixed part of that type
    tail      fields that later builds add; a row of an older build lacks them

    type 1    transaction marker
    head      type u8 | version u8 | producer epoch i16 | coordinator epoch i32 | producer id i64
              | commit u8 | 0 u8 | 0 u16
    tail      partitions u32 | batch id i64 | application length u16 | application (utf-8)

The tail of a marker says in how many partitions its transaction ends, and the application and batch
id of the participants that wrote it.  Readers of another cluster learn these facts from the log.

Invariants
  F1  A reader takes the head and the fields of the tail that the row has.  It skips the bytes
      behind the last field that it knows.
  F2  An unknown type, or a version above the known one, raises `NewerFormat`.  So a build that
      cannot tell what a row does stops before it appends or replays the row.
  F3  A head that is cut short, a field of the tail that is cut short, and a version 0 raise
      `InvalidRecord`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from pk import errors
from pk.log.columns import DECODED_BYTES_MAX, decode
from pk.log.encoding import encode
from pk.log.storage import Buffer
from pk.types import NONE

MARKER = 1
MARKER_VERSION = 1
APPLICATION_BYTES_MAX = 1024

_HEAD = struct.Struct("<BBhiqBxH")
_PARTITIONS = struct.Struct("<I")
_BATCH_ID = struct.Struct("<q")
_LENGTH = struct.Struct("<H")


class Marker(NamedTuple):
    """How a producer's transaction ended in this partition (rule X5)."""

    producer_id: int
    producer_epoch: int
    commit: bool
    coordinator_epoch: int = NONE  #: leader epoch of the coordinator's partition
    partitions: int = 0  #: in how many partitions the transaction ends; 0 = not said
    batch_id: int = NONE  #: the batch of a participant job
    application: str = ""  #: the application that this batch belongs to


def encode_markers(
    markers: Sequence[Marker], timestamp_ms: int, leader_epoch: int = NONE
) -> list[Buffer]:
    """Encode a control batch that ends the transactions of all `markers` at once (rule X5)."""
    values = pa.array([_encoded(marker) for marker in markers], pa.binary())
    rows = pa.record_batch([values], names=["value"])
    return encode(
        rows,
        default_timestamp=timestamp_ms,
        transactional=True,
        control=True,
        leader_epoch=leader_epoch,
    )


def decode_markers(batch: Buffer) -> list[Marker]:
    """Decode the rows of a control batch.

    Raises `InvalidRecord` for a row that is no control row, and `NewerFormat` for one of a type or
    version that this build does not know (F2).
    """
    values = decode(batch, decoded_bytes_max=DECODED_BYTES_MAX).column("value")
    return [_decoded(value) for value in values.to_pylist()]


def _encoded(marker: Marker) -> bytes:
    application = marker.application.encode()
    if len(application) > APPLICATION_BYTES_MAX:
        raise errors.InvalidRecord(
            f"an application id of {len(application)} bytes; "
            f"at most {APPLICATION_BYTES_MAX} are allowed"
        )
    head = _HEAD.pack(
        MARKER,
        MARKER_VERSION,
        marker.producer_epoch,
        marker.coordinator_epoch,
        marker.producer_id,
        marker.commit,
        0,
    )
    return b"".join(
        (
            head,
            _PARTITIONS.pack(marker.partitions),
            _BATCH_ID.pack(marker.batch_id),
            _LENGTH.pack(len(application)),
            application,
        )
    )


def _decoded(row: bytes | None) -> Marker:
    if row is None or len(row) < 2 or row[1] == 0:
        raise errors.InvalidRecord("a control batch holds a row without a type and a version")
    if row[0] != MARKER or row[1] > MARKER_VERSION:
        raise errors.NewerFormat(
            f"a control row of type {row[0]}, version {row[1]}; this pk knows type {MARKER} up to "
            f"version {MARKER_VERSION}: use a newer pk"
        )
    try:
        _, _, epoch, coordinator_epoch, producer_id, commit, _ = _HEAD.unpack_from(row)
        found = Marker(producer_id, epoch, bool(commit), coordinator_epoch)
        return _with_tail(found, row, _HEAD.size)
    except (struct.error, UnicodeDecodeError) as cause:
        raise errors.InvalidRecord(f"a transaction marker that does not parse: {cause}") from cause


def _with_tail(marker: Marker, row: bytes, at: int) -> Marker:
    """Return the marker with the fields of its tail, as far as the row has them (F1)."""
    if at < len(row):
        (partitions,) = _PARTITIONS.unpack_from(row, at)
        marker, at = marker._replace(partitions=partitions), at + _PARTITIONS.size
    if at < len(row):
        (batch_id,) = _BATCH_ID.unpack_from(row, at)
        marker, at = marker._replace(batch_id=batch_id), at + _BATCH_ID.size
    if at < len(row):
        (length,) = _LENGTH.unpack_from(row, at)
        at += _LENGTH.size
        if at + length > len(row):
            raise struct.error(f"an application id of {length} bytes, {len(row) - at} are left")
        marker = marker._replace(application=row[at : at + length].decode())
    return marker
