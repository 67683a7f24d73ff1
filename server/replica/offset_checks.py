"""Checks of offsets in a partition that this broker leads: its own, and those that are asked for.

Pure.
"""

from __future__ import annotations

from pk import errors
from pk.log.partition_log import PartitionLog
from pk.server.replica.leader import Leader
from pk.types import Offset


def offset_violations(
    leader: Leader | None, log: PartitionLog, stable: Offset, *, tiered: bool
) -> list[str]:
    """Return the names of the relations that do not hold (rules T1, L11).

    stable: the last stable offset
    """
    if leader is None or not leader.ready:
        return []
    high = leader.high_watermark
    checks = [
        (log.log_start <= stable <= high <= log.written_end <= log.log_end, "log offsets"),
        (log.log_start <= log.local_log_start <= log.written_end, "local_log_start"),
    ]
    # otherwise the table's owner has not removed the deleted rows yet (T9)
    if tiered and log.log_start <= log.tiered_end:
        local = log.local_log_start if log.absent is None else log.absent.start
        checks.append((local <= log.tiered_end <= stable, "tiered_end"))
        checks.append((log.droppable_end <= max(log.tiered_end, log.log_start), "droppable_end"))
    return [what for holds, what in checks if not holds]


def check_position(partition: str, leader: Leader, log_start: Offset, offset: Offset) -> None:
    """Raise unless a reader may fetch at `offset` (KIP-207, KIP-320)."""
    if offset < log_start:
        raise errors.OffsetOutOfRange(
            f"{partition}: offset {offset} is below the log start {log_start}",
            log_start=str(log_start),
        )
    if offset > leader.high_watermark and not leader.ready:
        raise errors.OffsetNotAvailable(
            f"{partition}: the new leader's high watermark is still catching up"
        )
    if offset > leader.log_end:
        raise errors.OffsetOutOfRange(
            f"{partition}: offset {offset} is above the log end {leader.log_end}",
            log_end=str(leader.log_end),
        )


def check_front(partition: str, log: PartitionLog) -> None:
    """Raise unless a follower may begin at the log's first segment (replica/corruption N4)."""
    if log.absent is not None:
        raise errors.OffsetNotAvailable(
            f"{partition}: the segment files of offsets {log.absent} are gone here, and it is not "
            "known yet whether the table has these offsets"
        )
