"""Decoding of fetched bytes to rows: checksums, isolation, Arrow.  CPU-bound, safe in any thread.

Batches of aborted transactions are dropped whole, by producer id and offset range (KIP-98).
Control batches are always dropped.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from pk import errors
from pk.client.fetcher_events import CompletedFetch
from pk.log import batch as batches
from pk.log.aborted import AbortedRanges
from pk.log.columns import decode
from pk.log.encoding import numbers


def rows_of(
    fetched: CompletedFetch, *, committed: bool, check_crcs: bool, decoded_bytes_max: int
) -> Iterator[tuple[int, pa.RecordBatch | None]]:
    """Yield `(next position, rows or None)` of each batch, in order; rows below the position are
    cut off.

    The last next position is the frame's `next_offset` (rule L12).  Raises `CorruptBatch` or a
    related error at a bad batch: all rows before the batch were yielded, and no row of it.  A
    reader that fetches again from that position makes the broker check the batch first (rule L9).
    Raises `DataLoss` for a range that the broker cannot read.
    """
    if fetched.loss is not None:
        raise fetched.loss
    view = fetched.payload
    headers, damage = headers_of(view)
    aborted = AbortedRanges(fetched.aborted)
    before = fetched.position
    for index, (at, header) in enumerate(headers):
        last = index + 1 == len(headers)
        whole = last and damage is None
        following = fetched.next_offset if whole else header.next_offset
        after = following if last else headers[index + 1][1].base_offset
        raw = view[at : at + header.length]
        batches.check_place(header, before, after, first=not index, dense=fetched.dense)
        before = header.next_offset
        # before any header field is used: a flipped attribute bit could hide the batch
        if check_crcs:
            batches.check(raw)
        hidden = header.control or not header.record_count or header.next_offset <= fetched.position
        if not hidden and committed:
            hidden = aborted.contains(header)
        if hidden:
            yield following, None
            continue
        rows = decode(raw, decoded_bytes_max=decoded_bytes_max, header=header)
        if header.base_offset < fetched.position:
            offsets = numbers(rows.column("offset"))
            rows = rows.slice(int(offsets.searchsorted(fetched.position)))
        yield following, rows if rows.num_rows else None
    if damage is not None:
        raise damage
    if not headers:
        yield fetched.next_offset, None


def headers_of(
    view: memoryview,
) -> tuple[list[tuple[int, batches.Header]], errors.CorruptBatch | None]:
    """Return the headers before the first that does not parse, and the error of that header."""
    found: list[tuple[int, batches.Header]] = []
    try:
        for each in batches.iter_headers(view):
            found.append(each)  # noqa: PERF402 - the headers before the damage are kept
    except errors.CorruptBatch as damage:
        return found, damage
    return found, None
