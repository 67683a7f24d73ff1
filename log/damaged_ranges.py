"""Finds the damaged ranges of a log that is not open.  Opening a log in spite of them (log/loading
O10) and `pk log repair` (repair.py) use the result.
"""

from __future__ import annotations

import contextlib

from pk.log import checkpoints, damage, index
from pk.log import epochs as leader_epochs
from pk.log.damage import UNKNOWN, Damage
from pk.log.epochs import LeaderEpochs
from pk.log.index import SparseIndex
from pk.log.segment import INDEX, TIMEINDEX, Segment, base_offset_of
from pk.log.storage import Storage
from pk.types import Offset

#: Larger than every offset.
FAR = 2**63 - 1


def damaged_ranges(
    storage: Storage, path: str, *, trusted: bool, trusted_to: Offset, dense: bool
) -> dict[Offset, tuple[Damage, ...]]:
    """Return every damaged range whose end is known, by the base offset of its segment.

    trusted: the log was closed cleanly.  trusted_to: no power loss can have torn anything below
    this offset.
    """
    found: dict[Offset, tuple[Damage, ...]] = {}
    for segment, ranges in survey_log(storage, path, trusted=trusted, dense=dense):
        known = [each for each in ranges if each.end != UNKNOWN and each.end <= trusted_to]
        if known:
            found[segment.base_offset] = tuple(known)
    return found


def survey_log(
    storage: Storage, path: str, *, trusted: bool, dense: bool
) -> list[tuple[Segment, list[Damage]]]:
    """Return each segment, oldest first, with its damaged ranges."""
    known = epochs_of(storage, path)
    bases = bases_of(storage, path)
    found = []
    for base, following in zip(bases, [*bases[1:], UNKNOWN], strict=False):
        segment = Segment(storage, path, base)
        sparse, end = _index(segment), following
        if trusted and following == UNKNOWN and sparse is not None:
            end = sparse[1]
        ranges = damage.survey(
            segment.read_at,
            segment.stored_bytes(),
            base,
            end_offset=end,
            index=None if sparse is None else sparse[0],
            epoch_of=None if known is None else known.epoch_of,
            dense=dense,
        )
        found.append((segment, ranges))
    return found


def bases_of(storage: Storage, path: str) -> list[Offset]:
    """Return the base offsets of the segments, ascending."""
    return [base for name in storage.list(path) if (base := base_offset_of(name)) is not None]


def epochs_of(storage: Storage, path: str) -> LeaderEpochs | None:
    """Return the content of the epoch file; None if it is damaged or missing."""
    try:
        return LeaderEpochs.decode(storage.read_file(f"{path}/{leader_epochs.FILE}"))
    except (FileNotFoundError, checkpoints.CorruptCheckpoint):
        return None


def _index(segment: Segment) -> tuple[SparseIndex, Offset] | None:
    """Return the entries of the index and where it ends.  They are not compared with the segment's
    last batch, because the last batch may be the damaged one.
    """
    with contextlib.suppress(index.CorruptIndex, FileNotFoundError):
        raw = segment.read_file(INDEX), segment.read_file(TIMEINDEX)
        sparse, extent = index.decode(segment.base_offset, *raw)
        return sparse, extent.next_offset
    return None
