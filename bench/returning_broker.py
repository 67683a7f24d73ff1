"""A broker returns to its partitions after a long absence, under half the peak load (rule R12).

    python -m bench.returning_broker [--partitions 200] [--absent-s 60] [--rounds 3]

Three nodes on loopback, replication factor 3, min_insync_replicas 2, acks=all.  First the peak is
measured, with all three nodes.  Then node 3 is killed, half the peak is produced while it is away,
and it starts again under the same load.  It prints one line of JSON: the peak, the backlog,
the seconds until each partition has three replicas in sync, and how often a member of an ISR left
it meanwhile, which must be 0.  Exit 1 = a member left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa

from pk import AdminClient, Producer
from pk.cli.embedded import EmbeddedCluster
from pk.client.admin import NewTopic
from pk.clock import block_s, monotonic_s

TOPIC, RETURNS = "load", 3
ROWS, VALUE_BYTES = 2_000, 1_000
PEAK_S, WHOLE_S = 10.0, 600.0


class Load:
    """A producer over all partitions.  rate: bytes a second; None = as many as it can."""

    def __init__(self, address: str, partitions: int, rate: float | None) -> None:
        self.sent = 0
        self.error: BaseException | None = None
        self._address, self._partitions, self._rate = address, partitions, rate
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._begin = monotonic_s()
        self._thread.start()

    def _run(self) -> None:
        values = pa.array([os.urandom(VALUE_BYTES)] * ROWS, pa.binary())
        spread = pa.array([row % self._partitions for row in range(ROWS)], pa.int32())
        batch = pa.RecordBatch.from_arrays([values, spread], ["value", "partition"])
        try:
            with Producer(self._address, acks="all") as producer:
                waiting: list[Any] = []
                while not self._ended.is_set():
                    waiting.append(producer.send_batch(TOPIC, batch))
                    if len(waiting) > 8:
                        waiting.pop(0).result(120)
                    self.sent += ROWS * VALUE_BYTES
                    if self._rate is not None:
                        ahead_s = self.sent / self._rate - (monotonic_s() - self._begin)
                        self._ended.wait(max(0.0, ahead_s))
                for each in waiting:
                    each.result(120)
        except BaseException as error:
            self.error = error

    def stop(self) -> float:
        """Wait until all is acknowledged; returns bytes a second."""
        self._ended.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.sent / (monotonic_s() - self._begin)


def shrinks(metrics: dict[int, str]) -> int:
    """Return how often the leaders that stayed have removed a replica from an ISR."""
    found = 0
    for node, address in metrics.items():
        if node == RETURNS:
            continue
        text = urllib.request.urlopen(f"http://{address}/metrics", timeout=60).read().decode()
        for count in re.findall(r'^pk_isr_changes_total\{.*"shrink".*\} (\S+)$', text, re.M):
            found += int(float(count))
    return found


def until_in_sync(admin: AdminClient, count: int) -> None:
    """Wait until the ISRs of the topic have `count` members together."""
    deadline = monotonic_s() + WHOLE_S
    while sum(len(each.isr) for each in admin.describe_topics([TOPIC], timeout_s=60)) != count:
        if monotonic_s() > deadline:
            raise TimeoutError(f"the ISRs do not reach {count} members")
        block_s(0.5)


def round_of(folder: Path, partitions: int, absent_s: float) -> dict[str, float]:
    """Run one round in `folder`; returns its figures."""
    cluster = EmbeddedCluster(folder, nodes=0, settings={"auto_leader_rebalance_enable": False})
    metrics = {node: cluster.ports.address() for node in (1, 2, RETURNS)}
    for node, address in metrics.items():
        cluster.add(node, metrics=address)
    cluster.start()
    stays = ",".join(cluster.brokers[node] for node in (1, 2))
    try:
        with AdminClient(stays) as admin:
            topic = NewTopic(TOPIC, partitions, {"min_insync_replicas": "2"}, 3)
            for result in admin.create_topics([topic], timeout_s=120):
                if result.error is not None:
                    raise result.error
            until_in_sync(admin, 3 * partitions)
            load = Load(cluster.address, partitions, None)
            block_s(PEAK_S)
            peak = load.stop()
            cluster.nodes[RETURNS].kill()
            until_in_sync(admin, 2 * partitions)
            load = Load(stays, partitions, peak / 2)
            block_s(absent_s)
            backlog, before = load.sent, shrinks(metrics)
            begin = monotonic_s()
            cluster.nodes[RETURNS].start()
            until_in_sync(admin, 3 * partitions)
            took_s = monotonic_s() - begin
            left = shrinks(metrics) - before
            rate = load.stop()
    finally:
        cluster.stop()
    return {
        "peak_mb_per_s": round(peak / 1e6, 1),
        "load_mb_per_s": round(rate / 1e6, 1),
        "backlog_mb": round(backlog / 1e6),
        "in_sync_after_s": round(took_s, 1),
        "left_the_isr": left,
    }


def main() -> int:
    """Run the rounds of the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--partitions", type=int, default=200)
    parser.add_argument("--absent-s", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    found = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory(prefix="pk-returning-") as folder:
            found.append(round_of(Path(folder), given.partitions, given.absent_s))
        print(json.dumps({"partitions": given.partitions, **found[-1]}), flush=True)
    return 1 if any(each["left_the_isr"] for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
