"""A cluster that is made from the tier of a lost one, on real processes (rule T13)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from metadata_copy import copied
from real_cluster import close, run, until, values

from pk import (
    AdminClient,
    Consumer,
    Producer,
    TopicPartition,
    errors,
    generations,
    transactional_ids,
)
from pk.cli import tier_restore
from pk.cli.embedded import CLUSTER_ID, EmbeddedCluster, EmbeddedServer
from pk.cli.tier_restore_offsets import GONE, PUT_BACK, restore_offsets
from pk.client.admin import NewTopic
from pk.server.node.settings import resolve
from pk.server.tier.restore import RestoreReport, Wishes
from pk.tiering import cluster_directory

pytestmark = pytest.mark.integration

COPIES = {
    "tier_metadata_interval_ms": 300,
    "tier_offsets_interval_ms": 300,
    "tier_max_lag_ms": 200,
}
PARTITIONS, RECORDS = 2, 200
FIRST = generations.OFFSETS


def restored(server: EmbeddedServer, **wishes: Any) -> RestoreReport:
    """Restore into the directory of a node."""
    resolved = resolve({**server.settings, "listen": server.listen}, {}, {})
    wanted = Wishes(**wishes)
    return tier_restore.restored([str(server.data)], resolved, wanted, lambda _text: None)


def fill(address: str) -> None:
    with Producer(address) as producer:
        for number in range(RECORDS):
            producer.send("t", value=b"%d" % number, partition=number % PARTITIONS)
        producer.flush()


def is_tiered(address: str) -> bool:
    with AdminClient(address) as admin:
        return sum(each.end for each in admin.describe_tier("t").partitions) == RECORDS


def read(address: str, upto: Sequence[int]) -> tuple[list[Any], list[tuple[str, str]]]:
    """Read topic t whole; return its records by partition and offset, and the losses."""
    places = [TopicPartition("t", each) for each in range(PARTITIONS)]
    found: list[Any] = []
    lost: list[tuple[str, str]] = []
    with Consumer(address) as consumer:
        consumer.assign(places)
        for place in places:
            consumer.seek_to_beginning(place)
        while any(consumer.position(p) < end for p, end in zip(places, upto, strict=True)):
            try:
                found += consumer.poll(timeout_s=1.0)
            except errors.DataLoss as loss:
                lost.append((loss.details["offset"], loss.details["next_offset"]))
    rows = [(each.partition, each.offset, each.timestamp_ms, each.value) for each in found]
    return sorted(rows), lost


def commit(address: str, offsets: dict[TopicPartition, int]) -> None:
    with Consumer(address, group_id="g", enable_auto_commit=False) as consumer:
        consumer.assign(list(offsets))
        consumer.commit(offsets)


def put_back(tier: Path, address: str) -> None:
    """Commit the offsets of the lost cluster; what was committed since then stays."""
    command = ["tier", "restore-offsets", "--cluster-id", CLUSTER_ID, "--tier-url", tier.as_uri()]
    command += ["--bootstrap", address, "--json"]

    def execute() -> None:
        url = tier.as_uri()
        restore_offsets(CLUSTER_ID, tier_url=url, execute=True, bootstrap=address, as_json=True)

    with AdminClient(address) as admin:
        shown = json.loads(run(command))["offsets"]
        assert {each["topic"]: each["outcome"] for each in shown} == {
            "t": PUT_BACK,
            "local": GONE,
        }
        assert admin.group_offsets("g") == {}, "they were only shown"
        execute()
        assert admin.group_offsets("g") == {TopicPartition("t", 0): 30}
        commit(address, {TopicPartition("t", 0): 40})
        execute()
        assert admin.group_offsets("g") == {TopicPartition("t", 0): 40}


def files(tier: Path) -> dict[str, int]:
    """Return the files of a tier and their times, without the copies that a live cluster makes."""
    copies = {"metadata", "offsets"}
    found = [path for path in tier.rglob("*") if copies.isdisjoint(path.relative_to(tier).parts)]
    return {str(path): path.stat().st_mtime_ns for path in found if path.is_file()}


def dry_run(tier: Path, server: EmbeddedServer) -> dict[str, Any]:
    """Return what a restore shows of each topic; it changes nothing."""
    before = files(tier)
    report = restored(server, dry_run=True)
    assert (files(tier), report.formatted) == (before, None)
    return {each.topic: (each.has_table, each.rows, each.table_ends) for each in report.topics}


def test_a_cluster_that_lost_all_disks_is_restored_from_its_tier(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    made = {**COPIES, "tier_url": tier.as_uri()}
    cluster = EmbeddedCluster(tmp_path / "pk", nodes=3, settings=made)
    with cluster:
        with AdminClient(cluster.address) as admin:
            topics = [
                NewTopic("t", PARTITIONS, {"retention_ms": "-1"}, 3),
                NewTopic("local", 1, {"tier_enable": "false"}, 3),
            ]
            assert [each.error for each in admin.create_topics(topics)] == [None, None]
            before = {each.topic: each.topic_id for each in admin.describe_topics(["t", "local"])}
        fill(cluster.address)
        with Producer(cluster.address) as producer:
            producer.send("local", value=b"gone").result(30)
            old_id = producer.identity[0]
        until(lambda: is_tiered(cluster.address), "every record is in the table")
        ends = [RECORDS // PARTITIONS] * PARTITIONS
        stored, _ = read(cluster.address, ends)
        commit(cluster.address, {TopicPartition("t", 0): 30, TopicPartition("local", 0): 1})
        for kind in ("metadata", "offsets"):
            until(lambda k=kind: any(tier.glob(f"_cluster/{CLUSTER_ID}/0/{k}/**/*-*")), kind)
        for node in cluster.nodes:
            cluster.kill(node)
    nodes = list(cluster.nodes.values())
    for server in nodes:
        shutil.rmtree(server.data)
        server.settings["cluster_id"] = "restored"

    assert dry_run(tier, nodes[0]) == {
        "t": (True, RECORDS, tuple(ends)),
        "local": (False, 0, ()),
    }
    restored(nodes[0])
    with pytest.raises(errors.DirectoryFormatted):
        restored(nodes[0])
    with pytest.raises(errors.RestoreUnderWay):
        restored(nodes[1])
    for server in nodes[1:]:
        restored(server, join=True)
    cluster.start_nodes(cluster.nodes)
    with AdminClient(cluster.address) as admin:
        after = {each.topic: each.topic_id for each in admin.describe_topics(["t", "local"])}
    assert after["t"] == before["t"]
    assert after["local"] != before["local"]
    with Producer(cluster.address) as producer:
        for number in range(PARTITIONS):
            assert producer.send("t", value=b"new", partition=number).result(60).offset == FIRST
        assert producer.send("local", value=b"new").result(60).offset == 0
        assert producer.identity[0] >= generations.PRODUCER_IDS > old_id
    with Producer(cluster.address, transactional_id="id") as producer:
        producer.init_transactions()
        producer.begin_transaction()
        producer.send("local", value=b"whole")
        producer.commit_transaction()
        epoch = transactional_ids.epoch_of_producer(producer.identity[0])
        assert generations.generation_of_epoch(epoch) == 1
    put_back(tier, cluster.address)
    rows, lost = read(cluster.address, [FIRST + 1] * PARTITIONS)
    assert [row for row in rows if row[1] < FIRST] == stored
    assert [row[:2] for row in rows if row[1] >= FIRST] == [(0, FIRST), (1, FIRST)]
    assert lost == [(str(end), str(FIRST)) for end in ends]
    assert values(cluster.address, "local") == [b"new", b"whole"]
    until(lambda: any(tier.glob("_cluster/restored/0/metadata/*")), "the next copies are made")
    refuse_late_node(EmbeddedServer(tmp_path / "late", settings=nodes[0].settings), tier)
    close(cluster)


def refuse_late_node(late: EmbeddedServer, tier: Path) -> None:
    """Check server/tier/restore J3: the owner object says so, or an active controller does."""
    with pytest.raises(errors.RestoreUnderWay, match="has started"):
        restored(late, join=True, cluster_id=CLUSTER_ID)
    (tier / cluster_directory.owner_path("restored")).unlink()  # as before the first copy
    with pytest.raises(errors.RestoreUnderWay, match="has started"):
        restored(late, join=True, cluster_id=CLUSTER_ID)


def turn_off(address: str, tier: Path) -> None:
    """Turn the tier of the topic "off" off once it has a table, and wait for a copy of that."""

    def has_rows() -> bool:
        with AdminClient(address) as admin:
            return admin.describe_tier("off").partitions[0].end == 1

    def is_copied() -> bool:
        """A copy of an earlier change may come in between."""
        image = copied(tier, "c")
        return "off" in image.topic_ids and image.topic_config("off")["tier_enable"] is False

    until(has_rows, "the topic has a table")
    with AdminClient(address) as admin:
        admin.alter_configs("off", {"tier_enable": "false"})
    until(is_copied, "the metadata are copied")


def test_a_cluster_that_lives_is_fenced_and_says_so(tmp_path: Path) -> None:
    tier = tmp_path / "tier"
    tier.mkdir()
    made = {**COPIES, "tier_url": tier.as_uri(), "tier_offsets_interval_ms": 0}
    old = EmbeddedServer(tmp_path / "old", settings={**made, "cluster_id": "c"})
    new = EmbeddedServer(tmp_path / "new", settings={**made, "cluster_id": "d"})
    with old:
        with AdminClient(old.address) as admin:
            admin.create_topic("t", partitions=PARTITIONS)
            admin.create_topic("off", partitions=1)
        fill(old.address)
        with Producer(old.address) as producer:
            producer.send("off", value=b"tiered").result(30)
        until(lambda: is_tiered(old.address), "every record is in the table")
        turn_off(old.address, tier)
        new.write_config()
        before = files(tier)
        with pytest.raises(errors.ClusterAlive, match=old.address):
            restored(new)
        assert files(tier) == before
        restored(new, fence=True)
        with Producer(old.address) as producer:
            assert producer.send("t", value=b"late", partition=0).result(30).offset < FIRST
        log = old.directory / "server.log"
        until(lambda: "ClusterRestored" in log.read_text(), "the old cluster says so")

        def refused() -> bool:
            with AdminClient(old.address) as admin:
                problem = admin.describe_tier("t").problem
            return problem is not None and "restored from its tier" in problem.message

        with new:
            with Producer(new.address) as producer:
                assert producer.send("t", value=b"new", partition=0).result(60).offset == FIRST
                assert producer.send("off", value=b"new").result(60).offset == FIRST
            until(refused, "its table refuses it")
            old.kill()
            rows, lost = read(new.address, [FIRST + 1, RECORDS // PARTITIONS])
            assert [row[3] for row in rows if row[1] >= FIRST] == [b"new"]
            assert b"late" not in [row[3] for row in rows]
            assert lost

            def goes_on() -> bool:
                with AdminClient(new.address) as admin:
                    found = admin.describe_tier("t")
                return (found.status, found.partitions[0].end) == ("rows_missing", FIRST + 1)

            until(goes_on, "the restored cluster goes on with the table")
            with AdminClient(new.address) as admin:
                admin.accept_tier("t")
            new.kill()
            new.start()
            again, lost = read(new.address, [FIRST + 1, FIRST])
            assert (again, lost) == (rows, [])
