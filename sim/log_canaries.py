"""How the canaries of what a disk keeps, and of what rots on it, are broken (canaries.py)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from pk.client.fetcher import Fetcher
from pk.log import loading
from pk.log.writing import LocalLogWriter


def what_was_not_renamed_is_forgotten(stack: ExitStack) -> None:
    """A later drop leaves a hole behind the segment that kept its name (log/writing W2), and
    nothing reads around it at the next opening.

    Salvage (log/loading O10) would: log_start is durable before segments go, so that the hole of a
    topic without a tier lies below every reader.
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
    """A reader goes on behind a damaged range without `DataLoss`."""

    def silent(self: Fetcher, slot: Any, error: Any) -> None:
        slot.next = int(error.details["next_offset"])
        slot.attempts = 0

    stack.enter_context(patch.object(Fetcher, "_lost", silent))
