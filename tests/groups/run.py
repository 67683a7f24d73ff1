"""Consumer groups under kills: a verdict over two groups that read the same topic.

    python tests/groups/run.py [--short] [--seed N] [--json FILE] [--dir DIR]

Three nodes, replication factor 3, min_insync_replicas 2.  A producer writes to a topic of twelve
partitions all the time.  The group `exact` copies it in transactions that have its offsets, the
group `plain` prints each record and commits afterwards; each has five members (copier.py).
Meanwhile

  - all members are restarted one after the other, three times: by SIGTERM or by kill -9,
  - all nodes are killed one after the other and started again, three times,
  - the broker that coordinates a group is killed five times, alone.

At the end these must hold:

  - The copy is the input: each record once, in the order of its partition.
  - The group `plain` has processed every record.
  - Nothing is rebalanced because a coordinator died: the generation of its group is as before.
  - Five members own all partitions.
  - No process logged a bug, no member ended by itself.

Exit 1 = one of these is broken.  A short run has one round of each, and two coordinators.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
for _shared in ("fixtures", "kit"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _shared))

# ruff: noqa: E402 - the modules of campaigns are found by the paths above
import campaign
from copier import EXACT, INPUT, OUTPUT, PLAIN
from judging import difference

from pk import AdminClient, Producer, errors
from pk.cli.embedded import EmbeddedCluster
from pk.client.admin import NewTopic
from pk.clock import block_s, monotonic_s

PARTITIONS = 12
MEMBERS = 5
ROUNDS = 3
COORDINATOR_KILLS = 5
RECORDS_PER_S = 600
SETTINGS = {
    "default_replication_factor": 3,
    "min_insync_replicas": 2,
    "retention_ms": -1,
    "broker_session_timeout_ms": 3_000,
    "broker_heartbeat_interval_ms": 300,
    "group_initial_rebalance_delay_ms": 500,
}
PATIENCE_S = 180.0
COPIER = Path(__file__).parent / "copier.py"


@dataclass
class Verdict(campaign.Verdict):
    """What the run found."""

    records: int = 0
    members_stopped: int = 0
    members_killed: int = 0
    nodes_killed: int = 0
    coordinators_killed: int = 0
    aborted: int = 0
    twice: int = 0  #: records that `plain` processed more than once


class Input(threading.Thread):
    """Writes numbered records until it is stopped."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.sent: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
        self.failure: BaseException | None = None
        self._address = address
        self._stopped = threading.Event()

    def run(self) -> None:
        try:
            with Producer(self._address, acks="all", delivery_timeout_ms=240_000) as producer:
                while not self._stopped.wait(0.1):
                    for n in range(RECORDS_PER_S // 10):
                        number = n % PARTITIONS
                        value = b"%d-%06d" % (number, len(self.sent[number]))
                        producer.send(INPUT, value, partition=number)
                        self.sent[number].append(value)
                producer.flush(PATIENCE_S)
        except BaseException as failure:
            self.failure = failure

    def stop(self) -> None:
        """Send what is left, and end."""
        self._stopped.set()
        self.join(PATIENCE_S)


class Member:
    """One process of a group."""

    def __init__(self, bootstrap: str, group: str, name: str, folder: Path) -> None:
        self.group, self.name, self.log = group, name, folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(COPIER), "--bootstrap", bootstrap, "--name", name]
                + (["--plain"] if group == PLAIN else []),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def lines(self) -> list[str]:
        """Return what every process of this name has printed."""
        return self.log.read_text(errors="replace").splitlines()


