"""The calls of `AdminClient` that concern the metadata quorum.

A broker forwards a request to the active controller.  Without a broker (Kafka's
`bootstrap.controllers`, KIP-919) the client asks the controllers directly, and a controller that is
not the leader names the leader (`AdminConnection`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pk.client import arguments
from pk.client.admin.connection import AdminConnection
from pk.wire import pk_pb2 as wire


@dataclass(slots=True, frozen=True)
class QuorumReplica:
    """One controller as the leader sees it; times are ms ago, -1 = never in this epoch."""

    node_id: int
    directory_id: str
    address: str
    log_end: int
    lag: int
    last_fetch_ago_ms: int
    last_caught_up_ago_ms: int


@dataclass(slots=True, frozen=True)
class QuorumDescription:
    """The leader of the metadata quorum, its voters and observers, and how far each has
    replicated.
    """

    leader_id: int
    leader_epoch: int
    high_watermark: int
    log_start: int
    snapshot_end: int
    voters: tuple[QuorumReplica, ...]
    observers: tuple[QuorumReplica, ...]

    @property
    def max_lag(self) -> int:
        """Return the largest lag of a voter, in records."""
        return max((each.lag for each in self.voters), default=0)

    @property
    def max_caught_up_ago_ms(self) -> int:
        """Return how long ago the slowest voter was caught up, in ms; -1 = a voter never was."""
        times = [each.last_caught_up_ago_ms for each in self.voters]
        return -1 if min(times, default=-1) < 0 else max(times)


def description_of(reply: wire.DescribeQuorumReply) -> QuorumDescription:
    """Convert the reply."""
    leader = [each.log_end for each in reply.voters if each.node_id == reply.leader_id]
    end = max([reply.high_watermark, *leader])

    def rows(given: Iterable[wire.QuorumReplica]) -> tuple[QuorumReplica, ...]:
        return tuple(
            QuorumReplica(
                r.node_id, r.directory_id, r.address, r.log_end, end - max(0, r.log_end),
                r.last_fetch_ago_ms, r.last_caught_up_ago_ms,
            )
            for r in given
        )  # fmt: skip

    return QuorumDescription(
        reply.leader_id, reply.leader_epoch, reply.high_watermark, reply.log_start,
        reply.snapshot_end, rows(reply.voters), rows(reply.observers),
    )  # fmt: skip


class QuorumCalls:
    """The calls that concern the quorum; `AdminClient` documents their arguments."""

    def __init__(self, connection: AdminConnection) -> None:
        self._connection = connection

    def describe_metadata_quorum(self, timeout_s: float) -> QuorumDescription:
        """Return the state of the quorum, as its leader sees it."""
        request = wire.DescribeQuorumRequest()
        return description_of(self._connection.ask(request, wire.DescribeQuorumReply, timeout_s))

    def add_raft_voter(
        self, node_id: int, directory_id: str, address: str, timeout_s: float
    ) -> tuple[int, ...]:
        """Make a controller a voter; returns the ids of all voters."""
        request = wire.AddVoterRequest(
            node_id=arguments.whole(node_id, "node_id"),
            directory_id=arguments.text(directory_id, "directory_id"),
            address=arguments.text(address, "address"),
        )
        reply = self._connection.ask(request, wire.ChangeVotersReply, timeout_s)
        return tuple(each.node_id for each in reply.voters)

    def remove_raft_voter(
        self, node_id: int, directory_id: str, timeout_s: float
    ) -> tuple[int, ...]:
        """Remove a controller from the voters; returns the ids of the remaining voters."""
        request = wire.RemoveVoterRequest(
            node_id=arguments.whole(node_id, "node_id"),
            directory_id=arguments.text(directory_id, "directory_id"),
        )
        reply = self._connection.ask(request, wire.ChangeVotersReply, timeout_s)
        return tuple(each.node_id for each in reply.voters)
