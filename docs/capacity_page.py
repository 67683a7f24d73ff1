"""The tables of docs/capacity.md: the costs, and plans computed with them."""

from __future__ import annotations

from collections.abc import Mapping

import capacity_costs
from marked_tables import replaced, table

from pk import capacity, limits
from pk.capacity import ClusterPlan, NodeMachine
from pk.capacity_costs import Cost

PAGE = capacity_costs.HERE / "capacity.md"
#: The machine of the examples.
_MACHINE = NodeMachine(16 * 1024 * limits.MIB, 4, 65_536, 174_762, 7_645)
#: Plans of the table of examples, with their names.
_PLANS = {
    "one small node": ClusterPlan(partitions=40, topics=10, mb_per_s=1, connections=20),
    "many topics, little data": ClusterPlan(
        partitions=2_000, topics=1_000, mb_per_s=1, connections=200, nodes=3, replication=3
    ),
    "20 MB/s, 10,000 partitions": ClusterPlan(
        partitions=10_000, topics=100, mb_per_s=20, connections=500, nodes=3, replication=3
    ),
    "the same, tables 10 min behind": ClusterPlan(
        partitions=10_000, topics=100, mb_per_s=20, connections=500, nodes=3, replication=3,
        tier_max_lag_ms=600_000,
    ),
}  # fmt: skip


#: What a cost is of, by its name.
WHAT = {
    "node_memory": "node: three processes, memory",
    "node_rest_cpu": "node, CPU at rest",
    "node_descriptors": "broker of a node, descriptors",
    "tier_memory": "tier process of a node, memory",
    "tier_rest_cpu": "tier process of a node, CPU at rest",
    "partition_memory": "replica, memory of the broker",
    "metadata_memory": "partition in the metadata, memory of the controller",
    "partition_rest_cpu": "replica, CPU at rest",
    "partition_descriptors": "replica, descriptors",
    "connection_memory": "connection, memory",
    "connection_rest_cpu": "connection, CPU at rest",
    "connection_descriptors": "connection, descriptors",
    "table_memory": "table, memory",
    "table_rest_cpu": "table, CPU at rest",
    "produce_cpu": "a GB produced, CPU of the leader",
    "copy_cpu": "a GB copied to one follower, CPU of both",
    "read_cpu": "a GB read, CPU of the leader",
    "tier_cpu": "a GB into tables, CPU of the tier process",
    "table_bytes": "bytes of a table for a byte of the log",
    "tier_calls": "tier process of a node, store calls at rest",
    "look_heads": "a look at a table",
    "file_puts": "a file, writes",
    "file_heads": "a file, reads",
    "commit_puts": "a commit, writes",
    "commit_heads": "a commit, reads",
}


def _costs_rows(costs: Mapping[str, Cost]) -> list[list[str]]:
    rows = []
    for name, cost in costs.items():
        value = "*not measured*" if cost.value is None else capacity.number(cost.value)
        rows.append([WHAT[name], value, cost.unit, cost.source])
    return rows


def _example(name: str, plan: ClusterPlan, costs: Mapping[str, Cost]) -> list[str]:
    found = {need.name: need for need in capacity.needs(plan, costs=costs)}

    def shown(need_name: str) -> str:
        need = found[need_name]
        if need.value is None:
            return "*not measured*"
        return f"{'≥ ' if need.missing else ''}{capacity.number(need.value)}"

    first = capacity.limits_of(plan, _MACHINE, costs)[0]
    cells = [shown(each) for each in ("memory", "CPU at rest", "CPU at work", "disk")]
    return [name, *cells, shown("object store"), f"{first.name} ({first.share:.0%})"]


def _examples_table(costs: Mapping[str, Cost]) -> list[str]:
    header = "plan | memory of a node, MiB | at rest, % of a core | at work, cores"
    header += " | disk of a node, GB | store, $ a month | fullest"
    return table(header, [_example(name, plan, costs) for name, plan in _PLANS.items()])


def tables(rows: capacity_costs.Rows) -> dict[str, list[str]]:
    """Return the lines of each table by the name of its mark."""
    found = capacity_costs.costs(rows)
    costs = {
        name: Cost(None if cost.value is None else capacity_costs.rounded(cost.value), *cost[1:])
        for name, cost in found.items()
    }
    return {
        "costs": table("what | cost | unit | measured as", _costs_rows(costs)),
        "examples": _examples_table(costs),
    }


def page() -> str:
    """Return the page with its tables as the rows say they are."""
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in tables(capacity_costs.read()).items():
        text = replaced(text, name, lines)
    return text
