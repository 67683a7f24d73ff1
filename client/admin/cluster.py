"""The calls of `AdminClient` that describe and raise the level of the cluster (rule Q6)."""

from __future__ import annotations

from dataclasses import dataclass

from pk.client import arguments
from pk.client.admin.connection import AdminConnection
from pk.wire import pk_pb2 as wire


@dataclass(slots=True, frozen=True)
class NodeLevel:
    """A registered broker or a voter, and the level of `pk.format` that it knows.

    role: "broker" or "controller".
    level: None = a voter that has not fetched from the active controller in its term.
    """

    node_id: int
    role: str
    address: str
    level: int | None


@dataclass(slots=True, frozen=True)
class ClusterDescription:
    """The level of a cluster.

    level: of `pk.format`; records and formats of higher levels are not written.
    known: the highest level that the active controller knows.
    """

    cluster_id: str
    controller_id: int
    level: int
    known: int
    nodes: tuple[NodeLevel, ...]

    @property
    def behind(self) -> tuple[NodeLevel, ...]:
        """The nodes that do not know level `known`: they keep the cluster from it."""
        return tuple(each for each in self.nodes if each.level is None or each.level < self.known)


class ClusterCalls:
    """The calls that concern the level; `AdminClient` documents their arguments."""

    def __init__(self, connection: AdminConnection) -> None:
        self._connection = connection

    def describe_cluster(self, timeout_s: float) -> ClusterDescription:
        """Return the level of the cluster and the level that each node knows."""
        request = wire.DescribeClusterRequest()
        reply = self._connection.ask(request, wire.DescribeClusterReply, timeout_s)
        nodes = tuple(
            NodeLevel(each.node_id, each.role, each.address, each.level or None)
            for each in reply.nodes
        )
        return ClusterDescription(
            reply.cluster_id, reply.controller_id, reply.level, reply.known, nodes
        )

    def upgrade_cluster(self, to: int, validate_only: bool, timeout_s: float) -> tuple[int, int]:
        """Raise the level of the cluster; returns the level before and after."""
        to = arguments.whole(to, "to")
        flag = arguments.flag(validate_only, "validate_only")
        request = wire.UpgradeClusterRequest(to=to, validate_only=flag)
        reply = self._connection.ask(request, wire.UpgradeClusterReply, timeout_s)
        return reply.before, reply.level
