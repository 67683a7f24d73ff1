"""`pk transactions`: texts, JSON and exit codes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest

from pk import errors
from pk.cli import transactions
from pk.cli.app import run
from pk.client.admin import (
    AwaitedTable,
    HangingTransaction,
    HeldPartition,
    JobDescription,
    OpenTransaction,
    ParticipantDescription,
    TransactionDescription,
    TransactionListing,
    TransactionListings,
)
from pk.client.options import TRANSACTION_MAX_TIMEOUT_MS
from pk.types import TopicPartition

PLACES = (
    TopicPartition("orders", 0), TopicPartition("orders", 2), TopicPartition("payments", 1),
)  # fmt: skip
OPEN = TransactionDescription("a", 2, "Ongoing", 77, 3, 60_000, 1_700_000_000_123, PLACES, "")
ENDED = TransactionDescription("b", 1, "CompleteAbort", 78, 4, 60_000, None, (), "timed out")
UNKNOWN = TransactionDescription(
    "x", 1, "", 0, 0, 0, None, (), "", errors.TransactionalIdNotFound("no id x")
)
TASKS = (
    ParticipantDescription(77, 3, True, 1_250), ParticipantDescription(78, 0, False, 40),
    ParticipantDescription(79, 1, None, None),
)  # fmt: skip
HELD = (HeldPartition(PLACES[1], OpenTransaction(78, 0, 512, 1_700_000_000_456)),)
JOB = TransactionDescription(
    "j", 2, "Ongoing", -1, -1, 0, 1_700_000_000_123, PLACES, "", None,
    JobDescription("query-1", "run-2", 6, 5, False, TASKS), HELD,
)  # fmt: skip
WAITING = TransactionDescription(
    "w", 2, "AwaitingTable", -1, -1, 0, 1_700_000_000_123, PLACES, "", None,
    JobDescription(
        "query-1", "run-2", 6, 5, False, TASKS, AwaitedTable("s3://b/t", "d", "app", 6, 1_700)
    ),
)  # fmt: skip
IDLE = TransactionDescription(
    "i", 2, "Empty", -1, -1, 0, None, (), "", None,
    JobDescription("query-3", "run-4", None, None, True, ()),
)  # fmt: skip


class Admin:
    """Answers as an `AdminClient`; `asked`: the requests."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.loading: tuple[int, ...] = ()
        self.silent: tuple[int, ...] = ()
        self.hanging: list[HangingTransaction] = []

    def list_transactions(
        self, states: Any, producer_ids: Any, *, open_longer_ms: int, timeout_s: float
    ) -> TransactionListings:
        self.asked.append((list(states), list(producer_ids), open_longer_ms))
        listed = (
            TransactionListing("a", 77, "Ongoing", 2),
            TransactionListing("j", -1, "Empty", 1, "participants"),
        )
        return TransactionListings(listed, self.loading, self.silent)

    def describe_transactions(self, ids: Any, *, timeout_s: float) -> Any:
        return [
            {"a": OPEN, "b": ENDED, "j": JOB, "i": IDLE, "w": WAITING}.get(each, UNKNOWN)
            for each in ids
        ]

    def abort_transaction(self, transactional_id: str, *, timeout_s: float) -> None:
        self.asked.append(("abort", transactional_id))

    def resolve_transaction(self, name: str, *, commit: bool, timeout_s: float) -> None:
        self.asked.append(("resolve", name, commit))

    def forget_transactional_id(self, transactional_id: str, *, timeout_s: float) -> None:
        if transactional_id == "open":
            raise errors.InvalidTxnState("open is Ongoing: abort its transaction")
        self.asked.append(("forget", transactional_id))

    def find_hanging_transactions(
        self, topics: Any, *, max_timeout_ms: Any, timeout_s: float
    ) -> Any:
        self.asked.append((topics, max_timeout_ms))
        return self.hanging


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Admin:
    found = Admin()
    monkeypatch.setattr(transactions, "_admin", lambda bootstrap: nullcontext(found))
    return found


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*arguments: str, code: int = 0) -> Any:
        assert run(["transactions", *arguments]) == code
        out, err = capsys.readouterr()
        return json.loads(out) if "--json" in arguments else out + err

    return call


def test_list_passes_its_filters_on(admin: Admin, told: Any) -> None:
    text = told("list")
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["a", "producer", "2", "77", "Ongoing"], ["j", "participants", "1", "Empty"],
    ]  # fmt: skip
    assert "not complete" not in text
    told("list", "--state", "Ongoing", "--state", "Empty", "--producer-id", "7",
         "--open-longer-ms", "9")  # fmt: skip
    assert admin.asked == [([], [], 0), (["Ongoing", "Empty"], [7], 9)]


def test_list_says_what_it_lacks(admin: Admin, told: Any) -> None:
    admin.loading, admin.silent = (3, 4), (2,)
    text = told("list")
    assert "partitions 3, 4 still load" in text
    assert "no answer from brokers 2" in text
    found = told("list", "--json")
    assert (found["complete"], found["loading"], found["silent"]) == (False, [3, 4], [2])
    assert found["transactions"][0]["coordinator_id"] == 2
    assert [each["kind"] for each in found["transactions"]] == ["producer", "participants"]


