"""`pk log repair`: shows the damaged ranges of a broker's logs and, with --yes, makes them gaps.

The rule is L9; log/repair.py does the work.  Showing needs no lock and changes nothing.  If the
broker runs, data that it is still writing is not examined.  `--yes` takes the directory's lock, so
it is refused while a broker runs.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from pk import errors
from pk.cli.common import AsJson, quiet_end, say, table
from pk.cli.log_directories import Home, locked
from pk.cli.log_ranges import findings
from pk.log import adoption, identity
from pk.log import repair as repairing
from pk.log.files import RealStorage
from pk.log.repair import Finding
from pk.server.node.format import PARTITIONS


def repair(
    home: Home,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME…", help="partitions' directories in DIR/topics; default: all"),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="go past the ranges; without it they are shown")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show damaged ranges; with --yes their offsets become a known gap, and the rest is served.

    For the only copy of a partition: if the partition has other replicas, the broker replaces a
    damaged one by itself.  The records in the ranges are lost for good; look for them in a backup
    or another replica first.

    Example: pk log repair /tmp/pk flights-0
    """
    with quiet_end():
        if yes:
            with locked(home) as storage:
                rows = _all(storage, names, execute=True)
        else:
            storage = RealStorage(str(home.absolute()))
            adoption.opened(storage)
            rows = _all(storage, names, execute=False)
        _show(storage, rows, executed=yes, as_json=as_json)


def _all(storage: RealStorage, names: list[str] | None, *, execute: bool) -> list[dict[str, Any]]:
    return [row for name in _names(storage, names) for row in _one(storage, name, execute=execute)]


def _show(
    storage: RealStorage, rows: list[dict[str, Any]], *, executed: bool, as_json: bool
) -> None:
    if as_json:
        say({"directory": storage.root, "done": executed, "ranges": rows})
        return
    if not rows:
        typer.echo("no damaged range")
        return
    columns = ("partition", "offset", "next_offset", "bytes", "file", "problem")
    table(columns, [[row[name] for name in columns] for row in rows])
    if executed:
        typer.echo("these offsets are gaps now: readers go past them, no offset is given twice")
    else:
        typer.echo("nothing was changed: stop the broker and add --yes to go past these ranges")


def _names(storage: RealStorage, wanted: list[str] | None) -> list[str]:
    known = [
        name
        for name in storage.list(PARTITIONS)
        if storage.exists(f"{PARTITIONS}/{name}/{identity.PARTITION_FILE}")
    ]
    for name in wanted or ():
        if name not in known:
            raise errors.UnknownTopicOrPartition(
                f"{storage.root} has no log of {name}; it has {', '.join(known) or 'none'}"
            )
    return wanted or known


def _one(storage: RealStorage, name: str, *, execute: bool) -> list[dict[str, Any]]:
    found = findings(storage, name)
    if execute:
        repairing.go_past(storage, f"{PARTITIONS}/{name}", found)
    return [_row(name, each) for each in found]


def _row(name: str, found: Finding) -> dict[str, Any]:
    damage = found.damage
    return {
        "partition": name,
        "offset": damage.start,
        "next_offset": damage.end,
        "bytes": damage.end_position - damage.position,
        "file": found.segment.path(),
        "problem": damage.problem,
    }
