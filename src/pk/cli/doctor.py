"""`pk doctor spark`: finds out why Spark does not find `format("pk")`, and names the fix.

Spark looks up data sources in a separate Python process.  Its interpreter may differ from the
user's, and Spark reports every failure there as DATA_SOURCE_NOT_FOUND.  This command repeats the
look-up step by step in that interpreter, and names the first failure and its fix.

`pk.sparkconnector.session()` chooses the interpreter by itself.  What concerns only sessions that
are built otherwise is a note: it has a fix, and does not fail the command.

The checks depend on each other as little as possible, so a single run shows all problems.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import typer

from pk import errors
from pk.cli.doctor_capacity import capacity_command
from pk.cli.doctor_server import server

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Find out why an environment does not work."
)

SPARK_VERSION = "4.2"
_PROBE_TIMEOUT_S = 120
_CHOOSE = ("PYSPARK_DRIVER_PYTHON", "PYSPARK_PYTHON")
_SKIPPED = "not looked at: that is not the right interpreter"
_NOT_FOUND = "DATA_SOURCE_NOT_FOUND"

#: A script for Spark's interpreter: it repeats Spark's look-up, one data source at a time.
_PROBE = """
import importlib, json, pkgutil, sys
names = ("pyspark", "pk", "pyarrow", "pandas", "grpc", "deltalake", "google.protobuf")
modules, sources = {}, {}
for name in names:
    try:
        modules[name] = str(getattr(importlib.import_module(name), "__version__", ""))
    except Exception:
        modules[name] = None
for info in pkgutil.iter_modules():
    if info.name.startswith("pyspark_"):
        error = found = None
        try:
            source = getattr(importlib.import_module(info.name), "DefaultSource", None)
            found = source.name() if source else None
        except BaseException as cause:
            error = f"{type(cause).__name__}: {cause}"
        sources[info.name] = {"error": error, "name": found}
version = list(sys.version_info[:2])
found = {"version": version, "executable": sys.executable, "modules": modules, "sources": sources}
print(json.dumps(found))
"""


@dataclass(slots=True)
class Check:
    """The result of one check.  `ok` is None if an earlier failure prevented the check.

    A check that is ok and has a fix is a note.
    """

    name: str
    ok: bool | None
    found: str
    fix: str = ""

    @property
    def mark(self) -> str:
        if self.ok:
            return "note" if self.fix else "ok"
        return "--" if self.ok is None else "FAIL"


def lookup_python(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the interpreter that Spark starts for look-ups, and the reason for this choice."""
    for name in _CHOOSE:
        if environment.get(name):
            return environment[name], name
    return "python3", "python3 on PATH, because PYSPARK_PYTHON is not set"


