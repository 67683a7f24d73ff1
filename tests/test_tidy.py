"""The house rules as tests: layers, core purity, bounds, citations, prose (docs/STYLE.md).

Every rule is a pure function of a source text, and has a canary: a text that must be caught.  A
module is a pure core (•) unless it is listed below as ◇ or as ◦.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LINE_COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600

#: Folder of the package → its layer; imports go to a smaller number, or stay in the folder.
LAYERS = {
    "kernel": 0, "log": 1, "tiering": 2, "compaction": 2, "client": 3, "server": 4,
    "sparkconnector": 4, "compaction.jobs": 5, "compaction.schedule": 5, "cli": 6, "sim": 7,
}  # fmt: skip

#: Folder of server/ → its layer, as above.  `*/node.py` compose a process: they are the top.
SERVER_LAYERS = {
    "runtime": 0,
    "raft": 1,
    "metadata": 2,
    "node": 3,
    "controller": 4,
    "replica": 5,
    "tier": 6,
    "transactions": 6,
    "groups": 6,
    "broker": 7,
    "handlers": 8,
    "process": 9,
}
PROCESSES = {f"pk.server.{n}" for n in ("__main__", "broker.node", "controller.node", "tier.node")}
#: ◇ async over an injected world: the simulator runs the same file.  A name covers those below it.
WORLD_GENERIC = {
    "pk.machine_timers",
    "pk.tasks",
    "pk.wire.calls",
    "pk.log.checkpointing",
    "pk.log.manager",
    "pk.client.admin.described",
    "pk.client.coordinator_calls",
    "pk.client.metadata_updater",
    "pk.client.network_client",
    "pk.client.fetch_engine",
    "pk.client.group_commits",
    "pk.client.group_membership",
    "pk.client.offsets",
    "pk.client.participant",
    "pk.client.produce_engine",
    "pk.client.transaction_engine",
    "pk.client.transaction_offsets",
    "pk.tiering.file_checker",
    "pk.tiering.file_merger",
    "pk.tiering.log_reading",
    "pk.tiering.reader",
    "pk.tiering.refill",
    "pk.tiering.stored_offsets",
    "pk.tiering.worker",
    "pk.server.broker",
    "pk.server.controller.active",
    "pk.server.controller.maintenance",
    "pk.server.controller.node",
    "pk.server.controller.requested_elections",
    "pk.server.handlers",
    "pk.server.groups.coordinator",
    "pk.server.groups.hold_reports",
    "pk.server.groups.hosted_groups",
    "pk.server.groups.lag_gauges",
    "pk.server.groups.waiting_heartbeats",
    "pk.server.metadata.snapshot_generator",
    "pk.server.raft.log",
    "pk.server.raft.log_reader",
    "pk.server.raft.log_writer",
    "pk.server.raft.snapshot_generator",
    "pk.server.raft.peers",
    "pk.server.raft.request_handler",
    "pk.server.raft.snapshot_fetcher",
    "pk.server.raft.snapshot_files",
    "pk.server.replica.alter_partition",
    "pk.server.replica.context",
    "pk.server.replica.creation",
    "pk.server.replica.corruption",
    "pk.server.replica.deletions",
    "pk.server.replica.directory_writer",
    "pk.server.replica.fetch_state",
    "pk.server.replica.fetcher",
    "pk.server.replica.fetcher_manager",
    "pk.server.replica.markers",
    "pk.server.replica.partition",
    "pk.server.replica.reaper",
    "pk.server.replica.replay_log",
    "pk.server.runtime",
    "pk.server.tier",
    "pk.server.transactions.coordinator",
    "pk.server.transactions.gathering",
    "pk.server.transactions.marker_sender",
    "pk.server.transactions.open_transactions",
    "pk.server.transactions.verifier",
    "pk.sim",
}

#: ◦ shells: they own a piece of the operating system, grpc, a terminal or Spark.
SHELLS = {
    "pk.clock",
    "pk.descriptors", "pk.event_loops",
    "pk.tracing",
    "pk.wire.grpc_network",
    "pk.wire.memory",
    "pk.wire.socket_network",
    "pk.wire.socket_stream", "pk.wire.shared_connection", "pk.wire.addresses", "pk.wire.waiters",
    "pk.wire.dead_peers",
    "pk.cli",
    "pk.log.descriptor_pool",
    "pk.log.files",
    "pk.log.real_file",
    "pk.client.admin.connection",
    "pk.client.confluent",
    "pk.client.connection",
    "pk.client.consumer",
    "pk.client.group_consumer",
    "pk.client.accumulator",
    "pk.client.record_set",
    "pk.client.aio",
    "pk.client.futures",
    "pk.client.producer",
    "pk.client.registry",
    "pk.compaction.cleaner_process",
    "pk.priority",
    "pk.client.waiting",
    "pk.tiering.delta",
    "pk.tiering.delta_actions",
    "pk.tiering.app_transactions", "pk.tiering.delta_checkpoint",
    "pk.tiering.fsspec_store",
    "pk.tiering.s3_head",
    "pk.tiering.log_sync",
    "pk.tiering.resources",
    "pk.tiering.shell",
    "pk.tiering.snapshot_table",
    "pk.tiering.table_evidence",
    "pk.server.__main__",
    "pk.server.broker.cleaner_child",
    "pk.server.node.fork_server", "pk.server.node.format", "pk.server.node.memory",
    "pk.server.node.metrics_endpoint",
    "pk.server.node.role_process",
    "pk.server.node.run_config",
    "pk.server.node.running", "pk.server.node.supervisor",
    "pk.sim.__main__", "pk.sim.campaign_key", "pk.sim.canaries", "pk.sim.long",
    "pk.sim.restore_run",
    "pk.sparkconnector", "pyspark_pk",
}  # fmt: skip

#: What only a shell may import.
OUTSIDE = {
    "asyncio", "concurrent", "ctypes", "fcntl", "glob", "http", "logging", "mmap", "uvloop",
    "multiprocessing", "os", "pathlib", "queue", "resource", "secrets", "select", "shutil",
    "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "urllib.request",
    "deltalake", "fsspec", "grpc", "prometheus_client", "pyspark", "rich", "s3fs", "typer",
}  # fmt: skip
#: … except for arithmetic on paths.
PATH_WORDS = {"os.path.join", "os.path.split", "os.path.dirname", "os.path.basename"}
#: … of which world-generic code may use the event loop (virtual in the simulator) and no more.
WORLD_MAY = {"asyncio", "logging"}
#: Calls that read a clock, a random number or an id behind the caller's back.
LEAKS = {
    "asyncio.sleep", "asyncio.to_thread", "asyncio.run",
    "datetime.now", "datetime.utcnow", "datetime.today", "date.today",
    "datetime.datetime.now", "datetime.datetime.utcnow",
    "uuid.uuid1", "uuid.uuid4", "os.urandom", "open", "print", "input",
}  # fmt: skip


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def sources() -> list[str]:
    """Every text file of the repository, committed or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout.splitlines()  # fmt: skip
    return sorted({name for name in listed if (ROOT / name).is_file()})


