"""The level of a cluster, and the calls of `AdminClient` that describe and raise it (rule Q6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from pk.client import arguments
from pk.client.options import TIMEOUT_S
from pk.wire import pk_pb2 as wire

T = TypeVar("T")


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
    """The calls of `AdminClient` that concern the level of the cluster."""

    def _ask(self, request: Message, kind: type[T], timeout_s: float) -> T:
        """Ask any broker and return its reply of type `kind`.  `AdminClient` implements it."""
        raise NotImplementedError

    def describe_cluster(self, *, timeout_s: float = TIMEOUT_S) -> ClusterDescription:
        """Return the level of the cluster and the level that each node knows."""
        reply = self._ask(wire.DescribeClusterRequest(), wire.DescribeClusterReply, timeout_s)
        nodes = tuple(
            NodeLevel(each.node_id, each.role, each.address, each.level or None)
            for each in reply.nodes
        )
        return ClusterDescription(
            reply.cluster_id, reply.controller_id, reply.level, reply.known, nodes
        )

    def upgrade_cluster(
        self, to: int = 0, *, validate_only: bool = False, timeout_s: float = TIMEOUT_S
    ) -> tuple[int, int]:
        """Raise the level of the cluster; it cannot be lowered again.

        to: the level; 0 = the highest that the active controller knows.
        validate_only: check the request, and change nothing.
        Returns the level before and after.  Raises `UnsupportedFeature` if a registered broker or
        a voter does not know the level, `InvalidRequest` for a lower level.
        """
        to = arguments.whole(to, "to")
        flag = arguments.flag(validate_only, "validate_only")
        request = wire.UpgradeClusterRequest(to=to, validate_only=flag)
        reply = self._ask(request, wire.UpgradeClusterReply, timeout_s)
        return reply.before, reply.level
