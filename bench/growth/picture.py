"""docs/growth.svg: a row of small plots for each curve, drawn from docs/growth.jsonl.

Both axes are logarithmic, so a cost for each of many things is a line that rises by one decade in
one decade, and a cost that does not grow is level.  A figure of zero is drawn on the lower edge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from bench.growth.curves import BY_NAME
from bench.growth.rows import STORE, Row

PICTURE = STORE.with_suffix(".svg")
#: A machine of two cores is busy above this load: seconds of the clock say little then.
BUSY = 3.0
COLOURS = {"pk": "#1a6b4a", "kafka": "#b8602a"}
_GREY, _PALE = "#555", "#e4e4e4"
#: A cell of the grid, and the plot in it.
_WIDTH, _HEIGHT, _COLUMNS = 230, 190, 4
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 14, 30, 26
_TITLE, _LEGEND = 30, 46


class Plot(NamedTuple):
    figure: str
    words: str


#: Curve → its figures, at most `_COLUMNS`.
PLOTS: dict[str, tuple[Plot, ...]] = {
    "partitions": (
        Plot("memory_mb", "memory, MiB"),
        Plot("descriptors", "descriptors"),
        Plot("rest_cpu_percent", "at rest, % of a core"),
        Plot("write_cpu_s", "a record to each, CPU s"),
    ),
    "connections": (
        Plot("memory_mb", "memory, MiB"),
        Plot("descriptors", "descriptors"),
        Plot("rest_cpu_percent", "at rest, % of a core"),
        Plot("work_cpu_s", "a record for each, CPU s"),
    ),
    "tables": (
        Plot("memory_mb", "memory, MiB"),
        Plot("rest_calls_per_minute", "at rest, store calls a minute"),
        Plot("rest_cpu_percent", "at rest, % of a core"),
        Plot("copy_cpu_s", "a record into each, CPU s"),
    ),
    "files": (
        Plot("files_mb", "memory of the files, MiB"),
        Plot("commit_cpu_s", "a commit, CPU s"),
        Plot("most_commit_cpu_s", "the largest commit, CPU s"),
    ),
    "topics": (
        Plot("touch_s", "a record to each, s"),
        Plot("touch_client_cpu_s", "of the client, CPU s"),
        Plot("touch_cpu_s", "of the server, CPU s"),
    ),
    "query": (
        Plot("trigger_s", "a trigger, s"),
        Plot("batch_s", "a batch, s"),
        Plot("tasks", "tasks"),
        Plot("batch_client_cpu_s", "a batch, CPU s of Spark"),
    ),
    "failover": (
        Plot("p99_s", "until served again, p99, s"),
        Plot("median_s", "until served again, median, s"),
        Plot("work_cpu_s", "of the other nodes, CPU s"),
    ),
}


class Point(NamedTuple):
    n: int
    value: float
    busy: bool


class Axis(NamedTuple):
    """Decades [low, high] of 10 on the pixels [begin, end]."""

    low: int
    high: int
    begin: float
    end: float

    def at(self, value: float) -> float:
        inside = math.log10(value) if value > 0 else self.low
        part = (min(max(inside, self.low), self.high) - self.low) / (self.high - self.low)
        return self.begin + (self.end - self.begin) * part

    def ticks(self) -> list[int]:
        step = max(1, math.ceil((self.high - self.low) / 4))
        return list(range(self.low, self.high + 1, step))


def axis(values: Sequence[float], begin: float, end: float) -> Axis:
    """Return an axis of whole decades around the positive values; at least one decade."""
    logs = [math.log10(value) for value in values if value > 0] or [0.0]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    return Axis(low, max(high, low + 1), begin, end)


def points(rows: Sequence[Row], curve: str, side: str, figure: str) -> list[Point]:
    """Return the points of a side, by n."""
    found = [
        Point(row["n"], row["figures"][figure], max(row["load"]) > BUSY)
        for row in rows
        if (row["curve"], row["side"]) == (curve, side) and figure in row["figures"]
    ]
    return sorted(found)


def drawn(rows: Sequence[Row]) -> str:
    """Return the picture."""
    height = _LEGEND + len(PLOTS) * (_TITLE + _HEIGHT) + 8
    width = _COLUMNS * _WIDTH + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *_legend(),
    ]
    for number, (name, plots) in enumerate(PLOTS.items()):
        top = _LEGEND + number * (_TITLE + _HEIGHT)
        title = escape(f"{name}: {BY_NAME[name].what}")
        parts.append(
            f'<text x="10" y="{top + 18}" font-size="13" font-weight="bold">{title}</text>'
        )
        for column, plot in enumerate(plots):
            sides = {side: points(rows, name, side, plot.figure) for side in COLOURS}
            parts += _plot(plot.words, sides, 5 + column * _WIDTH, top + _TITLE)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    found, x = [], 10
    for side, colour in COLOURS.items():
        words = "pk" if side == "pk" else "Apache Kafka"
        found.append(f'<circle cx="{x + 4}" cy="18" r="4" fill="{colour}"/>')
        found.append(f'<text x="{x + 13}" y="22">{words}</text>')
        x += 60
    x += 50
    found.append(
        f'<circle cx="{x}" cy="18" r="3.5" fill="#fff" stroke="{_GREY}" stroke-width="1.5"/>'
    )
    words = f"measured with a load above {BUSY:g}, so its seconds of the clock say little; "
    words += "zero is drawn on the lower edge"
    found.append(f'<text x="{x + 9}" y="22">{words}</text>')
    return found


def _plot(words: str, sides: dict[str, list[Point]], left: float, top: float) -> list[str]:
    found = [f'<text x="{left + _LEFT}" y="{top + 14}" fill="{_GREY}">{escape(words)}</text>']
    known = [point for each in sides.values() for point in each]
    right, bottom = left + _WIDTH - _RIGHT, top + _HEIGHT - _BOTTOM
    if not known:
        middle = (left + _LEFT + right) / 2
        found.append(
            f'<text x="{middle}" y="{top + _HEIGHT / 2}" text-anchor="middle" '
            f'fill="#999">not measured</text>'
        )
        return found
    across = axis([point.n for point in known], left + _LEFT, right)
    up = axis([point.value for point in known], bottom, top + _TOP)
    found += _grid(across, up)
    for side, each in sides.items():
        found += _line(each, across, up, COLOURS[side])
    return found


def _grid(across: Axis, up: Axis) -> list[str]:
    found = []
    for tick in across.ticks():
        x = across.at(10.0**tick)
        found.append(_stroke(x, up.begin, x, up.end))
        found.append(_number(10.0**tick, x, up.begin + 14, "middle"))
    for tick in up.ticks():
        y = up.at(10.0**tick)
        found.append(_stroke(across.begin, y, across.end, y))
        found.append(_number(10.0**tick, across.begin - 5, y + 4, "end"))
    return found


def _stroke(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{_PALE}"/>'


def _number(value: float, x: float, y: float, anchor: str) -> str:
    text = f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_GREY}">{text}</text>'


def _line(known: Sequence[Point], across: Axis, up: Axis, colour: str) -> list[str]:
    places = [(across.at(point.n), up.at(point.value)) for point in known]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    found = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    for point, (x, y) in zip(known, places, strict=True):
        fill = "#fff" if point.busy else colour
        found.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{colour}" '
            'stroke-width="1.5"/>'
        )
    return found


def write(rows: Sequence[Row], path: Path = PICTURE) -> None:
    """Draw the rows into a file."""
    path.write_text(drawn(rows), encoding="utf-8")
