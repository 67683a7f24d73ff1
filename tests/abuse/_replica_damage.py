"""Flipped bits in the log files of three replicating nodes (rule L9): a part of `log_damage`.

Node 1 leads.  Its followers or its tier process are stopped meanwhile, or killed.  The run flips
one bit in each of some batches of one replica: batches that the other replicas have fetched, and
batches that they have not.  What must hold:

  right     no consumer, no other replica's log and no row of the table ever has another value
  named     the broker says which offsets are damaged
  healed    if another replica is in sync, everything is read without an error, the three logs end
            up the same byte for byte, and the table has every row
  reported  if no other replica has the batches, a reader gets DataLoss for exactly the damaged
            batches, the followers and the table stop in front of them, and after `pk log repair`
            all three logs are the same
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from deltalake import DeltaTable

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fixtures"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "chaos"))  # its names come last

from real_cluster import close, run as pk, until  # noqa: I001
from replicas import compare
from verdicts import Verdict

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedCluster
from pk.clock import monotonic_s
from pk.log import batch as batches

PATIENCE_S = 90
TOPIC = "flights"
PLACE = TopicPartition(TOPIC, 0)
SERVER = {
    "auto_leader_rebalance_enable": False,
    "broker_heartbeat_interval_ms": 200,
    "broker_session_timeout_ms": 2_000,
    "replica_lag_time_max_ms": 1_500,
    "tier_retry_backoff_ms": 50,
}
TOPIC_SETTINGS = {
    "retention_ms": -1,
    "segment_bytes": 65_536,
    "min_insync_replicas": 1,
    "tier_max_lag_ms": 100,
    "file_delete_delay_ms": 0,
}


def _names(text: str, offset: int) -> bool:
    """Return whether the text names the batch's range, or its begin if the header does not state
    how far it reaches.
    """
    return f"[{offset}, " in text or f" offset {offset}:" in text


class Replicas:
    """Three nodes, a topic of one partition on all of them, and the acknowledged records."""

    def __init__(self, home: Path, rng: random.Random) -> None:
        home.mkdir(parents=True, exist_ok=True)
        (home / "tier").mkdir()
        self.rng = rng
        self.values: list[bytes] = []  #: by offset; one record a batch
        self.lost: set[int] = set()  #: offsets that an operator gave up
        tier = {"tier_url": (home / "tier").as_uri()}
        self.cluster = EmbeddedCluster(home, settings={**tier, **SERVER})
        self.nodes = self.cluster.nodes
        self.cluster.start()
        self.admin = AdminClient(self.cluster.address)
        self.admin.create_topic(TOPIC, 1, TOPIC_SETTINGS, replication_factor=3)

    def close(self) -> None:
        self.admin.close()
        close(self.cluster)

    # -- what it is brought to ---------------------------------------------------------------------

    def state(self) -> Any:
        (found,) = self.admin.describe_topics([TOPIC])
        return found

    def lead(self, node: int, *others: int) -> None:
        """Make the node lead with no batch of the log in memory, so that it reads files; all
        `others` are in sync.
        """
        others = others or tuple(each for each in self.nodes if each != node)
        self.forget(node)
        self.in_sync(node, *others)
        self.prefer(node)
        until(lambda: self.led_by(node), f"{node} leads")

    def forget(self, node: int) -> None:
        """Restart its broker, so that its memory has no batches."""
        broker = self.nodes[node].pids()["broker"]
        self.nodes[node].kill("broker")
        self.nodes[node].wait_restarted("broker", broker)

    def prefer(self, node: int) -> None:
        others = [each for each in self.nodes if each != node]
        self.admin.alter_partition_reassignments({PLACE: [node, *others]})

    def led_by(self, node: int) -> bool:
        self.admin.elect_leaders([PLACE])
        return bool(self.state().leader == node)

    def in_sync(self, *nodes: int) -> None:
        until(lambda: set(self.state().isr) == set(nodes), f"in sync: {nodes}")

    @contextmanager
    def stopped(self, role: str, *nodes: int) -> Iterator[None]:
        """Stop these processes (SIGSTOP) during the block."""
        pids = [self.nodes[node].pids()[role] for node in nodes]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def fill(self, count: int) -> range:
        """Produce `count` more records; return their offsets."""
        start = len(self.values)
        with Producer(self.cluster.address, linger_ms=0, delivery_timeout_ms=60_000) as producer:
            for _ in range(count):
                self.values.append(self.rng.randbytes(1_500))
                stored = producer.send(TOPIC, self.values[-1], partition=0).result(PATIENCE_S)
                assert stored.offset == len(self.values) - 1
        return range(start, len(self.values))

    def drawn(self, offsets: range, count: int) -> list[int]:
        """Draw some batches, no two side by side, and never the last one of a log."""
        return sorted(self.rng.sample(offsets[:-1:2], count))

    def folder(self, node: int) -> Path:
        return self.nodes[node].data / "topics" / f"{TOPIC}-0"

    def flip(self, node: int, offsets: list[int]) -> None:
        """Flip one bit in each of these batches, in the header as likely as in the body; never in
        the leader epoch, which only a follower reads from there (log/reading.py).
        """
        found = [
            (path, position, header)
            for path in sorted(self.folder(node).glob("*.log"))
            for position, header in batches.iter_headers(path.read_bytes())
            if header.base_offset in offsets
        ]
        assert [header.base_offset for _, _, header in found] == offsets
        for path, position, header in found:
            within = batches.HEADER_BYTES if self.rng.random() < 0.5 else header.length
            place = position + self.rng.choice([*range(12), *range(16, within)])
            with path.open("r+b") as file:
                file.seek(place)
                byte = file.read(1)[0] ^ 1 << self.rng.randrange(8)
                file.seek(place)
                file.write(bytes([byte]))

    # -- what is looked at -------------------------------------------------------------------------

    def named(self, node: int, offsets: list[int]) -> bool:
        """Return whether the node logged damage to any of these batches."""
        said = self.nodes[node].log.read_text()
        return any(_names(said, offset) for offset in offsets)

    def read(self) -> tuple[dict[int, bytes], set[int]]:
        """Read from the beginning: the records, and the offsets that the consumer reports as
        lost.
        """
        got: dict[int, bytes] = {}
        lost: set[int] = set()
        deadline = monotonic_s() + PATIENCE_S
        with Consumer(self.cluster.address, auto_offset_reset="earliest") as consumer:
            consumer.assign([PLACE])
            while consumer.position(PLACE, timeout_s=PATIENCE_S) < len(self.values):
                assert monotonic_s() < deadline, f"it stands at {consumer.position(PLACE)}"
                try:
                    for record in consumer.poll(0.2):
                        got[record.offset] = record.value or b""
                except errors.DataLoss as told:
                    start, end = int(told.details["offset"]), int(told.details["next_offset"])
                    lost |= set(range(start, end))
        return got, lost

    def wrong(self, *nodes: int) -> int:
        """Return the batches of these nodes' logs that fail their checksum, and rows of the table
        that differ from the produced ones.
        """
        count = 0
        for node in nodes:
            for path in self.folder(node).glob("*.log"):
                raw = path.read_bytes()
                for position, header in batches.iter_headers(raw):
                    try:
                        batches.check(raw[position : position + header.length])
                    except errors.PkError:
                        count += 1
        return count + sum(self.values[offset] != value for offset, value in self.rows())

    def rows(self) -> list[tuple[int, bytes]]:
        # A tier process that was started a moment ago names the table once it has read it.
        until(lambda: self.admin.describe_tier(TOPIC).uri != "", "no tier process names the table")
        table = DeltaTable(unquote(urlsplit(self.admin.describe_tier(TOPIC).uri).path))
        rows = table.to_pyarrow_table(columns=["offset", "value"])
        return list(zip(rows["offset"].to_pylist(), rows["value"].to_pylist(), strict=True))

    def unlike(self) -> list[str]:
        """Return how the three logs differ."""
        return compare({node: self.folder(node) for node in self.nodes}, len(self.values))

    def healed(self) -> str:
        """Return '' once everything is as if nothing had been damaged, except what an operator gave
        up.
        """

        def whole() -> bool:
            state = self.state()
            return state.error is None and len(state.isr) == 3 and not self.unlike()

        until(whole, f"three equal replicas in sync: {self.state()}, {self.unlike()}")
        until(lambda: self.state().tiered_end == len(self.values), f"the table: {self.state()}")
        kept = {n: value for n, value in enumerate(self.values) if n not in self.lost}
        got, lost = self.read()
        told = []
        if got != kept or lost:
            told.append(f"read {len(got)} of {len(kept)} records, told {sorted(lost)} as lost")
        if dict(self.rows()) != kept:
            told.append("the table has other rows")
        if self.wrong(1, 2, 3):
            told.append("a log has a damaged batch")
        return "; ".join(told)


# -- the cases -------------------------------------------------------------------------------------


def in_a_leader(it: Replicas, flips: int) -> Verdict:
    """A follower is dead and the copiers are stopped while the leader's files are damaged.  Then
    they read the damage, and no consumer does.

    A follower that was only stopped would have the batches from its socket.
    """
    it.fill(20)
    until(lambda: it.state().tiered_end == len(it.values), "tiered")
    it.nodes[3].kill()
    with it.stopped("tier", 1, 2):
        it.in_sync(1, 2)
        later = it.fill(20)
        it.lead(1, 2)
        hit = it.drawn(later, flips)
        it.flip(1, hit)
        it.nodes[3].spawn()
        it.nodes[3].wait_ready()
    until(lambda: it.named(1, hit), f"the leader says nothing of {hit}")
    return _verdict(it, 1, "a leader's batches that a follower and the copier have not", hit)


def copied_from_a_leader(it: Replicas, flips: int) -> Verdict:
    """All replicas and the table have the batches; then a consumer reads the damaged ones."""
    it.fill(20)
    it.lead(1)
    until(lambda: it.state().tiered_end == len(it.values), "tiered")
    hit = it.drawn(range(len(it.values)), flips)
    it.flip(1, hit)
    return _verdict(it, 1, "a leader's batches that all have", hit)


def in_a_follower(it: Replicas, flips: int) -> Verdict:
    """A follower is stopped, then leads: its readers meet the damage."""
    it.lead(2)
    it.fill(20)
    it.forget(3)
    it.in_sync(1, 2, 3)
    with it.stopped("broker", 3):
        hit = it.drawn(range(len(it.values)), 2 * flips)
        it.flip(3, hit)
    it.in_sync(1, 2, 3)
    it.prefer(3)
    until(lambda: it.led_by(3) or it.named(3, hit), "3 leads")
    got, lost = it.read()
    assert not lost
    assert got == dict(enumerate(it.values))
    return _verdict(it, 3, "a follower's batches, then it leads", hit)


def in_a_dead_follower(it: Replicas, flips: int) -> Verdict:
    """A follower is killed, damaged, and started again behind the others."""
    it.lead(2)
    it.fill(20)
    it.nodes[3].kill()
    hit = it.drawn(range(len(it.values)), 2 * flips)
    it.flip(3, hit)
    it.fill(10)
    it.nodes[3].spawn()
    it.nodes[3].wait_ready()
    it.in_sync(1, 2, 3)
    it.prefer(3)
    until(lambda: it.led_by(3) or it.named(3, hit), "3 leads")
    got, lost = it.read()
    assert not lost
    assert got == dict(enumerate(it.values))
    return _verdict(it, 3, "a killed follower's batches", hit)


def first_segment_gone(it: Replicas, _flips: int) -> Verdict:
    """A follower is stopped, the files of its first segment are removed, and it is started behind
    the others.  The copiers are stopped, so no table has the records.
    """
    with it.stopped("tier", 1, 2):
        it.lead(2)
        it.fill(60)
        it.in_sync(1, 2, 3)
        it.nodes[3].stop()
        first = min(path.stem for path in it.folder(3).glob("*.log"))
        for path in it.folder(3).glob(f"{first}.*"):
            path.unlink()
        it.nodes[3].spawn()
        it.nodes[3].wait_ready()
        it.in_sync(1, 2, 3)
    said = it.nodes[3].log.read_text()
    named = "partition_offline" in said and f"offsets [{int(first)}, " in said
    found = _verdict(it, 3, "a stopped follower: its first segment's files are gone", [int(first)])
    made_anew = named and "replica_made_anew" in said
    return Verdict(found.case, found.kept and made_anew, f"{found.figures}; named: {named}")


def in_the_only_copy(it: Replicas, flips: int) -> Verdict:
    """Both followers are dead and the copier is stopped: no other copy of the damaged batches
    exists.
    """
    it.lead(1)
    until(lambda: it.state().tiered_end == len(it.values), "tiered")
    for node in (2, 3):
        it.nodes[node].kill("broker")
    with it.stopped("supervisor", 2, 3), it.stopped("tier", 1):
        it.in_sync(1)
        later = it.fill(20)
        it.forget(1)
        until(lambda: it.state().leader == 1, "1 leads again")
        hit = it.drawn(later, flips)
        it.flip(1, hit)
    got, lost = it.read()
    right = got == {n: value for n, value in enumerate(it.values) if n not in hit}
    until(lambda: isinstance(it.state().error, errors.CorruptLog), "it is described")
    error = it.state().error
    named = f"[{hit[0]}, {hit[0] + 1})" in error.message
    until(lambda: _end(it, 2) == _end(it, 3) == hit[0], "the followers stop in front of it")
    until(lambda: _said_of_the_tier(it, hit[0]), "the copier stops in front of it")
    stopped = it.state().tiered_end <= hit[0]
    wrong = it.wrong(2, 3)
    it.nodes[1].stop()
    pk(["log", "repair", str(it.nodes[1].data), "--yes"])
    it.nodes[1].spawn()
    it.nodes[1].wait_ready()
    it.lost |= set(hit)
    trouble = it.healed()
    return Verdict(
        f"{flips} flips in a leader's batches that nobody else has",
        right and lost == set(hit) and named and stopped and not wrong and not trouble,
        f"{len(lost)} told as lost, {wrong} wrong copies, "
        f"{'named' if named else f'not named: {error.message}'}; repaired: {trouble or 'whole'}",
    )


def _said_of_the_tier(it: Replicas, offset: int) -> bool:
    problem = it.admin.describe_tier(TOPIC).problem
    return problem is not None and _names(problem.message, offset)


def _end(it: Replicas, node: int) -> int:
    """Return where the node's log ends."""
    end = 0
    for path in sorted(it.folder(node).glob("*.log")):
        for _, header in batches.iter_headers(path.read_bytes()):
            end = header.next_offset
    return end


def _verdict(it: Replicas, node: int, case: str, hit: list[int]) -> Verdict:
    got, lost = it.read()
    right = got == dict(enumerate(it.values)) and not lost
    until(lambda: it.named(node, hit), f"node {node} says nothing of {hit}")
    wrong = it.wrong(*[each for each in it.nodes if each != node])
    trouble = it.healed()
    return Verdict(
        f"{len(hit)} flips in {case}",
        right and not wrong and not trouble,
        f"{len(got)} of {len(it.values)} records read, {len(lost)} told as lost, "
        f"{wrong} wrong copies; {trouble or 'healed'}",
    )


CASES: dict[str, Callable[[Replicas, int], Verdict]] = {
    "leader": in_a_leader,
    "leader, copied": copied_from_a_leader,
    "follower": in_a_follower,
    "dead follower": in_a_dead_follower,
    "first segment": first_segment_gone,
    "only copy": in_the_only_copy,
}


def run(rng: random.Random, home: Path, flips: int, *names: str) -> list[Verdict]:
    """Run these cases, one after the other, on one cluster."""
    it = Replicas(home, rng)
    try:
        it.lead(1)
        return [CASES[name](it, flips) for name in names or CASES]
    finally:
        it.close()
