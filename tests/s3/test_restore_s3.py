"""A node that lost its disk is restored from a tier on a real S3 server (rule T13)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from real_cluster import run, until
from versitygw import S3Server

from pk import AdminClient, Consumer, Producer, TopicPartition, errors, generations
from pk.cli.embedded import EmbeddedServer

pytestmark = [pytest.mark.s3, pytest.mark.integration]

RECORDS = 100
FIRST = generations.OFFSETS
PLACE = TopicPartition("t", 0)


def values(address: str, end: int) -> tuple[dict[int, Any], list[tuple[str, str]]]:
    """Read the topic up to `end`; return its values by offset, and the ranges that are lost."""
    found: dict[int, Any] = {}
    lost: list[tuple[str, str]] = []
    with Consumer(address, auto_offset_reset="earliest") as consumer:
        consumer.assign([PLACE])
        while consumer.position(PLACE) < end:
            try:
                found |= {each.offset: each.value for each in consumer.poll(timeout_s=1.0)}
            except errors.DataLoss as loss:
                lost.append((loss.details["offset"], loss.details["next_offset"]))
    return found, lost


def tiered_end(address: str) -> int:
    with AdminClient(address) as admin:
        return admin.describe_tier("t").partitions[0].end


def test_a_node_that_lost_its_disk_is_restored(s3_server: S3Server, tmp_path: Path) -> None:
    settings = {
        **s3_server.server_settings("restore"),
        "tier_metadata_interval_ms": 300,
        "tier_max_lag_ms": 200,
    }
    server = EmbeddedServer(tmp_path / "node", settings={**settings, "cluster_id": "lost"})
    fresh = EmbeddedServer(tmp_path / "fresh", settings={**settings, "cluster_id": "restored"})
    fresh.write_config()
    restore = ["tier", "restore", "--config", str(fresh.config), "--json"]
    with server:
        with AdminClient(server.address) as admin, Producer(server.address) as producer:
            admin.create_topic("t", partitions=1)
            for number in range(RECORDS):
                producer.send("t", b"%d" % number, partition=0)
            producer.flush()
        until(lambda: tiered_end(server.address) == RECORDS, "every record is in the table")
        before, _ = values(server.address, RECORDS)

        def copied() -> bool:
            try:
                found = json.loads(run([*restore, "--dry-run"]))
            except AssertionError:
                return False  # no copy yet
            return any(each["topic"] == "t" for each in found["topics"])

        until(copied, "the metadata are copied")
        server.kill()
    report = json.loads(run(restore))
    assert (report["source"], report["generation"]) == ("lost", 1)
    with fresh:
        with Producer(fresh.address) as producer:
            assert producer.send("t", b"new", partition=0).result(60).offset == FIRST
        after, lost = values(fresh.address, FIRST + 1)
        assert after == {**before, FIRST: b"new"}
        assert lost == [(str(RECORDS), str(FIRST))]
        until(lambda: tiered_end(fresh.address) == FIRST + 1, "the tier goes on")
