"""The start of a role's process: which modules it loads, and its `main`.

python -m pk.server ROLE --run DIR/run      __main__: one process, from nothing
node/fork_server                            loads the modules once, and forks each process
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from pk.server.node.run_config import RunConfig

ROLES = ("controller", "broker", "tier")
#: What a role loads only once it serves.  deltalake is not here: its allocator reads its settings
#: when it is loaded, and only the tier process makes these settings (tiering/resources Z2).
LATER = {
    "controller": ("pk.server.node.metrics_endpoint", "pk.wire.socket_network", "pk.log.files"),
    "broker": (
        "pk.server.node.metrics_endpoint",
        "pk.wire.socket_network",
        "pk.log.files",
        "pk.server.broker.cleaner_child",
        "pk.server.broker.partition_metrics",
    ),
    "tier": ("pk.server.node.metrics_endpoint", "pk.wire.socket_network"),
}


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


def hide_pandas() -> None:
    """Hide pandas from this process.  A second call has no effect."""
    if not any(isinstance(finder, WithoutPandas) for finder in sys.meta_path):
        sys.meta_path.insert(0, WithoutPandas())


def load(roles: Iterable[str]) -> None:
    """Load the modules of roles, without starting anything."""
    hide_pandas()
    for role in roles:
        for name in (_node(role), *LATER[role]):
            importlib.import_module(name)


def run(role: str, run_dir: str) -> int:
    """Run one role until it is asked to stop; return its exit code.  Raises `InvalidConfig`."""
    hide_pandas()
    config = RunConfig.load(run_dir)
    code: int = importlib.import_module(_node(role)).main(config)
    return code


def _node(role: str) -> str:
    return f"pk.server.{role}.node"
