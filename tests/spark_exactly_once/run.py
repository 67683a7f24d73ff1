"""Exactly once through Spark: a verdict over a streaming query whose driver and tasks are killed.

    python tests/spark_exactly_once/run.py [--together] [--short] [--seed N] [--store file|s3]
                                           [--json FILE]

One node with a tier.  A query (driver.py) copies a topic in micro-batches of 300 records.  Its
whole process group, or one Python worker, dies with SIGKILL at every step of a batch, several times
each, and between runs the checkpoint is set one batch back.  Then the query runs to its end.  These
must hold, for each record of the source:

  - A read_committed consumer gets it once.
  - `format("pk")` reads it once, hot and cold together.
  - The table of the target has it once, and no record of an aborted attempt.
  - The table and the consumer agree on offset and value.

With `--together` the query writes each micro-batch to the topic and to a Delta table beside it, by
`commit_together`.  The table, as Spark reads it, must then have each record once, too.

Exit 1 = one of these is broken.  `--store s3` has the tier in an S3 server of its own; the table of
`--together` is always in a directory, because Spark writes Delta to S3 only with hadoop-aws.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

for _shared in ("fixtures", "kit"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _shared))

# ruff: noqa: E402 - the modules of campaigns are found by the paths above
import campaign as kit
from campaign import store_of

from pk import AdminClient, Producer
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE, TARGET = "in", "out"
PARTITIONS = 3
TASK_STEPS = ("task-begin", "task-middle", "task-end")
DRIVER_STEPS = ("commit-begin", "commit-end")
TOGETHER_STEPS = ("prepare-begin", "table-begin", "table-end", "decide-end")
SHORT_STEPS = {*DRIVER_STEPS, "table-begin", "table-end"}
DRIVER = Path(__file__).parent / "driver.py"
#: New records for each run: five micro-batches, of which one of the first dies.
RUN_RECORDS, DEATH_MAX = 1_500, 4
SHORT_RECORDS, SHORT_DEATH_MAX = 900, 2
RUN_S = 900.0


@dataclass
class Verdict(kit.Verdict):
    """What the campaign found."""

    store: str
    records: int = 0
    batches: int = 0
    driver_deaths: int = 0
    worker_deaths: int = 0
    set_back: int = 0
    table_rows: int = 0
    aborted_rows: int = 0
    together_rows: int | None = None


def values(first: int, last: int) -> list[bytes]:
    return [f"record {number}".encode() for number in range(first, last)]


def fill(address: str, first: int, last: int) -> None:
    """Produce these records of the source, in turn to each partition."""
    with Producer(address) as producer:
        for number, value in enumerate(values(first, last)):
            producer.send(SOURCE, value, partition=number % PARTITIONS)
        producer.flush(120)


class Query:
    """The runs of the query."""

    def __init__(self, address: str, folder: Path, *, together: bool = False) -> None:
        self.address, self.folder = address, folder
        #: URL of the Delta table that gets each batch, too.
        self.together = (folder / "together").as_uri() if together else ""
        self.checkpoint = folder / "checkpoint"
        self.runs = 0

    def run(self, death: dict[str, Any] | None = None) -> bool:
        """Run the query; returns whether the death that was planned took place."""
        self.runs += 1
        plan, done = self.folder / "death.json", self.folder / "death.done"
        for old in (plan, done, self.folder / "passed"):
            old.unlink(missing_ok=True)
        log = (self.folder / f"driver-{self.runs}.log").open("wb")
        # The group has to be known before the plan can name it, so a shell waits for one line.
        process = subprocess.Popen(
            ["sh", "-c", 'read -r _; exec "$@"', "sh", sys.executable, str(DRIVER), self.address,
             str(self.checkpoint), str(self.folder), *filter(None, [self.together])],
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        if death is not None:
            plan.write_text(json.dumps({**death, "group": process.pid}))
        try:
            process.communicate(b"\n", timeout=RUN_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.close()
        if process.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError(f"run {self.runs} ended with {process.returncode}: {self.tail()}")
        return done.exists()

    def tail(self) -> str:
        text = (self.folder / f"driver-{self.runs}.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-40:])

    def _newest(self, kind: str) -> int:
        folder = self.checkpoint / kind
        names = [each.name for each in folder.iterdir()] if folder.exists() else []
        return max((int(name) for name in names if name.isdigit()), default=-1)

    @property
    def batches(self) -> int:
        return self._newest("commits") + 1

    def set_back(self) -> bool:
        """Set the checkpoint one batch back, if Spark has finished the newest batch."""
        newest = self._newest("commits")
        if newest < 1 or newest != self._newest("offsets"):
            return False
        for name in (str(newest), f".{newest}.crc"):
            (self.checkpoint / "commits" / name).unlink(missing_ok=True)
        return True


def consumed(address: str, *, committed: bool) -> list[tuple[int, int, bytes]]:
    """Return (partition, offset, value) of the target."""
    rows = kit.rows_of(address, TARGET, PARTITIONS, 120, committed=committed)
    return sorted(
        (number, offset, value) for number, found in rows.items() for offset, _, value in found
    )


@contextlib.contextmanager
def spark_session() -> Iterator[SparkSession]:
    """A session of this process, for one thing."""
    from pk.sparkconnector import session

    spark = session(app_name="judge", master="local[2]")
    try:
        yield spark
    finally:
        spark.stop()


def read_by_spark(address: str) -> list[tuple[int, int, bytes]]:
    """Return (partition, offset, value) of the target, as `format("pk")` reads them."""
    with spark_session() as spark:
        frame = spark.read.format("pk").options(subscribe=TARGET, startingOffsets="earliest")
        rows = frame.option("pk.bootstrap.servers", address).load()
        found = rows.select("partition", "offset", "value").collect()
        return sorted((row[0], row[1], bytes(row[2])) for row in found)


def create_together(url: str) -> None:
    """Create the table that gets each batch beside the topic."""
    with spark_session() as spark:
        empty = spark.range(0).selectExpr("cast(null as binary) key", "cast(null as binary) value")
        empty.write.format("delta").save(url)


def values_together(url: str) -> Counter[bytes]:
    """Return how often the table beside the topic has each value."""
    with spark_session() as spark:
        rows = spark.read.format("delta").load(url).select("value").collect()
    return Counter(bytes(row.value) for row in rows)


def table_of(
    address: str, options: dict[str, str] | None, ends: dict[int, int]
) -> list[tuple[int, int, bytes]]:
    """Return (partition, offset, value) of the target's table once it reaches `ends`."""
    from deltalake import DeltaTable

    deadline = monotonic_s() + 180
    with AdminClient(address) as admin:
        while (found := admin.describe_tier(TARGET)).version < 0 or not found.uri:
            if monotonic_s() > deadline:
                raise RuntimeError("the target has no table")
            block_s(0.5)
    while True:
        table = DeltaTable(found.uri, storage_options=options)
        rows = table.to_pyarrow_table(columns=["partition", "offset", "value"])
        got = sorted(zip(*(rows.column(n).to_pylist() for n in rows.column_names), strict=True))
        reached = dict.fromkeys(ends, -1)
        for partition, offset, _ in got:
            reached[partition] = max(reached[partition], offset)
        if all(reached[number] >= end for number, end in ends.items()):
            return got
        if monotonic_s() > deadline:
            raise RuntimeError(f"the table reaches {reached}, the last records are {ends}")
        block_s(1)


