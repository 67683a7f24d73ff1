"""Decisions about members: join, sync, leave, expiry.

    join                     empty, stable           preparing           completing
    unknown, generation -1   rebalance               joins               rebalance
    unknown, generation >= 0 UnknownMemberId         UnknownMemberId     UnknownMemberId
    known, same, older       the current generation  joins               the current generation
    known, same, current     rebalance               joins               rebalance
    known, changed           rebalance               joins               rebalance
    static, place of another takes the place         joins in its place  rebalance, in its place
    static, with generation  FencedInstanceId        FencedInstanceId    FencedInstanceId

"older" and "current": the generation that the request names, compared with the group's; -1 is
older.  A join with an older generation repeats one whose reply was lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from pk import errors, limits
from pk.server.groups import commands, records
from pk.server.groups.groups import (
    ConsumerGroup,
    Groups,
    Out,
    check_name,
    decision,
    fenced,
    generation_or_none,
    of_a_query,
    unknown_member,
)
from pk.server.groups.rebalances import Rebalance, begins_initial
from pk.server.groups.state import (
    Assigned,
    GroupMetadata,
    GroupState,
    Member,
    keys_of,
    stable,
    topics_of,
)
from pk.server.metadata.image import MetadataImage
from pk.types import NONE, PartitionKey
from pk.wire import frames
from pk.wire import pk_pb2 as wire

# -- join ------------------------------------------------------------------------------------------


def join(groups: Groups, command: commands.JoinGroup, now_ms: int) -> Out:
    """Let a member join, or answer a join that is repeated; see the table of the module."""
    request = command.request
    asked = request.member
    group = groups.find(asked.group_id) or ConsumerGroup(asked.group_id)
    _check_join(groups, request)
    if group.metadata.query_run:
        raise of_a_query(asked.group_id)
    member = Member(
        asked.member_id,
        asked.group_instance_id,
        request.client_id,
        request.session_timeout_ms,
        request.rebalance_timeout_ms,
        tuple(request.assignors),
        request.subscription,
        group.generation,
    )
    before = _predecessor(group, asked)
    itself = before is not None and before.member_id == member.member_id
    if before is not None and itself and before.same(member):
        again = _repeated(group, before, member, generation_or_none(asked))
        if again is not None:
            return decision(again, [])
    _check_room(groups, group, before, member)
    if before is None or itself:
        return _join(groups, group, member)
    return _take_place(group, before, member)


def _check_room(
    groups: Groups, group: ConsumerGroup, before: Member | None, member: Member
) -> None:
    """Raise if the group cannot have the member in the place of `before`."""
    group_id = group.metadata.group_id
    if before is None and len(group.members) >= groups.rules.max_size:
        raise errors.GroupMaxSizeReached(
            f"group {group_id!r} has {len(group.members)} members, which is the most that "
            "group_max_size allows"
        )
    size = group.members_bytes - (0 if before is None else before.size) + member.size
    if size > limits.GROUP_MEMBERS_BYTES_MAX:
        raise errors.GroupMaxSizeReached(
            f"the subscriptions of the {len(group.members)} members of group {group_id!r} and of "
            f"this one have {size} bytes, which is more than the {limits.GROUP_MEMBERS_BYTES_MAX} "
            "that the leader can get: close some members, or subscribe by a pattern to fewer topics"
        )
    common = group.common_assignors(before)
    others = len(group.members) > (before is not None)
    if others and not common & set(member.assignors):
        raise errors.InconsistentGroupProtocol(
            f"the assignors of this member are {', '.join(member.assignors)}; each other member of "
            f"group {group_id!r} has {', '.join(sorted(common))}"
        )


def _check_join(groups: Groups, request: wire.JoinGroupRequest) -> None:
    """Raise if the request is out of bounds."""
    rules = groups.rules
    check_name(request.member.member_id, "a member id")
    if request.member.group_instance_id:
        check_name(request.member.group_instance_id, "a group_instance_id")
    least, most = rules.session_timeout_min_ms, rules.session_timeout_max_ms
    if not least <= request.session_timeout_ms <= most:
        raise errors.InvalidSessionTimeout(
            f"session_timeout_ms is {request.session_timeout_ms}; the brokers allow {least} to "
            f"{most} (group_min_session_timeout_ms, group_max_session_timeout_ms)"
        )
    if request.rebalance_timeout_ms < 1:
        raise errors.InvalidRequest(f"a rebalance timeout of {request.rebalance_timeout_ms} ms")
    if not 0 < len(request.assignors) <= limits.ASSIGNORS_MAX:
        raise errors.InvalidRequest(
            f"a member lists 1 to {limits.ASSIGNORS_MAX} assignors, not {len(request.assignors)}"
        )
    for name in request.assignors:
        check_name(name, "the name of an assignor")
    size = request.subscription.ByteSize()
    if size > limits.SUBSCRIPTION_BYTES_MAX:
        raise errors.InvalidRequest(
            f"the subscription has {size} bytes; {limits.SUBSCRIPTION_BYTES_MAX} are allowed: "
            "subscribe to fewer topics"
        )
    if len(request.client_id.encode()) > limits.GROUP_ID_BYTES_MAX:
        raise errors.InvalidRequest(f"a client id of {len(request.client_id)} characters")


def _predecessor(group: ConsumerGroup, asked: wire.GroupMember) -> Member | None:
    """Return the member whose place the request takes: itself, or that of its instance id.

    Raises `UnknownMemberId` and `FencedInstanceId`.
    """
    first = generation_or_none(asked) == NONE
    known = group.members.get(asked.member_id)
    if known is not None and known.instance_id != asked.group_instance_id:
        raise fenced(asked)
    holder = group.instances.get(asked.group_instance_id)
    if holder is not None and holder != asked.member_id:
        if not first:
            raise fenced(asked)
        return group.members[holder]
    if known is None and not first:
        raise unknown_member(asked)
    return known


def _repeated(
    group: ConsumerGroup, before: Member, member: Member, generation: int
) -> wire.JoinGroupReply | None:
    """Return the reply to a join that is repeated; None if this one begins a rebalance."""
    if group.state is GroupState.PREPARING_REBALANCE:
        return wire.JoinGroupReply(pending=True) if before == member else None
    if generation >= group.generation:
        return None
    return _reply(group.members, group.metadata, group.assignment, member.member_id)


def _join(groups: Groups, group: ConsumerGroup, member: Member) -> Out:
    """Decide the join of a member under its own id."""
    changes = Rebalance(group)
    changes.put(member)
    changes.begin(initial=begins_initial(group, groups.rules.initial_rebalance_delay_ms))
    changes.maybe_complete()
    return _changed(changes, member.member_id)


def _take_place(group: ConsumerGroup, before: Member, member: Member) -> Out:
    """Let a static member take the place of its predecessor."""
    changes = Rebalance(group)
    if group.state is GroupState.STABLE and before.same(member):
        changes.rename(before.member_id, replace(member, joined=before.joined))
        return _changed(changes, member.member_id)
    changes.remove(before.member_id)
    changes.put(member)
    changes.begin()
    changes.maybe_complete()
    return _changed(changes, member.member_id)


def _changed(changes: Rebalance, member_id: str) -> Out:
    metadata = changes.metadata
    if metadata.state is GroupState.PREPARING_REBALANCE:
        reply = wire.JoinGroupReply(pending=True)
    else:
        reply = _reply(changes.members, metadata, changes.assignment, member_id)
    return decision(reply, changes.records(), metadata.group_id)


def _reply(
    members: Mapping[str, Member],
    metadata: GroupMetadata,
    assignment: Mapping[str, Assigned],
    member_id: str,
) -> wire.JoinGroupReply:
    """Return the reply of a generation.  The leader gets the members, because it watches their
    topics.  Once the generation has its assignment, it gets what that comprises, and computes none
    (KIP-814).
    """
    reply = wire.JoinGroupReply(
        leader=metadata.leader, generation=metadata.generation, assignor=metadata.assignor
    )
    if metadata.leader != member_id:
        return reply
    for name, each in sorted(members.items()):
        reply.members.add(
            member_id=name, group_instance_id=each.instance_id, subscription=each.subscription
        )
    if metadata.state is GroupState.STABLE:
        reply.skip_assignment = True
        counts = Counter(key.topic_id for each in assignment.values() for key in each.partitions)
        for topic_id, count in sorted(counts.items()):
            reply.assigned.add(topic_id=topic_id, partitions=count)
    return reply


# -- sync ------------------------------------------------------------------------------------------


def sync(groups: Groups, command: commands.SyncGroup, now_ms: int) -> Out:
    """Answer a member with its assignment; take the assignment that the leader brings."""
    request = command.request
    group, member = groups.of_member(request.member)
    if group.state is GroupState.PREPARING_REBALANCE:
        raise errors.RebalanceInProgress(f"group {request.member.group_id!r} is being joined")
    if group.state is GroupState.STABLE:
        return decision(_synced(group.assignment.get(member.member_id)), [])
    leads = member.member_id == group.metadata.leader
    if not leads or not request.HasField("assignment"):
        return decision(wire.SyncGroupReply(pending=True), [])
    assignment = _checked(group, request.assignment, command.image)
    metadata = stable(group.metadata)
    found = [
        records.assignment_record(metadata.group_id, metadata.generation, assignment),
        records.group_record(metadata),
    ]
    return decision(_synced(assignment.get(member.member_id)), found, metadata.group_id)


def _synced(assigned: Assigned | None) -> wire.SyncGroupReply:
    return wire.SyncGroupReply(
        partitions=[] if assigned is None else topics_of(assigned.partitions)
    )


def _checked(
    group: ConsumerGroup, assignment: wire.GroupAssignment, image: MetadataImage
) -> dict[str, Assigned]:
    """Return the assignment of every member, with what it has released, without deleted topics.
    Raises `InvalidRequest` if it is wrong.
    """
    size = assignment.ByteSize()
    if size > limits.ASSIGNMENT_BYTES_MAX:
        raise errors.InvalidRequest(
            f"the assignment has {size} bytes; {limits.ASSIGNMENT_BYTES_MAX} are allowed: "
            "subscribe to fewer partitions in one group"
        )
    owners: dict[PartitionKey, str] = {}
    given: dict[str, tuple[PartitionKey, ...]] = dict.fromkeys(group.members, ())
    for each in assignment.members:
        if each.member_id not in group.members:
            raise errors.InvalidRequest(
                f"the assignment names {each.member_id!r}, which is no member of the group"
            )
        if given[each.member_id]:
            raise errors.InvalidRequest(f"the assignment names {each.member_id!r} twice")
        # A topic that the image does not have was deleted after the leader saw it.
        keys = keys_of(each.partitions)
        given[each.member_id] = tuple(key for key in keys if key.topic_id in image.topics)
        for key in given[each.member_id]:
            if image.partition(key) is None:
                raise errors.InvalidRequest(f"the assignment has {key}, which does not exist")
            if owners.setdefault(key, each.member_id) != each.member_id:
                raise errors.InvalidRequest(
                    f"the assignment gives {key} to {owners[key]!r} and to {each.member_id!r}"
                )
        if len(set(given[each.member_id])) != len(given[each.member_id]):
            raise errors.InvalidRequest(f"the assignment of {each.member_id!r} has one twice")
    return {
        name: Assigned(tuple(sorted(keys)), _released(group, name, owners))
        for name, keys in given.items()
    }


def _released(
    group: ConsumerGroup, member_id: str, owners: Mapping[PartitionKey, str]
) -> tuple[PartitionKey, ...]:
    """Return what the member has given up and no member gets (KIP-1251)."""
    before = group.assignment.get(member_id, Assigned())
    return tuple(sorted({*before.partitions, *before.released} - owners.keys()))


# -- the end of a membership -----------------------------------------------------------------------


def leave(groups: Groups, command: commands.LeaveGroup, now_ms: int) -> Out:
    """Remove members at their own request, or static ones at an operator's."""
    request = command.request
    group = groups.find(request.group_id)
    reply = wire.LeaveGroupReply()
    going: list[str] = []
    for asked in request.members:
        try:
            going.append(_leaving(group, asked))
            reply.errors.add()
        except errors.PkError as refusal:
            reply.errors.append(frames.error_of(refusal))
    going = list(dict.fromkeys(going))
    if group is None or not going:
        return decision(reply, [])
    return _without(group, going, reply, now_ms)


