"""Ten minutes under load: does anything grow?

    python tests/soak/run.py --minutes 10 [--json FILE] [--dir DIR] [--rate RECORDS_PER_S]

Half the peak of columnar produce (measured first, in the same run), 4 partitions, 128 MiB segments,
`retention_bytes` 1 GiB and `local_retention_bytes` 256 MiB a partition; files that leave the table
are vacuumed by pk, every few seconds.  Figures count from the moment when retention is steady:
log_start has moved on every partition, and a settling time has passed.  Goals: figures.py.
Exit 1 = a goal is broken.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from figures import (
    MIB,
    Sample,
    Verdict,
    disk_verdict,
    lag_verdict,
    median,
    process_verdicts,
    rate_verdict,
    table,
)
from measuring import Told, descriptors_of, disk_bytes, free_port, sample, told

from pk import AdminClient
from pk.cli.embedded import EmbeddedServer
from pk.clock import block_s, monotonic_s

TOPIC = "soak"
PARTITIONS = 4
SEGMENT = 128 * MIB
RETENTION = 1024 * MIB
LOCAL_RETENTION = 256 * MIB
#: Deleted segments and dropped local data stay this long; it is part of the disk bound.
DELAY_S = 2
TOPIC_SETTINGS = {
    "segment_bytes": SEGMENT,
    "retention_bytes": RETENTION,
    "local_retention_bytes": LOCAL_RETENTION,
    "tier_max_lag_ms": 5_000,
    "local_drop_delay_ms": DELAY_S * 1000,
    "file_delete_delay_ms": DELAY_S * 1000,
}
SERVER_SETTINGS = {
    "log_retention_check_interval_ms": 1_000,
    "tier_vacuum_interval_ms": 3_000,
    "tier_vacuum_retention_ms": 0,
}
PEAK_S = 10.0
PURGE_S = 180.0
SETTLE_S = 30.0
SAMPLE_S = 2.0
#: Local logs of so many times their bound end the soak: the tier does not keep up, and what it has
#: not copied is not dropped; this machine's disk shall not fill up.
GIVE_UP_TIMES = 8
LOAD = Path(__file__).parent / "load.py"


def wait_until_purged(folder: Path) -> None:
    """Wait until the records of the peak measurement are removed: they must not count for the
    soak.
    """
    deadline = monotonic_s() + PURGE_S
    while any(folder.rglob("*.parquet")):
        if monotonic_s() > deadline:
            raise RuntimeError(f"{folder} was not purged within {PURGE_S:g} s")
        block_s(1.0)


def load(address: str, topic: str, seconds: float, rate: float | None) -> subprocess.Popen[str]:
    command = [sys.executable, str(LOAD), "--bootstrap", address, "--topic", topic]
    command += ["--seconds", str(seconds)]
    if rate is not None:
        command += ["--rate", str(rate)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any]:
    out, _ = process.communicate(timeout=timeout_s)
    if process.returncode != 0:
        raise RuntimeError(f"the load ended with {process.returncode}")
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


class Watch:
    """Samples every process, the disk and the tier's lag while the load runs."""

    def __init__(self, server: EmbeddedServer, root: Path, metrics: str) -> None:
        self.server = server
        self.root = root
        self.metrics = metrics
        self.pids = server.pids()
        self.samples: dict[str, list[Sample]] = defaultdict(list)
        self.disk: list[tuple[float, int, int]] = []
        self.tier_lag: list[tuple[float, int]] = []
        self.load: list[tuple[float, float]] = []
        self.steady_at: float | None = None
        self.before: Told | None = None
        self.after: Told | None = None

    def look(self, admin: AdminClient) -> None:
        now = monotonic_s()
        if self.server.pids() != self.pids:
            raise RuntimeError(f"a process died: {self.pids} are now {self.server.pids()}")
        descriptors = descriptors_of(self.pids)
        for role, pid in self.pids.items():
            self.samples[role].append(sample(pid, now, descriptors[role]))
        self.disk.append((now, disk_bytes(self.root / "node"), disk_bytes(self.root / "tier")))
        self.after = told(self.metrics)
        self.tier_lag.append((now, int(self.after.value("pk_tier_lag"))))
        self.load.append((now, os.getloadavg()[0]))
        if self.steady_at is None:
            states = admin.describe_topics([TOPIC])
            if all(state.log_start > 0 and state.local_log_start > 0 for state in states):
                self.steady_at = now + SETTLE_S
                print(f"retention moves; figures count in {SETTLE_S:g} s", flush=True)
        elif self.before is None and now >= self.steady_at:
            self.before = self.after

    def verdicts(self) -> list[Verdict]:
        if self.steady_at is None or self.before is None or self.after is None:
            return [Verdict("retention", "never became steady", "log_start moves", False)]
        found: list[Verdict] = []
        for role, samples in self.samples.items():
            found += process_verdicts(role, [s for s in samples if s.at_s >= self.steady_at])
        steady = [each for each in self.disk if each[0] >= self.steady_at]
        found.append(disk_verdict("local logs", [local for _, local, _ in steady], local_bound()))
        found.append(disk_verdict("tier", [tier for _, _, tier in steady], tier_bound()))
        for role in self.pids:
            if role != "supervisor":  # it has no loop that anyone waits for
                before, after = self.before.lag.get(role, {}), self.after.lag.get(role, {})
                found.append(lag_verdict(role, before, after))
        lags = [lag for at, lag in self.tier_lag if at >= self.steady_at]
        figure = f"median {median(lags):,.0f} records, at most {max(lags):,}"
        found.append(Verdict("tier: behind the log", figure, "", None))
        loads = [load for at, load in self.load if at >= self.steady_at]
        figure = f"median {median(loads):.1f} on {os.cpu_count()} cores"
        found.append(Verdict("machine: load average", figure, "", None))
        name = "pk_tier_vacuumed_files"
        vacuumed = int(self.after.value(name) - self.before.value(name))
        found.append(Verdict("vacuum", f"{vacuumed} files removed", "some", vacuumed > 0))
        return found


