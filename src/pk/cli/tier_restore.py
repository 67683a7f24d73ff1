"""`pk tier restore`: a new cluster from the tier of a lost one."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk import errors
from pk.cli.common import AsJson, quiet_end, say, table, toml_file
from pk.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pk.server.node.settings import Resolved
    from pk.server.tier.restore import RestoreReport, Wishes

SHOWN_PARTITIONS = 8


def restore(
    tier_url: Annotated[
        str | None, typer.Option(help="the tier of the lost cluster; default: that of --config")
    ] = None,
    dir: Annotated[
        list[str] | None,
        typer.Option("--dir", help="empty data directory; repeat for several disks"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file of the node: the one that start is given")
    ] = None,
    cluster_id: Annotated[
        str, typer.Option(help="of the lost cluster; default: the only one in the tier")
    ] = "",
    new_cluster_id: Annotated[
        str, typer.Option(help="of the restored cluster; default: a fresh one")
    ] = "",
    brokers: Annotated[
        str,
        typer.Option(help="ids of the restored cluster's brokers; default: its voters"),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only show what would be restored, and what is lost")
    ] = False,
    fence: Annotated[
        bool,
        typer.Option(
            "--fence", help="take the tables from a cluster that lives, or from an earlier restore"
        ),
    ] = False,
    join: Annotated[
        bool,
        typer.Option(
            "--join", help="format another node of a restore that began, or finish one that broke"
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a cluster from the tier of one that lost its disks: topics, settings, stored rows.

    Every record that was in a table is there again, at its offset.  Records that were acknowledged
    and had not reached a table are lost.  A reader whose position is among them gets DataLoss once.
    The restored cluster has another id, so clients that were running must be started again.  Of
    several nodes, format the first one, then the others with --join, and start all of them after
    that.

    Example: pk tier restore --tier-url file:///tmp/pk-tier --dir /tmp/pk-new --dry-run
    """
    from pk.server.node.settings import resolve
    from pk.server.tier.restore import Wishes

    flags: dict[str, Any] = {} if tier_url is None else {"tier_url": tier_url}
    resolved = resolve(toml_file(config), os.environ, flags)
    if not resolved.server["tier_url"]:
        raise errors.InvalidOption("give --tier-url, or a --config that has it", option="tier_url")
    if join and fence:
        raise errors.InvalidOption("--join goes on with a restore, --fence ends it", option="join")
    wishes = Wishes(
        cluster_id, new_cluster_id, _ids(brokers), dry_run=dry_run, fence=fence, join=join
    )
    report = restored(dir or resolved.dirs, resolved, wishes, _progress)
    if as_json:
        say(asdict(report))
        return
    with quiet_end():
        _show(report)


def restored(
    dirs: Sequence[str], resolved: Resolved, wishes: Wishes, say_step: Callable[[str], None]
) -> RestoreReport:
    """Restore on this machine."""

    async def run() -> RestoreReport:
        from pk.server.tier.restore import Restore
        from pk.tiering.shell import RealTier
        from pk.wire.socket_network import PkNetwork
        from pk.world import World

        clock, network = SystemClock(), PkNetwork(lambda _where, _bug: None)
        new_id = lambda: str(uuid.uuid4())  # noqa: E731, TID251 - a shell
        world = World(clock, network, random.Random(), new_id)
        real = RealTier(resolved.server, clock)
        work = Restore(real.store, real.tables, world, dirs, resolved, wishes, say_step)
        try:
            return await work.run()
        finally:
            await network.close()
            await real.close()

    return asyncio.run(run())


def _ids(text: str) -> tuple[int, ...]:
    parts = [each.strip() for each in text.split(",") if each.strip()]
    if not all(each.isdecimal() for each in parts):
        raise errors.InvalidOption(
            f"--brokers takes ids like 1,2,3, not {text!r}", option="brokers"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(report: RestoreReport) -> None:
    print(f"cluster {report.source}, from {report.copy}")
    for address in report.alive:
        print(f"WARNING: a broker of this cluster answers at {address}")
    rows = [
        [
            each.topic,
            each.partitions,
            each.rows if each.has_table else "no table: begins empty, with a new id",
            _ends(each.table_ends),
        ]
        for each in report.topics
    ]
    table(["topic", "partitions", "rows in the table", "lost from, by partition"], rows)
    print(
        "Lost: records that were acknowledged and are not in a table, open transactions, and the "
        "memory of producers and jobs, which recognises repetitions"
    )
    made = report.formatted
    if made is None:
        print("Nothing was changed.")
        return
    print(
        f"cluster {report.cluster_id} (generation {report.generation}): topics with a table go on "
        f"at offset {report.first_offset}"
    )
    print(
        f"formatted {', '.join(made.made)} for node {made.node_id}. Start it with cluster_id "
        f"{report.cluster_id}, and other nodes after `pk tier restore --join`"
    )


def _ends(ends: tuple[int, ...]) -> str:
    shown = " ".join(map(str, ends[:SHOWN_PARTITIONS]))
    return shown + (" …" if len(ends) > SHOWN_PARTITIONS else "")
