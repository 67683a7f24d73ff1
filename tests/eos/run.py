"""Exactly once under kills: a verdict over a read-process-write loop in transactions.

    python tests/eos/run.py [--short] [--seed N] [--json FILE] [--dir DIR]

Three nodes, replication factor 3, min_insync_replicas 2.  A copier (copier.py) copies a topic of
100,000 records in transactions of 750.  Meanwhile brokers are killed with SIGKILL and started
again, three times, and so is the copier, three times, each at a random moment.  A read_committed
consumer reads the output all the time.  At the end these must hold:

  - The output is the input: each record once, in the order of its partition.
  - The consumer that read meanwhile got the same records in the same order.
  - No transaction is left open: the last stable offset is the high watermark.
  - No process logged a bug.

Then a producer is killed in a transaction, six times, and its coordinator and a leader of its
partitions die with it: three times one node that is both, three times the brokers of two nodes.
A read_committed consumer must go on within the transaction timeout and two seconds.  A short run
has no such rounds.

Exit 1 = one of these is broken.
"""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
for _shared in ("fixtures", "kit"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _shared))

# ruff: noqa: E402 - the modules of campaigns are found by the paths above
import campaign
from copier import BATCH, INPUT, OUTPUT, PROGRESS
from judging import difference
from left_open import BROKERS, NODE, TRANSACTION_TIMEOUT_MS, LeftOpen

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedCluster
from pk.client.admin import NewTopic
from pk.clock import block_s, monotonic_s

PARTITIONS = 4
RECORDS = 25_000  #: of each partition
SHORT_RECORDS = 4_000
BOUNCES = 3
LEFT_OPEN_ROUNDS = 3  #: of each kind
#: From the begin of a transaction that is left open until its readers go on.
LEFT_OPEN_LIMIT_MS = TRANSACTION_TIMEOUT_MS + 2_000
SETTINGS = {
    "default_replication_factor": 3,
    "min_insync_replicas": 2,
    "retention_ms": -1,
    "broker_session_timeout_ms": 3_000,
    "broker_heartbeat_interval_ms": 300,
}
PATIENCE_S = 240.0
COPIER = Path(__file__).parent / "copier.py"


@dataclass
class Verdict(campaign.Verdict):
    """What the run found."""

    records: int
    transactions: int = 0
    aborted: int = 0
    broker_kills: int = 0
    copier_kills: int = 0
    left_open_ms: list[int | None] = field(default_factory=list)


class Follower:
    """A read_committed consumer in its own thread, through all kills."""

    def __init__(self, bootstrap: str) -> None:
        self.read: dict[int, list[bytes]] = {number: [] for number in range(PARTITIONS)}
        self.failure: BaseException | None = None
        self._bootstrap = bootstrap
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with Consumer(self._bootstrap, auto_offset_reset="none") as consumer:
                places = [TopicPartition(OUTPUT, number) for number in self.read]
                consumer.assign(places)
                for place in places:
                    consumer.seek(place, 0)
                while not self._stop.is_set():
                    self._poll(consumer)
        except BaseException as failure:
            self.failure = failure

    def _poll(self, consumer: Consumer) -> None:
        try:
            for place, batch in consumer.poll_batches(timeout_s=0.5):
                self.read[place.partition] += batch.column("value").to_pylist()
        except errors.RetriableError:
            block_s(0.1)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join(30)


