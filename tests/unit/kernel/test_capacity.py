"""The formulas of `pk doctor capacity`, and the costs that come from measured rows."""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from pk import capacity, errors, limits
from pk.capacity import ClusterPlan, NodeMachine, Prices
from pk.capacity_costs import COSTS, Cost
from tests.test_tidy import ROOT

#: Each cost is another power of two, so a sum says which terms it has.
MADE = {name: Cost(2.0**at, "", "") for at, name in enumerate(COSTS)}
PLAN = ClusterPlan(
    partitions=100, topics=10, mb_per_s=6, readers=2, connections=7, nodes=3, replication=2,
    retention_days=2, local_days=1,
)  # fmt: skip
MACHINE = NodeMachine(1024 * limits.MIB, 4, 1_000, 10_000, 100)


@pytest.fixture(scope="module")
def fits() -> Any:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return import_module("capacity_costs")
    finally:
        sys.path.pop(0)


def cost(name: str) -> float:
    return MADE[name].value or 0.0


def test_a_need_adds_up_what_each_thing_costs() -> None:
    assert (PLAN.replicas, PLAN.led, PLAN.tables) == (67, 34, 10)
    assert capacity.memory(PLAN, MADE).value == (
        cost("node_memory") + 67 * cost("partition_memory") + 100 * cost("metadata_memory")
        + 7 * cost("connection_memory") + cost("tier_memory") + 10 * cost("table_memory")
    )  # fmt: skip
    work = 2 * cost("produce_cpu") + 4 * cost("read_cpu") + 2 * cost("copy_cpu")
    assert capacity.work_cpu(PLAN, MADE).value == pytest.approx(
        (work + 2 * cost("tier_cpu")) / 1000
    )
    alone = replace(PLAN, tiered=False, replication=1)
    found = capacity.work_cpu(alone, MADE).value
    assert found == pytest.approx((2 * cost("produce_cpu") + 4 * cost("read_cpu")) / 1000)
    assert capacity.disk(PLAN).value == pytest.approx(6 * 86.4 * 2 * 1 / 3)
    assert capacity.disk(alone).value == pytest.approx(6 * 86.4 * 1 * 2 / 3)
    assert {need.of for need in capacity.needs(alone)} == {"node"}


def test_files_commits_and_looks_of_a_month() -> None:
    month = capacity.MONTH_S
    assert capacity.files_a_month(PLAN) == 100 * month / 60
    # 60 kB/s of a partition fill a file of 600 kB in 10 s, which is sooner than 60 s
    small = replace(PLAN, tier_file_bytes=600_000)
    assert capacity.files_a_month(small) == pytest.approx(100 * month / 10)
    at_once = replace(PLAN, tier_max_lag_ms=0)
    assert capacity.files_a_month(at_once) == 100 * month
    assert capacity.commits_a_month(at_once) == 10 * month, "a table has one commit a second"
    assert capacity.files_a_month(replace(PLAN, mb_per_s=0)) == 0
    assert capacity.looks_a_month(PLAN) == 10 * 3 * month / 300


def test_dollars_are_calls_and_bytes_times_prices() -> None:
    made = capacity.calls(PLAN, COSTS)
    found = capacity.dollars(PLAN, Prices(put=1, get=0, gb_month=0))
    assert found.value == pytest.approx((made["calls that write"].value or 0) / 1000)
    reads = (made["calls that read"].value or 0) + (made["calls at rest"].value or 0)
    found = capacity.dollars(PLAN, Prices(put=0, get=1, gb_month=0))
    assert found.value == pytest.approx(reads / 1000)
    assert capacity.dollars(PLAN, Prices(0, 0, 0)).value == 0
    # an idle table of one node: 2 HEADs in 5 min (docs/design/0020-store-calls.md)
    costs = {**COSTS, "tier_calls": Cost(0.0, "", "")}
    idle = capacity.dollars(ClusterPlan(), costs=costs).value
    assert idle == pytest.approx(2 * capacity.MONTH_S / 300 * 0.0004 / 1000)


def test_what_was_not_measured_is_in_no_sum() -> None:
    """The sum is a lower bound then, and names what it lacks."""
    some = {**MADE, "connection_memory": Cost(None, "", ""), "table_memory": Cost(None, "", "")}
    found = capacity.memory(PLAN, some)
    assert found.missing == ("connection_memory", "table_memory")
    whole = capacity.memory(PLAN, MADE).value or 0.0
    assert found.value == whole - 7 * cost("connection_memory") - 10 * cost("table_memory")
    assert "7 connections × not measured" in found.words
    assert capacity.memory(replace(PLAN, connections=0), some).missing == ("table_memory",)
    none = dict.fromkeys(COSTS, Cost(None, "", ""))
    assert capacity.memory(PLAN, none).value is None
    assert "memory" not in {each.name for each in capacity.limits_of(PLAN, MACHINE, none)}


