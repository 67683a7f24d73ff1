"""Many partitions in one decision, and decisions too large for one batch of the metadata log.

A decision about a broker touches every partition it has: a hundred thousand changes would be one
batch that keeps the controller, the quorum and every broker from anything else meanwhile.  So a
decision writes at most `CHANGES_MAX` changes.  If there are more to make it
answers `More` and is asked again; only the step that finds nothing left over adds the record that
the decision is about (the broker is fenced, registered anew, in shutdown).

Why that is safe at any point, a failover of the controller included: each step is whole by
itself (one batch, controller/machine M2) and leaves every partition in a state that the same event
could have left it in alone: one broker fewer in its ISR.  Until the last step the broker is what it
was before, so whoever takes over sees the same cause (the session that ends, the broker that asks
to register or to stop) and goes on where the other ended.  A registration that lost data is not
written before the last partition was told (rule L3), so its broker can lead none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from pk import limits
from pk.effects import Effect, Publish
from pk.server.controller.commands import Rules
from pk.server.controller.elections import Cluster, PartitionChangeBuilder
from pk.server.metadata.image import MetadataImage, PartitionState, TopicState
from pk.types import NONE, NodeId, PartitionKey

Step = Callable[[PartitionChangeBuilder], Any]
#: What happens to one partition; None: nothing.
StepOf = Callable[[PartitionKey, PartitionState], Step | None]

#: Partition changes of one step: some 50 ms of the controller's time (bench/controller_scale.py).
CHANGES_MAX = 2_000
assert CHANGES_MAX < limits.METADATA_RECORDS_PER_APPEND_MAX
#: Published for the log of the process: an election that may have cost records (rule R3).
UNCLEAN_ELECTION = "unclean_election"


@dataclass(slots=True, frozen=True)
class More:
    """A step was made; the same command, asked again, makes the next one."""


class BatchedDecision:
    """The partition changes of one decision: visit each partition once."""

    def __init__(
        self,
        image: MetadataImage,
        rules: Rules,
        cluster: Cluster,
        changes_max: int = CHANGES_MAX,
    ) -> None:
        self.bodies: list[Message] = []
        self.effects: list[Effect] = []
        self.cluster = cluster
        self._image = image
        self._rules = rules
        self._room = changes_max
        self._min_isr: dict[str, int] = {}

    @property
    def full(self) -> bool:
        return len(self.bodies) >= self._room

    def builder(
        self, topic: TopicState, number: int, state: PartitionState
    ) -> PartitionChangeBuilder:
        min_isr = self._min_isr.get(topic.name)
        if min_isr is None:
            min_isr = self._min_isr[topic.name] = self._rules.min_isr(self._image, topic.name)
        return PartitionChangeBuilder(PartitionKey(topic.topic_id, number), state, min_isr)

    def visit(
        self,
        topic: TopicState,
        number: int,
        state: PartitionState,
        step: Step | None = None,
        *,
        may_lose: bool = False,
    ) -> PartitionChangeBuilder:
        """Take `step`, elect if nobody leads, end a reassignment that has all it waits for, keep
        the change.
        """
        builder = self.builder(topic, number, state)
        if step is not None:
            step(builder)
        if builder.now.leader == NONE:
            builder.elect(self.cluster, may_lose=may_lose)
        builder.complete(self.cluster)
        self.keep(builder, topic)
        return builder

    def visit_key(
        self, key: PartitionKey, step: Step | None = None, *, may_lose: bool = False
    ) -> PartitionChangeBuilder | None:
        """The same by key; None if there is no such partition any more."""
        topic, state = self._image.topics.get(key.topic_id), self._image.partition(key)
        if topic is None or state is None:
            return None
        return self.visit(topic, key.partition, state, step, may_lose=may_lose)

    def keep(self, builder: PartitionChangeBuilder, topic: TopicState) -> None:
        change = builder.record()
        if change is None:
            return
        self.bodies.append(change)
        if builder.at_risk:
            positions = {str(member): at for member, at in builder.at_risk.items()}
            facts = {
                "topic": topic.name,
                "partition": builder.key.partition,
                "leader": builder.now.leader,
                "leader_epoch": builder.before.leader_epoch + 1,
                "positions": positions,
            }
            self.effects.append(Publish(UNCLEAN_ELECTION, facts))

    def all_of(self, who: NodeId, step_of: StepOf) -> bool:
        """Visit the partitions of `who` that `step_of` gives a step; whether that was all."""
        for topic, number, state in self._image.partitions_of(who):
            step = step_of(PartitionKey(topic.topic_id, number), state)
            if step is None:
                continue
            if self.full:
                return False
            self.visit(topic, number, state, step)
        return True
