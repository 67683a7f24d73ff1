"""The internal topics that this broker needs; the controller creates them.

World-generic.  A broker asks for an internal topic when a request needs it and the metadata image
does not have it (controller/internal_topics.py).
"""

from __future__ import annotations

import asyncio

from pk import errors
from pk.server.metadata.cache import MetadataCache
from pk.server.metadata.image import TopicState
from pk.server.replica.context import ControllerChannel, Environment, MetadataProgress
from pk.wire import pk_pb2 as wire


class InternalTopics:
    """Finds internal topics, and has missing ones created."""

    def __init__(
        self,
        env: Environment,
        metadata: MetadataCache,
        controller: ControllerChannel,
        progress: MetadataProgress,
    ) -> None:
        self._env = env
        self._metadata = metadata
        self._controller = controller
        self._progress = progress
        self._creating = asyncio.Lock()  #: one request at a time, however many calls wait

    async def find(self, name: str, timeout_ms: int) -> TopicState:
        """Return the topic; if it does not exist, have it created first.

        Raises `CoordinatorUnavailable` if the topic does not exist in time.
        """
        topic = self._metadata.image.topic(name)
        if topic is not None:
            return topic
        try:
            async with asyncio.timeout(timeout_ms / 1000), self._creating:
                if self._metadata.image.topic(name) is None:
                    await self._create(name, timeout_ms)
        except TimeoutError:
            raise errors.CoordinatorUnavailable(
                f"{name} was not created within {timeout_ms} ms"
            ) from None
        except errors.RetriableError as failure:
            raise errors.CoordinatorUnavailable(
                f"{name} does not exist and could not be created: {failure.message}"
            ) from failure
        topic = self._metadata.image.topic(name)
        if topic is None:
            raise errors.CoordinatorUnavailable(f"{name} is not known here yet")
        return topic

    async def _create(self, name: str, timeout_ms: int) -> None:
        controller = self._controller
        request = wire.CreateInternalTopicRequest(
            broker_id=self._env.node_id, broker_epoch=controller.broker_epoch, name=name,
            topic_id=self._env.world.new_id(),
        )  # fmt: skip
        frame = await controller.call(request, timeout_ms)
        offset = frame.head.create_internal_topic_reply.metadata_offset
        await self._progress.reached(offset, timeout_ms)
