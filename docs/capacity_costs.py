"""The costs of `pk doctor capacity`, fitted to the rows of docs/growth.jsonl and docs/bench.jsonl.

`docs/generate.py` writes them to src/pk/capacity_costs.py.

Rules
  A1  A cost comes from measured rows, or from calls that a test counts.  Without its rows it is
      None, and `pk doctor capacity` says that it was not measured.
  A2  A cost for each of many things is the slope between the smallest and the largest point of its
      curve, up to a largest n.  A curve with one point has no slope.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent

Row = dict[str, Any]
#: From this n on, a node of the curve runs with few descriptors, which is another regime.
_PARTITIONS_MOST = 10_000
_SPARSE = 10  #: a slope needs at least so many times more at its end than at its begin
#: Records of 100 bytes in a GB, in millions.
_MILLIONS_PER_GB = 10


class Found(NamedTuple):
    """A cost.  value: None = not measured; source: rows and figures it comes from."""

    value: float | None
    unit: str
    source: str


class Rows(NamedTuple):
    """growth: rows of docs/growth.jsonl; bench: rows of docs/bench.jsonl by case."""

    growth: list[Row]
    bench: Mapping[str, Row]


def read(folder: Path = HERE) -> Rows:
    growth, bench = (_lines(folder / name) for name in ("growth.jsonl", "bench.jsonl"))
    return Rows(growth, {row["name"]: row for row in bench})


def _lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def points(rows: Iterable[Row], curve: str, figure: str) -> dict[int, float]:
    """Return the figure of pk by n."""
    return {
        row["n"]: row["figures"][figure]
        for row in sorted(rows, key=lambda row: int(row["n"]))
        if (row["curve"], row["side"]) == (curve, "pk") and figure in row["figures"]
    }


def at_one(rows: Rows, unit: str, curve: str, figure: str) -> Found:
    """Return the figure of the point n = 1."""
    found = points(rows.growth, curve, figure).get(1)
    return Found(found, unit, f"curve {curve}, {figure} at n = 1")


def slope(rows: Rows, unit: str, curve: str, figure: str, most: int = 10**9) -> Found:
    """Return what one more costs: the slope between the ends of the curve (A2)."""
    known = {n: cost for n, cost in points(rows.growth, curve, figure).items() if n <= most}
    low, high = (min(known), max(known)) if known else (0, 0)
    if high < _SPARSE * low or not known:
        return Found(None, unit, f"curve {curve}, {figure}")
    source = f"curve {curve}, {figure} from n = {low:,} to {high:,}"
    return Found(max(0.0, (known[high] - known[low]) / (high - low)), unit, source)


def per_gb(rows: Rows, *cases: str) -> Found:
    """Return the server's CPU seconds per GB, in records of 100 bytes."""
    costs = [_server(rows, case) for case in cases]
    value = None if None in costs else _MILLIONS_PER_GB * (costs[0] or 0.0)
    return Found(value, "CPU s/GB", f"docs/bench.md, {cases[0]}, CPU of the server")


def _server(rows: Rows, case: str) -> float | None:
    row = rows.bench.get(case)
    return None if row is None else float(row["cpu_s_per_m_records"]["pk"]["server"])


def per_copy(rows: Rows) -> Found:
    """Return what each further replica costs the servers together, in CPU seconds per GB."""
    one, three = _server(rows, "produce_record"), _server(rows, "produce_replicated_record")
    value = None if one is None or three is None else _MILLIONS_PER_GB * (three - one) / 2
    return Found(value, "CPU s/GB", "docs/bench.md, produce_replicated_record − produce_record")


def table_bytes(rows: Rows) -> Found:
    """Return the bytes of a table for each byte of the log with the same records."""
    table, log = rows.bench.get("stored_bytes_tier"), rows.bench.get("stored_bytes")
    value = None if table is None or log is None else table["pk"] / log["pk"]
    return Found(value, "bytes", "docs/bench.md, stored_bytes_tier ÷ stored_bytes, zstd")


def less(whole: Found, part: Found, words: str) -> Found:
    """Return a cost without a part of it that has a cost of its own; None if it is no larger."""
    if whole.value is None or part.value is None:
        return whole._replace(value=None)
    source = f"{whole.source}, {words}" if words else whole.source
    left = whole.value - part.value
    if left < 0:
        return Found(None, whole.unit, f"{source}: not above it")
    return Found(left, whole.unit, source)


