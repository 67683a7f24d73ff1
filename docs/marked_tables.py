"""Tables within pages that are written by hand: each stands between a mark with its name and the
mark `end`.
"""

from __future__ import annotations

from collections.abc import Sequence

_END = "<!-- end -->"


def table(header: str, rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; `header` has its columns, divided by `|`."""
    columns = header.count("|") + 1
    return [f"| {header} |", "|---" * columns + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def replaced(text: str, name: str, lines: Sequence[str]) -> str:
    """Return a page with `lines` after its mark `name`.  Raises `ValueError` without the mark."""
    mark = f"<!-- {name} -->\n"
    before, found, rest = text.partition(mark)
    if not found:
        raise ValueError(f"the page has no mark {name}")
    return before + mark + "\n" + "\n".join(lines) + "\n\n" + rest[rest.index(_END) :]
