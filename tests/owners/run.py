"""Many owners, many files, constant retention: a verdict over the lag of the tables and the jobs.

    python tests/owners/run.py [--short] [--files N] [--owners N] [--seed N] [--json FILE] [--dir D]

Ten nodes lead the partitions of one topic, so ten tier processes commit to one table.  Its files
hold 1 KiB of the log each and are never merged.  The producer first fills the table until it names
100,000 files.  Then `retention_bytes` is set to what the table has, so each file that comes makes
an older one go, and the producer goes on at a steady rate.  These must hold:

  - No stable record waits for its table for `tier_max_lag_ms`, on any node, while files come and
    go, and while the job below runs.
  - Meanwhile `pk maintenance run optimize` ends with 0: it has merged the files.
  - At the end `pk maintenance run audit` is clean, and a consumer reads every record from the
    begin of each partition to its end, in order.

Exit 1 = one of these is broken.  A short run has three nodes and 300 files.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

for _shared in ("fixtures", "kit", "soak"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _shared))

# ruff: noqa: E402 - the modules of campaigns are found by the paths above
import campaign
import pyarrow as pa
from measuring import told

from pk import AdminClient, Producer, errors
from pk.cli.embedded import EmbeddedCluster, pk_command
from pk.client.admin import TierDescription
from pk.clock import block_s, monotonic_s

TOPIC = "wide"
OWNERS, SHORT_OWNERS = 10, 3
FILES, SHORT_FILES = 100_000, 300
VOTERS = 3
PARTITIONS, SHORT_PARTITIONS = 80, 5  #: of each owner
RECORDS, VALUE_BYTES = 10, 120  #: of one batch, which fills one file
MAX_LAG_MS = 60_000
#: Batches a second, in all: while the table is filled, and afterwards.
FILL_RATE, RATE, SHORT_RATE = 2_000, 20, 6
STEADY_S, SHORT_STEADY_S = 120.0, 10.0
#: Records of a partition that wait for the table while it is filled: more than its copier builds
#: files of before a commit.
AHEAD = 60
PATIENCE_S = 3_600.0
SEGMENT_BYTES = 14_336
SETTINGS = {
    "broker_session_timeout_ms": 9_000,
    "broker_heartbeat_interval_ms": 1_000,
    "log_retention_check_interval_ms": 1_000,
    "default_replication_factor": 1,
    "min_insync_replicas": 1,
}
CONFIGS = {
    "tier_file_bytes": 1_024,
    "tier_small_file_bytes": 0,
    "tier_max_lag_ms": MAX_LAG_MS,
    "segment_bytes": SEGMENT_BYTES,
    "retention_ms": -1,
    "local_retention_bytes": SEGMENT_BYTES,
    "local_drop_delay_ms": 0,
}


@dataclass
class Verdict(campaign.Verdict):
    """What the run found.  Times are ms; a phase's lag is the largest of any node."""

    owners: int
    files: int  #: named by the table as retention began
    lag_ms: dict[str, float] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    removed: int = 0  #: records that retention took from the table
    files_after: int = 0
    merged_rows: int = 0  #: by the job
    job: str = ""
    records: int = 0


class Load(threading.Thread):
    """Sends one batch after another to the partitions in turn, at a rate that can be changed."""

    def __init__(self, address: str, partitions: int) -> None:
        super().__init__(daemon=True)
        self.rate = 0.0  #: batches a second
        self.sent = 0  #: batches
        self.failure: BaseException | None = None
        self._address, self._partitions = address, partitions
        self._ended = threading.Event()

    def run(self) -> None:
        try:
            with Producer(self._address, linger_ms=0, batch_size=4_096) as producer:
                while not self._ended.wait(0.02):
                    for _ in range(max(1, round(self.rate * 0.02)) if self.rate else 0):
                        producer.send_batch(TOPIC, self._batch())
                    if 0 < self.rate < 50:
                        self._ended.wait(1 / self.rate)
                producer.flush(60)
        except BaseException as failure:
            self.failure = failure

    def _batch(self) -> pa.RecordBatch:
        number = self.sent // self._partitions
        values = [b"%08d-%d" % (number, n) + bytes(VALUE_BYTES) for n in range(RECORDS)]
        partition = pa.array([self.sent % self._partitions] * RECORDS, pa.int32())
        self.sent += 1
        return pa.record_batch({"value": pa.array(values, pa.binary()), "partition": partition})

    def stop(self) -> None:
        """End; every record that was sent is acknowledged then."""
        self._ended.set()
        self.join(120)


