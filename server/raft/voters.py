"""The voters of the metadata quorum, their addresses and the level of formats, from the metadata
log (KIP-853).

A voters record counts from its append on, committed or not, until a truncation removes it.  Records
below the high watermark are never truncated, so of those only the last one is kept.  An address in
this node's configuration has precedence over an address in the log.

A node that was away while voters were added has no record of them, and could not fetch from a
leader among them.  So every message that names a leader also carries its address.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from pk import errors
from pk.log.storage import Buffer
from pk.server.raft.messages import (
    AppendVoters,
    BeginEpoch,
    Voter,
    VotersAt,
)
from pk.server.raft.record_serde import ControlRecord, RecordSerde
from pk.server.raft.snapshot_id import SnapshotId
from pk.types import NONE, NodeId
from pk.wire import pk_pb2 as wire

R = TypeVar("R")


class Voters(Generic[R]):
    """The voters records.  `at`: oldest first, the last one counts; never empty."""

    def __init__(
        self, serde: RecordSerde[R], me: Voter, address: str, first: Mapping[Voter, str]
    ) -> None:
        self._serde = serde
        given = {voter.node_id: where for voter, where in first.items()}
        self._given: dict[NodeId, str] = {**given, me.node_id: address}
        self.addresses: dict[NodeId, str] = dict(self._given)
        self.at = [VotersAt(NONE, tuple(first))]
        #: Records that raised the level of formats, oldest first: (offset, level).  A truncation
        #: removes them, too.
        self._levels: list[tuple[int, int]] = []

    @property
    def level(self) -> int:
        """The highest level of formats that a record has set; 0 = none has (rule Q6)."""
        return self._levels[-1][1] if self._levels else 0

    @property
    def now(self) -> tuple[Voter, ...]:
        return self.at[-1].voters

    def begin_with(self, known: SnapshotId, raw: bytes) -> None:
        """Begin with the voters of a verified snapshot; the log behind it follows."""
        self._raise_level(known.end - 1, level_of(self._serde, raw))
        voters, addresses = voters_of(self._serde, raw)
        self.at = [VotersAt(known.end - 1, voters)]
        self.addresses.update(addresses)
        self.addresses.update(self._given)

    def find(self, raw: Any, offset: int) -> None:
        """Note the voters records in batches.  Raises `NewerFormat` for an unknown level."""
        for at, record in self._serde.decode_batches(raw, offset, verify=False):
            self.note(at, record)

    def note(self, offset: int, record: R) -> None:
        """Note a record at `offset` if it names voters or sets a level."""
        self._raise_level(offset, self._serde.level_in(record))
        found = self._serde.voters_in(record)
        if found is None:
            return
        named = found.voters
        voters = tuple(Voter(each.node_id, each.directory_id) for each in named)
        self.at.append(VotersAt(offset, voters))
        self.addresses.update((each.node_id, each.address) for each in named if each.address)
        self.addresses.update(self._given)

    def _raise_level(self, offset: int, level: int) -> None:
        if level > self.level:
            self._levels.append((offset, level))

    def forget(self, end: int) -> None:
        """Drop voters records and levels at and above `end`, to which the log was truncated."""
        self.at = [each for each in self.at if each.offset < end]
        self._levels = [each for each in self._levels if each[0] < end]

    def committed(self, end: int) -> None:
        """Keep of the records below `end`, which are committed, only the last."""
        while len(self.at) > 1 and self.at[1].offset < end:
            del self.at[0]

    def naming(self, message: Message) -> Message:
        """Return `message` with the address of the leader that it names."""
        leader = _leader_in(message)
        if leader is not None:
            leader.address = self.addresses.get(leader.node_id, "")
        return message

    def learn(self, message: Any) -> None:
        """Learn the address of the leader that `message` names.

        The leader's own message has precedence; others only fill in an unknown address.
        """
        leader = _leader_in(message)
        if leader is None or not leader.address or leader.node_id in self._given:
            return
        own = leader.node_id == message.sender.node_id
        if own or leader.node_id not in self.addresses:
            self.addresses[leader.node_id] = leader.address

    def records(self, op: BeginEpoch | AppendVoters) -> list[R]:
        """Return the records for a write that the quorum requests."""
        voters = wire.VotersRecord(
            voters=[
                wire.Voter(
                    node_id=voter.node_id,
                    directory_id=voter.directory_id,
                    address=self.addresses.get(voter.node_id, ""),
                )
                for voter in op.voters
            ]
        )
        bodies: list[ControlRecord] = [voters]
        if isinstance(op, BeginEpoch):
            ids = [voter.node_id for voter in op.voters]
            leader = op.leader.node_id
            bodies.insert(0, wire.LeaderChangeRecord(leader_id=leader, epoch=op.epoch, voters=ids))
        return [self._serde.record_of(body) for body in bodies]


def voters_of(serde: RecordSerde[R], raw: Buffer) -> tuple[tuple[Voter, ...], dict[NodeId, str]]:
    """Return the voters at the end of a verified snapshot, and their addresses (KIP-853).

    Raises `CorruptLog` if it names none.
    """
    for part in serde.decode_snapshot(raw):
        for _, record in part:
            found = serde.voters_in(record)
            if found is not None:
                named = found.voters
                voters = tuple(Voter(each.node_id, each.directory_id) for each in named)
                return voters, {each.node_id: each.address for each in named if each.address}
    raise errors.CorruptLog("the snapshot names no voters")


def level_of(serde: RecordSerde[R], raw: Buffer) -> int:
    """Return the level of formats of a verified snapshot.  Raises `NewerFormat`.

    The row with the level stands before the voters (metadata/snapshot.py).
    """
    for part in serde.decode_snapshot(raw):
        for _, record in part:
            level = serde.level_in(record)
            if level or serde.voters_in(record) is not None:
                return level
    return 0


def _leader_in(message: Message) -> wire.QuorumVoter | None:
    if isinstance(message, wire.QuorumBeginRequest):
        return message.sender
    named = wire.QuorumVoteReply | wire.QuorumHeardReply | wire.QuorumFetchReply
    if isinstance(message, named) and message.HasField("leader"):
        return message.leader
    return None