def deaths(rng: random.Random, *, together: bool, short: bool) -> list[tuple[str, bool]]:
    """Return the steps at which a run dies, and whether all of it does; only tasks die alone.

    The last run of a short campaign loses a task only, so that it also finishes the query.
    """
    of_driver = [(step, True) for step in (TOGETHER_STEPS if together else DRIVER_STEPS)]
    alone = [(step, False) for step in TASK_STEPS]
    every = [(step, True) for step in TASK_STEPS] + of_driver + alone
    planned = [each for each in of_driver if each[0] in SHORT_STEPS] if short else every * 3
    rng.shuffle(planned)
    return [*planned, alone[1]] if short else planned


def campaign(query: Query, rng: random.Random, verdict: Verdict, *, short: bool) -> None:
    """Kill the query at each step, with new records for each run, and let it finish."""
    records, last = (SHORT_RECORDS, SHORT_DEATH_MAX) if short else (RUN_RECORDS, DEATH_MAX)
    for step, whole in deaths(rng, together=bool(query.together), short=short):
        fill(query.address, verdict.records, verdict.records + records)
        verdict.records += records
        before = query.batches
        died = query.run({"step": step, "whole": whole, "count": rng.randint(1, last)})
        verdict.driver_deaths += died and whole
        verdict.worker_deaths += died and not whole
        kind = "run" if whole else "worker"
        print(f"{step:13} {kind:6} died={died} batches {before} to {query.batches}", flush=True)
        if rng.random() < 0.3 and query.set_back():
            verdict.set_back += 1
    if not short:
        query.run()
    for _ in range(1 if short else 2):
        verdict.set_back += query.set_back()
        query.run()


