"""What to do with each segment when a log is opened: two tables from facts to an action, and one
for how a segment meets the one before it.

The recovery point is the offset below which everything was SYNCED; after an unclean shutdown the
rest may be torn.  A segment is trusted if the log was closed cleanly, or if the segment lies wholly
below the recovery point.

Before looking into the data
   #  data            index                  action
   A  trusted         complete               USE
   B  trusted         short, torn, missing   REINDEX   walk the headers from where the index ends
   C  not trusted     any                    SCAN      every checksum from the recovery point on
   D  trusted         beyond the data        CORRUPT   the index covers more: data is missing

Where a walk or a scan stopped
   E  at the end of the file                                 USE
   F  below the recovery point, or in trusted data           CORRUPT   own sealed data (rule L9)
   G  the power was lost (other boot)                        CUT       here, and all later segments
   H  same boot, the file ends in a torn batch, nothing
      whole or newer is behind its beginning                 CUT       the process died writing
   I  same boot, anything else                               CORRUPT   only a log's end can be torn

Where a segment meets the one before it
   J  begins where the one before ends                       USE
   K  begins elsewhere, but is empty                         REMOVE    the process died creating it
   L  begins later, power lost, above the recovery point     CUT       the one before lost its end
   M  begins later, compacted topic                          USE       cleaning took the last batch
   N  begins elsewhere                                       CORRUPT   a segment is missing or
      doubled

Producer state is read from the newest whole snapshot at or below the log end, then from every
header after it.  A segment without a snapshot costs time and never correctness.
"""

from __future__ import annotations

import enum


class RecoveryAction(enum.Enum):
    USE = "use"
    REINDEX = "reindex"
    SCAN = "scan"
    CUT = "cut"
    REMOVE = "remove"
    CORRUPT = "corrupt"


class Stop(enum.Enum):
    """Where a walk over a segment's batches ended."""

    END = "at the end"
    SHORT = "within a batch"  #: the file has fewer bytes left than the batch's header says
    BAD = "at a damaged batch"  #: the header is invalid or the checksum does not match


class IndexState(enum.Enum):
    COMPLETE = "complete"
    SHORT = "short"  #: the index is good, but the log goes on behind its end
    BEYOND = "beyond the data"
    UNUSABLE = "missing or torn"


def before(*, trusted: bool, index: IndexState) -> tuple[str, RecoveryAction]:
    """Return `(row, action)` of rows A–D."""
    if not trusted:
        return "C", RecoveryAction.SCAN
    if index is IndexState.BEYOND:
        return "D", RecoveryAction.CORRUPT
    return (
        ("A", RecoveryAction.USE) if index is IndexState.COMPLETE else ("B", RecoveryAction.REINDEX)
    )


def after(
    stop: Stop, *, trusted: bool, offset: int, recovery_point: int, same_boot: bool, torn: bool
) -> tuple[str, RecoveryAction]:
    """Return the verdict of rows E–I.  `offset` is where the walk stopped.  `torn` means that only
    the beginning of one batch follows, in this segment and in the later ones (`damage.is_torn`).
    """
    if stop is Stop.END:
        return "E", RecoveryAction.USE
    if trusted or offset < recovery_point:
        return "F", RecoveryAction.CORRUPT
    if not same_boot:
        return "G", RecoveryAction.CUT
    if stop is Stop.SHORT and torn:
        return "H", RecoveryAction.CUT
    return "I", RecoveryAction.CORRUPT


def joint(
    *,
    end_before: int,
    base_offset: int,
    empty: bool,
    compacted: bool,
    power_lost: bool,
    recovery_point: int,
) -> tuple[str, RecoveryAction]:
    """Return the verdict of rows J–N for a segment that is not the first."""
    if base_offset == end_before:
        return "J", RecoveryAction.USE
    if empty:
        return "K", RecoveryAction.REMOVE
    if base_offset > end_before and power_lost and base_offset > recovery_point:
        return (
            ("L", RecoveryAction.CUT)
            if end_before >= recovery_point
            else ("N", RecoveryAction.CORRUPT)
        )
    if base_offset > end_before and compacted:
        return "M", RecoveryAction.USE
    return "N", RecoveryAction.CORRUPT
