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
    HangingTransaction,
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
        listed = (TransactionListing("a", 77, "Ongoing", 2),)
        return TransactionListings(listed, self.loading, self.silent)

    def describe_transactions(self, ids: Any, *, timeout_s: float) -> Any:
        return [{"a": OPEN, "b": ENDED}.get(each, UNKNOWN) for each in ids]

    def abort_transaction(self, transactional_id: str, *, timeout_s: float) -> None:
        self.asked.append(("abort", transactional_id))

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
    assert text.split("\n")[1].split() == ["a", "2", "77", "Ongoing"]
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


def test_describe_shows_partitions_and_reasons(admin: Admin, told: Any) -> None:
    text = told("describe", "a", "b")
    assert "orders 0 2, payments 1" in text
    assert "2023-11-14 22:13:20.123 UTC" in text
    assert "timed out" in text
    first, second = told("describe", "a", "b", "--json")["transactions"]
    assert first["partitions"][1] == {"topic": "orders", "partition": 2}
    assert (first["error"], second["started_ms"], second["reason"]) == (None, None, "timed out")


def test_describe_of_an_unknown_id_fails(admin: Admin, told: Any) -> None:
    assert "x: no id x" in told("describe", "a", "x", code=1)
    _, second = told("describe", "a", "x", "--json", code=1)["transactions"]
    assert second["error"]["name"] == "TransactionalIdNotFound"


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
