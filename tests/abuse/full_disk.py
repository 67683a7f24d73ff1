"""Full disks (rules L16, L2): three real nodes, each on a file system of its own, which is filled.

One producer sends to every partition all the time: topic `t` has three replicas of each partition,
topic `alone` has one.  The disk of one node is filled.  What must hold:

  at the reserve    the leaders on that node hand over before the disk is full
  full              the same if not one byte is left, although the node continues as a follower
  controller        if the active controller has not one byte left, another node becomes it
  others            healthy partitions do not wait, including those of the producer whose partition
                    on the full node is refused
  no ping-pong      a second node fills up: no partition moves twice within a minute; with room
                    again the preferred leaders come back, once (long form)
  killed while full the node starts again: records that only it has are read, produce to it is
  refused with StorageFull, and accepted again once there is room
"""

from __future__ import annotations

import itertools
import sys
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "fixtures"))

from real_cluster import close, until
from small_disks import MIB, CannotMount, SmallDisk, small_disk
from verdicts import Verdict

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedCluster
from pk.client.admin import NewTopic
from pk.clock import block_s, monotonic_s

#: L16: from the first refusal to the next acknowledgement.
GOAL_S = 2.0
DWELL_S = 60.0
DISK_MIB = 96
RESERVE = 8 * MIB
SETTINGS: dict[str, Any] = {
    "disk_reserve_bytes": RESERVE,
    "default_replication_factor": 3,
    "min_insync_replicas": 2,
    "segment_bytes": 4 * MIB,
}
VALUE = bytes(500)
TURN_S = 0.01
Place = tuple[str, int]


class Load:
    """One producer that sends a record to each partition every turn, and the time of each
    acknowledgement.
    """

    def __init__(self, bootstrap: str, places: list[Place]) -> None:
        self._producer = Producer(bootstrap, linger_ms=1, delivery_timeout_ms=600_000)
        self._places = places
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.sent = dict.fromkeys(places, 0)
        self.acknowledged: dict[Place, list[float]] = {place: [monotonic_s()] for place in places}
        self.failed: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._producer.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            for place in self._places:
                self._send(place)
            block_s(TURN_S)

    def _send(self, place: Place) -> None:
        def delivered(_where: Any, error: Any) -> None:
            with self._lock:
                if error is None:
                    self.acknowledged[place].append(monotonic_s())
                else:
                    self.failed.append(f"{place}: {error!r}")

        self.sent[place] += 1
        self._producer.send(place[0], VALUE, partition=place[1], on_delivery=delivered)

    def count(self, place: Place) -> int:
        with self._lock:
            return len(self.acknowledged[place])

    def served(self, places: list[Place]) -> None:
        """Wait until each partition has acknowledged a further record."""
        before = {place: self.count(place) for place in places}
        for place in places:
            until(lambda place=place: self.count(place) > before[place] + 5, f"{place} is served")

    def gap_s(self, places: list[Place], since: float) -> float:
        """Return the longest time without an acknowledgement on any of them, up to now."""
        longest, now = 0.0, monotonic_s()
        with self._lock:
            for place in places:
                times = [at for at in self.acknowledged[place] if at >= since]
                marks = [since, *times, now]
                longest = max(longest, *(b - a for a, b in itertools.pairwise(marks)))
        return longest


@dataclass
class Facts:
    """The observations of a story; times are reported and not judged."""

    moved: dict[str, bool] = field(default_factory=dict)
    gap_s: dict[str, float] = field(default_factory=dict)
    others_gap_s: dict[str, float] = field(default_factory=dict)
    moves: dict[int, int] = field(default_factory=dict)  #: of each partition of `t`, in all
    controller_moved_s: float | None = None
    came_back: bool = False
    refused_waited: bool = False
    read_while_full: int = 0
    refusal: str = ""
    resumed: bool = False
    lost: int = 0
    failed: list[str] = field(default_factory=list)
    bugs: list[str] = field(default_factory=list)


