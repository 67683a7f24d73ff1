"""The `pk` command: a table of commands, whose modules are imported when they are called.

A module `pk.cli.<name>` offers `app`, a `typer.Typer`.  The command is available only if its module
exists in this build.  This module alone turns each failure into output for the user or for a
script:

    PkError            one line `error: <message> (<who must act>)`, exit 1; with `--json` an object
                       {"error": {code, name, message, acts, retriable, details}} on stdout, except
                       for commands whose stdout holds records (RECORDS_ON_STDOUT)
    wrong usage        typer's own lines, exit 2
    Ctrl-C             exit 130
    a closed pipe      no output, exit 141 (as in `pk consume … | head`)
    a full disk        one line, exit 1, where stdout is a file
    anything else      a traceback: a bug
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

import pk
from pk import errors
from pk.cli import completion, profiles

#: command → its purpose, in the order of `pk --help`
COMMANDS: Mapping[str, str] = {
    "server": "start a node: controller, broker and tier under one supervisor; format its disks",
    "topics": "create, list, describe, alter and delete topics",
    "brokers": "list the brokers, confirm a broker's clock",
    "cluster": "describe the level of the cluster, raise it",
    "reassign": "give partitions other replicas",
    "produce": "send lines to a topic",
    "consume": "print the records of a topic",
    "perf": "measure produce and consume against a running server",
    "groups": "list, describe and delete consumer groups, reset their offsets",
    "transactions": "list, describe, abort and forget transactions, find hanging ones",
    "quorum": "describe the metadata quorum, add and remove controllers",
    "log": "print segments, indexes, snapshots and checkpoints for people",
    "tier": "describe the Delta table behind a topic",
    "maintenance": "merge the files of tables and audit them, now or on a schedule",
    "jars": "print the jar for Spark sessions that pk did not create",
    "doctor": "find out why an environment does not work",
    "version": "print the versions of pk, Python and the libraries",
    "demo": "the main job end to end on real data: log, tier, Spark, counts that agree",
}

WHO_ACTS = {
    "client": "try again; pk's clients do so by themselves",
    "user": "change the request",
    "operator": "the operator of the server must act",
    "pk": "a bug in pk: please report it",
}

#: Errors that say something else than who acts.
HINTS: Mapping[type[errors.PkError], str] = {
    # a client retries it, because a new topic is not known everywhere at once
    errors.UnknownTopicOrPartition: "check the name and number: pk topics describe",
}

#: Commands whose stdout another program reads as records: an error there would be one of them.
RECORDS_ON_STDOUT = frozenset({"consume"})

#: Commands without --bootstrap: they work whatever the file with the profiles holds.
NO_ADDRESS = frozenset({"server", "log", "jars", "doctor", "version", "demo"})

INTERRUPTED = 130
BROKEN_PIPE = 141
#: The disk below stdout is full, or the user's quota.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def available() -> dict[str, str]:
    """Return the commands whose modules exist in this build."""
    return {name: text for name, text in COMMANDS.items() if find_spec(f"pk.cli.{name}")}


def help_text() -> str:
    width = max(len(name) for name in COMMANDS) + 2
    lines = [f"  {name:<{width}}{text}" for name, text in available().items()]
    return "\n".join(
        [
            "Usage: pk COMMAND [ARGS]...",
            "",
            "A Spark-native streaming log whose cold part is a Delta table.",
            "",
            "Commands:",
            *lines,
            "",
            "Options:",
            "  --bootstrap HOST:PORT  any broker; default: PK_BOOTSTRAP, or 127.0.0.1:9292",
            "  --profile NAME         a cluster of ~/.config/pk/config.toml; default: PK_PROFILE",
            "  --install-completion   of the shell; --show-completion prints it",
            "  --version              print the version",
            "  --help                 this text; `pk COMMAND --help` for a command's",
        ]
    )


def error_line(error: errors.PkError) -> str:
    """Return an error as text: always one line."""
    message = " ".join(error.message.split())
    return f"error: {message} ({HINTS.get(type(error), WHO_ACTS[error.acts])})"


def error_object(error: errors.PkError) -> dict[str, object]:
    """Return an error as a JSON object, for scripts."""
    return {
        "error": {
            "code": error.code,
            "name": type(error).__name__,
            "message": error.message,
            "acts": error.acts,
            "retriable": error.retriable,
            "details": dict(error.details),
        }
    }


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        argv, given = _leading(argv)
        if argv and argv[0] in COMMANDS:  # `pk topics --bootstrap … list`
            rest, later = _leading(argv[1:])
            argv, given = [argv[0], *rest], {**given, **later}
        address = None
        if given or _wants_address(argv):
            address = profiles.bootstrap(os.environ, given.get("bootstrap"), given.get("profile"))
    except errors.PkError as error:
        return _failed(error, argv)
    with _environment(profiles.BOOTSTRAP, address):
        return _run(argv)


def _wants_address(argv: Sequence[str]) -> bool:
    """Return whether a command line leaves its address to the environment and the profiles."""
    if not argv or argv[0] not in COMMANDS or argv[0] in NO_ADDRESS:
        return False
    names = {argument.partition("=")[0] for argument in argv[1:]}
    return names.isdisjoint({"--bootstrap", "--help"})


def _failed(error: errors.PkError, argv: Sequence[str]) -> int:
    """Print an error for the user or for a script, and return the exit code."""
    if "--json" in argv and argv[0] not in RECORDS_ON_STDOUT:
        print(json.dumps(error_object(error)))
    else:
        print(error_line(error), file=sys.stderr)
    return 1


def _leading(argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split the first options, which choose the cluster, from the rest.  Raises `InvalidOption`."""
    rest, given = list(argv), dict[str, str]()
    while rest and (name := rest[0].partition("=")[0]) in ("--bootstrap", "--profile"):
        first = rest.pop(0)
        _, equals, value = first.partition("=")
        if not equals:
            if not rest:
                raise errors.InvalidOption(f"{name} needs a value")
            value = rest.pop(0)
        given[name.removeprefix("--")] = value
    return rest, given


