"""What one of each thing costs, as measured: the constants of `pk.capacity`.

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
    "node_memory": Cost(
        192.0,
        "MiB",
        "curve partitions, memory_mb at n = 1",
    ),
    "node_rest_cpu": Cost(
        1.85,
        "% of a core",
        "curve partitions, rest_cpu_percent at n = 1",
    ),
    "node_descriptors": Cost(
        27.0,
        "files",
        "curve partitions, broker_descriptors at n = 1",
    ),
    "tier_memory": Cost(
        193.0,
        "MiB",
        "curve tables, tier_mb at n = 1",
    ),
    "tier_rest_cpu": Cost(
        0.54,
        "% of a core",
        "curve tables, tier_rest_cpu_percent at n = 1",
    ),
    "partition_memory": Cost(
        0.0122,
        "MiB",
        "curve partitions, broker_mb from n = 1 to 10,000",
    ),
    "metadata_memory": Cost(
        0.000431,
        "MiB",
        "curve partitions, controller_mb from n = 1 to 10,000",
    ),
    "partition_rest_cpu": Cost(
        0.00011,
        "% of a core",
        "curve partitions, rest_cpu_percent from n = 1 to 10,000",
    ),
    "partition_descriptors": Cost(
        1.0,
        "files",
        "curve partitions, broker_descriptors from n = 1 to 10,000",
    ),
    "connection_memory": Cost(
        0.033,
        "MiB",
        "curve connections, memory_mb from n = 1 to 1,000",
    ),
    "connection_rest_cpu": Cost(
        0.0011,
        "% of a core",
        "curve connections, rest_cpu_percent from n = 1 to 1,000",
    ),
    "connection_descriptors": Cost(
        1.02,
        "files",
        "curve connections, broker_descriptors from n = 1 to 1,000",
    ),
    "table_memory": Cost(
        0.0131,
        "MiB",
        "curve tables, memory_mb from n = 1 to 2,000, less a partition",
    ),
    "table_rest_cpu": Cost(
        0.000335,
        "% of a core",
        "curve tables, rest_cpu_percent from n = 1 to 2,000, less a partition",
    ),
    "produce_cpu": Cost(
        1.53,
        "CPU s/GB",
        "docs/bench.md, produce_record, CPU of the server",
    ),
    "copy_cpu": Cost(
        2.82,
        "CPU s/GB",
        "docs/bench.md, produce_replicated_record − produce_record",
    ),
    "read_cpu": Cost(
        1.13,
        "CPU s/GB",
        "docs/bench.md, consume_record, CPU of the server",
    ),
    "tier_cpu": Cost(
        11.1,
        "CPU s/GB",
        "curve tables, bulk_cpu_s_per_gb at n = 1",
    ),
    "table_bytes": Cost(
        0.952,
        "bytes",
        "docs/bench.md, stored_bytes_tier ÷ stored_bytes, zstd",
    ),
    "tier_calls": Cost(
        2.0,
        "calls a minute",
        "curve tables, rest_calls_per_minute at n = 1, less a table",
    ),
    "look_heads": Cost(
        2.0,
        "calls",
        "docs/design/0020-store-calls.md: HEADs of a look",
    ),
    "file_puts": Cost(
        1.0,
        "calls",
        "docs/design/0020-store-calls.md: PUTs of a file",
    ),
    "file_heads": Cost(
        1.0,
        "calls",
        "docs/design/0020-store-calls.md: HEADs of a file before local data is dropped",
    ),
    "commit_puts": Cost(
        1.4,
        "calls",
        "docs/design/0020-store-calls.md: PUTs of a commit, with 1/5 checkpoint",
    ),
    "commit_heads": Cost(
        1.2,
        "calls",
        "docs/design/0020-store-calls.md: HEADs and GETs of a commit, with 1/5 checkpoint",
    ),
}