class Run:
    """One run over a cluster that has started."""

    def __init__(self, cluster: EmbeddedCluster, folder: Path, verdict: Verdict) -> None:
        self._cluster = cluster
        self._log = folder / "copier.log"
        self._verdict = verdict
        self._rng = random.Random(verdict.seed)
        self._copier: subprocess.Popen[bytes] | None = None

    def fill(self) -> None:
        """Make the topics and the input."""
        with AdminClient(self._cluster.address) as admin:
            names = ((INPUT, PARTITIONS), (OUTPUT, PARTITIONS), (PROGRESS, 1))
            made = admin.create_topics(
                [NewTopic(name, count, {}, 3) for name, count in names], timeout_s=60
            )
            for each in made:
                if each.error is not None:
                    raise each.error
        with Producer(self._cluster.address, acks="all") as producer:
            for number in range(PARTITIONS):
                for n in range(self._verdict.records):
                    producer.send(INPUT, b"%d-%06d" % (number, n), partition=number)
            producer.flush(120)

    def start_copier(self) -> None:
        """Start a copier; its lines go to the log."""
        with self._log.open("ab") as log:
            self._copier = subprocess.Popen(
                [
                    sys.executable, str(COPIER), "--bootstrap", self._cluster.address,
                    "--partitions", str(PARTITIONS), "--records", str(self._verdict.records),
                ],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _lines(self) -> list[str]:
        return self._log.read_text(errors="replace").splitlines() if self._log.exists() else []

    def _committed(self) -> int:
        return sum(line.startswith("committed ") for line in self._lines())

    def _progress(self, more: int) -> None:
        """Wait until `more` transactions were committed, or the copier has ended."""
        wanted, deadline = self._committed() + more, monotonic_s() + PATIENCE_S
        while self._committed() < wanted:
            assert self._copier is not None
            code = self._copier.poll()
            if code == 0:
                return
            if code is not None:
                self._verdict.check(False, f"the copier ended with {code}: {self._lines()[-3:]}")
                self.start_copier()
            if monotonic_s() > deadline:
                self._verdict.check(False, f"no commit for {PATIENCE_S} s: {self._lines()[-3:]}")
                return
            block_s(0.02)

    def bounce(self) -> None:
        """Kill brokers and copiers in turn, each some transactions after the one before."""
        each = max(1, PARTITIONS * self._verdict.records // BATCH // (6 * BOUNCES))
        for _ in range(BOUNCES):
            self._progress(self._rng.randint(1, each))
            node = self._rng.choice(list(self._cluster.nodes))
            self._cluster.kill(node)
            self._verdict.broker_kills += 1
            self._progress(1)
            assert self._copier is not None
            block_s(self._rng.uniform(0, 0.3))
            if self._copier.poll() is None:
                self._copier.kill()
                self._copier.wait()
                self._verdict.copier_kills += 1
                self.start_copier()
            self._cluster.start_nodes([node])

    def finish(self) -> None:
        """Wait until the copier has copied everything."""
        assert self._copier is not None
        deadline = monotonic_s() + PATIENCE_S
        while (code := self._copier.poll()) is None and monotonic_s() < deadline:
            block_s(0.1)
        self._verdict.check(code == 0, f"the copier ended with {code}: {self._lines()[-3:]}")
        if code is None:
            self._copier.kill()
            self._copier.wait()
        self._verdict.transactions = self._committed()
        self._verdict.aborted = sum(line.startswith("aborted: ") for line in self._lines())

    def judge(self, follower: Follower) -> None:
        """Compare the output with the input, and with what the consumer read meanwhile."""
        expected = {
            number: [b"%d-%06d" % (number, n) for n in range(self._verdict.records)]
            for number in range(PARTITIONS)
        }
        found = self._read_all()
        for number, rows in expected.items():
            self._verdict.check(
                found[number] == rows, difference(f"output {number}", rows, found[number])
            )
        deadline = monotonic_s() + 60
        while follower.read != found and monotonic_s() < deadline and follower.failure is None:
            block_s(0.2)
        follower.stop()
        self._verdict.check(follower.failure is None, f"the consumer failed: {follower.failure!r}")
        for number, rows in found.items():
            read = follower.read[number]
            self._verdict.check(read == rows, difference(f"read meanwhile {number}", rows, read))
        self._verdict.check(self._closed(), "a transaction is still open")

    def _read_all(self) -> dict[int, list[bytes]]:
        rows = campaign.rows_of(self._cluster.address, OUTPUT, PARTITIONS, 120)
        return {number: [row[2] for row in found] for number, found in rows.items()}

    def _closed(self) -> bool:
        """Whether every last stable offset reaches its high watermark soon."""
        deadline = monotonic_s() + 30
        while monotonic_s() < deadline:
            with AdminClient(self._cluster.address) as admin:
                states = admin.describe_topics([OUTPUT, PROGRESS], timeout_s=60)
            if all(each.last_stable_offset == each.high_watermark for each in states):
                return True
            block_s(0.5)
        return False


def leave_open(cluster: EmbeddedCluster, verdict: Verdict) -> None:
    """Judge how soon readers go on after producer, coordinator and leader died together."""
    rounds = LeftOpen(cluster)
    for dies in [NODE, BROKERS] * LEFT_OPEN_ROUNDS:
        took_ms = rounds.round(dies)
        verdict.left_open_ms.append(took_ms)
        verdict.check(
            took_ms is not None and took_ms <= LEFT_OPEN_LIMIT_MS,
            f"{dies} died with a producer: readers went on after {took_ms} ms, "
            f"{LEFT_OPEN_LIMIT_MS} are allowed",
        )


def main() -> int:
    """Run the campaign and print its verdict."""
    given = campaign.options(__doc__, f"{SHORT_RECORDS} records a partition").parse_args()
    folder = campaign.begun(given, "eos")
    verdict = Verdict(given.seed, SHORT_RECORDS if given.short else RECORDS)
    with EmbeddedCluster(folder, settings=SETTINGS) as cluster:
        run = Run(cluster, folder, verdict)
        run.fill()
        follower = Follower(cluster.address)
        run.start_copier()
        run.bounce()
        run.finish()
        run.judge(follower)
        if not given.short:
            leave_open(cluster, verdict)
        verdict.check_nodes(cluster)
    if verdict.left_open_ms:
        print(f"ms until readers went on after a transaction left open: {verdict.left_open_ms}")
    told = (
        f"{PARTITIONS * verdict.records} records in {verdict.transactions} transactions, "
        f"{verdict.aborted} aborted; {verdict.broker_kills} brokers and {verdict.copier_kills} "
        "copiers killed"
    )
    return verdict.end(told, given.json)


if __name__ == "__main__":
    sys.exit(main())