@contextlib.contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    """Set a variable for typer, which reads the defaults of options there."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


def _run(argv: Sequence[str]) -> int:
    try:
        code = _answered(argv)
        sys.stdout.flush()  # here, not at exit: it may fail
        return code
    except errors.PkError as error:
        return _failed(error, argv)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in FULL:
            raise
        _abandon_stdout()
        print(f"error: cannot write: {error.strerror} (make room on the disk)", file=sys.stderr)
        return 1


def _answered(argv: Sequence[str]) -> int:
    if completion.wanted(argv, os.environ):
        try:
            completion.root(available())(args=list(argv), prog_name="pk")
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0
    if not argv or argv[0] in {"--help", "-h", "help"}:
        print(help_text())
        return 0
    if argv[0] == "--version":
        print(f"pk {pk.__version__}")
        return 0
    name, arguments = argv[0], list(argv[1:])
    if name not in available():
        near = difflib.get_close_matches(name, available(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"error: pk has no command {name!r}{hint} (see pk --help)", file=sys.stderr)
        return 2
    return _called(name, arguments)


def _called(name: str, arguments: list[str]) -> int:
    code: object = 0
    streams = sys.stdout, sys.stderr
    try:
        import_module(f"pk.cli.{name}").app(args=arguments, prog_name=f"pk {name}")
    except SystemExit as end:
        code = end.code
    if sys.stdout is not streams[0]:  # click's answer to a closed pipe, with code 1
        sys.stdout, sys.stderr = streams
        raise BrokenPipeError
    return code if isinstance(code, int) else int(code is not None)


def _abandon_stdout() -> None:
    """Replace a stdout that takes no more.  Python flushes it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
