"""Several nodes as real processes: one metadata quorum, whichever node dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_cluster import close, run, until

from pk.cli.embedded import EmbeddedCluster, pk_command
from pk.client.admin import AdminClient, NewTopic, QuorumDescription

pytestmark = [pytest.mark.integration, pytest.mark.executed]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EmbeddedCluster]:
    made = EmbeddedCluster(tmp_path, nodes=0)
    yield made
    close(made)


def create(bootstrap: str, name: str) -> None:
    """Create a topic through one broker; repeat the request as clients do."""
    with AdminClient(bootstrap) as admin:
        (result,) = admin.create_topics([NewTopic(name, 1, {}, 1)], timeout_s=60)
        assert result.error is None, result.error


def names(bootstrap: str) -> set[str]:
    with AdminClient(bootstrap) as admin:
        return {topic.name for topic in admin.list_topics(timeout_s=60)}


def quorum(bootstrap: str) -> QuorumDescription:
    with AdminClient(bootstrap) as admin:
        return admin.describe_metadata_quorum(timeout_s=60)


def everywhere(cluster: EmbeddedCluster, expected: set[str]) -> None:
    """Wait until every running broker knows these topics."""
    for node in cluster.nodes.values():
        if node.running and node.node_id in cluster.brokers:
            until(lambda node=node: names(node.listen) == expected, f"topics of {node.listen}")


def in_step(bootstrap: str) -> Any:
    """Return the description of the quorum once every voter has every record."""

    def look() -> Any:
        found = quorum(bootstrap)
        fetched = all(each.last_fetch_ago_ms >= 0 for each in found.voters)
        return found if fetched and found.max_lag == 0 else None

    return until(look, "a voter lags")


@pytest.mark.long
def test_three_nodes_go_on_whoever_dies(cluster: EmbeddedCluster) -> None:
    cluster.add(1, 2, 3)
    cluster.start()
    nodes = cluster.nodes
    expected = set()
    for node in nodes.values():
        create(node.listen, f"by-{node.node_id}")
        expected.add(f"by-{node.node_id}")
    everywhere(cluster, expected)
    found = in_step(nodes[1].listen)
    assert [each.node_id for each in found.voters] == [1, 2, 3]
    assert found.observers == ()

    active = found.leader_id  # the process of the active controller
    old = nodes[active].pids()["controller"]
    nodes[active].kill("controller")
    for node in nodes.values():
        create(node.listen, f"after-{node.node_id}")
        expected.add(f"after-{node.node_id}")
    everywhere(cluster, expected)
    nodes[active].wait_restarted("controller", old)
    in_step(nodes[active].listen)

    active = quorum(nodes[1].listen).leader_id  # the whole node of the active controller
    dead = nodes[active]
    dead.kill()
    others = [node for node in nodes.values() if node is not dead]
    for node in others:
        create(node.listen, f"without-{node.node_id}")
        expected.add(f"without-{node.node_id}")
    everywhere(cluster, expected)
    assert quorum(others[0].listen).leader_id != active
    dead.start()
    everywhere(cluster, expected)
    in_step(dead.listen)

    for node in nodes.values():  # a clean restart of each in turn
        assert node.stop() == 0, node.tail()
        other = next(each for each in nodes.values() if each is not node)
        create(other.listen, f"restart-{node.node_id}")
        expected.add(f"restart-{node.node_id}")
        node.start()
    everywhere(cluster, expected)
    in_step(nodes[3].listen)


def test_a_stopped_controller_holds_nobody(cluster: EmbeddedCluster) -> None:
    """The stopped controller accepts connections and does not answer, so only a timeout shows that
    it is silent.
    """
    nodes = {node.node_id: node for node in cluster.add(1, 2, 3)}
    cluster.start()
    active = quorum(nodes[1].listen).leader_id
    stopped = nodes[active].pids()["controller"]
    os.kill(stopped, signal.SIGSTOP)
    try:
        for node in nodes.values():
            create(node.listen, f"by-{node.node_id}")
        assert quorum(nodes[active].listen).leader_id != active
    finally:
        os.kill(stopped, signal.SIGCONT)
    everywhere(cluster, {"by-1", "by-2", "by-3"})
    in_step(nodes[active].listen)


def test_brokers_and_controllers_of_their_own(cluster: EmbeddedCluster) -> None:
    """Roles, voters that are added and removed, and the output of `pk quorum`."""
    (first,) = cluster.add(1, roles="controller")
    late = cluster.add(2, roles="controller", first=False)[0]
    brokers = cluster.add(11, 12, roles="broker")
    cluster.start()
    assert first.ready["roles"] == ["controller"]
    assert set(first.ready["pids"]) == {"supervisor", "controller"}
    assert first.ready["address"] == first.ready["controller"] == cluster.controllers[1]
    assert set(brokers[0].ready["pids"]) == {"supervisor", "broker"}
    assert not (brokers[0].data / "metadata").exists()
    create(brokers[0].listen, "one")
    everywhere(cluster, {"one"})

    through = ["--bootstrap", brokers[1].listen]
    added = run(["quorum", "add-controller", "--config", str(late.config), *through])
    assert added == "controller 2 votes; the voters are 1, 2\n"
    text = run(["quorum", "describe", *through])
    assert "LeaderId:             1" in text
    assert f"CurrentVoters:        1@{cluster.controllers[1]}, 2@" in text
    rows = [line.split() for line in text.splitlines() if line.endswith(("Leader", "Follower"))]
    assert [(row[0], row[-1]) for row in rows] == [("1", "Leader"), ("2", "Follower")]
    told = json.loads(
        run(["quorum", "describe", "--json", "--controller", late.settings["controller_listen"]])
    )
    assert told["leader_id"] == 1, "asked of the other one, it names the leader"
    assert [each["node_id"] for each in told["voters"]] == [1, 2]

    removed = run(["quorum", "remove-controller", "--id", "1", "--json", *through])
    assert json.loads(removed) == {"voters": [2]}
    create(brokers[1].listen, "two")
    everywhere(cluster, {"one", "two"})
    assert quorum(brokers[0].listen).leader_id == 2
    old = brokers[0].pids()["broker"]
    brokers[0].kill("broker")
    brokers[0].wait_restarted("broker", old)
    everywhere(cluster, {"one", "two"})


def test_an_unformatted_node_of_a_cluster_is_refused(cluster: EmbeddedCluster) -> None:
    node = cluster.add(1, 2, 3)[0]
    node.write_config()
    done = subprocess.run(
        pk_command("server", "start", "--config", str(node.config)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "pk server format" in done.stderr
    assert "the operator of the server must act" in done.stderr
    made = run(
        ["server", "format", "--config", str(node.config), "--initial-controllers", "--json"]
    )
    assert json.loads(made)["voter"] is True
