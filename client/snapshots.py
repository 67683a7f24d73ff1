"""A consumer that begins with the snapshot of a topic, and goes on in the log from its X (rule C3).

The snapshot has the latest value of each key below X, the log everything from X on.  So a reader
that loads the one and polls the other misses no key and gets no record twice.

Invariants
  N1  A snapshot below `forgotten` is refused: compaction has removed a tombstone at or above X, so
      neither the snapshot nor the log would tell that its key is gone.
  N2  A snapshot below the first offset of the log is refused: records between them are gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pk.client import arguments
from pk.client.waiting import OneThread, one_thread
from pk.types import TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

    from pk.client.admin.described import TierDescription
    from pk.tiering.snapshot_table import SnapshotVersion


@dataclass(slots=True, frozen=True)
class SnapshotPosition:
    """The snapshot from which a consumer goes on.

    uri, version: of the Delta table, for any engine.  offsets: X of each partition.
    rows: number of keys.
    """

    topic: str
    uri: str
    version: int
    offsets: Mapping[TopicPartition, int]
    rows: int
    _source: Any = None

    def batches(self) -> Iterator[tuple[TopicPartition, pa.RecordBatch]]:
        """Yield the rows of the snapshot, each key of a partition once.

        The batches have the columns of the tier: offset, timestamp, key, value, headers and others.
        A file is in memory at a time.  Raises `SnapshotUnusable` if a file is damaged or gone,
        `TierUnavailable`.
        """
        from pk.tiering import snapshot_table

        found, options = self._source
        for file in found.files.values():
            place = TopicPartition(self.topic, file.partition)
            for batch in snapshot_table.rows_of(self.uri, options, self.topic, file):
                yield place, batch


class SnapshotConsumer:
    """The part of a consumer that concerns snapshots."""

    _cluster: Any
    _one_thread: OneThread

    def assignment(self) -> list[TopicPartition]:
        raise NotImplementedError

    @one_thread
    def seek_to_snapshot(self, topic: str, timeout_s: float | None = None) -> SnapshotPosition:
        """Seek the assigned partitions of a topic to the X of its newest snapshot, and return it.

        Load `position.batches()` first, then poll: nothing is missed, and nothing comes twice.  A
        partition that is newer than the snapshot is read from its beginning.

            position = consumer.seek_to_snapshot("accounts")
            for place, rows in position.batches():
                state.load(rows)
            for record in consumer:
                state.apply(record)

        timeout_s: seconds; None = default_api_timeout_ms.  Raises `SnapshotUnusable` if there is no
        snapshot, if it is too old (run the job `snapshot`), or if it was changed; `InvalidRequest`
        if no partition of the topic is assigned, or the topic has no table.
        """
        from pk import errors
        from pk.client.admin import described

        consumer: Any = self
        name = arguments.topic(topic)
        places = [each for each in consumer.assignment() if each.topic == name]
        if not places:
            raise errors.InvalidRequest(f"no partition of topic {name} is assigned: assign them")
        seconds = consumer._api_s(timeout_s)
        cluster = self._cluster
        work = cluster.retrying(
            lambda one_ms: described.describe_tier(cluster, name, one_ms), int(seconds * 1000)
        )
        tier = consumer._thread.run(work, seconds)
        found, options = newest_snapshot(tier)
        beginnings = consumer.beginning_offsets(places, seconds)
        check_usable(found, tier, beginnings)
        offsets = {}
        for place in places:
            at = found.positions.get(place.partition)
            if at is None:
                consumer.seek_to_beginning(place)
            else:
                consumer.seek(place, at)
                offsets[place] = at
        return SnapshotPosition(
            name, found.uri, found.version, offsets, found.rows, (found, options)
        )


def newest_snapshot(tier: TierDescription) -> tuple[SnapshotVersion, dict[str, str]]:
    """Return the newest snapshot of a topic and the options of its store.

    Raises `SnapshotUnusable`, `InvalidRequest` if the topic has no table.
    """
    from pk import errors
    from pk.tiering import snapshot_table

    if not tier.uri or tier.version < 0:
        if isinstance(tier.problem, errors.RetriableError):
            raise tier.problem
        raise errors.InvalidRequest(f"topic {tier.topic} has no table, so it has no snapshot")
    options = snapshot_table.with_credentials(tier.storage_options)
    uri = snapshot_table.snapshot_uri(tier.uri, tier.topic, tier.topic_id)
    partitions = [each.partition for each in tier.partitions]
    found = snapshot_table.load(uri, options, tier.topic, tier.topic_id, partitions)
    return found, options


def check_usable(
    found: SnapshotVersion, tier: TierDescription, beginnings: Mapping[TopicPartition, int]
) -> None:
    """Raise `SnapshotUnusable` if the log does not go on where the snapshot ends (N1, N2)."""
    from pk.tiering import snapshot_table

    forgotten = {each.partition: each.forgotten for each in tier.partitions}
    for place, first in beginnings.items():
        at = found.positions.get(place.partition)
        if at is None:
            continue
        if at < forgotten.get(place.partition, 0):
            why = f"compaction has removed tombstones behind its offset {at}"
        elif at < first:
            why = f"the log begins at {first}, behind its offset {at}"
        else:
            continue
        raise snapshot_table.unusable(found.uri, tier.topic, f"partition {place.partition}: {why}")
