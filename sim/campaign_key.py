"""What a campaign has tested: a digest of the code that its histories run.

Invariants:
  K1  The digest of production covers each production module that the simulator imports, and the
      module that draws a seed's options.  Modules that no history can run, such as the commands
      and the Spark writers, are no part of it.
  K2  Comments, docstrings and layout are no part of a digest: they change no history.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable
from pathlib import Path

OPTIONS = "sim/options.py"
#: Modules of the simulator that neither make nor judge a history.
BESIDE = ("sim/__main__.py", "sim/campaign_key.py", "sim/canaries.py", "sim/long.py")


def code_of(text: str) -> str:
    """Return the syntax tree of a module without docstrings and positions."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                node.body = node.body[1:]
    return ast.dump(tree)


def digest_of(files: Iterable[Path], home: Path) -> str:
    """Return a digest of the names and the code of `files`."""
    found = hashlib.sha256()
    for path in sorted(set(files)):
        found.update(f"{path.relative_to(home)}\0".encode())
        found.update(hashlib.sha256(code_of(path.read_text()).encode()).digest())
    return found.hexdigest()[:16]


def imported(home: Path) -> list[Path]:
    """Return the sources under `home` that this process has imported, without the simulator."""
    simulator = home / "sim"  # a link in a checkout, a real directory in an installed package
    files = [
        Path(getattr(module, "__file__", None) or "/") for module in list(sys.modules.values())
    ]
    return [path for path in files if home in path.parents and simulator not in path.parents]


def tested(home: Path, production: Iterable[Path]) -> str:
    """Return a digest of the production sources and of what draws a seed's options."""
    return digest_of([*production, home / OPTIONS], home)


def simulator(home: Path) -> str:
    """Return a digest of the modules that make and judge histories."""
    beside = [home / name for name in BESIDE]
    return digest_of((path for path in (home / "sim").rglob("*.py") if path not in beside), home)
