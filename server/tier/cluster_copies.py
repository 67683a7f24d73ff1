"""The copies in the tier that belong to no topic: metadata and committed offsets (rule T13)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from pk import tracing
from pk.server.tier.controller_link import ControllerLink
from pk.server.tier.metadata_copier import MetadataCopier
from pk.server.tier.offset_copier import OffsetCopier
from pk.tiering.objects import ObjectStore
from pk.wire import pk_pb2 as wire
from pk.world import World

if TYPE_CHECKING:
    from pk.server.node.run_config import RunConfig


class ClusterCopies:
    """The copiers of one tier process.

    ask: asks the broker of the node; raises its refusal
    """

    def __init__(
        self,
        world: World,
        store: ObjectStore,
        run: RunConfig,
        hello: wire.Hello,
        ask: Callable[[Message], Awaitable[Any]],
        log: tracing.Log | None,
        metrics: tracing.Metrics | None,
    ) -> None:
        self._controller = ControllerLink(world, run, hello)
        self._metadata_ms = int(run.server["tier_metadata_interval_ms"])
        self._offsets_ms = int(run.server["tier_offsets_interval_ms"])
        cluster_id, level = run.cluster_id, run.format_level
        self.metadata = MetadataCopier(
            world, self._controller, store, cluster_id, self._metadata_ms, level, log, metrics
        )
        self.offsets = OffsetCopier(world, ask, store, cluster_id, self._offsets_ms, log, metrics)

    def start(self, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Start the copiers that have an interval."""
        if self._metadata_ms:
            spawn(self.metadata.run())
        if self._offsets_ms:
            spawn(self.offsets.run())

    async def close(self) -> None:
        await self._controller.close()
