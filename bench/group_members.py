"""A member of a consumer group, with the same calls on both sides.

The settings that decide about a rebalance are equal: session 10 s, heartbeats every 3 s, no commits
by themselves, the cooperative sticky assignor (Kafka with `group.protocol=consumer`: the uniform
one, on the broker; its session and heartbeats are in kafka/server.properties).  Kafka's classic
client looks for new partitions once a second instead of every five minutes; brokers push them to
pk's client.
Without committed offsets each new owner reads a partition from its first record.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

SESSION_MS = 10_000
HEARTBEAT_MS = 3_000
CALL_S = 60.0
_METADATA_MS = 1_000
#: Records of one poll, at most.
_ROWS = 1_000

Changed = Callable[[str, list[int]], None]


class Member(Protocol):
    """One consumer of a group, subscribed to one topic."""

    def subscribe(self, changed: Changed) -> None:
        """Join.  Polls call `changed` with `assigned` or `revoked`, and partitions."""
        ...

    def owned(self) -> list[int]: ...

    def poll(self, timeout_s: float) -> set[int]:
        """Return the partitions of which there were records."""
        ...

    def commit(self, partition: int, offset: int, asynchronous: bool = False) -> None: ...

    def committed(self, partition: int) -> int | None: ...

    def close(self) -> None:
        """Leave the group."""
        ...


class PkMember:
    """pk's consumer."""

    def __init__(self, bootstrap: str, topic: str, group: str, protocol: str) -> None:
        from pk import Consumer, TopicPartition

        self._topic, self._place = topic, TopicPartition
        self._consumer = Consumer(
            bootstrap,
            group_id=group,
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            partition_assignment_strategy="cooperative-sticky",
            max_poll_records=_ROWS,
        )

    def subscribe(self, changed: Changed) -> None:
        def told(what: str) -> Callable[[list[Any]], None]:
            return lambda places: changed(what, [place.partition for place in places])

        self._consumer.subscribe(
            self._topic, on_assigned=told("assigned"), on_revoked=told("revoked")
        )

    def owned(self) -> list[int]:
        return [place.partition for place in self._consumer.assignment()]

    def poll(self, timeout_s: float) -> set[int]:
        return {place.partition for place, _ in self._consumer.poll_batches(timeout_s)}

    def commit(self, partition: int, offset: int, asynchronous: bool = False) -> None:
        place = self._place(self._topic, partition)
        self._consumer.commit({place: offset}, asynchronous=asynchronous, timeout_s=CALL_S)

    def committed(self, partition: int) -> int | None:
        return self._consumer.committed(self._place(self._topic, partition), CALL_S)

    def close(self) -> None:
        self._consumer.close()


class KafkaMember:
    """confluent-kafka's consumer.  protocol: classic or consumer (KIP-848)."""

    def __init__(self, bootstrap: str, topic: str, group: str, protocol: str) -> None:
        from confluent_kafka import Consumer, TopicPartition

        self._topic, self._place = topic, TopicPartition
        settings: dict[str, Any] = {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.protocol": protocol,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "topic.metadata.refresh.interval.ms": _METADATA_MS,
            "log_level": 0,
        }
        if protocol == "classic":
            settings |= {
                "session.timeout.ms": SESSION_MS,
                "heartbeat.interval.ms": HEARTBEAT_MS,
                "partition.assignment.strategy": "cooperative-sticky",
            }
        else:
            settings["group.remote.assignor"] = "uniform"
        self._consumer: Any = Consumer(settings)

    def subscribe(self, changed: Changed) -> None:
        def told(what: str) -> Callable[[Any, list[Any]], None]:
            return lambda _, places: changed(what, [place.partition for place in places])

        self._consumer.subscribe(
            [self._topic], on_assign=told("assigned"), on_revoke=told("revoked")
        )

    def owned(self) -> list[int]:
        return [place.partition for place in self._consumer.assignment()]

    def poll(self, timeout_s: float) -> set[int]:
        # `consume` would wait for a whole batch
        first = self._consumer.poll(timeout_s)
        if first is None:
            return set()
        found = set()
        for message in (first, *self._consumer.consume(_ROWS, 0)):
            if message.error() is None:
                found.add(int(message.partition() or 0))
            else:
                print(message.error(), file=sys.stderr)
        return found

    def commit(self, partition: int, offset: int, asynchronous: bool = False) -> None:
        places = [self._place(self._topic, partition, offset)]
        done = self._consumer.commit(offsets=places, asynchronous=asynchronous)
        for each in done or ():
            if each.error is not None:
                raise RuntimeError(f"{each}: {each.error}")

    def committed(self, partition: int) -> int | None:
        (found,) = self._consumer.committed([self._place(self._topic, partition)], CALL_S)
        return int(found.offset) if found.offset >= 0 else None

    def close(self) -> None:
        self._consumer.close()


def open_member(kind: str, bootstrap: str, topic: str, group: str, protocol: str) -> Member:
    """Return a consumer that has not joined yet.  kind: pk or kafka."""
    made = PkMember if kind == "pk" else KafkaMember
    return made(bootstrap, topic, group, protocol)


class Writer:
    """Sends small records to chosen partitions, without waiting.

    partitions: of the topic; returns when the client knows them all
    """

    def __init__(self, kind: str, bootstrap: str, topic: str, partitions: int) -> None:
        self._kind, self._topic = kind, topic
        self._producer: Any
        if kind == "pk":
            from pk import Producer

            self._producer = Producer(bootstrap, acks="all", linger_ms=0)
        else:
            from confluent_kafka import Producer as KafkaProducer

            settings = {"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0}
            self._producer = KafkaProducer({**settings, "log_level": 0})
        deadline = time.monotonic() + CALL_S
        while self._known() < partitions:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{topic} has {self._known()} partitions, not {partitions}")
            time.sleep(0.01)

    def _known(self) -> int:
        """Return how many partitions the client knows."""
        if self._kind == "pk":
            return int(self._producer.partitions_for(self._topic, CALL_S))
        return len(self._producer.list_topics(self._topic, CALL_S).topics[self._topic].partitions)

    def send(self, partition: int) -> None:
        if self._kind == "pk":
            self._producer.send(self._topic, b"pulse", partition=partition)
        else:
            self._producer.produce(self._topic, b"pulse", partition=partition)
            self._producer.poll(0)

    def flush(self) -> None:
        """Wait until all is acknowledged.  Raises `TimeoutError`."""
        if self._kind == "pk":
            self._producer.flush(timeout_s=CALL_S)
        elif self._producer.flush(CALL_S):
            raise TimeoutError(f"not all records were acknowledged within {CALL_S:g} s")

    def close(self) -> None:
        """Wait until all is acknowledged, and end."""
        self.flush()
        if self._kind == "pk":
            self._producer.close()
