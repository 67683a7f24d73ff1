"""`pk topics describe`: which partitions are shown, and how.

The four states are those of kafka-topics: under-replicated, at min ISR, under min ISR, unavailable.
A partition is shown if it is in one of the states asked for, or if none is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from pk.cli.common import error_json, size_text, table

if TYPE_CHECKING:
    from pk.client.admin import ConfigEntry, OpenTransaction, PartitionDescription

_OFFSETS = ("log_start", "local_log_start", "tiered_end", "LSO", "HW", "log_end")


@dataclass(slots=True, frozen=True)
class PartitionStates:
    """The states that a command asks for."""

    under_replicated: bool = False
    at_min_isr: bool = False
    under_min_isr: bool = False
    unavailable: bool = False

    def include(self, each: PartitionDescription, min_isr: int) -> bool:
        """Return whether a partition is in one of these states, or no state is asked for."""
        spare = len(each.isr) - min_isr
        states = (
            (self.under_replicated, each.under_replicated),
            (self.at_min_isr, spare == 0),
            (self.under_min_isr, spare < 0),
            (self.unavailable, each.leader < 0),
        )
        asked = [holds for wanted, holds in states if wanted]
        return any(asked) or not asked


def chosen(
    by_name: Mapping[str, Sequence[PartitionDescription]],
    listed: Mapping[str, Sequence[ConfigEntry]],
    states: PartitionStates,
) -> dict[str, list[PartitionDescription]]:
    """Return the partitions in the states asked for, and only topics that have any."""
    kept: dict[str, list[PartitionDescription]] = {}
    for name, partitions in by_name.items():
        min_isr = int(_value(listed[name], "min_insync_replicas"))
        for each in partitions:
            if states.include(each, min_isr):
                kept.setdefault(name, []).append(each)
    return kept


def _value(entries: Sequence[ConfigEntry], name: str) -> str:
    return next((each.value for each in entries if each.name == name), "1")


def show(
    name: str,
    partitions: Sequence[PartitionDescription],
    entries: Sequence[ConfigEntry],
    all_configs: bool,
) -> None:
    """Print a topic's partitions as a table, and below it what is wrong with them."""
    shown = " ".join(f"{key}={value}" for key, value in _own(entries).items())
    head = f"{name}  {partitions[0].topic_id}  {len(partitions)} partitions"
    table(
        ["partition", "leader", "replicas", "isr", *_OFFSETS, "bytes", "tier_bytes"],
        [_row(each) for each in partitions],
        title=f"{head}  {shown}".rstrip(),
    )
    for each in partitions:
        if each.error is not None:
            typer.echo(f"partition {each.partition}: {each.error.message}")
        elif each.under_replicated:
            missing = ", ".join(str(n) for n in each.replicas if n not in each.isr)
            typer.echo(f"partition {each.partition}: under-replicated, without {missing}")
        if each.oldest_transaction is not None:
            typer.echo(f"partition {each.partition}: {_held_back(each.oldest_transaction)}")
    if all_configs:
        rows = [(entry.name, entry.value, entry.source) for entry in entries]
        table(["setting", "value", "from"], rows)


def _own(entries: Sequence[ConfigEntry]) -> dict[str, str]:
    """Return the settings that are the topic's own."""
    return {entry.name: entry.value for entry in entries if entry.source == "topic"}


def _held_back(oldest: OpenTransaction) -> str:
    began = datetime.fromtimestamp(oldest.began_ms / 1000, UTC).isoformat(timespec="seconds")
    return (
        f"producer {oldest.producer_id} (epoch {oldest.producer_epoch}) holds the last stable "
        f"offset at {oldest.first_offset}, with a transaction that is open since {began}"
    )


def _row(each: PartitionDescription) -> list[Any]:
    leader = "none" if each.leader < 0 else each.leader
    replicas, isr = (",".join(map(str, nodes)) for nodes in (each.replicas, each.isr))
    offsets = [
        each.log_start, each.local_log_start, each.tiered_end, each.last_stable_offset,
        each.high_watermark, each.log_end,
    ]  # fmt: skip
    return [
        each.partition,
        leader,
        replicas,
        isr,
        *offsets,
        size_text(each.bytes),
        size_text(each.tier_bytes),
    ]


def as_object(
    name: str,
    partitions: Sequence[PartitionDescription],
    entries: Sequence[ConfigEntry],
    all_configs: bool,
) -> dict[str, Any]:
    """Return a topic as `--json` shows it."""
    found: dict[str, Any] = {
        "name": name,
        "topic_id": partitions[0].topic_id,
        "configs": _own(entries),
        "partitions": [_object(each) for each in partitions],
    }
    if all_configs:
        found["all_configs"] = [asdict(entry) for entry in entries]
    return found


def _object(each: PartitionDescription) -> dict[str, Any]:
    item = {
        **asdict(each),
        "bytes": each.bytes,
        "under_replicated": each.under_replicated,
        "error": error_json(each.error),
    }
    del item["topic"], item["topic_id"]
    return item