def test_describe_shows_partitions_and_reasons(admin: Admin, told: Any) -> None:
    text = told("describe", "a", "b")
    assert "orders 0 2, payments 1" in text
    assert "2023-11-14 22:13:20.123 UTC" in text
    assert "timed out" in text
    first, second = told("describe", "a", "b", "--json")["transactions"]
    assert first["partitions"][1] == {"topic": "orders", "partition": 2}
    assert (first["error"], second["started_ms"], second["reason"]) == (None, None, "timed out")


def test_describe_shows_a_job_with_its_participants(admin: Admin, told: Any) -> None:
    lines = [line.split() for line in told("describe", "j").splitlines()]
    for expected in (
        "kind participants", "query query-1", "run run-2", "written by a streaming query",
        "open batch 6", "last committed batch 5", "participants 3",
        "holds the last stable offset of orders-2 at 512",
        "77 3 yes 1.2 s ago", "78 0 no 0.0 s ago", "79 1 not known not by this coordinator",
    ):  # fmt: skip
        assert expected.split() in lines, expected
    assert not [line for line in lines if line[0] in ("producer", "timeout")]
    lines = [line.split() for line in told("describe", "i").splitlines()]
    for expected in ("written by a batch write", "open batch none", "last committed batch none"):
        assert expected.split() in lines, expected
    assert not [line for line in lines if line[0] in ("participants", "participant", "holds")]


def test_describe_of_a_job_as_json(admin: Admin, told: Any) -> None:
    found, plain = told("describe", "j", "a", "--json")["transactions"]
    assert (found["kind"], plain["kind"], plain["job"]) == ("participants", "producer", None)
    job = found["job"]
    assert [job[name] for name in ("query", "run", "batch", "last_committed", "batch_write")] == [
        "query-1", "run-2", 6, 5, False,
    ]  # fmt: skip
    assert job["participants"][::2] == [
        {"producer_id": 77, "producer_epoch": 3, "finished": True, "heard_ago_ms": 1_250},
        {"producer_id": 79, "producer_epoch": 1, "finished": None, "heard_ago_ms": None},
    ]
    assert found["held"] == [
        {"topic": "orders", "partition": 2, "producer_id": 78, "producer_epoch": 0,
         "first_offset": 512, "began_ms": 1_700_000_000_456},
    ]  # fmt: skip


def test_describe_of_an_unknown_id_fails(admin: Admin, told: Any) -> None:
    assert "x: no id x" in told("describe", "a", "x", code=1)
    _, second = told("describe", "a", "x", "--json", code=1)["transactions"]
    assert second["error"]["name"] == "TransactionalIdNotFound"


def test_resolve_needs_the_operators_word(admin: Admin, told: Any) -> None:
    assert told("resolve", "w", "--commit") == "the batch of w is committed\n"
    assert told("resolve", "w", "--abort", "--json") == {"resolved": "w", "ended": "aborted"}
    assert "--commit or --abort" in told("resolve", "w", code=2)
    assert admin.asked == [("resolve", "w", True), ("resolve", "w", False)]


def test_describe_names_the_table_of_a_prepared_batch(admin: Admin, told: Any) -> None:
    text = told("describe", "w")
    for expected in ("AwaitingTable", "s3://b/t (id d)", "version 6 of application 'app'"):
        assert expected in text
    [found] = told("describe", "w", "--json")["transactions"]
    assert found["job"]["awaited"]["version"] == 6


def test_abort_and_forget_name_the_id(admin: Admin, told: Any) -> None:
    assert told("abort", "a") == "the transaction of a is aborted\n"
    assert told("abort", "a", "--json") == {"aborted": "a"}
    assert told("forget", "a") == "a is forgotten\n"
    assert admin.asked == [("abort", "a"), ("abort", "a"), ("forget", "a")]
    assert "abort its transaction" in told("forget", "open", code=1)


def test_find_hanging_fails_if_it_finds_one(admin: Admin, told: Any) -> None:
    assert told("find-hanging") == "no transaction hangs\n"
    admin.hanging = [HangingTransaction(PLACES[1], 77, 3, 500, 9_000, "", "unknown")]
    text = told("find-hanging", "--topic", "orders", "--max-timeout-ms", "5", code=1)
    assert text.split("\n")[1].split() == ["orders-2", "77", "3", "500", "9000", "unknown"]
    assert admin.asked == [(None, TRANSACTION_MAX_TIMEOUT_MS), (["orders"], 5)]
    (found,) = told("find-hanging", "--json", code=1)["hanging"]
    assert (found["topic"], found["partition"], found["start_offset"]) == ("orders", 2, 500)
    admin.hanging = [HangingTransaction(PLACES[1], 77, 3, 500, 9_000, "", "loads", certain=False)]
    told("find-hanging")
