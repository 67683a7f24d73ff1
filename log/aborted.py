"""The aborted transactions of a segment, whose records a read_committed reader must skip (KIP-98).

An entry says that the records of `producer_id` in `[first_offset, last_offset]` were aborted.
`last_stable_offset` is the offset up to which every transaction had ended when the marker was
written.  A reader that reads no further than that needs no later entry.

File `.txnindex`, written whole:

    head   magic | version | count | crc
    entry  producer_id i64 | first_offset i64 | last_offset i64 | last_stable_offset i64
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from crc32c import crc32c

from pk import formats
from pk.types import AbortedTransaction

_HEAD = struct.Struct("<4sHHII")
_ENTRY = struct.Struct("<qqqq")
MAGIC = b"pkab"
VERSION = 0


class AbortedEntry(NamedTuple):
    """One aborted transaction, as stored in the index."""

    producer_id: int
    first_offset: int
    last_offset: int  #: the marker's offset
    last_stable_offset: int


class CorruptTransactionIndex(ValueError):
    """The file is torn; the caller rebuilds it from the control batches."""


def encode(entries: Iterable[AbortedEntry]) -> bytes:
    body = b"".join(_ENTRY.pack(*entry) for entry in entries)
    head = _HEAD.pack(MAGIC, VERSION, 0, len(body) // _ENTRY.size, 0)
    return (
        _HEAD.pack(MAGIC, VERSION, 0, len(body) // _ENTRY.size, crc32c(body, crc32c(head))) + body
    )


def decode(raw: bytes) -> list[AbortedEntry]:
    """Decode the entries.  Raises `CorruptTransactionIndex`, `NewerFormat`."""
    if len(raw) < _HEAD.size:
        raise CorruptTransactionIndex(f"{len(raw)} bytes are no aborted index")
    *fields, crc = _HEAD.unpack_from(raw)
    magic, version, _, count = fields
    body = raw[_HEAD.size :]
    if magic != MAGIC:
        raise CorruptTransactionIndex(f"begins with {magic!r}")
    if crc != crc32c(body, crc32c(_HEAD.pack(*fields, 0))):
        raise CorruptTransactionIndex("the checksum does not match")
    formats.require_version("an aborted index (.txnindex)", version, VERSION)
    if len(body) != count * _ENTRY.size:
        raise CorruptTransactionIndex(f"{count} entries in {len(body)} bytes")
    return [AbortedEntry._make(fields) for fields in _ENTRY.iter_unpack(body)]


def overlapping(entries: Iterable[AbortedEntry], start: int, end: int) -> list[AbortedTransaction]:
    """Return the transactions with records in `[start, end)`."""
    return [
        AbortedTransaction(e.producer_id, e.first_offset, e.last_offset)
        for e in entries
        if e.last_offset >= start and e.first_offset < end
    ]