def python_files() -> list[str]:
    return [n for n in sources() if n.endswith(".py") and not n.endswith("_pb2.py")]


def module_of(path: str) -> str:
    """`log/batch.py` → `pk.log.batch`; '' for what is not part of a package (tests, bench)."""
    parts = list(Path(path).with_suffix("").parts)
    if parts[0] == "src":
        parts = parts[1:]
    elif parts[0] in {"log", "server", "client", "compaction", "tiering", "sparkconnector", "sim"}:
        parts = ["pk", *parts]
    else:
        return ""
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    """The layer a module belongs to."""
    if module.split(".")[0] == "pyspark_pk":
        return "sparkconnector"
    parts = module.split(".")[1:]
    for length in (2, 1):
        name = ".".join(parts[:length])
        if name in LAYERS:
            return name
    return "kernel"


def covered(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(name + ".") for name in names)


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, also inside functions and `if TYPE_CHECKING`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = node.module == "pk" or node.module in {f"pk.{n}" for n in LAYERS}
                yield node.lineno, f"{node.module}.{alias.name}" if submodule else node.module


def server_folder(module: str) -> str:
    """The layer of a module of server/; '' of any other."""
    if module in PROCESSES:
        return "process"
    parts = module.split(".")
    return parts[2] if parts[:2] == ["pk", "server"] and len(parts) > 2 else ""


