"""`python -m bench growth`: which points are measured, and the store of their rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.growth import command, curves, rows
from bench.growth.partitions import topics_of


def test_points_can_be_measured_in_pieces() -> None:
    curve = curves.BY_NAME["partitions"]
    assert command.chosen(curve, None, 1_000, 3_000) == [
        ("pk", 1_000), ("pk", 3_000), ("kafka", 1_000), ("kafka", 3_000),
    ]  # fmt: skip
    assert command.chosen(curve, "kafka", 3_000, 10**9) == [("kafka", 3_000)]
    with pytest.raises(SystemExit):
        command.main(["--only", "nonsense"])


@pytest.mark.parametrize("curve", curves.CURVES, ids=lambda curve: curve.name)
def test_each_side_of_a_curve_has_its_function(curve: curves.Curve) -> None:
    assert all(callable(curve.measure(side)) for side in curve.sides)


def test_the_store_keeps_the_newest_row_of_a_point(tmp_path: Path) -> None:
    store = tmp_path / "growth.jsonl"
    for n, cost in ((10, 1.0), (2, 3.0), (10, 2.0)):
        rows.add(rows.measured("partitions", "pk", n, lambda cost=cost: {"x_s": cost}), store)
    found = rows.read(store)
    assert rows.points(found, "partitions", "pk", "x_s") == [(2, 3.0), (10, 2.0)]
    assert {"machine", "load", "at"} <= found[0].keys()


def test_partitions_are_spread_over_topics() -> None:
    assert list(topics_of(2_500)) == [
        ("growth-0", 1_000), ("growth-1000", 1_000), ("growth-2000", 500),
    ]  # fmt: skip
