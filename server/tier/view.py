"""The feed of partition changes from the broker to its tier process.

World-generic.  `TierFeed` answers the tier's long poll with the partitions that changed since the
generation of the request (rule P6).  So a poll costs O(changes), not O(partitions).

Invariants
  Y4  A request with a generation older than the oldest dropped tombstone gets the full list.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

#: Most tombstones of removed partitions; beyond that, old sessions get the full list.
TOMBSTONES_MAX = 10_000
#: Least time between two reports.  One report covers many appends; the copier works in seconds
#: (P6).
REPORT_INTERVAL_MS = 200


class TierFeed:
    """Tracks which partitions changed since a generation."""

    def __init__(self, session_id: str) -> None:
        #: id of this broker process; when it changes, the tier asks for the full list
        self.session_id = session_id
        self.generation = 1
        self.moved = asyncio.Event()  #: set when a waiting poll should look again
        self._changed: dict[PartitionKey, int] = {}  #: oldest change first
        self._gone: dict[PartitionKey, str] = {}  #: tombstones: key -> topic name
        self._oldest_complete = 0

    def touch(self, key: PartitionKey) -> None:
        """Note a change of `key` that the tier must learn."""
        self.generation += 1
        self._changed.pop(key, None)
        self._changed[key] = self.generation

    def remove(self, key: PartitionKey, topic: str) -> None:
        """Note that this broker no longer leads `key`."""
        self.touch(key)
        self._gone[key] = topic
        while len(self._gone) > TOMBSTONES_MAX:
            oldest = next(iter(self._gone))
            del self._gone[oldest]
            self._oldest_complete = max(self._oldest_complete, self._changed.pop(oldest, 0))  # Y4

    def restore(self, key: PartitionKey) -> None:
        """Note that this broker leads `key` again."""
        self._gone.pop(key, None)
        self.touch(key)

    def news(self, session_id: str, generation: int) -> bool:
        """Whether `reply` would name a partition."""
        return session_id != self.session_id or generation < self.generation

    def reply(
        self,
        request: wire.TierPartitionsRequest,
        describe: Callable[[PartitionKey], wire.TierPartition | None],
    ) -> wire.TierPartitionsReply:
        """Return the partitions changed since the request's generation, oldest change first."""
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
