"""`pk reassign` and `pk topics elect-leaders` with an admin client that only records calls."""

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
    """An admin client with the answers that the test set."""

    def __init__(self) -> None:
        self.asked: dict[Any, Any] = {}
        self.options: dict[str, Any] = {}
        self.ids = {"t": "id-t"}
        self.replicas: dict[TopicPartition, tuple[int, ...]] = {T0: (1, 2), T1: (2, 1)}
        self.moving: list[PartitionReassignment] = []
        self.errors: dict[TopicPartition, errors.PkError] = {}

    def __enter__(self) -> Admin:
        return self

    def __exit__(self, *_: object) -> None: ...

    def alter_partition_reassignments(self, wanted: Any, **options: Any) -> Any:
        self.asked.update(wanted)
        self.options = options
        return {place: self.errors.get(place) for place in wanted}

    def partition_replicas(self, _topics: Any, **_: Any) -> Any:
        return self.replicas

    def topic_ids(self, _topics: Any, **_: Any) -> Any:
        return self.ids

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
    plan = reassign.ReassignmentPlan({T0: (3, 1), T1: (1, 3)}, {"t": "id-t"}, {T0: (1, 2)})
    file.write_text(plan.text())
    return str(file)


def test_execute_says_how_to_go_back(
    admin: Admin, plan: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["reassign", "execute", plan]) == 0
    assert admin.asked == {T0: (3, 1), T1: (1, 3)}
    assert admin.options["topic_ids"] == {"t": "id-t"}
    assert (admin.options["expected"], admin.options["force"]) == ({T0: (1, 2)}, False)
    told = capsys.readouterr()
    assert "t-0: begun" in told.err
    old = tmp_path / "old.json"
    old.write_text(told.out)  # as a shell does: execute plan.json > old.json
    assert reassign.read_plan(old) == reassign.ReassignmentPlan(admin.replicas, {"t": "id-t"})
    admin.errors[T1] = errors.InvalidReplicaAssignment("broker 3 is not registered")
    assert run(["reassign", "execute", plan, "--json"]) == 1
    listed = json.loads(capsys.readouterr().out)
    assert [each["error"] and each["error"]["code"] for each in listed["partitions"]] == [None, 39]


def test_the_way_back_from_a_move_leads_to_the_former_replicas(
    admin: Admin, plan: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The union of old and new replicas is no assignment that anybody wanted."""
    admin.replicas = {T0: (3, 4, 1, 2), T1: (2, 1)}
    admin.moving = [PartitionReassignment("t", 0, (3, 4, 1, 2), (3, 4), (1, 2))]
    assert run(["reassign", "execute", plan]) == 0
    old = tmp_path / "old.json"
    old.write_text(capsys.readouterr().out)
    assert reassign.read_plan(old).assignment == {T0: (1, 2), T1: (2, 1)}
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    assert run(["reassign", "execute", str(deep)]) == 1
    assert "is not JSON" in capsys.readouterr().err


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
    admin.ids = {"t": "id-u"}
    assert run(["reassign", "verify", plan]) == 1
    assert "t-0: the topic was deleted and created again" in capsys.readouterr().out


def test_a_plan_begins_with_the_present_replicas(
    admin: Admin, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["reassign", "current", "t"]) == 0
    file = tmp_path / "plan.json"
    file.write_text(capsys.readouterr().out)
    found = reassign.read_plan(file)
    assert found == reassign.ReassignmentPlan(admin.replicas, {"t": "id-t"}, admin.replicas)
    assert run(["reassign", "current", "t", "nope"]) == 1
    assert "topic nope does not exist" in capsys.readouterr().err


def test_cancel_forgives_what_is_done(admin: Admin, plan: str) -> None:
    admin.errors[T0] = errors.NoReassignmentInProgress("t-0")
    assert run(["reassign", "cancel", plan, "--force"]) == 0
    assert admin.options["force"]
    assert (admin.options["topic_ids"], admin.options["expected"]) == ({"t": "id-t"}, {})
    assert admin.asked == {T0: None, T1: None}
    admin.errors[T1] = errors.InvalidReplicaAssignment("t-1")
    assert run(["reassign", "cancel", plan]) == 1


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"version": 2}', '{"partitions": []}', '{"partitions": [{"topic": "t"}]}',
        '{"partitions": [{"topic": "t", "topic_id": "i", "partition": 0, "replicas": ["x"]}]}',
        '{"partitions": [{"topic": "t", "partition": 0, "replicas": [1]}]}',
        '{"partitions": [{"topic": "t", "topic_id": "i", "partition": 0, "replicas": [1],'
        ' "log_dirs": ["/d"]}]}',
        '{"partitions": [{"topic": "t", "topic_id": "i", "partition": 0, "replicas": [1]},'
        ' {"topic": "t", "topic_id": "i", "partition": 0, "replicas": [2]}]}',
        '{"partitions": [{"topic": "t", "topic_id": "i", "partition": 0, "replicas": [1]},'
        ' {"topic": "t", "topic_id": "j", "partition": 1, "replicas": [2]}]}',
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
