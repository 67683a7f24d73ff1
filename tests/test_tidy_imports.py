"""Every name that a test, bench or example imports from pk or from tests exists.

mypy checks the package only, and an import inside a function runs only where its test runs.  This
test reads the imports of all files outside the package, and looks each name up in its module.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator

from tests.test_tidy import python_files, text_of


def imported_names(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of each `from pk… import name` of a source text; so for tests."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "pk",
            "tests",
        ):
            for alias in node.names:
                yield node.lineno, str(node.module), alias.name


def exists(module: str, name: str) -> bool:
    """Whether `from module import name` would succeed."""
    try:
        found = importlib.import_module(module)
        if not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def test_imported_names_exist() -> None:
    missing = [
        f"{path}:{line}: {module} has no {name}"
        for path in python_files()
        if path.split("/")[0] in {"tests", "bench", "examples", "notebooks"}
        for line, module, name in imported_names(text_of(path))
        if not exists(module, name)
    ]
    assert not missing, "\n".join(missing)


def test_a_missing_name_is_caught() -> None:
    text = "def f():\n    from pk.errors import NoSuchError, PkError\n"
    assert [name for _, module, name in imported_names(text) if not exists(module, name)] == [
        "NoSuchError"
    ]