class Lag(threading.Thread):
    """Looks at the lag of every node's tables; `begin` names the phase that it belongs to."""

    def __init__(self, cluster: EmbeddedCluster, verdict: Verdict) -> None:
        super().__init__(daemon=True)
        self._addresses = [str(each.settings["metrics"]) for each in cluster.nodes.values()]
        self._lag = verdict.lag_ms
        self._phase = ""
        self._ended = threading.Event()

    def now(self) -> float:
        """Return the largest lag of a node."""
        return max(told(address).value("pk_tier_lag_ms") for address in self._addresses)

    def begin(self, phase: str) -> None:
        """Count what is seen from now on to this phase."""
        self._phase = phase

    def run(self) -> None:
        while not self._ended.wait(1.0):
            phase = self._phase
            for address in self._addresses:
                with contextlib.suppress(OSError):
                    seen = told(address).value("pk_tier_lag_ms")
                    self._lag[phase] = max(self._lag.get(phase, 0.0), seen)

    def stop(self) -> None:
        """End."""
        self._ended.set()
        self.join(60)


class Run:
    """One run over a cluster that has started."""

    def __init__(
        self,
        cluster: EmbeddedCluster,
        verdict: Verdict,
        table_options: dict[str, str] | None,
        *,
        short: bool,
    ) -> None:
        self._cluster, self._verdict, self._short = cluster, verdict, short
        self._environment = {**os.environ, **(table_options or {})}  #: credentials of the store
        self._partitions = (SHORT_PARTITIONS if short else PARTITIONS) * verdict.owners
        self._admin = AdminClient(cluster.address)
        self._load = Load(cluster.address, self._partitions)
        self._lag = Lag(cluster, verdict)
        self._began_s = monotonic_s()

    def say(self, words: str) -> None:
        """Print how far the run is."""
        print(f"{monotonic_s() - self._began_s:5.0f} s  {words}", flush=True)

    def fill(self, files: int) -> None:
        """Make the topic, and fill its table with so many files."""
        self._admin.create_topic(TOPIC, self._partitions, CONFIGS, timeout_s=60)
        self._load.start()
        self._lag.begin("fill")
        self._lag.start()
        deadline, printed = monotonic_s() + PATIENCE_S, 0
        while (found := self._files(table := self._table())) < files:
            waiting = sum(each.lag for each in table.partitions)
            self._load.rate = FILL_RATE if waiting < AHEAD * self._partitions else 0
            if found >= printed + files // 10:
                printed = found
                self.say(f"{found} files, version {table.version}")
            if monotonic_s() > deadline or self._load.failure is not None:
                raise TimeoutError(f"{found} files: {table.status}, {self._load.failure!r}")
            block_s(0.5)
        self._load.rate = 0
        self._until_tiered()

    def _until_tiered(self) -> None:
        """Wait until the table has every record, and each node has seen that."""
        deadline = monotonic_s() + PATIENCE_S
        while any(each.lag for each in self._table().partitions) or self._lag.now() > 0:
            if monotonic_s() > deadline:
                raise TimeoutError(f"records still wait: {self._table().status}")
            block_s(0.5)

    def _table(self) -> TierDescription:
        """Return the table; asks again while its owner cannot answer."""
        deadline = monotonic_s() + 120
        while True:
            try:
                return self._admin.describe_tier(TOPIC, timeout_s=60)
            except errors.RetriableError:
                if monotonic_s() > deadline:
                    raise
                block_s(0.5)

    @staticmethod
    def _files(table: TierDescription) -> int:
        return sum(each.files for each in table.partitions)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Note the lag and the versions of a phase; its lag must be below the topic's bound."""
        verdict, before = self._verdict, self._table().version
        self._lag.begin(name)
        begun = monotonic_s()
        yield
        verdict.versions[name] = self._table().version - before
        verdict.check(name in verdict.lag_ms, f"{name}: no node has told its lag")
        lag = verdict.lag_ms.get(name, 0.0)
        self.say(
            f"{name}: {verdict.versions[name]} versions in {monotonic_s() - begun:.0f} s, "
            f"lag {lag:.0f} ms, {self._files(self._table())} files"
        )
        verdict.check(lag < MAX_LAG_MS, f"{name}: records waited {lag:.0f} ms, not {MAX_LAG_MS}")

    def steady(self) -> None:
        """Let files come and go for a while."""
        verdict, before = self._verdict, self._table()
        verdict.files = self._files(before)
        kept = min(each.bytes for each in before.partitions)
        self._admin.alter_configs(
            TOPIC, {"retention_bytes": max(kept, SEGMENT_BYTES)}, timeout_s=60
        )
        self._load.rate = SHORT_RATE if self._short else RATE
        with self._phase("steady"):
            block_s(SHORT_STEADY_S if self._short else STEADY_S)
        after = self._table()
        verdict.removed = sum(each.start for each in after.partitions)
        verdict.check(verdict.removed > 0, "retention removed nothing")

    def optimize(self) -> None:
        """Run the job as an operator does, under the same load."""
        verdict = self._verdict
        with self._phase("optimize"):
            code, verdict.job = self._maintain("optimize")
        verdict.check(code == 0, f"optimize ended with {code}: {verdict.job}")
        verdict.files_after = self._files(self._table())
        if code == 0:
            report = json.loads(verdict.job.splitlines()[-1])
            verdict.merged_rows = int(report["rewritten_rows"])
        verdict.check(verdict.merged_rows > 0, "optimize merged nothing")
        # a small table is gone before a job ends
        verdict.check(
            self._short or verdict.files_after < verdict.files / 2,
            f"optimize left {verdict.files_after} of {verdict.files} files",
        )

    def _maintain(self, job: str) -> tuple[int, str]:
        done = subprocess.run(
            pk_command(
                "maintenance", "run", job, TOPIC, "--bootstrap", self._cluster.address,
                "--master", "local[2]", "--json",
            ),
            capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=self._environment,
        )  # fmt: skip
        output = done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}"
        output = output.strip()[-1_000:]
        self.say(f"{job}: {output[:300]}")
        return done.returncode, output

    def finish(self) -> None:
        """End the load, and judge the table and the log."""
        verdict, load = self._verdict, self._load
        load.stop()
        verdict.check(load.failure is None, f"the producer failed: {load.failure!r}")
        self._until_tiered()
        self._lag.stop()
        # nothing is removed while the two are compared
        self._admin.alter_configs(TOPIC, {"retention_bytes": -1}, timeout_s=60)
        code, words = self._maintain("audit")
        verdict.check(code == 0, f"the audit ended with {code}: {words}")
        self._read()

    def _read(self) -> None:
        """Read all: each partition has what was sent to it, in order, from its begin on."""
        found = campaign.rows_of(
            self._cluster.address, TOPIC, self._partitions, PATIENCE_S, columns=("offset", "value")
        )
        for partition, rows in found.items():
            batches = (self._load.sent - partition - 1) // self._partitions + 1
            expected = [
                (RECORDS * number + n, b"%08d-%d" % (number, n) + bytes(VALUE_BYTES))
                for number in range(batches)
                for n in range(RECORDS)
            ]
            first = rows[0][0] if rows else 0
            self._verdict.records += len(rows)
            self._verdict.check(
                rows == expected[first:],
                f"partition {partition}: {len(rows)} records from {first}, "
                f"{len(expected) - first} were sent",
            )

    def close(self) -> None:
        """Close the connections."""
        self._admin.close()


