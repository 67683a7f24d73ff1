"""The futures of `send` and `send_batch`: small views of a record set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from pk import errors
from pk.client.record_set import RecordSet
from pk.types import BatchMetadata, RecordMetadata

T = TypeVar("T")


class _Future(msgspec.Struct, Generic[T], gc=False, eq=False):
    """A future without a lock or an event of its own: `send` makes one each, so it must be
    cheap.
    """

    _records: RecordSet
    _index: int | None = None  #: index of the record; None = all records

    def done(self) -> bool:
        """Return whether the outcome is known."""
        return self._records.outcome(self._index) is not None

    def cancelled(self) -> bool:
        """Return False: a record that was sent cannot be cancelled."""
        return False

    def exception(self, timeout: float | None = None) -> errors.PkError | None:
        """Return the error, or None if all was stored; waits up to `timeout` seconds (None = no
        limit).

        Raises `TimeoutError`.
        """
        outcome = self._wait(timeout)
        return outcome if isinstance(outcome, errors.PkError) else None

    def result(self, timeout: float | None = None) -> T:
        """Return where it was stored; waits up to `timeout` seconds (None = no limit).

        Raises the error of the record, `PartlyStored` if only some records of a batch were stored,
        `TimeoutError` if the outcome is not known in time.
        """
        outcome = self._wait(timeout)
        if isinstance(outcome, errors.PkError):
            raise outcome
        return outcome

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call `callback(future)` once the outcome is known.  It runs on the sending thread, so it
        must not block.
        """
        self._records.call_when_known(self._index, lambda: callback(self))

    def _wait(self, timeout: float | None) -> T | errors.PkError:
        records, index = self._records, self._index
        outcome = records.outcome(index)
        if outcome is None:
            with records.monitor.lock:
                records.monitor.wait_for(lambda: records.outcome(index) is not None, timeout)
                outcome = records.outcome(index)
        if outcome is None:
            raise TimeoutError(f"not acknowledged within {timeout} s; it may still be")
        return cast("T | errors.PkError", outcome)


class SendFuture(_Future[RecordMetadata]):
    """The future of one record."""


class BatchFuture(_Future[list[BatchMetadata]]):
    """The future of one `send_batch`: its result has an entry for each part of the batch."""
