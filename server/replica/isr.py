"""Who is in sync: what a leader knows of its followers' progress, and which ISR it should ask for.

Sans-IO.  Read first: docs/PROTOCOL.md R1, R2; KIP-16 (lag is time, not distance), KIP-903.

A follower is *caught up at t* if everything the leader had at t is confirmed.  The leader notes its
own end whenever it hears of a follower; when a later word confirms that end, the follower was
caught up at the earlier time.  So a follower that is always one batch behind, because batches keep
coming, is in sync; one that stands still is not.

Invariants
  M1  a member leaves only after it was behind for `replica_lag_time_max_ms` without a break, or, if
      enough others stay, when it says that it is behind because its disk is full (rule L16)
  M2  a replica joins only when it has everything below the high watermark, everything that was
      there when the leader's epoch began, and knows what was deleted (rule T9)
  M3  the broker epoch a replica joins with is the one its own fetches carried (KIP-903): what an
      earlier life confirmed counts for nothing
  M4  what a replica said before it left the ISR, or the replicas, counts for nothing: it may have
      been made anew since, under the same registration
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pk.types import NONE, NodeId, Offset


@dataclass(slots=True)
class Progress:
    """One follower, as its fetches show it."""

    end: Offset  #: everything below it is kept there
    caught_up_ms: int  #: when it last had all the leader had
    heard_ms: int  #: when it was last heard
    leader_end: Offset  #: the leader's end then
    broker_epoch: int  #: of the registration that fetches
    log_start: Offset = 0  #: durable there


class InSync:
    """The followers of one leader epoch.  Times are the leader's monotonic clock."""

    def __init__(self, isr: Iterable[NodeId], log_end: Offset, now_ms: int) -> None:
        #: Members of the ISR begin as if they had been heard now (M1), with nothing confirmed.
        self._known: dict[NodeId, Progress] = {
            member: Progress(0, now_ms, now_ms, log_end, NONE) for member in isr
        }
        self._full: dict[NodeId, None] = {}  #: had no room for what they fetched last

    def end_of(self, replica: NodeId) -> Offset:
        """What `replica` confirmed; 0 = nothing yet."""
        known = self._known.get(replica)
        return 0 if known is None else known.end

    def log_start_of(self, replica: NodeId) -> Offset:
        """Where the log of `replica` starts, durably; 0 = nothing was heard."""
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
        """`replica` keeps everything of `[log_start, end)`."""
        known = self._known.get(replica)
        if end >= leader_end or (known is not None and end > known.end):
            self._full.pop(replica, None)  # it stores again
        if known is None:
            known = self._known[replica] = Progress(end, NONE, now_ms, leader_end, broker_epoch)
        if end >= leader_end:
            known.caught_up_ms = now_ms
        elif end >= known.leader_end and known.broker_epoch == broker_epoch:
            known.caught_up_ms = max(known.caught_up_ms, known.heard_ms)
        known.end, known.heard_ms, known.leader_end = end, now_ms, leader_end
        known.broker_epoch, known.log_start = broker_epoch, log_start

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
        """The ISR that should be, in replica order.

        `eligible`: broker epochs of the brokers that may join: registered, unfenced, not leaving.
        `required`: how many must stay, should members leave because their disks are full.
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

    def no_room(self, replica: NodeId) -> None:
        """`replica` cannot store what it fetches (M1)."""
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
        """The registration whose fetches were heard last; NONE = nothing was heard."""
        known = self._known.get(replica)
        return NONE if known is None else known.broker_epoch

    def begin(self, replica: NodeId, log_end: Offset, now_ms: int) -> None:
        """`replica` is in the ISR from now on, however it got there."""
        self._known.setdefault(replica, Progress(0, now_ms, now_ms, log_end, NONE))

    def forget(self, replica: NodeId) -> None:
        """M4: until its log was compared again."""
        self._known.pop(replica, None)
        self._full.pop(replica, None)
