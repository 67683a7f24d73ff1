"""The pages of docs/ that are made from the tables the code runs on: see `PAGES`.

`make docs` writes them; `--check` only compares (a test does), and exits 1 if a page is stale.
"""

from __future__ import annotations

import difflib
import json
import sys
import textwrap
from pathlib import Path

import capacity_costs
import capacity_page
import readme_figures

from pk import errors, settings, units
from pk.client import options as client_options
from pk.server.replica import state as replica_state
from pk.server.replica.state import ReplicaState

HERE = Path(__file__).resolve().parent
NOTE = "<!-- Made by `make docs` from {source}; edit that. -->"

SCOPES = {
    settings.TOPIC: (
        "Topics",
        "options of `pk topics create --config NAME=VALUE` and `pk topics alter`. The same names "
        "in the server's configuration set the cluster's defaults.",
    ),
    settings.SERVER: (
        "Server",
        "keys of the TOML file of `pk server start --config FILE`, or as `PK_<NAME>` in the "
        "environment, which takes precedence.",
    ),
    settings.PRODUCER: ("Producer", "keyword arguments of `pk.Producer`."),
    settings.CONSUMER: ("Consumer", "keyword arguments of `pk.Consumer`."),
}
KINDS = {int: "int", float: "float", bool: "bool", str: "text"}
FOREVER = 2**63 - 1


def value_text(value: object) -> str:
    """A default as a person writes it."""
    if value == "":
        return "*(empty)*"
    if isinstance(value, bool):
        return str(value).lower()
    if value == FOREVER:
        return "2^63 − 1"
    return f"{value:,}" if isinstance(value, int) else str(value)


def bounds_text(option: settings.Option) -> str:
    if option.choices:
        return " · ".join(option.choices)
    low = "" if option.least is None else f"≥ {value_text(option.least)}"
    high = "" if option.most is None else f"≤ {value_text(option.most)}"
    return ", ".join(bound for bound in (low, high) if bound)


def settings_page() -> str:
    lines = [
        "# Settings",
        "",
        NOTE.format(source="`src/pk/settings.py`"),
        "",
        "Kafka's dotted names (`retention.ms`) are accepted everywhere. An unknown name is",
        "refused, and the error suggests the nearest valid name. Contradictory settings are",
        "refused, and the error names the violated relation. Times in ms and sizes in bytes may",
        "have a unit: `retention_ms=7d`, `1h30m`, `segment_bytes=64MiB`, `1GB`.",
    ]
    for scope, (title, where) in SCOPES.items():
        lines += ["", f"## {title}", "", f"Given as {where}", ""]
        lines += ["| name | default | unit | allowed | meaning |", "|---|---|---|---|---|"]
        for option in scope.by_name.values():
            lines.append(
                f"| `{option.name}` | {value_text(option.default)} "
                f"| {option.unit or KINDS[option.kind]} | {bounds_text(option)} | {option.doc} |"
            )
        if scope.relations:
            lines += ["", "Relations: " + "; ".join(words for words, _ in scope.relations) + "."]
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    lines = [
        "# Errors",
        "",
        NOTE.format(source="`src/pk/errors.py`"),
        "",
        "Every error is a class of `pk.errors`. Replies carry its code. If Kafka has the error,",
        "the code is Kafka's number; pk's own codes begin at 1000. If an error is *retriable*, the",
        "same request may succeed later, and pk's clients retry it within their timeouts. The",
        "command line prints an error as one line, or with `--json` as an object, and exits",
        'with 1: `{"error": {code, name, message, acts, retriable, details}}`. `pk consume --json`',
        "prints the line, on stderr: its stdout holds records.",
        "",
        "| name | code | who acts | retriable | meaning |",
        "|---|---|---|---|---|",
    ]
    for code, kind in sorted(errors.BY_CODE.items()):
        meaning = " ".join((kind.__doc__ or "").split("\n\n")[0].split()).replace("|", "\\|")
        again = "yes" if kind.retriable else ""
        lines.append(f"| `{kind.__name__}` | {code} | {kind.acts} | {again} | {meaning} |")
    return "\n".join(lines) + "\n"


