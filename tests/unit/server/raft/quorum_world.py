"""Some nodes of a metadata quorum, their disks and the network between them, all from one seed.

The world performs what a node's machine requests after drawn delays.  A write takes effect as a
whole, or not at all if the power is lost before.  The judge knows every committed record and checks
the invariants after every event.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pk.effects import Effect, Publish, Respond, Send, SetTimer, Write
from pk.errors import PkError
from pk.log.epochs import LeaderEpochs
from pk.server.raft import messages as say
from pk.server.raft.machine import Quorum, Role
from pk.server.raft.messages import (
    LogState,
    Vote,
    Voter,
    VotersAt,
)
from pk.server.raft.snapshot_id import SnapshotId
from pk.server.raft.timing import Timing
from pk.types import NONE


class Entry(NamedTuple):
    epoch: int
    value: Any  #: a tuple of voters is a voters record


EMPTY = SnapshotId(0, 0)


@dataclass
class Disk:
    """The data that survive a power loss."""

    bootstrap: tuple[Voter, ...]
    vote: Vote = field(default_factory=Vote)
    base: SnapshotId = EMPTY
    base_voters: tuple[Voter, ...] = ()
    entries: list[Entry] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.base.end + len(self.entries)

    def state(self) -> LogState:
        epochs = LeaderEpochs()
        voters = [VotersAt(self.base.end - 1, self.base_voters or self.bootstrap)]
        for at, entry in enumerate(self.entries, self.base.end):
            epochs.assign(entry.epoch, at)
            if isinstance(entry.value, tuple):
                voters.append(VotersAt(at, entry.value))
        snapshot = self.base if self.base.end else None
        return LogState(self.end, epochs.entries, tuple(voters), self.base, snapshot)

    def cut_start(self, to: int) -> None:
        """Make a snapshot of everything below `to`, and cut the log there."""
        if not self.base.end < to <= self.end:
            return
        gone = self.entries[: to - self.base.end]
        for entry in gone:
            if isinstance(entry.value, tuple):
                self.base_voters = entry.value
        self.entries = self.entries[len(gone) :]
        self.base = SnapshotId(to, gone[-1].epoch)


class Node:
    """A process: a machine, its timers, its pending writes."""

    def __init__(self, world: World, me: Voter, disk: Disk) -> None:
        self.world, self.me, self.disk = world, me, disk
        self.machine = Quorum(me, world.timing, random.Random(world.rng.random()))
        self.timers: dict[str, int] = {}
        self.writes: list[Write] = []
        self.busy = False
        self.live = True
        self.committed = 0

    def step(self, event: say.RaftEvent) -> None:
        if self.live:
            before = self.machine.high_watermark
            effects = self.machine.step(event, self.world.now)
            assert self.machine.high_watermark >= before, "the watermark moved back"
            self.perform(effects)

    def perform(self, effects: Any) -> None:
        for effect in effects:
            self._one(effect)

    def _one(self, effect: Effect) -> None:
        world = self.world
        if isinstance(effect, Write):
            self.writes.append(effect)
            self._write_on()
        elif isinstance(effect, Send):
            world.send(self, effect.peer, effect.message)
        elif isinstance(effect, Respond):
            if callable(effect.request):
                effect.request(effect.reply)
        elif isinstance(effect, SetTimer):
            self.timers.pop(effect.key, None)
            if effect.at_ms is not None:
                self.timers[effect.key] = effect.at_ms
                world.at(effect.at_ms, lambda: self._fire(effect.key, effect.at_ms))
        elif isinstance(effect, Publish):
            if effect.name == say.SELF:
                self.step(effect.value)
            elif effect.name == say.HIGH_WATERMARK:
                world.judge.committed(self, effect.value)
            elif effect.value.start != NONE:
                world.judge.leads(self, effect.value)

    def _fire(self, key: str, at_ms: int | None) -> None:
        if self.live and self.timers.get(key) == at_ms:
            del self.timers[key]
            self.step(say.TimerFired(key))

    def _write_on(self) -> None:
        if self.writes and not self.busy:
            self.busy = True
            write = self.writes[0]
            self.world.after(
                self.world.rng.randrange(1, self.world.write_ms), lambda: self._wrote(write)
            )

    def _wrote(self, write: Write) -> None:
        if not self.live:
            return
        self.writes.pop(0)
        self.busy = False
        for op in write.ops:
            self._do(op)
        self.perform(write.then)
        self._write_on()

    def _do(self, op: say.Op) -> None:
        disk = self.disk
        if isinstance(op, say.SaveVote):
            assert op.vote.epoch >= disk.vote.epoch
            same = op.vote.epoch == disk.vote.epoch and disk.vote.candidate is not None
            assert not same or op.vote == disk.vote, "two votes in one epoch"
            disk.vote = op.vote
            return
        job = getattr(op, "job", 0)
        if isinstance(op, say.BeginEpoch | say.AppendVoters):
            if self.machine.role is Role.LEADER and self.machine.epoch == op.epoch:
                disk.entries.append(Entry(op.epoch, op.voters))
        elif isinstance(op, say.AppendFetched):
            assert op.reply.offset == disk.end, "a gap"
            assert all(entry.epoch <= op.reply.epoch for entry in op.reply.payload)
            disk.entries += op.reply.payload
        elif isinstance(op, say.TruncateTo):
            assert op.end >= disk.base.end
            del disk.entries[op.end - disk.base.end :]
        elif isinstance(op, say.LoadSnapshot):
            self.world.load(self, op)
            return
        self.step(say.Synced(disk.state(), job))

    def append(self, value: Any) -> None:
        """Append as the controller does: decided at once, written after the waiting writes."""
        epoch = self.machine.epoch

        def write() -> None:
            leads = self.machine.role is Role.LEADER and self.machine.epoch == epoch
            begun = self.disk.state().last_epoch == epoch
            if self.live and leads and begun:
                self.disk.entries.append(Entry(epoch, value))
                self.step(say.Synced(self.disk.state(), 0))

        self.world.after(self.world.rng.randrange(1, self.world.write_ms), write)


class Judge:
    """Checks what must hold after every event."""

    def __init__(self) -> None:
        self.leaders: dict[int, Voter] = {}
        self.truth: list[Entry] = []
        self.counts: Counter[str] = Counter()

    def leads(self, node: Node, leadership: say.Leadership) -> None:
        known = self.leaders.setdefault(leadership.epoch, node.me)
        assert known == node.me, f"epoch {leadership.epoch} has two leaders"
        assert node.disk.end >= len(self.truth), "a leader without committed records"
        self._same(node, len(self.truth))
        self.counts["elections"] += 1

    def committed(self, node: Node, offset: int) -> None:
        assert offset <= node.disk.end
        node.committed = offset
        at = len(self.truth)
        if offset > at:
            base = node.disk.base.end
            assert base <= at
            self.truth += node.disk.entries[at - base : offset - base]
            self.counts["committed"] += offset - at
        self._same(node, offset)

    def _same(self, node: Node, upto: int) -> None:
        base = node.disk.base.end
        assert node.disk.entries[: max(0, upto - base)] == self.truth[base:upto]


FAULTS = (
    "off", "on", "bounce", "bounce", "cut", "one way", "mend", "loss", "snapshot", "resign",
    "voters", "voters",
)  # fmt: skip


class World:
    """Virtual time, and a network that delays, loses and cuts messages."""

    def __init__(self, seed: int, voters: int, *, timing: Timing | None = None) -> None:
        self.rng = random.Random(seed)
        hasty = Timing(election_ms=100, fetch_ms=150, wait_ms=30, again_ms=5)
        self.timing = timing or self.rng.choice([Timing(), hasty, hasty])
        self.now = 0
        self.judge = Judge()
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self.write_ms = self.rng.choice([3, 20, 200])
        self.delay_ms = self.rng.choice([2, 20, 300])
        self.loss = 0.0
        self.kinds = self.rng.sample(FAULTS, self.rng.randrange(3, len(FAULTS) + 1))
        self.cut: set[tuple[Voter, Voter]] = set()
        self.bootstrap = tuple(Voter(n, f"d{n}") for n in range(1, voters + 1))
        self.nodes: dict[Voter, Node] = {}
        for voter in self.bootstrap:
            self.boot(voter, Disk(self.bootstrap))

    # -- time --------------------------------------------------------------------------------------

    def at(self, at_ms: int, work: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self.events, (max(at_ms, self.now), self._number, work))

    def after(self, wait_ms: int, work: Callable[[], None]) -> None:
        self.at(self.now + wait_ms, work)

    def run(self, until_ms: int) -> None:
        while self.events and self.events[0][0] <= until_ms:
            self.now, _, work = heapq.heappop(self.events)
            work()
        self.now = until_ms

    # -- nodes -------------------------------------------------------------------------------------

    def boot(self, voter: Voter, disk: Disk) -> Node:
        node = self.nodes[voter] = Node(self, voter, disk)
        node.step(say.Started(disk.vote, disk.state()))
        return node

    def power_off(self, voter: Voter) -> None:
        self.nodes[voter].live = False
        self.judge.counts["power losses"] += 1

    def power_on(self, voter: Voter) -> None:
        if self.nodes[voter].live:
            return
        self.boot(voter, self.nodes[voter].disk)

    def leaders(self) -> list[Node]:
        return [n for n in self.nodes.values() if n.live and n.machine.role is Role.LEADER]

    def load(self, node: Node, op: say.LoadSnapshot) -> None:
        """Do as the shell does: fetch the snapshot, and report the end whatever the result is."""

        def arrive() -> None:
            if not node.live:
                return
            leader = self.nodes[op.leader]
            reached = leader.live and (op.leader, node.me) not in self.cut
            if reached and leader.disk.base.end >= op.snapshot.end and leader.disk.base.end:
                theirs, disk = leader.disk, node.disk
                if theirs.base.end > node.machine.high_watermark:
                    disk.base, disk.entries = theirs.base, []
                    disk.base_voters = theirs.base_voters or theirs.bootstrap
                    self.judge.counts["snapshots loaded"] += 1
            node.step(say.Synced(node.disk.state(), op.job))

        self.after(self.rng.randrange(1, 2 * self.delay_ms), arrive)

    # -- network -----------------------------------------------------------------------------------

    def send(self, source: Node, to: Voter, message: Any) -> None:
        rng = self.rng
        for _ in range(2 if rng.random() < 0.02 else 1):
            self.after(rng.randrange(1, self.delay_ms), lambda: self._arrive(source, to, message))

    def _lost(self, source: Voter, to: Voter) -> bool:
        return (source, to) in self.cut or self.rng.random() < self.loss

    def _arrive(self, source: Node, to: Voter, message: Any) -> None:
        target = self.nodes.get(to)
        if target is None or not target.live:
            source.step(say.Unreachable(to, refused=True))
            return
        if self._lost(source.me, to):
            self.after(200, lambda: source.step(say.Unreachable(to)))
            return

        def answer(reply: Any) -> None:
            if isinstance(reply, say.FetchReply) and reply.status is say.FetchStatus.DATA:
                reply = self._filled(target, reply)
                if reply is None:
                    return
            wait_ms = self.rng.randrange(1, self.delay_ms)
            if self._lost(to, source.me):
                self.after(200, lambda: source.step(say.Unreachable(to)))
            else:
                self.after(wait_ms, lambda: source.step(say.ReplyReceived(reply)))

        target.step(say.RequestReceived(answer, message))

    def _filled(self, leader: Node, reply: say.FetchReply) -> say.FetchReply | None:
        """Do as the shell does: read the range, if the machine still gives the same answer."""
        if not leader.live or leader.machine.epoch != reply.epoch:
            return None
        disk, most = leader.disk, self.rng.randrange(1, 20)
        if reply.offset < disk.base.end:
            return None
        end = min(reply.end, reply.offset + most, disk.end)
        part = disk.entries[reply.offset - disk.base.end : end - disk.base.end]
        return replace(reply, end=reply.offset + len(part), payload=tuple(part))

    # -- faults ------------------------------------------------------------------------------------

    def heal(self) -> None:
        self.cut.clear()
        self.loss = 0.0
        self.delay_ms, self.write_ms = min(self.delay_ms, 20), min(self.write_ms, 20)
        for voter, node in list(self.nodes.items()):
            if not node.live:
                self.power_on(voter)

    def fault(self) -> None:
        rng, names = self.rng, list(self.nodes)
        kind = rng.choice(self.kinds)
        one = rng.choice(names)
        if kind == "off" and self.nodes[one].live:
            self.power_off(one)
        elif kind == "on" and not self.nodes[one].live:
            self.power_on(one)
        elif kind == "bounce" and self.nodes[one].live:
            self.power_off(one)
            self.after(rng.randrange(1, 60), lambda: self.power_on(one))
        elif kind == "cut":
            self.cut |= {pair for other in names for pair in ((one, other), (other, one))}
            self.judge.counts["cuts"] += 1
        elif kind == "one way":
            self.cut.add((one, rng.choice(names)))
        elif kind == "mend":
            self.cut.clear()
        elif kind == "loss":
            self.loss = rng.choice([0.0, 0.05, 0.3])
        elif kind == "snapshot":
            node = self.nodes[one]
            if node.live:
                node.disk.cut_start(node.machine.high_watermark)
                node.step(say.Synced(node.disk.state(), 0))
        elif kind == "resign":
            self.nodes[one].step(say.Resign())
        elif kind == "voters":
            self.change_voters()

    def change_voters(self) -> None:
        for node in self.leaders():
            voters = node.machine.voters
            if len(voters) > 3 or (len(voters) == 3 and self.rng.random() < 0.5):
                wanted = tuple(v for v in voters if v != self.rng.choice(voters))
            else:
                absent = [name for name in self.nodes if name not in voters]
                if absent:
                    wanted = (*voters, self.rng.choice(absent))
                else:
                    new = Voter(len(self.nodes) + 1, f"d{len(self.nodes) + 1}")
                    self.boot(new, Disk(self.bootstrap))
                    wanted = (*voters, new)

            def done(reply: Any, wanted: tuple[Voter, ...] = wanted) -> None:
                if reply is None:
                    committed = [entry.value for entry in self.judge.truth]
                    assert wanted in committed, f"{wanted} confirmed and not committed"
                self.judge.counts[
                    "refused" if isinstance(reply, PkError) else "voters changed"
                ] += 1

            node.step(say.VotersChange(done, wanted))
