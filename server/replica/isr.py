"""The progress of a leader's followers, and the ISR that the leader should ask for.

Sans-IO.  Read first: docs/PROTOCOL.md R1, R2; KIP-16 (lag is time, not distance), KIP-903.

A follower is *caught up at t* if it has confirmed everything that the leader had at t.  The leader
notes its own log end whenever a follower confirms an offset.  When a later confirmation reaches
that end, the follower was caught up at the earlier time.  So a follower that is always one batch
behind, because new batches keep arriving, is in sync; one that makes no progress is not.

Invariants
  M1  A member leaves the ISR only after it was behind for `replica_lag_time_max_ms` without a
      break, or, if enough others stay, when it reports that its disk is full while it is behind
      (rule L16).
  M2  A replica joins only when it has everything below the high watermark and everything that was
      in the leader's log when its epoch began, and has moved its log start to the leader's (rule
      T9).
  M3  A replica joins with the broker epoch that its own fetches carried (KIP-903).  Confirmations
      under an earlier registration do not count.
  M4  Confirmations from before the replica left the ISR, or the replica set, do not count: its log
      may have been rebuilt since, under the same registration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pk.types import NONE, NodeId, Offset


@dataclass(slots=True)
class Progress:
    """One follower, as its fetches show it."""

    end: Offset  #: the follower keeps every record below it
    caught_up_ms: int  #: when it last had everything that the leader had
    confirmed_ms: int  #: when it last confirmed an offset
    leader_end: Offset  #: the leader's log end at `confirmed_ms`
    broker_epoch: int  #: of the registration under which it fetches
    log_start: Offset = 0  #: the follower's, durable


class InSync:
    """The followers of one leader epoch.  Times are the leader's monotonic clock."""

    def __init__(self, isr: Iterable[NodeId], log_end: Offset, now_ms: int) -> None:
        #: A member of the ISR begins as caught up now (M1), although it has confirmed nothing yet.
        self._known: dict[NodeId, Progress] = {
            member: Progress(0, now_ms, now_ms, log_end, NONE) for member in isr
        }
        #: Replicas whose disk had no room for the data that they fetched last.
        self._full: dict[NodeId, None] = {}

    def end_of(self, replica: NodeId) -> Offset:
        """Return the log end that `replica` confirmed; 0 = nothing yet."""
        known = self._known.get(replica)
        return 0 if known is None else known.end

    def log_start_of(self, replica: NodeId) -> Offset:
        """Return the durable log start that `replica` reported; 0 = none yet."""
        known = self._known.get(replica)
        return 0 if known is None else known.log_start

    def fetched(
        self,
        replica: NodeId,
        end: Offset,
        leader_end: Offset,
        now_ms: int,
        broker_epoch: int,
        log_start: Offset = 0,
    ) -> None:
        """Note that `replica` confirmed every record of `[log_start, end)`."""
        known = self._known.get(replica)
        if end >= leader_end or (known is not None and end > known.end):
            self._full.pop(replica, None)  # it stores again
        if known is None:
            known = self._known[replica] = Progress(end, NONE, now_ms, leader_end, broker_epoch)
        if end >= leader_end:
            known.caught_up_ms = now_ms
        elif end >= known.leader_end and known.broker_epoch == broker_epoch:
            known.caught_up_ms = max(known.caught_up_ms, known.confirmed_ms)
        known.end, known.confirmed_ms, known.leader_end = end, now_ms, leader_end
        known.broker_epoch, known.log_start = broker_epoch, log_start

    def leader_appends(self, log_end: Offset, now_ms: int) -> None:
        """Note that the leader appends to its log, which ended at `log_end` until now.

        Followers that had everything were caught up until now, however long ago they confirmed it.
        """
        for known in self._known.values():
            if known.end >= log_end:
                known.caught_up_ms = max(known.caught_up_ms, now_ms)

    def wanted(
        self,
        isr: Sequence[NodeId],
        replicas: Sequence[NodeId],
        me: NodeId,
        *,
        log_end: Offset,
        high_watermark: Offset,
        epoch_start: Offset,
        log_start: Offset,
        eligible: Mapping[NodeId, int],
        now_ms: int,
        lag_max_ms: int,
        required: int = 1,
    ) -> tuple[NodeId, ...]:
        """Return the ISR that the leader should ask for, in replica order.

        `eligible`: broker epochs of the brokers that may join: registered, unfenced, not leaving.
        `required`: members with full disks leave only if this many others stay.
        """
        members: list[NodeId] = []
        for replica in replicas:
            if replica == me:
                members.append(replica)
            elif replica in isr:
                if not self._lags(replica, log_end, now_ms, lag_max_ms):
                    members.append(replica)
            elif self._may_join(replica, max(high_watermark, epoch_start), log_start, eligible):
                members.append(replica)
        stays = [each for each in members if each not in self._full or self.end_of(each) >= log_end]
        return tuple(stays if len(stays) >= required else members)

    def storage_full(self, replica: NodeId) -> None:
        """Note that the disk of `replica` has no room for what it fetches (M1)."""
        self._full[replica] = None

    def _lags(self, replica: NodeId, log_end: Offset, now_ms: int, lag_max_ms: int) -> bool:
        """Whether `replica` has been behind for longer than `lag_max_ms` (M1)."""
        known = self._known.get(replica)
        if known is None:
            return True
        return known.end < log_end and now_ms - known.caught_up_ms > lag_max_ms

    def _may_join(
        self,
        replica: NodeId,
        needed: Offset,
        log_start: Offset,
        eligible: Mapping[NodeId, int],
    ) -> bool:
        """Whether `replica` has all it needs, under its current registration (M2, M3)."""
        known = self._known.get(replica)
        if (
            replica in self._full
            or known is None
            or known.end < needed
            or known.log_start < log_start
        ):
            return False
        return eligible.get(replica) == known.broker_epoch

    def broker_epoch_of(self, replica: NodeId) -> int:
        """Return the broker epoch of the replica's last confirmation; NONE = none yet."""
        known = self._known.get(replica)
        return NONE if known is None else known.broker_epoch

    def begin(self, replica: NodeId, log_end: Offset, now_ms: int) -> None:
        """Track `replica` as a member of the ISR from now on."""
        self._known.setdefault(replica, Progress(0, now_ms, now_ms, log_end, NONE))

    def forget(self, replica: NodeId) -> None:
        """Drop what `replica` confirmed, until its log has been compared again (M4)."""
        self._known.pop(replica, None)
        self._full.pop(replica, None)
