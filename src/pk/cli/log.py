"""`pk log dump FILE`: shows any file of a log as text, or with `--json` as one object per line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from pk import errors, formats
from pk.cli import log_directories
from pk.cli.repair import repair
from pk.log import dump as dumping
from pk.server.metadata import snapshot
from pk.server.raft.snapshot_id import SUFFIX, id_of

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Look into the files of a log, and repair them.",
)
app.command()(repair)
log_directories.add_to(app)


@app.callback()
def _log() -> None:
    """Look into the files of a log, and repair them."""


@app.command()
def dump(
    file: Annotated[
        Path,
        typer.Argument(
            help="a .log, .index, .timeindex, .txnindex, .snapshot, .checkpoint, partition.json or "
            "checkpoint file"
        ),
    ],
    records: Annotated[
        bool, typer.Option("--records", help="decode the rows of every batch")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a line")] = False,
) -> None:
    """Print what FILE holds; damage is printed where it is, and the exit code is then 1.

    A file that a newer pk wrote is refused: only that pk can read it.

    Example: pk log dump /tmp/pk/topics/flights-0/00000000000000000000.log --records
    """
    kind = dumping.kind_of(file.name)
    metadata = id_of(file.name.removesuffix(".part").removesuffix(".load")) is not None
    if kind is None and not metadata:
        known = ", ".join((*dumping.SUFFIXES, SUFFIX, *dumping.CHECKPOINTS))
        raise errors.InvalidOption(
            f"{file.name} is no file of a log; known are {known}", file=str(file)
        )
    try:
        fd = os.open(file, os.O_RDONLY)
    except OSError as cause:
        raise errors.InvalidOption(f"{file}: {cause.strerror}", file=str(file)) from cause
    damage: list[dict[str, Any]] = []
    try:
        size = os.fstat(fd).st_size
        if kind is None:
            objects = snapshot.dump(os.pread(fd, size, 0), records=records)
        else:
            objects = dumping.dump(
                kind, lambda at, count: os.pread(fd, count, at), size, records=records
            )
        with formats.named(str(file)):
            for found in objects:
                if "corrupt" in found:
                    damage.append(found)
                typer.echo(json.dumps(found) if as_json else line(found))
    finally:
        os.close(fd)
    if damage:
        first = damage[0]
        where = f"{file} at position {first.get('position', 0)}"
        raise errors.CorruptLog(
            f"{where}: {first['corrupt']} ({len(damage)} damaged in all)", file=str(file)
        )


def line(found: dict[str, Any]) -> str:
    """Return an object as text; the rows of a batch are indented below it."""
    rows = found.pop("rows", found.pop("markers", None))
    head = " ".join(f"{name}={_cell(value)}" for name, value in found.items() if name != "corrupt")
    if "corrupt" in found:
        head = f"CORRUPT at {found.get('position', 0)}: {found['corrupt']} | {head}"
    below = [
        "    " + " ".join(f"{name}={_cell(value)}" for name, value in row.items())
        for row in rows or ()
    ]
    return "\n".join([head, *below])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
