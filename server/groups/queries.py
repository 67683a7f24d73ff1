"""Reads for operators."""

from __future__ import annotations

from pk import errors
from pk.server.groups import commands
from pk.server.groups.groups import Groups, Out, decision
from pk.server.groups.state import Assigned, GroupState, topics_of
from pk.types import NONE
from pk.wire import pk_pb2 as wire


def describe(groups: Groups, command: commands.DescribeGroup, now_ms: int) -> Out:
    """Describe a group and its members.  The shell adds when each member was last heard."""
    group = groups.known(command.group_id)
    metadata = group.metadata
    reply = wire.DescribedGroup(
        group_id=command.group_id,
        state=metadata.state.label,
        generation=metadata.generation,
        assignor=metadata.assignor if group.members else "",
        leader=metadata.leader,
        kind=metadata.kind,
        query_run=metadata.query_run,
        holds_retention=metadata.holds_retention,
        committed_ms=max((each.committed_ms for each in group.offsets.values()), default=0),
    )
    for name, each in sorted(group.members.items()):
        reply.members.add(
            member_id=name,
            group_instance_id=each.instance_id,
            client_id=each.client_id,
            topics=each.subscription.topics,
            partitions=topics_of(group.assignment.get(name, Assigned()).partitions),
            heard_ago_ms=NONE,
            session_timeout_ms=each.session_timeout_ms,
            rebalance_timeout_ms=each.rebalance_timeout_ms,
        )
    return decision(reply, [])


def list_groups(groups: Groups, command: commands.ListGroups, now_ms: int) -> Out:
    """List the groups in the states of the request; none = in any state."""
    labels = {each.label for each in GroupState}
    states = set(command.request.states)
    unknown = sorted(states - labels)
    if unknown:
        raise errors.InvalidRequest(
            f"no state {', '.join(unknown)}: the states are {', '.join(sorted(labels))}"
        )
    found = tuple(
        wire.GroupListing(
            group_id=name,
            state=group.state.label,
            members=len(group.members),
            kind=group.metadata.kind,
        )
        for name, group in sorted(groups.items().items())
        if not states or group.state.label in states
    )
    return decision(found, [])
