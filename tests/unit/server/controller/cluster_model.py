"""A whole controller and brokers that lag behind it.  Topics are created, grow and are deleted, and
other commands run between the steps of decisions that take several steps.

Brokers lead with the production `Leader` and keep what a real log may keep: a process death loses
nothing, a power loss loses a part, and a missing directory loses everything in it.  `Model.trace`
records a history, and its seed repeats it.  The model asserts what must hold, during the run and in
`heal`.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pk import errors
from pk.server.controller import commands as c
from pk.server.controller.batched_decision import More
from pk.server.controller.machine import Controller
from pk.server.controller.reports import reported
from pk.server.metadata.image import MetadataImage, PartitionState
from pk.server.metadata.records import MetadataRecord
from pk.server.metadata.snapshot import rows_of
from pk.server.replica.leader import Leader
from pk.types import NONE, PartitionKey
from pk.wire import pk_pb2 as wire
from tests.unit.server.controller.controller_bench import NOW, Bench

LAG_MS = 50
MIN_ISR = "min_insync_replicas"
Record = tuple[int, int]  # (leader epoch, number)


@dataclass
class Part:
    """A replica: its log, on a directory of its broker."""

    directory: str
    log: list[Record] = field(default_factory=list)
    high_watermark: int = 0
    leader: Leader | None = None
    following: int = NONE
    position: int = 0


@dataclass
class Node:
    """A broker's disk, and its process while it lives."""

    number: int
    directories: list[str]
    parts: dict[PartitionKey, Part] = field(default_factory=dict)
    life: int = 0
    boot: int = 0
    made: int = 0
    clean: bool = False
    alive: bool = False
    registering: bool = False
    draining: bool = False
    may_stop: bool = False
    epoch: int = NONE
    previous: int = NONE
    at: int = 0
    image: MetadataImage = field(default_factory=MetadataImage)
    asked: list[PartitionKey] = field(default_factory=list)

    @property
    def incarnation(self) -> str:
        return f"i{self.number}.{self.life}"

    def joined(self) -> bool:
        me = self.image.brokers.get(self.number)
        return me is not None and me.incarnation_id == self.incarnation


def same(one: list[Record], other: list[Record]) -> int:
    """Return the records up to the point where two logs diverge."""
    found = 0
    while found < min(len(one), len(other)) and one[found] == other[found]:
        found += 1
    return found


