"""Cluster metadata for clients: replies and pushes.

World-generic.  A reply is made from the broker's image of committed records.  A stream that sets
`watch` gets pushes: when the content of its reply changes, the broker makes the reply again and
sends it with correlation id 0.  Changes that follow each other quickly cause one push.  A push that
equals the last push is not sent.  A request that `adds` topics extends what the stream watches.

Invariants
  M1  Pushes of a stream are in the order of the metadata log, and the last push is never older than
      the image.
  M2  A topic is described once for each state of the image, however many clients get it.
      The description follows from the image and from settings that do not change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from pk import errors
from pk.server.metadata.cache import MetadataCache
from pk.server.metadata.image import MetadataImage, PartitionState, TopicState
from pk.server.replica.context import ControllerChannel, Environment, MetadataProgress
from pk.tasks import TaskRegistry
from pk.types import NONE, NodeId, Offset, TopicId
from pk.wire import frames
from pk.wire import pk_pb2 as wire
from pk.wire.calls import head_of
from pk.world import Disconnected, Stream

CREATE_TIMEOUT_MS = 5_000
#: Number of topics that a stream may watch by name.
WATCHED_MAX = 100_000
#: Settings of a topic that clients use.
_FOR_CLIENTS = (
    "max_message_bytes",
    "decoded_bytes_max",
    "cleanup_policy",
    "tier_enable",
    "message_timestamp_type",
    "min_insync_replicas",
)


class MetadataRequests:
    """Answers metadata requests from the image, and creates missing topics if that is allowed."""

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
        self._seen: tuple[MetadataImage, Offset] | None = None  #: of the descriptions below (M2)
        self._described: dict[TopicId, bytes] = {}  #: encoded: messages take several times as much

    def reply(self, request: wire.MetadataRequest) -> wire.MetadataReply:
        """Return the metadata of the requested topics; an unknown topic has an error instead."""
        image = self._metadata.image
        reply = wire.MetadataReply(
            cluster_id=image.cluster_id,
            controller_id=image.leader_id,
            metadata_offset=self._metadata.image.offset,  # the offset of the content
        )
        for broker_id in sorted(image.brokers):
            broker = image.brokers[broker_id]
            if not broker.fenced:
                reply.brokers.add(node_id=broker_id, address=broker.address, rack=broker.rack)
        if not request.topics and not request.topic_ids:
            for topic in image.topics.values():
                self._describe(topic, reply)
            return reply
        for name in request.topics:
            known = image.topic(name)
            if known is None:
                error = errors.UnknownTopicOrPartition(f"topic {name!r} does not exist")
                reply.topics.add(name=name, error=frames.error_of(error))
            else:
                self._describe(known, reply)
        for topic_id in request.topic_ids:
            known = image.topics.get(topic_id)
            if known is None:
                gone = errors.UnknownTopicId(f"no topic has the id {topic_id}")
                reply.topics.add(topic_id=topic_id, error=frames.error_of(gone))
            else:
                self._describe(known, reply)
        return reply

    async def create_missing(self, request: wire.MetadataRequest) -> None:
        """Create requested topics that do not exist, if `auto_create_topics_enable` is set.

        If the creation fails, the reply says that the topic does not exist.
        """
        missing = [name for name in request.topics if self._metadata.image.topic(name) is None]
        if not missing:
            return
        create = wire.CreateTopicsRequest(topics=[wire.NewTopic(name=name) for name in missing])
        try:
            reply = (
                await self._controller.call(create, CREATE_TIMEOUT_MS)
            ).head.create_topics_reply
            await self._progress.reached(reply.metadata_offset, CREATE_TIMEOUT_MS)
        except errors.PkError as error:
            self._env.warn("auto_create_failed", topics=",".join(missing), error=error.message)

    def _describe(self, topic: TopicState, reply: wire.MetadataReply) -> None:
        image = self._metadata.image
        if self._seen is None or self._seen[0] is not image or self._seen[1] != image.offset:
            self._seen = image, image.offset
            self._described.clear()
        described = self._described.get(topic.topic_id)
        if described is None:
            described = self._info_of(topic).SerializeToString()
            self._described[topic.topic_id] = described
        reply.topics.add().MergeFromString(described)

    def _info_of(self, topic: TopicState) -> wire.TopicInfo:
        info = wire.TopicInfo(name=topic.name, topic_id=topic.topic_id, internal=topic.internal)
        wanted = self._metadata.settings_of(topic.name)
        for name in _FOR_CLIENTS:
            value = wanted[name]
            info.configs[name] = str(value).lower() if isinstance(value, bool) else str(value)
        info.configs["tiered"] = str(self._metadata.is_tiered(topic.name, wanted)).lower()
        available = self._metadata.image.available
        for number, state in sorted(topic.partitions.items()):
            info.partitions.add(
                partition=number,
                leader=_whom_to_ask(state, available),
                leader_epoch=state.leader_epoch,
                partition_epoch=state.partition_epoch,
                replicas=state.replicas,
                isr=state.isr,
                elr=state.elr,
                last_known=state.last_known,
                offline_replicas=[each for each in state.replicas if not available(each)],
                unclean_epoch=None if state.unclean_epoch == NONE else state.unclean_epoch,
            )
        return info


def _whom_to_ask(state: PartitionState, available: Callable[[NodeId], bool]) -> NodeId:
    """Return the broker that a client should ask: the leader, or the last holder of the data.

    If there is no leader and no candidate, the last holder may have found damage or a failed disk
    (rules L2, L9).  The client then gets this error from the last holder; without a broker to ask,
    it would only wait.  If the last holder has no such error, it answers NOT_LEADER_OR_FOLLOWER.
    """
    if state.leader != NONE or state.isr or state.elr:
        return state.leader
    return next((member for member in state.last_known if available(member)), NONE)


class MetadataSubscription:
    """Pushes changes of the last metadata request to one control stream."""

    def __init__(
        self, requests: MetadataRequests, progress: MetadataProgress, stream: Stream
    ) -> None:
        self._requests = requests
        self._progress = progress
        self._stream = stream
        self._began = False
        self._names: dict[str, None] = {}  #: topics watched by name
        self._ids: list[TopicId] = []  #: topics watched by id; neither = all topics
        self._last: wire.MetadataReply | None = None
        self._changed = asyncio.Event()
        self._tasks = TaskRegistry()

    def begin(self, request: wire.MetadataRequest, reply: wire.MetadataReply) -> None:
        """Watch the topics of `request`, beginning after `reply`; it replaces an older request, or
        extends it if it `adds` topics.

        Raises `InvalidRequest` if a request adds topics to none, or to too many.
        """
        if request.adds:
            self._extend(request.topics)
            self._last = None
        else:
            self._names = dict.fromkeys(request.topics)
            self._ids = list(request.topic_ids)
            self._last = reply
        if not self._began:
            self._began = True
            self._progress.listeners[self._notice] = None
            self._tasks.spawn(self._push())

    def _extend(self, topics: Iterable[str]) -> None:
        """Watch more topics by name.  A client that touches one topic after another sends a request
        for each of them: the cost of one does not depend on how many there are.
        """
        if not self._began:
            raise errors.InvalidRequest("this stream watches no topics yet: name all of them")
        if not self._names and not self._ids:
            return  # all topics
        new = {name: None for name in topics if name not in self._names}
        if len(self._names) + len(new) > WATCHED_MAX:
            raise errors.InvalidRequest(
                f"a stream watches at most {WATCHED_MAX} topics by name: ask for all topics"
            )
        self._names.update(new)

    async def close(self) -> None:
        self._progress.listeners.pop(self._notice, None)
        await self._tasks.close()

    def _notice(self, names: Iterable[str] | None) -> None:
        everything = not self._names and not self._ids
        if names is None or everything or self._ids or not self._names.keys().isdisjoint(names):
            self._changed.set()

    async def _push(self) -> None:
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                watched = wire.MetadataRequest(topics=self._names, topic_ids=self._ids)
                reply = self._requests.reply(watched)
                if self._last is not None and _same(reply, self._last):
                    continue
                self._last = reply
                await self._stream.send(frames.encode(head_of(reply)))
        except Disconnected:
            return


def _same(one: wire.MetadataReply, other: wire.MetadataReply) -> bool:
    """Whether two replies are equal except for their metadata offset."""
    left, right = wire.MetadataReply(), wire.MetadataReply()
    left.CopyFrom(one)
    right.CopyFrom(other)
    left.metadata_offset = right.metadata_offset = NONE
    return left == right
