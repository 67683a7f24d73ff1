"""`pk topics describe`: what holds back readers of committed records (rule L11)."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

import pytest

from pk.cli import topics
from pk.cli.app import run
from pk.client.admin import ConfigEntry, OpenTransaction, PartitionDescription

OPEN = OpenTransaction(2**62 + 7, 3, 120, 1_764_057_600_000)


class Admin:
    """Answers as an `AdminClient`."""

    def describe_topics(self, names: Any, *, timeout_s: float) -> list[PartitionDescription]:
        numbers = (0, 0, 0, 120, 200, 200, 1, 0, 1)
        return [
            PartitionDescription("t", "id", each, 1, 2, (1,), (1,), *numbers, "d",
                                 oldest_transaction=oldest)
            for each, oldest in enumerate((None, OPEN))
        ]  # fmt: skip

    def describe_configs(self, name: str, *, timeout_s: float) -> list[ConfigEntry]:
        return []


def test_describe_names_the_producer_that_holds_the_last_stable_offset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(topics, "_admin", lambda bootstrap: nullcontext(Admin()))
    assert run(["topics", "describe", "t"]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "stable" in each]
    assert line == (
        f"partition 1: producer {2**62 + 7} (epoch 3) holds the last stable offset at 120, with a "
        "transaction that is open since 2025-11-25T08:00:00+00:00"
    )
    assert run(["topics", "describe", "t", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["topics"][0]["partitions"]
    assert first["oldest_transaction"] is None
    assert second["oldest_transaction"] == {
        "producer_id": 2**62 + 7,
        "producer_epoch": 3,
        "first_offset": 120,
        "began_ms": 1_764_057_600_000,
    }