class Run:
    """One run over a cluster that has started."""

    def __init__(self, cluster: EmbeddedCluster, folder: Path, verdict: Verdict) -> None:
        self._cluster = cluster
        self._folder = folder
        self._verdict = verdict
        self._rng = random.Random(verdict.seed)
        self._members: dict[str, Member] = {}
        self.input = Input(cluster.address)

    def start(self) -> None:
        """Make the topics; start the producer and the members."""
        with AdminClient(self._cluster.address) as admin:
            topics = [NewTopic(name, PARTITIONS, {}, 3) for name in (INPUT, OUTPUT)]
            for each in admin.create_topics(topics, timeout_s=60):
                if each.error is not None:
                    raise each.error
        self.input.start()
        for group in (EXACT, PLAIN):
            for number in range(MEMBERS):
                self._start(group, f"{group}-{number}")
        self.settle("the first members")

    def _start(self, group: str, name: str) -> None:
        self._members[name] = Member(self._cluster.address, group, name, self._folder)

    # -- faults ------------------------------------------------------------------------------------

    def restart_members(self) -> None:
        """Restart every member, one of each group at a time."""
        for number in range(MEMBERS):
            for group in (EXACT, PLAIN):
                member = self._members[f"{group}-{number}"]
                if self._rng.random() < 0.5:
                    member.process.kill()
                    self._verdict.members_killed += 1
                else:
                    member.process.send_signal(signal.SIGTERM)
                    self._verdict.members_stopped += 1
            for group in (EXACT, PLAIN):
                member = self._members[f"{group}-{number}"]
                code = member.process.wait(PATIENCE_S)
                self._verdict.check(code in (0, -9), f"{member.name} ended with {code}")
                self._start(group, member.name)
            block_s(self._rng.uniform(0.5, 2))
        self.settle("members that were restarted")

    def restart_nodes(self) -> None:
        """Kill every node and start it again, one at a time."""
        for node in list(self._cluster.nodes):
            self._cluster.kill(node)
            self._verdict.nodes_killed += 1
            block_s(self._rng.uniform(1, 5))
            self._cluster.start_nodes([node])
            self.moves_on(f"node {node} was killed")

    def kill_coordinator(self) -> None:
        """Kill the broker that coordinates a group; the members do not rebalance."""
        group = self._rng.choice((EXACT, PLAIN))
        with AdminClient(self._cluster.address) as admin:
            before = admin.describe_group(group, timeout_s=PATIENCE_S)
        server = self._cluster.nodes[before.coordinator_id]
        old = server.pids().get("broker", 0)
        server.kill("broker")
        self._verdict.coordinators_killed += 1
        server.wait_restarted("broker", old)
        self.moves_on(f"the coordinator of {group} was killed")
        with AdminClient(self._cluster.address) as admin:
            after = admin.describe_group(group, timeout_s=PATIENCE_S)
        self._verdict.check(
            after.generation == before.generation,
            f"{group} went from generation {before.generation} to {after.generation} because its "
            "coordinator died",
        )

    # -- progress ----------------------------------------------------------------------------------

    def _committed(self, group: str) -> int:
        return sum(
            line.startswith("committed ")
            for member in self._members.values()
            if member.group == group
            for line in member.lines()
        )

    def moves_on(self, what: str) -> None:
        """Wait until both groups commit again."""
        before = {group: self._committed(group) for group in (EXACT, PLAIN)}
        self._until(
            lambda: all(self._committed(group) >= before[group] + MEMBERS for group in before),
            f"{what}: no commits",
        )
        self._check_alive()

    def settle(self, what: str) -> None:
        """Wait until both groups are stable with all their members and partitions."""

        def stable() -> bool:
            with AdminClient(self._cluster.address) as admin:
                for group in (EXACT, PLAIN):
                    found = admin.describe_group(group, timeout_s=PATIENCE_S)
                    owned = [place for each in found.members for place in each.partitions]
                    if (found.state, len(found.members)) != ("Stable", MEMBERS):
                        return False
                    if sorted(place.partition for place in owned) != list(range(PARTITIONS)):
                        return False
            return True

        self._until(stable, f"{what}: the groups are not stable")
        self.moves_on(what)

    def _until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = monotonic_s() + PATIENCE_S
        while monotonic_s() < deadline:
            try:
                if holds():
                    return
            except errors.PkError as failure:
                print(f"{what}: {failure.message}", flush=True)
            block_s(0.3)
        self._verdict.check(False, f"{what} for {PATIENCE_S} s")

    def _check_alive(self) -> None:
        for member in self._members.values():
            code = member.process.poll()
            if code is not None:
                self._verdict.check(
                    False, f"{member.name} ended by itself with {code}: {member.lines()[-4:]}"
                )
                self._start(member.group, member.name)

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Stop the input, let both groups process the rest, and judge."""
        verdict = self._verdict
        self.input.stop()
        verdict.check(self.input.failure is None, f"the producer failed: {self.input.failure!r}")
        verdict.records = sum(map(len, self.input.sent.values()))
        with AdminClient(self._cluster.address) as admin:

            def processed() -> bool:
                return all(
                    sum(admin.group_offsets(group, timeout_s=PATIENCE_S).values())
                    == verdict.records
                    for group in (EXACT, PLAIN)
                )

            self._until(processed, "the groups do not reach the end")
        for member in self._members.values():
            member.process.send_signal(signal.SIGTERM)
        for member in self._members.values():
            code = member.process.wait(PATIENCE_S)
            verdict.check(code == 0, f"{member.name} ended with {code}: {member.lines()[-4:]}")
        self._judge_exact()
        self._judge_plain()

    def kill_members(self) -> None:
        """End what is left of the members."""
        for member in self._members.values():
            if member.process.poll() is None:
                member.process.kill()
                member.process.wait()

    def _judge_exact(self) -> None:
        rows = campaign.rows_of(self._cluster.address, OUTPUT, PARTITIONS, PATIENCE_S)
        found = {number: [row[2] for row in of_one] for number, of_one in rows.items()}
        for number, sent in self.input.sent.items():
            self._verdict.check(
                found[number] == sent, difference(f"copy {number}", sent, found[number])
            )
        self._verdict.aborted = sum(
            line.startswith("aborted: ")
            for member in self._members.values()
            for line in member.lines()
        )

    def _judge_plain(self) -> None:
        counts: dict[bytes, int] = {}
        for member in self._members.values():
            for line in member.lines() if member.group == PLAIN else ():
                word, _, value = line.partition(" ")
                if word == "processed":
                    counts[value.encode()] = counts.get(value.encode(), 0) + 1
        missing = [
            value for sent in self.input.sent.values() for value in sent if value not in counts
        ]
        self._verdict.check(not missing, f"{len(missing)} records were skipped: {missing[:5]}")
        self._verdict.twice = sum(count > 1 for count in counts.values())


def main() -> int:
    """Run the campaign and print its verdict."""
    given = campaign.options(__doc__, "one round of each").parse_args()
    folder = campaign.begun(given, "groups")
    verdict = Verdict(given.seed)
    with EmbeddedCluster(folder, settings=SETTINGS) as cluster:
        run = Run(cluster, folder, verdict)
        try:
            run.start()
            for _ in range(1 if given.short else ROUNDS):
                run.restart_members()
                run.restart_nodes()
            run.settle("nodes that were restarted")
            for _ in range(2 if given.short else COORDINATOR_KILLS):
                run.kill_coordinator()
            run.finish()
        finally:
            run.kill_members()
        verdict.check_nodes(cluster)
    told = (
        f"{verdict.records} records; members: {verdict.members_stopped} stopped, "
        f"{verdict.members_killed} killed; {verdict.nodes_killed} nodes and "
        f"{verdict.coordinators_killed} coordinators killed; {verdict.aborted} transactions "
        f"aborted, {verdict.twice} records processed twice by the plain group"
    )
    return verdict.end(told, given.json)


if __name__ == "__main__":
    sys.exit(main())
