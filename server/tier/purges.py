"""The tables of deleted topics go from the tier (rule T7).

World-generic.  A topic deleted with `purge_tier` leaves a mark in the metadata (`image.purges`), in
snapshots too.  Every broker with a tier that comes to it, live, by a snapshot or when it starts,
has its tier remove what there is under the topic's id; the mark ends when one of them has seen
that nothing is left.  So a purge survives restarts of everything and a store that is away; one
that was carried out twice finds nothing the second time.  A broker that heard of the deletion goes
on after the mark has ended: what it had on its own way to the store may have come later.  What a
broker that was cut off stores after that stays if it is restarted before it has heard.

Invariants
  D1  nothing goes before `file_delete_delay_ms` after this process has heard of the deletion
  D2  only what lies under the deleted topic's id goes: another life of the name has an id of its
      own
  D3  the mark ends only after the tier saw nothing left
"""

from __future__ import annotations

import asyncio
from functools import partial

from pk import errors
from pk.backoff import Backoff
from pk.server.tier.context import TierContext
from pk.types import TopicId
from pk.wire import pk_pb2 as wire

#: Calls to the tier at once: cold reads share them.
PURGES_AT_ONCE = 4
REPORT_TIMEOUT_MS = 6_000
BACKOFF_MS = (1_000, 60_000)


class Purges:
    """One task for each table that is to go; tried until it is gone and the controller knows."""

    def __init__(self, core: TierContext) -> None:
        self._core = core
        self._tasks: dict[TopicId, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(PURGES_AT_ONCE)

    def begin(self, topic_id: TopicId, topic: str) -> None:
        if topic_id in self._tasks or not self._core.tier.enabled:
            return
        task = asyncio.get_running_loop().create_task(self._purge(topic_id, topic))
        self._tasks[topic_id] = task
        task.add_done_callback(partial(self._ended, topic_id))

    def _ended(self, topic_id: TopicId, task: asyncio.Task[None]) -> None:
        del self._tasks[topic_id]
        if not task.cancelled() and (bug := task.exception()) is not None:
            self._core.bug("purging the tier", bug)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _purge(self, topic_id: TopicId, topic: str) -> None:
        core = self._core
        delay_ms = core.publisher.settings_of(topic)["file_delete_delay_ms"]
        backoff = Backoff((max(BACKOFF_MS[0], 2 * delay_ms), BACKOFF_MS[1]))
        while True:
            await core.clock.sleep_ms(delay_ms)
            try:
                async with self._turns:
                    reply = await core.tier.purge(topic_id, topic)
                core.warn("tier_purged", topic=topic, uri=reply.uri, objects=reply.objects)
                await self._report(topic_id)
                return
            except errors.PkError as error:
                core.warn("tier_not_purged", topic=topic, error=error.message)
                delay_ms = backoff.next_ms()

    async def _report(self, topic_id: TopicId) -> None:
        """D3; nothing to say once the mark has ended."""
        lifecycle = self._core.lifecycle
        if topic_id in self._core.publisher.image.purges:
            request = wire.TierPurgedRequest(
                broker_id=self._core.node_id, broker_epoch=lifecycle.broker_epoch, topic_id=topic_id
            )
            await lifecycle.call(request, REPORT_TIMEOUT_MS)
