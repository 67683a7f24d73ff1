"""Tables of one node with a tier: made, filled in bulk, written to twice, and at rest.

Each topic has one partition, so a table's figures include those of its partition.  The tier is a
directory.  Its calls are those of an object store; their CPU is less (docs/design/0020).

At rest, an owner looks at its table after 5 s, then each time after twice as long, up to 5 min.
The figures at rest are those of `_REST_S` after `_SETTLE_S`, when all have come to 5 min.  Small
files are not merged meanwhile: a merge is work, and makes an owner look again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from bench import processes, values
from bench.growth import clients
from bench.growth.nodes import PATIENCE_S, PkNode, Spent, at_rest, roles_of
from bench.growth.rows import Figures, told
from bench.sides import SideFailed

_SETTINGS = {"tier_max_lag_ms": 1_000, "tier_merge_interval_ms": 86_400_000}
_SETTLE_S, _REST_S = 330.0, 300.0
#: Records of 100 bytes that go into one table: 100 MB.
BULK_RECORDS, BULK_ROWS = 1_000_000, 10_000


def pk(tables: int, folder: Path) -> Figures:
    """Measure one pk node with so many tables."""
    node = PkNode(tiered=True, settings=_SETTINGS)
    node.start(folder)
    try:
        names = [f"table-{number}" for number in range(tables)]
        spent = Spent(node)
        for name in names:
            node.create_topic(name, 1)
        found = told(spent.figures("create"))
        found |= told(_written(node, names, "first_copy"))
        found |= told(_bulk(node, names[0]))
        found |= told(_written(node, names, "copy"))
        return found | _rest(node)
    finally:
        node.stop()


def _written(node: PkNode, names: Sequence[str], part: str) -> Figures:
    """Write one record to each table, and wait until all are in their tables."""
    before, spent = node.store_calls_by_operation(), Spent(node)
    clients.write(node, [(name, 1) for name in names])
    _await_tiered(node, names)
    found = spent.figures(part)
    after = node.store_calls_by_operation()
    calls = {each: count - before.get(each, 0.0) for each, count in after.items()}
    found |= {f"{part}_{each}_calls": int(count) for each, count in calls.items() if count}
    return found | {f"{part}_calls": int(sum(calls.values()))}


def _await_tiered(node: PkNode, names: Sequence[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while behind := node.untiered(names):
        if time.monotonic() > deadline:
            raise SideFailed(f"{behind} of {len(names)} tables are behind their logs")
        time.sleep(0.5)


def _bulk(node: PkNode, name: str) -> Figures:
    """Produce 100 MB to one table; return the CPU of the tier process for a GB."""
    from pk import Producer

    known = values.make()
    rows = [known[at : at + BULK_ROWS] for at in range(0, len(known), BULK_ROWS)]
    batches = [
        pa.RecordBatch.from_arrays([pa.array(each, pa.binary())], ["value"]) for each in rows
    ]
    tier = [roles_of(node)["tier"]]
    before, begin = processes.cpu_s(tier), time.monotonic()
    with Producer(node.address, acks="all") as producer:
        for number in range(BULK_RECORDS // BULK_ROWS):
            producer.send_batch(name, batches[number % len(batches)])
        producer.flush(timeout_s=PATIENCE_S)
    _await_tiered(node, [name])
    gb = BULK_RECORDS * values.VALUE_BYTES / 1e9
    return {
        "bulk_s": time.monotonic() - begin,
        "bulk_cpu_s_per_gb": (processes.cpu_s(tier) - before) / gb,
    }


def _rest(node: PkNode) -> Figures:
    """Return the figures at rest, and the calls of the store in a minute."""
    time.sleep(_SETTLE_S)
    before, begin = node.store_calls(), time.monotonic()
    found = at_rest(node, _REST_S, settle_s=0.0)
    minutes = (time.monotonic() - begin) / 60
    return found | {"rest_calls_per_minute": (node.store_calls() - before) / minutes}
