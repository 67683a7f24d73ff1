"""The calls of `AdminClient` that concern consumer groups.

A coordinator knows the groups of the `__consumer_offsets` partitions that it leads, so a list
combines the replies of all brokers.  Every other call goes to the coordinator of its group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from pk import errors, limits
from pk.client import arguments
from pk.client.admin.connection import AdminConnection
from pk.client.admin.described import everyone
from pk.client.coordinator_calls import GROUP, CoordinatorCalls
from pk.client.network_client import NetworkClient
from pk.client.offsets import OFFSET_MAX
from pk.types import NONE, TopicPartition
from pk.wire import frames
from pk.wire import pk_pb2 as wire

#: The longest attempt of a call.
ATTEMPT_MS = 30_000


@dataclass(slots=True, frozen=True)
class GroupListing:
    """A group: its state, its number of members, its coordinator."""

    group_id: str
    state: str
    members: int
    coordinator_id: int
    kind: str = "consumer"  #: or "query": it shows the progress of a streaming query


@dataclass(slots=True, frozen=True)
class GroupListings:
    """The groups that match, and what is missing from the list.

    loading: partitions of `__consumer_offsets` whose coordinator still reads them.
    silent: brokers that did not answer.
    """

    groups: tuple[GroupListing, ...]
    loading: tuple[int, ...]
    silent: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether every coordinator answered."""
        return not self.loading and not self.silent


@dataclass(slots=True, frozen=True)
class MemberDescription:
    """A member of a group.

    heard_ago_ms: since its last request; None = its coordinator was elected later and has received
    none.  partitions: its assignment.
    """

    member_id: str
    group_instance_id: str
    client_id: str
    topics: tuple[str, ...]
    partitions: tuple[TopicPartition, ...]
    heard_ago_ms: int | None


@dataclass(slots=True, frozen=True)
class FallenHold:
    """A partition in which the retention hold of a query has fallen, and why."""

    partition: TopicPartition
    why: str


@dataclass(slots=True, frozen=True)
class GroupDescription:
    """The state of a group.

    assignor: "" without members
    kind: "consumer", or "query": it shows the progress of a streaming query
    committed_ms: Unix time of its newest commit; 0 = it has no offsets
    holds_retention: the query keeps what it has not processed, but in the partitions of `fallen`
    """

    group_id: str
    coordinator_id: int
    state: str
    generation: int
    assignor: str
    members: tuple[MemberDescription, ...]
    kind: str = "consumer"
    committed_ms: int = 0
    holds_retention: bool = False
    fallen: tuple[FallenHold, ...] = ()


