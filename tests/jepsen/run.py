"""Jepsen's queue workload on three real nodes: transactions, polls and sends under faults.

    python tests/jepsen/run.py [--seconds N] [--rounds N] [--seed N] [--json FILE] [--dir DIR]

Each round starts a cluster with replication factor 3 and min_insync_replicas 2, runs the clients of
workload.py and, unless `--no-groups` is given, the members of two groups of group_clients.py for
`--seconds` while nemesis.py kills and pauses nodes and cuts their links, and then heals the
cluster.  Nodes reach each other through the proxies of tests/chaos; clients reach every broker
directly, also one that is cut off.  At the end these must hold:

  - The checker finds no anomaly but G0 in the history (checker.py), which ends with two consumers
    that read every partition from offset 0.
  - Every partition has a leader and three replicas in sync, and no transaction is left open: the
    last stable offset is the high watermark.
  - The consumers that read through the faults reach the end, and so do both groups.
  - No client got an error that docs/transactions.md does not name, and no process logged a bug.

Exit 1 = one of these is broken.  The history of a broken round stays in DIR/round-N/history.jsonl.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))
sys.path.insert(0, str(Path(__file__).parent))

import nemesis
from checker import ALLOWED, ANOMALIES, Verdict, check
from cluster import TestedCluster
from group_clients import INPUTS, ExactMember, MemberClient, PlainMember
from history import dump
from workload import (
    PARTITIONS,
    PLACES,
    TOPICS,
    Client,
    PollClient,
    Recorder,
    SendClient,
    TransactionClient,
    final_read,
)

from pk import TopicPartition, errors
from pk.clock import block_s, monotonic_s

SETTINGS = {
    "default_replication_factor": 3,
    "min_insync_replicas": 2,
    "retention_ms": -1,
    "segment_bytes": 256 * 1024,
    "log_flush_offset_checkpoint_interval_ms": 2_000,
    "broker_session_timeout_ms": 3_000,
    "broker_heartbeat_interval_ms": 300,
    "group_initial_rebalance_delay_ms": 500,
}
#: client → how many, and the mean pause between two of its operations
CLIENTS: dict[type[Client], tuple[int, float]] = {
    TransactionClient: (6, 0.03),
    SendClient: (2, 0.05),
    PollClient: (3, 0.03),
}
MEMBERS: dict[type[Client], tuple[int, float]] = {ExactMember: (3, 0.05), PlainMember: (3, 0.05)}
WHOLE_MAX_S = 180.0
#: The last transactions of the clients time out after at most 15 s (workload.py).
CLOSED_MAX_S = 90.0
READ_MAX_S = 180.0
JOIN_MAX_S = 240.0
FINAL_READERS = 2
_BUG = re.compile(r'Z (BUG|ERROR) |"BUG"|Traceback')


@dataclass(slots=True)
class Result:
    """What a round found."""

    number: int
    seed: int
    verdict: Verdict = field(default_factory=Verdict)
    broken: list[str] = field(default_factory=list)
    faults: list[nemesis.Happened] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def valid(self) -> bool:
        """Return whether every promise was kept."""
        return self.verdict.valid and not self.broken

    def row(self) -> dict[str, int]:
        """Return the figures of the table."""
        found, kept = self.verdict.totals, self.verdict.counts
        return {
            "operations": found.get("operations", 0),
            "transactions committed": found.get("txn ok", 0),
            "transactions aborted": found.get("txn fail", 0),
            "transactions unknown": found.get("txn info", 0),
            "records sent": found.get("records sent", 0),
            "records polled": found.get("records polled", 0),
            "copies of a group": found.get("copies", 0),
            "commits of a group": found.get("commit ok", 0),
            "faults": len(self.faults),
            **{name: kept[name] for name in (*ANOMALIES, *ALLOWED)},
            "broken promises": len(self.broken),
        }

    def as_json(self) -> dict[str, Any]:
        """Return everything but the history."""
        return {
            "round": self.number,
            "seed": self.seed,
            "valid": self.valid,
            **self.row(),
            "totals": self.verdict.totals,
            "examples": self.verdict.examples,
            "broken": self.broken,
            "faults by name": dict(Counter(each.name for each in self.faults)),
            "errors of clients": self.errors,
        }


class Round:
    """One round over a cluster that has started."""

    def __init__(
        self, cluster: TestedCluster, result: Result, pace: nemesis.Pace, *, groups: bool
    ) -> None:
        self._cluster, self._result = cluster, result
        self._kinds = CLIENTS | MEMBERS if groups else CLIENTS
        self._recorder = Recorder()
        self._rng = random.Random(result.seed)
        self._nemesis = nemesis.Nemesis(cluster, random.Random(result.seed + 1), pace)
        self.history = self._recorder.history

    def run(self, seconds: float) -> None:
        """Run the clients under faults, heal, read everything, and judge."""
        self._make_topics()
        clients = [
            kind(self._cluster.address, self._recorder, self._rng.getrandbits(32), pause_s)
            for kind, (count, pause_s) in self._kinds.items()
            for _ in range(count)
        ]
        for client in clients:
            client.start()
        self._nemesis.disturb(seconds)
        self._settle(clients)
        broken = self._result.broken
        broken += self._recorder.broken
        broken += [f"a node logged a bug: {line}" for line in self._bugs()[:5]]
        self._result.faults = self._nemesis.happened
        self._result.errors = dict(self._recorder.errors)
        self._result.verdict = check(self.history)

    def _make_topics(self) -> None:
        with self._cluster.admin() as admin:
            for topic in TOPICS:
                admin.create_topic(topic, partitions=PARTITIONS, timeout_s=60)
        self._whole()

    def _settle(self, clients: Sequence[Client]) -> None:
        """Stop the clients after the last fault, and read everything to the end."""
        pollers = [each for each in clients if isinstance(each, PollClient)]
        members = [each for each in clients if isinstance(each, MemberClient)]
        for client in clients:
            client.stop.set()
        for client in clients:
            if not isinstance(client, PollClient | MemberClient):
                client.join(JOIN_MAX_S)
        self._whole()
        self._finish_groups(members)
        ends = self._ends(TOPICS)
        for client in pollers:
            client.ends, client.deadline = ends, monotonic_s() + READ_MAX_S
            client.ends_known.set()
        for client in pollers:
            client.join(JOIN_MAX_S)
        for _ in range(FINAL_READERS):
            final_read(self._cluster.address, self._recorder, ends, READ_MAX_S)

    def _finish_groups(self, members: Sequence[MemberClient]) -> None:
        """Wait until the groups have processed all of their input, and end their members."""
        if not members:
            return
        ends = self._ends(tuple(INPUTS.values()))
        deadline = monotonic_s() + READ_MAX_S
        while True:
            reached: dict[TopicPartition, int] = {}
            for member in members:
                for place, position in member.reached.items():
                    reached[place] = max(position, reached.get(place, 0))
            behind = {place: end for place, end in ends.items() if reached.get(place, 0) < end}
            if not behind:
                break
            if monotonic_s() > deadline:
                self._result.broken.append(f"groups are stuck at {reached}, before {behind}")
                break
            block_s(0.2)
        for member in members:
            member.finished.set()
        for member in members:
            member.join(JOIN_MAX_S)

    def _whole(self) -> None:
        for topic in TOPICS:
            if missing := self._cluster.whole(topic, WHOLE_MAX_S):
                self._result.broken.append(f"{topic} is not whole: {missing}")

    def _ends(self, topics: Sequence[str]) -> dict[TopicPartition, int]:
        """Return the high watermarks, once no transaction is open in any of their partitions."""
        deadline = monotonic_s() + CLOSED_MAX_S
        while True:
            states = [state for topic in topics for state in self._cluster.topic(topic)]
            held = [each for each in states if each.last_stable_offset < each.high_watermark]
            bad = [each for each in states if each.error is not None]
            if not held and not bad:
                break
            if monotonic_s() > deadline:
                words = [
                    f"{each.topic}-{each.partition} {each.oldest_transaction}" for each in held
                ]
                self._result.broken.append(f"transactions stay open: {words or bad}")
                break
            block_s(0.5)
        found = {TopicPartition(s.topic, s.partition): s.last_stable_offset for s in states}
        assert set(found) == {each for each in PLACES if each.topic in topics}, found
        return found

    def _bugs(self) -> list[str]:
        found = []
        for node, server in self._cluster.nodes.items():
            lines = server.log.read_text(errors="replace").splitlines()
            found += [f"node {node}: {line[:300]}" for line in lines if _BUG.search(line)]
        return found


def run_round(
    number: int, seed: int, seconds: float, pace: nemesis.Pace, folder: Path, *, groups: bool
) -> Result:
    """Run one round; the history of a broken one is kept in `folder`."""
    result = Result(number, seed)
    with TestedCluster(folder / "cluster", SETTINGS) as cluster:
        played = Round(cluster, result, pace, groups=groups)
        try:
            played.run(seconds)
        except (errors.PkError, TimeoutError) as cause:
            result.broken.append(f"the round ended early: {cause!r}")
        if not result.valid:
            with (folder / "history.jsonl").open("w") as out:
                out.writelines(f"{line}\n" for line in dump(played.history))
            (folder / "result.json").write_text(json.dumps(result.as_json(), indent=2))
            (folder / "faults.txt").write_text("".join(f"{each}\n" for each in result.faults))
    return result


def table(results: Sequence[Result]) -> str:
    """Return the figures of the rounds, one column for each, and their sums."""
    rows = [each.row() for each in results]
    lines = [f"{'':<24}" + "".join(f"{each.number:>10}" for each in results) + f"{'all':>10}"]
    for name in rows[0]:
        figures = [row[name] for row in rows]
        mark = "  counted, allowed" if name in ALLOWED else ""
        cells = "".join(f"{figure:>10}" for figure in (*figures, sum(figures)))
        lines.append(f"{name:<24}{cells}{mark}")
    return "\n".join(lines)


def main() -> int:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=300.0, help="of load in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="short faults, for CI")
    parser.add_argument(
        "--groups",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with the members of two consumer groups",
    )
    parser.add_argument("--seed", type=int, help="of the first round; the next one has seed + 1")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    parser.add_argument("--dir", type=Path, help="for the nodes; what a broken round left stays")
    given = parser.parse_args()
    # Brokers that do not answer and producers that are fenced are part of the run.
    logging.getLogger("pk.client").setLevel(logging.CRITICAL)
    seed = given.seed if given.seed is not None else int.from_bytes(os.urandom(3), "big")
    print(f"SEED={seed}", flush=True)
    top = given.dir or Path(tempfile.mkdtemp(prefix="pk-jepsen-"))
    results: list[Result] = []
    for number in range(1, given.rounds + 1):
        folder = top / f"round-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pace = nemesis.SHORT if given.short else nemesis.FULL
        result = run_round(
            number, seed + number - 1, given.seconds, pace, folder, groups=given.groups
        )
        results.append(result)
        kept = "ok" if result.valid else f"BROKEN, see {folder}"
        print(f"round {number}, seed {result.seed}: {kept}", flush=True)
        for words in [*result.verdict.examples, *result.broken]:
            print(f"  {words}", flush=True)
        if result.valid:
            shutil.rmtree(folder, ignore_errors=True)
    print(table(results))
    if given.json is not None:
        given.json.write_text(json.dumps([each.as_json() for each in results], indent=2) + "\n")
    valid = all(each.valid for each in results)
    if valid and given.dir is None:
        shutil.rmtree(top, ignore_errors=True)
    return 0 if valid else 1


if __name__ == "__main__":
    sys.exit(main())
