"""Administration of the metadata quorum: describe, add and remove voters (KIP-595, 836, 853).

Pure.  This module computes the leader's view of the quorum and the reasons to refuse a change of
voters.  The quorum machine makes the change.

Rules
  M1  An added node has recently caught up with the leader.  A voter that lags counts for majorities
      but does not help to reach them.
  M2  After a change a majority of the voters is in contact with the leader.  Otherwise neither the
      change nor any later record could be committed.
  M3  A node id has one voter.  A node with another directory is added after the old one was
      removed.
"""

from __future__ import annotations

from collections.abc import Callable

from pk import errors
from pk.server.raft.leader_state import LeaderState
from pk.server.raft.machine import Quorum
from pk.server.raft.messages import Voter
from pk.types import NONE, NodeId
from pk.wire import pk_pb2 as wire

#: An observer that has not fetched for this long is no longer listed.
OBSERVER_MS = 300_000
#: M1: the age that "recently" allows, in multiples of `Timing.fetch_ms`.
LATELY = 5


def _leader_state(quorum: Quorum) -> LeaderState:
    if quorum.leader_state is None:
        raise errors.ControllerUnavailable("this controller does not lead")
    return quorum.leader_state


def describe(
    quorum: Quorum, address_of: Callable[[NodeId], str], now_ms: int
) -> wire.DescribeQuorumReply:
    """Describe the quorum from its leader's view.  Times are ms ago; -1 = never in this epoch.

    Raises `ControllerUnavailable` if this node does not lead.
    """
    state = _leader_state(quorum)
    reply = wire.DescribeQuorumReply(
        leader_id=quorum.me.node_id,
        leader_epoch=quorum.epoch,
        high_watermark=quorum.high_watermark,
        log_start=quorum.log.base.end,
        snapshot_end=NONE if quorum.log.snapshot is None else quorum.log.snapshot.end,
    )

    def ago(times: dict[Voter, int], voter: Voter) -> int:
        if voter == quorum.me:
            return 0
        return now_ms - times[voter] if voter in times else NONE

    def row(voter: Voter) -> wire.QuorumReplica:
        return wire.QuorumReplica(
            node_id=voter.node_id,
            directory_id=voter.directory_id,
            address=address_of(voter.node_id),
            log_end=quorum.log.end if voter == quorum.me else state.ends.get(voter, NONE),
            last_fetch_ago_ms=ago(state.last_fetch_ms, voter),
            last_caught_up_ago_ms=ago(state.caught_up_ms, voter),
        )

    reply.voters.extend(row(voter) for voter in sorted(quorum.voters))
    reply.observers.extend(
        row(voter)
        for voter in sorted(state.ends)
        if voter not in quorum.voters and now_ms - state.last_fetch_ms[voter] < OBSERVER_MS
    )
    return reply


def with_voter(quorum: Quorum, voter: Voter, now_ms: int) -> tuple[Voter, ...]:
    """Return the voters with `voter` added; unchanged if it votes already (a repeated request).

    Raises `InvalidRequest`, `OffsetNotAvailable` (M1), `ControllerUnavailable`.
    """
    state = _leader_state(quorum)
    if voter in quorum.voters:
        if quorum.log.voters[-1].offset >= quorum.high_watermark:
            raise errors.ControllerUnavailable("a change of voters is under way")
        return quorum.voters
    for known in quorum.voters:
        if known.node_id == voter.node_id:  # M3
            raise errors.InvalidRequest(
                f"controller {voter.node_id} votes with directory {known.directory_id}: remove "
                "that voter first"
            )
    caught_up_ms = state.caught_up_ms.get(voter)
    if caught_up_ms is None or now_ms - caught_up_ms > LATELY * quorum.timing.fetch_ms:
        raise errors.OffsetNotAvailable(
            f"{_name(voter)} has not caught up with the leader: is it running, with that directory?"
        )
    return _sound(quorum, (*quorum.voters, voter), now_ms)


def without_voter(
    quorum: Quorum, node_id: NodeId, directory_id: str, now_ms: int
) -> tuple[Voter, ...]:
    """Return the voters without a node; directory '' = any directory of the node.

    Raises `InvalidRequest`, `ControllerUnavailable`.
    """
    _leader_state(quorum)
    gone = [
        voter
        for voter in quorum.voters
        if voter.node_id == node_id and directory_id in ("", voter.directory_id)
    ]
    if not gone:
        wanted = f" with directory {directory_id}" if directory_id else ""
        raise errors.InvalidRequest(f"controller {node_id}{wanted} is no voter")
    if len(quorum.voters) == 1:
        raise errors.InvalidRequest(f"{_name(gone[0])} is the only voter")
    return _sound(quorum, tuple(v for v in quorum.voters if v not in gone), now_ms)


def _sound(quorum: Quorum, voters: tuple[Voter, ...], now_ms: int) -> tuple[Voter, ...]:
    """Raise unless a majority of the new voters is in contact with the leader (M2)."""
    state = _leader_state(quorum)
    since_ms = now_ms - quorum.timing.fetch_ms
    present = [v for v in voters if v == quorum.me or state.last_fetch_ms.get(v, NONE) >= since_ms]
    if len(present) <= len(voters) // 2:
        ids = ", ".join(str(voter.node_id) for voter in voters)
        raise errors.InvalidRequest(
            f"of the voters {ids} only {len(present)} are in contact with the leader: start the "
            "others first"
        )
    return voters


def _name(voter: Voter) -> str:
    return f"controller {voter.node_id} (directory {voter.directory_id})"
