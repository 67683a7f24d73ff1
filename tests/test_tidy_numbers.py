"""Numbers that mean one thing: rules of the protocol, checks of the simulator, local invariants.

A rule's number begins with the letter of its section (`L4`).  The checks of the simulator are V1 to
V27.  A module numbers its own invariants with other letters, in its docstring (`  F2  text`), and
cites them as `F2`; any other file names the module: `replica/fetcher F2`.

As in tests/test_tidy.py, a rule is a pure function of a source text and has a canary.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import PurePosixPath

import pytest

from tests.test_tidy import parsed, prose_of, python_files, report, sources, text_of

ID = r"[A-Z]\d{1,2}"
#: Letters of the sections of docs/PROTOCOL.md, and of the simulator's checks.
SECTIONS = set("LRQTCXGSP")
CHECKS = "V"
#: What looks like a number of an invariant and is none.
WORDS = {"S3"}

DEFINED = re.compile(rf"^ +({ID}) {{1,4}}(?=\S)|^ *\| ({ID}) +\|", re.MULTILINE)
NEXT = r"(?:\s*[,–]|\s+and|\s+to)\s+|–"
MODULE = r"[a-z_]+/[a-z_]+|bench|world|effects"
QUALIFIED = re.compile(rf"\b({MODULE})\s+(?:#:?\s+)?({ID}(?:(?:{NEXT})(?:#:?\s+)?{ID})*)\b")
BARE = re.compile(rf"(?<![\w/.-]){ID}(?![\w-])")
#: Texts of which a docstring may consist without saying anything.
CODES = re.compile(rf"\b(?:{ID}|{MODULE}|KIP-\d+|[Rr]ules?|[Ii]nvariants?|and|to|of)\b|[\W_]")
THIS = "tests/test_tidy_numbers.py"


def short(path: str) -> str:
    """`server/replica/fetcher.py` → `replica/fetcher`, as other files cite it."""
    parts = PurePosixPath(path.removeprefix("src/pk/")).with_suffix("").parts
    return "/".join((parts[:-1] if parts[-1] == "__init__" else parts)[-2:])


def defined(text: str) -> set[str]:
    """The numbers that a module's docstring gives to its own invariants."""
    found = DEFINED.findall(ast.get_docstring(parsed(text), clean=False) or "")
    return {row or line for line, row in found}


def numbers_taken(path: str, text: str) -> list[str]:
    """Local invariants with a letter of the protocol, or of the simulator's checks."""
    taken = SECTIONS | (set() if path.startswith("sim/") else {CHECKS})
    return [
        f"1: defines {number}; {number[0]} is a letter of docs/PROTOCOL.md or of the simulator"
        for number in sorted(defined(text))
        if number[0] in taken
    ]


def citations(text: str) -> Iterator[tuple[int, str, str]]:
    """(offset, module, number) of each citation; module = '' where none is named."""
    named = {}
    for match in QUALIFIED.finditer(text):
        for each in re.finditer(ID, match.group(2)):
            if each.group()[0] not in SECTIONS:
                named[match.start(2) + each.start()] = match.group(1)
    for match in BARE.finditer(text):
        yield match.start(), named.get(match.start(), ""), match.group()


def unnamed(path: str, text: str, local: Mapping[str, set[str]]) -> list[str]:
    """Citations of local invariants of which the reader cannot tell the module."""
    own = local.get(short(path), set())
    free = SECTIONS | ({CHECKS} if path.startswith(("sim/", "tests/", "docs/")) else set())
    found = []
    for line, words in prose_of(text) if path.endswith(".py") else [(1, text)]:
        for at, module, number in citations(words):
            where = f"{line + words.count(chr(10), 0, at)}"
            if module and number not in local.get(module, set()):
                found.append(f"{where}: cites {module} {number}, which {module} does not define")
            elif not module and number[0] not in free and number not in own | WORDS:
                found.append(f"{where}: cites {number}; name the module that defines it")
    return found


def code_only(text: str) -> list[str]:
    """Docstrings that are only the number of a rule."""
    found = []
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            words = ast.get_docstring(node) or ""
            if re.search(ID, words) and not CODES.sub("", words):
                found.append(f"{getattr(node, 'lineno', 1)}: {words!r} does not say what it does")
    return found


@cache
def local_numbers() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in python_files():
        if path != THIS and (numbers := defined(text_of(path))):
            assert short(path) not in found, f"two modules are cited as {short(path)}"
            found[short(path)] = numbers
    return found


def test_local_invariants_leave_the_numbers_of_the_protocol_alone() -> None:
    headings = re.findall(r"^## ([A-Z])\. ", text_of("docs/PROTOCOL.md"), re.MULTILINE)
    assert set(headings) == SECTIONS
    assert len(local_numbers()) > 100
    report({p: numbers_taken(p, text_of(p)) for p in python_files() if p != THIS})


def test_a_check_of_the_simulator_has_one_number() -> None:
    checks = [n for numbers in local_numbers().values() for n in numbers if n[0] == CHECKS]
    assert len(checks) == len(set(checks)), sorted(checks)


def test_a_local_invariant_is_cited_with_its_module() -> None:
    pages = [p for p in sources() if p.startswith("docs/") and p.endswith(".md")]
    pages.remove("docs/STYLE.md")  # shows how to cite
    read = [p for p in [*python_files(), *pages] if not p.startswith("tests/test_tidy")]
    report({p: unnamed(p, text_of(p), local_numbers()) for p in read})


def test_no_docstring_is_only_a_number() -> None:
    report({p: code_only(text_of(p)) for p in python_files()})


@pytest.mark.parametrize("row", ["  R4  text", "  V2  text", "  L1 text", "  | T3 | text"])
def test_a_number_taken_twice_is_caught(row: str) -> None:
    assert len(numbers_taken("log/x.py", f'"""Theory.\n\n{row}\n"""')) == 1
    assert not numbers_taken("log/x.py", '"""Theory.\n\n  F4  text\n"""')


LOCAL = {"log/x": {"F1", "F2"}, "log/y": {"D1"}}


@pytest.mark.parametrize(
    "words",
    ["# D1", "# (F3)", '"""Text (D1)."""', "# log/y D2", "# log/y D1, F1", '"""log/y\n  D7."""'],
)
def test_a_citation_without_its_module_is_caught(words: str) -> None:
    assert len(unnamed("log/x.py", words, LOCAL)) == 1 or "F1" in words


@pytest.mark.parametrize(
    "words",
    ["# F1, F2", "# log/y D1", '"""(rule L4; log/y D1)."""', "x = 'D7'", "# L4"],
)
def test_a_citation_with_its_module_passes(words: str) -> None:
    assert unnamed("log/x.py", words, LOCAL) == []


@pytest.mark.parametrize("words", ["Rule L11.", "R4, log/y D1", "F2.", "Rules L4 and L5 (KIP-98)."])
def test_a_docstring_that_is_only_a_number_is_caught(words: str) -> None:
    assert len(code_only(f'def f():\n    """{words}"""')) == 1
    assert code_only(f'def f():\n    """Return the end ({words})"""') == []
