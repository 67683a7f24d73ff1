"""An hour of three nodes under full load, without faults: are there false alarms?

    python tests/soak/cluster_run.py --minutes 60 [--json FILE] [--dir DIR] [--churn-s S]
        [--rate RECORDS_PER_S]

Three real nodes with the default timeouts, replication factor 3, min_insync_replicas 2, acks=all.
Columnar producers send as fast as the nodes accept, a consumer follows, a probe sends single
records at a steady pace, and an administrator creates and deletes topics.  The run injects no
fault.  Every fenced broker, every election, every replica that leaves an in-sync set and every
change of the controller is therefore a false alarm (alarms.py).  All processes share this machine,
so each of them is without a core now and then.

The run also judges: every acknowledged batch is read once, where it was acknowledged (numbered.py);
disk; and memory, once retention has been steady for a while.  It reports without a goal: the
longest time without any acknowledgement, loop lags, how late the controllers fetch, throughput per
minute.  Exit code 1 = an alarm, or a goal that was missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import alarms
import numbered
from alarms import Alarm, Look
from churn import Churn
from figures import (
    MIB,
    Sample,
    Verdict,
    bound_of,
    disk_verdict,
    lag_verdict,
    median,
    slope_verdict,
    table,
    window,
)
from measuring import Told, descriptors_of, disk_bytes, free_port, pressure, sample, told
from numbered import Run

from pk import AdminClient, errors
from pk.cli.embedded import EmbeddedCluster
from pk.client.admin import PartitionDescription
from pk.clock import block_s, monotonic_s, wall_ms
from pk.log import batch as batches
from pk.server.metadata.records import decode_batches

TOPIC, PROBED = "soak", "probe"
PARTITIONS = 3
SEGMENT = 64 * MIB
RETENTION = 384 * MIB
TOPIC_SETTINGS = {
    "segment_bytes": SEGMENT,
    "retention_bytes": RETENTION,
    "file_delete_delay_ms": 1_000,
}
#: The timeouts are the server's defaults, because the run tests these.
SERVER_SETTINGS = {
    "default_replication_factor": 3,
    "min_insync_replicas": 2,
    "log_retention_check_interval_ms": 1_000,
}
#: Per partition: the retained segments (up to one more than the bound), and the active one.
KEPT_BYTES = PARTITIONS * (RETENTION + 2 * SEGMENT)
#: Also records that arrive before retention runs, and before its segments are deleted.
DELETED_AFTER_MS = (
    SERVER_SETTINGS["log_retention_check_interval_ms"] + TOPIC_SETTINGS["file_delete_delay_ms"]
)
RECORD_BYTES = numbered.VALUE_BYTES + 4  #: a value and its offset
GIVE_UP_TIMES = 5  #: this machine's disk shall not fill up
PRODUCERS = 2
CHURN_S = 10.0
NEVER_S = 1e9
LOOK_S = 1.0
TELL_EVERY = 2  #: looks, for one reading of the metrics
ASK_S = 10.0
WHOLE_S = 120.0
END_S = 300.0
SETTLE_S = 30.0
#: Slopes of less are noise: they are reported and not judged.
JUDGED_S = 900.0
#: A slope looks at all pairs of samples: an hour's are thinned to at most so many.
SAMPLES_MAX = 400
HERE = Path(__file__).parent


def place_of(state: PartitionDescription) -> str:
    return f"{state.topic}-{state.partition}"


class Children:
    """The processes that load the cluster."""

    def __init__(
        self, cluster: EmbeddedCluster, root: Path, seconds: float, rate: float | None
    ) -> None:
        self._root = root
        self._running: dict[str, subprocess.Popen[str]] = {}
        where = ["--bootstrap", cluster.address]
        for number in range(PRODUCERS):
            options = ["--seconds", str(seconds), "--first", str(number * numbered.APART)]
            acked = ["--acked", str(self.acked(number))]
            if rate is not None:
                acked += ["--rate", str(rate / PRODUCERS)]
            self._spawn(f"load {number}", "load.py", *where, "--topic", TOPIC, *options, *acked)
        count = ["--partitions", str(PARTITIONS)]
        runs = ["--runs", str(root / "runs.json")]
        self._spawn("consumer", "follow.py", *where, "--topic", TOPIC, *count, *runs)
        self._spawn("probe", "probe.py", *where, "--topic", PROBED, *count)

    def wait_ready(self) -> None:
        """Wait until all of them work; they end in order when they are asked to."""
        for name, process in self._running.items():
            assert process.stdout is not None
            if "ready" not in process.stdout.readline():
                raise RuntimeError(f"{name} did not start")

    def _spawn(self, name: str, script: str, *options: str) -> None:
        command = [sys.executable, str(HERE / script), *options]
        self._running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def acked(self, number: int) -> Path:
        return self._root / f"acked{number}"

    def dead(self) -> list[str]:
        """Return the names of those that have failed."""
        return [name for name, process in self._running.items() if process.poll()]

    def finish(self) -> dict[str, Any]:
        """End them, the writers first; return what each found."""
        return {
            name: self._finish(name)
            for name in sorted(self._running, key=lambda name: name == "consumer")
        }

    def _finish(self, name: str) -> Any:
        process = self._running[name]
        if process.poll() is None:
            process.terminate()
        out, _ = process.communicate(timeout=END_S)
        if process.returncode != 0:
            raise RuntimeError(f"{name} ended with {process.returncode}")
        return json.loads(out.splitlines()[-1])

    def kill(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()

    def records(self) -> tuple[dict[int, list[Run]], dict[str, dict[int, Any]]]:
        """Return the acknowledged runs by partition, and what the consumer read and lost."""
        acked: dict[int, list[Run]] = defaultdict(list)
        for number in range(PRODUCERS):
            for line in self.acked(number).read_text().splitlines():
                partition, *run = map(int, line.split())
                acked[partition].append(Run(*run))
        kept = json.loads((self._root / "runs.json").read_text())
        runs = {int(p): [Run(*run) for run in each] for p, each in kept["runs"].items()}
        skipped = {int(p): [tuple(e) for e in each] for p, each in kept["skipped"].items()}
        return dict(acked), {"runs": runs, "skipped": skipped}


class Watch:
    """Looks at everything each second, from outside."""

    def __init__(self, cluster: EmbeddedCluster, admin: AdminClient) -> None:
        self._cluster, self._admin = cluster, admin
        self._looks = 0
        self._look: Look | None = None
        self._pids: dict[str, int] = {}
        self.seen: list[Alarm] = []
        self.begin_s = monotonic_s()
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self.disk: dict[int, list[int]] = defaultdict(list)
        self.machine: list[
            tuple[float, float, int, int]
        ] = []  #: load, pressure of cpu and io in ms
        self.took_ms: list[tuple[float, int]] = []  #: how long an answer of the admin API took
        self.unanswered = 0
        self.high_watermarks: list[tuple[float, int]] = []
        self.fetch_gap_ms = 0  #: of a controller that follows, at a look
        self.steady_s: float | None = None
        self.before: dict[int, Told] = {}
        self.after: dict[int, Told] = {}
        self.lags: list[tuple[float, dict[str, dict[float, float]]]] = []

    @property
    def now_s(self) -> float:
        return monotonic_s() - self.begin_s

    def look(self) -> None:
        self._processes()
        self._ask()
        if self._looks % TELL_EVERY == 0:
            self._read_metrics()
        for node, server in self._cluster.nodes.items():
            self.disk[node].append(disk_bytes(server.data))
        cpu_ms, io_ms = pressure("cpu", "some"), pressure("io", "full")
        self.machine.append((self.now_s, os.getloadavg()[0], cpu_ms, io_ms))
        self._looks += 1

    def _processes(self) -> None:
        pids = {
            f"node {node} {role}": pid
            for node, server in self._cluster.nodes.items()
            for role, pid in server.pids().items()
        }
        for name in self._pids:
            if pids.get(name) != self._pids[name]:
                what = f"{name}: process {self._pids[name]} is now {pids.get(name)}"
                self.seen.append(Alarm(alarms.DIED, wall_ms(), what))
        self._pids = pids
        try:
            descriptors = descriptors_of(pids, looks=1)
            for name, pid in pids.items():
                self.samples[name].append(sample(pid, self.now_s, descriptors[name]))
        except FileNotFoundError:
            return  # it died while we looked: the next look counts it

    def _ask(self) -> None:
        begin = monotonic_s()
        try:
            states = self._admin.describe_topics([TOPIC, PROBED], timeout_s=ASK_S)
            quorum = self._admin.describe_metadata_quorum(timeout_s=ASK_S)
        except errors.PkError as trouble:
            self.unanswered += 1
            print(f"{self.now_s:7.1f} s: nobody answers: {trouble}", file=sys.stderr, flush=True)
            return
        finally:
            self.took_ms.append((self.now_s, round(1000 * (monotonic_s() - begin))))
        look = Look(
            wall_ms(),
            {place_of(s): (s.leader, s.leader_epoch) for s in states},
            {place_of(s): s.isr for s in states},
            tuple(sorted({node for s in states for node in s.offline_replicas})),
            (quorum.leader_id, quorum.leader_epoch),
        )
        for alarm in alarms.of_looks(self._look, look) if self._look else ():
            self.seen.append(alarm)
            print(f"{self.now_s:7.1f} s: {alarm.kind}: {alarm.what}", file=sys.stderr, flush=True)
        self._look = look
        gaps = [v.last_fetch_ago_ms for v in quorum.voters if v.node_id != quorum.leader_id]
        self.fetch_gap_ms = max([self.fetch_gap_ms, *gaps])
        loaded = [state for state in states if state.topic == TOPIC and state.error is None]
        if len(loaded) == PARTITIONS:
            self.high_watermarks.append((self.now_s, sum(s.high_watermark for s in loaded)))
            if self.steady_s is None and all(s.log_start > 0 for s in loaded):
                self.steady_s = self.now_s + SETTLE_S

    def _read_metrics(self) -> None:
        for node, server in self._cluster.nodes.items():
            try:
                self.after[node] = told(server.settings["metrics"])
            except OSError as trouble:
                print(f"{self.now_s:7.1f} s: node {node}: {trouble}", file=sys.stderr, flush=True)
            else:
                self.before.setdefault(node, self.after[node])
        now = {
            f"node {node} {role}": dict(buckets)
            for node, said in self.after.items()
            for role, buckets in said.lag.items()
        }
        self.lags.append((self.now_s, now))

    # -- figures -----------------------------------------------------------------------------------

    def rate(self) -> float:
        """Return the recent records per second."""
        if len(self.high_watermarks) < 2:
            return 0.0
        (begin, first), (end, last) = self.high_watermarks[-10:][0], self.high_watermarks[-1]
        return (last - first) / (end - begin) if end > begin else 0.0

    def by_minute(self) -> list[int]:
        """Return the records per second in each minute; the last minute may be incomplete."""
        minutes: dict[int, tuple[float, int]] = {}
        for at, mark in self.high_watermarks:
            minutes.setdefault(int(at // 60), (at, mark))
        bounds = [*minutes.values(), self.high_watermarks[-1]] if minutes else []
        return [
            round((after[1] - before[1]) / (after[0] - before[0]))
            for before, after in itertools.pairwise(bounds)
            if after[0] > before[0]
        ]

    def verdicts(self) -> list[Verdict]:
        found = []
        for node in self._cluster.nodes:
            if node in self.after:
                before, after = self.before[node].lag, self.after[node].lag
                found += [
                    lag_verdict(f"node {node} {role}", before.get(role, {}), after[role])
                    for role in sorted(after)
                ]
        found += [self._contact(node) for node in self.after]
        gap = f"{self.fetch_gap_ms:,} ms at a look"
        found.append(Verdict("quorum: longest without a fetch", gap, "", None))
        found += self._memory()
        for node, used in self.disk.items():
            found.append(disk_verdict(f"node {node}", used, self._disk_bound()))
        slowest = max((took for _, took in self.took_ms), default=0)
        figure = f"{len(self.took_ms)} polls, {self.unanswered} unanswered, slowest {slowest:,} ms"
        found.append(Verdict("admin API", figure, "", None))
        loads = [load for _, load, _, _ in self.machine]
        figure = f"median {median(loads):.1f} on {os.cpu_count()} cores, at most {max(loads):.1f}"
        found.append(Verdict("machine: load average", figure, "", None))
        return found

    def _contact(self, node: int) -> Verdict:
        """Return how old a broker's contact was when it was renewed; it is fenced at the session
        timeout.
        """
        name = "pk_controller_contact_age_ms"
        ages = window(self.before[node].buckets(name), self.after[node].buckets(name))
        return Verdict(
            f"node {node}: longest without an answered heartbeat", bound_of(ages), "", None
        )

    def _memory(self) -> list[Verdict]:
        since = self.steady_s if self.steady_s is not None else math.inf
        found = []
        for name, samples in self.samples.items():
            steady = [each for each in samples if each.at_s >= since]
            steady = steady[:: 1 + len(steady) // SAMPLES_MAX]
            lasted = steady[-1].at_s - steady[0].at_s if steady else 0.0
            if len(steady) < 2:
                now = f"not steady yet (now {samples[-1].rss_anon_bytes / MIB:.0f} MiB)"
                found.append(Verdict(f"{name}: RssAnon slope", now, "", None))
            else:
                found.append(slope_verdict(name, steady, judged=lasted >= JUDGED_S))
        return found

    def _disk_bound(self) -> int:
        written = max(self.by_minute(), default=0) * RECORD_BYTES * DELETED_AFTER_MS // 1000
        return KEPT_BYTES + written

    def overflows(self) -> bool:
        return any(used[-1] > GIVE_UP_TIMES * KEPT_BYTES for used in self.disk.values())

    def kept(self) -> dict[str, Any]:
        """Everything that was recorded, to find the cause of an alarm."""
        return {
            "samples": {name: [astuple(s) for s in each] for name, each in self.samples.items()},
            "disk": self.disk,
            "machine": self.machine,
            "took_ms": self.took_ms,
            "high_watermarks": self.high_watermarks,
            "lags": self.lags,
        }


# -- the cluster -----------------------------------------------------------------------------------


def make_topics(admin: AdminClient) -> None:
    """Create both topics and wait until all replicas of all partitions are in sync."""
    admin.create_topic(TOPIC, partitions=PARTITIONS, configs=TOPIC_SETTINGS)
    admin.create_topic(PROBED, partitions=PARTITIONS)
    deadline = monotonic_s() + WHOLE_S
    while missing := thin(admin):
        if monotonic_s() > deadline:
            raise RuntimeError(f"not whole within {WHOLE_S:g} s: {missing}")
        block_s(0.2)


def thin(admin: AdminClient) -> list[str]:
    """Return the partitions without a leader, or without all replicas in sync."""
    try:
        states = admin.describe_topics([TOPIC, PROBED], timeout_s=ASK_S)
    except errors.RetriableError as trouble:
        return [str(trouble)]
    return [
        f"{place_of(state)}: leader {state.leader}, isr {list(state.isr)}"
        for state in states
        if state.error is not None or state.leader < 0 or len(state.isr) < len(state.replicas)
    ]


def metadata_records(folder: Path) -> Iterator[tuple[int, int, Any]]:
    """Return `(offset, ms, record)` of a node's metadata log on its disk."""
    for file in sorted(folder.glob("__cluster_metadata-0/*.log")):
        for header, view in batches.iter_batches(file.read_bytes()):
            for offset, record in decode_batches(view):
                yield offset, header.max_timestamp, record


