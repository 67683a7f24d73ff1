"""What a planned cluster needs, and what limits it first: the formulas of `pk doctor capacity`.

Pure.  A need is a sum of terms: what a node needs that has nothing, and what each partition,
connection, table and GB adds to it.  Each term is a number of things times a cost of
`pk.capacity_costs`, which was measured.  docs/capacity.md explains the terms to people who plan.

A plan is spread evenly over its nodes: its partitions, its load, and the tables' owners.  A table
has an owner on each node that leads one of its partitions, and each owner looks at the table.

Invariants
  F1  A cost that was not measured adds nothing, and its name is in `Need.missing`: the value is a
      lower bound then.  A need without any measured term has no value.
  F2  A plan that passed `checked` gives finite numbers, none of them negative.
  F3  Prices are assumptions of the caller.  They are in no other formula than dollars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from pk import descriptors, errors, limits
from pk.capacity_costs import COSTS, Cost
from pk.settings import SERVER, TOPIC

MONTH_DAYS = 30
MONTH_S = MONTH_DAYS * 86_400
MB, GB = 10**6, 10**9
#: The least time between two commits of an owner to its table (tiering/owner).
COMMIT_S = 1.0
#: List prices of Amazon S3 Standard in us-east-1, of 2025: https://aws.amazon.com/s3/pricing/.
#: Requests in dollars per 1,000; storage for the first 50 TB.  Traffic within a region is free.
PUT_USD, GET_USD, GB_MONTH_USD = 0.005, 0.0004, 0.023
#: More than this is a typing mistake.
PARTITIONS_MOST, NODES_MOST, MB_PER_S_MOST, DAYS_MOST = 10_000_000, 10_000, 1e6, 36_500.0


def _default(name: str) -> int:
    scope = TOPIC if name in TOPIC.by_name else SERVER
    return int(scope.by_name[name].default)


@dataclass(slots=True, frozen=True)
class ClusterPlan:
    """What a cluster is to hold and to carry.

    mb_per_s: what producers send, as it arrives (compressed, if they compress); readers: how many
    times each byte is read; connections: of one node; retention_days: of all data; local_days: of
    what stays on the nodes' disks; the last three are settings of topics and servers.
    """

    partitions: int = 1
    topics: int = 1
    mb_per_s: float = 0.0
    readers: float = 1.0
    connections: int = 0
    nodes: int = 1
    replication: int = 1
    tiered: bool = True
    retention_days: float = 7.0
    local_days: float = 7.0
    tier_max_lag_ms: int = _default("tier_max_lag_ms")
    tier_file_bytes: int = _default("tier_file_bytes")
    tier_refresh_max_ms: int = _default("tier_refresh_max_ms")

    @property
    def replicas(self) -> int:
        """Return the replicas of a node."""
        return math.ceil(self.partitions * self.replication / self.nodes)

    @property
    def led(self) -> int:
        """Return the partitions that a node leads."""
        return math.ceil(self.partitions / self.nodes)

    @property
    def tables(self) -> int:
        """Return the tables that a node owns a part of."""
        return min(self.topics, self.led) if self.tiered else 0

    @property
    def gb_per_s(self) -> float:
        return self.mb_per_s * MB / GB

    @property
    def gb_per_day(self) -> float:
        return self.gb_per_s * 86_400


#: Field of a plan → its least and largest value.
BOUNDS: Mapping[str, tuple[float, float]] = {
    "partitions": (1, PARTITIONS_MOST),
    "topics": (1, PARTITIONS_MOST),
    "mb_per_s": (0, MB_PER_S_MOST),
    "readers": (0, 10_000),
    "connections": (0, 10_000_000),
    "nodes": (1, NODES_MOST),
    "replication": (1, 100),
    "retention_days": (0, DAYS_MOST),
    "local_days": (0, DAYS_MOST),
    "tier_max_lag_ms": (0, 86_400_000),
    "tier_file_bytes": (1_024, 1 << 40),
    "tier_refresh_max_ms": (5_000, 86_400_000),
}


@dataclass(slots=True, frozen=True)
class Prices:
    """Dollars for 1,000 requests that write or list, for 1,000 that read, and for a GB-month."""

    put: float = PUT_USD
    get: float = GET_USD
    gb_month: float = GB_MONTH_USD


@dataclass(slots=True, frozen=True)
class NodeMachine:
    """A node's machine: bytes, cores, its hard limit of open files, and what pk allows on it."""

    memory_bytes: int
    cores: int
    descriptors: int
    partitions_max: int
    connections_max: int