def local_bound() -> int:
    """Return the bound per partition: the local retention, the active segment, one being closed,
    and segments that wait to be deleted.
    """
    return PARTITIONS * (LOCAL_RETENTION + 4 * SEGMENT)


def tier_bound() -> int:
    """Return the bound per partition: the retained records, one further file, and files that wait
    for the vacuum.
    """
    return PARTITIONS * (RETENTION + 4 * SEGMENT)


def run(minutes: float, root: Path, rate: float | None) -> dict[str, Any]:
    metrics = f"127.0.0.1:{free_port()}"
    server = EmbeddedServer(
        root / "node",
        tier_url=(root / "tier").as_uri(),
        settings={**SERVER_SETTINGS, "metrics": metrics},
    )
    with server, AdminClient(server.address) as admin:
        if rate is None:
            admin.create_topic("peak", partitions=PARTITIONS, configs=TOPIC_SETTINGS)
            peak = finish(load(server.address, "peak", PEAK_S, None), 120)["records_per_s"]
            admin.delete_topic("peak", purge_tier=True)
            wait_until_purged(root / "tier" / "peak")
            rate = peak / 2
            print(f"peak {peak:,.0f} records/s; the soak runs at {rate:,.0f}", flush=True)
        admin.create_topic(TOPIC, partitions=PARTITIONS, configs=TOPIC_SETTINGS)
        process = load(server.address, TOPIC, minutes * 60, rate)
        watch = Watch(server, root, metrics)
        try:
            while process.poll() is None:
                watch.look(admin)
                if watch.disk[-1][1] > GIVE_UP_TIMES * local_bound():
                    print("given up: the tier does not keep up with the load", flush=True)
                    process.terminate()
                    break
                block_s(SAMPLE_S)
            result = finish(process, 120)
            verdicts = watch.verdicts()
        finally:
            process.kill()
    sent = result["records_per_s"]
    verdicts.append(rate_verdict(sent, rate))
    return {
        "minutes": minutes,
        **result,
        "verdicts": [asdict(v) for v in verdicts],
        "samples": {role: [astuple(s) for s in each] for role, each in watch.samples.items()},
        "disk": watch.disk,
        "tier_lag": watch.tier_lag,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="does anything grow?")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument(
        "--rate", type=float, default=None, help="records/s instead of half the peak"
    )
    parser.add_argument("--json", type=Path, default=None, help="write the figures there, too")
    parser.add_argument("--dir", type=Path, default=None, help="where logs and tier go")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pk-soak-") as folder:
        found = run(given.minutes, given.dir or Path(folder), given.rate)
    verdicts = [Verdict(**each) for each in found["verdicts"]]
    print(table(verdicts))
    text = json.dumps(found, indent=2, default=lambda value: None if math.isnan(value) else value)
    if given.json:
        given.json.write_text(text + "\n")
    return int(any(verdict.kept is False for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
