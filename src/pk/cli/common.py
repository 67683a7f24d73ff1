"""Shared parts of the client commands: options, tables, sizes as text, quiet endings."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from pk import errors, units
from pk.clock import monotonic_s

C = TypeVar("C", bound=Any)

DEFAULT_BOOTSTRAP = "127.0.0.1:9292"
INTERRUPTED = 130
BROKEN_PIPE = 141
#: After this time, a command prints to which address it is still connecting.
CONNECTING_S = 1.0

BootstrapOption = Annotated[
    str, typer.Option("--bootstrap", envvar="PK_BOOTSTRAP", help="HOST:PORT of any broker")
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for scripts")]
Configs = Annotated[
    list[str] | None,
    typer.Option("--config", help="setting=value, Kafka's dotted names too; repeatable"),
]
#: The largest time-out that a client accepts.
TIMEOUT_MS_MAX = 2_147_483_000


def duration(least: int, most: int = TIMEOUT_MS_MAX) -> Callable[[Any], int]:
    """Return a parser of an option in ms, which takes a unit, too: 1500, 90s, 12h."""

    def parse(given: Any) -> int:
        try:
            found = given if isinstance(given, int) else units.duration_ms(str(given))
        except ValueError:
            raise typer.BadParameter(f"{given!r} is no time: write 1500 (ms), 90s or 12h") from None
        if not least <= found <= most:
            raise typer.BadParameter(f"{found} ms is not in the range from {least} to {most}")
        return found

    parse.__name__ = "duration"  # typer shows it in the help
    return parse


def _linger(given: Any) -> float:
    """Parse how long a batch may wait, in ms: 0.5, 5 or 1s."""
    try:
        found = float(given)
    except ValueError:
        return duration(0)(given)
    if not 0 <= found <= TIMEOUT_MS_MAX:  # nor is NaN
        raise typer.BadParameter(f"{found} ms is not in the range from 0 to {TIMEOUT_MS_MAX}")
    return found


LingerMs = Annotated[
    float,
    typer.Option(
        "--linger-ms",
        parser=_linger,
        metavar="DURATION",
        help="how long a batch may wait: 0.5 (ms), 1s",
    ),
]
TimeoutMs = Annotated[
    int,
    typer.Option(
        "--timeout-ms",
        parser=duration(1),
        metavar="DURATION",
        help="how long the command may take, with connecting: 1500 (ms), 90s",
    ),
]


def pairs(items: Iterable[str] | None, option: str) -> dict[str, str]:
    """Return `name=value` arguments as a mapping.  Raises `InvalidOption`."""
    found: dict[str, str] = {}
    for item in items or ():
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise errors.InvalidOption(f"{option} takes name=value, not {item!r}", option=option)
        if name in found:
            raise errors.InvalidOption(f"{option} {name} is given twice", option=option)
        found[name] = value
    return found


def toml_file(path: Path | None) -> dict[str, Any]:
    """Return the settings of a TOML file; {} without a path.  Raises `InvalidConfig`."""
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except OSError as cause:
        raise errors.InvalidConfig(f"cannot read {path}: {cause.strerror}") from cause
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as cause:
        raise errors.InvalidConfig(f"{path} is not TOML: {cause}") from cause


def say(value: Any) -> None:
    """Print one JSON document on one line."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Print a table: framed on a terminal, aligned text elsewhere; numbers are right-aligned."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    right = [
        all(row[i].lstrip("-").replace(",", "").isdigit() for row in cells) and bool(cells)
        for i in range(len(columns))
    ]
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table

        shown = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD)
        for name, number in zip(columns, right, strict=True):
            shown.add_column(name, justify="right" if number else "left", overflow="fold")
        for row in cells:
            shown.add_row(*row)
        Console().print(shown)
        return
    if title:
        typer.echo(title)
    widths = [max([len(name), *(len(row[i]) for row in cells)]) for i, name in enumerate(columns)]
    for line in [list(columns), *cells]:
        fitted = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, right, strict=True)
        ]
        typer.echo("  ".join(fitted).rstrip())


def size_text(size: float) -> str:
    """Return a number of bytes with a unit, for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def countdown(timeout_ms: int) -> Callable[[], float]:
    """Return a function that returns the seconds left of a command's time-out.

    The time-out begins with the function's first call.  The result is never zero or negative.
    """
    begun: list[float] = []

    def left_s() -> float:
        now = monotonic_s()
        if not begun:
            begun.append(now)
        return max(0.001, begun[0] + timeout_ms / 1000 - now)

    return left_s


@contextlib.contextmanager
def opened(client: C, bootstrap: str) -> Iterator[C]:
    """Yield the client and close it at the end.

    If no broker answers soon, stderr names the address that the command is connecting to.
    """

    def say_so() -> None:
        connection = getattr(client, "_connection", None)  # of an AdminClient
        network = client._cluster if connection is None else connection.cluster
        if not network.reached:
            typer.echo(f"connecting to {bootstrap} …", err=True)

    timer = threading.Timer(CONNECTING_S, say_so)
    timer.daemon = True
    timer.start()
    try:
        with client:
            yield client
    finally:
        timer.cancel()


@contextlib.contextmanager
def quiet_end() -> Iterator[None]:
    """End the command at Ctrl-C or a closed pipe: no output, the shell's usual exit code."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE) from None


def error_json(error: errors.PkError | None) -> Mapping[str, Any] | None:
    """Return an error as a JSON object that is part of a larger answer."""
    if error is None:
        return None
    return {"code": error.code, "name": type(error).__name__, "message": error.message}
