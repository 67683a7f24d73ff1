"""What a run knows of the offsets and the owners of its consumer group.

V26  A fetch of committed offsets returns at least what was acknowledged, or fetched, before it
     was sent.  So no offset goes back, and no acknowledged commit is lost with a coordinator:
     applications of a run never commit a lower offset.  The offsets of a deleted topic go (L8).
V27  A partition has one owner in a generation.  A static member and its successor are one owner.

Both hold until the group's partition of `__consumer_offsets` may have lost records (loss_model).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from pk.client.group_types import ConsumerGroupMetadata
from pk.sim.checkers import Violation
from pk.types import PartitionKey


class GroupHistory:
    """The floors of offsets, and the owners by generation."""

    def __init__(
        self,
        deleted: Callable[[PartitionKey], bool],
        lossy: Callable[[], bool] = lambda: False,
    ) -> None:
        """`deleted`: whether a client has asked to delete the topic of a partition.  `lossy`:
        whether records of the group may be lost.
        """
        self._deleted = deleted
        self.lossy = lossy
        self.floors: dict[PartitionKey, int] = {}
        self._owners: dict[tuple[int, PartitionKey], str] = {}
        self.counts: Counter[str] = Counter()

    def acknowledged(self, offsets: Mapping[PartitionKey, int]) -> None:
        """Note a commit that the coordinator has acknowledged."""
        self.counts["group commits"] += 1
        self._raise(offsets)

    def _raise(self, offsets: Mapping[PartitionKey, int]) -> None:
        for key, offset in offsets.items():
            self.floors[key] = max(offset, self.floors.get(key, 0))

    def fetched(
        self,
        name: str,
        asked: Iterable[PartitionKey],
        before: Mapping[PartitionKey, int],
        found: Mapping[PartitionKey, int],
    ) -> None:
        """Check V26; `before`: a copy of the floors when the fetch was sent."""
        for key in asked:
            back = found.get(key, 0) < before.get(key, 0) and not self._deleted(key)
            if back and not self.lossy():
                raise Violation(
                    f"V26: {name} fetched offset {found.get(key)} of {key}, after {before[key]}"
                )
        self._raise(found)

    def forget_deleted(self) -> None:
        """Forget the offsets of deleted topics."""
        for key in [each for each in self.floors if self._deleted(each)]:
            del self.floors[key]
            self.counts["offsets of deleted topics"] += 1

    def owns(self, who: ConsumerGroupMetadata, keys: Iterable[PartitionKey]) -> None:
        """Check V27 as a member applies its assignment."""
        self.counts["group assignments"] += 1
        name = who.group_instance_id or who.member_id
        for key in keys:
            other = self._owners.setdefault((who.generation, key), name)
            if other != name and not self.lossy():
                raise Violation(
                    f"V27: {key} belongs to {other} and to {name} in generation {who.generation}"
                )
