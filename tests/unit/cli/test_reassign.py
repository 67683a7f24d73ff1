"""`pk reassign` and `pk topics elect-leaders` against an admin client that only remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pk import errors
from pk.cli import reassign, topics
from pk.cli.app import run
from pk.client.admin import PartitionReassignment
from pk.types import TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)


class Admin:
    """Answers what the test put there."""

    def __init__(self) -> None:
        self.asked: dict[Any, Any] = {}
        self.replicas: dict[TopicPartition, tuple[int, ...]] = {T0: (1, 2), T1: (2, 1)}
        self.moving: list[PartitionReassignment] = []
        self.errors: dict[TopicPartition, errors.PkError] = {}

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None: ...

    def alter_partition_reassignments(self, wanted: Any, **_: Any) -> Any:
        self.asked.update(wanted)
        return {place: self.errors.get(place) for place in wanted}

    def partition_replicas(self, _topics: Any, **_: Any) -> Any:
        return self.replicas

    def list_partition_reassignments(self, _topics: Any, **_: Any) -> Any:
        return self.moving

    def elect_leaders(self, places: Any, *, unclean: bool, **_: Any) -> Any:
        self.asked[unclean] = places
        return {place: self.errors.get(place) for place in self.replicas}


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Admin:
    made = Admin()
    monkeypatch.setattr(reassign, "_admin", lambda _bootstrap: made)
    monkeypatch.setattr(topics, "_admin", lambda _bootstrap: made)
    return made


@pytest.fixture
def plan(tmp_path: Path) -> str:
    file = tmp_path / "plan.json"
    file.write_text(reassign.plan_text({T0: (3, 1), T1: (1, 3)}))
    return str(file)


def test_execute_says_how_to_go_back(
    admin: Admin, plan: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["reassign", "execute", plan]) == 0
    assert admin.asked == {T0: (3, 1), T1: (1, 3)}
    told = capsys.readouterr().out
    old = tmp_path / "old.json"
    old.write_text(told.splitlines()[1])
    assert reassign.read_plan(old) == admin.replicas
    admin.errors[T1] = errors.InvalidReplicaAssignment("broker 3 is not registered")
    assert run(["reassign", "execute", plan, "--json"]) == 1
    listed = json.loads(capsys.readouterr().out)
    assert [each["error"] and each["error"]["code"] for each in listed["partitions"]] == [None, 39]


def test_verify_is_complete_when_all_are_there(
    admin: Admin, plan: str, capsys: pytest.CaptureFixture[str]
) -> None:
    admin.moving = [PartitionReassignment("t", 0, (3, 1, 2), (3,), (2,))]
    assert run(["reassign", "verify", plan]) == 1
    told = capsys.readouterr().out
    assert "t-0: in progress" in told
    assert "t-1: replicas are (2, 1)" in told
    admin.moving, admin.replicas = [], {T0: (3, 1), T1: (1, 3)}
    assert run(["reassign", "verify", plan]) == 0


def test_cancel_forgives_what_is_done(admin: Admin, plan: str) -> None:
    admin.errors[T0] = errors.NoReassignmentInProgress("t-0")
    assert run(["reassign", "cancel", plan]) == 0
    assert admin.asked == {T0: None, T1: None}
    admin.errors[T1] = errors.InvalidReplicaAssignment("t-1")
    assert run(["reassign", "cancel", plan]) == 1


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"version": 2}', '{"partitions": []}', '{"partitions": [{"topic": "t"}]}',
        '{"partitions": [{"topic": "t", "partition": 0, "replicas": ["x"]}]}',
        '{"partitions": [{"topic": "t", "partition": 0, "replicas": [1], "log_dirs": ["/d"]}]}',
        '{"partitions": [{"topic": "t", "partition": 0, "replicas": [1]},'
        ' {"topic": "t", "partition": 0, "replicas": [2]}]}',
    ],
)  # fmt: skip
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    with pytest.raises(errors.InvalidOption):
        reassign.read_plan(file)
    with pytest.raises(errors.InvalidOption):
        reassign.read_plan(tmp_path / "nothing.json")


def test_leaders_are_elected_on_request(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["topics", "elect-leaders"]) == 1
    assert run(["topics", "elect-leaders", "--preferred", "--unclean"]) == 1
    admin.errors = {place: errors.ElectionNotNeeded("there") for place in admin.replicas}
    assert run(["topics", "elect-leaders", "--preferred"]) == 0
    assert "no election was needed" in capsys.readouterr().out
    assert admin.asked == {False: None}
    del admin.errors[T0]
    assert run(["topics", "elect-leaders", "t", "--unclean"]) == 0
    assert "t-0: elected" in capsys.readouterr().out
    assert admin.asked[True] == [T0, T1]
    admin.errors[T0] = errors.EligibleLeadersNotAvailable("nobody is there")
    assert run(["topics", "elect-leaders", "--unclean"]) == 1
