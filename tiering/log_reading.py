"""Reads what deltalake does not compare: commits against their checksums (log_check.py).

World-generic.  Deltalake has opened a version when this looks at it; nothing of the version is
used before `compare` has returned.
"""

from __future__ import annotations

import asyncio

from pk import errors
from pk.tiering import log_check
from pk.tiering.layout import commit_file
from pk.tiering.objects import ObjectStore
from pk.tiering.table import Snapshot

#: A commit holds at most plan.ACTIONS_PER_COMMIT_MAX actions of pk's; other engines' are larger.
COMMIT_BYTES_MAX = 64 * 1024 * 1024
#: Commits that are looked at when deltalake cannot read a log: more than lie between checkpoints.
SUSPECTS_MAX = 16
_LOG = "_delta_log/"


async def compare(store: ObjectStore, home: str, uri: str, snapshot: Snapshot, known: int) -> None:
    """Raises `TierTableChanged` unless `snapshot` is what pk and other engines committed.

    `known` is the newest version of the same table that was compared before; -1 without one.
    """
    log_check.check_names(uri, snapshot.version, snapshot.files.values())
    walk = log_check.Walk(uri, snapshot.version, snapshot.files, known)
    while wanted := walk.wanted():
        found = await asyncio.gather(*(_commit(store, home, each) for each in wanted))
        for version, data in zip(wanted, found, strict=True):
            walk.take(version, data)
    try:
        walk.finish()
    except errors.TierTableChanged:
        await find_damaged(store, home, uri)  # the commit at fault, if it is one of the newest
        raise


async def find_damaged(store: ObjectStore, home: str, uri: str) -> None:
    """Raises `TierTableChanged` if one of the newest commits is damaged."""
    listed = await store.list(f"{home}/{_LOG.rstrip('/')}")
    names = [each.path.rpartition("/")[2] for each in listed]
    versions = [int(name[:20]) for name in names if len(name) == 25 and name.endswith(".json")]
    for version in sorted(versions)[-SUSPECTS_MAX:]:
        data = await _commit(store, home, version)
        if data is not None:
            log_check.read_commit(uri, version, data)


async def _commit(store: ObjectStore, home: str, version: int) -> bytes | None:
    try:
        return await store.get_range(f"{home}/{commit_file(version)}", 0, COMMIT_BYTES_MAX)
    except FileNotFoundError:
        return None
