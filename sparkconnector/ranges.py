"""How much one trigger reads, and which task reads what.

This module is pure arithmetic over `Range`s.  A *curve* holds the broker's samples of a partition:
offsets and the cumulative bytes below each, both growing.  Between two samples, the bytes are
assumed to be spread evenly.

Invariants
  D1  Splitting keeps the union: the pieces of a range are adjacent and not empty, and cover exactly
      the range.
  D2  A limit of n records lets at most n offsets through, and at least one if any offset is left.
  D3  No starvation: `turn` counts the triggers.  If k partitions have a backlog, each gets at least
      one record within k triggers.
  D4  A byte limit is exceeded by at most one record, so that a record larger than the limit can
      pass.
  D5  A limit counts no offset of the gap that a restore leaves.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from pk import generations
from pk.sparkconnector.offsets import Range

#: Compressed bytes of tier files that a task reads by default.
COLD_TASK_BYTES = 128 * 1024 * 1024


#: Half-open ranges of offsets.
Spans = Sequence[tuple[int, int]]


class Curve(NamedTuple):
    """Cumulative bytes at growing offsets of a partition; 0 at the start of a range."""

    offsets: Sequence[int]
    cumulative: Sequence[int]

    def bytes_at(self, offset: int) -> int:
        """Return the bytes below `offset`."""
        return _interpolate(self.offsets, self.cumulative, offset)

    def offset_at(self, size: int) -> int:
        """Return the largest offset with at most `size` bytes below it, by the samples."""
        return _interpolate(self.cumulative, self.offsets, size)


class TierFile(NamedTuple):
    """A data file of the topic's table; both offsets are inclusive, as in Delta's statistics."""

    path: str
    min_offset: int
    max_offset: int
    size: int
    rows: int


def _interpolate(xs: Sequence[int], ys: Sequence[int], x: int) -> int:
    if not xs:
        return 0
    at = bisect.bisect_right(xs, x) - 1
    if at < 0:
        return ys[0]
    if at == len(xs) - 1:
        return ys[-1]
    span = xs[at + 1] - xs[at]
    return ys[at] + (ys[at + 1] - ys[at]) * (x - xs[at]) // span


def curve(offsets: Sequence[int], cumulative: Sequence[int], wanted: Range) -> Curve:
    """Return the samples as a curve over `wanted`: 0 bytes at its start, strictly growing."""
    samples = zip(offsets, cumulative, strict=False)
    points = {offset: size for offset, size in samples if wanted.start < offset <= wanted.end}
    points[wanted.start] = 0
    xs: list[int] = []
    ys: list[int] = []
    for x in sorted(points):
        if not ys or points[x] > ys[-1]:
            xs.append(x)
            ys.append(points[x])
    # the samples end before the range: continue with the last slope
    if xs[-1] < wanted.end and len(xs) > 1:
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        ys.append(ys[-1] + max(1, int(slope * (wanted.end - xs[-1]))))
        xs.append(wanted.end)
    return Curve(xs, ys)


# -- limits ---------------------------------------------------------------------------------------


def without_gap(one: Range, missing: Spans) -> Range:
    """Return what of a range a limit may count: it ends before the gap of a restore (rule T13), or
    it begins behind it.

    A restored cluster goes on in the next block of offsets (pk.generations), so the gap may have
    2^50 offsets.  missing: all that the table lacks, in order.
    """
    for start, end in missing:
        of_restore = start // generations.OFFSETS != end // generations.OFFSETS
        if of_restore and one.start < end:
            if one.start < start:
                return one._replace(end=min(one.end, start))
            return one._replace(start=min(one.end, end))
    return one


def limit_records(ranges: Sequence[Range], most: int, turn: int) -> list[Range]:
    """Shorten the ranges to `most` offsets in all, in proportion to their sizes (D2, D3)."""
    total = sum(one.size for one in ranges)
    if total <= most:
        return list(ranges)
    shares = [most * one.size // total for one in ranges]
    rest = most - sum(shares)
    count = len(ranges)
    for step in range(count):
        at = (turn + step) % count
        if rest and shares[at] < ranges[at].size:
            shares[at] += 1
            rest -= 1
    return [one._replace(end=one.start + share) for one, share in zip(ranges, shares, strict=True)]


def limit_bytes(
    ranges: Sequence[Range], curves: Mapping[tuple[str, int], Curve], most: int, turn: int
) -> list[Range]:
    """Shorten the ranges to about `most` bytes in all, in proportion to their bytes (D3, D4)."""
    sizes = [_bytes(one, curves.get((one.topic, one.partition))) for one in ranges]
    total = sum(sizes)
    if total <= most:
        return list(ranges)
    limited = []
    for one, size in zip(ranges, sizes, strict=True):
        known = curves.get((one.topic, one.partition))
        share = most * size // total
        if known is None:
            limited.append(one._replace(end=one.start + min(share, one.size)))
            continue
        end = known.offset_at(known.bytes_at(one.start) + share)
        limited.append(one._replace(end=min(max(end, one.start), one.end)))
    with_backlog = [at for at, one in enumerate(ranges) if one.size]
    at = with_backlog[turn % len(with_backlog)]
    if not limited[at].size:
        limited[at] = limited[at]._replace(end=ranges[at].start + 1)
    return limited


def _bytes(one: Range, known: Curve | None) -> int:
    if known is None:
        return one.size  # without samples, count one byte per record
    return known.bytes_at(one.end) - known.bytes_at(one.start)


# -- tasks ----------------------------------------------------------------------------------------


def split(
    ranges: Sequence[Range],
    *,
    min_partitions: int = 0,
    max_records: int = 0,
    max_bytes: int = 0,
    curves: Mapping[tuple[str, int], Curve] | None = None,
) -> list[Range]:
    """Return the pieces of `ranges` for tasks (D1).

    A piece has at most `max_records` offsets and about `max_bytes`.  There are at least
    `min_partitions` pieces if there are that many offsets; large ranges are split before small
    ones.
    """
    pieces: list[Range] = []
    for one in ranges:
        known = (curves or {}).get((one.topic, one.partition))
        if max_bytes and known is not None:
            pieces += _by_bytes(one, known, max_bytes)
        elif one.size:
            pieces.append(one)
    if max_records:
        pieces = [part for one in pieces for part in _equal(one, -(-one.size // max_records))]
    total = sum(one.size for one in pieces)
    if min_partitions > len(pieces) and total:
        shares = _shares([one.size for one in pieces], min_partitions)
        pieces = [p for one, n in zip(pieces, shares, strict=True) for p in _equal(one, n)]
    return pieces


def _shares(sizes: Sequence[int], wanted: int) -> list[int]:
    """Return into how many parts each size is split; together `wanted` parts if possible.

    Each size has at least 1 part and at most as many parts as its size.
    """
    total = sum(sizes)
    shares = [min(size, max(1, wanted * size // total)) for size in sizes]
    while sum(shares) < wanted:
        largest = max(range(len(sizes)), key=lambda at: (sizes[at] / shares[at], -at))
        if shares[largest] >= sizes[largest]:
            break
        shares[largest] += 1
    return shares


def _equal(one: Range, parts: int) -> list[Range]:
    parts = max(1, min(parts, one.size))
    cuts = [one.start + one.size * part // parts for part in range(parts + 1)]
    return [one._replace(start=a, end=b) for a, b in pairwise(cuts)]


def _by_bytes(one: Range, known: Curve, max_bytes: int) -> list[Range]:
    pieces = []
    start = one.start
    while start < one.end:
        end = known.offset_at(known.bytes_at(start) + max_bytes)
        end = min(max(end, start + 1), one.end)
        pieces.append(one._replace(start=start, end=end))
        start = end
    return pieces


def within(spans: Spans, one: Range) -> list[Range]:
    """Return the parts of `one` that lie in `spans`."""
    parts = [(max(low, one.start), min(high, one.end)) for low, high in spans]
    return [one._replace(start=low, end=high) for low, high in parts if low < high]


# -- cold and hot ---------------------------------------------------------------------------------


def cut_at(one: Range, tiered_end: int) -> tuple[Range | None, Range | None]:
    """Return the cold part, below `tiered_end`, and the hot part, from `tiered_end` on."""
    middle = min(max(tiered_end, one.start), one.end)
    cold = one._replace(end=middle) if middle > one.start else None
    hot = one._replace(start=middle) if middle < one.end else None
    return cold, hot


def cold_tasks(
    cold: Range, files: Sequence[TierFile], task_bytes: int = COLD_TASK_BYTES, max_records: int = 0
) -> list[tuple[Range, list[TierFile]]]:
    """Return pieces of `cold`, each with all files that may hold some of its records (D1).

    The pieces begin where files begin.  Files whose offsets do not overlap give tasks of whole
    files.  After another engine's Z-order, files overlap; then several tasks read the same file.
    """
    covering = sorted(
        (f for f in files if f.min_offset < cold.end and f.max_offset >= cold.start),
        key=lambda file: (file.min_offset, file.max_offset, file.path),
    )
    cuts = [cold.start]
    size = records = 0
    for file in covering:
        full = size + file.size > task_bytes or (max_records and records + file.rows > max_records)
        if full and size and file.min_offset > cuts[-1]:
            cuts.append(file.min_offset)
            size = records = 0
        size += file.size
        records += file.rows
    cuts.append(cold.end)
    tasks = []
    for start, end in pairwise(cuts):
        here = [f for f in covering if f.min_offset < end and f.max_offset >= start]
        tasks.append((cold._replace(start=start, end=end), here))
    return tasks
