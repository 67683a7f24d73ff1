"""The leader's side of a follower's fetch stream.

World-generic.  The stream and its turns are as for consumers (fetch.py), with three differences.  A
replica reads to the log end, not to the high watermark.  Before its first read both logs are
compared (rule R4), or the replica gets START_AT (rule R5).  The offsets that a replica confirms
move the high watermark.

Invariants
  F1  A replica's offsets count only after its log was compared with this one in this leader epoch,
      and only for the compared position.  A replica that has left the ISR is compared again.  A
      newer registration of the broker invalidates an older one, and a newer position invalidates
      older ones on any stream of the broker (R12).  A pending ISR change may rely on a larger log
      end than a returning replica now has.  The log of the replica is then compared only after
      the controller has decided the change (R2).
  F2  A replica learns of a new high watermark within TELL_MS, with data or without.
  F4  Before its first read a replica is also checked for records whose tombstones the leader no
      longer has (rule C8); such a replica gets START_AT.
  F3  If retention removes records that a replica still has to fetch, for example while the replica
      is filled, the leader answers it with START_AT (R5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, Protocol

from pk import errors
from pk.log.divergence import StartAt
from pk.server.broker.hosted_partitions import HostedPartitions
from pk.server.handlers.fetch_session import Position
from pk.server.replica.alter_partition import AlterPartitionManager
from pk.server.replica.context import Environment
from pk.server.replica.leader import Leader
from pk.server.replica.partition import Partition
from pk.types import NONE, NodeId, Offset, PartitionKey
from pk.wire import pk_pb2 as wire

#: Longest time that a new high watermark waits for data, in order to be sent in the same frame.
TELL_MS = 20


#: High watermark, log start, the offset below which local segments may be dropped, and the settled
#: end.
_Marks = tuple[Offset, Offset, Offset, Offset]


#: Leader epoch of the log, and its local start at that time.
_Asked = tuple[Leader, Offset]


def _marks(partition: Partition) -> _Marks:
    log = partition.log
    return partition.high_watermark, log.log_start, log.droppable_end, partition.settled_end


class FollowerStream(Protocol):
    """The interface of the fetch stream (fetch.py) that a follower's end uses."""

    def position(self, key: PartitionKey) -> Position | None: ...

    def moved(self, key: PartitionKey, *, urgent: bool = False) -> None: ...

    def later(self, work: Coroutine[Any, Any, None]) -> None: ...

    def entry(
        self, reply: wire.FetchReply, position: Position, partition: Partition
    ) -> wire.FetchedPartition: ...

    def served(self, position: Position) -> None: ...

    def end(self, position: Position) -> None: ...

    async def answer(self, position: Position, reply: wire.FetchReply) -> None: ...


