"""When the broker of a data directory last trusted its wall clock (rule L10): `clock-checkpoint`.

Every data directory has the file.  It is written SYNCED, and only while the broker trusts its clock
(server/broker/clock_trust.py).  If the file is missing or damaged, the next start waits as if its
clock were implausible.

pk clock-checkpoint 0
<wall ms> <boottime ms> <keep producers until, wall ms> <boot id or ->
crc32c 1a2b3c4d
"""

from __future__ import annotations

from typing import NamedTuple

from pk.log import checkpoints

FILE = "clock-checkpoint"
_NO_BOOT = "-"


class LastRun(NamedTuple):
    """The clocks of the machine when the broker last trusted the wall clock.

    keep_producers_ms: the wall clock before which no producer is forgotten; 0 = no such time.
    """

    wall_ms: int
    boottime_ms: int
    boot_id: str
    keep_producers_ms: int = 0


def encode(run: LastRun) -> bytes:
    """Encode the content of the file."""
    line = f"{run.wall_ms} {run.boottime_ms} {run.keep_producers_ms} {run.boot_id or _NO_BOOT}"
    return checkpoints.encode(FILE, [line])


def decode(raw: bytes) -> LastRun | None:
    """Decode the content; None if the file is damaged.  Raises `NewerFormat`."""
    try:
        (line,) = checkpoints.decode(FILE, raw)
        wall, boottime, keep, boot_id = line.split(" ", 3)
        return LastRun(int(wall), int(boottime), "" if boot_id == _NO_BOOT else boot_id, int(keep))
    except (checkpoints.CorruptCheckpoint, ValueError):
        return None
