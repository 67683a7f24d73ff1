"""Maintenance jobs on real Spark: the same rows in fewer files, and an audit that finds damage."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from pk import TopicPartition, errors
from pk.cli import maintenance as command
from pk.client.maintenance_lease import MaintenanceLease
from pk.sparkconnector.maintenance import audit, optimize


def tiered(cluster, topic: str) -> None:
    """Wait until every record of the topic is in its table."""
    cluster.wait(
        "all is tiered",
        lambda: all(each.lag == 0 for each in cluster.admin.describe_tier(topic).partitions),
    )


def filled(cluster, parts: int = 4) -> str:
    """Create a topic whose table has at least `parts` files in each of its two partitions."""
    topic = cluster.topic(2, tier_max_lag_ms=200)
    for _ in range(parts):
        cluster.fill(topic, 400)
        tiered(cluster, topic)
    return topic


def home_of(cluster, topic: str) -> Path:
    return Path(unquote(urlsplit(cluster.admin.describe_tier(topic).uri).path))


def files_of(cluster, topic: str) -> list[str]:
    from deltalake import DeltaTable

    return DeltaTable(cluster.admin.describe_tier(topic).uri).file_uris()


def test_optimize_keeps_the_rows_and_the_audit_agrees(spark, cluster, load) -> None:
    topic = filled(cluster)
    before = cluster.consumed(topic)
    assert len(files_of(cluster, topic)) >= 8
    first = audit(spark, cluster.address, topic)
    assert (first.verdict, sum(each.rows for each in first.partitions)) == ("ok", 1600)

    report = optimize(spark, cluster.address, topic)
    assert (report.files_after, report.rewritten_rows, report.plans) == (2, 1600, 1)
    assert len(files_of(cluster, topic)) == 2
    assert all("-job-" in path for path in files_of(cluster, topic))
    rows = load(topic).select("partition", "offset", "key", "value").collect()
    found = sorted((r.partition, r.offset, bytes(r.key), bytes(r.value)) for r in rows)
    assert found == [row[:4] for row in before]
    assert cluster.consumed(topic) == before

    again = optimize(spark, cluster.address, topic)
    assert (again.rewritten_rows, again.version) == (0, report.version)
    cluster.fill(topic, 400)  # the copier goes on behind the merged files
    tiered(cluster, topic)
    last = audit(spark, cluster.address, topic)
    assert (last.verdict, [each.problems for each in last.partitions]) == ("ok", [(), ()])

    results = spark.read.format("delta").load(str(home_of(cluster, topic).parents[1] / "_audit"))
    assert results.where(results.topic == topic).count() == 4


def test_one_job_at_a_time(spark, cluster, capsys) -> None:
    """The second one exits 3; a job whose lease was granted again hands over nothing."""
    topic = filled(cluster, 2)
    with MaintenanceLease(cluster.address, topic, "first"):
        with pytest.raises(errors.LeaseHeld):
            optimize(spark, cluster.address, topic)
        run = ("optimize", topic, cluster.address, "local[2]", None)
        assert command.carry_out(*run, as_json=True) == command.HELD
        assert json.loads(capsys.readouterr().out)["error"]["name"] == "LeaseHeld"
    assert optimize(spark, cluster.address, topic).files_after == 2


def test_the_audit_finds_a_damaged_file_and_rows_that_another_engine_deleted(
    spark, cluster, capsys
) -> None:
    topic = filled(cluster, 2)
    home = home_of(cluster, topic)
    damaged = sorted(home.glob("partition=0/*.parquet"))[0]
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    report = audit(spark, cluster.address, topic, record=False)
    assert [each.verdict for each in report.partitions] == ["damaged", "ok"]
    assert damaged.name in report.partitions[0].problems[0]
    damaged.write_bytes(whole)

    spark.sql(f"DELETE FROM delta.`{home}` WHERE partition = 1 AND offset >= 3 AND offset < 9")
    assert command.carry_out("audit", topic, cluster.address, "local[2]", None, as_json=True) == 4
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == "damaged"
    assert "6 rows are missing" in said["partitions"][1]["problems"][0]


def test_sums_add_up_after_an_outside_optimize_and_retention(spark, cluster) -> None:
    """T2: the owner reads the file of the other engine before it counts its rows as removed."""
    topic = filled(cluster, 2)
    home = home_of(cluster, topic)
    spark.sql(f"OPTIMIZE delta.`{home}` WHERE partition = 0")
    report = audit(spark, cluster.address, topic, record=False)
    assert (report.verdict, [each.files for each in report.partitions]) == ("ok", [1, 2])
    cluster.fill(topic, 400)
    tiered(cluster, topic)
    end = cluster.admin.describe_tier(topic).partitions[0].end
    cluster.admin.delete_records({TopicPartition(topic, 0): end - 20})
    cluster.wait(
        "retention removed the file of the other engine",
        lambda: not any("part-" in path for path in files_of(cluster, topic)),
    )
    report = audit(spark, cluster.address, topic, record=False)
    assert [each.problems for each in report.partitions] == [(), ()]
    assert [each.notes for each in report.partitions] == [(), ()]


def test_bad_input_has_a_typed_error_and_an_exit_code(spark, cluster, capsys) -> None:
    untiered = cluster.topic(1, tier_enable=False)
    cases = [
        ("polish", "any", None),
        ("optimize", "no-such-topic", None),
        ("audit", untiered, None),
        ("audit", untiered, {"target_bytes": 5}),
    ]
    for job, topic, options in cases:
        code = command.carry_out(job, topic, cluster.address, "local[2]", options, as_json=True)
        assert code == command.BAD_INPUT, (job, topic)
        assert json.loads(capsys.readouterr().out)["error"]["message"]
