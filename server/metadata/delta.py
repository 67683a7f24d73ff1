"""The difference between two metadata images, as rows that turn the earlier into the later (Q2).

A broker that loads a snapshot skips the records between its own image and the snapshot.  Code that
reacts to records then reacts to these rows instead.  The rows go both ways: they also remove what
exists only in the earlier image, because the records of the removal are not in the snapshot.  A
change that was undone in between has no row.

Invariants
  D1  `earlier` with the rows of `difference(earlier, later)` applied equals `later`, except for the
      order of its dictionaries.
  D2  Entries that are equal in both images have no row, except the few rows of the cluster itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from pk.server.metadata.image import TOPIC_RESOURCE, MetadataImage
from pk.server.metadata.records import record_of
from pk.server.metadata.snapshot import (
    Row,
    broker_rows,
    cluster_rows,
    partition_record,
    topic_record,
)
from pk.types import TopicId
from pk.wire import pk_pb2 as wire


def difference(earlier: MetadataImage, later: MetadataImage) -> Iterator[Row]:
    """Yield the rows.  Removals come first, so that a topic may exist again under its name."""
    last = later.offset
    for topic_id, topic in earlier.topics.items():
        if topic_id not in later.topics:
            yield last, record_of(wire.RemoveTopicRecord(topic_id=topic_id, name=topic.name))
    for broker_id, broker in earlier.brokers.items():
        if broker_id not in later.brokers:
            gone = wire.UnregisterBrokerRecord(
                broker_id=broker_id, broker_epoch=broker.broker_epoch
            )
            yield last, record_of(gone)
    yield from cluster_rows(later)
    for broker_id, broker in later.brokers.items():
        if broker != earlier.brokers.get(broker_id):
            yield from broker_rows(broker)
    for topic_id in later.topics:
        yield from _topic_rows(earlier, later, topic_id)
    yield from _config_rows(earlier, later)
    yield from _purge_rows(earlier, later)
    yield last, record_of(wire.NoOpRecord())


def _topic_rows(earlier: MetadataImage, later: MetadataImage, topic_id: TopicId) -> Iterator[Row]:
    topic, known = later.topics[topic_id], earlier.topics.get(topic_id)
    if known is None:
        yield later.offset, record_of(topic_record(topic))
    for number, state in topic.partitions.items():
        if known is None or known.partitions.get(number) != state:
            yield later.offset, record_of(partition_record(topic_id, number, state))


def _purge_rows(earlier: MetadataImage, later: MetadataImage) -> Iterator[Row]:
    for topic_id in earlier.purges:
        if topic_id not in later.purges:
            done = wire.TierPurgeRecord(topic_id=topic_id, done=True)
            yield later.offset, record_of(done)
    for topic_id, name in later.purges.items():
        if topic_id not in earlier.purges:
            yield later.offset, record_of(wire.TierPurgeRecord(topic_id=topic_id, name=name))


def _config_rows(earlier: MetadataImage, later: MetadataImage) -> Iterator[Row]:
    gone = {
        (TOPIC_RESOURCE, topic.name): None
        for topic_id, topic in earlier.topics.items()
        if topic_id not in later.topics
    }
    for resource in {**earlier.configs, **later.configs}:
        before = {} if resource in gone else earlier.configs.get(resource, {})
        after = later.configs.get(resource, {})
        for name in {**before, **after}:
            if before.get(name) != after.get(name):
                yield (
                    later.offset,
                    record_of(
                        wire.ConfigRecord(
                            resource_type=resource[0],
                            resource_name=resource[1],
                            name=name,
                            value=after.get(name),
                        )
                    ),
                )
