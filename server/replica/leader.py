"""The leader's state of one partition: which replicas are in sync, and the high watermark.

Sans-IO.  The broker passes in appends, followers' fetches and committed metadata records; the
methods return whether the high watermark moved.  Read first: docs/PROTOCOL.md R1, R2, L2, L5;
KIP-101, KIP-966.

A new leader does not know how far its predecessor's high watermark had come.  It knows that its own
log has everything that the predecessor committed.  So it is *ready* once its high watermark has
reached the end that its log had when the epoch began.  Until then a fetch above the watermark is
answered with OFFSET_NOT_AVAILABLE, never with OFFSET_OUT_OF_RANGE (KIP-207).

Invariants
  I1  log_start <= high_watermark <= log_end
  I2  every replica of the maximal ISR holds everything below the high watermark
  I3  the high watermark never moves back within a leader epoch
  I4  the leader is a member of its own ISR
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pk import errors
from pk.server.replica import watermark
from pk.server.replica.isr import InSync
from pk.types import NONE, Epoch, NodeId, Offset

ACKS_ALL = -1

#: The settled end of a log that has no other copy.
EVERYTHING: Offset = 2**62


class Leader:
    """One partition in one leader epoch.  A new epoch is a new `Leader`."""

    __slots__ = (
        "_adding",
        "_cleaned_ends",
        "_flush_on_ack",
        "_followers",
        "_pending",
        "_positions",
        "_required_setting",
        "_synced_end",
        "_written_end",
        "high_watermark",
        "isr",
        "leader_epoch",
        "node_id",
        "partition_epoch",
        "replicas",
        "start_offset",
    )

    def __init__(
        self,
        *,
        node_id: NodeId,
        leader_epoch: Epoch,
        partition_epoch: int,
        replicas: Sequence[NodeId],
        isr: Sequence[NodeId],
        log_end: Offset,
        synced_end: Offset,
        high_watermark: Offset,
        min_insync_replicas: int,
        flush_on_ack: bool,
        now_ms: int = 0,
        adding: Sequence[NodeId] = (),
    ) -> None:
        assert node_id in isr, "I4: a leader outside its ISR was never elected"
        self.node_id = node_id
        self.leader_epoch = leader_epoch
        self.partition_epoch = partition_epoch
        self.replicas = tuple(replicas)
        self.isr = tuple(isr)
        self._adding = len(adding)  #: replicas that a reassignment adds, not required (rule R1)
        #: the end of the log when this epoch began; `ready` means the watermark has reached it
        self.start_offset = log_end
        self.high_watermark = min(
            high_watermark, log_end
        )  # I1: a checkpoint may outlive a torn tail
        self._written_end = log_end
        self._synced_end = min(synced_end, log_end)
        self._required_setting = min_insync_replicas
        self._flush_on_ack = flush_on_ack
        self._followers = InSync(isr, log_end, now_ms)
        #: the newest position of each follower: (broker epoch, number of the position)
        self._positions: dict[NodeId, tuple[int, int]] = {}
        #: the ISR that was proposed and is not committed yet (rule R2); empty = none
        self._pending: tuple[NodeId, ...] = ()
        #: how far each follower has cleaned its log, as reported in this epoch (rule C4)
        self._cleaned_ends: dict[NodeId, Offset] = {}
        self._move()

    # -- what others ask -------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """The watermark covers everything a predecessor may have committed (rule T1, KIP-207)."""
        return self.high_watermark >= self.start_offset

    @property
    def settled(self) -> bool:
        """Whether every in-sync replica has confirmed in this epoch everything from before it.

        Until then an in-sync replica may have records of an earlier leader that it has not
        truncated yet.  If it is elected next, those records come back (rule L6).
        """
        return all(
            self._followers.broker_epoch_of(member) != NONE
            and self._followers.end_of(member) >= self.start_offset
            for member in self.possible_isr
            if member != self.node_id
        )

    @property
    def possible_isr(self) -> tuple[NodeId, ...]:
        """Return the members of the ISR and those that a proposed ISR may have added (rule R2)."""
        return (*self.isr, *self._pending)

    @property
    def log_end(self) -> Offset:
        """Return the end of the records that this replica has WRITTEN."""
        return self._written_end

    @property
    def in_sync_required(self) -> int:
        """The number of committed in-sync replicas that an acknowledgement needs (rule R1)."""
        factor = len(self.replicas) - self._adding
        return watermark.in_sync_required(self._required_setting, factor)

    def check_epoch(self, epoch: Epoch) -> None:
        """Raises unless `epoch` is this leader's or absent (KIP-320)."""
        if epoch in (NONE, self.leader_epoch):
            return
        facts = {"leader_epoch": str(self.leader_epoch)}
        if epoch < self.leader_epoch:
            raise errors.FencedLeaderEpoch(
                f"leader epoch {epoch} is over; the current one is {self.leader_epoch}", **facts
            )
        raise errors.UnknownLeaderEpoch(
            f"leader epoch {epoch} is not known here yet, only {self.leader_epoch}", **facts
        )

    def check_acks(self, acks: int) -> None:
        """Raises `NotEnoughReplicas` if `acks` could not be honoured now (rule R1)."""
        if acks == ACKS_ALL and len(self.isr) < self.in_sync_required:
            raise errors.NotEnoughReplicas(
                f"{len(self.isr)} in-sync replicas, {self.in_sync_required} are required"
            )

    # -- what happens ----------------------------------------------------------------------------

    def on_local_end(self, written_end: Offset, synced_end: Offset, now_ms: int = 0) -> bool:
        """Take over the ends of the leader's own log.  True if the high watermark moved."""
        assert synced_end <= written_end, (synced_end, written_end)
        assert written_end >= self.high_watermark, "I1: nothing committed is ever cut by its leader"
        if written_end > self._written_end:
            self._followers.leader_appends(self._written_end, now_ms)
        self._written_end = written_end
        self._synced_end = synced_end
        return self._move()

    def on_undone(self, written_end: Offset) -> None:
        """Move the log end back after a failed write to what is written (rule L2)."""
        self.start_offset = min(self.start_offset, written_end)

    def on_follower_end(
        self,
        replica: NodeId,
        end: Offset,
        now_ms: int = 0,
        broker_epoch: int = NONE,
        log_start: Offset = 0,
    ) -> bool:
        """Note that `replica` has all of `[log_start, end)`.  True if the high watermark moved.

        Under `flush_on_ack` a follower confirms its *synced* end (rule L2), so one number serves
        both.  Raises `NotLeaderOrFollower`, `OffsetOutOfRange`.
        """
        if replica not in self.replicas or replica == self.node_id:
            raise errors.NotLeaderOrFollower(f"broker {replica} is no follower of this partition")
        if end > self._written_end:
            raise errors.OffsetOutOfRange(f"offset {end} is above the log end {self._written_end}")
        self._followers.fetched(replica, end, self._written_end, now_ms, broker_epoch, log_start)
        return self._move()

    def on_follower_cleaned(self, replica: NodeId, cleaned_end: Offset) -> bool:
        """Note how far `replica` has cleaned its log.  True if `settled_end` changed."""
        before = self.settled_end
        self._cleaned_ends[replica] = cleaned_end
        return self.settled_end != before

    @property
    def settled_end(self) -> Offset:
        """Return the lowest cleaned end of the other assigned replicas (rule C4); EVERYTHING if
        there is none.  A replica that reported nothing in this epoch counts as 0.
        """
        others = (self._cleaned_ends.get(e, 0) for e in self.replicas if e != self.node_id)
        return min(others, default=EVERYTHING)

    def low_watermark(self, log_start: Offset) -> Offset:
        """Return the smallest log start of the replicas that may lead next (KIP-107, rule T9).

        Records below it cannot come back.  `log_start` is the leader's own.  NONE while too few are
        in sync: then replicas of the ELR (KIP-966) may lead next, whose log starts are unknown.
        """
        if len(self.isr) < self.in_sync_required:
            return NONE
        others = (
            self._followers.log_start_of(member)
            for member in self.possible_isr
            if member != self.node_id
        )
        return min((log_start, *others))

    def wanted_isr(
        self, eligible: Mapping[NodeId, int], now_ms: int, lag_max_ms: int, log_start: Offset = 0
    ) -> tuple[NodeId, ...] | None:
        """Return the ISR to ask the controller for; None = no change, or one is under way.

        `eligible`: broker epochs of the brokers that may join (isr.py).
        """
        if self._pending:
            return None
        wanted = self._followers.wanted(
            self.isr,
            self.replicas,
            self.node_id,
            log_end=self._written_end,
            high_watermark=self.high_watermark,
            epoch_start=self.start_offset,
            log_start=log_start,
            eligible=eligible,
            now_ms=now_ms,
            lag_max_ms=lag_max_ms,
            required=self.in_sync_required,
        )
        return None if set(wanted) == set(self.isr) else wanted

    def broker_epoch_of(self, replica: NodeId) -> int:
        """Return the broker epoch under which `replica` fetches; NONE = it has not fetched yet."""
        return self._followers.broker_epoch_of(replica)

    def is_newest(self, replica: NodeId, broker_epoch: int, position_id: int) -> bool:
        """Whether `replica` has set no newer position.

        A position that arrives late, on a stream that broke, describes an older state of its log.
        """
        position = broker_epoch, position_id
        newest = self._positions[replica] = max(position, self._positions.get(replica, position))
        return position == newest

    def on_follower_gone(self, replica: NodeId) -> None:
        """Drop the progress of a replica that has stopped following.

        A member of the ISR stays one until a metadata record removes it.
        """
        if replica not in self.possible_isr:
            self._followers.forget(replica)

    def on_follower_full(self, replica: NodeId) -> None:
        """Note that the disk of `replica` has no room for what it fetched (rule L16)."""
        self._followers.storage_full(replica)

    def counts_on(self, replica: NodeId, end: Offset) -> bool:
        """Whether a pending ISR change depends on `replica` having more records than `end`."""
        asked = replica in self._pending and replica not in self.isr
        return asked and end < self._followers.end_of(replica)

    def end_of(self, replica: NodeId) -> Offset:
        """Return the log end that `replica` confirmed."""
        return self._written_end if replica == self.node_id else self._followers.end_of(replica)

    def on_isr_proposed(self, isr: Sequence[NodeId]) -> None:
        """Note a proposed ISR; from now on its additions hold the high watermark back (R2)."""
        assert not self._pending, "one change at a time"
        self._pending = tuple(isr)

    def on_isr_refused(self, isr: Sequence[NodeId]) -> bool:
        """Drop a proposal that the controller certainly refused.  True if the watermark moved."""
        if tuple(isr) != self._pending:
            return False
        self._pending = ()
        return self._move()

    def on_isr_committed(
        self,
        isr: Sequence[NodeId],
        replicas: Sequence[NodeId],
        partition_epoch: int,
        now_ms: int = 0,
        adding: Sequence[NodeId] = (),
    ) -> bool:
        """Take over a committed ISR, unless its partition epoch is old.

        True if the watermark moved.
        """
        if partition_epoch <= self.partition_epoch:
            return False
        assert self.node_id in isr, "I4: the controller never keeps a leader outside the ISR"
        missed = partition_epoch > self.partition_epoch + 1  # an ISR between is unknown
        self.partition_epoch = partition_epoch
        for member in isr:
            if member not in self.isr:
                self._followers.begin(member, self._written_end, now_ms)
        for member in (*self.isr, *self.replicas):
            if member not in isr and (missed or member in self.isr or member not in replicas):
                self._followers.forget(member)
        self.isr = tuple(isr)
        self.replicas = tuple(replicas)
        self._cleaned_ends = {e: at for e, at in self._cleaned_ends.items() if e in replicas}
        self._adding = len(adding)
        self._pending = ()
        return self._move()

    def on_config(self, min_insync_replicas: int, flush_on_ack: bool) -> bool:
        """Take over changed settings of the topic.  True if the watermark moved."""
        self._required_setting = min_insync_replicas
        self._flush_on_ack = flush_on_ack
        return self._move()

    def _move(self) -> bool:
        own = self._synced_end if self._flush_on_ack else self._written_end
        others = (
            self._followers.end_of(member) for member in self.possible_isr if member != self.node_id
        )
        before = self.high_watermark
        self.high_watermark = watermark.advance(
            before, (own, *others), len(self.isr), self.in_sync_required
        )
        return self.high_watermark > before
