"""How many steps the sender takes while many partitions cannot be sent (client/sender N6).

Each step looks at every partition with work, so their number must not grow with the partitions.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from pk import errors, settings
from pk.client.metadata import Metadata
from pk.client.producer_batch import InFlightRequest
from pk.client.sender import Sender
from pk.client.sender_events import ConnectionLost, ProducerIdGranted, SenderEvent, Wakeup
from pk.effects import Send, SetTimer
from pk.types import PartitionKey
from pk.wire import pk_pb2 as wire

OPTIONS = settings.PRODUCER.resolve({"linger_ms": 0})
WAIT_MS = 2_000


class Shell:
    """Steps a sender at its timers; the brokers in `down` refuse connections at once."""

    def __init__(self, partitions: int) -> None:
        self.reply = wire.MetadataReply(metadata_offset=1)
        for node in (1, 2):
            self.reply.brokers.add(node_id=node, address=f"broker{node}")
        topic = self.reply.topics.add(name="t", topic_id="T")
        for number in range(partitions):
            topic.partitions.add(partition=number, leader=1, leader_epoch=1)
        self.metadata = Metadata(max_age_ms=300_000, backoff_ms=100)
        self.metadata.update(self.reply, None, 0)
        self.sender = Sender(OPTIONS, self.metadata, random.Random(7))
        self.now_ms, self.steps, self.timer = 1_000, 0, None
        self.down = {1}
        self.sent: list[InFlightRequest] = []
        self.stored: set[int] = set()
        self.step(ProducerIdGranted(5, 0))
        for number in range(partitions):
            records = SimpleNamespace(topic="t", opened_ms=self.now_ms, ready_ms=self.now_ms)
            one: Any = SimpleNamespace(
                records=records, count=1, size=100, rows=None, partition=number
            )
            self.sender.append(PartitionKey("T", number), one, 1 << 20)
        self.step(Wakeup())

    def step(self, event: SenderEvent) -> None:
        self.steps += 1
        for effect in self.sender.step(event, self.now_ms):
            if isinstance(effect, SetTimer):
                self.timer = effect.at_ms
            elif isinstance(effect, Send):
                self.sent.append(effect.message)

    def run(self, duration_ms: int) -> None:
        until_ms = self.now_ms + duration_ms
        while self.now_ms < until_ms:
            self.now_ms += 1
            refused = [each for each in self.sent if each.node in self.down]
            for request in self.sent:
                if request.node not in self.down:
                    self.stored.update(each.partition.key.partition for each in request.batches)
            self.sent.clear()
            if refused:
                unsent = frozenset(each.correlation_id for each in refused)
                error = errors.BrokerUnavailable("refused")
                self.step(ConnectionLost(refused[0].node, error, unsent))
            if self.timer is not None and self.timer <= self.now_ms:
                self.timer = None
                self.step(Wakeup())

    def elect(self, leader: int) -> None:
        """Push the metadata of a new leader of all partitions."""
        self.reply.metadata_offset += 1
        for each in self.reply.topics[0].partitions:
            each.leader, each.leader_epoch = leader, each.leader_epoch + 1
        self.metadata.update(self.reply, None, self.now_ms)
        self.step(Wakeup())


@pytest.mark.parametrize("partitions", [10, 500])
@pytest.mark.parametrize("known", [True, False])
def test_the_steps_of_a_wait_do_not_grow_with_the_partitions(partitions: int, known: bool) -> None:
    """The leader refuses connections, and stays in the metadata or is fenced."""
    shell = Shell(partitions)
    shell.run(100)
    if not known:
        del shell.reply.brokers[0]
        shell.reply.metadata_offset += 1
        shell.metadata.update(shell.reply, None, shell.now_ms)
    before = shell.steps
    shell.run(WAIT_MS)
    assert 2 <= shell.steps - before <= 40
    shell.elect(2)
    before_ms = shell.now_ms
    shell.run(1)
    assert shell.stored == set(range(partitions)), "the back-off does not hold up a new leader"
    assert shell.now_ms == before_ms + 1
