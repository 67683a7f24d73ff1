"""Runs docs/REPAIR.md's commands for `pk.json` and `quorum-state`, on a node that is alone and on
one of three (test_repair_page.py has the other sections).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from real_cluster import close, until

from pk import AdminClient, Consumer, Producer, TopicPartition, errors
from pk.cli.embedded import EmbeddedCluster, EmbeddedServer, pk_command
from tests.integration.test_repair_page import TOPIC, commands, fill, numbers, run

pytestmark = pytest.mark.integration

RECORDS = 5


def flip_digit(path: Path) -> None:
    """Flip the first digit in the file."""
    raw = bytearray(path.read_bytes())
    at = next(at for at, byte in enumerate(raw) if chr(byte).isdigit())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_an_identity_comes_back_from_a_backup(tmp_path: Path) -> None:
    restore = commands("The identity of a node")[0]
    backups = tmp_path / "backups"
    backups.mkdir()
    with EmbeddedServer(tmp_path) as server:
        with AdminClient(server.address) as admin:
            admin.create_topic(TOPIC, 1, {"retention_ms": -1})
        fill(server, RECORDS)
        (backups / "pk.json").write_bytes((server.data / "pk.json").read_bytes())
    for harm in (flip_digit, Path.unlink):
        harm(server.data / "pk.json")
        with pytest.raises(errors.CorruptLog, match=r"The identity of a node"):
            server.start()
        run(restore, server.data, **{"/var/backups/pk": str(backups)})
        with server:
            assert numbers(server, RECORDS) == list(range(RECORDS))


def test_a_node_alone_goes_on_without_its_damaged_vote(tmp_path: Path) -> None:
    away = commands("The saved vote")[0]
    with EmbeddedServer(tmp_path) as server:
        with AdminClient(server.address) as admin:
            admin.create_topic(TOPIC, 1, {"retention_ms": -1})
        fill(server, RECORDS)
    flip_digit(server.data / "metadata/quorum-state")
    with pytest.raises(errors.CorruptLog, match=r"The saved vote"):
        server.start()
    run(away, server.data)
    with server:
        assert numbers(server, RECORDS) == list(range(RECORDS))
    assert server.log.read_text().count("quorum_state_missing") == 1


def refused(node: EmbeddedServer) -> str:
    """Return the error of a start that fails."""
    done = subprocess.run(
        pk_command("server", "start", "--config", str(node.config)),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    return done.stderr


def exchange(cluster: EmbeddedCluster, lines: list[str]) -> None:
    """Run the page's commands for node 2, which is down: two format it, two exchange the voter."""
    node = cluster.nodes[2]
    places = {"node2.toml": str(node.config)}
    through = f" --bootstrap {cluster.nodes[1].listen}"
    assert [line.split()[0] for line in lines] == ["mv", "pk", "pk", "pk"]
    for line in lines[:2]:
        run(line, node.data, **places)
    node.start()
    for line in lines[2:]:
        run(line + through, node.data, **places)


def values(bootstrap: str) -> list[bytes | None]:
    found: list[bytes | None] = []

    def enough() -> bool:
        found.extend(record.value for record in consumer.poll(0.5))
        return len(found) >= RECORDS

    with Consumer(bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([TopicPartition(TOPIC, 0)])
        until(enough, "records are missing")
    return found


def test_a_controller_of_three_is_exchanged(tmp_path: Path) -> None:
    """Without its vote it does not start; with new metadata it keeps its partitions; a new
    directory is filled by the other nodes.
    """
    cluster = EmbeddedCluster(tmp_path)
    cluster.start()
    node = cluster.nodes[2]
    bootstrap = cluster.address
    wanted = [b"%d" % number for number in range(RECORDS)]
    try:
        with AdminClient(bootstrap) as admin:
            admin.create_topic(TOPIC, 1, {"retention_ms": -1}, replication_factor=3)
        with Producer(bootstrap) as producer:
            for value in wanted:
                producer.send(TOPIC, value, partition=0).result(60)

        def voters() -> dict[int, str]:
            with AdminClient(bootstrap) as admin:
                found = admin.describe_metadata_quorum(timeout_s=60).voters
            return {each.node_id: each.directory_id for each in found}

        def in_sync() -> bool:
            with AdminClient(bootstrap) as admin:
                (found,) = admin.describe_topics([TOPIC])
            return sorted(found.isr) == [1, 2, 3]

        drawn = [voters()]
        assert node.stop() == 0
        state, log = node.data / "metadata/quorum-state", node.data / "topics/flights-0"
        until(lambda: log.exists(), "node 2 has no replica")
        whole, inode = state.read_bytes(), log.stat().st_ino
        flip_digit(state)
        assert f"{state} is damaged: its checksum does not match" in refused(node)
        state.write_bytes(whole)
        state.unlink()
        assert "vote twice" in refused(node)
        exchange(cluster, commands("The saved vote")[1:])
        drawn.append(voters())
        until(in_sync, "node 2 is not in sync")
        assert log.stat().st_ino == inode, "its partitions stay"

        assert node.stop() == 0
        flip_digit(node.data / "pk.json")
        assert f"{node.data}/pk.json is damaged: its checksum" in refused(node)
        exchange(cluster, commands("The identity of a node")[1:])
        drawn.append(voters())
        until(in_sync, "node 2 is not filled")
        assert all(set(each) == {1, 2, 3} for each in drawn)
        assert len({each[2] for each in drawn}) == 3, "each time another voter"
        assert values(bootstrap) == wanted
    finally:
        close(cluster)
