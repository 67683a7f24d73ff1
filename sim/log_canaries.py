"""The code that breaks the rules about files and damage of a log for its canaries (canaries.py)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from pk.client.fetcher import Fetcher
from pk.log import loading, partition_log
from pk.log.writing import LocalLogWriter


def what_was_not_renamed_is_forgotten(stack: ExitStack) -> None:
    """Forget segments whose rename failed, and disable what reads around the hole this leaves.

    A later drop removes the segments behind a segment that kept its name (log/writing W2).  Salvage
    (log/loading O10) would read around this hole at the next opening.  Without a tier the hole lies
    below every reader's position, because log_start is durable before segments are dropped.
    """
    rename = LocalLogWriter._rename_pending_delete

    def forgetful(self: LocalLogWriter) -> Any:
        try:
            return rename(self)
        finally:
            self._pending_delete.clear()

    stack.enter_context(patch.object(LocalLogWriter, "_rename_pending_delete", forgetful))
    stack.enter_context(patch.object(loading, "damaged_ranges", lambda *_, **_more: {}))


def damaged_range_not_told(stack: ExitStack) -> None:
    """Let a reader go on behind a damaged range without a `DataLoss` error."""

    def silent(self: Fetcher, slot: Any, error: Any) -> None:
        slot.next = int(error.details["next_offset"])
        slot.attempts = 0

    stack.enter_context(patch.object(Fetcher, "_lost", silent))


def missing_front_not_compared(stack: ExitStack) -> None:
    """Open a log without comparing its first segment with the checkpoint of its local start."""
    stack.enter_context(patch.object(partition_log, "missing_in_front", lambda *_: None))
