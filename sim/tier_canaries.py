"""The code that breaks rules of the tier for its canaries (canaries.py)."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq

from pk import errors
from pk.log.partition_log import PartitionLog
from pk.server.tier.client import TierClient
from pk.tiering import owner_events as owning
from pk.tiering import plan as planning
from pk.tiering.accounting import RowBalance
from pk.tiering.table import Commit
from pk.tiering.worker import TierWorker


def dropped_before_the_tier_has_it(stack: ExitStack) -> None:
    """Drop local data as soon as it is written, before the tier confirms it."""
    retention = PartitionLog.retention_plan

    async def confirm(*_: Any) -> list[str]:
        return []

    def eager(self: PartitionLog, *args: Any) -> Any:
        self.droppable_end = self.tiered_end = self.written_end
        return retention(self, *args)

    stack.enter_context(patch.object(TierClient, "confirm", confirm))
    stack.enter_context(patch.object(PartitionLog, "retention_plan", eager))


def takes_any_range(stack: ExitStack) -> None:
    """Accept a commit that does not begin at the end of the table."""
    checked = planning._checked

    def trusting(draft: Any, change: Any) -> Any:
        for counter in change.counters:
            if counter.start == counter.end:
                continue  # nothing is appended
            before = draft.partition(counter.partition)
            draft.counters[counter.partition] = before._replace(end=counter.start)
        return checked(draft, change)

    stack.enter_context(patch.object(planning, "_checked", trusting))


def tidies_up_after_a_commit(stack: ExitStack) -> None:
    """Delete the files of a commit that raised an error, though it may have succeeded."""
    on_table = TierWorker._on_table

    async def tidy(self: TierWorker, topic: Any, operation: Any) -> None:
        if not isinstance(operation, Commit):
            await on_table(self, topic, operation)
            return
        event: owning.OwnerEvent
        try:
            event = owning.Committed(await topic.table.commit(operation))
        except errors.PkError as error:
            event = owning.Failed(error)
            for new in operation.adds:
                with suppress(errors.PkError):
                    await self.store.delete(f"{topic.home}/{new.file.path}")
        self._step_owner(topic, event)

    stack.enter_context(patch.object(TierWorker, "_on_table", tidy))


def pages_not_verified(stack: ExitStack) -> None:
    """Read pages without the verification of their checksums."""
    opened, off = pq.ParquetFile, {"page_checksum_verification": False}

    def trusting(*given: Any, **more: Any) -> Any:
        return opened(*given, **more | off)

    stack.enter_context(patch("pk.tiering.row_groups.pq.ParquetFile", trusting))


def delta_log_not_verified(stack: ExitStack) -> None:
    """Load a version without comparing it with the facts in its commits."""
    for name in ("check_names", "check_sums", "check_counters"):
        stack.enter_context(patch(f"pk.tiering.log_check.{name}", lambda *_: None))


def rows_not_counted(stack: ExitStack) -> None:
    """Load a version without comparing numRecords of its files with the counters."""
    all_there = RowBalance(missing=0, first=0, below=0, spare=0)
    stack.enter_context(patch("pk.tiering.accounting.account", lambda *_: all_there))
