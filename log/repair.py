"""Repairs damaged ranges: each becomes a known gap, because an operator said so (`pk log repair`).

A gap is an empty batch: a header without records that covers the range, without producer, with the
leader epoch that the range had.  Followers copy it.  The copier and readers step over it with
`next_offset` (rule L12).  The log continues behind it, and no offset is assigned twice.

The repairing process holds the directory's lock, so no broker runs.

Invariants
  B1  A segment is replaced as a whole: the new one is written to a temporary file, SYNCED, and
      renamed over the old one.  A process that dies in between leaves the old segment or the new
      one, and perhaps a `.tmp` file that the next opening removes.  The derived files are removed
      before the rename, SYNCED, so an index of the old segment never meets the new one.
  B2  Only damaged ranges are replaced.  Every whole batch is copied byte by byte.
  B3  A torn tail is left alone: nothing of it was acknowledged, and the next opening cuts it
      (recovery.py: G, H).  A damaged tail whose offsets are unknown becomes a gap that is as wide
      as the tail can have been.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pk import errors
from pk.log import batch as batches
from pk.log import damage, swap
from pk.log.batch import HEADER_BYTES, Header
from pk.log.damage import CHUNK_BYTES, UNKNOWN, Damage, span
from pk.log.damaged_ranges import FAR, epochs_of, survey_log
from pk.log.epochs import LeaderEpochs
from pk.log.segment import INDEX, TIMEINDEX, TXNINDEX, Segment
from pk.log.storage import File, Storage
from pk.types import NONE, Offset

#: The largest number of offsets that an empty batch can cover.
_DELTA_MAX = 2**31 - 1


class Finding(NamedTuple):
    """One damaged range of a log."""

    segment: Segment
    damage: Damage


def look(
    storage: Storage, path: str, *, trusted: bool, floor: Offset, local_start: Offset = FAR
) -> list[Finding]:
    """Return the damaged ranges of the log in `path`, ascending.  Nothing is changed.

    trusted: the log was closed cleanly.  Checkpoints say that the log ended at `floor` or above,
    and that it began at `local_start` or below.
    """
    found: list[Finding] = []
    cleaned = storage.exists(f"{path}/{swap.FILE}")  # offsets of removed records are missing
    surveyed = survey_log(storage, path, trusted=trusted, dense=not cleaned)
    first = surveyed[0][0].base_offset if surveyed else floor
    missing = damage.missing_in_front(local_start, first)
    if missing is not None:
        found.append(Finding(Segment(storage, path, missing.start), missing))
    for number, (segment, ranges) in enumerate(surveyed):
        last = number + 1 == len(surveyed)
        for each in ranges:
            if each.end != UNKNOWN:
                found.append(Finding(segment, each))
            elif last and not (_torn(segment, each) and each.start >= floor and not trusted):
                wide = each.start + span(each.end_position - each.position)
                found.append(Finding(segment, each._replace(end=max(floor, wide))))
        if last:
            end = _end_of(segment, ranges)
            if end != UNKNOWN and end < floor:
                size = segment.stored_bytes()
                missing = Damage(end, floor, size, size, "bytes are missing")
                found.append(Finding(segment, missing))
    return found


def _torn(segment: Segment, damage: Damage) -> bool:
    """Whether the bytes are the beginning of a batch, because a process died while it wrote
    them.
    """
    raw = segment.read_at(damage.position, HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        return True
    header = batches.read_header(raw)
    try:
        batches.check_structure(header)
    except errors.CorruptBatch:
        return False
    return (
        header.base_offset == damage.start and damage.position + header.length > damage.end_position
    )


def _end_of(segment: Segment, ranges: list[Damage]) -> Offset:
    """Return the offset behind the segment's last batch or range; UNKNOWN if the end of its last
    range is.
    """
    if ranges and ranges[-1].end == UNKNOWN:
        return UNKNOWN
    end = segment.base_offset
    for each in _pieces(segment, ranges):
        end = each.end if isinstance(each, Damage) else each[1].next_offset
    return end


def _pieces(segment: Segment, ranges: list[Damage]) -> Iterator[Damage | tuple[int, Header]]:
    """Yield the whole batches, as `(position, header)`, and the damaged ranges, in order."""
    position, size = 0, segment.stored_bytes()
    left = list(ranges)
    while position < size or left:
        if left and left[0].position <= position:
            yield left[0]
            position = left.pop(0).end_position
            continue
        header = batches.read_header(segment.read_at(position, HEADER_BYTES))
        yield position, header
        position += header.length


def go_past(storage: Storage, path: str, findings: list[Finding]) -> None:
    """Replace each range by a gap, segment by segment (B1).  Raises `StorageFull` or
    `StorageFailed`; segments that were replaced before the failure stay replaced.
    """
    known = epochs_of(storage, path)
    by_segment: dict[Segment, list[Damage]] = {}
    for finding in findings:
        by_segment.setdefault(finding.segment, []).append(finding.damage)
    for segment, ranges in by_segment.items():
        _rewrite(storage, segment, ranges, known)


def _rewrite(
    storage: Storage, segment: Segment, ranges: list[Damage], known: LeaderEpochs | None
) -> None:
    beside = f"{segment.path()}.tmp"
    if not storage.exists(segment.path()):  # the whole segment is missing
        segment.create()
        segment.close()
    file = storage.open(beside, create=True)
    try:
        file.truncate(0)
        before: Header | None = None
        copied = 0  #: position up to which the old segment is in the new one
        for each in _pieces(segment, ranges):
            if isinstance(each, Damage):
                _copy(segment, file, copied, each.position)
                file.append(list(gaps(each.start, each.end, known, before)))
                copied = each.end_position
            else:
                before = each[1]
        _copy(segment, file, copied, segment.stored_bytes())
        file.sync()
    finally:
        file.close()
    for suffix in (INDEX, TIMEINDEX, TXNINDEX):
        storage.remove(segment.path(suffix))
    storage.sync_dir(segment.directory)
    storage.rename(beside, segment.path())
    storage.sync_dir(segment.directory)


def _copy(segment: Segment, file: File, start: int, end: int) -> None:
    while start < end:
        raw = segment.read_at(start, min(CHUNK_BYTES, end - start))
        if not raw:
            raise errors.StorageFailed(f"{segment.path()} ends at {start}, it had {end} bytes")
        file.append([raw])
        start += len(raw)


def gaps(
    start: Offset, end: Offset, known: LeaderEpochs | None, before: Header | None
) -> Iterator[bytes]:
    """Yield empty batches that cover `[start, end)`, at least one for each leader epoch.

    `before`: the batch in front of them.  They get its timestamp, so that retention treats them
    alike.
    """
    starts = [] if known is None else [each.start_offset for each in known.entries]
    cuts = [at for at in starts if start < at < end]
    stamp = 0 if before is None else before.max_timestamp
    for begin, until in zip([start, *cuts], [*cuts, end], strict=True):
        epoch = NONE if known is None else known.epoch_of(begin)
        if epoch == NONE and before is not None:
            epoch = before.leader_epoch
        while begin < until:
            following = min(until, begin + _DELTA_MAX)
            yield _gap(begin, following, epoch, stamp)
            begin = following


def _gap(start: Offset, end: Offset, epoch: int, stamp: int) -> bytes:
    header = Header(
        base_offset=start,
        length=HEADER_BYTES,
        leader_epoch=epoch,
        magic=batches.MAGIC,
        crc=0,
        attributes=0,
        producer_epoch=NONE,
        last_offset_delta=end - start - 1,
        base_timestamp=stamp,
        max_timestamp=stamp,
        producer_id=NONE,
        base_sequence=NONE,
        record_count=0,
    )
    (raw,) = batches.seal(header, [])
    return bytes(raw)


def is_gap(header: Header) -> bool:
    """Whether a batch is a gap: an empty batch without producer, which nothing else writes."""
    return not header.record_count and not header.control and header.producer_id == NONE
