"""What a thousand groups of ten members cost their coordinator, and how soon it is replaced.

    python -m bench.many_groups [--groups 1000] [--members 10] [--seconds 60] [--spread] [--json]

Three nodes on loopback, replication factor 3, min_insync_replicas 2.  The members are simulated
(bench/simulated_group): each has a stream of its own and sends heartbeats every 3 s, each of which
waits at the coordinator for news, as a consumer's does.  Two hundred members share a TCP
connection.  All groups have one coordinator, which is the worst case; `--spread` takes their names
as they come, so that the three brokers share them, and reports the one with the most CPU time.

Goals: the coordinator's broker process uses at most 50 % of a core while nothing happens, has grown
by at most 300 MB since before the groups, and its event loop runs 99 % of the timers at most 20 ms
late.  Nothing is rebalanced meanwhile.

Then kill -9 ends all processes of the coordinator's node, and a member of each group commits until
its commit is stored.  The figure is the time from the kill to the last of these commits.  No group
may be rebalanced by it.

It prints a table and, with --json, one line of JSON.  Exit 1 = a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import processes
from bench.runs import ROOT, RunFailed
from pk import AdminClient, group_ids
from pk.cli.embedded import EmbeddedCluster
from pk.client.admin import NewTopic
from pk.clock import block_s, monotonic_s

TOPIC = "many"
NODES = (1, 2, 3)
SETTINGS = {
    "default_replication_factor": 3,
    "min_insync_replicas": 2,
    "group_initial_rebalance_delay_ms": 500,
}
STABLE_S = 300.0
COMMITTED_S = 180.0
REST_S = 10.0  #: after the last join
#: goal → (unit, the largest value that reaches it)
GOALS: Mapping[str, tuple[str, float]] = {
    "cpu": ("% of a core", 50.0),
    "rss_growth": ("MB", 300.0),
    "loop_lag_p99": ("ms", 20.0),
    "memberships_lost": ("", 0.0),
    "joins_again": ("", 0.0),
}
_BUCKET = re.compile(r'^pk_loop_lag_ms_bucket\{le="([^"]+)"\} (\S+)$', re.M)

Buckets = dict[float, float]


def group_names(count: int, partitions: Sequence[int] | None) -> list[str]:
    """Return names of groups, spread evenly over these partitions of `__consumer_offsets`.

    partitions: None = the names as they come
    """
    if partitions is None:
        return [f"many{number}" for number in range(count)]
    left = {each: -(-count // len(partitions)) for each in partitions}
    found: list[str] = []
    for number in itertools.count():
        name = f"many{number}"
        partition = group_ids.partition_of_group(name)
        if left.get(partition, 0) > 0:
            left[partition] -= 1
            found.append(name)
            if len(found) == count:
                return found
    raise AssertionError


def buckets(text: str) -> Buckets:
    """Return the histogram of the broker's loop lag from its metrics: bound → count below it."""
    return {float(bound): float(count) for bound, count in _BUCKET.findall(text)}


def quantile(before: Buckets, after: Buckets, share: float) -> float:
    """Return the quantile of what came between two readings, interpolated within its bucket.

    Beyond the last finite bound, that bound.
    """
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in sorted(after)}
    wanted = share * max(counts.values(), default=0.0)
    low_bound = low_count = 0.0
    for bound, count in counts.items():
        if count >= wanted:
            if bound == float("inf") or count == low_count:
                return low_bound
            return low_bound + (bound - low_bound) * (wanted - low_count) / (count - low_count)
        low_bound, low_count = bound, count
    return low_bound


def missed(figures: Mapping[str, float]) -> list[str]:
    """Return the goals that are missed."""
    return [name for name, (_, limit) in GOALS.items() if figures[name] > limit]


