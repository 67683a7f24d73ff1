"""The meaning of a cluster's settings together, and their contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from pk import errors
from pk.server.controller.node import first_voters
from pk.server.node.run_config import RunConfig
from pk.server.node.settings import resolve, voter_directory_id
from pk.server.raft.messages import Voter

VOTERS = "1@a:1, 2@b:2,3@c:3"


def run(**flags: Any) -> RunConfig:
    server = resolve({}, {}, flags).server
    return RunConfig(
        dirs=("/d",), directory_ids=("d",), run_dir="/d/run", cluster_id="c",
        node_id=int(server["node_id"]), server=server,
    )  # fmt: skip


def test_a_node_is_alone_by_default() -> None:
    found = run()
    assert found.roles == ("controller", "broker")
    assert found.controller_listen == "unix:/d/run/controller.sock"
    assert found.controller_addresses == ("unix:/d/run/controller.sock",)
    assert first_voters(found) is None


def test_a_node_of_three() -> None:
    found = run(node_id=2, controller_quorum_voters=VOTERS)
    assert found.voters == {1: "a:1", 2: "b:2", 3: "c:3"}
    assert found.controller_listen == "b:2"
    assert found.controller_addresses == ("b:2", "a:1", "c:3"), "its own first"
    assert first_voters(found) == {
        Voter(n, voter_directory_id("c", n)): found.voters[n] for n in (1, 2, 3)
    }
    other = run(node_id=2, controller_quorum_voters=VOTERS, controller_listen="0.0.0.0:2")
    assert other.controller_listen == "0.0.0.0:2"
    assert other.controller_addresses == ("b:2", "a:1", "c:3")


def test_the_uuid_of_a_first_voter_is_that_of_its_cluster_and_node() -> None:
    ids = {voter_directory_id(cluster, node) for cluster in ("c", "d") for node in (1, 2)}
    assert len(ids) == 4
    assert voter_directory_id("c", 1) == voter_directory_id("c", 1)


def test_a_broker_alone_needs_only_to_find_controllers() -> None:
    found = run(node_id=9, process_roles="broker", controller_quorum_bootstrap_servers="a:1,b:2")
    assert found.roles == ("broker",)
    assert found.controller_addresses == ("a:1", "b:2")
    told = run(node_id=9, process_roles="broker", controller_quorum_voters=VOTERS)
    assert told.controller_addresses == ("a:1", "b:2", "c:3")


def test_other_addresses_for_peers() -> None:
    found = run(
        node_id=2,
        controller_quorum_voters=VOTERS,
        peer_addresses="1=p:1,3=p:3",
        peer_controller_addresses="1=q:1,2=q:2",
    )
    assert found.peer_addresses == {1: "p:1", 3: "p:3"}
    assert found.controller_addresses == ("q:2", "q:1", "c:3")
    assert found.voters[1] == "a:1", "what others are told stays what it is"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"process_roles": "brokr"}, "process_roles is"),
        ({"process_roles": "broker,broker"}, "process_roles is"),
        ({"process_roles": ""}, "process_roles is"),
        ({"process_roles": "broker"}, "needs controller_quorum_voters"),
        ({"process_roles": "broker", "controller_quorum_voters": VOTERS}, "node 1 is a voter"),
        ({"process_roles": "controller"}, "controller_listen"),
        ({"controller_quorum_voters": "a:1"}, "ID@HOST:PORT"),
        ({"controller_quorum_voters": "1@a:1,1@b:1"}, "each id once"),
        ({"controller_quorum_voters": "1@a"}, "HOST:PORT"),
        ({"controller_quorum_voters": "1@0.0.0.0:1"}, "no other node can connect"),
        ({"controller_quorum_voters": "1@a:0"}, "no other node can connect"),
        ({"node_id": 7, "controller_quorum_voters": VOTERS}, "node 7 is no voter"),
        (
            {"node_id": 7, "controller_quorum_voters": VOTERS, "controller_listen": "0.0.0.0:1"},
            "no other node can connect",
        ),
        ({"controller_listen": "a:0"}, "must name the port"),
        ({"controller_quorum_bootstrap_servers": "a:1"}, "joins others"),
        ({"peer_addresses": "1@a:1"}, "ID=HOST:PORT"),
    ],
)
def test_refusals(flags: dict[str, Any], text: str) -> None:
    with pytest.raises(errors.InvalidConfig, match=text):
        resolve({}, {}, flags)