def file_imports(text: str, modules: Collection[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of the files of `modules` that a file imports; under TYPE_CHECKING, too."""
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, each.name) for each in node.names if each.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for each in node.names:
                whole = f"{node.module}.{each.name}"
                found = whole if whole in modules else node.module
                if found in modules:
                    yield node.lineno, found


def server_breaks(module: str, text: str, modules: Collection[str]) -> list[str]:
    """Imports within server/ that go up."""
    mine = server_folder(module)
    found = []
    for line, name in file_imports(text, modules) if mine else ():
        theirs = server_folder(name)
        if theirs not in ("", mine) and SERVER_LAYERS[theirs] >= SERVER_LAYERS[mine]:
            found.append(f"{line}: server/{mine} may not import {name} ({theirs})")
    return found


def cycles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Groups of files that reach each other."""
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            each = waiting.pop()
            if each not in seen:
                seen.add(each)
                waiting += graph.get(each, ())
        reach[start] = seen
    groups = {
        tuple(sorted({n for n in reach[each] if each in reach.get(n, ())}))
        for each in graph
        if each in reach[each]
    }
    return [list(group) for group in sorted(groups)]


def layer_breaks(module: str, text: str) -> list[str]:
    """Imports that go up, or sideways between folders of one layer."""
    if module in {"", "pk"}:  # pk/__init__.py names its lazy exports
        return []
    mine = folder_of(module)
    found = []
    for line, name in imports(parsed(text)):
        if name.split(".")[0] != "pk":
            continue
        theirs = folder_of(name)
        if theirs != mine and LAYERS[theirs] >= LAYERS[mine]:
            found.append(f"{line}: {mine} may not import {name} ({theirs})")
    return found


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def only_paths(tree: ast.AST) -> bool:
    """`os` is used for arithmetic on paths and nothing else."""
    used = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
    names = {dotted(node) for node in used}
    return all(
        name == "os.path" or name in PATH_WORDS for name in names if name.split(".")[0] == "os"
    )


def impurities(module: str, text: str) -> list[str]:
    """What a core or a world-generic module may not import, call or iterate over."""
    if module in {"", "pk"} or module.endswith("_pb2") or covered(module, SHELLS):
        return []
    allowed = WORLD_MAY if covered(module, WORLD_GENERIC) else set()
    tree = parsed(text)
    found = [
        f"{line}: imports {name}"
        for line, name in imports(tree)
        if covered(name, OUTSIDE - allowed) and not (name == "os" and only_paths(tree))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in LEAKS or (name.startswith("random.") and name != "random.Random"):
                found.append(f"{node.lineno}: calls {name}")
        elif isinstance(node, ast.For | ast.comprehension):
            over = node.iter
            is_set = isinstance(over, ast.Set | ast.SetComp) or (
                isinstance(over, ast.Call) and dotted(over.func) in {"set", "frozenset"}
            )
            if is_set:
                found.append(f"{over.lineno}: iterates over a set: its order differs per process")
    return found


def time_imports(path: str, text: str) -> list[str]:
    """Only the clock module imports `time`; benchmarks and tests measure with what they like."""
    if path == "src/pk/clock.py" or path.startswith(("tests/", "bench/")):
        return []
    return [f"{ln}: imports time" for ln, name in imports(parsed(text)) if name == "time"]


def too_long(path: str, text: str) -> list[str]:
    lines = text.splitlines()
    found = [
        f"{number}: {len(line)} columns"
        for number, line in enumerate(lines, 1)
        if len(line) > LINE_COLUMNS_MAX
    ]
    if len(lines) > MODULE_LINES_MAX:
        found.append(f"{len(lines)} lines; split by concern")
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                found.append(f"{node.lineno}: {node.name} has {length} lines")
    return found


def without_theory(path: str, text: str) -> list[str]:
    """A module says what it is for; an empty __init__.py has nothing to say."""
    if not text.strip() or ast.get_docstring(parsed(text)):
        return []
    return ["no module docstring"]


LEFT = ["FIX" + "ME", "TO" + "DO", "XX" + "X", "HA" + "CK"]
LEFTOVERS = re.compile(rf"\b(?:{'|'.join(LEFT)})\b")


def leftovers(path: str, text: str) -> list[str]:
    return [
        f"{number}: leftover {match.group()}, finish it or say why not"
        for number, line in enumerate(text.splitlines(), 1)
        if (match := LEFTOVERS.search(line))
    ]


@cache
def prose_of(text: str) -> list[tuple[int, str]]:
    """(line, text) of comments and docstrings."""
    return [
        (token.start[0], token.string)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
        or (token.type == tokenize.STRING and token.string.lstrip("rRbBuUfF").startswith('"""'))
    ]


RULE = r"[LRQTCXGSP]\d{1,2}"
MORE = rf"(?:\s*[,–-]\s*|\s+and\s+){RULE}"
CITED = re.compile(rf"(?:\b[Rr]ules?|PROTOCOL\.md)\s+({RULE}(?:{MORE})*)")
CITED_SHORT = re.compile(rf"^#:?\s+({RULE}(?:,\s*{RULE})*)(?:[.:;)]|\s*$|\s)")
CITED_BRACKET = re.compile(rf"\(({RULE}(?:,\s*{RULE})*)\)")
DEFINED_HERE = re.compile(rf"^\s+({RULE})\s", re.MULTILINE)


def unknown_rules(text: str, known: set[str]) -> list[str]:
    """Citations of rules that neither docs/PROTOCOL.md nor this module's docstring defines."""
    here = set(DEFINED_HERE.findall(ast.get_docstring(parsed(text), clean=False) or ""))
    found = []
    for line, prose in prose_of(text):
        cited = [*CITED.findall(prose), *CITED_SHORT.findall(prose), *CITED_BRACKET.findall(prose)]
        for rule in re.findall(RULE, " ".join(cited)):
            if rule not in known | here:
                found.append(f"{line}: cites {rule}, which docs/PROTOCOL.md does not have")
    return found


def known_rules() -> set[str]:
    text = (ROOT / "docs/PROTOCOL.md").read_text()
    return set(re.findall(rf"^- \*\*({RULE})\*\*", text, re.MULTILINE))


#: Names of places where this code was written, not of the code; spelled to miss themselves.
PLACES = [
    re.escape(p) for p in ("/wo" + "rk/", ".lib" + "rary", "/sha" + "red/", "/tmp/br" + "ief")
]
ELSEWHERE = re.compile("|".join([*PLACES, r"\bissue" + r" #?\d", r"\bthis ses" + r"sion\b"]))


def elsewhere(path: str, text: str) -> list[str]:
    return [
        f"{number}: speaks of {match.group()!r}"
        for number, line in enumerate(text.splitlines(), 1)
        if (match := ELSEWHERE.search(line))
    ]


def untitled(path: str, text: str) -> list[str]:
    return [] if text.startswith("# ") else ["a page starts with its title, `# …`"]


def report(found: dict[str, list[str]]) -> None:
    lines = [f"{path}:{what}" for path, whats in sorted(found.items()) for what in whats]
    assert not lines, "\n" + "\n".join(lines)


@cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_imports_go_down_only() -> None:
    report({p: layer_breaks(module_of(p), text_of(p)) for p in python_files()})


def test_imports_within_the_server_go_down_only() -> None:
    modules = {module_of(path) for path in python_files()} - {""}
    assert {server_folder(m) for m in modules} - {""} == set(SERVER_LAYERS)
    report({p: server_breaks(module_of(p), text_of(p), modules) for p in python_files()})


def test_no_files_import_each_other() -> None:
    """Neither directly nor through others, neither for types only nor inside of functions."""
    files = {module_of(path): text_of(path) for path in python_files()}
    del files[""], files["pk"]  # the latter names its lazy exports
    graph = {m: {to for _, to in file_imports(text, files)} - {m} for m, text in files.items()}
    assert not cycles(graph), cycles(graph)


def test_cores_are_pure() -> None:
    report({p: impurities(module_of(p), text_of(p)) for p in python_files()})


def test_one_module_imports_time() -> None:
    report({p: time_imports(p, text_of(p)) for p in python_files()})


def test_lines_functions_and_modules_stay_small() -> None:
    report({p: too_long(p, text_of(p)) for p in python_files()})


def test_every_module_opens_with_its_theory() -> None:
    report({p: without_theory(p, text_of(p)) for p in python_files()})


def test_nothing_is_left_for_later() -> None:
    wanted = (".py", ".md", ".toml", ".proto", ".sh", "Makefile", ".ci/run")
    report({p: leftovers(p, text_of(p)) for p in sources() if p.endswith(wanted)})


def test_cited_rules_exist() -> None:
    known = known_rules()
    assert {"L1", "L14", "R1", "Q4", "T14", "S2", "P7"} <= known
    report({p: unknown_rules(text_of(p), known) for p in python_files() if "tidy.py" not in p})


def test_every_page_has_a_title() -> None:
    report({p: untitled(p, text_of(p)) for p in sources() if p.endswith(".md")})


def test_the_repository_speaks_of_itself_only() -> None:
    wanted = (".py", ".md", ".toml", ".proto", ".yaml", ".ipynb", "Makefile", ".ci/run", ".txt")
    report({p: elsewhere(p, text_of(p)) for p in sources() if p.endswith(wanted)})


def test_the_lists_of_this_test_name_what_exists() -> None:
    """A renamed module must not leave its permission behind."""
    modules = {module_of(path) for path in python_files()}
    gone = [n for n in WORLD_GENERIC | SHELLS if not any(covered(m, {n}) for m in modules)]
    assert not gone, gone


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("pk.log.batch", "from pk.server.replica import purgatory"),
        ("pk.log.batch", "def f():\n    from pk.client.sender import Sender"),
        ("pk.types", "import pk.log.batch"),
        ("pk.sparkconnector.source", "from pk.server.node.supervisor import Supervisor"),
        ("pk.tiering.copier", "from pk.compaction import plan"),
        ("pk.server.node.supervisor", "from pk import cli"),
    ],
)
def test_a_wrong_import_is_caught(module: str, text: str) -> None:
    assert len(layer_breaks(module, text)) == 1
    assert layer_breaks("pk.sim.world", text) == []


def test_a_wrong_import_within_the_server_is_caught() -> None:
    modules = {"pk.server.raft.log", "pk.server.metadata.image", "pk.server.broker.node"}
    lazy = "if TYPE_CHECKING:\n    from pk.server.metadata import image"
    assert len(server_breaks("pk.server.raft.log", lazy, modules)) == 1
    assert server_breaks("pk.server.broker.node", lazy, modules) == []
    assert len(server_breaks("pk.server.broker.core", "import pk.server.broker.node", modules)) == 1


def test_a_cycle_is_caught() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.parametrize(
    "line",
    [
        "import os\nos.path.exists(x)", "from time import monotonic", "import grpc.aio",
        "x = random.random()", "x = uuid.uuid4()", "x = datetime.datetime.now()", "f = open('x')",
        "for x in set(y): pass", "z = [x for x in {1, 2}]",
    ],
)  # fmt: skip
def test_an_impure_core_is_caught(line: str) -> None:
    assert len(impurities("pk.log.batch", line)) == 1
    assert impurities("pk.log.files", line) == []


def test_arithmetic_on_paths_is_pure() -> None:
    assert impurities("pk.log.batch", "import os\nx = os.path.join(a, os.path.dirname(b))") == []


def test_world_generic_code_may_have_a_loop_but_no_clock() -> None:
    assert impurities("pk.log.manager", "import asyncio") == []
    assert len(impurities("pk.log.manager", "import asyncio\nasyncio.sleep(1)")) == 1
    assert len(impurities("pk.log.manager", "import threading")) == 1


def test_long_things_are_caught() -> None:
    body = "\n".join(["    pass"] * FUNCTION_LINES_MAX)
    assert too_long("x.py", "#" * (LINE_COLUMNS_MAX + 1))
    assert too_long("x.py", f"def f():\n{body}")
    assert too_long("x.py", "\n" * (MODULE_LINES_MAX + 1))
    assert not too_long("x.py", "def f():\n" + body[: -len("    pass")])


@pytest.mark.parametrize(
    "comment",
    ["# L99: x", "# (rule L99)", "# rules L1, L99", "# x (L99)", '"""x (rules L1–L99)."""'],
)
def test_a_citation_of_nothing_is_caught(comment: str) -> None:
    assert len(unknown_rules(comment, {"L1"})) == 1
    assert unknown_rules(comment, {"L1", "L99"}) == []
    assert unknown_rules(f'"""Rules\n  L99  here.\n"""\n{comment}', {"L1"}) == []


def test_the_rest_is_caught() -> None:
    assert time_imports("log/x.py", "import time")
    assert without_theory("x.py", "x = 1")
    assert leftovers("x.py", "# TO" + "DO later")
    assert elsewhere("x.py", "see /wo" + "rk/notes")
    assert untitled("x.md", "text")
