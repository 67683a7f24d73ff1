"""`python -m bench growth`: which points are measured, and the store of their rows."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from bench.growth import command, curves, nodes, picture, rows
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


def test_the_picture_is_drawn_from_the_rows() -> None:
    """`python -m bench growth --draw` draws it."""
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.drawn(rows.read())
    assert picture.PLOTS.keys() == curves.BY_NAME.keys()


def test_both_axes_are_logarithmic() -> None:
    made = picture.axis([3, 2_000], 0, 400)
    assert (made.low, made.high) == (0, 4)
    assert [made.at(10.0**tick) for tick in made.ticks()] == [0, 100, 200, 300, 400]
    assert made.at(0) == 0, "zero is on the lower edge"
    assert picture.axis([5.0], 0, 1)[:2] == (0, 1)


def test_a_point_of_a_busy_machine_is_hollow() -> None:
    row = {"curve": "topics", "side": "kafka", "n": 10, "figures": {"touch_s": 2.0}}
    busy, calm = ({**row, "load": [1.0, load]} for load in (9.0, 2.0))
    assert picture.points([busy], "topics", "kafka", "touch_s") == [(10, 2.0, True)]
    hollow, full = picture.drawn([busy]), picture.drawn([calm])
    assert hollow != full
    assert picture.COLOURS["kafka"] in full
    assert full.count("not measured") == sum(map(len, picture.PLOTS.values())) - 1


def test_calls_of_the_store_are_counted_by_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        'pk_tier_store_calls_total{operation="put",role="tier"} 3.0\n'
        'pk_tier_store_calls_total{role="tier",operation="head"} 4.0\n'
        "pk_other_total 9.0\n"
    )
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: io.BytesIO(text.encode()))
    node = nodes.PkNode(tiered=True)
    assert node.store_calls_by_operation() == {"put": 3.0, "head": 4.0}
    assert node.store_calls() == 7.0