def replica_states_page() -> str:
    """The states of a local replica, their events, and the edges between them."""
    edges: dict[tuple[ReplicaState, ReplicaState], list[str]] = {}
    for (before, event), after in replica_state.TRANSITIONS.items():
        edges.setdefault((before, after), []).append(event.value)
    lines = [
        "# States of a local replica",
        "",
        NOTE.format(source="`server/replica/state.py`"),
        "",
        "This page lists the states of a broker's replica of a partition, and the events that",
        "change the state. Every part of the broker uses this state. An event without an edge",
        "here raises `IllegalTransition`.",
        "",
        "A replica begins as *absent*.",
        "",
        "| from | to | at the event |",
        "|---|---|---|",
    ]
    for (before, after), events in edges.items():
        lines.append(f"| {before.value} | {after.value} | {', '.join(events)} |")
    lines += ["", "| state | meaning | log | cause |", "|---|---|---|---|"]
    for state in ReplicaState:
        log = "open" if state in replica_state.OPEN else ""
        cause = "yes" if state in replica_state.WITH_CAUSE else ""
        lines.append(f"| {state.value} | {replica_state.MEANINGS[state]} | {log} | {cause} |")
    lines += ["", "| event | from | what happens, and why only in these states |", "|---|---|---|"]
    for event, reason in replica_state.REASONS.items():
        sources = [b.value for (b, what) in replica_state.TRANSITIONS if what is event]
        lines.append(f"| {event.value} | {', '.join(sources)} | {reason} |")
    return "\n".join(lines) + "\n"


#: Other names of options, with the option that they stand for (client/options).
_ALIASES = dict(client_options.ALIASES)
_TYPES = {int: "int", float: "float", bool: "bool", str: "str"}


def _type_text(option: settings.Option) -> str:
    """The type of an option as a caller of a client may give it."""
    if option.choices:
        return f"Literal[{', '.join(json.dumps(each) for each in option.choices)}]"
    kind = _TYPES[option.kind]
    return f"{kind} | str" if option.unit in units.EXAMPLES else kind


def _option_lines(scope: settings.Options, name: str, doc: str) -> list[str]:
    """One TypedDict with the options of a client."""
    lines = [f"class {name}(TypedDict, total=False):", f'    """{doc}"""', ""]
    for option in scope.by_name.values():
        unit = " (ms)" if option.unit == "ms" else ""
        lines += textwrap.wrap(
            f"{option.doc}{unit}", 93, initial_indent="    #: ", subsequent_indent="    #: "
        )
        lines.append(f"    {option.name}: {_type_text(option)}")
        lines += [
            f"    {alias}: {_type_text(option)}  #: {option.name}, under Kafka's name"
            for alias, original in _ALIASES.items()
            if original == option.name
        ]
    return lines


def option_types() -> str:
    """The module of the options' types, for type checkers and editors."""
    lines = [
        '"""The types of the options of `Producer` and `Consumer`, for type checkers and editors.',
        "",
        "Made by `make docs` from `src/pk/settings.py`; edit that.  Times in ms and sizes in bytes",
        "may have a unit, as text: `90s`, `64MiB` (pk.units).  Kafka's dotted names are accepted",
        "at run time, in a dict of Any.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import Literal, TypedDict",
        "",
        "",
        *_option_lines(settings.PRODUCER, "ProducerOptions", "Keyword arguments of `Producer`."),
        "    bootstrap_servers: str  #: the argument `bootstrap`, under Kafka's name",
        "",
        "",
        *_option_lines(settings.CONSUMER, "ConsumerOptions", "Keyword arguments of `Consumer`."),
        "    bootstrap_servers: str  #: the argument `bootstrap`, under Kafka's name",
    ]
    return "\n".join(lines) + "\n"


PAGES = {
    "../README.md": readme_figures.page,
    "../src/pk/capacity_costs.py": capacity_costs.module,
    "capacity.md": capacity_page.page,
    "../client/option_types.py": option_types,
    "settings.md": settings_page,
    "errors.md": errors_page,
    "replica-states.md": replica_states_page,
}


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` say how they differ from what they should be."""
    stale = 0
    for name, page in PAGES.items():
        path, text = HERE / name, page()
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
            print(f"docs/{name}")
            continue
        found = path.read_text(encoding="utf-8") if path.exists() else ""
        if found != text:
            stale = 1
            diff = difflib.unified_diff(
                found.splitlines(),
                text.splitlines(),
                f"docs/{name}",
                "the code says",
                lineterm="",
                n=0,
            )
            print("\n".join(diff))
            print(f"docs/{name} is stale: run `make docs`")
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
