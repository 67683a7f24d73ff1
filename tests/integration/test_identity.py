"""The identities of logs (rule L15) on real processes: lost and damaged identities, missing and
unknown directories, and the decisions of an operator about them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedCluster, EmbeddedServer
from pk.cli.log import app
from pk.clock import block_s, monotonic_s
from pk.log.identity import IDENTITIES, PARTITION_FILE, Identity, encode

pytestmark = pytest.mark.integration

PATIENCE_S = 60
TOPIC = "flights"
RECORDS = 20


def fill(address: str, partitions: int) -> None:
    with Producer(address, linger_ms=0) as producer:
        futures = [
            producer.send(TOPIC, b"%d-%d" % (partition, number), partition=partition)
            for number in range(RECORDS)
            for partition in range(partitions)
        ]
        for future in futures:
            future.result(PATIENCE_S)


def read(address: str, partition: int, count: int = RECORDS) -> list[tuple[int, bytes | None]]:
    """Return the first `count` records.  Raises what the consumer raises."""
    found: list[tuple[int, bytes | None]] = []
    with Consumer(address, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(TOPIC, partition)])
        deadline = monotonic_s() + PATIENCE_S
        while len(found) < count:
            assert monotonic_s() < deadline, found
            found += [(record.offset, record.value) for record in consumer.poll(0.5)]
    return found


def whole(partition: int) -> list[tuple[int, bytes | None]]:
    return [(number, b"%d-%d" % (partition, number)) for number in range(RECORDS)]


def pk(*arguments: str) -> Any:
    """Run `pk log …`; return its JSON, also that of an error."""
    done = CliRunner().invoke(app, [*arguments, "--json"])
    if isinstance(done.exception, errors.PkError):
        return {"error": {"name": type(done.exception).__name__}}
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def listed(home: Path) -> dict[str, str]:
    return {each["name"]: each["status"] for each in pk("list", str(home))}


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def refused(address: str, partition: int, kind: type[errors.PkError]) -> str:
    """Check that readers and producers get this error, and that nothing is appended."""
    with pytest.raises(kind) as told:
        read(address, partition, 1)
    with Producer(address) as producer, pytest.raises(kind):
        producer.send(TOPIC, b"x", partition=partition).result(PATIENCE_S)
    return told.value.message


def test_no_log_of_an_only_replica_is_thrown_away(tmp_path: Path) -> None:
    """A second copy restores the identity; else the log is offline, or kept aside."""
    with EmbeddedServer(tmp_path) as server, AdminClient(server.address) as admin:
        topic_id = admin.create_topic(TOPIC, 5).topic_id
        fill(server.address, 5)
    home = tmp_path / "data"
    topics = home / "topics"
    (topics / f"{TOPIC}-0" / PARTITION_FILE).unlink()
    flip(topics / f"{TOPIC}-1" / PARTITION_FILE, 20)  # a character of the topic id
    shutil.rmtree(topics / f"{TOPIC}-2")
    foreign = topics / "ghosts-0"
    shutil.copytree(topics / f"{TOPIC}-4", foreign)
    other = Identity("g" * 8, TopicPartition("ghosts", 0), "another cluster", "another", 5)
    (foreign / PARTITION_FILE).write_bytes(encode(other))
    unknown = topics / "nameless-0"
    shutil.copytree(topics / f"{TOPIC}-4", unknown)
    (unknown / PARTITION_FILE).unlink()
    assert listed(home) == {
        f"{TOPIC}-0": "restorable",
        f"{TOPIC}-1": "restorable",
        f"{TOPIC}-2": "missing",
        f"{TOPIC}-3": "ok",
        f"{TOPIC}-4": "ok",
        "ghosts-0": "other",
        "nameless-0": "unidentified",
    }
    with EmbeddedServer(tmp_path) as server:
        for partition in (0, 1, 3, 4):
            assert read(server.address, partition) == whole(partition)
        assert f"pk log discard {home} {TOPIC}-2" in refused(server.address, 2, errors.LogMissing)
        assert pk("discard", str(home), f"{TOPIC}-2", "--yes")["error"]["name"] == "DirectoryLocked"
        said = server.log.read_text()
        for name in (f"{TOPIC}-0", f"{TOPIC}-1"):
            assert f"identity_restored directory={topics}/{name} " in said
        for kept in (foreign, unknown):
            assert f"directory_kept directory={kept} " in said
            assert (kept / "00000000000000000000.log").stat().st_size > 0
    # Neither copy is left of the identities of 0 and 3.
    for name in (f"{TOPIC}-0", f"{TOPIC}-3"):
        (topics / name / PARTITION_FILE).unlink()
    (home / IDENTITIES).unlink()
    with EmbeddedServer(tmp_path) as server:
        told = refused(server.address, 0, errors.LogUnidentified)
        assert f"pk log adopt {home} {TOPIC}-0 --topic-id {topic_id}" in told
        refused(server.address, 2, errors.LogMissing)
        refused(server.address, 3, errors.LogUnidentified)
        assert read(server.address, 1) == whole(1)
        assert foreign.exists()
        assert unknown.exists()
    # An operator adopts 0 and gives up the others.
    plan = pk("adopt", str(home), f"{TOPIC}-0", "--topic-id", topic_id)
    assert (plan["done"], plan["first_offset"], plan["end_offset"]) == (False, 0, RECORDS)
    assert listed(home)[f"{TOPIC}-0"] == "unidentified", "only shown so far"
    assert pk("adopt", str(home), f"{TOPIC}-0", "--topic-id", topic_id, "--yes")["done"]
    assert pk("adopt", str(home), f"{TOPIC}-1", "--yes")["error"]["name"] == "InvalidRequest"
    assert pk("adopt", str(home), f"{TOPIC}-3", "--yes")["error"]["name"] == "InvalidOption"
    assert pk("discard", str(home), f"{TOPIC}-9", "--yes")["error"]["name"] == "InvalidRequest"
    assert pk("discard", str(home), f"{TOPIC}-2", "--topic-id", topic_id, "--yes")["done"]
    assert pk("discard", str(home), f"{TOPIC}-3", "--yes")["done"]
    assert pk("discard", str(home), "ghosts-0", "--yes")["done"]
    with EmbeddedServer(tmp_path) as server, Producer(server.address) as producer:
        for partition in (0, 1, 4):
            assert read(server.address, partition) == whole(partition)
        for partition, end in ((0, RECORDS), (2, 0), (3, 0)):
            sent = producer.send(TOPIC, b"new", partition=partition).result(PATIENCE_S)
            assert sent.offset == end
        assert "BUG" not in server.log.read_text(), server.tail()
        assert not foreign.exists()
    assert set(listed(home).values()) == {"ok", "unidentified"}, "of nameless-0"


@pytest.mark.parametrize("how", ["deleted", "discarded"])
def test_one_of_three_replicas_without_its_directory(tmp_path: Path, how: str) -> None:
    """Table of histories, 3: the preferred leader comes back without its log after a full restart.
    It is not elected with an empty log, and is filled from the leader.
    """
    topic = {"replication_factor": 3, "configs": {"min_insync_replicas": 2}}
    with EmbeddedCluster(tmp_path) as cluster:
        with AdminClient(cluster.address) as admin:
            admin.create_topic(TOPIC, 1, **topic)
            (found,) = admin.describe_topics([TOPIC])
        fill(cluster.address, 1)
        first = found.replicas[0]
        cluster.kill(*cluster.nodes)
        home = cluster.nodes[first].data
        log = home / "topics" / f"{TOPIC}-0"
        if how == "deleted":
            shutil.rmtree(log)
        else:
            deadline = monotonic_s() + PATIENCE_S  # a killed process may hold its lock for a moment
            while not (told := pk("discard", str(home), log.name, "--yes")).get("done"):
                assert monotonic_s() < deadline, told
        cluster.start()
        assert read(cluster.address, 0) == whole(0)
        with AdminClient(cluster.address) as admin:
            deadline = monotonic_s() + PATIENCE_S
            (found,) = admin.describe_topics([TOPIC])
            while len(found.isr) < 3 or not log.exists():
                assert monotonic_s() < deadline, cluster.nodes[first].tail()
                block_s(0.2)
                (found,) = admin.describe_topics([TOPIC])
        fill(cluster.address, 1)
        assert len(read(cluster.address, 0, 2 * RECORDS)) == 2 * RECORDS

        def sizes() -> set[int]:
            return {
                (node.data / "topics" / log.name / "00000000000000000000.log").stat().st_size
                for node in cluster.nodes.values()
            }

        while len(sizes()) > 1:  # two of three have acknowledged the last records
            assert monotonic_s() < deadline, cluster.nodes[first].tail()
            block_s(0.2)
        cluster.kill(*cluster.nodes)
        assert len(sizes()) == 1, "the replica has all that the leader has"
        for node in cluster.nodes.values():
            assert "BUG" not in node.log.read_text(), node.tail()
