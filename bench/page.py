"""docs/bench.md and docs/bench.svg from the store docs/bench.jsonl."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from bench import report
from bench.report import Figures, Row
from bench.runs import ROOT

STORE = ROOT / "docs" / "bench.jsonl"

_INTRODUCTION = """# pk beside Apache Kafka

`make bench` writes this page (`python -m bench all --write docs/bench.md`).  A case that is run
alone replaces only its own rows.  `bench/__init__.py` explains how the figures are measured.

The newest rows come from a machine with {cores} cores of {cpu}, {memory_gb} GB, Linux {kernel} and
Python {python}.  Rows of other days, which the notes below date, may come from other processors.
Both sides of a row were measured on the same machine, which broker and client share, so only the
ratios are meaningful.  Figures are medians of interleaved rounds.  Costs are client + server.  A
ratio is pk ÷ peer, or peer ÷ pk if a smaller figure is better (ms, s, bytes, MB, %).  So a larger
ratio is better in every row.

![ratios]({plot})
"""
_COLUMNS = ("benchmark", "variant", "pk", "peer", "ratio", "at least", "aim")
_COST_COLUMNS = ("CPU s / M records: pk", "peer", "peak MB: pk", "peer")


def page(lines: Sequence[Figures], plot: str = "bench.svg") -> str:
    """Return the page of the store's lines."""
    newest = max(lines, key=lambda whole: str(whole["at"]))
    words = [_INTRODUCTION.format(plot=plot, **newest["machine"])]
    sides: dict[str, str] = {}
    for whole in lines:
        sides |= whole["sides"]
    words += [*(f"- **{name}**: {text}" for name, text in sides.items()), ""]
    columns = (*_COLUMNS, *_COST_COLUMNS)
    words += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in report.rows(lines):
        figures = row.figures
        cells = [row.name, row.variant, f"{figures['pk']:,} {figures['unit']}"]
        cells += [f"{figures['peer']:,}", f"**{figures['ratio']:.2f}**", report.goal(figures)]
        cells += [report.floor(figures, "aim"), *report.costs_cells(figures)]
        words.append(f"| {' | '.join(cells)} |")
    words += ["", "What each benchmark measures, and the results of every run:", ""]
    for whole in lines:
        words.append(f"- **{whole['name']}**: {whole['what']}. Peer: {whole['against']}.")
        words += [f"  - {_runs_line(row)}" for row in report.rows([whole])]
    return "\n".join(words) + "\n"


def _runs_line(row: Row) -> str:
    figures = row.figures
    words = f"{row.variant} ({figures['unit']}): pk {_runs(figures['pk_runs'])}; "
    words += f"{figures['peer_client']} {_runs(figures['peer_runs'])}"
    for mode, one in figures.get("pk_modes", {}).items():
        words += f"; pk {mode} {_runs(one['pk_runs'])} ({_beside(figures, one['pk'])})"
    for mode, one in figures.get("peer_modes", {}).items():
        words += f"; {mode} {_runs(one['peer_runs'])}"
    for side, more in figures.get("figures", {}).items():
        if more:
            told = ", ".join(f"{name} {number:g}" for name, number in more.items())
            words += f"; {side}: {told}"
    return f"{words}. {figures['at'][:16]}, load {figures['load']}."


def _beside(figures: Figures, pk: float) -> str:
    """Return the ratio of another mode of pk."""
    above, below = (figures["peer"], pk) if figures["less_is_better"] else (pk, figures["peer"])
    return f"ratio {above / below:.2f}" if below else "no ratio"


def _runs(numbers: Sequence[float]) -> str:
    return ", ".join(
        f"{number / 1e6:.2f} M" if number > 1e5 else f"{number:g}" for number in numbers
    )


# -- the plot --------------------------------------------------------------------------------------

_BAR, _GAP, _LEFT, _WIDTH, _TOP = 14, 6, 250, 460, 34
_LEAST, _MOST = 0.25, 32.0


def _x(ratio: float) -> float:
    """Return the position of a ratio on a logarithmic axis."""
    inside = min(max(ratio, _LEAST), _MOST)
    return _LEFT + _WIDTH * math.log(inside / _LEAST) / math.log(_MOST / _LEAST)


def plot(lines: Sequence[Figures]) -> str:
    """Return a bar per row from 1 (as fast as the peer) to its ratio, with a stroke at the goal and
    one at the aim.
    """
    found = [row for row in report.rows(lines) if row.figures["ratio"] > 0]
    height = _TOP + len(found) * (_BAR + _GAP) + 10
    width = _LEFT + _WIDTH + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for tick in (0.25, 0.5, 1, 2, 4, 8, 16, 32):
        at, colour = _x(tick), "#555" if tick == 1 else "#ddd"
        parts.append(
            f'<line x1="{at:.1f}" y1="{_TOP - 6}" x2="{at:.1f}" y2="{height - 6}" '
            f'stroke="{colour}"/><text x="{at:.1f}" y="{_TOP - 12}" text-anchor="middle" '
            f'fill="#555">{tick:g}×</text>'
        )
    for number, row in enumerate(found):
        parts += _bar(row, _TOP + number * (_BAR + _GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _colour(figures: Figures) -> str:
    """Return grey without a goal, else green or red."""
    if report.goal(figures) == "–":
        return "#8a8a8a"
    return "#2a7d4f" if report.reached(figures) else "#b8402a"


def _bar(row: Row, top: int) -> list[str]:
    figures, base = row.figures, top + _BAR - 3
    ratio = figures["ratio"]
    left, right = sorted((_x(1), _x(ratio)))
    floor = figures["at_least"]
    colour = _colour(figures)
    parts = [
        f'<text x="{_LEFT - 8}" y="{base}" text-anchor="end">'
        f"{escape(row.name)} · {escape(row.variant)}</text>",
        f'<rect x="{left:.1f}" y="{top}" width="{max(right - left, 1):.1f}" height="{_BAR}" '
        f'fill="{colour}"/>',
        f'<text x="{max(right, _x(floor or 1)) + 5:.1f}" y="{base}">{ratio:.2f}</text>',
    ]
    for name, dash in (("at_least", ""), ("aim", ' stroke-dasharray="2 2"')):
        if figures[name]:
            at = _x(figures[name])
            parts.append(
                f'<line x1="{at:.1f}" y1="{top - 2}" x2="{at:.1f}" y2="{top + _BAR + 2}" '
                f'stroke="#000" stroke-width="1.5"{dash}/>'
            )
    return parts


def write(path: Path, lines: Sequence[Figures]) -> None:
    """Merge `lines` into the store beside `path`, and write the page and the plot again."""
    store = path.with_suffix(".jsonl")
    whole = report.merged(report.stored(store), lines)
    store.write_text("".join(json.dumps(each) + "\n" for each in whole))
    path.with_suffix(".svg").write_text(plot(whole))
    path.write_text(page(whole, path.with_suffix(".svg").name))
    if store.resolve() == STORE:
        make_pages()


def make_pages() -> None:
    """Make what is made from the rows of docs/: the costs of `pk doctor capacity`, and its page."""
    program = [sys.executable, str(ROOT / "docs" / "generate.py")]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