class ReplicaEnd:
    """The stream of one follower at its leader."""

    def __init__(
        self,
        env: Environment,
        partitions: HostedPartitions,
        alter_partition: AlterPartitionManager,
        stream: FollowerStream,
        replica: NodeId,
        broker_epoch: int,
    ) -> None:
        self._env = env
        self._partitions = partitions
        self._alter_partition = alter_partition
        self._stream = stream
        self.replica = replica
        self.broker_epoch = broker_epoch
        self._compared: dict[PartitionKey, Position] = {}  #: F1
        self._told: dict[PartitionKey, _Marks] = {}  #: the values that it was last sent
        self._untold: dict[PartitionKey, None] = {}
        self._telling: asyncio.TimerHandle | None = None

    def close(self) -> None:
        if self._telling is not None:
            self._telling.cancel()

    # -- the replica speaks ------------------------------------------------------------------------

    def check(self, request: wire.FetchRequest) -> None:
        """Raise `InvalidRequest` if the request names another replica than the stream's."""
        said = (request.replica_id, request.replica_epoch)
        if said != (self.replica, self.broker_epoch):
            raise errors.InvalidRequest(
                f"the request names replica {said} on the stream of replica "
                f"{(self.replica, self.broker_epoch)}"
            )

    def confirmed(self, request: wire.FetchRequest) -> None:
        for item in request.confirmed:
            key = PartitionKey(item.topic_id, item.partition)
            position, asked = self._compared.get(key), self._stream.position(key)
            if asked is not None and asked is not position:
                if asked.position_id == item.position_id:  # counts once the logs are compared
                    asked.log_start, asked.cleaned_end = item.log_start, item.cleaned_end
            elif (
                position is not None
                and position.position_id == item.position_id
                and self._broker_epoch_of(key) == self.broker_epoch
            ):
                position.log_start, position.cleaned_end = item.log_start, item.cleaned_end
                self._confirm(key, position, item.log_end)

    def full(self, request: wire.FetchRequest) -> None:
        """Let replicas with full disks leave the ISR: they would hold the watermark back (L16).

        A report of an older position may arrive after the replica has stored again on another
        stream, and an idle log would not withdraw it.  Followers of older builds name no position.
        """
        for item in request.full:
            partition = self._partitions.get(PartitionKey(item.topic_id, item.partition))
            leader = None if partition is None else partition.leader
            if (
                partition is not None
                and leader is not None
                and leader.leader_epoch == item.leader_epoch
                and leader.broker_epoch_of(self.replica) in (NONE, self.broker_epoch)
                and (
                    not item.position_id
                    or leader.is_newest(self.replica, self.broker_epoch, item.position_id)
                )
            ):
                leader.on_follower_full(self.replica)
                self._alter_partition.consider(partition)

    def forgotten(self, keys: list[PartitionKey]) -> None:
        """Note that the replica no longer fetches these partitions on this stream.

        A newer stream of the replica stays valid: an idle replica would not send its position again
        (F1).
        """
        for key in keys:
            position = self._compared.pop(key, None)
            partition = self._partitions.get(key)
            leader = None if partition is None else partition.leader
            if (
                position is not None
                and leader is not None
                and leader.broker_epoch_of(self.replica) == self.broker_epoch
                and leader.is_newest(self.replica, self.broker_epoch, position.position_id)
            ):
                leader.on_follower_gone(self.replica)

    def _broker_epoch_of(self, key: PartitionKey) -> int:
        """The registration that was compared last; NONE = none since the replica left the ISR."""
        partition = self._partitions.get(key)
        leader = None if partition is None else partition.leader
        return NONE if leader is None else leader.broker_epoch_of(self.replica)

    def _confirm(self, key: PartitionKey, position: Position, end: Offset) -> None:
        partition = self._partitions.get(key)
        leader = None if partition is None else partition.leader
        if partition is None or leader is None or leader.leader_epoch != position.leader_epoch:
            return  # F1: another leader epoch; the pump answers the replica
        if not leader.is_newest(self.replica, self.broker_epoch, position.position_id):
            return
        try:
            moved = leader.on_follower_end(
                self.replica, end, self._env.now_ms, self.broker_epoch, position.log_start
            )
        except errors.PkError as error:
            self._env.metrics.refused(error)
            return
        if leader.on_follower_cleaned(self.replica, position.cleaned_end):
            partition.settled_end_moved()
        if moved:
            partition.watermark_moved()
        partition.complete_deletions()
        if self.replica not in leader.isr:
            self._alter_partition.consider(partition)

    # -- the partition speaks ----------------------------------------------------------------------

    def watermark_moved(self, key: PartitionKey) -> None:
        """The high watermark moved: answer within TELL_MS (F2)."""
        self._untold[key] = None
        if self._telling is None:
            loop = asyncio.get_running_loop()
            self._telling = loop.call_later(TELL_MS / 1000, self._send_watermarks)

    def _send_watermarks(self) -> None:
        self._telling = None
        untold, self._untold = self._untold, {}
        for key in untold:
            partition = self._partitions.get(key)
            if partition is not None and self._told.get(key) != _marks(partition):
                self._stream.moved(key)

    # -- turns -------------------------------------------------------------------------------------

    def compare(
        self, position: Position, reply: wire.FetchReply
    ) -> tuple[Partition, Offset] | None:
        """Return the partition and the end of the read; None = answered, or nothing to send.

        Raises typed errors, which are sent to the replica.
        """
        if position.cold:
            return None  # the producer state is being read
        partition = self._partitions.find(position.key)
        if position.leader_epoch == NONE:
            raise errors.InvalidRequest("a replica's fetch names a leader epoch")
        leader = partition.serving(position.leader_epoch)
        if self.replica not in leader.replicas:  # not in this image yet: asked again (F1)
            raise errors.NotLeaderOrFollower(f"broker {self.replica} is no follower of {partition}")
        heard = leader.broker_epoch_of(self.replica)
        if heard > self.broker_epoch:
            raise errors.StaleBrokerEpoch(f"broker {self.replica} has registered again")
        if not leader.is_newest(self.replica, self.broker_epoch, position.position_id):
            raise errors.NotLeaderOrFollower(f"{partition}: the replica has set a newer position")
        compared = self._compared.get(position.key) is position
        if compared and heard != self.broker_epoch:
            raise errors.NotLeaderOrFollower(f"{partition}: the logs must be compared again")
        if not compared or position.next_offset < partition.log.first_offset:  # F3
            divergence = partition.find_divergence(
                position.last_fetched_epoch, position.next_offset, position.forgotten_end
            )
            if isinstance(divergence, StartAt):
                position.cold = True
                asked = leader, partition.log.first_offset
                work = self._read_start(position, partition, divergence.offset, asked)
                self._stream.later(work)
                return None
            if divergence is not None:
                entry = self._stream.entry(reply, position, partition)
                entry.diverging.CopyFrom(
                    wire.EpochEnd(epoch=divergence.epoch, end_offset=divergence.end_offset)
                )
                self._stream.end(position)
                return None
            if leader.counts_on(self.replica, position.next_offset):
                raise errors.NotLeaderOrFollower(f"{partition}: an ISR change is pending")
            self._compared[position.key] = position
            self._confirm(position.key, position, position.next_offset)
        if position.next_offset < leader.log_end:
            return partition, leader.log_end
        if position.announce or self._told.get(position.key) != _marks(partition):
            self._stream.entry(reply, position, partition).next_offset = position.next_offset
            self._stream.served(position)
        return None

    def describe(self, entry: wire.FetchedPartition, partition: Partition) -> None:
        """Add the fields that only replicas get (rule R5)."""
        log = partition.log
        entry.local_log_start = log.local_log_start
        entry.droppable_end = log.droppable_end
        entry.settled_end = partition.settled_end
        self._told[partition.key] = _marks(partition)

    async def _read_start(
        self, position: Position, partition: Partition, offset: Offset, asked: _Asked
    ) -> None:
        """Send START_AT with the producer state, so that duplicates are still recognised (R5)."""
        disk = partition.writer.disk
        snapshot = await disk.read(partial(partition.log.snapshot_at, offset))
        leader, first = asked
        if partition.leader is not leader or partition.log.first_offset != first:
            # Retention removed it, perhaps before the read.
            position.cold = False
            self._stream.moved(position.key, urgent=True)
            return
        reply = wire.FetchReply()
        entry = self._stream.entry(reply, position, partition)
        entry.start_at.local_log_start = offset
        entry.start_at.producer_snapshot = snapshot
        entry.start_at.forgotten_end = partition.log.cleaned.forgotten_end
        await self._stream.answer(position, reply)