def _leaving(group: ConsumerGroup | None, asked: wire.GroupMember) -> str:
    if group is None:
        raise unknown_member(asked)
    holder = group.instances.get(asked.group_instance_id) if asked.group_instance_id else None
    if holder is not None and asked.member_id not in ("", holder):
        raise fenced(asked)
    found = asked.member_id or holder or ""
    if found not in group.members:
        raise unknown_member(asked)
    return found


def _without(group: ConsumerGroup, going: list[str], reply: object, now_ms: int) -> Out:
    changes = Rebalance(group)
    for name in going:
        changes.remove(name)
    changes.removed(now_ms)
    return decision(reply, changes.records(), group.metadata.group_id)


def expire(groups: Groups, command: commands.ExpireMembers, now_ms: int) -> Out:
    """Remove the members whose sessions have ended."""
    late: dict[str, list[str]] = {}
    for group_id, member_id in dict.fromkeys(command.members):
        group = groups.find(group_id)
        if group is not None and member_id in group.members:
            late.setdefault(group_id, []).append(member_id)
    out = decision(0, [])
    for group_id, going in late.items():
        part = _without(groups.known(group_id), going, None, now_ms)
        out.records = [*out.records, *part.records]
        out.effects = [*out.effects, *part.effects]
    out.reply = sum(map(len, late.values()))
    return out


def end_join(groups: Groups, command: commands.EndJoin, now_ms: int) -> Out:
    """End the join phase at its timeout, unless the rebalance has gone on."""
    group = groups.find(command.group_id)
    if (
        group is None
        or group.state is not GroupState.PREPARING_REBALANCE
        or group.generation != command.generation
    ):
        return decision(None, [])
    changes = Rebalance(group)
    changes.end_join(now_ms)
    return decision(None, changes.records(), command.group_id)
