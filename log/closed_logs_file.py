"""The file `closed-logs-checkpoint` of a data directory: the lines of log/closed_logs.

Invariants
  B4  A missing, damaged or newer file costs time and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pk import errors
from pk.log import checkpoints
from pk.log.storage import Storage

FILE = "closed-logs-checkpoint"
#: The most lines of a file; logs beyond it are opened as ever.
LINES_MAX = 200_000


def encode(lines: Iterable[str]) -> bytes:
    """Encode the file."""
    return checkpoints.encode(FILE, sorted(lines)[:LINES_MAX])


def read(storage: Storage) -> dict[str, str]:
    """Read the file: the line of each log, by the name of its directory (B4)."""
    try:
        lines = checkpoints.decode(FILE, storage.read_file(FILE))
    except (FileNotFoundError, ValueError, errors.NewerFormat):
        return {}
    return {line.partition(" ")[0]: line for line in lines}


def write(storage: Storage, lines: Mapping[str, str]) -> None:
    """Write the file, SYNCED."""
    storage.replace_file(FILE, encode(line for line in lines.values() if line))
