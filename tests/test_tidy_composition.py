"""No part of a broker knows the module that composes it.

`server/broker/core.py` composes the parts of a broker, and the process (`server/broker/node.py`)
composes its handlers and streams.  A part that could reach them would find every other part through
them, and its constructor would no longer say what it needs.
"""

from __future__ import annotations

import ast

import pytest

from pk.server.replica.context import Environment
from tests.test_tidy import file_imports, module_of, parsed, python_files, report, text_of

#: A composing module → the modules of server/ that may import it.
COMPOSERS = {
    "pk.server.broker.core": {"pk.server.broker.node"},
    "pk.server.broker.node": {"pk.server.__main__"},
    "pk.server.controller.node": {"pk.server.__main__"},
    "pk.server.tier.node": {"pk.server.__main__"},
}
#: The classes of these modules: no part takes one of them.
COMPOSED = {"BrokerCore", "BrokerNode", "BrokerStreams", "ControllerNode", "TierNode"}
#: Names under which a composition would be passed or kept.
LOCATORS = {"core", "broker_core", "services", "locator"}
#: What each part may get through `Environment`: facts and facilities of the process, no parts.
FACILITIES = {
    "World", "NodeId", "Mapping[str, Any]", "BrokerMetrics", "OnBug", "Callable[..., None]",
}  # fmt: skip


def composed_imports(module: str, text: str) -> list[str]:
    """Imports of a composing module by a module of server/ that is none of its users."""
    if not module.startswith("pk.server."):
        return []
    return [
        f"{line}: imports {name}, which composes it"
        for line, name in file_imports(text, COMPOSERS)
        if name != module and module not in COMPOSERS[name]
    ]


def names_in(annotation: ast.expr | None) -> set[str]:
    """The names in an annotation, also in a quoted one."""
    found: set[str] = set()
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= names_in(ast.parse(node.value, mode="eval").body)
    return found


def locators(module: str, text: str) -> list[str]:
    """Parameters and attributes of a part that hold the composition of its broker."""
    if not module.startswith("pk.server.") or module in COMPOSERS:
        return []
    found = []
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            for each in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                if each.arg in LOCATORS or names_in(each.annotation) & COMPOSED:
                    found.append(f"{each.lineno}: {node.name} takes the composition ({each.arg})")
        elif isinstance(node, ast.Attribute) and node.attr.lstrip("_") in LOCATORS:
            found.append(f"{node.lineno}: reaches through {node.attr}")
    return found


def test_no_part_imports_what_composes_it() -> None:
    report({path: composed_imports(module_of(path), text_of(path)) for path in python_files()})


def test_no_part_takes_the_composition() -> None:
    report({path: locators(module_of(path), text_of(path)) for path in python_files()})


def test_the_environment_holds_no_part() -> None:
    assert set(map(str, Environment.__annotations__.values())) <= FACILITIES


@pytest.mark.parametrize("module", ["pk.server.handlers.fetch", "pk.server.broker.scheduler"])
@pytest.mark.parametrize(
    "text",
    [
        "from pk.server.broker.core import BrokerCore",
        "if TYPE_CHECKING:\n    from pk.server.broker import core",
        "def f():\n    import pk.server.broker.node",
    ],
)
def test_an_import_of_the_composition_is_caught(module: str, text: str) -> None:
    assert len(composed_imports(module, text)) == 1
    assert not composed_imports("pk.sim.samples", text)


@pytest.mark.parametrize(
    "text",
    [
        "class A:\n    def __init__(self, core: Any) -> None: ...",
        "class A:\n    def __init__(self, broker: 'BrokerCore') -> None: ...",
        "async def f(of: core.BrokerCore | None) -> None: ...",
        "def f(self): return self._core.partitions",
    ],
)
def test_a_part_that_takes_the_composition_is_caught(text: str) -> None:
    assert locators("pk.server.handlers.fetch", text)
    assert not locators("pk.server.broker.node", text)
