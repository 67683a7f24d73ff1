"""Checks of what must always hold between machines, on plain values; no code here knows how pk
works inside.

Checked
  V10  The metadata quorum (rule Q1): an epoch has one leader, and a voter gives one vote an epoch.
       A voter never returns to an epoch before one it voted or led in, and the high watermark of a
       process never goes back.  What is committed is SYNCED on a majority and never changes.
  V11  Equal records give equal images (rule Q4; compared by samples.py).
  V12  Every replica holds, below its HW, the same batches that were committed of the partition.
       Only the end of an era may remove a suffix of them.  Below the cleaned end of a compacted log
       the batches differ, and keys are compared instead (V29, compaction_checkers.py).
  V13  HW ≤ log end of every member of the committed ISR, and HW stands still while the ISR has
       fewer than min_insync_replicas members (rules R1, R2).
  V14  A replica never truncates what was committed according to its own HW (rule R4), and a leader
       holds everything that was committed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pk.sim.checkers import require
from pk.sim.oracle import Oracle
from pk.types import NONE, NodeId, Offset, PartitionKey


class Mark(NamedTuple):
    """One batch, identified by its offsets, its leader epoch and its CRC."""

    base: Offset
    next: Offset
    epoch: int
    crc: int


class Marks:
    """The committed batches of one log in order; equal on every replica that has them."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    @property
    def end(self) -> Offset:
        return self.marks[-1].next if self.marks else 0

    def differs(self, mark: Mark) -> Mark | None:
        """Return the known batch that `mark` contradicts, or None."""
        at = bisect_left(self.marks, mark.base, key=lambda known: known.base)
        if at > 0 and self.marks[at - 1].next > mark.base:
            return self.marks[at - 1]
        if at == len(self.marks):
            return None
        known = self.marks[at]
        return known if known != mark and known.base < mark.next else None

    def extend(self, mark: Mark) -> None:
        """Add the committed batch `mark`, unless it lies below the end and is known already."""
        if mark.base >= self.end:
            self.marks.append(mark)

    def cut(self, end: Offset) -> None:
        """Remove all batches that reach above `end`."""
        while self.marks and self.marks[-1].next > end:
            self.marks.pop()


# -- the metadata quorum ---------------------------------------------------------------------------


@dataclass(slots=True)
class QuorumSample:
    """The state of one controller at one moment."""

    node: NodeId
    life: int  #: number of the process of this node, from its first start on
    leads: bool
    epoch: int
    high_watermark: Offset
    synced_end: Offset
    voters: tuple[NodeId, ...]
    granted: tuple[NodeId, ...]  #: the voters that gave it a vote in this epoch


class QuorumCheck:
    """Checks votes, leaders and committed records of the metadata quorum (V10)."""

    def __init__(self) -> None:
        self.log = Marks()
        self.leaders: dict[int, NodeId] = {}
        self._votes: dict[tuple[int, NodeId], NodeId] = {}
        self._bound: dict[NodeId, int] = {}  # the last epoch in which a voter voted or led
        self._last: dict[NodeId, QuorumSample] = {}
        self._lost: dict[NodeId, Offset] = {}  # synced ends of voters whose disk is lost
        self._committed = 0

    def check(self, s: QuorumSample) -> None:
        last = self._last.get(s.node)
        self._last[s.node] = s
        bound = self._bound.get(s.node, 0)
        require(s.epoch >= bound, "V10", "it has voted or led in epoch {}: {}", bound, s)
        if last is not None and last.life == s.life:
            was = last.high_watermark
            require(s.high_watermark >= was, "V10", "HW was {}: {}", was, s)
        require(s.high_watermark <= s.synced_end, "V10", "committed and not SYNCED: {}", s)
        for voter in s.granted:
            given = self._votes.setdefault((s.epoch, voter), s.node)
            require(given == s.node, "V10", "{} voted for {} too: {}", voter, given, s)
            self._bound[voter] = max(s.epoch, self._bound.get(voter, 0))
        if not s.leads:
            return
        self._bound[s.node] = s.epoch
        leader = self.leaders.setdefault(s.epoch, s.node)
        require(leader == s.node, "V10", "{} leads the epoch too: {}", leader, s)
        for gone in [each for each in self._lost if each not in s.voters]:
            del self._lost[gone]
        if s.high_watermark > self._committed:
            holders = [n for n in s.voters if self._holds(n, s.high_watermark)]
            majority = 2 * len(holders) > len(s.voters)
            require(majority, "V10", "only {} have it: {}", holders, s)
            self._committed = s.high_watermark

    def forget(self, node: NodeId) -> None:
        """Forget a voter whose disk is lost; with a new disk its id names another voter (rule Q1).

        A leader that does not know this yet still counts what the old voter had confirmed.
        """
        last = self._last.pop(node, None)
        if last is not None:
            self._lost[node] = last.synced_end
        self._bound.pop(node, None)
        for given in [each for each in self._votes if each[1] == node]:
            del self._votes[given]

    def _holds(self, node: NodeId, end: Offset) -> bool:
        known = self._last.get(node)
        has = known is not None and known.synced_end >= end
        return has or self._lost.get(node, NONE) >= end

    def committed(self, node: NodeId, marks: Sequence[Mark]) -> list[Mark]:
        """Check the batches that a controller committed; return those that were new."""
        fresh = []
        for mark in marks:
            known = self.log.differs(mark)
            words = "{} has committed {}, others {}"
            require(known is None, "V10", words, node, mark, known)
            if mark.base >= self.log.end:
                fresh.append(mark)
                self.log.extend(mark)
        return fresh