class Model:
    """The controller, the brokers and what must hold; see the module."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench()
        self.now_ms = self.number = self.ids = 0
        self.committed: dict[PartitionKey, list[Record]] = {}
        self.since: dict[PartitionKey, list[int]] = {}  #: the epoch that committed each of them
        self.given_up: dict[PartitionKey, int] = {}  #: the newest unclean epoch that had a leader
        self.led: dict[tuple[PartitionKey, int], int] = {}
        self.states: dict[PartitionKey, PartitionState] = {}
        self.late: list[Callable[[], None]] = []  #: messages on their way
        self.todo: list[tuple[Any, Callable[[Any], None] | None]] = []  #: decisions half made
        self.trace: list[str] = []
        count = self.rng.choice([3, 4, 5])
        self.nodes = {n: Node(n, [f"d{n}.a", f"d{n}.b"]) for n in range(1, count + 1)}
        for n in self.nodes:
            self.start(n)
            self.flush()
        for n in self.nodes:
            self.follow(n)
            self.beat(n)
            self.flush()
        for name in ("t", "u"):
            self.create(name)

    @property
    def image(self) -> MetadataImage:
        return self.bench.image

    def say(self, *facts: object) -> None:
        self.trace.append(" ".join(map(str, facts)))

    # -- decisions, step by step -----------------------------------------------------------------

    def ask(self, command: Any, then: Callable[[Any], None] | None = None) -> None:
        """Run one step of a command now; the other steps run later."""
        self.todo.append((command, then))
        self.advance(len(self.todo) - 1)

    def advance(self, index: int) -> None:
        command, then = self.todo[index]
        try:
            decision = self.bench.machine.decide(command, NOW)
        except errors.PkError as refusal:
            self.say("refused", type(command).__name__, refusal.message)
            del self.todo[index]
            return
        for record in decision.records:
            self.bench.machine.apply(len(self.bench.log), record)
            self.bench.log.append(record)
            self.judge(record)
        self.image.check()
        if isinstance(decision.reply, More):
            assert decision.records
            return
        del self.todo[index]
        if then is not None:
            then(decision.reply)

    def flush(self) -> None:
        while self.todo:
            self.advance(0)

    def judge(self, record: MetadataRecord) -> None:
        """Check that some replica is known to hold the data; forget the brokers that are no longer
        needed.
        """
        self.say("  ", len(self.bench.log) - 1, str(record).replace("\n", " "))
        if record.WhichOneof("record") != "partition_change":
            return
        change = record.partition_change
        topic = self.image.topics[change.topic_id]
        state = topic.partitions[change.partition]
        assert state.isr or state.elr or state.last_known, state
        required = min(self.bench.rules.min_isr(self.image, topic.name), len(state.original))
        key = PartitionKey(change.topic_id, change.partition)
        before = self.states.get(key)
        self.states[key] = state
        if before is not None and set(before.replicas) - set(state.replicas):  # R8
            assert len(state.isr) >= min(required, len(before.isr)), (before, state)
        if len(state.isr) >= required:
            assert not state.elr, (state, required)
            assert not state.last_known, (state, required)

    def known(self) -> dict[int, Any]:
        return dict(self.bench.reports)

    def keys(self) -> list[PartitionKey]:
        return [PartitionKey(topic.topic_id, n) for topic, n, _ in self.image.partitions()]

    # -- a broker's life -------------------------------------------------------------------------

    def start(self, n: int) -> None:
        node = self.nodes[n]
        node.life += 1
        node.alive, node.draining, node.may_stop = True, False, False
        node.image, node.at, node.asked, node.epoch = MetadataImage(), 0, [], NONE
        for part in node.parts.values():
            part.leader, part.following = None, NONE
        self.register(n)

    def register(self, n: int) -> None:
        node = self.nodes[n]
        life, node.registering = node.life, True
        request = wire.RegisterBrokerRequest(
            broker_id=n, cluster_id="cluster", incarnation_id=node.incarnation,
            boot_id=f"b{n}.{node.boot}", directory_ids=node.directories, address=f"b{n}:1",
            clean_shutdown=node.clean, previous_broker_epoch=node.previous,
        )  # fmt: skip

        def registered(reply: wire.RegisterBrokerReply) -> None:
            if node.life == life and node.alive:
                node.registering, node.clean = False, True
                node.epoch = node.previous = reply.broker_epoch
                self.follow(n)

        self.ask(c.Register(request, False, self.known()), registered)

    def stop(self, n: int, how: str) -> None:
        """Stop a broker.  `how`: clean, crash, power, or dir (a directory is missing when it comes
        back).
        """
        node, rng = self.nodes[n], self.rng
        self.say("stop", n, how)
        node.alive = node.draining = node.registering = False
        self.todo = [  # its stream broke: no broker asks for the next step
            each for each in self.todo
            if not isinstance(each[0], c.Register | c.Heartbeat) or each[0].request.broker_id != n
        ]  # fmt: skip
        for part in node.parts.values():
            part.leader = None
            if how == "power":
                part.log = part.log[: rng.randint(0, len(part.log))]
                part.high_watermark = rng.randint(0, min(part.high_watermark, len(part.log)))
        node.boot += how == "power"
        node.clean = how == "clean"
        if how == "dir":
            node.made += 1
            gone, node.directories[0] = node.directories[0], f"d{n}.{node.made}"
            node.parts = {k: each for k, each in node.parts.items() if each.directory != gone}

    def follow(self, n: int, upto: int | None = None) -> None:
        """Apply records, or a snapshot, and react as they require."""
        node, log = self.nodes[n], self.bench.log
        upto = len(log) if upto is None else upto
        if upto == len(log) and self.rng.random() < 0.1:
            node.image, node.at = MetadataImage(), upto
            for offset, record in rows_of(self.image):
                node.image.apply(offset, record)
        while node.at < upto:
            node.image.apply(node.at, log[node.at])
            node.at += 1
        if node.joined():
            for key in list(node.parts):
                state = node.image.partition(key)
                if state is None or n not in state.replicas:
                    del node.parts[key]
            for topic, number, state in list(node.image.partitions_of(n)):
                self.settle(node, PartitionKey(topic.topic_id, number), topic.name, state)

    def settle(self, node: Node, key: PartitionKey, name: str, state: PartitionState) -> None:
        part = node.parts.get(key)
        if part is None:
            part = node.parts[key] = Part(self.rng.choice(node.directories))
        min_isr = int(node.image.topic_config(name)[MIN_ISR])
        led = part.leader is not None and part.leader.leader_epoch == state.leader_epoch
        if part.leader is not None and led:
            part.leader.on_config(min_isr, False)
            self.commit(key, part)
        if state.leader != node.number:
            part.leader = None
            if part.following != state.leader_epoch:
                part.following, part.position = state.leader_epoch, part.position + 1
            return
        part.following = NONE
        if part.leader is None or not led:
            self.take_office(node.number, key, part, state)
            part.leader = Leader(
                node_id=node.number, leader_epoch=state.leader_epoch,
                partition_epoch=state.partition_epoch, replicas=state.replicas, isr=state.isr,
                log_end=len(part.log), synced_end=len(part.log),
                high_watermark=part.high_watermark, min_insync_replicas=min_isr,
                flush_on_ack=False, now_ms=self.now_ms, adding=state.adding,
            )  # fmt: skip
        else:
            part.leader.on_isr_committed(
                state.isr, state.replicas, state.partition_epoch, self.now_ms, state.adding
            )
        self.commit(key, part)

    def take_office(self, n: int, key: PartitionKey, part: Part, state: PartitionState) -> None:
        """Check that an epoch has one leader, and that it holds every committed record, except
        those that an unclean leader lost.
        """
        assert self.led.setdefault((key, state.leader_epoch), n) == n, (key, state)
        committed = self.committed.get(key, [])
        if state.unclean_epoch > self.given_up.get(key, NONE):
            committed = self.committed[key] = committed[: same(committed, part.log)]
            del self.since.get(key, [])[len(committed) :]
            self.given_up[key] = state.unclean_epoch
        before = sum(epoch < state.leader_epoch for epoch in self.since.get(key, []))
        # a leader that reacts late need not have the records of later epochs
        earlier = committed[:before]
        assert part.log[: len(earlier)] == earlier, ("lost", n, key, state)

    def commit(self, key: PartitionKey, part: Part) -> None:
        leader = part.leader
        if leader is None:
            return
        part.high_watermark = leader.high_watermark
        state, known = self.image.partition(key), self.committed.get(key, [])
        newest = self.given_up.get(key, NONE) if state is None else state.unclean_epoch
        if leader.leader_epoch >= max(newest, self.given_up.get(key, NONE)):
            mine = part.log[: part.high_watermark]
            assert same(mine, known) == min(len(mine), len(known)), ("two histories", key)
            if len(mine) > len(known):
                self.committed[key] = mine
                since = self.since.setdefault(key, [])
                since += [leader.leader_epoch] * (len(mine) - len(since))

    def beat(self, n: int) -> None:
        node, me = self.nodes[n], self.image.brokers.get(n)
        under_way = (
            x for x, _ in self.todo if isinstance(x, c.Heartbeat) and x.request.broker_id == n
        )
        if me is None or me.broker_epoch != node.epoch or any(under_way):
            return
        request = wire.BrokerHeartbeatRequest(
            broker_id=n, broker_epoch=node.epoch, metadata_offset=node.at - 1,
            want_shutdown=node.draining,
        )  # fmt: skip
        for key in node.asked:
            state, part = node.image.partition(key), node.parts.get(key)
            if state is not None and state.leader == NONE and part is not None:
                request.positions.add(
                    topic_id=key.topic_id, partition=key.partition, log_end=len(part.log),
                    last_epoch=part.log[-1][0] if part.log else NONE,
                )  # fmt: skip
        leaderless = self.bench.machine.leaderless
        self.bench.reports[n] = reported(self.bench.reports.get(n), request, leaderless)
        retry = tuple(PartitionKey(each.topic_id, each.partition) for each in request.positions)
        life = node.life

        def answered(reply: wire.BrokerHeartbeatReply) -> None:
            if node.life == life:
                node.asked = [
                    PartitionKey(each.topic_id, each.partition) for each in reply.report_positions
                ]
                node.may_stop = reply.may_shut_down

        self.ask(c.Heartbeat(request, self.known(), retry), answered)

    # -- data ------------------------------------------------------------------------------------

    def produce(self) -> None:
        for node in self.nodes.values():
            for key, part in node.parts.items():
                if part.leader is not None and self.rng.random() < 0.6:
                    self.number += 1
                    part.log.append((part.leader.leader_epoch, self.number))
                    part.leader.on_local_end(len(part.log), len(part.log))
                    self.commit(key, part)

    def fetch(self, n: int) -> None:
        node = self.nodes[n]
        for key, part in node.parts.items() if node.joined() else ():
            state = node.image.partition(key)
            if state is not None and state.leader not in (NONE, n) and n in state.replicas:
                self.fetch_one(node, key, part, state)

    def fetch_one(self, node: Node, key: PartitionKey, part: Part, state: PartitionState) -> None:
        n, source = node.number, self.nodes[state.leader]
        theirs = source.parts.get(key)
        leader = None if theirs is None else theirs.leader
        if theirs is None or leader is None or leader.leader_epoch != state.leader_epoch:
            return
        if n not in leader.replicas:
            return
        common = same(part.log, theirs.log)
        if common < len(part.log):
            given_up = state.unclean_epoch > (part.log[part.high_watermark - 1][0])
            assert common >= part.high_watermark or given_up, ("R4", n, key, state)
            part.high_watermark = min(part.high_watermark, common)
        part.log = theirs.log[: common + self.rng.choice([0, 1, 2, 9])]
        end, epoch, position = len(part.log), node.epoch, part.position
        part.high_watermark = max(part.high_watermark, min(leader.high_watermark, end))

        def confirm() -> None:
            if theirs.leader is leader and leader.is_newest(n, epoch, position):
                try:
                    leader.on_follower_end(n, end, self.now_ms, epoch, 0)
                except errors.PkError:
                    return
                self.commit(key, theirs)

        self.send(confirm)

    def send(self, message: Callable[[], None]) -> None:
        if self.rng.random() < 0.75:
            message()
        else:
            self.late.append(message)

    def alter_isr(self, n: int) -> None:
        node = self.nodes[n]
        for key, part in node.parts.items():
            state = node.image.partition(key)
            if part.leader is not None and state is not None and not node.draining:
                self.alter_one(node, key, part.leader, state)

    def alter_one(
        self, node: Node, key: PartitionKey, leader: Leader, state: PartitionState
    ) -> None:
        brokers = node.image.brokers
        there = {m: brokers[m].broker_epoch for m in leader.replicas if node.image.available(m)}
        wanted = leader.wanted_isr(there, self.now_ms, LAG_MS)
        if wanted is None:
            return
        leader.on_isr_proposed(wanted)
        epochs = [node.epoch if m == node.number else leader.broker_epoch_of(m) for m in wanted]
        item = wire.AlterPartitionItem(
            topic_id=key.topic_id, partition=key.partition, leader_epoch=leader.leader_epoch,
            partition_epoch=leader.partition_epoch, new_isr=wanted, isr_broker_epochs=epochs,
            recovered=state.unclean,
        )  # fmt: skip
        request = wire.AlterPartitionRequest(
            broker_id=node.number, broker_epoch=node.epoch, items=[item]
        )

        def answered(reply: wire.AlterPartitionReply) -> None:
            refused = reply.results[0].error.code == errors.IneligibleReplica.code
            if refused and leader.partition_epoch == item.partition_epoch:
                leader.on_isr_refused(tuple(wanted))

        self.send(lambda: self.ask(c.AlterPartition(request, self.known()), answered))

    # -- people ----------------------------------------------------------------------------------

    def create(self, name: str) -> None:
        rng = self.rng
        self.ids += 1
        min_isr = rng.choice(["1", "2", "2", "3", ""])
        new = wire.NewTopic(
            name=name, partitions=rng.choice([1, 2, 3, 5]),
            replication_factor=rng.choice([1, 2, 3, 3]),
            configs={MIN_ISR: min_isr} if min_isr else {},
        )  # fmt: skip
        self.ask(c.CreateTopics(wire.CreateTopicsRequest(topics=[new]), (f"id{self.ids}",)))

    def grow(self, name: str) -> None:
        topic = self.image.topic(name)
        if topic is not None and len(topic.partitions) < 7:
            request = wire.CreatePartitionsRequest()
            request.topics.add(name=name, total_count=len(topic.partitions) + 1)
            self.ask(c.CreatePartitions(request))

    def reassign(self) -> None:
        request = wire.AlterReassignmentsRequest()
        for topic, number, state in self.image.partitions():
            if self.rng.random() < 0.6:
                continue
            cancel = bool(state.adding or state.removing) and self.rng.random() < 0.5
            count = self.rng.choice([1, 2, 3, 3])
            target = [] if cancel else self.rng.sample(list(self.nodes), count)
            request.reassignments.add(
                topic=topic.name, topic_id=topic.topic_id, partition=number, replicas=target,
                cancel=cancel,
            )  # fmt: skip
        self.ask(c.AlterReassignments(request, self.known()))

    def alter_min_isr(self) -> None:
        kind, name = self.rng.choice([("topic", "t"), ("topic", "u"), ("broker", "")])
        change = wire.ConfigChange(resource=wire.ConfigResource(type=kind, name=name))
        if self.rng.random() < 0.4:
            change.unset.append(MIN_ISR)
        else:
            change.set[MIN_ISR] = self.rng.choice("123")
        self.ask(c.AlterConfigs(wire.AlterConfigsRequest(changes=[change])))
        self.recover()

    def recover(self) -> None:
        self.ask(c.Recover(tuple(self.keys()), frozenset(), self.known()))

    def fail_over(self) -> None:
        """Another controller becomes active: decisions that were written stand, and half-made ones
        are dropped.
        """
        self.say("failover")
        machine = Controller(self.bench.rules)
        snapshot = self.rng.random() < 0.5
        for offset, record in rows_of(self.image) if snapshot else enumerate(self.bench.log):
            machine.apply(offset, record)
        self.bench.machine = machine
        self.bench.reports.clear()
        self.todo.clear()
        for node in self.nodes.values():
            node.registering = False
        self.recover()

    # -- histories -------------------------------------------------------------------------------

    def live(self, n: int) -> None:
        """Do a random step that a broker does by itself."""
        node, rng = self.nodes[n], self.rng
        what = rng.choice("ffffnnnaabbr")
        if not node.alive:
            if what in "bra":
                self.start(n)
        elif node.epoch == NONE:
            if not node.registering:
                self.register(n)
        elif what == "f":
            self.fetch(n)
        elif what == "n":
            self.follow(n, rng.randint(node.at, len(self.bench.log)))
        elif what == "a":
            self.alter_isr(n)
        elif node.draining and node.may_stop:
            self.stop(n, rng.choice(["clean", "clean", "crash"]))
        else:
            self.beat(n)

    def disturb(self, n: int) -> None:
        node, rng, broker = self.nodes[n], self.rng, self.image.brokers.get(n)
        what, name = rng.randrange(12), rng.choice("tu")
        if what <= 2 and broker is not None and (not node.alive or what == 0):
            self.ask(c.Fence(n, broker.broker_epoch, self.known()))
        elif what <= 3 and node.alive:
            self.stop(n, rng.choice(["crash", "crash", "crash", "power", "dir"]))
        elif what == 4:
            self.reassign()
        elif what == 5:
            self.alter_min_isr()
        elif what == 6 and node.alive:
            node.draining = True
        elif what == 7:
            self.fail_over()
        elif what == 8:
            request = wire.DeleteTopicsRequest(names=[name], purge_tier=rng.random() < 0.3)
            self.ask(c.DeleteTopics(request))
        elif what == 9:
            self.create(name)
        elif what == 10:
            self.grow(name)
        elif not node.alive:
            self.ask(c.UnregisterBroker(wire.UnregisterBrokerRequest(broker_id=n)))

    def step(self) -> None:
        rng = self.rng
        self.now_ms += 10
        n = rng.choice(list(self.nodes))
        if self.todo and rng.random() < 0.5:
            self.advance(rng.randrange(len(self.todo)))
        if self.late and rng.random() < 0.1:
            self.late.pop(rng.randrange(len(self.late)))()
        what = rng.random()
        if what < 0.12:
            self.produce()
        elif what < 0.85:
            self.live(n)
        else:
            self.disturb(n)

    def heal(self, rounds: int = 80) -> None:
        """Bring all brokers back: then every partition is led and in sync, and no reassignment
        continues.
        """
        self.say("heal")
        self.flush()
        for each in range(rounds):
            self.now_ms += 10
            for n, node in self.nodes.items():
                broker = self.image.brokers.get(n)
                if node.alive and broker is not None and broker.in_controlled_shutdown:
                    self.stop(n, "crash")
                node.draining = False
                if not node.alive:
                    self.start(n)
                elif node.epoch == NONE and not node.registering:
                    self.register(n)
                self.flush()
            for do in (self.follow, self.beat, self.follow, self.fetch, self.alter_isr):
                for n in self.nodes:
                    do(n)
                    self.flush()
            while self.late:
                self.late.pop(0)()
                self.flush()
            self.recover()
            self.flush()
            if each % 7 == 6:
                self.produce()
        for key in self.keys():
            state = self.image.partition(key)
            assert state is not None
            assert state.leader != NONE, (key, state)
            assert set(state.isr) == set(state.replicas), (key, state)
            assert not state.adding, (key, state)
            assert not state.removing, (key, state)
