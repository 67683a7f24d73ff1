"""From fetched bytes to rows: checksum, isolation, decoding.  CPU-bound, safe in any thread.

Aborted transactions are dropped a batch at a time, by producer id and range (KIP-98); control
batches always.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from pk.client.fetcher_events import Fetched
from pk.log import batch as batches
from pk.log.columns import decode
from pk.types import AbortedTransaction


def is_aborted(header: batches.Header, aborted: Iterable[AbortedTransaction]) -> bool:
    """Whether a transactional batch lies in an aborted range of its producer (KIP-98)."""
    return any(
        each.producer_id == header.producer_id
        and each.first_offset <= header.base_offset <= each.last_offset
        for each in aborted
    )


def rows_of(
    fetched: Fetched, *, committed: bool, check_crcs: bool, decoded_bytes_max: int
) -> Iterator[tuple[int, pa.RecordBatch | None]]:
    """`(next position, rows or None)` of each batch, in order; rows below the position are cut off.

    The last next position is the frame's `next_offset` (rule L12).  Raises `CorruptBatch` and its
    kin: no row of a bad batch is given out.
    """
    view = fetched.payload
    headers = list(batches.iter_headers(view))
    for index, (at, header) in enumerate(headers):
        last = index + 1 == len(headers)
        following = fetched.next_offset if last else headers[index + 1][1].base_offset
        hidden = header.control or not header.record_count or header.next_offset <= fetched.position
        if not hidden and committed and header.transactional:
            hidden = is_aborted(header, fetched.aborted)
        if hidden:
            yield following, None
            continue
        raw = view[at : at + header.length]
        if check_crcs:
            batches.check(raw)
        rows = decode(raw, decoded_bytes_max=decoded_bytes_max, header=header)
        if header.base_offset < fetched.position:
            offsets = rows.column("offset").to_numpy()
            rows = rows.slice(int(offsets.searchsorted(fetched.position)))
        yield following, rows if rows.num_rows else None
    if not headers:
        yield fetched.next_offset, None