def judge(query: Query, verdict: Verdict, options: dict[str, str] | None) -> None:
    """Compare source, consumer, `format("pk")` and table."""
    address = query.address
    wanted = Counter(values(0, verdict.records))
    got = consumed(address, committed=True)
    counts = Counter(value for _, _, value in got)
    lost, more = wanted - counts, counts - wanted
    verdict.check(not lost, f"the consumer lacks {sum(lost.values())}: {sorted(lost)[:3]}")
    verdict.check(not more, f"the consumer has {sum(more.values())} too many: {sorted(more)[:3]}")
    verdict.aborted_rows = len(consumed(address, committed=False)) - len(got)
    verdict.check(read_by_spark(address) == got, 'format("pk") and the consumer differ')
    ends = {
        number: max((o for p, o, _ in got if p == number), default=-1)
        for number in range(PARTITIONS)
    }
    rows = table_of(address, options, ends)
    verdict.table_rows = len(rows)
    verdict.check(rows == got, f"the table has {len(rows)} rows, the consumer {len(got)}")
    if query.together:
        beside = values_together(query.together)
        verdict.together_rows = beside.total()
        lost, more = wanted - beside, beside - wanted
        verdict.check(not lost, f"the table beside lacks {lost.total()}: {sorted(lost)[:3]}")
        verdict.check(not more, f"the table beside repeats {more.total()}: {sorted(more)[:3]}")
    verdict.batches = query.batches


def run(seed: int, store: str, work: Path, *, together: bool, short: bool) -> Verdict:
    """Run the campaign in `work`; returns its verdict."""
    verdict = Verdict(seed, store)
    settings = {"tier_max_lag_ms": 2_000, "participant_lease_ms": 20_000}
    with (
        store_of(store, work) as (tier, options),
        EmbeddedServer(work / "pk", settings={**settings, **tier}) as server,
    ):
        with AdminClient(server.address) as admin:
            admin.create_topic(SOURCE, PARTITIONS, {"retention_ms": -1, "tier_enable": False})
            admin.create_topic(TARGET, PARTITIONS, {"retention_ms": -1, "segment_ms": 5_000})
        query = Query(server.address, work, together=together)
        if together:
            create_together(query.together)
        campaign(query, random.Random(seed), verdict, short=short)
        judge(query, verdict, options)
    return verdict


def main() -> int:
    """Run the campaign of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--together", action="store_true", help="by commit_together")
    parser.add_argument("--short", action="store_true", help="three deaths")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--store", choices=("file", "s3"), default="file")
    parser.add_argument("--json", type=Path, help="write the verdict to this file")
    given = parser.parse_args()
    seed = random.randrange(1 << 31) if given.seed is None else given.seed
    print(f"SEED {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="pk-spark-exactly-once-") as folder:
        work = Path(folder)
        verdict = run(seed, given.store, work, together=given.together, short=given.short)
    for name, value in asdict(verdict).items():
        print(f"{name:15} {value}")
    if given.json:
        given.json.write_text(json.dumps(asdict(verdict), indent=1) + "\n")
    return 1 if verdict.broken else 0


if __name__ == "__main__":
    sys.exit(main())
