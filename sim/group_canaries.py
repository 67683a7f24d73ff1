"""The canaries of consumer groups: rule X12 broken, and what notices it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from pk import errors
from pk.client.group_membership import GroupMembership
from pk.client.group_types import ConsumerGroupMetadata
from pk.server.groups import state
from pk.server.groups.state import GroupMetadata
from pk.sim.canary import SAFE, THREE, Canary
from pk.types import PartitionKey


def _commits_as_a_tool(stack: ExitStack) -> None:
    """Let a member that was removed commit without its member id, as a tool does."""
    whole = GroupMembership.commits_as

    def anyhow(
        self: GroupMembership, captured: ConsumerGroupMetadata, keys: Iterable[PartitionKey]
    ) -> ConsumerGroupMetadata:
        try:
            return whole(self, captured, keys)
        except errors.UnknownMemberId:
            return self._plain()

    stack.enter_context(patch.object(GroupMembership, "commits_as", anyhow))


def _generation_stays(stack: ExitStack) -> None:
    """Let the join phase end without another generation."""
    whole = state.completing

    def same(known: GroupMetadata, *args: Any) -> GroupMetadata:
        return replace(whole(known, *args), generation=max(1, known.generation))

    stack.enter_context(patch("pk.server.groups.rebalances.completing", same))


GROUP_CANARIES: dict[str, Canary] = {
    # The group is empty while the application of its last member works.
    "a removed member commits as a tool": Canary(
        "X12", _commits_as_a_tool, "V26", SAFE, ("kill_leader",), nodes=THREE, copies=3,
        fault_ms=30_000, fault_every_ms=(4_000, 8_000), pace_ms=(400, 800), groups=2,
    ),
    "a generation for two assignments": Canary(
        "X12", _generation_stays, "V27 liveness", SAFE, ("kill_leader",), nodes=THREE, copies=3,
        fault_ms=8_000, fault_every_ms=(2_000, 4_000), pace_ms=(400, 800), groups=4,
    ),
}  # fmt: skip
