"""Chooses the uploads that a sweep removes.  Pure.

An upload that no version names is left by a copier or a job that died, or whose hand-over was
refused.  No reader sees it.

Invariants
  N1  A file that any version names which the table's log still knows stays, also if a newer version
      removed it: readers of older versions need it, and VACUUM deletes it in time.
  N2  A file younger than `YOUNGEST_MS` stays: its hand-over may be under way.  Ages are differences
      of two times of the store's clock.
  N3  A file whose name pk did not make stays: another engine may be about to commit it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from pk import errors
from pk.tiering.layout import parse_written_path

YOUNGEST_MS = 3_600_000


class StoredFile(NamedTuple):
    """An object below the table; `path` is relative to it."""

    path: str
    size: int
    modified_ms: int  #: of the store's clock


def candidates(
    listed: Iterable[StoredFile], named: Collection[str], now_ms: int, older_than_ms: int
) -> list[StoredFile]:
    """Return the listed files that are old enough and that no version names, by path.

    now_ms: of the store's clock, not after the listing began
    """
    least_ms = max(older_than_ms, YOUNGEST_MS)
    return sorted(
        each
        for each in listed
        if parse_written_path(each.path) is not None  # N3
        and each.path not in named  # N1
        and each.modified_ms + least_ms <= now_ms  # N2
    )


def paths_in(commit: bytes, where: str) -> Iterator[str]:
    """Yield the paths that a commit of the log adds or removes.

    Raises `TierTableChanged` if a line does not parse: then nothing may be deleted.
    """
    for line in commit.splitlines():
        if not line.strip():
            continue
        try:
            action = json.loads(line)
            for kind in ("add", "remove"):
                if action.get(kind) is not None:
                    yield str(action[kind]["path"])
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise errors.TierTableChanged(f"{where}: a commit does not parse: {cause!r}") from cause
