"""Aborted transactions, whose records a read_committed reader must skip (KIP-98).

`AbortedEntry` is what a segment's index stores; `AbortedRanges` is how each reader (consumer, Spark
executor, copier) finds out whether a batch was aborted.

An entry says that the records of `producer_id` in `[first_offset, last_offset]` were aborted.
`last_stable_offset` is the offset up to which every transaction had ended when the marker was
written.  A reader that reads no further than that needs no later entry.

File `.txnindex`, written whole:

    head   magic | version | count | crc
    entry  producer_id i64 | first_offset i64 | last_offset i64 | last_stable_offset i64
"""

from __future__ import annotations

import heapq
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from crc32c import crc32c

from pk import formats
from pk.log.batch import Header
from pk.types import AbortedTransaction, Offset

_HEAD = struct.Struct("<4sHHII")
_ENTRY = struct.Struct("<qqqq")
MAGIC = b"pkab"
VERSION = 0
_LAST_OFFSET = attrgetter("last_offset")


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


class AbortedPage(NamedTuple):
    """Every aborted transaction with records in a range that ends at `end`."""

    transactions: list[AbortedTransaction]
    end: Offset


def find(
    indexes: Iterable[Sequence[AbortedEntry]], start: Offset, end: Offset, limit: int | None = None
) -> AbortedPage:
    """Return the aborted transactions with records in `[start, end)`, by marker offset.

    indexes: the entries of consecutive segments, each by marker offset
    limit: how many transactions may be returned.  If there are more, the range ends before the
        first that is left out, at the beginning of one of its batches.  The transactions that begin
        at or below `start` are all returned, whatever `limit` is: the first batch needs them

    The cost is that of the transactions in the range, not of those behind it: an entry whose
    `last_stable_offset` reaches the end of the range is the last one that is looked at.
    """
    found: list[tuple[Offset, AbortedEntry]] = []  # a heap; the largest first offset is on top
    for entries in indexes:
        begin = bisect_left(entries, start, key=_LAST_OFFSET)
        for index in range(begin, len(entries)):
            entry = entries[index]
            if entry.first_offset < end:
                heapq.heappush(found, (-entry.first_offset, entry))
                while limit is not None and len(found) > limit and -found[0][0] > start:
                    end = -heapq.heappop(found)[0]
            if entry.last_stable_offset >= end:
                return _page(found, end)
    return _page(found, end)


def _page(found: Iterable[tuple[Offset, AbortedEntry]], end: Offset) -> AbortedPage:
    entries = sorted((entry for _, entry in found), key=_LAST_OFFSET)
    return AbortedPage(
        [AbortedTransaction(e.producer_id, e.first_offset, e.last_offset) for e in entries], end
    )


class AbortedRanges:
    """The aborted transactions that a reader knows of, for look-ups by producer id and offset.

    A look-up costs O(log n) for n transactions of the producer.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self, transactions: Iterable[tuple[int, Offset, Offset]]) -> None:
        """`transactions`: producer id, first and last offset of each, in any order."""
        self._starts: dict[int, list[Offset]] = {}
        self._ends: dict[int, list[Offset]] = {}
        for producer_id, first, last in sorted(transactions):
            starts = self._starts.setdefault(producer_id, [])
            ends = self._ends.setdefault(producer_id, [])
            if ends and first <= ends[-1]:  # the same one again
                ends[-1] = max(ends[-1], last)
            else:
                starts.append(first)
                ends.append(last)

    def contains(self, header: Header) -> bool:
        """Whether the batch belongs to an aborted transaction (KIP-98)."""
        if not header.transactional:
            return False
        starts = self._starts.get(header.producer_id)
        if starts is None:
            return False
        index = bisect_right(starts, header.base_offset) - 1
        return index >= 0 and header.base_offset <= self._ends[header.producer_id][index]
