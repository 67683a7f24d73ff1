"""Moves of partitions between real brokers: none costs a copy, none moves another topic."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_cluster import close, until

from pk import Producer, errors
from pk.cli.app import run
from pk.cli.embedded import EmbeddedCluster, EmbeddedServer, pk_command
from pk.client.admin import AdminClient
from pk.server.metadata.records import decode_batches
from pk.types import TopicPartition

pytestmark = pytest.mark.integration

PATIENCE_S = 60
SETTINGS = {
    "replica_lag_time_max_ms": 2_000,
    "broker_session_timeout_ms": 3_000,
    "unclean_recovery_wait_ms": 500,
}


class Cluster:
    """Four brokers; broker 1 is the controller, and any of the others may be killed."""

    def __init__(self, home: Path) -> None:
        self.real = EmbeddedCluster(home, nodes=0, settings=SETTINGS)
        self.real.add(1)
        self.real.add(2, 3, 4, roles="broker")
        self.real.start()
        self.nodes = self.real.nodes
        self.admin = AdminClient(self.nodes[1].listen)
        self.dead: list[int] = []
        until(lambda: self.active() == {1, 2, 3, 4}, "all brokers are active")

    def close(self) -> None:
        self.admin.close()
        close(self.real)

    def active(self) -> set[int]:
        return {b.broker_id for b in self.admin.list_brokers() if b.state == "active"}

    def kill(self, *nodes: int) -> None:
        for node in nodes:
            self.nodes[node].kill()
            self.dead.append(node)
        until(lambda: not self.active() & set(nodes), f"{nodes} are fenced")

    def start(self, *nodes: int) -> None:
        for node in nodes:
            self.nodes[node].start()
            self.dead.remove(node)
        until(lambda: self.active() >= set(nodes), f"{nodes} are active")

    def create(self, topic: str, *replicas: int, **configs: Any) -> TopicPartition:
        """Create a topic of one partition on these brokers, all in sync."""
        self.admin.create_topic(topic, configs=configs, replica_assignment=[replicas])
        place = TopicPartition(topic, 0)
        # Any broker may answer, and one that began just now may not have read of the topic yet.
        until(lambda: self.replicas(place) == replicas, f"{topic} lies where asked")
        until(lambda: self.isr(place) == set(replicas), f"{topic} is in sync")
        return place

    def move(self, place: TopicPartition, *replicas: int, **given: Any) -> errors.PkError | None:
        """Reassign the partition; without replicas, cancel."""
        wanted = {place: replicas or None}
        return self.admin.alter_partition_reassignments(wanted, **given)[place]

    def state(self, place: TopicPartition) -> Any:
        (found,) = self.admin.describe_topics([place.topic])
        return found

    def isr(self, place: TopicPartition) -> set[int]:
        return set(self.state(place).isr)

    def replicas(self, place: TopicPartition) -> tuple[int, ...]:
        return self.admin.partition_replicas([place.topic]).get(place, ())

    def send(self, place: TopicPartition, count: int = 1) -> None:
        """Send records with acks=all."""
        with Producer(self.nodes[1].listen, delivery_timeout_ms=1_000 * PATIENCE_S) as producer:
            for _ in range(count):
                producer.send(place.topic, b"x", partition=0).result(PATIENCE_S)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("moves"))
    yield made
    made.close()


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    yield shared
    shared.start(*list(shared.dead))


def test_a_topic_lies_where_its_creator_says(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    def topics(*arguments: str) -> tuple[int, str]:
        code = run(["topics", *arguments, "--bootstrap", cluster.nodes[1].listen])
        found = capsys.readouterr()
        return code, found.out + found.err

    def listed(*states: str) -> dict[str, list[int]]:
        code, text = topics("describe", "placed", "other", *states, "--json")
        assert code == 0, text
        found = json.loads(text)["topics"]
        return {each["name"]: [one["partition"] for one in each["partitions"]] for each in found}

    min_isr = ("--config", "min_insync_replicas=2")
    assert topics("create", "placed", "--replica-assignment", "2:3,3:1,1:4", *min_isr)[0] == 0
    assert topics("create", "other", "--replica-assignment", "3:4:1")[0] == 0
    more = ("alter", "placed", "--add-partitions", "1", "--replica-assignment")
    code, text = topics(*more, "4:9")
    assert code != 0
    assert "broker 9, which is not registered" in text
    code, text = topics(*more, "4")
    assert code != 0
    assert "here 2" in text
    assert topics(*more, "4:3")[0] == 0
    # The controller has answered; the broker that is asked may apply the record a moment later.
    given = enumerate([(2, 3), (3, 1), (1, 4), (4, 3)])
    asked = {TopicPartition("placed", n): brokers for n, brokers in given}
    until(lambda: cluster.admin.partition_replicas(["placed"]) == asked, "all lie where asked")
    leaders = [each.leader for each in cluster.admin.describe_topics(["placed"])]
    assert leaders == [2, 3, 1, 4]
    until(lambda: listed("--at-min-isr") == {"placed": [0, 1, 2, 3]}, "all are at min ISR")
    assert listed("--under-replicated", "--under-min-isr", "--unavailable") == {}
    cluster.kill(4)
    until(lambda: cluster.isr(TopicPartition("other", 0)) == {1, 3}, "4 has left")
    until(lambda: 4 not in cluster.admin.describe_topics(["placed"])[3].isr, "4 has left")
    behind = {"placed": [2, 3], "other": [0]}
    until(lambda: listed("--under-replicated") == behind, "all brokers know that 4 has left")
    assert listed("--under-min-isr") == {"placed": [2, 3]}
    assert topics("create", "nowhere", "--replica-assignment", "4")[0] != 0


def test_a_cancel_never_leaves_fewer_copies_than_min_isr(cluster: Cluster) -> None:
    """R8: acks=all went on with {1, 3}; without 3 there would be one copy of what it stored."""
    place = cluster.create("cancelled", 1, 2, min_insync_replicas=2)
    cluster.send(place)
    cluster.kill(2, 4)
    assert cluster.move(place, 1, 3, 4) is None
    until(lambda: cluster.isr(place) == {1, 3}, "3 has joined")
    cluster.send(place, 5)
    assert isinstance(cluster.move(place), errors.NotEnoughReplicas)
    assert cluster.isr(place) == {1, 3}
    cluster.start(2)
    until(lambda: cluster.isr(place) >= {1, 2}, "2 is in sync again")
    assert cluster.move(place) is None
    until(lambda: cluster.replicas(place) == (1, 2), "the move is cancelled")
    assert cluster.isr(place) == {1, 2}


def test_a_smaller_replica_set_is_in_sync_before_the_others_leave(cluster: Cluster) -> None:
    """R8, KAFKA-19975: 3 stays until 2 is in sync."""
    place = cluster.create("smaller", 1, 2, 3)
    cluster.kill(2)
    until(lambda: cluster.isr(place) == {1, 3}, "2 has left")
    assert cluster.move(place, 1, 2) is None
    (moving,) = cluster.admin.list_partition_reassignments(["smaller"])
    assert (moving.replicas, moving.removing) == ((1, 2, 3), (3,))
    assert cluster.isr(place) == {1, 3}
    cluster.start(2)
    until(lambda: cluster.replicas(place) == (1, 2), "the move is complete")
    assert cluster.isr(place) == {1, 2}


def test_acks_all_goes_on_while_more_replicas_are_added(cluster: Cluster) -> None:
    """R1: one original replica is required until the others are in sync."""
    place = cluster.create("larger", 1, min_insync_replicas=2)
    cluster.send(place)
    cluster.kill(3, 4)
    assert cluster.move(place, 1, 3, 4) is None
    cluster.send(place, 5)
    cluster.start(3, 4)
    until(lambda: cluster.isr(place) == {1, 3, 4}, "all are in sync")
    until(lambda: not cluster.admin.list_partition_reassignments(["larger"]), "it is complete")
    cluster.send(place)


def test_a_replica_that_only_copies_yet_is_not_elected(cluster: Cluster) -> None:
    """R9: 3 is alive and has nothing; 2, which is away, has everything."""
    place = cluster.create("elected", 2, unclean_leader_election_enable="true")
    cluster.send(place, 20)
    cluster.kill(3, 4)
    assert cluster.move(place, 3, 4) is None
    cluster.kill(2)
    cluster.start(3)
    for _ in range(2):  # each call waits for the positions of replicas
        (error,) = cluster.admin.elect_leaders([place], unclean=True).values()
        assert isinstance(error, errors.EligibleLeadersNotAvailable), error
    cluster.start(2)
    until(lambda: cluster.state(place).leader == 2, "2 leads again")
    assert cluster.admin.offsets("elected") == {place: 20}
    assert cluster.move(place) is None


def test_a_plan_does_not_move_a_topic_that_was_created_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    """R10: the file names the topic id."""
    place = cluster.create("planned", 1, 2)
    cli = [*pk_command(), "reassign"]
    at = ["--bootstrap", cluster.nodes[1].listen]

    def pk(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*cli, *arguments, *at]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    plan = json.loads(pk("current", "planned").stdout)
    (entry,) = plan["partitions"]
    assert (entry["replicas"], entry["expected"]) == ([1, 2], [1, 2])
    entry["replicas"] = [3, 4]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan))
    cluster.admin.delete_topics(["planned"])
    cluster.create("planned", 1, 2)
    refused = pk("execute", str(file))
    assert refused.returncode == 1
    assert "it was deleted and created again" in " ".join(refused.stderr.split())
    assert cluster.replicas(place) == (1, 2)
    del entry["topic_id"]
    file.write_text(json.dumps(plan))
    assert "has no topic_id" in " ".join(pk("execute", str(file)).stderr.split())


def directories_named(home: Path) -> int:
    """Return how many partitions name the directory of their replica, from the metadata log."""
    raw = (home / "metadata" / "__cluster_metadata-0" / f"{0:020}.log").read_bytes()
    with contextlib.suppress(errors.PkError):  # a batch that is being written
        changes = [each.partition_change for _, each in decode_batches(raw)]
        return len({each.topic_id for each in changes if any(each.directories)})
    return 0


def test_a_missing_directory_costs_the_replicas_that_lay_there(tmp_path: Path) -> None:
    """R11: the node starts again without `b`; what lies in `a` needs no unclean election."""
    server = EmbeddedServer(tmp_path, data=("a", "b"))
    server.start()
    try:
        with AdminClient(server.address) as admin, Producer(server.address) as producer:
            for topic in ("alpha", "omega"):
                admin.create_topic(topic, 1)
                producer.send(topic, b"x").result(PATIENCE_S)
            where = {each.topic: each.directory for each in admin.describe_topics()}
        assert set(where.values()) == {str(tmp_path / "a"), str(tmp_path / "b")}
        lost = next(topic for topic in where if where[topic] == str(tmp_path / "b"))
        kept = "omega" if lost == "alpha" else "alpha"
        until(lambda: directories_named(tmp_path / "a") == 2, "heartbeats named the directories")
        server.stop()
        (tmp_path / "a" / "run" / "config.json").unlink()  # the operator gives `b` up
        server = EmbeddedServer(tmp_path, data=("a",), listen=server.listen)
        server.start()
        with AdminClient(server.address) as admin:
            until(lambda: admin.describe_topics([kept])[0].leader == 1, f"{kept} is led")
            until(lambda: admin.describe_topics([lost])[0].leader == 1, f"{lost} is led")
            assert admin.offsets(kept) == {TopicPartition(kept, 0): 1}
        lines = [line for line in server.log.read_text().splitlines() if "unclean_election" in line]
        assert any(lost in line for line in lines)
        assert not any(kept in line for line in lines)
    finally:
        server.stop()
