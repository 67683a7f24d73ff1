"""The changes that a decision of the controller makes, as lines for the log of its process.

Pure.  An operator who reads the log of the active controller sees every change of the cluster's
state: topics, partitions, settings, leaders, in-sync sets, reassignments and brokers.  One decision
may change thousands of partitions, so changes of one kind share a line: it counts them and names
the first `NAMED_MAX`.

Invariants
  E1  A line states what the records of one decision change.  `events_of` is called before the
      records are applied, and the lines are written once the records are committed (rule Q3).
  E2  The number of lines of a decision does not grow with the number of partitions.  Only the
      topics and resources that it creates, deletes or alters have a line each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pk.server.metadata.image import MetadataImage, PartitionState
from pk.server.metadata.records import MetadataRecord
from pk.types import NONE, NodeId, TopicId
from pk.wire import pk_pb2 as wire

#: The name under which a decision publishes an `Event`.
EVENT = "controller_event"
#: The most partitions that a log line names.
NAMED_MAX = 10


class Event(NamedTuple):
    """One line: `name`, and its facts in the order in which they are printed."""

    name: str
    facts: dict[str, Any]


def events_of(image: MetadataImage, records: Sequence[MetadataRecord]) -> list[Event]:
    """Return the lines for `records`, which are decided and not yet applied to `image`."""
    lines = _Lines(image)
    for record in records:
        kind = record.WhichOneof("record") or ""
        note = _NOTES.get(kind)
        if note is not None:
            note(lines, getattr(record, kind))
    return lines.events()


class _Lines:
    """Gathers what the records of one decision change."""

    def __init__(self, image: MetadataImage) -> None:
        self._image = image
        self._single: list[Event] = []
        self._created: dict[TopicId, wire.TopicRecord] = {}
        self._added: dict[TopicId, list[wire.PartitionRecord]] = {}
        self._configs: dict[tuple[str, str], list[str]] = {}
        #: Name of the line → partitions, each with what changed.
        self._partitions: dict[str, list[str]] = {}

    def events(self) -> list[Event]:
        found = []
        for topic_id, partitions in self._added.items():
            found.append(self._topic_line(topic_id, partitions))
        for (kind, name), values in self._configs.items():
            facts: dict[str, Any] = {
                "resource": f"{kind}:{name}" if name else kind,
                "values": ",".join(values),
            }
            found.append(Event("config_changed", facts))
        for event, named in self._partitions.items():
            facts = {"partitions": len(named), "named": "; ".join(named[:NAMED_MAX])}
            found.append(Event(event, facts))
        return self._single + found

    def _topic_line(self, topic_id: TopicId, partitions: list[wire.PartitionRecord]) -> Event:
        topic = self._created.get(topic_id)
        if topic is None:
            name = self._image.topics[topic_id].name
            return Event("partitions_added", {"topic": name, "added": len(partitions)})
        facts = {
            "topic": topic.name,
            "topic_id": topic_id,
            "partitions": len(partitions),
            "replication_factor": len(partitions[0].replicas),
        }
        return Event("topic_created", facts)

    # -- by kind of record -------------------------------------------------------------------------

    def topic(self, record: wire.TopicRecord) -> None:
        self._created[record.topic_id] = record

    def partition(self, record: wire.PartitionRecord) -> None:
        self._added.setdefault(record.topic_id, []).append(record)

    def remove_topic(self, record: wire.RemoveTopicRecord) -> None:
        topic = self._image.topics.get(record.topic_id)
        name = record.name if topic is None else topic.name
        facts = {"topic": name, "topic_id": record.topic_id, "purge_tier": record.purge_tier}
        self._single.append(Event("topic_deleted", facts))

    def config(self, record: wire.ConfigRecord) -> None:
        said = f"{record.name}={record.value}" if record.HasField("value") else f"-{record.name}"
        resource = record.resource_type, record.resource_name
        self._configs.setdefault(resource, []).append(said)

    def broker_change(self, record: wire.BrokerRegistrationChangeRecord) -> None:
        before = self._image.brokers.get(record.broker_id)
        if before is None:
            return
        if before.fenced and not record.fenced:
            self._single.append(Event("broker_unfenced", {"broker": record.broker_id}))
        if record.in_controlled_shutdown and not before.in_controlled_shutdown:
            self._single.append(Event("broker_shutting_down", {"broker": record.broker_id}))

    def unregister_broker(self, record: wire.UnregisterBrokerRecord) -> None:
        self._single.append(Event("broker_unregistered", {"broker": record.broker_id}))

    def partition_change(self, record: wire.PartitionChangeRecord) -> None:
        topic = self._image.topics.get(record.topic_id)
        before = None if topic is None else topic.partitions.get(record.partition)
        if topic is None or before is None:
            return  # created by the same decision
        for event, what in _changes(before, record):
            named = self._partitions.setdefault(event, [])
            # A failover changes very many partitions: only those that the line names are put into
            # words.
            named.append(
                f"{topic.name}-{record.partition} {what()}" if len(named) < NAMED_MAX else ""
            )


def _changes(
    before: PartitionState, record: wire.PartitionChangeRecord
) -> list[tuple[str, Callable[[], str]]]:
    """Return the log events that a change record causes, each with a function for its words."""
    found: list[tuple[str, Callable[[], str]]] = []
    if record.HasField("leader") and record.leader != before.leader:
        event = "leader_lost" if record.leader == NONE else "leader_elected"
        epoch = before.leader_epoch + 1
        found.append((event, lambda: f"{_node(before.leader)} -> {_node(record.leader)}@{epoch}"))
    if record.HasField("isr"):
        isr = tuple(record.isr.values)
        event = "isr_shrunk" if len(isr) < len(before.isr) else "isr_expanded"
        if set(isr) != set(before.isr):
            found.append((event, lambda: f"{_nodes(before.isr)} -> {_nodes(isr)}"))
    if record.HasField("adding") or record.HasField("removing"):
        replicas = tuple(record.replicas.values) if record.HasField("replicas") else before.replicas
        began = bool(record.adding.values or record.removing.values)
        event = "reassignment_began" if began else "reassignment_ended"
        found.append((event, lambda: f"{_nodes(before.replicas)} -> {_nodes(replicas)}"))
    return found


def _node(node: NodeId) -> str:
    return "none" if node == NONE else str(node)


def _nodes(nodes: Sequence[NodeId]) -> str:
    return ",".join(map(str, nodes)) or "none"


_NOTES: dict[str, Callable[[_Lines, Any], None]] = {
    "topic": _Lines.topic,
    "partition": _Lines.partition,
    "remove_topic": _Lines.remove_topic,
    "config": _Lines.config,
    "broker_change": _Lines.broker_change,
    "unregister_broker": _Lines.unregister_broker,
    "partition_change": _Lines.partition_change,
}
