"""Encoding and decoding of the quorum's messages for the wire.

Pure.  A message that does not parse raises `InvalidRequest`, an error that names the peer's fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message

from pk import errors
from pk.log.divergence import EpochEnd
from pk.server.raft.messages import (
    BeginQuorumEpoch,
    EndQuorumEpoch,
    Fetch,
    FetchReply,
    FetchStatus,
    QuorumEpochReply,
    RaftReply,
    Request,
    Voter,
    VoteReply,
    VoteRequest,
)
from pk.server.raft.snapshot_id import SnapshotId
from pk.wire import pk_pb2 as wire

_STATUS = (
    FetchStatus.DATA,
    FetchStatus.DIVERGING,
    FetchStatus.SNAPSHOT,
    FetchStatus.NOT_LEADER,
)


def _voter(voter: Voter) -> wire.QuorumVoter:
    return wire.QuorumVoter(node_id=voter.node_id, directory_id=voter.directory_id)


def _maybe(voter: Voter | None) -> wire.QuorumVoter | None:
    return None if voter is None else _voter(voter)


def _read(voter: wire.QuorumVoter) -> Voter:
    return Voter(voter.node_id, voter.directory_id)


def _leader(message: Any) -> Voter | None:
    return _read(message.leader) if message.HasField("leader") else None


def encode(message: Request | RaftReply) -> Message:
    """Return the wire form of a message.  The payload of a `FetchReply` is sent behind it."""
    return _ENCODE[type(message)](message)


def _encode_vote_request(m: VoteRequest) -> Message:
    return wire.QuorumVoteRequest(
        sender=_voter(m.sender), epoch=m.epoch, last_epoch=m.last_epoch, log_end=m.log_end,
        to=_voter(m.to), pre_vote=m.pre_vote,
    )  # fmt: skip


def _encode_vote_reply(m: VoteReply) -> Message:
    return wire.QuorumVoteReply(
        sender=_voter(m.sender), epoch=m.epoch, leader=_maybe(m.leader), granted=m.granted,
        pre_vote=m.pre_vote, asked_epoch=m.asked_epoch,
    )  # fmt: skip


def _encode_begin_epoch(m: BeginQuorumEpoch) -> Message:
    return wire.QuorumBeginRequest(sender=_voter(m.sender), epoch=m.epoch, to=_voter(m.to))


def _encode_end_epoch(m: EndQuorumEpoch) -> Message:
    successors = [_voter(voter) for voter in m.successors]
    return wire.QuorumEndRequest(sender=_voter(m.sender), epoch=m.epoch, successors=successors)


def _encode_epoch_reply(m: QuorumEpochReply) -> Message:
    return wire.QuorumHeardReply(sender=_voter(m.sender), epoch=m.epoch, leader=_maybe(m.leader))


def _encode_fetch(m: Fetch) -> Message:
    return wire.QuorumFetchRequest(
        sender=_voter(m.sender), epoch=m.epoch, offset=m.offset, last_epoch=m.last_epoch,
        high_watermark=m.high_watermark, number=m.number,
    )  # fmt: skip


def _encode_fetch_reply(m: FetchReply) -> Message:
    reply = wire.QuorumFetchReply(
        sender=_voter(m.sender), epoch=m.epoch, leader=_maybe(m.leader),
        status=_STATUS.index(m.status), number=m.number, offset=m.offset, end=m.end,
        high_watermark=m.high_watermark,
    )  # fmt: skip
    if m.diverging is not None:
        reply.diverging_epoch, reply.diverging_end = m.diverging
    if m.snapshot is not None:
        reply.snapshot_end, reply.snapshot_epoch = m.snapshot.end, m.snapshot.epoch
    return reply


_ENCODE: dict[type, Callable[[Any], Message]] = {
    VoteRequest: _encode_vote_request,
    VoteReply: _encode_vote_reply,
    BeginQuorumEpoch: _encode_begin_epoch,
    EndQuorumEpoch: _encode_end_epoch,
    QuorumEpochReply: _encode_epoch_reply,
    Fetch: _encode_fetch,
    FetchReply: _encode_fetch_reply,
}


def decode(m: Any, payload: Any = b"") -> Request | RaftReply:
    """Return the message that `encode` encoded.  Raises `InvalidRequest`."""
    kind = m.DESCRIPTOR.name
    read = _DECODE.get(kind)
    if read is None:
        raise errors.InvalidRequest(f"{kind} is no message of the metadata quorum")
    if kind == "QuorumFetchReply":
        return _decode_fetch_reply(m, payload)
    return read(m)


def _decode_vote_request(m: wire.QuorumVoteRequest) -> VoteRequest:
    sender, to = _read(m.sender), _read(m.to)
    return VoteRequest(sender, m.epoch, m.last_epoch, m.log_end, to, m.pre_vote)


def _decode_vote_reply(m: wire.QuorumVoteReply) -> VoteReply:
    sender = _read(m.sender)
    return VoteReply(sender, m.epoch, _leader(m), m.granted, m.pre_vote, m.asked_epoch)


def _decode_begin_epoch(m: wire.QuorumBeginRequest) -> BeginQuorumEpoch:
    return BeginQuorumEpoch(_read(m.sender), m.epoch, _read(m.to))


def _decode_end_epoch(m: wire.QuorumEndRequest) -> EndQuorumEpoch:
    return EndQuorumEpoch(_read(m.sender), m.epoch, tuple(map(_read, m.successors)))


def _decode_epoch_reply(m: wire.QuorumHeardReply) -> QuorumEpochReply:
    return QuorumEpochReply(_read(m.sender), m.epoch, _leader(m))


def _decode_fetch(m: wire.QuorumFetchRequest) -> Fetch:
    sender = _read(m.sender)
    return Fetch(sender, m.epoch, m.offset, m.last_epoch, m.high_watermark, m.number)


def _decode_fetch_reply(m: wire.QuorumFetchReply, payload: Any = b"") -> FetchReply:
    if not 0 <= m.status < len(_STATUS):
        raise errors.InvalidRequest(f"a fetch reply of status {m.status}")
    status = _STATUS[m.status]
    diverging = snapshot = None
    if status is FetchStatus.DIVERGING:
        diverging = EpochEnd(m.diverging_epoch, m.diverging_end)
    elif status is FetchStatus.SNAPSHOT:
        snapshot = SnapshotId(m.snapshot_end, m.snapshot_epoch)
    return FetchReply(
        _read(m.sender), m.epoch, _leader(m), status, m.number, m.offset, m.end,
        m.high_watermark, diverging, snapshot, payload,
    )  # fmt: skip


_DECODE: dict[str, Callable[[Any], Request | RaftReply]] = {
    "QuorumVoteRequest": _decode_vote_request,
    "QuorumVoteReply": _decode_vote_reply,
    "QuorumBeginRequest": _decode_begin_epoch,
    "QuorumEndRequest": _decode_end_epoch,
    "QuorumHeardReply": _decode_epoch_reply,
    "QuorumFetchRequest": _decode_fetch,
    "QuorumFetchReply": _decode_fetch_reply,
}
