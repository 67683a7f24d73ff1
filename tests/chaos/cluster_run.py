"""Three nodes under load, all the faults of faults.py, and the verdict of the ledger.

    python tests/chaos/cluster_run.py [--short] [--only FAULT,…] [--seed N] [--json FILE]

Replication factor 3, min_insync_replicas 2, acks=all, idempotence.  Each round is one fault
(faults.py) under load, with a running consumer.  A round ends when every partition has all replicas
in sync and every sent record has an outcome.  Clients reach brokers directly; nodes reach each
other through proxies (proxy.py).  At the end these must hold:

  - The consumer that read through all rounds and a fresh one, which reads every partition from
    offset 0, get the same records, and these satisfy the ledger.
  - All replicas have the same bytes below the high watermark.
  - No process logged a bug.

Exit 1 = one of these, or a demand of a fault, is broken.  Times are reported and not judged: the
longest time without an acknowledgement on any partition in each round (`outage`), median and worst
by fault, and which of the goals of faults.py were missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import faults
import replicas
from cluster import Reader, TestedCluster
from ledger import Ledger, Outcome
from load import Load

from pk import AdminClient, Producer, errors
from pk.client.admin import PartitionDescription
from pk.clock import block_s, monotonic_s

TOPIC = "chaos"
PARTITIONS = 3
RECORDS_PER_S = 10_000
SETTINGS = {
    "default_replication_factor": 3,
    "min_insync_replicas": 2,
    "retention_ms": -1,
    "segment_bytes": 8 * 1024 * 1024,
    "log_flush_offset_checkpoint_interval_ms": 2_000,
}
SHORT_SETTINGS = {"broker_session_timeout_ms": 2_000, "broker_heartbeat_interval_ms": 300}
SERVED_MAX_S = 90.0
WHOLE_MAX_S = 120.0
READ_MAX_S = 120.0
SETTLE_MAX_S = 180.0
FULL = (
    *("leader_kill:node", "leader_kill:broker") * 3, "freeze:node", "freeze:broker", "freeze:node",
    *("bounce:node",) * 5, *("controller_kill:node", "controller_kill:broker") * 3, "kill_all:node",
    "last_one_dies:node", "empty_disk:node", *("isolate_leader:node",) * 3, "mute_leader:node",
    "deaf_leader:node", "cut_follower:node", "rolling:node",
)  # fmt: skip
SHORT = ("leader_kill:node", "controller_kill:broker", "isolate_leader:node", "kill_all:node")
_BUG = re.compile(r"Z (BUG|ERROR) |Traceback")


@dataclass(slots=True)
class Round:
    """The drawn options of a round, and its outcome."""

    number: int
    fault: str
    scope: str
    lasts_s: float
    compression: str
    linger_ms: float
    delivery_timeout_ms: int
    padding: int
    victims: tuple[int, ...] = ()
    sent: int = 0
    outage_ms: int = -1
    whole_ms: int = -1  #: from the fault's end until all replicas were in sync
    notes: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def draw(rng: random.Random, number: int, text: str, lasts_s: float) -> Round:
        fault, _, scope = text.partition(":")
        patient = fault == "rolling"
        return Round(
            number=number,
            fault=fault,
            scope=scope or "node",
            lasts_s=lasts_s,
            compression=rng.choice(["none", "lz4", "zstd"]),
            linger_ms=rng.choice([0.0, 5.0, 20.0]),
            # short ones leave outcomes unknown; long ones must all be acknowledged in the end
            delivery_timeout_ms=120_000 if patient else rng.choice([3_000, 120_000, 120_000]),
            padding=rng.choice([20, 100, 400]),
        )


class Stalls:
    """The longest time without an acknowledgement on any partition, sampled."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._stop = threading.Event()
        self.longest_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        newest, since = dict(self._load.newest), dict.fromkeys(self._load.newest, monotonic_s())
        while not self._stop.wait(0.004):
            now = monotonic_s()
            for partition, number in self._load.newest.items():
                self.longest_s = max(self.longest_s, now - since[partition])
                if number != newest[partition]:
                    newest[partition], since[partition] = number, now

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class Watcher:
    """Prints every change of leaders and in-sync sets with its time, to show where time passes."""

    def __init__(self, cluster: TestedCluster) -> None:
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        known: dict[int, str] = {}
        while not self._stop.wait(0.05):
            try:
                states = self._cluster.topic(TOPIC, 1.0)
            except errors.PkError:
                continue
            for state in states:
                words = (
                    f"leader {state.leader} of epoch {state.leader_epoch}, isr {state.isr}, "
                    f"{type(state.error).__name__ if state.error is not None else 'fine'}"
                )
                if known.get(state.partition) != words:
                    known[state.partition] = words
                    now = datetime.now(UTC).strftime("%H:%M:%S.%f")[:12]
                    print(f"      {now} {TOPIC}-{state.partition}: {words}", flush=True)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


