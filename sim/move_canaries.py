"""The code that breaks the rules of reassignments for its canaries (canaries.py)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from pk import errors
from pk.server.controller import reassignments
from pk.server.controller.elections import PartitionChangeBuilder
from pk.server.metadata.image import PartitionState


def copies_not_counted(stack: ExitStack) -> None:
    """Let a cancel or a new target take replicas away whatever stays in sync (rule R8)."""
    stack.enter_context(patch.object(PartitionChangeBuilder, "keeps_copies", lambda *_: True))


def any_replica_elected(stack: ExitStack) -> None:
    """Let an unclean election choose a replica that only copies yet (rule R9)."""
    every = property(lambda self: self.replicas)
    stack.enter_context(patch.object(PartitionState, "candidates", every))


def topic_by_name(stack: ExitStack) -> None:
    """Find the topic of a plan by its name and ignore the id (rule R10)."""

    def by_name(image: Any, item: Any) -> Any:
        found = image.topic(item.topic)
        if found is None:
            raise errors.UnknownTopicOrPartition(item.topic)
        return found

    stack.enter_context(patch.object(reassignments, "_topic_of", by_name))