def of_metadata(cluster: EmbeddedCluster, admin: AdminClient, begin: int, end: int) -> list[Alarm]:
    """Return the alarms of the metadata log in [begin, end), from a node that has all of it."""
    topics = {topic.topic_id: topic.name for topic in admin.list_topics()}
    for server in cluster.nodes.values():
        records = list(_whole(metadata_records(server.data / "metadata"), end))
        if records and records[-1][0] >= end - 1:
            return alarms.of_metadata(records, begin, end, topics)
    raise RuntimeError(f"no node's metadata log reaches from 0 to {end}")


def _whole(records: Iterator[tuple[int, int, Any]], end: int) -> Iterator[tuple[int, int, Any]]:
    """Return the records up to `end`; later ones may be half written."""
    for record in records:
        yield record
        if record[0] >= end - 1:
            return


def lines_since(cluster: EmbeddedCluster, since: Mapping[int, int]) -> dict[int, list[str]]:
    """Return what each node has logged behind these positions."""
    found = {}
    for node, server in cluster.nodes.items():
        with server.log.open(errors="replace") as log:
            log.seek(since[node])
            found[node] = log.read().splitlines()
    return found


@contextmanager
def progress(seconds: float) -> Iterator[Any]:
    """Return a function that shows the progress of a `Watch`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("soak"), BarColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[rate]:,.0f} records/s, {task.fields[alarms]} alarms"),
        console=Console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("soak", total=seconds, rate=0.0, alarms=0)

        def tell(watch: Watch) -> None:
            bar.update(task, completed=watch.now_s, rate=watch.rate(), alarms=len(watch.seen))

        yield tell


# -- the run ---------------------------------------------------------------------------------------


def watch_for(watch: Watch, children: Children, seconds: float, tell: Any) -> None:
    """Look until the time is over, or until there is no point in going on."""
    while watch.now_s < seconds:
        begin = monotonic_s()
        watch.look()
        tell(watch)
        if dead := children.dead():
            print(f"ended early: {', '.join(dead)} failed", file=sys.stderr, flush=True)
            return
        if watch.overflows():
            print("given up: the logs outgrow their bound", file=sys.stderr, flush=True)
            return
        block_s(max(0.0, LOOK_S - (monotonic_s() - begin)))


def run(minutes: float, root: Path, churn_s: float, rate: float | None) -> dict[str, Any]:
    seconds = minutes * 60
    cluster = EmbeddedCluster(root, settings=SERVER_SETTINGS)
    for server in cluster.nodes.values():
        server.settings["metrics"] = f"127.0.0.1:{free_port()}"
    with cluster, AdminClient(cluster.address) as admin:
        make_topics(admin)
        begin = admin.describe_metadata_quorum().high_watermark
        since = {node: server.log.stat().st_size for node, server in cluster.nodes.items()}
        children = Children(cluster, root, seconds + END_S, rate)
        try:
            children.wait_ready()
            churn = Churn(cluster.address, churn_s or NEVER_S, PARTITIONS)
            watch = Watch(cluster, admin)
            with progress(seconds) as tell:
                watch_for(watch, children, seconds, tell)
            end = admin.describe_metadata_quorum().high_watermark
            lines = lines_since(cluster, since)
            churn.close()
            found = {**children.finish(), "churn": churn.found()}
        finally:
            children.kill()
        witnesses = {
            "metadata log": of_metadata(cluster, admin, begin, end),
            "polls": watch.seen,
            "logs": [
                alarm for node, said in lines.items() for alarm in alarms.of_lines(node, said)
            ],
        }
        acked, read = children.records()
        cluster.kill(*cluster.nodes)  # the run is judged, so the three drains are skipped
    telling = [line for node, said in lines.items() for line in alarms.telling(node, said)]
    violations = numbered.violations(acked, read["runs"], read["skipped"])
    rates = watch.by_minute()
    verdicts = alarms.verdicts(witnesses)
    verdicts.append(records_verdict(numbered.count(acked), found["consumer"], violations))
    verdicts += load_verdicts(found, rates)
    verdicts += watch.verdicts()
    return {
        "minutes": minutes,
        "verdicts": [asdict(v) for v in verdicts],
        "alarms": {name: [asdict(alarm) for alarm in each] for name, each in witnesses.items()},
        "counts": {name: alarms.counts(each) for name, each in witnesses.items()},
        "violations": violations[:20],
        "records_per_s_by_minute": rates,
        "children": found,
        "lines": telling,
        "began_at_ms": wall_ms() - round(1000 * watch.now_s),
        **watch.kept(),
    }


def records_verdict(acked: int, consumer: Mapping[str, Any], violations: list[str]) -> Verdict:
    lost = consumer["lost_to_retention"]
    figure = f"{acked:,} acknowledged, {consumer['records']:,} read, {len(violations)} violations"
    if lost:
        figure += f", {lost:,} gone before they were read"
    return Verdict("records", figure, "0 violations", not violations)


def load_verdicts(found: Mapping[str, Any], rates: list[int]) -> list[Verdict]:
    """Return what the clients saw; there are no goals."""
    probe = found["probe"]
    silent = max(probe["longest_without_ack_ms"].values())
    loads = [found[f"load {number}"]["longest_without_ack_ms"] for number in range(PRODUCERS)]
    rows = [("longest without an acknowledgement", f"{silent:,} ms probed, {max(loads):,} ms load")]
    took = ", ".join(f"{name} {ms:,g} ms" for name, ms in probe["ack_ms"].items())
    rows.append(("one record's acknowledgement", f"{took} of {probe['records']:,}"))
    churn = found["churn"]
    figure = f"{churn['changes']}, median {churn['median_ms']:,} ms, longest "
    figure += ", ".join([f"{churn['longest_ms']:,} ms", *map(str, churn["errors"].items())])
    rows.append(("topics created and deleted", figure))
    waited = found["consumer"]["longest_without_record_ms"]
    rows.append(("consumer: longest without a record", f"{waited:,} ms"))
    if rates:
        figure = f"median {median(rates):,.0f} records/s, least {min(rates):,}, most {max(rates):,}"
        rows.append(("throughput by minute", figure))
    if probe["errors"]:
        rows.append(("probe: errors", ", ".join(f"{n} {c}" for n, c in probe["errors"].items())))
    return [Verdict(what, figure, "", None) for what, figure in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description="does a cluster under full load cry wolf?")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--rate", type=float, default=None, help="records/s instead of all it takes"
    )
    parser.add_argument("--json", type=Path, default=None, help="write the figures there, too")
    parser.add_argument("--dir", type=Path, default=None, help="where the nodes' data goes")
    parser.add_argument(
        "--churn-s", type=float, default=CHURN_S, help="a topic comes and goes so often; 0 = never"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pk-soak-") as folder:
        found = run(given.minutes, given.dir or Path(folder), given.churn_s, given.rate)
    verdicts = [Verdict(**each) for each in found["verdicts"]]
    print(table(verdicts))
    for name, each in found["alarms"].items():
        for alarm in each[:20]:
            at_s = (alarm["at_ms"] - found["began_at_ms"]) / 1000 if alarm["at_ms"] else math.nan
            print(f"{name}, {at_s:.1f} s: {alarm['kind']}: {alarm['what']}")
    for line in found["violations"]:
        print(line)
    if given.json:
        given.json.write_text(json.dumps(found) + "\n")
    return int(any(verdict.kept is False for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
