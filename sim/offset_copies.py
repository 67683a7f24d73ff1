"""The check of the copies of committed offsets in the tier, in runs that ask for them (rule T13).

V37  The newest copy of a partition of `__consumer_offsets` never goes back: it is neither removed
     nor hidden by an older one, and no offset in it is lower than in the copy before.
     Applications of a run never commit a lower offset.  After the faults, the newest copies have
     every offset that was acknowledged.

The check reads the objects of the store without delay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from pk.sim.checkers import require
from pk.tiering import offset_files
from pk.tiering.offset_files import CopyName, OffsetsCopy
from pk.types import PartitionKey


class CopyCheck:
    """Checks V37 for one group.

    objects: those of the store.  deleted: whether the offset of a partition may be gone: a client
    has asked to delete its topic (L8), or records of the group may be lost.
    """

    def __init__(
        self,
        objects: Mapping[str, bytes],
        cluster_id: str,
        group_id: str,
        counts: Counter[str],
        deleted: Callable[[PartitionKey], bool],
    ) -> None:
        self._deleted = deleted
        self._objects = objects
        self._home = offset_files.directory(cluster_id) + "/"
        self._group_id = group_id
        self._counts = counts
        self._newest: dict[int, CopyName] = {}
        self._raw: dict[int, bytes] = {}  #: of the newest copies, as they were read
        self._seen: dict[PartitionKey, int] = {}  #: offsets of the newest copy of the group

    def look(self) -> None:
        """Read the newest copies.  Raises `Violation`."""
        paths: dict[int, tuple[CopyName, str]] = {}
        for path in self._objects:
            parsed = offset_files.parse_path(path) if path.startswith(self._home) else None
            if parsed is not None:
                partition, name = parsed
                paths[partition] = max(paths.get(partition, (name, path)), (name, path))
        for partition, before in self._newest.items():
            found = paths.get(partition)
            require(
                found is not None and found[0] >= before,
                "V37",
                "the newest copy of partition {} was {}, and is {}",
                partition,
                before,
                found,
            )
        for partition, (name, path) in paths.items():
            raw = self._objects[path]
            self._newest[partition] = name
            if self._raw.get(partition) != raw:
                self._raw[partition] = raw
                self._counts["copies of offsets"] += 1
                self._read(offset_files.decode(path, raw))

    def _read(self, copy: OffsetsCopy) -> None:
        group = copy.groups.get(self._group_id)
        if group is None:
            return
        offsets = {key: stored.offset for key, stored in group.offsets.items()}
        for key, offset in self._seen.items():
            require(
                offsets.get(key, 0) >= offset or self._deleted(key),
                "V37",
                "{} has {} for {}, an earlier copy {}",
                copy.path,
                offsets.get(key),
                key,
                offset,
            )
        self._seen = offsets

    def behind(self, floors: Mapping[PartitionKey, int]) -> str:
        """Return what the newest copies lack of acknowledged offsets; '' = nothing."""
        late = [key for key, offset in floors.items() if self._seen.get(key, 0) < offset]
        return f"the copies lack offsets of {late}" if late else ""