class Story:
    """Three nodes on three small disks."""

    def __init__(self, work: Path, stack: ExitStack) -> None:
        self.facts = Facts()
        self.disks: dict[int, SmallDisk] = {}
        self.cluster = EmbeddedCluster(work, settings=SETTINGS)
        for node in self.cluster.nodes.values():
            disk = stack.enter_context(small_disk(node.data, DISK_MIB))
            self.disks[node.node_id] = disk
        stack.callback(close, self.cluster)
        self.cluster.start()
        self.admin = stack.enter_context(AdminClient(self.cluster.address))
        for topic in (NewTopic("t", 3, {}, 3), NewTopic("alone", 3, {"min_insync_replicas": 1}, 1)):
            (made,) = self.admin.create_topics([topic], timeout_s=60)
            assert made.error is None, made.error
        self.all = [(topic, number) for topic in ("t", "alone") for number in range(3)]

    def described(self, topic: str) -> dict[int, Any]:
        found = self.admin.describe_topics([topic], timeout_s=30)
        return {each.partition: each for each in found}

    def led_by(self, topic: str, node: int) -> list[Place]:
        return [(topic, n) for n, each in self.described(topic).items() if each.leader == node]

    def full(self, name: str, victim: int, load: Load, leave: int) -> None:
        """Fill the disk of `victim`, and check that other nodes lead its partitions of `t` then."""
        mine, alone = self.led_by("t", victim), self.led_by("alone", victim)
        others = [place for place in self.all if place not in (*mine, *alone)]
        load.served(self.all)
        since = monotonic_s()
        self.disks[victim].fill(leave)
        until(lambda: not self.led_by("t", victim), "leadership moves")
        load.served(mine)
        load.served(others)
        if leave == 0:
            block_s(GOAL_S)  # a follower without a byte must not hold anybody back later either
            load.served([*mine, *others])
        self.facts.moved[name] = bool(mine)
        self.facts.gap_s[name] = load.gap_s(mine, since)
        self.facts.others_gap_s[name] = load.gap_s(others, since)
        stuck = [load.count(place) for place in alone]
        load.served(others)
        self.facts.refused_waited = bool(alone) and stuck == [load.count(p) for p in alone]

    def full_controller(self) -> None:
        """Fill the disk of the active controller again and again while metadata change."""
        active = self.admin.describe_cluster().controller_id
        disk, since, numbers = self.disks[active], monotonic_s(), itertools.count()

        def moved() -> bool:
            disk.fill()  # the first write that fails gives up the reserve of the metadata
            (made,) = self.admin.create_topics([NewTopic(f"t{next(numbers)}", 1, {}, 1)])
            assert made.error is None, made.error
            return self.admin.describe_cluster().controller_id != active

        until(moved, "another controller")
        self.facts.controller_moved_s = monotonic_s() - since
        disk.make_room()

    def epochs(self) -> dict[int, int]:
        return {n: each.leader_epoch for n, each in self.described("t").items()}