@pytest.mark.parametrize(
    ("change", "first", "share", "hard"),
    [
        ({"connections": 250}, "connections", 2.5, True),
        ({"partitions": 45_000, "topics": 10}, "open files", 30_000 / 550, False),
    ],
)
def test_the_fullest_resource_comes_first(
    change: dict[str, int], first: str, share: float, hard: bool
) -> None:
    free = {name: cost._replace(value=0.0) for name, cost in COSTS.items()}
    found = capacity.limits_of(replace(PLAN, **change), MACHINE, free)
    assert (found[0].name, found[0].share, found[0].hard) == (first, share, hard)
    assert [each.share for each in found] == sorted((each.share for each in found), reverse=True)


def test_memory_and_cores_limit() -> None:
    costs = dict.fromkeys(COSTS, Cost(0.0, "", "")) | {
        "node_memory": Cost(2048.0, "", ""), "node_rest_cpu": Cost(400.0, "", ""),
    }  # fmt: skip
    found = {each.name: each.share for each in capacity.limits_of(PLAN, MACHINE, costs)}
    assert (found["memory"], found["cores"]) == (2.0, 1.0)


@pytest.mark.parametrize(
    ("change", "option"),
    [
        ({"partitions": 0}, "--partitions"),
        ({"partitions": -5}, "--partitions"),
        ({"partitions": 10**9}, "--partitions"),
        ({"topics": 101}, "--topics"),
        ({"partitions": 100_001, "topics": 10}, "--topics"),
        ({"mb_per_s": -0.1}, "--mb-per-s"),
        ({"mb_per_s": math.nan}, "--mb-per-s"),
        ({"mb_per_s": math.inf}, "--mb-per-s"),
        ({"replication": 4}, "--replication"),
        ({"nodes": 0}, "--nodes"),
        ({"local_days": 3}, "--local-days"),
        ({"tier_refresh_max_ms": 0}, "--tier-refresh-max-ms"),
    ],
)
def test_a_plan_that_no_cluster_can_have_is_refused(change: dict[str, Any], option: str) -> None:
    with pytest.raises(errors.InvalidOption) as refused:
        capacity.checked(replace(PLAN, **change))
    assert refused.value.details["option"] == option
    assert capacity.checked(PLAN) == PLAN


def test_a_price_that_is_none_is_refused() -> None:
    with pytest.raises(errors.InvalidOption, match="--put-usd"):
        capacity.checked(PLAN, Prices(put=-1))


def row(curve: str, n: int, side: str = "pk", **figures: float) -> dict[str, Any]:
    return {"curve": curve, "side": side, "n": n, "figures": figures}


def test_costs_are_slopes_of_measured_curves(fits: Any) -> None:
    growth = [
        row("partitions", 1, broker_mb=100, controller_mb=50, memory_mb=200),
        row("partitions", 1_000, broker_mb=150),
        row("partitions", 10_000, broker_mb=1_099.9, controller_mb=149.99),
        row("partitions", 10_000, side="kafka", broker_mb=7),
        row("partitions", 30_000, broker_mb=100),
        row("connections", 1, memory_mb=5),
        row("connections", 9, memory_mb=50),
        row("tables", 1, memory_mb=300),
        row("tables", 11, memory_mb=310),
    ]
    found = fits.costs(fits.Rows(growth, {}))
    assert found["partition_memory"].value == pytest.approx(0.1)
    assert found["partition_memory"].source.endswith("from n = 1 to 10,000")
    assert found["node_memory"].value == 200
    assert found["table_memory"].value == pytest.approx(1 - 0.1 - 0.01), "less its partition"
    assert found["connection_memory"].value is None, "two points beside each other have no slope"
    assert found["produce_cpu"].value is None
    assert found["table_rest_cpu"].value is None


def test_every_cost_has_its_words_and_its_place_in_a_formula(fits: Any) -> None:
    assert list(fits.costs(fits.read())) == list(COSTS)
    used = inspect.getsource(capacity)
    assert [name for name in COSTS if f'"{name}"' not in used] == []


@pytest.mark.parametrize("end", [0, 1])
def test_a_plan_at_the_ends_of_its_bounds_has_finite_needs(end: int) -> None:
    ends: dict[str, Any] = {name: bounds[end] for name, bounds in capacity.BOUNDS.items()}
    ends |= {name: int(ends[name]) for name in ("partitions", "topics", "nodes", "replication")}
    plan = capacity.checked(ClusterPlan(**ends))
    values = [need.value for need in capacity.needs(plan, Prices(1, 1, 1), MADE)]
    assert all(value is not None and math.isfinite(value) and value >= 0 for value in values)


def test_idle_tables_make_as_many_calls_as_the_formula_says(fits: Any) -> None:
    """Two HEADs in `tier_refresh_max_ms`, counted on a node with many tables."""
    found = fits.slope(fits.read(), "", "tables", "rest_calls_per_minute")
    assert found.value == pytest.approx((COSTS["look_heads"].value or 0) / 5, rel=0.1)
