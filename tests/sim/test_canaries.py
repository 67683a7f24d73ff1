"""Broken on purpose: each canary takes one promise out of the production code, and the simulator
must notice within SEEDS_MAX seeds.

The parameter is the first seed tried, one that is known to notice; should a change elsewhere move
the histories, the next ones are tried.
"""

from __future__ import annotations

from typing import Any

import pytest

from pk.log import writing
from pk.log.manager import LogManager
from pk.log.partition_log import PartitionLog
from pk.log.validate import Verdict
from pk.server.broker.partition import Partition
from pk.server.broker.tier_client import TierClient
from pk.sim.campaign import Run
from pk.sim.options import SimOptions, TopicPlan
from pk.tiering import plan as planning

pytestmark = [
    pytest.mark.sim,
    # what a killed node left half done is unwound when its world ends, and may complain
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SEEDS_MAX = 50
TIERED = {
    "segment_bytes": "14336",
    "tier_max_lag_ms": "50",
    "tier_file_bytes": "4000",
    "local_drop_delay_ms": "0",
    "local_retention_bytes": "0",
    "file_delete_delay_ms": "0",
}
HOT = {"tier_enable": "false"}


def caught(
    first: int, rules: str, configs: dict[str, str], *faults: str, chores: tuple[str, ...] = ()
) -> None:
    """Some seed from `first` on ends in a violation of one of `rules`."""
    options = SimOptions(
        topics=(TopicPlan("t", 2, configs),),
        faults=faults,
        chores=chores,
        unrest_ms=3_000,
        fault_every_ms=(100, 500),
        chore_every_ms=(50, 200),
    )
    for seed in range(first, first + SEEDS_MAX):
        violation = Run(seed, options).execute().violation
        if violation:
            assert violation.split(":")[0] in rules.split(), (seed, violation)
            return
    raise AssertionError(f"seeds {first} to {seed} noticed nothing")


def test_an_acknowledgement_before_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    append = Partition.append

    def early(self: Partition, *args: Any) -> None:
        append(self, *args)
        args[-1].answer(None)

    monkeypatch.setattr(Partition, "append", early)
    caught(1, "V5 V6", HOT, "kill_broker", "torn_write")


def test_a_duplicate_that_is_not_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pk.log.validate.check_producer", lambda *_: (Verdict.ASSIGN, None))
    caught(2, "V5 V6 V7", HOT, "break_streams", "kill_broker", "slow_network")


def test_local_data_dropped_before_the_tier_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    retention = PartitionLog.retention_plan

    async def confirm(*_: Any) -> list[str]:
        return []

    def eager(self: PartitionLog, *args: Any) -> Any:
        self.droppable_end = self.tiered_end = self.written_end
        return retention(self, *args)

    monkeypatch.setattr(TierClient, "confirm", confirm)
    monkeypatch.setattr(PartitionLog, "retention_plan", eager)
    caught(1, "V4", TIERED, "store_outage")


def test_a_table_that_takes_any_range(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = planning._checked

    def trusting(draft: Any, change: Any) -> Any:
        for counter in change.counters:
            before = draft.partition(counter.partition)
            draft.counters[counter.partition] = before._replace(end=counter.start)
        return checked(draft, change)

    monkeypatch.setattr(planning, "_checked", trusting)
    caught(1, "V4 V9 assertion", TIERED, "late_commit")


def test_a_flush_that_only_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    sync = writing._sync_segment

    def lazy(storage: Any, segment: Any) -> None:
        if segment.path().startswith("__"):  # the metadata log keeps its promise
            sync(storage, segment)

    monkeypatch.setattr(writing, "_sync_segment", lazy)
    caught(1, "V6 V8", {**HOT, "flush_on_ack": "true"}, "power")


def test_a_log_start_that_is_seen_before_it_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    move = LogManager.move_log_starts

    async def eager(self: LogManager, moves: Any) -> None:
        for key, to in moves.items():
            log = self.get(key)
            if log is not None:
                log.advance_log_start(to)
        await move(self, moves)

    monkeypatch.setattr(LogManager, "move_log_starts", eager)
    caught(1, "V3 V4 V5", HOT, "disk_full", "kill_broker", chores=("delete_records",))
