"""Pages of the committed offsets of one coordinator partition, for their copy in the tier (T13).

A page has offsets in the order of group id, topic id and partition, and a reader goes on after the
last one.  Between two pages the groups go on, so a copy is no moment of all groups: it has each
offset as it was at some time after the first page was asked for.

Invariants
  B1  A page has at most PAGE_OFFSETS offsets, and no further one once it has PAGE_BYTES.  So it
      takes the event loop about a millisecond.
  B2  Only committed offsets are read: those of an open transaction are pending (X2).
"""

from __future__ import annotations

from collections.abc import Iterator

from pk.server.groups import commands
from pk.server.groups.groups import ConsumerGroup, Groups, Out, decision
from pk.server.groups.state import CommittedOffset
from pk.server.metadata.image import MetadataImage
from pk.types import PartitionKey, TopicId
from pk.wire import pk_pb2 as wire

PAGE_OFFSETS = 500
PAGE_BYTES = 256 * 1024
#: The numbers of an offset in a message, about.
_OFFSET_BYTES = 32


def read_page(groups: Groups, command: commands.ReadOffsets, now_ms: int) -> Out:
    """Return the offsets after the place of the request (B1)."""
    page = _Page(command.image)
    for group, key, committed in _after(groups, command.request):
        if page.full:
            return decision(page.reply, [])
        page.add(group, key, committed)
    page.reply.done = True
    return decision(page.reply, [])


def _after(
    groups: Groups, request: wire.ReadOffsetsRequest
) -> Iterator[tuple[ConsumerGroup, PartitionKey, CommittedOffset]]:
    """Return the offsets after the place of the request, in order."""
    place = request.after
    last = (place.group_id, PartitionKey(place.topic_id, place.partition))
    first, known = not request.HasField("after"), groups.items()
    for group_id in sorted(name for name in known if name >= place.group_id):
        group = known[group_id]
        for key in sorted(group.offsets):
            if first or (group_id, key) > last:
                yield group, key, group.offsets[key]


class _Page:
    """The reply, while it grows."""

    def __init__(self, image: MetadataImage) -> None:
        self.reply = wire.ReadOffsetsReply()
        self._image = image
        self._offsets = 0
        self._bytes = 0
        self._group: wire.StoredGroup | None = None
        self._topic: wire.StoredTopic | None = None

    @property
    def full(self) -> bool:
        return self._offsets >= PAGE_OFFSETS or self._bytes >= PAGE_BYTES

    def add(self, group: ConsumerGroup, key: PartitionKey, committed: CommittedOffset) -> None:
        """Add one offset behind those of the page."""
        topic = self._topic_of(self._group_of(group), key.topic_id)
        topic.partitions.append(key.partition)
        topic.offsets.append(committed.offset)
        topic.leader_epochs.append(committed.leader_epoch)
        topic.metadata.append(committed.metadata)
        topic.committed_ms.append(committed.committed_ms)
        self._offsets += 1
        self._bytes += _OFFSET_BYTES + len(committed.metadata)

    def _group_of(self, group: ConsumerGroup) -> wire.StoredGroup:
        known = group.metadata
        if self._group is None or self._group.group_id != known.group_id:
            self._topic = None
            self._group = self.reply.groups.add(
                group_id=known.group_id,
                query_run=known.query_run,
                holds_retention=known.holds_retention,
            )
            self._bytes += len(known.group_id) + len(known.query_run)
        return self._group

    def _topic_of(self, group: wire.StoredGroup, topic_id: TopicId) -> wire.StoredTopic:
        if self._topic is None or self._topic.topic_id != topic_id:
            topic = self._image.topics.get(topic_id)
            name = "" if topic is None else topic.name
            self._topic = group.topics.add(topic=name, topic_id=topic_id)
            self._bytes += len(name) + len(topic_id)
        return self._topic
