"""Plain English in docstrings, comments and pages (docs/STYLE.md, Prose).

The constructions below are the most common ones that docs/STYLE.md forbids.

As in tests/test_tidy.py, a rule is a pure function of a source text and has a canary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.test_tidy import prose_of, python_files, sources, text_of

#: A sentence names the process, the class, the file or the record instead.
FORBIDDEN = [
    "whoever", "whomever", "nobody", "somebody", "everybody", "anew", "that one", "the one that",
    "what is gone", "(?:is|are|was|were|be|been) told", "tells? of", "hears? of", "comes? to be",
]  # fmt: skip
CONSTRUCTION = re.compile(rf"\b(?:{'|'.join(FORBIDDEN)})\b", re.IGNORECASE)
#: Pages that name the forbidden constructions, or record the past.
EXCEPT = {"docs/STYLE.md", "docs/sim-long.md", "CHANGELOG.md", "tests/test_tidy_prose.py"}
INDENTED = re.compile(r"\s+(?:#:? ?)?")


def constructions(path: str, text: str) -> Iterator[str]:
    """Each forbidden construction, with the line at which its docstring or comment begins."""
    for line, words in prose_of(text) if path.endswith(".py") else enumerate(text.splitlines(), 1):
        for match in CONSTRUCTION.finditer(INDENTED.sub(" ", words)):
            yield f"{line}: says {match.group()!r}"


def read() -> list[str]:
    pages = [path for path in sources() if path.endswith(".md")]
    return [path for path in [*python_files(), *pages] if path not in EXCEPT]


def test_prose_is_plain() -> None:
    found = [f"{path}:{each}" for path in read() for each in constructions(path, text_of(path))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "words",
    [
        "# whoever asks waits", '"""Nobody is\n    told."""', "x = 1  #: begun anew",
        '"""A replica comes to be."""', "# as that one says",
    ],
)  # fmt: skip
def test_a_forbidden_construction_is_caught(words: str) -> None:
    assert list(constructions("log/x.py", words))
    assert list(constructions("docs/x.md", words.replace("\n    ", " ")))


def test_plain_words_pass() -> None:
    words = '"""The leader tells its followers; one fetch waits, which renewed the session."""'
    assert not list(constructions("log/x.py", words + "\nnobody = 1"))
