"""docs/GLOSSARY.md names modules that exist, and names that they define."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_CODE = re.compile(r"`([^`]+)`")


def defined(text: str) -> set[str]:
    """The names that a module defines at its top level."""
    found: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def stale(page: str) -> list[str]:
    """The rows of the glossary that name a module, or a name in it, that is not there.

    A row of the first table has pk's words in column 1 and the modules in column 3; a row of the
    second has the words in column 2 and the modules in column 3.
    """
    found = []
    for row in (line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")):
        if row[0].strip() in ("word", "Kafka"):
            continue
        words = _CODE.findall(row[0] if len(row) == 4 else row[1])
        modules = _CODE.findall(row[2])
        names: set[str] = set()
        for module in modules:
            files = [ROOT / f"{module}.py", ROOT / module / "__init__.py"]
            if path := next((each for each in files if each.exists()), None):
                names |= defined(path.read_text(encoding="utf-8")) | {Path(module).name}
            else:
                found.append(f"{module}: no such module")
        if not modules:
            found.append(f"{row[0].strip()}: no module")
        found += [
            f"{word}: not in {', '.join(modules)}"
            for word in words
            if word.isidentifier() and word not in names
        ]
    return found


def test_the_glossary_names_what_exists() -> None:
    assert not stale((ROOT / "docs" / "GLOSSARY.md").read_text(encoding="utf-8"))


def test_a_stale_glossary_is_caught() -> None:
    row = "| `Sender` | numbers batches | `client/sender` | Kafka: `Sender` |"
    assert not stale(row)
    assert stale(row.replace("`Sender` | n", "`Turnstile` | n"))
    assert stale(row.replace("client/sender", "client/turnstile"))
    kafka = "| `Admin` | `AdminClient` | `client/admin` |"
    assert not stale(kafka)
    assert stale(kafka.replace("AdminClient", "Administrator"))