def probe(command: str) -> dict[str, Any]:
    """Run Spark's look-up in that interpreter.  Raises `OSError`, `ValueError`."""
    path = shutil.which(command)
    if path is None:
        raise FileNotFoundError(f"{command} is not on PATH")
    ran = subprocess.run(
        [path, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
    )
    lines = ran.stdout.strip().splitlines()
    if not lines:
        raise ValueError(ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else "no output")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def check_java() -> Check:
    from pk.sparkconnector.java import find_java

    try:
        java = find_java()
    except errors.JavaMissing as cause:
        words, _, fix = cause.message.partition(". ")
        return Check("java", False, words, fix)
    return Check("java", True, f"Java {java.release} at {java.command}")


def check_interpreter(
    environment: Mapping[str, str], ask: Callable[[str], dict[str, Any]]
) -> tuple[Check, dict[str, Any] | None]:
    """Check which Python looks up data sources, and whether it runs."""
    command, why = lookup_python(environment)
    fix = f"export PYSPARK_PYTHON={sys.executable} before the session is built, or build it with "
    fix += "pk.sparkconnector.session()"
    try:
        found = ask(command)
    except (OSError, ValueError, subprocess.TimeoutExpired) as cause:
        return Check("interpreter", False, f"{command} ({why}) does not run: {cause}", fix), None
    version = ".".join(map(str, found["version"]))
    words = f"{found['executable']} ({why}), Python {version}"
    lacking = [name for name in ("pyspark", "pk") if found["modules"].get(name) is None]
    if lacking:
        return Check("interpreter", False, f"{words}, without {' and '.join(lacking)}", fix), None
    mine = sys.version_info[:2]
    if tuple(found["version"]) != mine:
        ours = ".".join(map(str, mine))
        return Check(
            "interpreter", False, f"{words}; this one is {ours}: they must be alike", fix
        ), found
    return Check("interpreter", True, words), found


def check_other_sessions(
    environment: Mapping[str, str], ask: Callable[[str], dict[str, Any]]
) -> Check:
    """Look at the interpreter of sessions that `pk.sparkconnector.session` did not build."""
    check, _ = check_interpreter(environment, ask)
    words = check.found if check.ok else f"DATA_SOURCE_NOT_FOUND: Spark would ask {check.found}"
    return Check("other sessions", True, words, check.fix)


def check_versions(found: Mapping[str, Any] | None) -> Check:
    if found is None:
        return Check("versions", None, _SKIPPED)
    modules = found["modules"]
    words = ", ".join(f"{name} {version or 'missing'}" for name, version in modules.items())
    install = f"{found['executable']} -m pip install 'pk-log[spark]'"
    lacking = [name for name, version in modules.items() if version is None]
    if lacking:
        return Check("versions", False, f"{words}", f"{install} (lacking: {', '.join(lacking)})")
    spark = str(modules["pyspark"])
    if not spark.startswith(SPARK_VERSION + "."):
        return Check("versions", False, f"{words}; pk needs pyspark {SPARK_VERSION}", install)
    return Check("versions", True, words)


def check_source(found: Mapping[str, Any] | None) -> list[Check]:
    """Check pk's registration, and whether another package breaks the look-up of all sources."""
    if found is None:
        return [Check("registration", None, _SKIPPED)]
    sources = dict(found["sources"])
    checks = []
    mine = sources.pop("pyspark_pk", None)
    install = (
        f"{found['executable']} -m pip install pk-log (an editable install must be path-style)"
    )
    if mine is None:
        fix = (
            f"{install}; where only --py-files can be used, call pk.sparkconnector.register(spark)"
        )
        checks.append(Check("registration", False, "there is no package pyspark_pk", fix))
    elif mine["error"] or mine["name"] != "pk":
        why = mine["error"] or f"its DefaultSource is named {mine['name']}"
        checks.append(Check("registration", False, f"pyspark_pk does not import: {why}", install))
    else:
        checks.append(Check("registration", True, "pyspark_pk offers format pk"))
    broken = {name: one["error"] for name, one in sorted(sources.items()) if one["error"]}
    if broken:
        words = "; ".join(f"{name}: {error}" for name, error in broken.items())
        names = " ".join(name.replace("_", "-") for name in broken)
        fix = f"repair or remove it ({found['executable']} -m pip uninstall {names}); one package "
        fix += "that fails to import hides every Python data source of the session"
        checks.append(Check("other sources", False, words, fix))
    else:
        others = ", ".join(sorted(sources)) or "none"
        checks.append(Check("other sources", True, f"other Python data sources: {others}"))
    return checks


def check_jars() -> Check:
    from pk.sparkconnector import jars

    present = jars.installed(jars.DELTA)
    if present is None:
        fix = "nothing to do with a network: session() fetches them once; without, first run "
        fix += f"{sys.executable} -m pk.sparkconnector.jars where there is one"
        return Check("jars", True, f"Delta's jars are not in {jars.default_folder()} yet", fix)
    return Check("jars", True, ", ".join(path.name for path in present))


def check_columnar() -> Check:
    """Say which way a read takes, and why."""
    from pk.sparkconnector import columnar_jar

    problem = columnar_jar.problem()
    if problem:
        return Check("columnar reader", True, "no jar: every read goes through Python", problem)
    words = f"{columnar_jar.NAME}, build {columnar_jar.build_of_sources()}"
    return Check("columnar reader", True, f"{words}: reads use it unless columnar=false")


def diagnose(
    environment: Mapping[str, str] | None = None,
    ask: Callable[[str], dict[str, Any]] = probe,
) -> list[Check]:
    """Run all checks, in the order of Spark's own steps."""
    given = os.environ if environment is None else environment
    chosen = any(given.get(name) for name in _CHOOSE)
    others = [] if chosen else [check_other_sessions(given, ask)]
    used = given if chosen else {"PYSPARK_PYTHON": sys.executable}
    interpreter, found = check_interpreter(used, ask)
    if not chosen:
        interpreter.found = interpreter.found.replace(
            "(PYSPARK_PYTHON)", "(PYSPARK_PYTHON, which session() sets)"
        )
    checks = [check_java(), interpreter, *others, check_versions(found), *check_source(found)]
    return [*checks, check_jars(), check_columnar()]


@app.callback()
def main() -> None:
    """Find out why an environment does not work."""


app.command()(server)
app.command("capacity")(capacity_command)


@app.command()
def spark(
    as_json: bool = typer.Option(False, "--json", help="print the checks as JSON"),
) -> None:
    """Name the cause of DATA_SOURCE_NOT_FOUND and its fix.

    Example: pk doctor spark
    """
    checks = diagnose()
    wrong = [check for check in checks if check.ok is False]
    if as_json:
        print(json.dumps({"ok": not wrong, "checks": [asdict(check) for check in checks]}))
    else:
        for check in checks:
            print(f"{check.mark:4} {check.name}: {check.found}")
            if check.fix:
                print(f"     fix: {check.fix}")
        if wrong:
            print(f"{len(wrong)} of {len(checks)} checks failed: Spark may say {_NOT_FOUND}")
        else:
            print('pk.sparkconnector.session() will find format("pk")')
    raise typer.Exit(1 if wrong else 0)
