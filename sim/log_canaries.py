"""The code that breaks the rules about files and damage of a log for its canaries (canaries.py)."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any
from unittest.mock import patch

from pk import errors
from pk.client.fetcher import Fetcher
from pk.log import creation, identity, loading, partition_log
from pk.log.writing import LocalLogWriter
from pk.sim.disk import SimStorage


def what_was_not_renamed_is_forgotten(stack: ExitStack) -> None:
    """Forget segments whose rename failed, and disable the code that reads around the hole.

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


def directory_out_of_the_way(stack: ExitStack) -> None:
    """Rename a directory without identity and begin its partition empty, as before rule L15."""

    def read_only(storage: Any, path: str, _second: Any) -> Any:
        with suppress(errors.LogUnidentified):
            return identity.read(storage, path)
        return None

    in_place = creation._in_place

    def careless(site: Any, new: Any) -> bool:
        try:
            return in_place(site, new)
        except errors.LogUnidentified:
            site.storage.rename(site.path(new), site.pending_delete(site.path(new)))
            return False

    stack.enter_context(patch.object(identity, "read_or_restore", read_only))
    stack.enter_context(patch.object(creation, "_in_place", careless))


def lack_of_descriptors_fails_the_directory(stack: ExitStack) -> None:
    """Let a file that finds no free descriptor count as a failure of its disk.

    The simulated disk stands for `RealStorage`, whose `fail` decides this (log/storage D2).
    """
    whole = SimStorage._faulty

    def failing(self: SimStorage, operation: str, path: str) -> None:
        try:
            whole(self, operation, path)
        except errors.StorageFull as full:
            self.failed = full
            raise errors.StorageFailed(full.message, directory=self.root) from full

    stack.enter_context(patch.object(SimStorage, "_faulty", failing))
