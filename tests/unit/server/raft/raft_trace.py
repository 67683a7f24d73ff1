"""Golden traces of the metadata quorum: a text file of commands, each with what it makes nodes do.

A trace file is a list of blocks.  A block is one or more commands, a line `----`, and the output
that the commands produced when the file was last written:

    add 1 2 3
    ----
    1 unattached@0 end=0 hw=0
    ...

`pytest --rewrite` writes the outputs again; a person reads the difference.  The trace drives the
production machine (`pk.server.raft.machine`) with a shell that does nothing by itself: messages,
writes and timers wait until a command lets them happen, so a trace shows one interleaving exactly.

Commands (node numbers; `a>b` is the queue of messages from a to b, requests and replies alike)
  add N               voters 1 to N with empty disks, all started
  cluster N           the same, and node 1 leads; only the status is printed
  observe N           one more node, which is not a voter, with the voters of node 1's log
  fire N KEY          the timer KEY (election, fetch, again, tick, waiting) of N fires
  deliver A>B ...     the oldest message of each queue arrives
  drop A>B ...        every message of the queues is lost
  unreachable A>B     A learns that B refused its message
  write N ...         the oldest write of each node is SYNCED
  append N VALUE      the leader N appends a record and syncs it
  snapshot N          N makes a snapshot of what it committed and cuts its log there
  voters N LIST       the leader N is asked for other voters
  resign N            N ends in order
  off N | on N        N loses its power; N starts again with what it had SYNCED
  wait MS             time passes; no timer fires
  stabilize [MUTE..]  messages and writes happen until none is left, except of the muted nodes
  status              every node's role, epoch, log end and high watermark
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

from pk.effects import Effect, Publish, Respond, Send, SetTimer, Write
from pk.errors import PkError
from pk.server.raft import messages as say
from pk.server.raft.machine import Quorum, Role
from pk.server.raft.messages import Voter
from pk.server.raft.timing import Timing
from tests.unit.server.raft.quorum_world import Disk, Entry

STEPS_MAX = 2_000


def blocks_of(text: str) -> list[tuple[list[str], list[str]]]:
    """Return the blocks of a trace file: (lines with commands and comments, lines of output)."""
    found = []
    for part in text.strip("\n").split("\n\n"):
        head, _, tail = part.partition("\n----")
        found.append((head.split("\n"), tail.strip("\n").split("\n") if tail.strip() else []))
    return found


def rewritten(text: str, trace: Any) -> str:
    """Return the trace with the outputs of the present machine."""
    parts = []
    for commands, _ in blocks_of(text):
        lines = [line for line in commands if line]
        if all(line.startswith("#") for line in lines):
            parts.append("\n".join(lines))
            continue
        trace.out = []
        for line in lines:
            if not line.startswith("#"):
                trace.command(line)
        parts.append("\n".join([*lines, "----", *(trace.out or ["ok"])]))
    return "\n\n".join(parts) + "\n"


class _Node:
    """One process: its machine, its disk, and its pending messages, writes and timers."""

    def __init__(self, me: Voter, disk: Disk) -> None:
        self.me, self.disk = me, disk
        self.machine = Quorum(me, Timing(), random.Random(me.node_id))
        self.writes: deque[Write] = deque()
        self.live = True


class Trace:
    """Performs commands and notes the answers of the machines."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.now = 0
        self.nodes: dict[int, _Node] = {}
        self.wires: dict[tuple[int, int], deque[tuple[str, Any]]] = {}

    # -- commands ----------------------------------------------------------------------------------

    def command(self, line: str) -> None:
        word, *args = line.split()
        getattr(self, f"_{word}")(*args)

    def _add(self, count: str) -> None:
        voters = tuple(Voter(number, f"d{number}") for number in range(1, int(count) + 1))
        for voter in voters:
            self._boot(voter, Disk(voters))

    def _cluster(self, count: str) -> None:
        out, self.out = self.out, []
        self._add(count)
        # a single voter becomes a candidate by itself
        if self.nodes[1].machine.role is not Role.CANDIDATE:
            self._fire("1", "election")
        self._stabilize()
        self.out = out
        self._status()

    def _observe(self, number: str) -> None:
        voter = Voter(int(number), f"d{number}")
        self._boot(voter, Disk(self.nodes[1].disk.bootstrap))

    def _boot(self, voter: Voter, disk: Disk) -> None:
        node = self.nodes[voter.node_id] = _Node(voter, disk)
        self._step(node, say.Started(disk.vote, disk.state()))

    def _fire(self, number: str, key: str) -> None:
        self._step(self.nodes[int(number)], say.TimerFired(key))

    def _deliver(self, *wires: str) -> None:
        for wire in wires:
            source, target = map(int, wire.split(">"))
            self._arrive(source, target)

    def _drop(self, *wires: str) -> None:
        for wire in wires:
            source, target = map(int, wire.split(">"))
            for _, message in self.wires.pop((source, target), ()):
                self.out.append(f"{source}>{target} lost: {_said(message)}")

    def _unreachable(self, wire: str) -> None:
        source, target = map(int, wire.split(">"))
        self.wires.pop((source, target), None)
        peer = self.nodes[target].me
        self._step(self.nodes[source], say.Unreachable(peer, refused=True))

    def _write(self, *numbers: str) -> None:
        for number in numbers:
            self._sync(self.nodes[int(number)])

    def _append(self, number: str, value: str) -> None:
        node = self.nodes[int(number)]
        assert node.machine.role is Role.LEADER, "only a leader appends"
        node.disk.entries.append(Entry(node.machine.epoch, value))
        self._step(node, say.Synced(node.disk.state(), 0))

    def _snapshot(self, number: str) -> None:
        node = self.nodes[int(number)]
        node.disk.cut_start(node.machine.high_watermark)
        self._step(node, say.Synced(node.disk.state(), 0))

    def _voters(self, number: str, wanted: str) -> None:
        voters = tuple(Voter(int(each), f"d{each}") for each in wanted.split(","))
        self._step(self.nodes[int(number)], say.VotersChange("change", voters))

    def _resign(self, number: str) -> None:
        self._step(self.nodes[int(number)], say.Resign())

    def _off(self, number: str) -> None:
        node = self.nodes[int(number)]
        node.live = False
        node.writes.clear()
        self.wires = {pair: wire for pair, wire in self.wires.items() if int(number) not in pair}

    def _on(self, number: str) -> None:
        node = self.nodes[int(number)]
        self._boot(node.me, node.disk)

    def _wait(self, wait_ms: str) -> None:
        self.now += int(wait_ms)

    def _stabilize(self, *muted: str) -> None:
        silent = {int(number) for number in muted}
        for _ in range(STEPS_MAX):
            nodes = (n for n in self.nodes.values() if n.writes and n.me.node_id not in silent)
            node = next(nodes, None)
            if node is not None:
                self._sync(node)
                continue
            wires = (w for w, queue in self.wires.items() if queue and not silent & set(w))
            wire = next(wires, None)
            if wire is None:
                break
            self._arrive(*wire)
        else:
            raise AssertionError("the nodes talk for ever")
        self._status()

    def _status(self) -> None:
        for number, node in self.nodes.items():
            machine = node.machine
            if node.live:
                leader = machine.leader.node_id if machine.leader else "-"
                self.out.append(
                    f"{number} {machine.role.value}@{machine.epoch} leader={leader} "
                    f"end={node.disk.end} hw={machine.high_watermark}"
                )
            else:
                self.out.append(f"{number} off")

    # -- the shell ---------------------------------------------------------------------------------

    def _step(self, node: _Node, event: say.RaftEvent) -> None:
        before = node.machine.role, node.machine.epoch
        effects = node.machine.step(event, self.now)
        role = node.machine.role, node.machine.epoch
        if role != before:
            self.out.append(f"{node.me.node_id} becomes {role[0].value}@{role[1]}")
        self._perform(node, effects)

    def _perform(self, node: _Node, effects: Any) -> None:
        for effect in effects:
            self._one(node, effect)

    def _one(self, node: _Node, effect: Effect) -> None:
        number = node.me.node_id
        if isinstance(effect, Write):
            node.writes.append(effect)
            for op in effect.ops:
                self.out.append(f"{number} asks to write {_op(op)}")
        elif isinstance(effect, Send):
            self._send(number, effect.peer.node_id, "ask", effect.message)
        elif isinstance(effect, Respond):
            if isinstance(effect.request, int):
                self._send(number, effect.request, "tell", effect.reply)
            else:
                refused = isinstance(effect.reply, PkError)
                self.out.append(f"{number} answers: {effect.reply if refused else 'done'}")
        elif isinstance(effect, SetTimer):
            pass  # timers fire by command; drawn waits would only hide what matters
        elif isinstance(effect, Publish):
            self._published(node, effect)

    def _published(self, node: _Node, effect: Publish) -> None:
        if effect.name == say.SELF:
            self._step(node, effect.value)
        elif effect.name == say.HIGH_WATERMARK:
            self.out.append(f"{node.me.node_id} high watermark {effect.value}")

    def _send(self, source: int, target: int, kind: str, message: Any) -> None:
        self.out.append(f"{source}>{target} {_said(message)}")
        self.wires.setdefault((source, target), deque()).append((kind, message))

    def _arrive(self, source: int, target: int) -> None:
        kind, message = self.wires[source, target].popleft()
        node = self.nodes[target]
        if not node.live:
            self.out.append(f"{source}>{target} lost: {_said(message)}")
            return
        if kind == "ask":
            self._step(node, say.RequestReceived(source, message))
        else:
            self._step(node, say.ReplyReceived(self._filled(self.nodes[source], message)))

    def _filled(self, leader: _Node, reply: Any) -> Any:
        """Do as the shell does: read the range that the machine names."""
        if not isinstance(reply, say.FetchReply) or reply.status is not say.FetchStatus.DATA:
            return reply
        first = reply.offset - leader.disk.base.end
        entries = leader.disk.entries[first : first + reply.end - reply.offset]
        return replace(reply, end=reply.offset + len(entries), payload=tuple(entries))

    def _sync(self, node: _Node) -> None:
        write = node.writes.popleft()
        for op in write.ops:
            self._do(node, op)
        self._perform(node, write.then)

    def _do(self, node: _Node, op: Any) -> None:
        disk = node.disk
        if isinstance(op, say.SaveVote):
            disk.vote = op.vote
            return
        if isinstance(op, say.BeginEpoch | say.AppendVoters):
            if node.machine.role is Role.LEADER and node.machine.epoch == op.epoch:
                disk.entries.append(Entry(op.epoch, op.voters))
        elif isinstance(op, say.AppendFetched):
            disk.entries += op.reply.payload
        elif isinstance(op, say.TruncateTo):
            del disk.entries[op.end - disk.base.end :]
        elif isinstance(op, say.LoadSnapshot):
            theirs = self.nodes[op.leader.node_id].disk
            disk.base, disk.entries = theirs.base, []
            disk.base_voters = theirs.base_voters or theirs.bootstrap
        self._step(node, say.Synced(disk.state(), getattr(op, "job", 0)))


