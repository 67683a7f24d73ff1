"""`pk cluster`: which nodes keep the cluster from a level (rule Q6)."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest

from pk.cli import cluster
from pk.cli.app import run
from pk.client.admin import ClusterDescription, NodeLevel

NODES = (
    NodeLevel(1, "broker", "b1:1", 2),
    NodeLevel(2, "broker", "b2:1", 1),
    NodeLevel(3, "controller", "c3:1", None),
)


class Admin:
    """Answers as an `AdminClient`; `asked`: the requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    def describe_cluster(self, *, timeout_s: float) -> ClusterDescription:
        return ClusterDescription("c", 1, 1, 2, NODES)

    def upgrade_cluster(self, to: int, *, validate_only: bool, timeout_s: float) -> tuple[int, int]:
        self.asked.append((to, validate_only))
        return 1, to or 2


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Admin:
    found = Admin()
    monkeypatch.setattr(cluster, "_admin", lambda bootstrap: nullcontext(found))
    return found


def test_describe_names_the_nodes_that_do_not_know_the_level(
    admin: Admin, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["cluster", "describe"]) == 0
    text = capsys.readouterr().out
    assert "level 2 is not known to: broker 2, controller 3" in text
    assert "not known" in text.splitlines()[-1]
    assert run(["cluster", "describe", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["behind"] == ["broker 2", "controller 3"]
    assert (found["level"], found["known"], found["nodes"][2]["level"]) == (1, 2, None)


@pytest.mark.parametrize(
    ("arguments", "asked", "said"),
    [
        ([], (0, False), "raised from level 1 to level 2"),
        (["--to", "3"], (3, False), "raised from level 1 to level 3"),
        (["--to", "1"], (1, False), "at level 1 already (unchanged)"),
        (["--dry-run"], (0, True), "every node knows level 2; the cluster stays at level 1"),
        (["--dry-run", "--json"], (0, True), '"changed": false'),
        (["--json"], (0, False), '"changed": true'),
    ],
)
def test_upgrade_says_what_it_did(
    admin: Admin,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    asked: tuple[int, bool],
    said: str,
) -> None:
    assert run(["cluster", "upgrade", *arguments]) == 0
    assert admin.asked == [asked]
    assert said in capsys.readouterr().out