class Swarms:
    """The processes of simulated members."""

    def __init__(self, command: list[str], shares: Sequence[Sequence[str]]) -> None:
        self._processes: list[subprocess.Popen[str]] = []
        self.stable = [0] * len(shares)
        self.commits_ms: list[dict[str, float]] = []  #: what `committed` lines said
        self.ended: list[dict[str, Any]] = []
        self._readers: list[threading.Thread] = []
        for number, groups in enumerate(shares):
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            self._processes.append(process)
            reader = threading.Thread(target=self._read, args=(number, process), daemon=True)
            reader.start()
            self._readers.append(reader)
            self._write(process, "".join(f"{group}\n" for group in groups) + "\n")

    def _write(self, process: subprocess.Popen[str], text: str) -> None:
        assert process.stdin is not None
        process.stdin.write(text)
        process.stdin.flush()

    def _read(self, number: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            told = json.loads(line)
            if told["what"] == "stable":
                self.stable[number] = told["groups"]
            elif told["what"] == "committed":
                self.commits_ms.append(told)
            else:
                self.ended.append(told)

    def until(self, holds: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until it holds.  Raises `RunFailed` at the time-out, or if a process ended."""
        deadline = monotonic_s() + timeout_s
        while not holds():
            codes = [process.poll() for process in self._processes]
            if any(code is not None for code in codes):
                raise RunFailed(f"a process of members ended: {codes}")
            if monotonic_s() > deadline:
                raise RunFailed(f"not {what} within {timeout_s:g} s: {self.stable} groups stable")
            block_s(0.05)

    def commit(self, timeout_s: float) -> Callable[[], float]:
        """Ask each group to commit; the function waits, and returns when the last one was stored,
        in seconds of the common clock.
        """
        self.commits_ms.clear()
        for process in self._processes:
            self._write(process, "commit\n")

        def done() -> float:
            count = len(self._processes)
            self.until(lambda: len(self.commits_ms) == count, timeout_s, "committed")
            return max(each["at_ms"] for each in self.commits_ms) / 1000

        return done

    def mark(self) -> None:
        """Count from here what members meet."""
        for process in self._processes:
            self._write(process, "mark\n")

    def counts(self) -> dict[str, int]:
        """End the processes; return what their members have met since `mark`, summed."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process, reader in zip(self._processes, self._readers, strict=True):
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            reader.join(10)
        names = ("joins", "lookups", "lost")
        return {name: sum(each[name] for each in self.ended) for name in names}

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class Broker:
    """The broker process of one node, as `/proc` and its metrics show it."""

    def __init__(self, cluster: EmbeddedCluster, node: int, metrics: str) -> None:
        self.node, self._metrics = node, metrics
        self._pid = cluster.nodes[node].pids()["broker"]

    def lag(self) -> Buckets:
        with urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=60) as answer:
            return buckets(answer.read().decode())

    def cpu_s(self) -> float:
        return processes.cpu_s([self._pid])

    def rss_mb(self) -> float:
        return processes.rss_mb([self._pid])


@contextlib.contextmanager
def _cluster() -> Iterator[tuple[EmbeddedCluster, dict[int, str]]]:
    with tempfile.TemporaryDirectory(prefix="pk-many-groups-") as folder:
        cluster = EmbeddedCluster(Path(folder), nodes=0, settings=SETTINGS)
        metrics = {node: cluster.ports.address() for node in NODES}
        for node, address in metrics.items():
            cluster.add(node, metrics=address)
        try:
            cluster.start()
            yield cluster, metrics
        finally:
            cluster.stop()


def _leaders(admin: AdminClient) -> dict[int, int]:
    """Return the leader of each partition of `__consumer_offsets`, once all have three replicas in
    sync.
    """
    deadline = monotonic_s() + 120
    while True:
        states = admin.describe_topics([group_ids.TOPIC], timeout_s=60)
        if len(states) == group_ids.PARTITIONS and all(
            len(each.isr) == len(NODES) for each in states
        ):
            return {each.partition: each.leader for each in states}
        if monotonic_s() > deadline:
            raise RunFailed(f"{group_ids.TOPIC} is not whole: {states}")
        block_s(0.2)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    """Run everything; returns the figures."""
    with _cluster() as (cluster, metrics), AdminClient(cluster.address) as admin:
        for result in admin.create_topics([NewTopic(TOPIC, given.members, {}, 3)], timeout_s=60):
            if result.error is not None:
                raise result.error
        topic_id = admin.topic_ids([TOPIC])[TOPIC]
        _first_group(cluster.address)
        leaders = _leaders(admin)
        chosen = leaders[0]
        here = None if given.spread else [at for at, node in leaders.items() if node == chosen]
        names = group_names(given.groups, here)
        brokers = {node: Broker(cluster, node, metrics[node]) for node in NODES}
        rss_before = {node: broker.rss_mb() for node, broker in brokers.items()}
        command = [sys.executable, "-m", "bench.group_swarm", "--bootstrap", cluster.address]
        command += ["--topic", TOPIC, "--topic-id", topic_id, "--members", str(given.members)]
        shares = [names[at :: given.processes] for at in range(given.processes)]
        swarms = Swarms(command, [share for share in shares if share])
        try:
            found = _steady(swarms, brokers, given, rss_before, None if given.spread else chosen)
            found |= _failover(swarms, cluster, int(found["node"]))
            counts = swarms.counts()
        finally:
            swarms.kill()
    return found | {
        "groups": given.groups,
        "members": given.groups * given.members,
        "coordinator_partitions": group_ids.PARTITIONS if here is None else len(here),
        "memberships_lost": counts["lost"],
        "joins_again": counts["joins"],
        "lookups": counts["lookups"],
        "load": round(os.getloadavg()[1], 1),
    }


def _first_group(address: str) -> None:
    """Have a group commit, so that `__consumer_offsets` exists before anything is measured."""
    from pk import Consumer, TopicPartition

    with Consumer(address, group_id="first") as consumer:
        consumer.commit({TopicPartition(TOPIC, 0): 0}, timeout_s=60)


def _steady(
    swarms: Swarms,
    brokers: Mapping[int, Broker],
    given: argparse.Namespace,
    rss_before: Mapping[int, float],
    chosen: int | None,
) -> dict[str, float]:
    """Return what the groups cost while nothing happens; chosen: their coordinator, None = the
    broker with the most CPU time.
    """
    begin = monotonic_s()
    swarms.until(lambda: sum(swarms.stable) == given.groups, STABLE_S, "stable")
    joined_s = monotonic_s() - begin
    swarms.mark()
    block_s(REST_S)
    lags = {node: broker.lag() for node, broker in brokers.items()}
    spent = {node: broker.cpu_s() for node, broker in brokers.items()}
    begin = monotonic_s()
    block_s(given.seconds)
    elapsed = monotonic_s() - begin
    used = {node: (broker.cpu_s() - spent[node]) / elapsed for node, broker in brokers.items()}
    node = chosen if chosen is not None else max(used, key=lambda each: used[each])
    lag = quantile(lags[node], brokers[node].lag(), 0.99)
    return {
        "node": node,
        "joined_s": round(joined_s, 1),
        "cpu": round(100 * used[node], 1),
        "cpu_of_others": round(100 * (sum(used.values()) - used[node]), 1),
        "rss_growth": round(brokers[node].rss_mb() - rss_before[node], 1),
        "loop_lag_p99": round(lag, 1),
    }


def _failover(swarms: Swarms, cluster: EmbeddedCluster, node: int) -> dict[str, float]:
    """Return how long all groups need for a commit: as it is, and after their coordinator died."""
    begin = monotonic_s()
    usual_s = swarms.commit(COMMITTED_S)() - begin
    begin = monotonic_s()
    cluster.kill(node)
    failover_s = swarms.commit(COMMITTED_S)() - begin
    return {"commit_s": round(usual_s, 2), "failover_s": round(failover_s, 2)}


_UNITS = {"joined_s": "s", "commit_s": "s", "failover_s": "s", "cpu_of_others": "% of a core"}


def table(figures: Mapping[str, float]) -> str:
    """Return the figures in lines, with their goals."""
    lines = []
    for name, value in figures.items():
        unit, limit = GOALS.get(name, (_UNITS.get(name, ""), None))
        goal = "" if limit is None else f"at most {limit:g}"
        mark = "" if limit is None else "missed" if value > limit else "reached"
        lines.append(f"{name:<24}{value:>12,g} {unit:<12}{goal:<16}{mark}".rstrip())
    return "\n".join(lines)


def main() -> int:
    """Measure once; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--groups", type=int, default=1_000)
    parser.add_argument("--members", type=int, default=10, help="of each group, at most 99")
    parser.add_argument("--seconds", type=float, default=60.0, help="of the steady window")
    parser.add_argument("--processes", type=int, default=4, help="of simulated members")
    parser.add_argument("--spread", action="store_true", help="let all brokers coordinate")
    parser.add_argument("--json", action="store_true", help="print one line of JSON, too")
    given = parser.parse_args()
    try:
        figures = measured(given)
    except RunFailed as failure:
        print(f"RunFailed: {failure}", file=sys.stderr)
        return 1
    print(table(figures))
    if given.json:
        print(json.dumps({"name": "many_groups", **figures, "missed": missed(figures)}))
    return 1 if missed(figures) else 0


if __name__ == "__main__":
    sys.exit(main())
