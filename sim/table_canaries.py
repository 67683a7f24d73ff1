"""The canaries of maintained tables: rules C3, C5 and C6 broken, and what notices it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from pk.sim.canary import HOT, Canary
from pk.sparkconnector.maintenance import snapshot_plan
from pk.tiering import plan as planning
from pk.tiering import refill, rewrites

TABLES = "V28 V30 V31"


def _nothing(*_: Any) -> None:
    """Check nothing."""


def _gone_files_replaced(stack: ExitStack) -> None:
    """Take a hand-over whose files are gone, for those that are still there."""
    checked, take = planning._checked, planning._take

    def without_the_gone(draft: Any, item: Any, result: Any) -> None:
        change = item.change
        if change.lease_token:
            there = [each for each in change.removes if draft.has(each.path)]
            del change.removes[:]
            change.removes.extend(there)
        take(draft, item, result)

    def unchecked(draft: Any, change: Any) -> Any:
        if not change.lease_token:
            return checked(draft, change)
        with (
            patch.object(rewrites, "check", _nothing),
            patch.object(rewrites, "check_starts", _nothing),
            patch.object(planning, "_check_numbers", _nothing),
        ):
            return checked(draft, change)

    stack.enter_context(patch.object(planning, "_take", without_the_gone))
    stack.enter_context(patch.object(planning, "_checked", unchecked))


def _old_leases_accepted(stack: ExitStack) -> None:
    """Take hand-overs under any lease of the table."""
    planned = planning.plan

    def trusting(*given: Any, lease_newest: int = 0, **more: Any) -> Any:
        return planned(*given, **more)

    stack.enter_context(patch("pk.server.handlers.tier.check_token", _nothing))
    stack.enter_context(patch("pk.tiering.owner.plan", trusting))


def _repaired_from_the_log(stack: ExitStack) -> None:
    """Repair the table of a compacted topic from the local log, with superseded rows."""
    repair = refill.repair

    async def trusting(host: Any, snapshot: Any, told: Any, copy: Any) -> int:
        told.configs["cleanup_policy"] = "delete"
        try:
            return await repair(host, snapshot, told, copy)
        finally:
            told.configs["cleanup_policy"] = "compact"

    stack.enter_context(patch.object(refill, "repair", trusting))
    stack.enter_context(patch.object(planning, "_check_refill", _nothing))


def _forgotten_tombstones_ignored(stack: ExitStack) -> None:
    """Bring a snapshot to the newest version by an increment, whatever compaction has removed."""
    whole = snapshot_plan.why_whole

    def trusting(table: Any, before: Any) -> str:
        why = whole(table, before)
        return "" if why.startswith("compaction forgot") or why.endswith("are new") else why

    stack.enter_context(patch.object(snapshot_plan, "why_whole", trusting))


TABLE_CANARIES = {
    "a job commits on files that are gone": Canary(
        "C5",
        _gone_files_replaced,
        f"{TABLES} liveness",
        HOT,
        ("optimize",),
        maintained={},
        fault_ms=10_000,
        pace_ms=(100, 500),
    ),
    "a hand-over under an older lease": Canary(
        "C5",
        _old_leases_accepted,
        "V32",
        HOT,
        (),
        maintained={},
        fault_ms=15_000,
        pace_ms=(100, 500),
    ),
    "a repair that brings back compacted rows": Canary(
        "C6",
        _repaired_from_the_log,
        f"{TABLES} liveness",
        HOT,
        ("delete_rows",),
        maintained={"local_retention_bytes": "-1"},
        fault_ms=12_000,
        pace_ms=(100, 500),
    ),
    "a snapshot behind forgotten tombstones": Canary(
        "C3",
        _forgotten_tombstones_ignored,
        TABLES,
        HOT,
        (),
        maintained={"delete_retention_ms": "0"},
        fault_ms=25_000,
        pace_ms=(100, 500),
    ),
}