# -- replicas --------------------------------------------------------------------------------------


@dataclass(slots=True)
class ReplicaSample:
    """The state of one replica at one moment."""

    key: PartitionKey
    topic: str
    broker: NodeId
    life: int  #: number of the process of the broker, from its first start on
    leader_epoch: int  #: the epoch that it leads or follows; NONE = neither
    leads: bool
    current: bool  #: the metadata log holds no later leader epoch
    high_watermark: Offset
    log_start: Offset
    local_log_start: Offset
    log_end: Offset
    in_sync: int  #: size of the ISR as the leader knows it
    required: int  #: min_insync_replicas: fewer in-sync replicas commit nothing
    hit: bool  #: it lost data and is not back in the ISR
    #: (member of the committed ISR, its log end), without members that were hit
    isr_ends: tuple[tuple[NodeId, Offset], ...] = ()


@dataclass(slots=True)
class _Replica:
    """The values of one replica in earlier samples."""

    life: int
    era: int
    compared: Offset = 0  #: local batches below it were compared with the committed ones
    high_watermark: Offset = NONE
    #: the high watermark that its process found on its disk; NONE = the first process that was seen
    found_watermark: Offset = NONE
    leader_epoch: int = NONE
    #: (life, first offset) of the log that its process began again, until a sample shows that log
    begun: tuple[int, Offset] | None = None


@dataclass(slots=True)
class _History:
    era: int
    log: Marks = field(default_factory=Marks)
    cut_epoch: int = NONE  #: leader epoch of the last leader that held less than was committed
    led_end: Offset = 0  #: log end of the leader in its last sample
    #: the `cut_epoch` whose leader also had another batch below its log end
    parted_epoch: int = NONE


