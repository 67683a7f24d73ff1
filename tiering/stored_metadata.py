"""Finds the copies of a cluster's metadata in the tier (rule T13).

World-generic.
"""

from __future__ import annotations

from pk.tiering.cluster_directory import FIRST_GENERATION
from pk.tiering.metadata_copies import MetadataName, metadata_directory, parse_metadata_path
from pk.tiering.objects import ObjectStore


async def metadata_in(
    store: ObjectStore, cluster_id: str, generation: int = FIRST_GENERATION
) -> dict[MetadataName, str]:
    """Return the paths of the copies in the store, by name."""
    found: dict[MetadataName, str] = {}
    for each in await store.list(metadata_directory(cluster_id, generation)):
        name = parse_metadata_path(each.path)
        if name is not None:
            found[name] = each.path
    return found