@dataclass(slots=True, frozen=True)
class Need:
    """One line of the answer.  of: node, or cluster.  words: the formula with its numbers."""

    name: str
    of: str
    value: float | None
    unit: str
    words: str
    missing: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class Limit:
    """How much of a resource of a machine the plan takes.

    share: 1 = all of it; hard: a node refuses more, or does not keep up; advice: what moves it.
    """

    name: str
    share: float
    hard: bool
    words: str
    advice: str


def checked(plan: ClusterPlan, prices: Prices = Prices()) -> ClusterPlan:
    """Return the plan.  Raises `InvalidOption` for one that no cluster can have (F2)."""
    for name, (least, most) in BOUNDS.items():
        _within(name, getattr(plan, name), least, most)
    for field in fields(prices):
        _within(f"{field.name}_usd", getattr(prices, field.name), 0, 1_000)
    if plan.topics > plan.partitions:
        raise _refusal(
            "topics", f"{plan.topics:,} topics need at least as many partitions: --partitions is "
            f"the number of all topics together, and it is {plan.partitions:,}",
        )  # fmt: skip
    if plan.partitions > plan.topics * limits.PARTITIONS_PER_TOPIC_MAX:
        raise _refusal(
            "topics", f"a topic has at most {limits.PARTITIONS_PER_TOPIC_MAX:,} partitions: "
            f"{plan.partitions:,} need more than {plan.topics:,} topics",
        )  # fmt: skip
    if plan.replication > plan.nodes:
        raise _refusal("replication", f"{plan.replication} replicas need as many --nodes")
    if plan.local_days > plan.retention_days:
        raise _refusal("local_days", "--local-days may not exceed --retention-days")
    return plan


def _within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # NaN is not within
        raise _refusal(
            name, f"{_option(name)} must be from {number(least)} to {number(most)}, not {value}"
        )


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _refusal(name: str, words: str) -> errors.InvalidOption:
    return errors.InvalidOption(words, option=_option(name))


# -- sums ------------------------------------------------------------------------------------------

#: How many, of what, and the name of its cost.
Term = tuple[float, str, str]


def summed(
    name: str,
    of: str,
    unit: str,
    terms: Sequence[Term],
    costs: Mapping[str, Cost],
    scale: float = 1,
) -> Need:
    """Return the need that is the sum of these terms (F1); scale: of the costs to the unit."""
    value, words, missing = 0.0, [], []
    measured = False
    for count, what, cost_name in terms:
        cost = costs[cost_name].value
        if cost is None:
            words.append(f"{_count(count, what)} × not measured")
            if count:
                missing.append(cost_name)
            continue
        measured = True
        value += count * cost * scale
        words.append(f"{_count(count, what)} × {number(cost * scale)}")
    found = value if measured else None
    return Need(name, of, found, unit, " + ".join(words), tuple(missing))


def _count(count: float, what: str) -> str:
    return f"{number(count)} {what}"


def number(value: float) -> str:
    """Return a number for people: three significant digits, or whole with commas."""
    if value == int(value) or abs(value) >= 1_000:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return f"{value:.10f}".rstrip("0") if "e" in text and abs(value) >= 1e-9 else text


def memory(plan: ClusterPlan, costs: Mapping[str, Cost] = COSTS) -> Need:
    """Return the memory of a node whose clients are slow: buffers of a load are not in it."""
    terms: list[Term] = [
        (1, "node", "node_memory"),
        (plan.replicas, "replicas", "partition_memory"),
        (plan.partitions, "partitions in the metadata", "metadata_memory"),
        (plan.connections, "connections", "connection_memory"),
    ]
    if plan.tiered:
        terms += [(1, "tier process", "tier_memory"), (plan.tables, "tables", "table_memory")]
    return summed("memory", "node", "MiB", terms, costs)


