"""`pk tier restore-offsets`: the committed offsets of a lost cluster for the restored one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pk import errors
from pk.cli.common import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    BootstrapOption,
    TimeoutMs,
    countdown,
    opened,
    quiet_end,
    say,
    table,
    toml_file,
)
from pk.clock import SystemClock
from pk.types import PartitionKey, TopicPartition

if TYPE_CHECKING:
    from pk.server.node.settings import Resolved
    from pk.tiering.offset_files import StoredGroup

PUT_BACK = "put back"
KEPT = "kept: the group has committed since"
GONE = "left out: no such topic id"
QUERY = "left out: a query has its checkpoint"


@dataclass(slots=True, frozen=True)
class RestoredOffset:
    """What becomes of one committed offset of the lost cluster."""

    group: str
    topic: str
    partition: int
    offset: int
    outcome: str


def planned(
    group: StoredGroup,
    partitions: Mapping[PartitionKey, str],
    committed: Mapping[TopicPartition, int],
) -> Iterator[RestoredOffset]:
    """Yield what becomes of the offsets of a group.

    partitions: those of the restored cluster, with the names of their topics
    committed: what the group has committed there
    """
    for key, stored in sorted(group.offsets.items()):
        topic = partitions.get(key, "")
        outcome = PUT_BACK
        if group.query_run:
            outcome = QUERY
        elif not topic:
            outcome = GONE
        elif TopicPartition(topic, key.partition) in committed:
            outcome = KEPT
        name = topic or group.topics.get(key.topic_id) or key.topic_id
        yield RestoredOffset(group.group_id, name, key.partition, stored.offset, outcome)


def restore_offsets(
    cluster_id: Annotated[str, typer.Option(help="of the lost cluster")],
    tier_url: Annotated[
        str | None, typer.Option(help="its tier; default: that of --config")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file of a node")] = None,
    accept_older: Annotated[
        bool, typer.Option("--accept-older", help="if the newest copy is damaged, take the last")
    ] = False,
    execute: Annotated[
        bool, typer.Option("--execute", help="commit the offsets; without it, show them only")
    ] = False,
    bootstrap: BootstrapOption = DEFAULT_BOOTSTRAP,
    timeout_ms: TimeoutMs = 300_000,
    as_json: AsJson = False,
) -> None:
    """Commit the stored offsets of a lost cluster's groups to the cluster restored from it.

    An offset that a group has committed since then stays. Groups must have no members. What a
    group committed after the last copy is not there: it reads some records again.

    Example: pk tier restore-offsets --cluster-id LOST --tier-url file:///tmp/pk-tier --execute
    """
    from pk.client.admin import AdminClient
    from pk.server.node.settings import resolve

    flags: dict[str, Any] = {} if tier_url is None else {"tier_url": tier_url}
    resolved = resolve(toml_file(config), os.environ, flags)
    if not resolved.server["tier_url"]:
        raise errors.InvalidOption("give --tier-url, or a --config that has it", option="tier_url")
    groups = asyncio.run(_stored(resolved, cluster_id, accept_older=accept_older))
    left_s = countdown(timeout_ms)
    rows: list[RestoredOffset] = []
    with quiet_end(), opened(AdminClient(bootstrap), bootstrap) as admin:
        partitions = {
            PartitionKey(each.topic_id, each.partition): each.topic
            for each in admin.describe_topics(timeout_s=left_s())
        }
        for group in groups:
            committed = admin.group_offsets(group.group_id, timeout_s=left_s())
            found = list(planned(group, partitions, committed))
            rows += found
            wanted = {
                TopicPartition(each.topic, each.partition): each.offset
                for each in found
                if each.outcome == PUT_BACK
            }
            if execute and wanted:
                admin.alter_group_offsets(group.group_id, wanted, timeout_s=left_s())
    if as_json:
        say({"executed": execute, "offsets": [asdict(each) for each in rows]})
        return
    with quiet_end():
        _show(rows, execute=execute)


async def _stored(
    resolved: Resolved, cluster_id: str, *, accept_older: bool
) -> Iterable[StoredGroup]:
    """Return the groups in the store.  Raises `NothingToRestore` if it has none."""
    from pk.tiering.fsspec_store import open_store
    from pk.tiering.store_settings import StoreSettings
    from pk.tiering.stored_offsets import read_offsets

    store = open_store(StoreSettings.of(resolved.server), SystemClock())
    try:
        copies = await read_offsets(store, cluster_id, accept_older=accept_older)
    finally:
        await store.close()
    if not copies:
        raise errors.NothingToRestore(
            f"{store.url} has no copy of committed offsets of a cluster {cluster_id!r}"
        )
    return [group for copy in copies.values() for group in copy.groups.values()]


def _show(rows: list[RestoredOffset], *, execute: bool) -> None:
    table(
        ["group", "topic", "partition", "offset", ""],
        [[each.group, each.topic, each.partition, each.offset, each.outcome] for each in rows],
    )
    if not execute:
        typer.echo("nothing was changed; --execute commits these offsets", err=True)
