"""Reads AS OF a version of a table on a real S3 server, without Spark's JVM (rule T19)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from versitygw import S3Server

from pk import AdminClient, Producer, clock, errors
from pk.cli.embedded import EmbeddedServer
from pk.sparkconnector import options, orphan_tables, table_history, table_store
from pk.sparkconnector.batch_reader import PkReader

pytestmark = [pytest.mark.s3, pytest.mark.integration]


@pytest.fixture
def server(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmbeddedServer]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    given = s3_server.server_settings("as-of")
    with EmbeddedServer(tmp_path / "node", settings=given) as running:
        yield running


def append(server: EmbeddedServer, admin: AdminClient, first: int, count: int) -> Any:
    """Write records, wait until they are in the table, and return the table's description."""
    with Producer(server.address) as producer:
        for number in range(first, first + count):
            producer.send("flights", b"%d" % number, partition=0)
        producer.flush()
    while True:
        found = admin.describe_tier("flights")
        if found.partitions[0].end == first + count:
            return found
        clock.block_s(0.1)


def rows(server: EmbeddedServer, **given: str) -> list[int]:
    base = {"pk.bootstrap.servers": server.address, "subscribe": "flights", **given}
    reader = PkReader(options.source(base, streaming=False), options.columns_of(["offset"]))
    tasks = reader.partitions()
    return sorted(o for each in tasks for b in reader.read(each) for o in b.column(0).to_pylist())


def test_versions_on_s3(server: EmbeddedServer) -> None:
    with AdminClient(server.address) as admin:
        admin.create_topic("flights", partitions=1, configs={"tier_max_lag_ms": 200})
        early = append(server, admin, 0, 100)
        late = append(server, admin, 100, 50)
    version = early.version
    assert late.version > version
    assert rows(server, versionAsOf=str(version)) == list(range(100))
    assert rows(server) == list(range(150))
    ends = json.dumps({"flights": {"0": 60}})
    assert rows(server, endingOffsets=ends, pinned="true") == list(range(60))
    listed = table_history.history(late.uri, late.storage_options, late.topic_id, 100)
    assert sum(each.rows_added for each in listed) == 150
    (told,) = [each for each in listed if each.version == version]
    assert told.ends == {0: 100}
    assert rows(server, timestampAsOf=str(told.time_ms)) == list(range(100))
    with pytest.raises(errors.TableVersionNotFound, match="the newest one is"):
        rows(server, versionAsOf="999")
    source, root = table_store.file_system(late.uri, late.storage_options)
    from pyarrow import fs

    for each in source.get_file_info(fs.FileSelector(f"{root}/partition=0")):
        source.delete_file(each.path)
    with pytest.raises(errors.DamagedTierFile, match="not in the store"):
        rows(server, versionAsOf=str(version))


def test_tables_that_no_topic_owns_on_s3(server: EmbeddedServer) -> None:
    with AdminClient(server.address) as admin:
        admin.create_topic("flights", partitions=1, configs={"tier_max_lag_ms": 200})
        gone = append(server, admin, 0, 100)
        admin.delete_topics(["flights"])
        admin.create_topic("flights", partitions=1, configs={"tier_max_lag_ms": 200})
        kept = append(server, admin, 0, 50)
    url = orphan_tables.tier_of(kept.uri)
    tables = orphan_tables.listed(url, kept.storage_options)
    assert set(tables) >= {("flights", kept.topic_id), ("flights", gone.topic_id)}
    others = {topic_id for _, topic_id in tables} - {gone.topic_id}  # of other tests, too
    (found,) = orphan_tables.orphans(url, kept.storage_options, tables, others)
    assert (found.topic_id, found.uri) == (gone.topic_id, gone.uri)
    assert found.files >= 2
    assert found.bytes > 0