def counted(value: float, source: str) -> Found:
    return Found(value, "calls", f"docs/design/0020-store-calls.md: {source}")


def costs(rows: Rows) -> dict[str, Found]:
    """Return all costs by name."""
    partition = {
        name: slope(rows, unit, "partitions", figure, _PARTITIONS_MOST)
        for name, unit, figure in (
            ("memory", "MiB", "broker_mb"),
            ("metadata", "MiB", "controller_mb"),
            ("rest_cpu", "% of a core", "rest_cpu_percent"),
            ("descriptors", "files", "broker_descriptors"),
        )
    }
    minus = "less a partition"
    memory = slope(rows, "MiB", "tables", "memory_mb")
    for name in ("memory", "metadata"):
        memory = less(memory, partition[name], minus if name == "memory" else "")
    rest_cpu = slope(rows, "% of a core", "tables", "rest_cpu_percent")
    rest_calls = slope(rows, "calls a minute", "tables", "rest_calls_per_minute")
    node_calls = at_one(rows, "calls a minute", "tables", "rest_calls_per_minute")
    return {
        "node_memory": at_one(rows, "MiB", "partitions", "memory_mb"),
        "node_rest_cpu": at_one(rows, "% of a core", "partitions", "rest_cpu_percent"),
        "node_descriptors": at_one(rows, "files", "partitions", "broker_descriptors"),
        "tier_memory": at_one(rows, "MiB", "tables", "tier_mb"),
        "tier_rest_cpu": at_one(rows, "% of a core", "tables", "tier_rest_cpu_percent"),
        "partition_memory": partition["memory"],
        "metadata_memory": partition["metadata"],
        "partition_rest_cpu": partition["rest_cpu"],
        "partition_descriptors": partition["descriptors"],
        "connection_memory": slope(rows, "MiB", "connections", "memory_mb"),
        "connection_rest_cpu": slope(rows, "% of a core", "connections", "rest_cpu_percent"),
        "connection_descriptors": slope(rows, "files", "connections", "broker_descriptors"),
        "table_memory": memory,
        "table_rest_cpu": less(rest_cpu, partition["rest_cpu"], minus),
        "produce_cpu": per_gb(rows, "produce_record"),
        "copy_cpu": per_copy(rows),
        "read_cpu": per_gb(rows, "consume_record"),
        "tier_cpu": at_one(rows, "CPU s/GB", "tables", "bulk_cpu_s_per_gb"),
        "table_bytes": table_bytes(rows),
        "tier_calls": less(node_calls, rest_calls, "less a table"),
        "look_heads": counted(2.0, "HEADs of a look"),
        "file_puts": counted(1.0, "PUTs of a file"),
        "file_heads": counted(1.0, "HEADs of a file before local data is dropped"),
        "commit_puts": counted(1.4, "PUTs of a commit, with 1/5 checkpoint"),
        "commit_heads": counted(1.2, "HEADs and GETs of a commit, with 1/5 checkpoint"),
    }


def rounded(value: float) -> float:
    """Round to three significant digits."""
    return float(f"{value:.3g}")


_HEAD = '''"""What one of each thing costs, as measured: the constants of `pk.capacity`.

Made by `make docs` from docs/growth.jsonl and docs/bench.jsonl; docs/capacity_costs.py has the
rules.  A value of None was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Cost(NamedTuple):
    """value: None = not measured; source: the rows that it comes from."""

    value: float | None
    unit: str
    source: str


COSTS: Mapping[str, Cost] = {
'''


def module(rows: Rows | None = None) -> str:
    """Return the text of src/pk/capacity_costs.py."""
    found = costs(read() if rows is None else rows)
    parts: list[str] = [_HEAD]
    for name, cost in found.items():
        value = None if cost.value is None else rounded(cost.value)
        unit, source = (json.dumps(text, ensure_ascii=False) for text in cost[1:])
        parts.append(f'    "{name}": Cost(\n        {value},\n        {unit},\n')
        parts.append(f"        {source},\n    ),\n")
    return "".join([*parts, "}\n"])
