"""A public class name of the package belongs to one class: one word, one meaning.

As in tests/test_tidy.py, the rule is a pure function of source texts and has a canary.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from tests.test_tidy import module_of, python_files, text_of

#: Names of several classes that mean the same: an interface and its implementation, and the event
#: that a timer fired.
SHARED = frozenset({"SnapshotGenerator", "Wake"})


def class_names(text: str) -> list[str]:
    """The public classes that a source text defines at its top level."""
    nodes = ast.parse(text).body
    return [n.name for n in nodes if isinstance(n, ast.ClassDef) and not n.name.startswith("_")]


def defined_twice(texts: Mapping[str, str]) -> list[str]:
    """A line for each name that two files define."""
    places: dict[str, list[str]] = {}
    for path, text in texts.items():
        for name in class_names(text):
            places.setdefault(name, []).append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in places.items() if len(paths) > 1]


def test_a_class_name_has_one_meaning() -> None:
    texts = {p: text_of(p) for p in python_files() if module_of(p).split(".")[0] == "pk"}
    found = defined_twice(texts)
    assert {line.split(":")[0] for line in found} == SHARED, "\n".join(found)


def test_a_name_of_two_classes_is_caught() -> None:
    texts = {"a": "class Row: ...\nclass _Piece: ...", "b": "class _Piece: ...\nclass Row: ..."}
    assert defined_twice(texts) == ["Row: a, b"]
