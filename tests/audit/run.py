"""Maintained tables under kills: a verdict over every job, the tier process and the leaders.

    python tests/audit/run.py [--short] [--seed N] [--store file|s3] [--json FILE] [--dir DIR]

Three nodes with a tier.  A producer writes transactions to a plain topic and to a compacted one,
and aborts three of ten.  Meanwhile the jobs `compaction`, `optimize`, `snapshot` and `sweep` run
again and again, and other engines run OPTIMIZE, Z-order and VACUUM.  At random moments SIGKILL
takes the tier process of an owner, the broker of a leader, and the driver of a job: each 20 times,
and of the drivers every fifth time together with Spark.  Then every job runs once to its end.
These must hold:

  - `pk maintenance run audit` is clean for both topics.
  - The plain topic: a read_committed consumer and the table have each committed record once.
  - The compacted topic: consumer, table and snapshot have the latest value of each key.
  - No row of an aborted transaction is in a table, or comes to the consumer.
  - A sweep removes the uploads that no version names, and no other file.
  - No job ends with an error that is not to be retried; no process logs a bug.

Exit 1 = one of these is broken.  A short run has one node, and kills each twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

for _shared in ("fixtures", "kit"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _shared))

# ruff: noqa: E402 - the campaign's own modules are found by the path above
import judge
from campaign import Verdict, begun, options, store_of
from load import COMPACTED, PARTITIONS, PLAIN, TOPICS, Load
from outside import OPERATIONS, Outside
from runs import Drivers, JobLoop

from pk import AdminClient, errors
from pk.cli.embedded import EmbeddedCluster, pk_command
from pk.client.admin import NewTopic
from pk.clock import block_s, monotonic_s

KILLS, SHORT_KILLS = 20, 2
PAUSE_S, SHORT_PAUSE_S = (1.0, 8.0), (0.5, 3.0)
PATIENCE_S = 900.0
#: The campaign itself: every process is killed as often as wanted within this time.
CAMPAIGN_S = 3_600.0
SETTINGS = {
    "broker_session_timeout_ms": 3_000,
    "broker_heartbeat_interval_ms": 300,
    "tier_merge_interval_ms": 3_000,
    "tier_vacuum_interval_ms": 5_000,
}
TOPIC = {
    "retention_ms": -1,
    "tier_max_lag_ms": 1_000,
    "segment_bytes": 16_384,
    "local_retention_bytes": 0,
    "local_drop_delay_ms": 0,
}
COMPACTION = {"cleanup_policy": "compact", "delete_retention_ms": 1_000}
JOBS: dict[str, tuple[tuple[str, ...], Callable[[random.Random], dict[str, Any]]]] = {
    "compaction": ((COMPACTED,), lambda _: {"force": True, "target_bytes": 30_000}),
    "optimize": (TOPICS, lambda rng: {"target_bytes": rng.choice((20_000, 200_000))}),
    "snapshot": ((COMPACTED,), lambda rng: {"whole": rng.random() < 0.2}),
    "sweep": (TOPICS, lambda _: {"older_than_ms": 3_600_000}),
}


@dataclass
class AuditVerdict(Verdict):
    """What the campaign found."""

    store: str = "file"
    transactions: int = 0
    aborted: int = 0
    rows: int = 0  #: of both tables, at the end
    kills: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    outside: dict[str, int] = field(default_factory=dict)
    uploads_left: int = 0


class Campaign:
    """The campaign on a cluster that has started."""

    def __init__(
        self,
        cluster: EmbeddedCluster,
        folder: Path,
        verdict: AuditVerdict,
        table_options: dict[str, str] | None,
        *,
        short: bool,
    ) -> None:
        self._cluster, self._folder, self._verdict = cluster, folder, verdict
        self._options, self._short = table_options, short
        self._kills = SHORT_KILLS if short else KILLS
        self._ended = threading.Event()
        self.drivers = Drivers(folder, cluster.address, table_options or {})
        self.load = Load(cluster.address, verdict.seed, short=short)
        self._began_s = monotonic_s()
        self._loops = [
            JobLoop(
                self.drivers, job, topics, given, self._kills, self._random(job),
                short=short, broken=verdict.broken.append,
            )
            for job, (topics, given) in JOBS.items()
        ]  # fmt: skip

    def say(self, words: str) -> None:
        """Print how far the campaign is."""
        print(f"{monotonic_s() - self._began_s:5.0f} s  {words}", flush=True)

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{self._verdict.seed} {name}")

    def start(self) -> None:
        """Make the topics, start the load, and wait until both have a table."""
        self.drivers.start()
        copies = len(self._cluster.nodes)
        made = [
            NewTopic(PLAIN, PARTITIONS, TOPIC, copies),
            NewTopic(COMPACTED, PARTITIONS, {**TOPIC, **COMPACTION}, copies),
        ]
        with AdminClient(self._cluster.address) as admin:
            for each in admin.create_topics(made, timeout_s=60):
                if each.error is not None:
                    raise each.error
            self.load.start()
            self.uris = {topic: self._until_table(admin, topic) for topic in TOPICS}
        self.say("both topics have a table")
        store = self._folder / "data"  # of the S3 server
        self._outside = Outside(
            self.drivers,
            self._cluster.address,
            self.uris,
            self._options,
            store,
            self._random("outside"),
            self._verdict.broken.append,
            short=self._short,
        )

    def _until_table(self, admin: AdminClient, topic: str) -> str:
        deadline = monotonic_s() + PATIENCE_S
        while (found := admin.describe_tier(topic, timeout_s=60)).version < 1 or not found.uri:
            if monotonic_s() > deadline:
                raise TimeoutError(f"{topic} has no table: {found.status}")
            block_s(0.2)
        return found.uri

    # -- faults ------------------------------------------------------------------------------------

    def strike(self) -> None:
        """Kill everything as often as wanted."""
        deadline = monotonic_s() + CAMPAIGN_S
        for thread in (*self._loops, self._outside):
            thread.start()
        rng = self._random("nodes")
        planned = ["tier", "broker"] * self._kills
        rng.shuffle(planned)
        for role in planned:
            block_s(rng.uniform(*(SHORT_PAUSE_S if self._short else PAUSE_S)))
            self._kill(role, rng)
        told = 0
        while not all(each.done for each in (*self._loops, self._outside)):
            if (killed := sum(each.killed for each in self._loops)) >= told + self._kills:
                told = killed
                self.say(f"drivers of jobs were killed {killed} times")
            if monotonic_s() > deadline or self._verdict.broken:
                break
            block_s(0.2)
        for thread in (*self._loops, self._outside):
            thread.stop()
        self.say("everything was killed as often as wanted")
        self._note()

    def _kill(self, role: str, rng: random.Random) -> None:
        """Kill the broker that leads a partition, or the tier process beside it."""
        topic, partition = rng.choice(TOPICS), rng.randrange(PARTITIONS)
        leader = self._leader(topic, 0 if role == "tier" else partition)
        server = self._cluster.nodes[leader]
        old = server.pids().get(role, 0)
        if server.kill(role):
            counts = self._verdict.kills
            counts[role] = counts.get(role, 0) + 1
        server.wait_restarted(role, old)
        self.say(f"the {role} of node {leader} was killed")

    def _leader(self, topic: str, partition: int) -> int:
        deadline = monotonic_s() + PATIENCE_S
        while monotonic_s() < deadline:
            with contextlib.suppress(errors.PkError):
                with AdminClient(self._cluster.address) as admin:
                    states = admin.describe_topics([topic], timeout_s=20)
                leader = next(each.leader for each in states if each.partition == partition)
                if leader in self._cluster.nodes:
                    return leader
            block_s(0.2)
        raise TimeoutError(f"{topic}-{partition} has no leader")

    def _note(self) -> None:
        verdict = self._verdict
        for each in self._loops:
            verdict.kills[each.job] = each.killed
            verdict.finished[each.job] = each.finished
            verdict.refused[each.job] = each.refused
            wanted = f"{each.job}: killed {each.killed} times, finished {each.finished} times"
            verdict.check(each.done, wanted)
        verdict.kills["with Spark"] = self.drivers.jvms_killed
        verdict.outside = dict(self._outside.counts)
        verdict.check(self._outside.done, f"outside: {verdict.outside}")

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """End the load, run every job to its end, and judge."""
        verdict, load = self._verdict, self.load
        load.stop()
        verdict.check(load.failure is None, f"the producer failed: {load.failure!r}")
        verdict.transactions, verdict.aborted = load.transactions, load.aborted
        self._until_tiered()
        self.say("the tables have every record")
        for job, (topics, given) in JOBS.items():
            for topic in topics:
                self._finish(job, topic, given(self._random("end")))
        left = [path.name for path in self._outside.left if path.exists()]
        verdict.uploads_left = len(self._outside.left)
        verdict.check(not left, f"sweeps left {len(left)} uploads: {left[:2]}")
        for topic in TOPICS:
            self._finish("audit", topic, {})
            if not self._short:
                self._audit(topic)
        verdict.rows = judge.check_all(
            verdict, load, self._cluster.address, self._options, PATIENCE_S
        )

    def _until_tiered(self) -> None:
        deadline = monotonic_s() + PATIENCE_S
        with AdminClient(self._cluster.address) as admin:
            for topic in TOPICS:
                while any(each.lag for each in admin.describe_tier(topic).partitions):
                    if monotonic_s() > deadline:
                        self._verdict.check(False, f"{topic}: {admin.describe_tier(topic)}")
                        return
                    block_s(0.2)

    def _finish(self, job: str, topic: str, given: dict[str, Any]) -> None:
        """Run a job to its end; another job's lease is waited for."""
        deadline = monotonic_s() + PATIENCE_S
        while monotonic_s() < deadline:
            run = self.drivers.run(job, topic, given)
            run.ended.wait(PATIENCE_S)
            result = run.result or {"told": "no result", "retriable": False}
            if result.get("outcome") == "done":
                self.say(f"{job} of {topic}: {result['told']}")
                return
            if not (result.get("retriable") or result.get("error") == "LeaseHeld"):
                break
            block_s(0.5)
        self._verdict.check(False, f"{job} of {topic} at the end: {run.result}")

    def _audit(self, topic: str) -> None:
        """Run the audit as an operator does."""
        done = subprocess.run(
            pk_command(
                "maintenance", "run", "audit", topic, "--bootstrap", self._cluster.address,
                "--master", "local[2]",
            ),
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            env={**os.environ, **(self._options or {})},
        )  # fmt: skip
        told = f"{done.stdout}{done.stderr}"[-2_000:]
        self._verdict.check(done.returncode == 0, f"audit of {topic}: {done.returncode}, {told}")