def _said(message: Any) -> str:
    """Return a message in one line."""
    if isinstance(message, say.VoteRequest):
        kind = "PreVote" if message.pre_vote else "Vote"
        return f"{kind} epoch={message.epoch} last=({message.last_epoch}, {message.log_end})"
    if isinstance(message, say.VoteReply):
        kind = "PreVoteReply" if message.pre_vote else "VoteReply"
        return f"{kind} epoch={message.epoch} {'granted' if message.granted else 'refused'}"
    if isinstance(message, say.BeginQuorumEpoch):
        return f"BeginQuorumEpoch epoch={message.epoch}"
    if isinstance(message, say.EndQuorumEpoch):
        successors = ",".join(str(each.node_id) for each in message.successors)
        return f"EndQuorumEpoch epoch={message.epoch} successors={successors}"
    if isinstance(message, say.Fetch):
        return f"Fetch epoch={message.epoch} at=({message.last_epoch}, {message.offset})"
    if isinstance(message, say.QuorumEpochReply):
        return f"Ack epoch={message.epoch}"
    assert isinstance(message, say.FetchReply)
    base = f"FetchReply epoch={message.epoch} {message.status.value}"
    if message.status is say.FetchStatus.DATA:
        return f"{base} [{message.offset}, {message.end}) hw={message.high_watermark}"
    if message.diverging is not None:
        return f"{base} epoch {message.diverging.epoch} ended at {message.diverging.end_offset}"
    if message.snapshot is not None:
        return f"{base} end={message.snapshot.end} epoch={message.snapshot.epoch}"
    return f"{base} leader={message.leader.node_id if message.leader else '-'}"


def _op(op: Any) -> str:
    """Return a write in one line."""
    if isinstance(op, say.SaveVote):
        candidate = op.vote.candidate
        return f"vote epoch={op.vote.epoch} for={candidate.node_id if candidate else '-'}"
    if isinstance(op, say.BeginEpoch):
        return f"LeaderChange epoch={op.epoch}"
    if isinstance(op, say.AppendVoters):
        return f"Voters {','.join(str(each.node_id) for each in op.voters)}"
    if isinstance(op, say.AppendFetched):
        return f"[{op.reply.offset}, {op.reply.end})"
    if isinstance(op, say.TruncateTo):
        return f"truncate to {op.end}"
    if isinstance(op, say.LoadSnapshot):
        return f"snapshot end={op.snapshot.end}"
    return "nothing more of its epoch"


def read(path: Path) -> str:
    """Return the text of a trace file."""
    return path.read_text(encoding="utf-8")
