"""The canaries of batches that log and table get together: rule X11 broken, and what notices it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from pk import errors
from pk.client import table_driver
from pk.server.tier.resolver import BatchResolver
from pk.server.transactions.participants import preparations
from pk.sim.canary import SAFE, THREE, Canary
from pk.wire import pk_pb2 as wire

DIFFER = "V34 V35"


def _absent(stack: ExitStack) -> None:
    """Let the resolver abort a batch that the table has."""
    stack.enter_context(patch("pk.server.tier.resolver.has_batch", lambda *_: False))


def _unread_is_absent(stack: ExitStack) -> None:
    """Let the resolver take a table that cannot be read for one without the batch."""
    read = BatchResolver._read

    async def trusting(self: BatchResolver, prepared: Any) -> bool:
        try:
            return await read(self, prepared)
        except errors.TierUnavailable:
            return False

    stack.enter_context(patch.object(BatchResolver, "_read", trusting))


def _any_transaction(stack: ExitStack) -> None:
    """Let evidence end a batch that was prepared again since the table was read."""
    named = preparations._is_named

    def loosely(known: Any, asked: Any, evidence: Any) -> bool:
        if known is not None:
            evidence = wire.TableEvidence.FromString(evidence.SerializeToString())
            evidence.transaction = known.transaction
        return named(known, asked, evidence)

    stack.enter_context(patch.object(preparations, "_is_named", loosely))


def _written_again(stack: ExitStack) -> None:
    """Let a driver that finds its batch in log and table write it to the table again.

    Delta cannot skip this commit: its application has another name.
    """
    steps = table_driver.steps

    def again(table: table_driver.DecidingTable) -> table_driver.Steps:
        already = yield from steps(table)
        if already:
            yield table_driver.WriteTable(f"{table.app} again", table.version)
        return already

    stack.enter_context(patch.object(table_driver, "steps", again))


TOGETHER_CANARIES: dict[str, Canary] = {
    "a resolver that aborts a batch of the table": Canary(
        "X11", _absent, DIFFER, SAFE, (),
        nodes=THREE, copies=3, together_jobs=2, fault_ms=8_000, pace_ms=(10, 60),
    ),
    "a resolver that aborts a batch of a table that it cannot read": Canary(
        "X11", _unread_is_absent, DIFFER, SAFE, ("lake_away",),
        nodes=THREE, copies=3, together_jobs=2, fault_ms=8_000, fault_every_ms=(500, 2_000),
        pace_ms=(10, 60),
    ),
    # An abort comes late or twice, and a driver has prepared the batch again meanwhile.
    "evidence about an earlier transaction": Canary(
        "X11", _any_transaction, DIFFER, SAFE, ("late_control", "lake_slow", "lake_late"),
        nodes=THREE, copies=3, together_jobs=4, fault_ms=12_000, fault_every_ms=(60, 250),
        pace_ms=(10, 60),
    ),
    "a returning driver that writes to the table again": Canary(
        "X11", _written_again, DIFFER, SAFE, (),
        nodes=THREE, copies=3, together_jobs=2, fault_ms=8_000, pace_ms=(10, 60),
    ),
}  # fmt: skip
