"""What the tier is told of the broker's partitions.

Sans-IO.  `TierFeed` answers the tier's long poll with the partitions that changed since the
generation it names (rule P6): a poll costs what changed, not what exists.

Invariants
  Y4  a session that names a generation older than the oldest forgotten tombstone gets the full list
"""

from __future__ import annotations

from collections.abc import Callable

from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

#: Partitions that are gone and still told to a poll; more, and old sessions get the full list.
TOMBSTONES_MAX = 10_000
#: The copier works in seconds: many appends become one report (P6).
REPORT_INTERVAL_MS = 200


class TierFeed:
    """Which partitions changed since a generation."""

    def __init__(self, session_id: str) -> None:
        self.session_id = (
            session_id  #: of this broker process; another one means: take the full list
        )
        self.generation = 1
        self._changed: dict[PartitionKey, int] = {}  #: oldest change first
        self._gone: dict[PartitionKey, str] = {}  #: tombstones: key -> topic name
        self._oldest_complete = 0

    def touch(self, key: PartitionKey) -> None:
        """Something the tier must know about `key` changed."""
        self.generation += 1
        self._changed.pop(key, None)
        self._changed[key] = self.generation

    def remove(self, key: PartitionKey, topic: str) -> None:
        """This broker does not lead `key` any more."""
        self.touch(key)
        self._gone[key] = topic
        while len(self._gone) > TOMBSTONES_MAX:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._oldest_complete = max(self._oldest_complete, self._changed.pop(oldest, 0))  # Y4

    def restore(self, key: PartitionKey) -> None:
        """This broker leads `key` (again)."""
        self._gone.pop(key, None)
        self.touch(key)

    def news(self, session_id: str, generation: int) -> bool:
        """Whether `reply` would name anything."""
        return session_id != self.session_id or generation < self.generation

    def reply(
        self,
        request: wire.TierPartitionsRequest,
        describe: Callable[[PartitionKey], wire.TierPartition | None],
    ) -> wire.TierPartitionsReply:
        """The partitions changed since the request's generation, oldest change first."""
        full = request.session_id != self.session_id or request.generation < self._oldest_complete
        since = 0 if full else request.generation
        found: list[wire.TierPartition] = []
        for key in reversed(self._changed):
            if self._changed[key] <= since:
                break
            if key in self._gone:
                if not full:
                    topic = self._gone[key]
                    found.append(
                        wire.TierPartition(
                            topic=topic, topic_id=key.topic_id, partition=key.partition, gone=True
                        )
                    )
                continue
            described = describe(key)
            if described is not None:
                found.append(described)
        found.reverse()
        return wire.TierPartitionsReply(
            session_id=self.session_id, generation=self.generation, full=full, partitions=found
        )
