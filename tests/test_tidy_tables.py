"""Tables and columns in docstrings and pages are whole: no reflow has wrapped them into prose.

Two signs are reliable.  A gap of three spaces or more within a line is the gap of a column: another
line of its paragraph has a gap, or begins, at the same place.  And the rows of a table in Markdown
begin and end with `|` and have as many cells as its head.

As in tests/test_tidy.py, a rule is a pure function of a source text and has a canary.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import pytest

from tests.test_tidy import parsed, python_files, report, sources, text_of

#: Before a comment or an arrow any gap will do.
COLUMN = re.compile(r"(?<=\S) {3,}(?=[^\s#]|#\S)(?!->)")
GAP = re.compile(r"(?<=\S) {2,}(?=\S)")
PROMPT = re.compile(r"\s*(>>>|\.\.\.)(\s|$)")
RULER = re.compile(r"\|(?:\s*:?-+:?\s*\|)+")

Paragraph = Sequence[tuple[int, str]]


def paragraphs(first: int, text: str) -> Iterator[Paragraph]:
    """Runs of lines between blank ones, each with its number."""
    found: list[tuple[int, str]] = []
    for number, line in enumerate([*text.splitlines(), ""], first):
        if line.strip():
            found.append((number, line))
        elif found:
            yield found
            found = []


def docstrings(text: str) -> Iterator[Paragraph]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = ast.get_docstring(node, clean=False)
            if words is not None:
                yield from paragraphs(node.body[0].lineno, words)


def broken_columns(paragraph: Paragraph) -> list[str]:
    """Lines with the gap of a column that no other line of the paragraph has."""
    found = []
    for number, line in paragraph if len(paragraph) > 1 else ():
        if PROMPT.match(line):
            continue  # the indent of code is no column
        mine = {match.end() for match in COLUMN.finditer(line)}
        others = [other for at, other in paragraph if at != number]
        places = {match.end() for other in others for match in GAP.finditer(other)}
        places |= {len(other) - len(other.lstrip()) for other in others}
        if mine and not mine & places:
            found.append(f"{number}: a column that no other line has: {line.strip()!r}")
    return found


def broken_rows(paragraph: Paragraph) -> list[str]:
    """Rows of a Markdown table that are wrapped, or joined."""
    lines = [(number, line.strip()) for number, line in paragraph]
    rulers = [at for at, (_, line) in enumerate(lines) if RULER.fullmatch(line)]
    if not rulers:
        return []
    cells = len(re.findall(r"(?<!\\)\|", lines[rulers[0]][1]))
    return [
        f"{number}: no row of its table: {line!r}"
        for number, line in lines[max(0, rulers[0] - 1) :]
        if not (line[0] == line[-1] == "|" and len(re.findall(r"(?<!\\)\|", line)) == cells)
    ]


def broken(path: str, text: str) -> list[str]:
    if not path.endswith(".py"):
        return [what for each in paragraphs(1, text) for what in broken_rows(each)]
    return [what for each in docstrings(text) for what in broken_columns(each) + broken_rows(each)]


def test_tables_are_whole() -> None:
    pages = [path for path in sources() if path.endswith(".md")]
    report({path: broken(path, text_of(path)) for path in [*python_files(), *pages]})


#: A table as it was written, and the text after a reflow.
WHOLE = '''"""One segment.

    00.log        batches
    00.index      offset → position
    00.timeindex  time → offset
"""
'''
REFLOWED = '''"""One segment.

    00.log        batches 00.index
    offset → position 00.timeindex  time → offset
"""
'''


EXAMPLE = '''"""Reads.

    >>> async with consumer:
    ...     await consumer.subscribe("events")
    ...     async for record in consumer:
    ...         await handle(record)
"""
'''


def test_columns_that_were_wrapped_are_caught() -> None:
    assert not broken("x.py", WHOLE)
    assert not broken("x.py", EXAMPLE)
    assert len(broken("x.py", REFLOWED)) == 1


@pytest.mark.parametrize("row", ["| 3 |", "| 3 | 4 | | 5 | 6 |", "| 3 | a long", "4 |"])
def test_rows_that_were_wrapped_are_caught(row: str) -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert not broken("page.md", table + "| 3 | 4 \\| 5 |\n\ntext | more")
    assert len(broken("page.md", f"{table}{row}\n")) == 1
    assert len(broken("x.py", f'"""Theory.\n\n{table}{row}\n"""')) == 1