class GroupCalls:
    """The calls that concern groups; `AdminClient` documents their arguments."""

    def __init__(self, connection: AdminConnection) -> None:
        self._connection = connection

    def list_groups(self, states: Iterable[str], timeout_s: float) -> GroupListings:
        """List the groups of all coordinators."""
        request = wire.ListGroupsRequest(
            states=[arguments.text(each, "states") for each in arguments.items(states, "states")]
        )
        cluster = self._connection.cluster
        return self._connection.retrying(lambda ms: _listed(cluster, request, ms), timeout_s)

    def describe_group(self, group_id: str, timeout_s: float) -> GroupDescription:
        """Describe a group."""
        name = arguments.text(group_id, "group_id")
        deadline_s = self._connection.deadline_s(timeout_s)
        reply = self._ask(name, wire.DescribeGroupsRequest(group_ids=[name]), timeout_s)
        (found,) = reply.groups
        topics = self._names(self._connection.left_s(deadline_s))
        return GroupDescription(
            name,
            found.coordinator_id,
            found.state,
            found.generation,
            found.assignor,
            tuple(
                MemberDescription(
                    each.member_id,
                    each.group_instance_id,
                    each.client_id,
                    tuple(each.topics),
                    tuple(
                        TopicPartition(topics.get(topic.topic_id, topic.topic_id), number)
                        for topic in each.partitions
                        for number in topic.partitions
                    ),
                    None if each.heard_ago_ms == NONE else each.heard_ago_ms,
                )
                for each in found.members
            ),
            found.kind or "consumer",
            found.committed_ms,
            found.holds_retention,
            tuple(
                FallenHold(
                    TopicPartition(topics.get(each.topic_id, each.topic_id), each.partition),
                    each.why,
                )
                for each in found.fallen
            ),
        )

    def group_offsets(self, group_id: str, timeout_s: float) -> dict[TopicPartition, int]:
        """Return every committed offset of a group."""
        name = arguments.text(group_id, "group_id")
        deadline_s = self._connection.deadline_s(timeout_s)
        request = wire.OffsetFetchRequest()
        request.groups.add(group_id=name)
        (found,) = self._ask(name, request, timeout_s).groups
        topics = self._names(self._connection.left_s(deadline_s))
        return {
            TopicPartition(topics.get(topic.topic_id, topic.topic_id), number): offset
            for topic in found.topics
            for number, offset in zip(topic.partitions, topic.offsets, strict=True)
        }

    def alter_group_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, int], timeout_s: float
    ) -> None:
        """Commit offsets of a group without members."""
        name = arguments.text(group_id, "group_id")
        wanted = {
            place: arguments.whole(offset, f"offsets[{place}]", 0, OFFSET_MAX)
            for place, offset in arguments.by_place(offsets, "offsets", "offsets").items()
        }
        deadline_s = self._connection.deadline_s(timeout_s)
        ids = {topic: found for found, topic in self._names(timeout_s).items()}
        request = wire.OffsetCommitRequest(member=wire.GroupMember(group_id=name, generation=NONE))
        for place, offset in sorted(wanted.items()):
            if place.topic not in ids:
                raise errors.UnknownTopicOrPartition(f"topic {place.topic!r} does not exist")
            request.topics.add(
                topic_id=ids[place.topic], partitions=[place.partition], offsets=[offset]
            )
        reply = self._ask(name, request, self._connection.left_s(deadline_s))
        for refused in reply.refused:
            raise frames.raise_error(refused.error)

    def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], timeout_s: float
    ) -> None:
        """Delete committed offsets of a group, a bounded number in each request."""
        name = arguments.text(group_id, "group_id")
        places = sorted(set(arguments.places(partitions)))
        deadline_s = self._connection.deadline_s(timeout_s)
        ids = {topic: found for found, topic in self._names(timeout_s).items()}
        for place in places:
            if place.topic not in ids:
                raise errors.UnknownTopicOrPartition(f"topic {place.topic!r} does not exist")
        for at in range(0, len(places), limits.OFFSETS_PER_REQUEST_MAX):
            request = wire.DeleteOffsetsRequest(group_id=name)
            for place in places[at : at + limits.OFFSETS_PER_REQUEST_MAX]:
                request.topics.add(topic_id=ids[place.topic], partitions=[place.partition])
            reply = self._ask(name, request, self._connection.left_s(deadline_s))
            for refused in reply.refused:
                raise frames.raise_error(refused.error)

    def delete_group(self, group_id: str, timeout_s: float) -> None:
        """Delete a group without members."""
        name = arguments.text(group_id, "group_id")
        self._ask(name, wire.DeleteGroupsRequest(group_ids=[name]), timeout_s)

    def _ask(self, name: str, request: Message, timeout_s: float) -> Any:
        """Return the reply of the group's coordinator; raises the error of the group in it."""
        cluster = self._connection.cluster

        async def ask(timeout_ms: int) -> Any:
            calls = CoordinatorCalls(cluster.world, cluster, name, ATTEMPT_MS, GROUP)
            return await calls.call_of_one(request, timeout_ms)

        return self._connection.run(ask, timeout_s)

    def _names(self, timeout_s: float) -> dict[str, str]:
        """Return topic id → name of every topic."""
        reply = self._connection.ask(wire.MetadataRequest(), wire.MetadataReply, timeout_s)
        return {topic.topic_id: topic.name for topic in reply.topics}


async def _listed(
    cluster: NetworkClient, request: wire.ListGroupsRequest, timeout_ms: int
) -> GroupListings:
    """Combine the lists of all brokers.  A partition that moves meanwhile may be in two of them."""
    views = await everyone(cluster, request, timeout_ms)
    found: dict[str, GroupListing] = {}
    loading: dict[int, None] = {}
    for node, reply in sorted(views.items()):
        loading |= dict.fromkeys(reply.loading)
        for each in reply.groups:
            kind = each.kind or "consumer"  # an older broker says none
            listing = GroupListing(each.group_id, each.state, each.members, node, kind)
            found[each.group_id] = listing
    silent = sorted(set(cluster.metadata.brokers) - set(views))
    listed = tuple(each for _, each in sorted(found.items()))
    return GroupListings(listed, tuple(sorted(loading)), tuple(silent))