def tell(work: Path, short: bool) -> Facts:
    """Run the whole story.  Raises `CannotMount`."""
    with ExitStack() as stack:
        story = Story(work, stack)
        facts = story.facts
        victim = story.described("t")[0].replicas[0]
        until(lambda: story.led_by("t", victim), "the first replica leads")
        with Load(story.cluster.address, story.all) as load:
            epochs = story.epochs()
            story.full("at the reserve", victim, load, RESERVE // 2)
            if not short:
                _ping_pong(story, victim, load, epochs)
                story.full("full", victim, load, 0)
                story.disks[victim].make_room()
                until(lambda: story.led_by("t", victim), "the preferred leader comes back")
            # partitions that have just moved stay for a minute: choose a node that leads none of
            # them
            else:
                story.disks[victim].make_room()
                second = next(node for node in story.disks if len(story.led_by("t", node)) == 1)
                story.full("full", second, load, 0)
                story.disks[second].make_room()
            load.served(story.all)  # the refused partition, too
            story.full_controller()
            load.served(story.all)
            facts.resumed = True
            facts.failed = load.failed
        _killed(story, victim)
        _count(story, load)
        for node in story.cluster.nodes.values():
            facts.bugs += [line for line in node.log.read_text().splitlines() if "BUG" in line]
        return facts


def _ping_pong(story: Story, victim: int, load: Load, before: dict[int, int]) -> None:
    """Two disks fill up and are freed in turn; no partition moves twice within the minute."""
    other = next(node for node in story.disks if node != victim and story.led_by("t", node))
    began = monotonic_s()
    while monotonic_s() - began < DWELL_S / 2:
        story.disks[victim].make_room()
        story.disks[other].fill(RESERVE // 2)
        block_s(3.0)
        story.disks[other].make_room()
        story.disks[victim].fill(RESERVE // 2)
        block_s(3.0)
    story.disks[victim].make_room()
    after = story.epochs()
    story.facts.moves = {n: after[n] - before[n] for n in before}
    firsts = {n: each.replicas[0] for n, each in story.described("t").items()}
    until(
        lambda: {n: each.leader for n, each in story.described("t").items()} == firsts,
        "the preferred leaders come back",
    )
    story.facts.came_back = True
    block_s(5.0)
    load.served(story.all)
    settled = story.epochs()
    block_s(DWELL_S)  # so that the partitions may move again at once
    assert story.epochs() == settled, "nothing moves without a reason"


def _killed(story: Story, victim: int) -> None:
    """Kill the whole node with kill -9 while not one byte is free."""
    facts, node = story.facts, story.cluster.nodes[victim]
    (place,) = story.led_by("alone", victim)
    story.disks[victim].fill()
    node.kill()
    node.start()
    with Consumer(story.cluster.address) as consumer:
        where = TopicPartition(*place)
        consumer.assign([where])
        consumer.seek_to_beginning(where)
        until(lambda: _read(facts, consumer), "what the node has is read")
    with Producer(story.cluster.address, delivery_timeout_ms=3_000, request_timeout_ms=1_000,
                  linger_ms=0) as producer:  # fmt: skip
        try:
            producer.send(place[0], VALUE, partition=place[1]).result(30)
        except errors.PkError as refusal:
            facts.refusal = f"{type(refusal).__name__}: {refusal}"
    story.disks[victim].make_room()
    with Producer(story.cluster.address, linger_ms=0) as producer:
        producer.send(place[0], VALUE, partition=place[1]).result(60)


def _read(facts: Facts, consumer: Consumer) -> bool:
    facts.read_while_full += len(consumer.poll(1.0))
    return facts.read_while_full > 0


def _count(story: Story, load: Load) -> None:
    """Check that every acknowledged record is there: no partition has fewer than were
    acknowledged.
    """
    for topic, number in story.all:
        end = story.described(topic)[number].high_watermark
        story.facts.lost += max(0, len(load.acknowledged[topic, number]) - 1 - end)


def run(seed: int, work: Path, short: bool) -> list[Verdict]:
    """Run the story; see the module.  Nothing is drawn, so `seed` has no effect."""
    try:
        facts = tell(work, short)
    except CannotMount as why:
        return [Verdict("full disks", False, f"tmpfs cannot be mounted: {why}")]
    verdicts = []
    for name, gap_s in facts.gap_s.items():
        others_s = facts.others_gap_s[name]
        kept = facts.moved[name] and gap_s <= GOAL_S
        verdicts.append(Verdict(f"{name}: leadership moves", kept, f"{gap_s:.2f} s without acks"))
        verdicts.append(Verdict(f"{name}: others", others_s <= GOAL_S, f"{others_s:.2f} s"))
    moved_s = facts.controller_moved_s
    told = "never" if moved_s is None else f"after {moved_s:.2f} s"
    verdicts.append(Verdict("full: another controller", moved_s is not None, told))
    if not short:
        worst = max(facts.moves.values())
        told = f"{worst} moves a partition at most; came back: {facts.came_back}"
        verdicts.append(Verdict("no ping-pong", worst <= 1 and facts.came_back, told))
    restarted = facts.read_while_full > 0 and "free space" in facts.refusal + " no space"
    verdicts.append(Verdict("killed while full", restarted, facts.refusal[:160]))
    sound = not facts.failed and not facts.bugs and not facts.lost and facts.resumed
    figures = f"{len(facts.failed)} failed, {facts.lost} lost, {len(facts.bugs)} bugs"
    verdicts.append(Verdict("every record is stored", sound, figures))
    return verdicts
