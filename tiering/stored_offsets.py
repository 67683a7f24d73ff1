"""Reads the copies of committed offsets back from the tier (rule T13).

World-generic.  The newest copy of each partition counts.  A copy that is damaged, or that a newer
build wrote, is an error that names it: a restore must not silently begin with older offsets.
"""

from __future__ import annotations

from pk import errors
from pk.tiering import offset_files
from pk.tiering.objects import ObjectStore
from pk.tiering.offset_files import CopyName, OffsetsCopy


async def copies_in(
    store: ObjectStore, cluster_id: str, partition: int | None = None
) -> dict[int, dict[CopyName, str]]:
    """Return the paths of the copies in the store, by partition and name.

    partition: None = of all partitions
    """
    prefix = offset_files.directory(cluster_id)
    if partition is not None:
        prefix = f"{prefix}/{partition:05d}"
    found: dict[int, dict[CopyName, str]] = {}
    for each in await store.list(prefix):
        parsed = offset_files.parse_path(each.path)
        if parsed is not None:
            number, name = parsed
            found.setdefault(number, {})[name] = each.path
    return found


async def read_offsets(
    store: ObjectStore, cluster_id: str, *, accept_older: bool = False
) -> dict[int, OffsetsCopy]:
    """Return the newest copy of each partition of `__consumer_offsets`.

    accept_older: if the newest copy is damaged, take the newest one that is whole.

    Raises `DamagedTierFile` for a damaged copy (with `accept_older`, if a partition has no whole
    one), `NewerFormat` for a copy of a newer build, and the refusals of the store.
    """
    found: dict[int, OffsetsCopy] = {}
    for partition, paths in sorted((await copies_in(store, cluster_id)).items()):
        found[partition] = await _newest(store, paths, accept_older=accept_older)
    return found


async def _newest(
    store: ObjectStore, paths: dict[CopyName, str], *, accept_older: bool
) -> OffsetsCopy:
    damaged: errors.DamagedTierFile | None = None
    for _, path in sorted(paths.items(), reverse=True):
        try:
            raw = await store.get_range(path, 0, 2 * offset_files.COPY_BYTES_MAX)
            return offset_files.decode(path, raw)
        except FileNotFoundError as gone:  # a later copy took its place while this one was read
            problem = errors.DamagedTierFile(f"{path}: the copy was removed", path=path)
            problem.__cause__ = gone
        except errors.DamagedTierFile as error:
            problem = error
        damaged = damaged or problem
        if not accept_older:
            break
    assert damaged is not None, "a partition without copies is not listed"
    raise damaged
