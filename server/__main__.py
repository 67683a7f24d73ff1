"""`python -m pk.server ROLE --run DIR/run`: one child of the supervisor."""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from pk.server.node.run_config import RunConfig

ROLES = ("controller", "broker", "tier")


class WithoutPandas(importlib.abc.MetaPathFinder):
    """Hides pandas from pyarrow, which imports it at the first look at a Python list.

    A third of a second and 40 MB in each process, which never sees a data frame.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not used in a server process", name=name)
        return None


def main() -> int:
    """Run one role until it is asked to stop; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m pk.server", description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--run", required=True, help="the run directory that holds config.json")
    given = parser.parse_args()
    sys.meta_path.insert(0, WithoutPandas())
    node = importlib.import_module(f"pk.server.{given.role}.node")
    code: int = node.main(RunConfig.load(given.run))
    return code


if __name__ == "__main__":
    sys.exit(main())