class Campaign:
    """One cluster, one ledger, and one consumer that reads through every round."""

    def __init__(self, cluster: TestedCluster, rng: random.Random, session_s: float) -> None:
        self.cluster, self.rng, self.session_s = cluster, rng, session_s
        self.ledger = Ledger()
        self.violations: list[str] = []
        self.goals: list[str] = []  #: times that were missed
        self.make_topic(TOPIC, set())
        self.whole()
        self.reader = Reader(cluster.address, TOPIC, PARTITIONS)
        self._errors_before: dict[str, int] = {}
        self._stalls: Stalls | None = None

    def make_topic(self, name: str, leaders: set[int]) -> list[PartitionDescription]:
        """Create a topic of three partitions, led by `leaders`."""
        self.patiently(lambda admin: admin.create_topic(name, partitions=PARTITIONS))
        begin = monotonic_s()
        while True:
            states = self.cluster.topic(name)
            if all(state.leader >= 0 and state.error is None for state in states):
                return [state for state in states if state.leader in leaders]
            if monotonic_s() - begin > WHOLE_MAX_S:
                raise RuntimeError(f"{name} has no leaders: {states}")
            block_s(0.1)

    def patiently(self, work: Callable[[AdminClient], object]) -> None:
        """Repeat an administrator's call until it works; work that was done already counts as
        done.
        """
        deadline = monotonic_s() + WHOLE_MAX_S
        while True:
            try:
                with self.cluster.admin() as admin:
                    work(admin)
                    return
            except errors.TopicAlreadyExists:
                return
            except errors.RetriableError:
                if monotonic_s() > deadline:
                    raise
                block_s(0.2)

    # -- a round -----------------------------------------------------------------------------------

    def run_round(self, plan: Round) -> None:
        producer = Producer(
            self.cluster.address,
            compression=plan.compression,
            linger_ms=plan.linger_ms,
            delivery_timeout_ms=plan.delivery_timeout_ms,
            request_timeout_ms=min(30_000, plan.delivery_timeout_ms - 100),
        )
        load = Load(
            producer,
            self.ledger,
            self.rng,
            topic=TOPIC,
            partitions=PARTITIONS,
            records_per_s=RECORDS_PER_S,
            padding=os.urandom(plan.padding // 2).hex().encode(),
        )
        before = len(self.ledger)
        thread = threading.Thread(target=load.run, daemon=True)
        thread.start()
        try:
            self.served(plan, load)
            self._errors_before = dict(self.reader.errors)
            self._stalls = Stalls(load)
            block_s(self.rng.uniform(0.2, 1.0))
            faults.BY_NAME[plan.fault](self, plan, load)
            ended = monotonic_s()
            self.served(plan, load)
            self.whole()
            plan.whole_ms = round(1000 * (monotonic_s() - ended))
            plan.outage_ms = self.stall_ms(load)
        finally:
            if self._stalls is not None:
                self._stalls.close()
            load.stop.set()
            thread.join()
            producer.flush(timeout_s=SETTLE_MAX_S)
            producer.close()
        if load.failure is not None:
            raise load.failure
        plan.sent = len(self.ledger) - before
        plan.notes |= {f"failed {name}": count for name, count in load.errors.items()}
        self.settle()

    def some_leader(self, plan: Round) -> int:
        """Draw a node that leads a partition."""
        states = self.cluster.topic(TOPIC)
        victim = self.rng.choice([state.leader for state in states])
        plan.victims = (victim,)
        return victim

    def stop_cleanly(self, node: int) -> None:
        code = self.cluster.nodes[node].stop()
        if code != 0:
            self.goals.append(f"a clean stop of node {node} ended with {code}")

    def stall_ms(self, load: Load) -> int:
        assert self._stalls is not None
        return round(1000 * self._stalls.longest_s)

    def served(self, plan: Round, load: Load) -> None:
        """Wait until every partition acknowledges a record that is sent from now on."""
        mark, begin = load.mark(), monotonic_s()
        while not load.served_since(mark):
            if monotonic_s() - begin > SERVED_MAX_S:
                self.violations.append(
                    f"round {plan.number}, {plan.fault}: not served within {SERVED_MAX_S:g} s: "
                    f"{[newest >= mark for newest in load.newest.values()]}"
                )
                return
            if load.failure is not None:
                raise load.failure
            block_s(0.005)

    def whole(self) -> None:
        if missing := self.cluster.whole(TOPIC, WHOLE_MAX_S):
            self.violations.append(f"not whole within {WHOLE_MAX_S:g} s: {missing}")

    def reader_errors(self) -> dict[str, int]:
        """Return the reader's errors since the beginning of the round."""
        return {
            name: count - self._errors_before.get(name, 0)
            for name, count in self.reader.errors.items()
            if count > self._errors_before.get(name, 0)
        }

    def settle(self) -> dict[int, int]:
        """Let the consumer read on to the present ends; return them."""
        ends = {state.partition: state.high_watermark for state in self.cluster.topic(TOPIC)}
        if not self.reader.reaches(ends, READ_MAX_S):
            at = {number: len(read) for number, read in self.reader.read.items()}
            self.violations.append(f"the consumer stands at {at} of {ends}: {self.reader.failure}")
        return ends

    # -- the end -----------------------------------------------------------------------------------

    def judge(self) -> dict[str, Any]:
        """Check every sent record from offset 0, the replicas' bytes, and the processes' logs."""
        ends = self.settle()
        fresh = Reader(self.cluster.address, TOPIC, PARTITIONS)
        if not fresh.reaches(ends, READ_MAX_S):
            self.violations.append(f"a fresh consumer does not reach {ends}: {fresh.failure}")
        fresh.close()
        self.reader.close()
        for number in range(PARTITIONS):
            for read in (fresh.read[number], self.reader.read[number]):
                self.violations += self.ledger.violations(number, read)[:5]
            if fresh.read[number] != self.reader.read[number]:
                self.violations.append(f"partition {number}: two consumers read different logs")
            folders = self.cluster.folders(TOPIC, number)
            self.violations += replicas.compare(folders, ends[number])
        return {"log_end": sum(ends.values())}

    def bugs(self) -> list[str]:
        found = []
        for node, server in self.cluster.nodes.items():
            lines = server.log.read_text(errors="replace").splitlines()
            found += [f"node {node}: {line[:300]}" for line in lines if _BUG.search(line)]
        return found


def run(
    chosen: list[str], seed: int, directory: Path, short: bool, verbose: bool
) -> dict[str, Any]:
    rng = random.Random(seed)
    settings = {**SETTINGS, **(SHORT_SETTINGS if short else {})}
    session_s = int(settings.get("broker_session_timeout_ms", 6_000)) / 1000
    plans = [
        Round.draw(rng, number, text, 3.0 if short else 20.0 if "freeze" in text else 8.0)
        for number, text in enumerate(chosen, 1)
    ]
    with TestedCluster(directory, settings) as cluster:
        campaign = Campaign(cluster, rng, session_s)
        watcher = Watcher(cluster) if verbose else None
        print(f"{'round':>5} {'fault':<24}{'sent':>8}{'outage':>10}{'whole':>10}", flush=True)
        for plan in plans:
            campaign.run_round(plan)
            tell(plan)
            if campaign.violations:
                break
        if watcher is not None:
            watcher.close()
        totals = campaign.judge()
    campaign.violations += [f"a bug was logged: {line}" for line in campaign.bugs()[:5]]
    return report(seed, plans, campaign, totals)


def tell(plan: Round) -> None:
    what = f"{plan.fault} {plan.scope} {','.join(map(str, plan.victims))}"
    print(
        f"{plan.number:>5} {what:<24}{plan.sent:>8}{plan.outage_ms:>8}ms{plan.whole_ms:>8}ms  "
        + " ".join(f"{name}={value}" for name, value in plan.notes.items())
        + f"  load={os.getloadavg()[0]:.1f}",
        flush=True,
    )


def report(
    seed: int, plans: list[Round], campaign: Campaign, totals: dict[str, int]
) -> dict[str, Any]:
    outages: dict[str, list[int]] = {}
    for plan in plans:
        if plan.outage_ms >= 0:
            outages.setdefault(f"{plan.fault} {plan.scope}", []).append(plan.outage_ms)
    return {
        "seed": seed,
        "verdict": "broken" if campaign.violations else "kept",
        "violations": campaign.violations[:20],
        "times_missed": campaign.goals,
        "rounds": sum(plan.outage_ms >= 0 for plan in plans),
        "records": {outcome.value: campaign.ledger.count(outcome) for outcome in Outcome},
        "outage_ms": {
            name: {"rounds": len(found), "median": statistics.median(found), "worst": max(found)}
            for name, found in outages.items()
        },
        **totals,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="a cluster under faults")
    parser.add_argument("--short", action="store_true", help="four rounds, for CI")
    parser.add_argument("--only", default="", help="FAULT[:SCOPE],… instead of the campaign's")
    parser.add_argument("--verbose", action="store_true", help="print every change of a leader")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None, help="write the verdict there, too")
    parser.add_argument("--dir", type=Path, default=None, help="keep the nodes' directories there")
    given = parser.parse_args()
    seed = given.seed if given.seed is not None else int.from_bytes(os.urandom(4), "big")
    chosen = [each for each in given.only.split(",") if each] or list(
        SHORT if given.short else FULL
    )
    print(f"SEED={seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="pk-chaos-") as folder:
        if given.dir is not None:
            shutil.rmtree(given.dir, ignore_errors=True)
        verdict = run(chosen, seed, given.dir or Path(folder), given.short, given.verbose)
    text = json.dumps(verdict, indent=2)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    if verdict["violations"]:
        print(
            f"reproduce: python tests/chaos/cluster_run.py {' '.join(sys.argv[1:])} --seed {seed}"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
