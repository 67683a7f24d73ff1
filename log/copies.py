"""A partition that stands in two data directories of one broker: which of the two logs is served.

Two logs exist if a directory fails, its replica moves to another broker and back into a second
directory, and the first directory then returns with the older log.  The metadata name the directory
of the replica (rule R11).  The broker serves the log in that directory and sets the other log
aside: it appends, renames and removes nothing in it.  The broker discards the other log as a stray
once the topic is deleted or the replica moves away.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pk import errors
from pk.log.directory import Directory
from pk.types import TopicPartition


async def older(
    directories: Sequence[Directory], here: Directory, path: str, named: str
) -> errors.LogUnidentified | None:
    """Return the error for the log at `path` if it stands in the directory `named`, too; else None.

    named: the id of the directory that the metadata name for the replica; "" = none.
    """
    if named in ("", here.directory_id):
        return None
    for each in directories:
        storage = each.disk.storage
        if each.directory_id != named or each.failed is not None:
            continue
        if await each.disk.read(partial(storage.exists, path)):
            where = f"{here.disk.storage.root}/{path}"
            return errors.LogUnidentified(
                f"{where} is an older copy: the metadata name {storage.root}, whose log is served. "
                "Nothing is appended, renamed or removed here",
                directory=where,
            )
    return None


def second(tp: TopicPartition, root: str) -> errors.CorruptLog:
    """Return the error for a second log of a partition for which no directory is named."""
    return errors.CorruptLog(f"{tp} stands in two directories: {root} and another")