def rest_cpu(plan: ClusterPlan, costs: Mapping[str, Cost] = COSTS) -> Need:
    """Return the CPU of a node while nothing happens."""
    terms: list[Term] = [
        (1, "node", "node_rest_cpu"),
        (plan.replicas, "replicas", "partition_rest_cpu"),
        (plan.connections, "connections", "connection_rest_cpu"),
    ]
    if plan.tiered:
        terms += [(1, "tier process", "tier_rest_cpu"), (plan.tables, "tables", "table_rest_cpu")]
    return summed("CPU at rest", "node", "% of a core", terms, costs)


def work_cpu(plan: ClusterPlan, costs: Mapping[str, Cost] = COSTS) -> Need:
    """Return the cores of a node that its share of the load takes."""
    share = plan.mb_per_s / plan.nodes
    terms: list[Term] = [
        (share, "MB/s produced", "produce_cpu"),
        (share * plan.readers, "MB/s read", "read_cpu"),
    ]
    if plan.replication > 1:
        copied = share * (plan.replication - 1)
        terms.append((copied, "MB/s copied to followers", "copy_cpu"))
    if plan.tiered:
        terms.append((share, "MB/s into tables", "tier_cpu"))
    return summed("CPU at work", "node", "cores", terms, costs, MB / GB)


def open_files(plan: ClusterPlan, costs: Mapping[str, Cost] = COSTS) -> Need:
    """Return the descriptors that a broker would use if its limit allows."""
    terms: list[Term] = [
        (1, "node", "node_descriptors"),
        (plan.replicas, "replicas", "partition_descriptors"),
        (plan.connections, "connections", "connection_descriptors"),
    ]
    return summed("open files", "node", "descriptors", terms, costs)


def disk(plan: ClusterPlan) -> Need:
    """Return what the logs of a node take, without the segment that each partition writes to."""
    days = plan.local_days if plan.tiered else plan.retention_days
    value = plan.gb_per_day * plan.replication * days / plan.nodes
    words = f"{number(plan.gb_per_day)} GB a day × {plan.replication} replicas × {days:g} days"
    return Need("disk", "node", value, "GB", f"{words} ÷ {plan.nodes} nodes")


def table_storage(plan: ClusterPlan, costs: Mapping[str, Cost] = COSTS) -> Need:
    """Return the GB of all tables, without versions that VACUUM has not removed yet."""
    kept = plan.gb_per_day * plan.retention_days
    term = (kept, "GB", "table_bytes")
    return summed("tables", "cluster", "GB", [term], costs)


# -- calls and dollars -----------------------------------------------------------------------------


def files_a_month(plan: ClusterPlan) -> float:
    """Return how many files the tables get: one of a partition each `tier_max_lag_ms`, or each
    `tier_file_bytes` if that is sooner.
    """
    rate = plan.mb_per_s * MB / plan.partitions
    if rate == 0:
        return 0.0
    wait_s = max(COMMIT_S, plan.tier_max_lag_ms / 1000)
    return plan.partitions * MONTH_S / min(wait_s, plan.tier_file_bytes / rate)


def commits_a_month(plan: ClusterPlan) -> float:
    """Return how many versions the tables get, at most: one for each file, and for each table one
    a second (tiering/commit_pacing).
    """
    return min(files_a_month(plan), plan.topics * MONTH_S / COMMIT_S)


def looks_a_month(plan: ClusterPlan) -> float:
    """Return how often the owners look at their tables while nothing happens."""
    return plan.tables * plan.nodes * MONTH_S * 1000 / plan.tier_refresh_max_ms


