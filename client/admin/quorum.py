"""Descriptions of the metadata quorum for `AdminClient`, and requests to its controllers.

A broker forwards a request to the active controller.  Without a broker (Kafka's
`bootstrap.controllers`, KIP-919) the client asks the controllers directly, and a controller that is
not the leader names the leader.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import Message

from pk import errors
from pk.client import arguments
from pk.client.network_client import NetworkClient
from pk.client.options import TIMEOUT_S
from pk.wire import pk_pb2 as wire

T = TypeVar("T")


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


async def ask_active(cluster: NetworkClient, request: Message, timeout_ms: int) -> Message:
    """Ask the configured controllers in turn, once each; a leader named in a refusal is asked
    next.
    """
    waiting, asked = list(cluster.bootstrap), dict[str, None]()
    error: errors.PkError = errors.BrokerUnavailable("no controller is known")
    while waiting:
        address = waiting.pop(0)
        if address in asked:
            continue
        asked[address] = None
        try:
            return await cluster.call_at(address, request, timeout_ms=timeout_ms)
        except errors.ControllerUnavailable as cause:
            error = cause
            if named := cause.details.get("address"):
                waiting.insert(0, named)
        except (errors.BrokerUnavailable, errors.RequestTimedOut) as cause:
            error = cause
    raise error


class QuorumCalls:
    """The calls of `AdminClient` that concern the metadata quorum."""

    def _ask(self, request: Message, kind: type[T], timeout_s: float) -> T:
        """Ask any server and return its reply of type `kind`.  `AdminClient` implements it."""
        raise NotImplementedError

    def describe_metadata_quorum(self, *, timeout_s: float = TIMEOUT_S) -> QuorumDescription:
        """Return the leader, voters and observers, and how far each has replicated."""
        request = wire.DescribeQuorumRequest()
        return description_of(self._ask(request, wire.DescribeQuorumReply, timeout_s))

    def add_raft_voter(
        self, node_id: int, directory_id: str, address: str, *, timeout_s: float = TIMEOUT_S
    ) -> tuple[int, ...]:
        """Make a controller that has caught up a voter (KIP-853); returns the ids of all voters."""
        request = wire.AddVoterRequest(
            node_id=arguments.whole(node_id, "node_id"),
            directory_id=arguments.text(directory_id, "directory_id"),
            address=arguments.text(address, "address"),
        )
        reply = self._ask(request, wire.ChangeVotersReply, timeout_s)
        return tuple(each.node_id for each in reply.voters)

    def remove_raft_voter(
        self, node_id: int, directory_id: str = "", *, timeout_s: float = TIMEOUT_S
    ) -> tuple[int, ...]:
        """Remove a controller from the voters; returns the ids of the remaining voters."""
        request = wire.RemoveVoterRequest(
            node_id=arguments.whole(node_id, "node_id"),
            directory_id=arguments.text(directory_id, "directory_id"),
        )
        reply = self._ask(request, wire.ChangeVotersReply, timeout_s)
        return tuple(each.node_id for each in reply.voters)
