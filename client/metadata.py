"""The cluster as a client knows it (brokers, topics, leaders), and when to refresh that.

Invariants
  M1  A partition is identified by topic id (rule L8); a name points to its current id.
  M2  The leader epoch of a partition never goes back (KIP-320): older metadata of a partition is
      ignored.  A reply from a broker that is behind (with an older offset of the metadata log) only
      adds: it removes no broker and no topic.
  M3  Refreshes are at least `backoff_ms` apart and at most `max_age_ms`.  Topics that are new to
      the client are asked for between them, as soon as the round before is over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from pk import errors
from pk.client.endings import no_partition
from pk.types import NONE, PartitionKey, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire


class LeaderAndEpoch(NamedTuple):
    """The leader of a partition and its epoch; node -1 = no leader now."""

    node: int
    epoch: int
    #: For a topic with a tier: the last epoch that began without all data; -1 = none.
    unclean_epoch: int = NONE


class TopicMetadata(NamedTuple):
    """A topic as the last metadata describe it."""

    name: str
    topic_id: str
    partitions: int
    internal: bool
    configs: dict[str, str]


class Metadata:
    """The image of the cluster and its refresh policy."""

    def __init__(self, *, max_age_ms: int, backoff_ms: int) -> None:
        self.max_age_ms = max_age_ms
        self.backoff_ms = backoff_ms
        self.cluster_id = ""
        self.controller_id = NONE
        self.brokers: dict[int, str] = {}
        self.topics: dict[str, TopicMetadata] = {}
        self.names: dict[str, str] = {}  #: topic id → name, of the topics that exist
        self.problems: dict[str, errors.PkError] = {}  #: name → the error a broker returned for it
        self.gone: dict[str, str] = {}  #: topic id → name, of topics that were deleted since
        self._leaders: dict[PartitionKey, LeaderAndEpoch] = {}
        self._updated_ms: int | None = None
        self._asked_ms: int | None = None
        self._wanted = True
        #: the brokers that a leaderless partition waits for
        self._absent: dict[PartitionKey, tuple[int, ...]] = {}
        self.offset = NONE  #: the highest offset of the metadata log in any reply
        self.generation = 0  #: counts updates
        self.complete = False  #: the last update covered all topics

    # -- look-ups ----------------------------------------------------------------------------------

    def leader(self, key: PartitionKey) -> LeaderAndEpoch | None:
        """Return the leader of a partition; None if there is none in service."""
        leader = self._leaders.get(key)
        return leader if leader is not None and leader.node in self.brokers else None

    def waits_for(self, key: PartitionKey) -> tuple[int, ...]:
        """Return the brokers that a leaderless partition waits for; it needs one of them."""
        return self._absent.get(key, ())

    def without_leader(self, what: object, key: PartitionKey) -> str:
        """Return the sentence that partition `key`, called `what`, has no leader."""
        absent = ", ".join(map(str, self.waits_for(key)))
        names = f": it waits for one of the brokers {absent}" if absent else ""
        return f"{what} has no reachable leader{names}"

    def leaderless(self, place: TopicPartition) -> errors.PkError:
        """Return the error for a partition without a leader."""
        return errors.NotLeaderOrFollower(self.without_leader(place, self.key(place)))

    def key(self, place: TopicPartition) -> PartitionKey:
        """Return the partition with its topic id.  Raises `UnknownTopicOrPartition`, or the error
        that a broker returned for the topic.
        """
        topic = self.topic(place.topic)
        if not 0 <= place.partition < topic.partitions:
            raise no_partition(place.topic, place.partition, topic.partitions)
        return PartitionKey(topic.topic_id, place.partition)

    def topic(self, name: str) -> TopicMetadata:
        topic = self.topics.get(name)
        if topic is None:
            raise self.problems.get(name) or errors.UnknownTopicOrPartition(
                f"topic {name} does not exist"
            )
        return topic

    def problem(self, name: str, partition: int = 0) -> errors.PkError | None:
        """Return why a partition cannot be found.  None: it exists, or no broker has answered for
        it yet.
        """
        topic = self.topics.get(name)
        if topic is not None:
            known = 0 <= partition < topic.partitions
            return None if known else no_partition(name, partition, topic.partitions)
        found = self.problems.get(name)
        if found is None and self.complete:
            found = errors.UnknownTopicOrPartition(f"topic {name} does not exist")
        return found

    def available(self, topic: TopicMetadata) -> list[int]:
        """Return the partitions with a leader; all partitions if none has one."""
        found = [p for p in range(topic.partitions) if self.leader(PartitionKey(topic.topic_id, p))]
        return found or list(range(topic.partitions))

    def matching(self, pattern: re.Pattern[str]) -> list[str]:
        """Return the sorted names of user topics that match the whole pattern."""
        return sorted(
            name for name, t in self.topics.items() if not t.internal and pattern.fullmatch(name)
        )

    # -- news --------------------------------------------------------------------------------------

    def update(
        self,
        reply: wire.MetadataReply,
        asked: Iterable[str] | None,
        now_ms: int,
        *,
        whole: bool = True,
    ) -> None:
        """Apply `reply` to a request for the names `asked` (None = all topics).

        whole: it was asked for everything of interest, and not for new topics only
        """
        self.cluster_id = reply.cluster_id
        if whole:
            self._updated_ms = now_ms
            self._wanted = False
        self.generation += 1
        if reply.metadata_offset < self.offset:
            self._hear_old(reply)
            return
        self.offset = reply.metadata_offset
        self.controller_id = reply.controller_id
        self.brokers = {node.node_id: node.address for node in reply.brokers}
        listed = set()
        for info in reply.topics:
            listed.add(info.name)
            self._hear(info)
        missing = set(self.topics) - listed if asked is None else set(asked) - listed
        for name in sorted(missing):
            self._forget(name)
            if asked is not None:
                self.problems[name] = errors.UnknownTopicOrPartition(f"topic {name} does not exist")
        self.complete = asked is None

    def _hear_old(self, reply: wire.MetadataReply) -> None:
        """Apply a reply from a broker that is behind: add only topics and brokers that are unknown
        here (M2).
        """
        for info in reply.topics:
            known = self.topics.get(info.name)
            same = known is None or known.topic_id == info.topic_id
            if same and not info.HasField("error") and info.topic_id not in self.gone:
                self._hear(info)

    def _hear(self, info: wire.TopicInfo) -> None:
        if info.HasField("error"):
            self._forget(info.name)
            self.problems[info.name] = frames.raise_error(info.error)
            return
        self.problems.pop(info.name, None)
        known = self.topics.get(info.name)
        if known is not None and known.topic_id != info.topic_id:
            self._forget(info.name)
        count = max((p.partition + 1 for p in info.partitions), default=0)
        if known is not None and known.topic_id == info.topic_id:
            count = max(
                count, known.partitions
            )  # partitions are never removed: a lower count is older
        self.topics[info.name] = TopicMetadata(
            info.name, info.topic_id, count, info.internal, dict(info.configs)
        )
        self.names[info.topic_id] = info.name
        self.gone.pop(info.topic_id, None)
        for partition in info.partitions:
            key = PartitionKey(info.topic_id, partition.partition)
            before = self._leaders.get(key)
            if before is None or partition.leader_epoch >= before.epoch:  # M2
                self._leaders[key] = _leader(info, partition)
                self._absent.pop(key, None)
                if partition.leader == NONE:
                    eligible = partition.isr or partition.elr or partition.last_known
                    self._absent[key] = tuple(eligible or partition.replicas)

    def _forget(self, name: str) -> None:
        topic = self.topics.pop(name, None)
        if topic is None:
            return
        self.names.pop(topic.topic_id, None)
        self.gone[topic.topic_id] = name
        while len(self.gone) > 10_000:
            del self.gone[next(iter(self.gone))]
        for partition in range(topic.partitions):
            self._leaders.pop(PartitionKey(topic.topic_id, partition), None)
            self._absent.pop(PartitionKey(topic.topic_id, partition), None)

    def loss_of(self, key: PartitionKey) -> errors.PkError | None:
        """Return why a partition no longer exists: its topic was deleted or re-created.  None if it
        exists.
        """
        if key.topic_id in self.names or key.topic_id not in self.gone:
            return None
        name = self.gone[key.topic_id]
        if name in self.topics:
            return errors.TopicRecreated(
                f"topic {name} was deleted and created again: it is {self.topics[name].topic_id} "
                f"now, not {key.topic_id}"
            )
        return errors.UnknownTopicId(f"topic {name} ({key.topic_id}) was deleted")

    # -- when to ask -------------------------------------------------------------------------------

    def want(self) -> None:
        """Request a refresh: the image is known to be out of date."""
        self._wanted = True

    def asked(self, now_ms: int) -> None:
        self._asked_ms = now_ms

    def next_refresh_ms(self, now_ms: int) -> int:
        """Return when to refresh next (M3)."""
        earliest = now_ms if self._asked_ms is None else self._asked_ms + self.backoff_ms
        if self._wanted or self._updated_ms is None:
            return max(now_ms, earliest)
        return max(earliest, self._updated_ms + self.max_age_ms)


def _leader(info: wire.TopicInfo, partition: wire.PartitionInfo) -> LeaderAndEpoch:
    """Return a partition's leader, with its unclean epoch only if the topic has a tier.  Only a
    tiered topic's leader may begin behind records whose producers it does not know (rule T4).
    """
    unclean = info.configs.get("tiered") == "true" and partition.HasField("unclean_epoch")
    return LeaderAndEpoch(
        partition.leader,
        partition.leader_epoch,
        partition.unclean_epoch if unclean else NONE,
    )
