"""Pages of the documentation site that are made from the code: commands and metrics.

They are made when the site is built (docs/site_hook.py), so they are never stale.  The commands are
those of the typer applications.  The metrics are found in the source text: each call of `counter`,
`gauge` and `histogram` with a constant name, each constant `Family`, and the tables of those whose
names are in a table.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

from pk.cli import completion
from pk.cli.app import available
from pk.server.broker.partition_metrics import PartitionMetrics
from pk.sparkconnector import lag_listener
from pk.tiering.topic_tier import Counts

ROOT = Path(__file__).resolve().parent.parent
#: Packages whose processes export metrics.
SOURCES = ("server", "client", "tiering", "log", "compaction", "src/pk")
KINDS = ("counter", "gauge", "histogram")
#: Shown once, not for each command.
COMMON = {"--bootstrap", "--timeout-ms", "--json"}


def escaped(text: str) -> str:
    """Return text in which `<` is no HTML; code in backticks is as it was."""
    parts = text.split("`")
    return "`".join(p if n % 2 else p.replace("<", "&lt;") for n, p in enumerate(parts))


def cell(text: object) -> str:
    """Return text for a cell of a table."""
    return escaped(" ".join(str(text).split())).replace("|", "\\|")


def commands_page() -> str:
    """Return the page of all commands, in the order of `pk --help`."""
    found = available()
    root: Any = typer.main.get_command(completion.root(found))
    lines = [
        "# Commands",
        "",
        "Made from the command line itself. `pk COMMAND --help` prints the same. Most commands",
        "that talk to a cluster also take `--bootstrap HOST:PORT` (or `PK_BOOTSTRAP`, or a",
        "profile), `--timeout-ms`, and `--json` for scripts.",
    ]
    for name, purpose in found.items():
        lines += ["", f"## pk {name}", "", f"{purpose[0].upper()}{purpose[1:]}."]
        for words, command in _leaves(name, root.commands[name]):
            if words != name:
                lines += ["", f"### pk {words}"]
            lines += ["", *_described(words, command)]
    return "\n".join(lines) + "\n"


def _leaves(words: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Yield the commands of a group, or the command itself."""
    if not hasattr(command, "commands"):
        yield words, command
    for name, each in getattr(command, "commands", {}).items():
        yield from _leaves(f"{words} {name}", each)


def _described(words: str, command: Any) -> list[str]:
    shown = [each for each in command.params if not getattr(each, "hidden", False)]
    arguments = [each for each in shown if each.param_type_name == "argument"]
    options = [each for each in shown if each.param_type_name == "option"]
    usage = " ".join([f"pk {words}", *(_name(each) for each in arguments), "[OPTIONS]"])
    text, examples = _split(inspect.getdoc(command.callback) or "")
    lines = [f"`{usage}`", "", escaped(text)]
    if examples:
        lines += ["", "```bash", *examples, "```"]
    rows = [
        f"| `{' / '.join([*each.opts, *each.secondary_opts])}` | {_default(each)} "
        f"| {cell(each.help or '')} |"
        for each in options
        if not COMMON & set(each.opts)
    ]
    if rows:
        lines += ["", "| option | default | meaning |", "|---|---|---|", *rows]
    return lines


def _name(argument: Any) -> str:
    name = argument.metavar or str(argument.name).upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _default(option: Any) -> str:
    if isinstance(option.show_default, str):
        return f"`{option.show_default}`"
    if option.required:
        return "required"
    value = option.default
    if value is None or value is False or callable(value) or value in ((), []):
        return ""
    return f"`{'true' if value is True else value}`"


def _split(doc: str) -> tuple[str, list[str]]:
    """Return the text of a docstring, and the command lines of its examples."""
    text: list[str] = []
    examples: list[str] = []
    for line in doc.splitlines():
        begun = line.removeprefix("Examples:").removeprefix("Example:")
        if begun != line or (examples and line.startswith(" ")):
            examples.append(begun.strip())
        else:
            text.append(line)
    return "\n".join(text).strip(), examples


class Metric(NamedTuple):
    """A row of the page of metrics."""

    name: str
    kind: str
    labels: str
    doc: str


def metrics_in(text: str) -> Iterator[Metric]:
    """Yield the metrics that a module's source text makes by constant names."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        given = [_constant(each) for each in node.args[:3]]
        if name == "stages" and len(given) == 3 and all(isinstance(g, str) for g in given[:2]):
            yield _metric("histogram", f"pk_{given[0]}", ("stage",), str(given[1]))
        if name in KINDS and len(given) >= 2 and all(isinstance(each, str) for each in given[:2]):
            labels = given[2] if len(given) > 2 and isinstance(given[2], tuple) else ()
            yield _metric(name, f"pk_{given[0]}", labels, str(given[1]))


def _metric(kind: str, name: str, labels: Any, doc: str) -> Metric:
    full = f"{name.removesuffix('_total')}_total" if kind == "counter" else name
    return Metric(full, kind, ", ".join(f"`{each}`" for each in labels), doc)


def _constant(node: ast.expr) -> object:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def metrics() -> list[Metric]:
    """Return all metrics of a node, and those of `LagListener`, by name."""
    found = [
        each
        for folder in SOURCES
        for path in sorted((ROOT / folder).glob("**/*.py"))
        if not path.name.endswith("_pb2.py")
        for each in metrics_in(path.read_text(encoding="utf-8"))
    ]
    for each in Counts.__slots__:
        found.append(_metric("gauge", f"pk_tier_{each}", (), f"{each.replace('_', ' ')} so far"))
    for family in PartitionMetrics({}, 0).families():
        found.append(_metric(family.kind, family.name, family.labels, family.doc))
    for made in lag_listener.families():
        found.append(_metric(made.type, made.name, made._labelnames, made.documentation))
    return sorted({each.name: each for each in found}.values())


def metrics_page() -> str:
    """Return the page of all metrics."""
    lines = [
        "# Metrics",
        "",
        "Made from the source text. `pk server start --metrics HOST:PORT` serves them; a broker",
        "adds those of the node's other processes with the label `role`. A histogram has the",
        "series `_bucket`, `_sum` and `_count`. The metrics `pk_spark_…` are those of",
        "`LagListener` in a driver ([Spark in operation](spark.md)).",
        "",
        "| metric | kind | labels | what |",
        "|---|---|---|---|",
    ]
    lines += [f"| `{m.name}` | {m.kind} | {m.labels} | {cell(m.doc)} |" for m in metrics()]
    return "\n".join(lines) + "\n"
