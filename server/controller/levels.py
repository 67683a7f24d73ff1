"""Decisions about the level of `pk.format`: describe it, raise it (rule Q6).

The level says which records and formats the nodes of a cluster may write.  Only an operator raises
it, and only to a level that every registered broker and every voter knows; it is never lowered.  A
registration carries the level that the broker knows.  The levels of voters arrive with the command,
from their fetches of this term.
"""

from __future__ import annotations

from collections.abc import Mapping

from pk import errors, formats
from pk.server.controller.commands import (
    DescribeCluster,
    Out,
    Rules,
    UpgradeCluster,
    decision,
)
from pk.server.metadata.image import MetadataImage
from pk.types import NONE, NodeId
from pk.wire import pk_pb2 as wire

#: The level of a node that has not said what it knows.
UNHEARD = 0


def require_known(image: MetadataImage, request: wire.RegisterBrokerRequest) -> None:
    """Raise `NewerFormat` if the broker that registers does not know the level of the cluster."""
    knows = max(1, request.format_level)
    if knows < image.format_level:
        raise errors.NewerFormat(
            f"the cluster is at level {image.format_level} of {formats.FEATURE}, and broker "
            f"{request.broker_id} knows {knows}: start it with a newer pk"
        )


def describe_cluster(image: MetadataImage, rules: Rules, command: DescribeCluster) -> Out:
    """Return the level of the cluster, and the level that each node knows."""
    reply = wire.DescribeClusterReply(
        cluster_id=image.cluster_id,
        controller_id=rules.node_id,
        level=image.format_level,
        known=rules.format_level,
        nodes=_nodes(image, rules, command.voters),
        metadata_offset=NONE,
    )
    return decision(reply)


def upgrade_cluster(image: MetadataImage, rules: Rules, command: UpgradeCluster) -> Out:
    """Raise the level of the cluster as an operator asks.

    Raises `InvalidRequest` for a lower level, `UnsupportedFeature` for a level that the active
    controller, a registered broker or a voter does not know.
    """
    request, before = command.request, image.format_level
    wanted = request.to or rules.format_level
    if wanted < before:
        raise errors.InvalidRequest(
            f"the cluster is at level {before} of {formats.FEATURE}: a level is never lowered, "
            "because what it allows may have been written"
        )
    if wanted > rules.format_level:
        raise errors.UnsupportedFeature(
            f"the active controller, node {rules.node_id}, knows level {rules.format_level} of "
            f"{formats.FEATURE}, not {wanted}: start every node with a newer pk first"
        )
    behind = [each for each in _nodes(image, rules, command.voters) if each.level < wanted]
    if behind and wanted > before:
        raise errors.UnsupportedFeature(
            f"level {wanted} of {formats.FEATURE} is not known to {', '.join(map(_named, behind))}:"
            " start these nodes with a newer pk, or remove them from the cluster"
        )
    reply = wire.UpgradeClusterReply(before=before, level=wanted, metadata_offset=image.offset)
    if wanted == before or request.validate_only:
        return decision(reply)
    reply.metadata_offset = image.offset + 1
    return decision(reply, [wire.FeatureLevelRecord(name=formats.FEATURE, level=wanted)])


def _nodes(
    image: MetadataImage, rules: Rules, voters: Mapping[NodeId, int]
) -> list[wire.NodeLevel]:
    """Return every registered broker and every voter with the level that it knows."""
    found = [
        wire.NodeLevel(
            node_id=who, role="broker", address=broker.address, level=broker.format_level
        )
        for who, broker in sorted(image.brokers.items())
    ]
    heard = {**voters, rules.node_id: rules.format_level}
    found += [
        wire.NodeLevel(
            node_id=voter.node_id,
            role="controller",
            address=voter.address,
            level=heard.get(voter.node_id, UNHEARD),
        )
        for voter in sorted(image.voters)
    ]
    return found


def _named(node: wire.NodeLevel) -> str:
    knows = f"knows {node.level}" if node.level else "has not fetched from this controller"
    return f"{node.role} {node.node_id} ({knows})"
