"""A rolling upgrade of three nodes under load: from an older build to this one, and back.

    python tests/golden/upgrade.py [--from COMMIT] [--records-per-s N] [--json FILE]

The older build is the first commit with this build's format, or `--from`.  It is unpacked beside,
and a node runs it when PYTHONPATH names it.  Each step stops one node with SIGTERM, starts it with
the other build, and waits until every partition has all replicas in sync:

    old old old -> new new new -> old old old -> new new new

The level of `pk.format` is not raised, so the way back is open.  At the end every partition is read
from offset 0 and compared with the ledger (tests/chaos/ledger.py).  Exit 1: a demand of the ledger
is broken, a node did not start, or a process logged a bug.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "chaos"))

from ledger import Ledger, Outcome, Read, number_of
from load import Load

from pk import AdminClient, Consumer, Producer, TopicPartition
from pk.cli.embedded import EmbeddedCluster
from pk.clock import block_s, monotonic_s
from pk.log import directory

ROOT = Path(__file__).resolve().parents[2]
TOPIC = "upgraded"
PARTITIONS = 3
PATIENCE_S = 120.0
SETTINGS = {"default_replication_factor": 3, "min_insync_replicas": 2, "retention_ms": -1}


def git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True).stdout


def first_of_this_format() -> str:
    """The oldest commit whose directories this build opens."""
    word = f"FORMAT = {directory.FORMAT}"
    listed = git("log", "--format=%H", "-S", word, "--", "log/directory.py").decode().split()
    if not listed:
        raise SystemExit("no commit has this build's format yet: commit first, or give --from")
    return listed[-1]


def unpack(commit: str, into: Path) -> Path:
    """The package of `commit`; returns the path for PYTHONPATH."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        archive.extractall(into, filter="tar")
    return into / "src"


@contextmanager
def build_of(path: Path | None) -> Iterator[None]:
    """Processes that start meanwhile run the build at `path`; None = this one."""
    before = os.environ.pop("PYTHONPATH", None)
    if path is not None:
        os.environ["PYTHONPATH"] = str(path)
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH", None)
        if before is not None:
            os.environ["PYTHONPATH"] = before


def wait_in_sync(cluster: EmbeddedCluster) -> None:
    deadline = monotonic_s() + PATIENCE_S
    with AdminClient(cluster.address) as admin:
        while any(len(one.isr) < 3 for one in admin.describe_topics([TOPIC], timeout_s=60)):
            if monotonic_s() > deadline:
                raise RuntimeError("a replica does not come back into the ISR")
            block_s(0.2)


def change(cluster: EmbeddedCluster, node: int, build: Path | None) -> None:
    """Stop a node in order and start it with another build."""
    server = cluster.nodes[node]
    code = server.stop(PATIENCE_S)
    if code:
        raise RuntimeError(f"node {node} ended with {code}\n{server.tail()}")
    with build_of(build):
        server.start(PATIENCE_S)
    wait_in_sync(cluster)


def read_all(cluster: EmbeddedCluster) -> dict[int, Read]:
    """Every partition, from its start."""
    places = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
    found = {number: Read() for number in range(PARTITIONS)}
    with Consumer(cluster.address, auto_offset_reset="earliest") as consumer:
        consumer.assign(places)
        ends = consumer.end_offsets(places, timeout_s=PATIENCE_S)
        deadline = monotonic_s() + PATIENCE_S
        while any(consumer.position(place) < ends[place] for place in places):
            if monotonic_s() > deadline:
                raise RuntimeError("the consumer stands still")
            for place, rows in consumer.poll_batches(timeout_s=0.5):
                values = rows.column("value").to_pylist()
                offsets = rows.column("offset").to_pylist()
                found[place.partition].add(offsets, [number_of(value) for value in values])
    return found


def run(commit: str, records_per_s: int, home: Path) -> dict[str, Any]:
    old = unpack(commit, home / "old")
    cluster = EmbeddedCluster(home / "nodes", nodes=3, settings=SETTINGS)
    ledger = Ledger()
    with build_of(old):
        cluster.start()
    try:
        with AdminClient(cluster.address) as admin:
            admin.create_topic(TOPIC, PARTITIONS, {"tier_enable": False}, replication_factor=3)
        wait_in_sync(cluster)
        with Producer(cluster.address, delivery_timeout_ms=int(PATIENCE_S * 1000)) as producer:
            load = Load(
                producer, ledger, random.Random(1), topic=TOPIC, partitions=PARTITIONS,
                records_per_s=records_per_s,
            )  # fmt: skip
            thread = threading.Thread(target=load.run)
            thread.start()
            try:
                for build, name in ((None, "new"), (old, "old"), (None, "new")):
                    for node in cluster.nodes:
                        change(cluster, node, build)
                        print(f"node {node} runs the {name} build", flush=True)
            finally:
                load.stop.set()
                thread.join()
            producer.flush(PATIENCE_S)
        if load.failure is not None:
            raise load.failure
        violations = [
            words
            for number, found in read_all(cluster).items()
            for words in ledger.violations(number, found)
        ]
    finally:
        cluster.stop_together(PATIENCE_S)
    bugs = sum(
        line.count("BUG") for node in cluster.nodes.values() for line in [node.log.read_text()]
    )
    return {
        "from": commit[:10],
        "steps": 9,
        "acknowledged": ledger.count(Outcome.ACKNOWLEDGED),
        "failed": len(ledger) - ledger.count(Outcome.ACKNOWLEDGED),
        "violations": violations,
        "bugs": bugs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="commit", default="", help="the older build")
    parser.add_argument("--records-per-s", type=int, default=2000)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pk-upgrade-") as home:
        commit = options.commit or first_of_this_format()
        found = run(commit, options.records_per_s, Path(home))
    print(json.dumps(found, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    kept = not (found["violations"] or found["bugs"] or found["failed"])
    return 0 if kept and found["acknowledged"] else 1


if __name__ == "__main__":
    sys.exit(main())
