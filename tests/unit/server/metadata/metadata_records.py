"""Random histories of metadata records that a controller could have written."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from pk.server.metadata.image import MetadataImage
from pk.server.metadata.records import MetadataRecord, record_of
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire

VOTERS = [wire.Voter(node_id=n, directory_id=f"d{n}", address=f"c{n}:1") for n in (1, 2, 3)]
BROKERS = (1, 2, 3, 4)
WORDS = ("a", "b", "c", "d")


class Historian:
    """Draws the next record that fits the records before it."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        """`draw(n)` returns a number below n."""
        self._draw = draw
        self.image = MetadataImage()
        self.records: list[MetadataRecord] = []

    def say(self, body: Any) -> None:
        record = record_of(body)
        self.image.apply(len(self.records), record)
        self.records.append(record)

    def begin(self) -> Historian:
        """Write the first records of an epoch in a new cluster."""
        self.say(wire.LeaderChangeRecord(leader_id=1, epoch=1, voters=[1, 2, 3]))
        self.say(wire.VotersRecord(voters=VOTERS))
        self.say(wire.ClusterRecord(cluster_id="cluster", genesis="genesis"))
        return self

    def some(self, values: Any) -> Any:
        values = list(values)
        return values[self._draw(len(values))]

    def _subset(self, values: Any) -> list[Any]:
        return [each for each in values if self._draw(2)]

    def go_on(self, count: int) -> Historian:
        for _ in range(count):
            self._next()
        return self

    def _next(self) -> None:
        known = {
            "register": self._register, "topic": self._topic, "config": self._config,
            "producer ids": self._producer_ids, "feature": self._feature,
            "leader": self._leader, "voters": self._voters, "no op": self._no_op,
        }  # fmt: skip
        if self.image.brokers:
            known |= {"change": self._broker_change, "unregister": self._unregister}
        if self.image.topics:
            known |= {"remove": self._remove, "partition": self._partition}
        if self.image.purges:
            known["purged"] = self._purged
        if any(True for _ in self.image.partitions()):
            known["partition change"] = self._partition_change
        known[self.some(known)]()

    def _register(self) -> None:
        self.say(
            wire.RegisterBrokerRecord(
                broker_id=self.some(BROKERS), broker_epoch=len(self.records),
                incarnation_id=f"i{len(self.records)}", boot_id=self.some(WORDS),
                directory_ids=self._subset(WORDS), address=self.some(WORDS),
                rack=self.some(WORDS), fenced=bool(self._draw(2)),
                in_controlled_shutdown=bool(self._draw(2)), clean=bool(self._draw(2)),
            )
        )  # fmt: skip

    def _broker_change(self) -> None:
        broker = self.image.brokers[self.some(self.image.brokers)]
        self.say(
            wire.BrokerRegistrationChangeRecord(
                broker_id=broker.broker_id, broker_epoch=broker.broker_epoch,
                fenced=bool(self._draw(2)), in_controlled_shutdown=bool(self._draw(2)),
            )
        )  # fmt: skip

    def _unregister(self) -> None:
        broker = self.image.brokers[self.some(self.image.brokers)]
        self.say(
            wire.UnregisterBrokerRecord(
                broker_id=broker.broker_id, broker_epoch=broker.broker_epoch
            )
        )

    def _topic(self) -> None:
        name = self.some(WORDS)
        if self.image.topic(name) is None:
            topic_id = f"id-{len(self.records)}"
            self.say(wire.TopicRecord(name=name, topic_id=topic_id, request_id=f"r-{topic_id}"))

    def _remove(self) -> None:
        topic = self.image.topics[self.some(self.image.topics)]
        self.say(
            wire.RemoveTopicRecord(
                topic_id=topic.topic_id, name=topic.name, purge_tier=bool(self._draw(2))
            )
        )

    def _purged(self) -> None:
        self.say(wire.TierPurgeRecord(topic_id=self.some(self.image.purges), done=True))

    def _partition(self) -> None:
        topic = self.image.topics[self.some(self.image.topics)]
        self.say(
            wire.PartitionRecord(
                topic_id=topic.topic_id, partition=len(topic.partitions),
                replicas=self._subset(BROKERS), isr=self._subset(BROKERS),
                elr=self._subset(BROKERS), last_known=self._subset(BROKERS),
                adding=self._subset(BROKERS), removing=self._subset(BROKERS),
                directories=self._subset(WORDS), leader=self.some((NONE, *BROKERS)),
                leader_epoch=self._draw(5), partition_epoch=self._draw(9),
                unclean=bool(self._draw(2)), unclean_epoch=self.some((None, 0, 3)),
            )
        )  # fmt: skip

    def _partition_change(self) -> None:
        keys = [PartitionKey(t.topic_id, n) for t, n, _ in self.image.partitions()]
        key = self.some(keys)
        record = wire.PartitionChangeRecord(
            topic_id=key.topic_id, partition=key.partition, unclean=bool(self._draw(2))
        )
        for name in ("isr", "elr", "last_known", "replicas", "adding", "removing"):
            if self._draw(2):
                getattr(record, name).CopyFrom(wire.IntList(values=self._subset(BROKERS)))
        if self._draw(2):
            record.leader = self.some((NONE, *BROKERS))
        self.say(record)

    def _config(self) -> None:
        record = wire.ConfigRecord(
            resource_type=self.some(("topic", "broker")), resource_name=self.some(("", *WORDS)),
            name=self.some(WORDS),
        )  # fmt: skip
        if self._draw(3):
            record.value = self.some(WORDS)
        self.say(record)

    def _producer_ids(self) -> None:
        self.say(wire.ProducerIdsRecord(next_producer_id=self.image.next_producer_id + 1_000))

    def _feature(self) -> None:
        self.say(wire.FeatureLevelRecord(name=self.some(WORDS), level=self._draw(4)))

    def _leader(self) -> None:
        self.say(
            wire.LeaderChangeRecord(
                leader_id=self.some((1, 2, 3)), epoch=self.image.leader_epoch + 1, voters=[1, 2, 3]
            )
        )

    def _voters(self) -> None:
        self.say(wire.VotersRecord(voters=self._subset(VOTERS) or VOTERS[:1]))

    def _no_op(self) -> None:
        self.say(wire.NoOpRecord())


def history(seed: int, count: int) -> Historian:
    rng = random.Random(seed)
    return Historian(rng.randrange).begin().go_on(count)


def order(image: MetadataImage) -> list[Any]:
    """Return the orders of the dictionaries, which equality does not compare."""
    held = {
        broker_id: sorted((topic.topic_id, n) for topic, n, _ in image.partitions_of(broker_id))
        for broker_id in BROKERS
    }
    return [
        image.leaderless, held,
        list(image.brokers), list(image.topics), list(image.topic_ids), list(image.features),
        list(image.purges),
        [(key, list(values)) for key, values in image.configs.items()],
        [list(topic.partitions) for topic in image.topics.values()],
    ]  # fmt: skip