class ReplicaCheck:
    """Checks every replica against what was committed of its partition (V12 to V14)."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._replicas: dict[tuple[PartitionKey, NodeId], _Replica] = {}
        self._histories: dict[PartitionKey, _History] = {}
        #: The eras of replicas that moved away; their logs may still be on the disk.
        self._moved: dict[tuple[PartitionKey, NodeId], int] = {}

    def check(self, s: ReplicaSample) -> tuple[Offset, Offset]:
        """Check a sample; return the range of the replica's log whose batches `committed` needs."""
        era = self._oracle.era(*s.key)
        history = self._histories.get(s.key)
        if history is None:
            history = self._histories[s.key] = _History(era)
        seen = self._replicas.get((s.key, s.broker))
        if seen is None:
            former = self._moved.pop((s.key, s.broker), era)
            old_log = s.log_end > 0  # a new log begins empty
            seen = _Replica(s.life, former if old_log else era)
            self._replicas[s.key, s.broker] = seen
        self._begun_log(s, seen)
        if s.log_end < seen.compared:
            words = "cut below what was committed, {}: {}"
            require(s.hit or era > seen.era, "V14", words, seen.compared, s)
            seen.era += not s.hit  # each ended era may remove a suffix of a replica once
            seen.compared = s.log_end
        if s.leads and s.current:
            self._check_leader(s, history, era)
            moved = seen.leader_epoch == s.leader_epoch and s.high_watermark > seen.high_watermark
            if moved:
                require(s.in_sync >= s.required, "V13", "committed by too few: {}", s)
                for member, end in s.isr_ends:
                    words = "HW is above the end {} of {}: {}"
                    require(s.high_watermark <= end, "V13", words, end, member, s)
        if s.life != seen.life:
            seen.found_watermark = s.high_watermark
        seen.life, seen.leader_epoch = s.life, s.leader_epoch
        seen.high_watermark = s.high_watermark
        if not s.current or s.leader_epoch == NONE:
            return 0, 0
        upto = s.high_watermark
        if not s.leads and history.cut_epoch != NONE:
            # Its HW may come from a leader before the cut.  That holds in later epochs, too: a
            # broker that dies while it begins its log again finds its old log and HW, and the new
            # leader's log may have passed that HW since.
            if s.high_watermark == seen.found_watermark:
                return 0, 0
            upto = min(upto, history.led_end)
        return max(seen.compared, s.local_log_start), upto

    def _begun_log(self, s: ReplicaSample, seen: _Replica) -> None:
        """Expect the old log or none if the process died while it began its log again."""
        if seen.begun is None:
            return
        life, offset = seen.begun
        if s.life != life:
            seen.compared = 0
        if s.life != life or s.local_log_start >= offset:
            seen.begun = None

    def _check_leader(self, s: ReplicaSample, history: _History, era: int) -> None:
        end, history.led_end = history.log.end, s.log_end
        if s.log_end >= end:
            return
        words = "the leader lacks what was committed up to {}: {}"
        require(era > history.era, "V14", words, end, s)
        history.log.cut(s.log_end)
        history.cut_epoch = s.leader_epoch
        history.era += 1  # each ended era may remove a suffix once

    def committed(self, key: PartitionKey, broker: NodeId, marks: Sequence[Mark]) -> None:
        """Compare the batches of the range that `check` returned with what was committed."""
        era = self._oracle.era(*key)
        history, seen = self._histories[key], self._replicas[key, broker]
        for mark in marks:
            known = history.log.differs(mark)
            if known is not None:
                # A leader that was elected with less than was committed may cost more: it may have
                # a batch of an earlier epoch, uncommitted then, where a later batch was committed.
                also = seen.leader_epoch == history.cut_epoch != history.parted_epoch
                words = "{}: broker {} has {}, {} was committed"
                require(era > history.era or also, "V12", words, key, broker, mark, known)
                history.log.cut(mark.base)
                if also:
                    history.parted_epoch = history.cut_epoch
                else:
                    history.era += 1
            history.log.extend(mark)
            seen.compared = max(seen.compared, mark.next)

    def skip(self, key: PartitionKey, broker: NodeId, to: Offset) -> Offset:
        """Compare no batch of the replica below `to`, up to which a replica is cleaned."""
        seen = self._replicas[key, broker]
        seen.compared = max(seen.compared, to)
        return to

    def given_up(self, broker: NodeId, key: PartitionKey) -> None:
        """Compare the whole replica again: the leader makes it begin its log again.

        The broker may die on the way and find its old log again.
        """
        seen = self._replicas.get((key, broker))
        if seen is not None:
            seen.compared = 0

    def begun_again(self, broker: NodeId, key: PartitionKey, offset: Offset) -> None:
        """Note that a replica begins its log again at this offset, as its leader tells it (R5)."""
        seen = self._replicas.get((key, broker))
        if seen is not None:
            seen.begun = seen.life, offset

    def forget(self, broker: NodeId) -> None:
        """Forget the replicas of a broker whose disk is lost."""
        for places in (self._replicas, self._moved):
            for place in [place for place in places if place[1] == broker]:
                del places[place]

    def moved_away(self, broker: NodeId, key: PartitionKey) -> None:
        """Forget a replica that moved away.  If it is one again before its broker has removed the
        log, it has the old log, and the eras that ended meanwhile may shorten it.
        """
        gone = self._replicas.pop((key, broker), None)
        if gone is not None:
            self._moved[key, broker] = gone.era
