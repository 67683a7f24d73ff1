"""Tables of a tier that belong to no topic of a cluster.

A topic that is deleted leaves its table, unless the deletion purges it.  The table and the snapshot
of a topic are the directories

    <tier>/<topic>/<topic id>
    <tier>/<topic>__snapshot/<topic id>

Invariants
  O1  The store is listed before the topics are asked for, so a topic that is created meanwhile is
      known.  A table whose topic is deleted meanwhile counts as that topic's.
  O2  Nothing is written or deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pk import errors
from pk.sparkconnector import table_store

LOG = "_delta_log"


@dataclass(frozen=True, slots=True)
class OrphanTable:
    """A table that no topic owns.  modified_ms: of its newest object, by the store's clock."""

    topic: str
    topic_id: str
    uri: str
    files: int
    bytes: int
    modified_ms: int


def tier_of(table_uri: str) -> str:
    """Return the URL of the tier that holds a topic's table."""
    return table_uri.rstrip("/").rsplit("/", 2)[0]


def listed(tier_url: str, storage_options: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return name and topic id of all tables below a tier.  Raises `TierUnavailable`."""
    source, root = table_store.file_system(tier_url, storage_options)
    try:
        return sorted(_listed(source, root))
    except OSError as cause:
        raise errors.TierUnavailable(f"{tier_url}: {cause}") from cause


def _listed(source: Any, root: str) -> Iterator[tuple[str, str]]:
    for directory in _directories(source, root):
        name = directory.rpartition("/")[2]
        if name.startswith("_"):
            continue  # pk's own: _cluster, _audit
        for table in _directories(source, directory):
            if any(each.endswith(f"/{LOG}") for each in _directories(source, table)):
                yield name, table.rpartition("/")[2]


def _directories(source: Any, path: str) -> list[str]:
    from pyarrow import fs

    found = source.get_file_info(fs.FileSelector(path, allow_not_found=True))
    return [each.path for each in found if each.type == fs.FileType.Directory]


def orphans(
    tier_url: str,
    storage_options: Mapping[str, str],
    tables: Collection[tuple[str, str]],
    topic_ids: Collection[str],
) -> list[OrphanTable]:
    """Return the tables whose topic id no topic has, with their sizes.

    tables: of `listed`, from before topic_ids was read (O1).  Raises `TierUnavailable`.
    """
    source, root = table_store.file_system(tier_url, storage_options)
    try:
        return [
            _sized(source, root, tier_url, *each) for each in tables if each[1] not in topic_ids
        ]
    except OSError as cause:
        raise errors.TierUnavailable(f"{tier_url}: {cause}") from cause


def _sized(source: Any, root: str, tier_url: str, name: str, topic_id: str) -> OrphanTable:
    from pyarrow import fs

    selector = fs.FileSelector(f"{root}/{name}/{topic_id}", recursive=True, allow_not_found=True)
    files = [each for each in source.get_file_info(selector) if each.is_file]
    return OrphanTable(
        topic=name,
        topic_id=topic_id,
        uri=f"{tier_url.rstrip('/')}/{name}/{topic_id}",
        files=len(files),
        bytes=sum(each.size for each in files),
        modified_ms=max((int(each.mtime_ns) // 1_000_000 for each in files), default=0),
    )