def calls(plan: ClusterPlan, costs: Mapping[str, Cost] = COSTS) -> dict[str, Need]:
    """Return calls of the store in a month: at rest, those that write, and those that read."""
    files, commits = files_a_month(plan), commits_a_month(plan)
    parts: dict[str, list[Term]] = {
        "calls at rest": [
            (looks_a_month(plan), "looks", "look_heads"),
            (plan.nodes * MONTH_S / 60, "minutes of all nodes", "tier_calls"),
        ],
        "calls that write": [
            (files, "files at most", "file_puts"),
            (commits, "commits at most", "commit_puts"),
        ],
        "calls that read": [
            (files, "files at most", "file_heads"),
            (commits, "commits at most", "commit_heads"),
        ],
    }
    return {name: summed(name, "cluster", "a month", terms, costs) for name, terms in parts.items()}


def dollars(
    plan: ClusterPlan, prices: Prices = Prices(), costs: Mapping[str, Cost] = COSTS
) -> Need:
    """Return what the store costs in a month at these prices (F3)."""
    made, stored = calls(plan, costs), table_storage(plan, costs)
    parts = (
        ("at rest", made["calls at rest"], prices.get / 1000),
        ("writes", made["calls that write"], prices.put / 1000),
        ("reads", made["calls that read"], prices.get / 1000),
        ("storage", stored, prices.gb_month),
    )
    value = sum((need.value or 0.0) * price for _, need, price in parts)
    words = " + ".join(f"{name} {(need.value or 0.0) * price:,.2f}" for name, need, price in parts)
    missing = tuple(name for _, need, _ in parts for name in need.missing)
    return Need("object store", "cluster", value, "$ a month", words, missing)


def needs(
    plan: ClusterPlan, prices: Prices = Prices(), costs: Mapping[str, Cost] = COSTS
) -> list[Need]:
    """Return all needs of a plan, those of a node first."""
    found = [each(plan, costs) for each in (memory, rest_cpu, work_cpu, open_files)]
    found.append(disk(plan))
    if plan.tiered:
        found.append(table_storage(plan, costs))
        found += calls(plan, costs).values()
        found.append(dollars(plan, prices, costs))
    return found


# -- limits ----------------------------------------------------------------------------------------


def limits_of(
    plan: ClusterPlan, machine: NodeMachine, costs: Mapping[str, Cost] = COSTS
) -> list[Limit]:
    """Return what the plan takes of a machine, the fullest resource first.

    A resource without any measured cost is not among them (F1).
    """
    files = int(machine.descriptors * descriptors.FILES_SHARE)
    found = [
        Limit(
            "replicas", plan.replicas / machine.partitions_max, True,
            f"{plan.replicas:,} of {machine.partitions_max:,} (partitions_max)",
            "more memory, more nodes, or the server setting partitions_max",
        ),
        Limit(
            "connections", plan.connections / machine.connections_max, True,
            f"{plan.connections:,} of {machine.connections_max:,}",
            "a higher ulimit -Hn (up to 140,000), the server setting inbound_bytes_max, more nodes",
        ),
        Limit(
            "open files", plan.replicas / max(1, files), False,
            f"{plan.replicas:,} replicas, of which {files:,} may keep their file open; files of "
            "others are opened at each use",
            "a higher ulimit -Hn (LimitNOFILE of systemd)",
        ),
    ]  # fmt: skip
    needed = memory(plan, costs)
    if needed.value is not None:
        share = needed.value * limits.MIB / machine.memory_bytes
        words = f"{needed.value:,.0f} of {machine.memory_bytes / limits.MIB:,.0f} MiB"
        advice = "more memory, or more nodes; fewer partitions or connections for each"
        found.append(Limit("memory", share, True, words, advice))
    rest, work = rest_cpu(plan, costs), work_cpu(plan, costs)
    if rest.value is not None or work.value is not None:
        cores = (rest.value or 0.0) / 100 + (work.value or 0.0)
        words = f"{cores:.2f} of {machine.cores} cores"
        advice = "more cores or nodes; larger batches (linger_ms); tier_refresh_max_ms at rest"
        found.append(Limit("cores", cores / machine.cores, True, words, advice))
    return sorted(found, key=lambda each: -each.share)
