"""What must always hold between machines, checked on plain values; nothing here knows how pk works
inside.

Checked
  V10  the metadata quorum: one leader an epoch, one vote an epoch and voter; a voter never goes
       back behind an epoch it voted or led in, nor a process's high watermark; what is committed
       is SYNCED on a majority and never changes (rule Q1)
  V11  equal records give equal images (rule Q4; compared by samples.py)
  V12  what was committed of a partition stands in every replica below its HW, batch by batch, for
       ever; only the end of an era takes a suffix
  V13  HW ≤ the end of every member of the committed ISR, and it stands still while there are fewer
       than min_insync_replicas (rules R1, R2)
  V14  a replica never cuts off what was committed by its own knowledge (rule R4), and a leader
       has all that was
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
    """One batch, recognisable."""

    base: Offset
    next: Offset
    epoch: int
    crc: int


class Marks:
    """Committed batches of one log in order; equal for whoever has them."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    @property
    def end(self) -> Offset:
        return self.marks[-1].next if self.marks else 0

    def differs(self, mark: Mark) -> Mark | None:
        """The known batch that `mark` contradicts."""
        at = bisect_left(self.marks, mark.base, key=lambda known: known.base)
        if at > 0 and self.marks[at - 1].next > mark.base:
            return self.marks[at - 1]
        if at == len(self.marks):
            return None
        known = self.marks[at]
        return known if known != mark and known.base < mark.next else None

    def extend(self, mark: Mark) -> None:
        """`mark` is committed; below the end it is known already."""
        if mark.base >= self.end:
            self.marks.append(mark)

    def cut(self, end: Offset) -> None:
        """Forget everything that reaches above `end`."""
        while self.marks and self.marks[-1].next > end:
            self.marks.pop()


# -- the metadata quorum ---------------------------------------------------------------------------


@dataclass(slots=True)
class QuorumSample:
    """One controller at one moment."""

    node: NodeId
    life: int  #: the how many-th process of this node
    leads: bool
    epoch: int
    high_watermark: Offset
    synced_end: Offset
    voters: tuple[NodeId, ...]
    granted: tuple[NodeId, ...]  #: who gave it a vote in this epoch


class QuorumCheck:
    """Checks votes, leaders and committed records of the metadata quorum (V10)."""

    def __init__(self) -> None:
        self.log = Marks()
        self.leaders: dict[int, NodeId] = {}
        self._votes: dict[tuple[int, NodeId], NodeId] = {}
        self._bound: dict[NodeId, int] = {}  # the last epoch a voter acted in
        self._last: dict[NodeId, QuorumSample] = {}
        self._lost: dict[NodeId, Offset] = {}  # what a voter had confirmed whose disk is gone
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
        """Its disk is gone: what has its id from now on is another voter (rule Q1).  A leader that
        has not heard of it counts what it confirmed before.
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
        """What a controller has committed; returns what is new to everybody."""
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
    """One replica at one moment."""

    key: PartitionKey
    topic: str
    broker: NodeId
    life: int  #: the how many-th process of the broker
    leader_epoch: int  #: that it leads or follows; NONE = neither
    leads: bool
    current: bool  #: no later epoch is committed
    high_watermark: Offset
    log_start: Offset
    local_log_start: Offset
    log_end: Offset
    in_sync: int  #: members of the ISR as the leader knows it
    required: int  #: that many must be in sync for anything to be committed
    hit: bool  #: it lost data, and is not in sync again
    #: (member of the committed ISR, end of its log), those that were hit left out
    isr_ends: tuple[tuple[NodeId, Offset], ...] = ()


@dataclass(slots=True)
class _Replica:
    """What was seen of one replica."""

    life: int
    era: int
    compared: Offset = 0  #: everything local below it is as committed
    high_watermark: Offset = NONE
    leader_epoch: int = NONE


@dataclass(slots=True)
class _History:
    era: int
    log: Marks = field(default_factory=Marks)
    cut_epoch: int = NONE  #: of the leader that ended it last with less
    led_end: Offset = 0  #: of the leader's log, when it was last seen
    parted_epoch: int = NONE  #: in which a leader that ended it parts from it further down, too


class ReplicaCheck:
    """Checks every replica against what was committed of its partition (V12 to V14)."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._replicas: dict[tuple[PartitionKey, NodeId], _Replica] = {}
        self._histories: dict[PartitionKey, _History] = {}

    def check(self, s: ReplicaSample) -> tuple[Offset, Offset]:
        """Look at a sample; the range of the replica's log that `committed` wants to see."""
        era = self._oracle.era(*s.key)
        history = self._histories.get(s.key)
        if history is None:
            history = self._histories[s.key] = _History(era)
        seen = self._replicas.get((s.key, s.broker))
        if seen is None:
            seen = self._replicas[s.key, s.broker] = _Replica(s.life, era)
        if s.log_end < seen.compared:
            words = "cut below what was committed, {}: {}"
            require(s.hit or era > seen.era, "V14", words, seen.compared, s)
            seen.era += not s.hit  # each era that ended may cost a replica a suffix once
            seen.compared = s.log_end
        if s.leads and s.current:
            self._check_leader(s, history, era)
            moved = seen.leader_epoch == s.leader_epoch and s.high_watermark > seen.high_watermark
            if moved:
                require(s.in_sync >= s.required, "V13", "committed by too few: {}", s)
                for member, end in s.isr_ends:
                    words = "HW is above the end {} of {}: {}"
                    require(s.high_watermark <= end, "V13", words, end, member, s)
        seen.life, seen.leader_epoch = s.life, s.leader_epoch
        seen.high_watermark = s.high_watermark
        if not s.current or s.leader_epoch == NONE:
            return 0, 0
        upto = s.high_watermark
        if not s.leads and s.leader_epoch <= history.cut_epoch:
            upto = min(upto, history.led_end)  # above it is what an earlier leader told
        return max(seen.compared, s.local_log_start), upto

    def _check_leader(self, s: ReplicaSample, history: _History, era: int) -> None:
        end, history.led_end = history.log.end, s.log_end
        if s.log_end >= end:
            return
        words = "the leader lacks what was committed up to {}: {}"
        require(era > history.era, "V14", words, end, s)
        history.log.cut(s.log_end)
        history.cut_epoch = s.leader_epoch
        history.era += 1  # each era that ended may cost a suffix once

    def committed(self, key: PartitionKey, broker: NodeId, marks: Sequence[Mark]) -> None:
        """The batches of the range that `check` asked for."""
        era = self._oracle.era(*key)
        history, seen = self._histories[key], self._replicas[key, broker]
        for mark in marks:
            known = history.log.differs(mark)
            if known is not None:
                # An election that ended it with less may cost more: what that leader has of an
                # epoch before, uncommitted then, stands where a later one was committed.
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

    def given_up(self, broker: NodeId, key: PartitionKey) -> None:
        """What it has goes on its leader's word; it dies on the way and may find it all again."""
        seen = self._replicas.get((key, broker))
        if seen is not None:
            seen.compared = 0

    def forget(self, broker: NodeId, key: PartitionKey | None = None) -> None:
        """Its disk is gone, or its replica of one partition was moved away."""
        for place in list(self._replicas):
            if place[1] == broker and key in (None, place[0]):
                del self._replicas[place]
