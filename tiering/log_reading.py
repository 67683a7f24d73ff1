"""Compares what deltalake does not compare: commits with their checksums (log_check.py).

World-generic.  deltalake has opened a version before this module checks it.  The version is not
used before `compare` has returned.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from pk import errors
from pk.tiering import footers, log_check
from pk.tiering.data_files import DataFile
from pk.tiering.footers import Footer
from pk.tiering.layout import commit_file
from pk.tiering.objects import ObjectStore
from pk.tiering.table import Snapshot

#: Maximum size of a commit: pk's commits have at most plan.ACTIONS_PER_COMMIT_MAX actions, other
#: engines' are larger.
COMMIT_BYTES_MAX = 64 * 1024 * 1024
#: Number of commits that are checked when deltalake cannot read a log: more than lie between
#: checkpoints.
SUSPECTS_MAX = 64
#: Number of footers that are read at once.
FOOTERS_AT_ONCE = 8
_LOG = "_delta_log/"


async def compare(store: ObjectStore, home: str, uri: str, snapshot: Snapshot, known: int) -> None:
    """Raises `TierTableChanged` unless `snapshot` is what pk and other engines committed.

    `known` is the newest version of the same table that was compared before; -1 if there is none.
    """
    log_check.check_names(uri, snapshot.version, snapshot.files.values())
    walk = log_check.CommitWalk(uri, snapshot.version, snapshot.sums, known)
    while wanted := walk.wanted():
        found = await asyncio.gather(*(read_commit(store, home, each) for each in wanted))
        for version, data in zip(wanted, found, strict=True):
            walk.take(version, data)
    try:
        walk.finish()
    except errors.TierTableChanged:
        await find_damaged(store, home, uri)  # names the damaged commit, if it is one of the newest
        raise


async def find_damaged(store: ObjectStore, home: str, uri: str) -> None:
    """Raises `TierTableChanged` if one of the newest commits is damaged."""
    listed = await store.list(f"{home}/{_LOG.rstrip('/')}")
    names = [each.path.rpartition("/")[2] for each in listed]
    versions = [int(name[:20]) for name in names if len(name) == 25 and name.endswith(".json")]
    for version in sorted(versions)[-SUSPECTS_MAX:]:
        data = await read_commit(store, home, version)
        if data is not None:
            log_check.read_commit(uri, version, data)


async def counted(
    store: ObjectStore, home: str, files: Sequence[DataFile], cache: dict[str, DataFile]
) -> dict[str, DataFile]:
    """Returns the files with rows and bounds from their footers, as far as those can be read."""
    left = [file for file in files if file.path not in cache]
    for at in range(0, len(left), FOOTERS_AT_ONCE):
        some = left[at : at + FOOTERS_AT_ONCE]
        read = await asyncio.gather(*(_footer(store, home, file) for file in some))
        for file, footer in zip(some, read, strict=True):
            if footer is not None and footer.groups:
                cache[file.path] = replace(
                    file,
                    rows=footer.metadata.num_rows,
                    min_offset=min(group.min_offset for group in footer.groups),
                    max_offset=max(group.max_offset for group in footer.groups),
                )
    return {file.path: cache[file.path] for file in files if file.path in cache}


async def _footer(store: ObjectStore, home: str, file: DataFile) -> Footer | None:
    """Returns a file's footer, or None if the file or its footer cannot be read.

    The number of the file's rows then stays unknown.  A reader of the file meets the error itself.
    """
    path = f"{home}/{file.path}"
    try:
        tail = await store.get_range(path, *footers.tail_part(file.size))
        longer = footers.longer_tail(tail, file.size)
        if longer is not None:
            tail = await store.get_range(path, *longer)
        return footers.parse_footer(tail)
    except (FileNotFoundError, footers.UnreadableFile):
        return None


async def read_commit(store: ObjectStore, home: str, version: int) -> bytes | None:
    """Returns the JSON of a version; None = there is none."""
    try:
        return await store.get_range(f"{home}/{commit_file(version)}", 0, COMMIT_BYTES_MAX)
    except FileNotFoundError:
        return None
