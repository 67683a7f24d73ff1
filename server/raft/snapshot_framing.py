"""The file format of a snapshot: header, batches, footer (KIP-630).

    header   magic, format, epoch of the last record, end, CRC-32C of these
    batches  as in the log; their rows are those of the state machine (metadata/snapshot.py)
    footer   magic, number of rows, bytes of the batches, CRC-32C of everything before it

Invariants
  N2  A torn or damaged file is never accepted as a snapshot: `check` verifies every byte.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from crc32c import crc32c

from pk import errors, formats
from pk.log.storage import Buffer
from pk.server.raft.snapshot_id import SnapshotId

FORMAT = 1
_HEADER = struct.Struct("<8sIiqI")
_FOOTER = struct.Struct("<8sQQI")
_CRC_BYTES = 4
_MAGIC, _END_MAGIC = b"pk meta\n", b"pk done\n"


def framed(snapshot: SnapshotId, batches: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield the file in pieces: header, each of `batches` (number of rows, bytes), footer."""
    head = _HEADER.pack(_MAGIC, FORMAT, snapshot.epoch, snapshot.end, 0)[:-_CRC_BYTES]
    piece = head + crc32c(head).to_bytes(_CRC_BYTES, "little")
    checksum, count, size = crc32c(piece), 0, 0
    yield piece
    for rows, piece in batches:
        checksum, count, size = crc32c(piece, checksum), count + rows, size + len(piece)
        yield piece
    foot = _FOOTER.pack(_END_MAGIC, count, size, 0)[:-_CRC_BYTES]
    yield foot + crc32c(foot, checksum).to_bytes(_CRC_BYTES, "little")


class Content(NamedTuple):
    """The content of a verified file."""

    id: SnapshotId
    rows: int


def check(raw: Buffer, wanted: SnapshotId | None = None) -> Content:
    """Verify every byte (N2), and that the id is `wanted`.  Raises `CorruptLog`, `NewerFormat`."""
    view = memoryview(raw)
    if len(view) < _HEADER.size + _FOOTER.size:
        raise errors.CorruptLog(f"the snapshot has {len(view)} bytes: it is torn")
    magic, version, epoch, end, crc = _HEADER.unpack_from(view)
    if magic != _MAGIC or crc != crc32c(view[: _HEADER.size - _CRC_BYTES]):
        raise errors.CorruptLog("the snapshot's header is damaged")
    formats.require_version("a snapshot of the metadata (.checkpoint)", version, FORMAT)
    magic, rows, size, crc = _FOOTER.unpack_from(view, len(view) - _FOOTER.size)
    if magic != _END_MAGIC or len(view) != _HEADER.size + size + _FOOTER.size:
        raise errors.CorruptLog("the snapshot has no footer: it is torn")
    if crc != crc32c(view[:-_CRC_BYTES]):
        raise errors.CorruptLog("the snapshot's checksum does not match")
    found = SnapshotId(end, epoch)
    if wanted is not None and found != wanted:
        raise errors.CorruptLog(f"the snapshot is {found}, not {wanted}")
    return Content(found, rows)


def content_of(raw: Buffer) -> tuple[SnapshotId, memoryview]:
    """Return the id and the batches of a file that `check` accepted."""
    view = memoryview(raw)
    _, _, epoch, end, _ = _HEADER.unpack_from(view)
    return SnapshotId(end, epoch), view[_HEADER.size : -_FOOTER.size]