def show(verdict: AuditVerdict) -> None:
    """Print the figures as a table."""
    print(f"{'':12} {'killed':>8} {'finished':>9} {'refused':>8}")
    for name, killed in verdict.kills.items():
        done, refused = verdict.finished.get(name, ""), verdict.refused.get(name, "")
        print(f"{name:12} {killed:8} {done:>9} {refused:>8}")
    for name in OPERATIONS:
        conflicts = verdict.outside.get(f"{name} conflicts", 0)
        print(f"outside {name}: {verdict.outside.get(name, 0)}, conflicts: {conflicts}")


def main() -> int:
    """Run the campaign and print its verdict."""
    parser = options(__doc__, "one node; each is killed twice")
    parser.add_argument("--store", choices=("file", "s3"), default="file")
    given = parser.parse_args()
    folder = begun(given, "audit")
    verdict = AuditVerdict(given.seed, store=given.store)
    copies = 1 if given.short else 3
    began_s = monotonic_s()
    with store_of(given.store, folder) as (tier, table_options):
        settings = {**SETTINGS, **tier, "default_replication_factor": copies}
        settings["min_insync_replicas"] = (copies + 1) // 2
        with EmbeddedCluster(folder, nodes=copies, settings=settings) as cluster:
            campaign = Campaign(cluster, folder, verdict, table_options, short=given.short)
            try:
                campaign.start()
                campaign.strike()
                campaign.finish()
            finally:
                campaign.drivers.stop()
            verdict.check_nodes(cluster)
    show(verdict)
    told = (
        f"{verdict.transactions} transactions and {verdict.aborted} aborted ones in "
        f"{monotonic_s() - began_s:.0f} s, {verdict.rows} rows in the tables, "
        f"{verdict.uploads_left} uploads left behind and swept"
    )
    return verdict.end(told, given.json)


if __name__ == "__main__":
    sys.exit(main())
