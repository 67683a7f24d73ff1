"""Syncs the log of a table in a directory (file://) to the disk.

deltalake writes commits and checkpoints without fsync.  pk deletes local records because a table
holds them (rule T6), so commits must survive a power loss, as the objects they name do
(`DirectoryStore`).  In an object store, the server guarantees that.

A table is opened from its last checkpoint and the commits after it.  Older commits are not needed
and not synced; there may be a month of them.
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
    """Syncs commits and checkpoints of the table at `path` above version `after`, and their names.
    With -1, syncs those from the last checkpoint on, and the names of the directories up to `root`.
    Raises `OSError`."""
    home = root / path / LOG
    newest = _checkpointed(home) - 1 if after < 0 else after
    for name in sorted(os.listdir(home)):
        number = name[:_DIGITS]
        if name == LAST_CHECKPOINT or (number.isdecimal() and int(number) > newest):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                _sync(home / name)
    _sync(home)
    if after < 0:
        for above in home.relative_to(root).parents:
            _sync(root / above)


def _checkpointed(home: Path) -> int:
    """Returns the version of the last checkpoint; 0 if there is none."""
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
        if cause.errno != errno.EROFS:  # a read-only file system has nothing to sync
            raise
    finally:
        os.close(descriptor)
