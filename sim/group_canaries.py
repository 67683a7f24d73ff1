"""The canaries of groups: rules X12, P5 and S1 broken, and what notices it."""

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
from pk.server.groups.waiting_heartbeats import WaitingHeartbeats
from pk.server.replica.retention_holds import RetentionHolds
from pk.sim.canary import SAFE, THREE, Canary
from pk.sim.objects import SimObjects
from pk.sim.options import KEPT
from pk.tiering import offset_files
from pk.tiering.offset_files import CopyLines, CopyName
from pk.types import PartitionKey

#: The size of the topic is bounded, so retention by size always has something to remove.
BOUNDED = {**SAFE, **KEPT, "segment_bytes": "14336", "retention_bytes": "20000"}


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


def _news_wakes_nothing(stack: ExitStack) -> None:
    """Let waiting heartbeats learn a change at the end of their wait only."""
    stack.enter_context(patch.object(WaitingHeartbeats, "compare", lambda *_: None))


def _one_name(stack: ExitStack) -> None:
    """Let each copy of offsets take the place of the one before, under one name."""
    name = CopyName(0, 0)
    path, encode = offset_files.copy_path, CopyLines.encode

    def fixed(cluster_id: str, partition: int, _: CopyName) -> str:
        return path(cluster_id, partition, name)

    def lines(self: CopyLines, cluster_id: str, partition: int, _: CopyName, now_ms: int) -> bytes:
        return encode(self, cluster_id, partition, name, now_ms)

    async def put(self: SimObjects, path: str, data: Any) -> bool:
        await self.put(path, data)
        return True

    stack.enter_context(patch.object(offset_files, "copy_path", fixed))
    stack.enter_context(patch.object(CopyLines, "encode", lines))
    stack.enter_context(patch.object(SimObjects, "put_if_absent", put))


def _forgotten_holds(stack: ExitStack) -> None:
    """Let a new leader expire records before it has heard of the holds."""
    stack.enter_context(patch.object(RetentionHolds, "settled", lambda *_: True))


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
    "a change wakes no heartbeat": Canary(
        "P5", _news_wakes_nothing, "V36", SAFE, (), nodes=THREE, copies=3,
        fault_ms=8_000, pace_ms=(400, 800), groups=4,
    ),
    # A write that is on its way to the store arrives after that of the next coordinator.
    "copies of offsets under one name": Canary(
        "T13", _one_name, "V37", SAFE, ("kill_leader", "store_stall"), nodes=THREE, copies=3,
        fault_ms=20_000, fault_every_ms=(300, 1_000), pace_ms=(400, 800), groups=4, copies_ms=200,
    ),
    "a new leader forgets the holds": Canary(
        "S1", _forgotten_holds, "V33", BOUNDED, ("kill_leader", "kill_broker"), nodes=THREE,
        copies=3, fault_ms=25_000, fault_every_ms=(1_000, 3_000), pace_ms=(50, 150), holds=True,
    ),
}  # fmt: skip
