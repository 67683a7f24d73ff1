"""The job `compaction` on real Spark: every reader gets the latest record of each key."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from typing import Any

import pytest

from pk import Producer, errors
from pk.cli import maintenance as command
from pk.client.maintenance_lease import MaintenanceLease
from pk.clock import block_s
from pk.sparkconnector.maintenance import audit, compaction, optimize
from pk.sparkconnector.maintenance.compaction import _Compaction
from tests.spark.test_maintenance import files_of, home_of, tiered

COMPACTED = {
    "cleanup_policy": "compact",
    "tier_max_lag_ms": 200,
    "min_cleanable_dirty_ratio": "0.0",
    "delete_retention_ms": 10**10,
    "local_retention_ms": -2,
}


class State:
    """What the producers wrote: the oracle of the latest values."""

    def __init__(self, cluster: Any, topic: str, seed: int = 1) -> None:
        self.cluster, self.topic = cluster, topic
        self.latest: dict[tuple[int, bytes], bytes | None] = {}
        self._random = random.Random(seed)
        self._written = 0

    def write(self, count: int, keys: int = 50, deleted: float = 0.1) -> None:
        """Write `count` records; a share of them are tombstones."""
        places = len(self.cluster.admin.offsets(self.topic))
        with Producer(self.cluster.address) as producer:
            for _ in range(count):
                key = b"k%03d" % self._random.randrange(keys)
                gone = self._random.random() < deleted
                value = None if gone else b"%06d" % self._written + bytes(100)
                partition = key[-1] % places
                producer.send(self.topic, value, key=key, partition=partition)
                self.latest[partition, key] = value
                self._written += 1
            producer.flush(60)

    def tiered(self, parts: int = 3, count: int = 300, **more: Any) -> State:
        for _ in range(parts):
            self.write(count, **more)
            tiered(self.cluster, self.topic)
        return self

    @property
    def values(self) -> dict[tuple[int, bytes], bytes]:
        """The latest values of the keys that are not deleted."""
        return {key: value for key, value in self.latest.items() if value is not None}


def latest_of(rows: list[tuple[int, int, bytes, bytes | None]]) -> dict[tuple[int, bytes], bytes]:
    """Return the latest values in rows of (partition, offset, key, value)."""
    found: dict[tuple[int, bytes], bytes | None] = {}
    for partition, _, key, value in sorted(rows, key=lambda row: row[:2]):
        found[partition, bytes(key)] = None if value is None else bytes(value)
    return {key: value for key, value in found.items() if value is not None}


def check(spark: Any, cluster: Any, load: Any, state: State) -> int:
    """Compare a consumer, `format("pk")` and `format("delta")` with the oracle; return how many
    rows the table has."""
    consumed = [row[:4] for row in cluster.consumed(state.topic)]
    assert latest_of(consumed) == state.values
    names = ("partition", "offset", "key", "value")
    rows = [tuple(row) for row in load(state.topic).select(*names).collect()]
    assert latest_of(rows) == state.values
    table = spark.read.format("delta").load(str(home_of(cluster, state.topic)))
    stored = [tuple(row) for row in table.select(*names).collect()]
    assert latest_of(stored) == state.values
    assert {row[:2] for row in stored} <= {row[:2] for row in rows}
    report = audit(spark, cluster.address, state.topic, record=False)
    assert [each.problems for each in report.partitions] == [()] * len(report.partitions)
    return len(stored)


def test_the_latest_record_of_each_key_stays(spark, cluster, load) -> None:
    topic = cluster.topic(2, **COMPACTED)
    state = State(cluster, topic).tiered()
    assert check(spark, cluster, load, state) == 900
    seen: list[tuple[int, str]] = []
    report = compaction(spark, cluster.address, topic, progress=lambda *each: seen.append(each))
    assert seen == [(0, "cleaned"), (1, "cleaned")]
    left = check(spark, cluster, load, state)
    assert left == len(state.latest)
    assert (report.removed_rows, report.plans) == (900 - left, 1)
    assert [each.dirty_ratio for each in report.partitions] == [1.0, 1.0]
    assert sum(each.rows_after for each in report.partitions) == left
    counters = cluster.admin.describe_tier(topic).partitions
    assert [each.cleaned_end for each in report.partitions] == [each.end for each in counters]
    assert all("-job-" in path for path in files_of(cluster, topic))

    again = compaction(spark, cluster.address, topic)
    assert [each.status for each in again.partitions] == ["not due", "not due"]
    assert again.version == report.version

    state.tiered(1)  # the copier goes on behind the cleaned files
    assert compaction(spark, cluster.address, topic).removed_rows > 0
    assert check(spark, cluster, load, state) == len(state.latest)
    optimize(spark, cluster.address, topic)
    assert check(spark, cluster, load, state) == len(state.latest)


def test_cold_records_and_tombstones(spark, cluster, load) -> None:
    """Local segments are dropped, so readers get the cleaned table; then tombstones age."""
    topic = cluster.topic(
        1, **COMPACTED, segment_bytes=16_384, local_retention_bytes=0, local_drop_delay_ms=0
    )
    state = State(cluster, topic).tiered(2, 200, keys=20)
    state.write(20, keys=20, deleted=1.0)
    tiered(cluster, topic)
    local = min(cluster.admin.offsets(topic, "earliest_local").values())
    compaction(spark, cluster.address, topic)
    tombstones = [row[1] for row in cluster.consumed(topic) if row[3] is None]
    assert max(tombstones) > local
    table = spark.read.format("delta").load(str(home_of(cluster, topic)))
    aging = table.where("delete_horizon_ms IS NOT NULL AND offset >= " + str(local)).count()
    assert aging < sum(offset >= local for offset in tombstones)
    for _ in range(4):
        state.write(200, keys=10, deleted=0.0)
        tiered(cluster, topic)
    cluster.wait(
        "the local log begins above the tombstones",
        lambda: min(cluster.admin.offsets(topic, "earliest_local").values()) > max(tombstones),
    )
    report = compaction(spark, cluster.address, topic, force=True)
    assert sum(each.horizons for each in report.partitions) > 0
    assert check(spark, cluster, load, state) == len(state.latest)
    table = spark.read.format("delta").load(str(home_of(cluster, topic)))
    aging = table.where("value IS NULL AND delete_horizon_ms IS NOT NULL").count()
    assert aging == sum(each.horizons for each in report.partitions)


def test_the_job_plans_again_when_another_engine_was_faster(
    spark, cluster, load, monkeypatch, capsys
) -> None:
    topic = cluster.topic(1, **COMPACTED)
    state = State(cluster, topic).tiered(2)
    with MaintenanceLease(cluster.address, topic, "first"):
        with pytest.raises(errors.LeaseHeld):
            compaction(spark, cluster.address, topic)
        run = ("compaction", topic, cluster.address, "local[2]")
        assert command.carry_out(*run, as_json=True) == command.HELD
        assert json.loads(capsys.readouterr().out)["error"]["name"] == "LeaseHeld"
    optimized: list[int] = []
    before = _Compaction._hand_over

    def late(self: Any, *given: Any) -> None:
        if not optimized:
            optimized.append(1)
            spark.sql(f"OPTIMIZE delta.`{home_of(cluster, topic)}`")
        before(self, *given)

    monkeypatch.setattr(_Compaction, "_hand_over", late)
    assert command.carry_out(*run, as_json=True) == command.DONE
    report = json.loads(capsys.readouterr().out)
    assert report["plans"] == 2
    assert check(spark, cluster, load, state) == len(state.latest)


def test_a_killed_job_leaves_the_table_as_it_was(spark, cluster, load, tmp_path) -> None:
    topic = cluster.topic(1, **COMPACTED)
    state = State(cluster, topic).tiered(2)
    version = cluster.admin.describe_tier(topic).version
    script = tmp_path / "job.py"
    script.write_text(JOB)
    home = home_of(cluster, topic)
    with (tmp_path / "log").open("wb") as log:
        job = subprocess.Popen(
            [sys.executable, str(script), cluster.address, topic],
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        cluster.wait(
            "the job has written a file",
            lambda: job.poll() is not None or any(home.glob("partition=0/*-job-*.parquet")),
            timeout_s=400,
        )
        assert job.poll() is None, (tmp_path / "log").read_text()[-2000:]
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert cluster.admin.describe_tier(topic).version == version
    assert check(spark, cluster, load, state) == 600
    report = None
    while report is None:
        try:  # the lease of the job that died ends after its TTL
            report = compaction(spark, cluster.address, topic)
        except errors.LeaseHeld:
            block_s(1.0)
    assert report.removed_rows == 600 - len(state.latest)
    assert check(spark, cluster, load, state) == len(state.latest)


#: A job that stops between its last file and the hand-over.
JOB = """
import sys, time
from pk.sparkconnector import session
from pk.sparkconnector.maintenance import compaction
from pk.sparkconnector.maintenance.compaction import _Compaction

_Compaction._hand_over = lambda *given: time.sleep(1000)
compaction(session("job", master="local[1]"), *sys.argv[1:])
"""


def test_a_topic_that_is_not_compacted_is_refused(spark, cluster, capsys) -> None:
    topic = cluster.topic(1, tier_max_lag_ms=200)
    cluster.fill(topic, 10)
    tiered(cluster, topic)
    run = ("compaction", topic, cluster.address, "local[2]")
    assert command.carry_out(*run, as_json=True) == command.BAD_INPUT
    assert "cleanup_policy" in json.loads(capsys.readouterr().out)["error"]["message"]
