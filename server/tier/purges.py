"""Purges: removes the tables of deleted topics from the tier (rule T7).

World-generic.  A topic deleted with `purge_tier` leaves a mark in the metadata (`image.purges`), in
snapshots too.  Every broker with a tier that applies the mark, from the log, from a snapshot or at
a start, has its tier remove everything under the topic id.  The mark ends when one broker has seen
that nothing is left.  So a purge survives restarts and an unavailable store.  A repeated purge
finds nothing.  A broker that has learned of the deletion continues after the mark has ended,
because its own uploads may arrive later.  Uploads of a broker that was cut off and is restarted
before it learns of the deletion stay in the store.

Invariants
  D1  A purge waits for `file_delete_delay_ms`, counted from the time at which this process learned
      of the deletion, before it removes the first object.
  D2  Only objects under the id of the deleted topic are removed.  A re-created topic has another
      id.
  D3  The mark ends only after the tier saw that nothing is left.
"""

from __future__ import annotations

import asyncio
from functools import partial

from pk import errors
from pk.backoff import Backoff
from pk.server.metadata.cache import MetadataCache
from pk.server.replica.context import ControllerChannel, Environment
from pk.server.tier.client import TierClient
from pk.tasks import TaskRegistry
from pk.types import TopicId
from pk.wire import pk_pb2 as wire

#: Most concurrent purge calls to the tier; cold reads share its calls.
PURGES_AT_ONCE = 4
REPORT_TIMEOUT_MS = 6_000
BACKOFF_MS = (1_000, 60_000)


class Purges:
    """One task per table; it repeats until the table is gone and the mark has ended."""

    def __init__(
        self,
        env: Environment,
        metadata: MetadataCache,
        tier: TierClient,
        controller: ControllerChannel,
    ) -> None:
        self._env = env
        self._metadata = metadata
        self._tier = tier
        self._controller = controller
        self._tasks = TaskRegistry(partial(env.bug, "purging the tier"))  #: named by topic id
        self._turns = asyncio.Semaphore(PURGES_AT_ONCE)

    def begin(self, topic_id: TopicId, topic: str) -> None:
        if topic_id in self._tasks or not self._tier.enabled:
            return
        self._tasks.spawn(self._purge(topic_id, topic), topic_id)

    async def close(self) -> None:
        await self._tasks.close()

    async def _purge(self, topic_id: TopicId, topic: str) -> None:
        env = self._env
        delay_ms = self._metadata.settings_of(topic)["file_delete_delay_ms"]
        backoff = Backoff((max(BACKOFF_MS[0], 2 * delay_ms), BACKOFF_MS[1]))
        while True:
            await env.clock.sleep_ms(delay_ms)
            try:
                async with self._turns:
                    reply = await self._tier.purge(topic_id, topic)
                env.warn("tier_purged", topic=topic, uri=reply.uri, objects=reply.objects)
                await self._report(topic_id)
                return
            except errors.PkError as error:
                env.warn("tier_not_purged", topic=topic, error=error.message)
                delay_ms = backoff.next_ms()

    async def _report(self, topic_id: TopicId) -> None:
        """Report to the controller that nothing is left (D3), unless the mark has ended."""
        controller = self._controller
        if topic_id in self._metadata.image.purges:
            request = wire.TierPurgedRequest(
                broker_id=self._env.node_id,
                broker_epoch=controller.broker_epoch,
                topic_id=topic_id,
            )
            await controller.call(request, REPORT_TIMEOUT_MS)
