"""Decisions that change many partitions, in steps that each fit one batch of the metadata log.

A decision about a broker changes every partition of that broker.  A hundred thousand changes in one
batch would block the controller, the quorum and every broker.  So a decision writes at most
`CHANGES_MAX` changes.  If more changes are due, the decision answers `More` and the controller asks
again.  Only the last step adds the broker's own record: the broker is fenced, registered again, or
in controlled shutdown.

A failover of the controller between two steps is safe.  Each step is one batch (controller/machine
M2).  It leaves every partition in a state that the event could have produced alone: one broker
fewer in the ISR.  Until the last step the state of the broker is unchanged.  The cause of the
decision, a session that ends or a request of the broker, therefore reaches the next active
controller, too, and the next active controller continues.
The registration of a broker that lost data is written after the last of its partitions was changed
(rule L3), so this broker can lead none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from pk import limits
from pk.effects import Effect, Publish
from pk.server.controller.commands import Rules
from pk.server.controller.elections import LeaderEligibility, PartitionChangeBuilder
from pk.server.metadata.image import MetadataImage, PartitionState, TopicState
from pk.types import NONE, NodeId, PartitionKey

Step = Callable[[PartitionChangeBuilder], Any]
#: A change of one partition; None: this partition stays as it is.
StepOf = Callable[[PartitionKey, PartitionState], Step | None]

#: Most partition changes of one step: about 50 ms of controller time (bench/controller_scale.py).
CHANGES_MAX = 2_000
assert CHANGES_MAX < limits.METADATA_RECORDS_PER_APPEND_MAX
#: Name of the published event of an unclean election, which may have lost records (rule R3).
UNCLEAN_ELECTION = "unclean_election"


@dataclass(slots=True, frozen=True)
class More:
    """Reply of a step that is not the last.  The same command makes the next step."""


class BatchedDecision:
    """Collects the partition changes of one decision.  Visit each partition once."""

    def __init__(
        self,
        image: MetadataImage,
        rules: Rules,
        cluster: LeaderEligibility,
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
        """Apply `step` to a partition and keep the change.

        The visit also elects a leader if the partition has none, and completes a reassignment whose
        new replicas are all in sync.
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
        """Like `visit`, for the partition with this key.  None if the partition does not exist."""
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
        """Visit the partitions of broker `who` for which `step_of` returns a step.

        Returns whether all of them were visited."""
        for topic, number, state in self._image.partitions_of(who):
            step = step_of(PartitionKey(topic.topic_id, number), state)
            if step is None:
                continue
            if self.full:
                return False
            self.visit(topic, number, state, step)
        return True