def cluster_of(folder: Path, owners: int, tier: dict[str, Any]) -> EmbeddedCluster:
    """Return a cluster of so many brokers, of which three are controllers, too."""
    cluster = EmbeddedCluster(folder, nodes=VOTERS, settings={**SETTINGS, **tier})
    if owners > VOTERS:
        cluster.add(*range(VOTERS + 1, owners + 1), roles="broker")
    for server in cluster.nodes.values():
        server.settings["metrics"] = cluster.ports.address()
    return cluster


def main() -> int:
    """Run the campaign and print its verdict."""
    parser = campaign.options(__doc__, "three nodes, 300 files")
    parser.add_argument("--files", type=int)
    parser.add_argument("--owners", type=int)
    parser.add_argument("--store", choices=("file", "s3"), default="file")
    given = parser.parse_args()
    folder = campaign.begun(given, "owners")
    owners = given.owners or (SHORT_OWNERS if given.short else OWNERS)
    files = given.files or (SHORT_FILES if given.short else FILES)
    verdict = Verdict(given.seed, owners, 0)
    with (
        campaign.store_of(given.store, folder) as (tier, table_options),
        cluster_of(folder, owners, tier) as cluster,
    ):
        run = Run(cluster, verdict, table_options, short=given.short)
        run.fill(files)
        run.steady()
        run.optimize()
        run.finish()
        run.close()
        verdict.check_nodes(cluster)
    told_lag = ", ".join(f"{name} {lag:.0f}" for name, lag in verdict.lag_ms.items())
    words = (
        f"{owners} owners, {verdict.files} files, {verdict.files_after} after optimize; lag in ms: "
        f"{told_lag}; retention removed {verdict.removed} records, {verdict.records} are read"
    )
    return verdict.end(words, given.json)


if __name__ == "__main__":
    sys.exit(main())
