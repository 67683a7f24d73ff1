"""The log of a table in a directory, SYNCED (file://).

deltalake writes commits and checkpoints and leaves them to the page cache.  pk drops local records
because a table holds them (rule T6), so what a commit says must survive a power loss, as do the
objects it names (`DirectoryStore`).  In an object store that is the server's word.

A table is opened by its last checkpoint and what came after it: what is older need not be there,
and there may be a month of it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path

LOG = "_delta_log"
LAST_CHECKPOINT = "_last_checkpoint"
_DIGITS = 20


def sync_log(root: Path, path: str, after: int) -> None:
    """Commits and checkpoints of the table at `path` above version `after`, and their names; with
    -1 those from the last checkpoint on, and the names of the directories up to `root`.  Raises
    `OSError`.
    """
    home = root / path / LOG
    newest = _checkpointed(home) - 1 if after < 0 else after
    for name in sorted(os.listdir(home)):
        number = name[:_DIGITS]
        if name == LAST_CHECKPOINT or (number.isdecimal() and int(number) > newest):
            with contextlib.suppress(FileNotFoundError):  # cleaned up meanwhile
                _sync(home / name)
    _sync(home)
    if after < 0:
        for above in home.relative_to(root).parents:
            _sync(root / above)


def _checkpointed(home: Path) -> int:
    """The version by which the table is opened; 0 if nothing tells."""
    try:
        told = json.loads((home / LAST_CHECKPOINT).read_bytes())
        return int(told["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as cause:
        if cause.errno != errno.EROFS:  # what is read-only has nothing to sync
            raise
    finally:
        os.close(descriptor)
