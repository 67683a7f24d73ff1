"""The futures of `send` and `send_batch`: small views of a record set."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Generator
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

    def __await__(self) -> Generator[Any, None, T]:
        """Wait in a coroutine of any event loop; its result and errors are those of `result`.

        A coroutine that is cancelled stops waiting; the record is sent all the same.
        """
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[T] = loop.create_future()

        def settle() -> None:
            if not waiting.done():
                outcome = self._records.outcome(self._index)
                if isinstance(outcome, errors.PkError):
                    waiting.set_exception(outcome)
                else:
                    waiting.set_result(cast("T", outcome))

        def known(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the caller's loop has ended
                loop.call_soon_threadsafe(settle)

        self.add_done_callback(known)
        return waiting.__await__()

    def as_concurrent(self) -> concurrent.futures.Future[T]:
        """Return a future of concurrent.futures with the same outcome, for `wait`, `as_completed`
        and `asyncio.wrap_future`.  It cannot be cancelled.
        """
        made: concurrent.futures.Future[T] = concurrent.futures.Future()
        made.set_running_or_notify_cancel()

        def known(_: object) -> None:
            outcome = self._records.outcome(self._index)
            if isinstance(outcome, errors.PkError):
                made.set_exception(outcome)
            else:
                made.set_result(cast("T", outcome))

        self.add_done_callback(known)
        return made

    @property
    def _condition(self) -> Any:
        """Say what to give to `concurrent.futures.wait` and `as_completed`: they begin here."""
        raise TypeError("give future.as_concurrent() to concurrent.futures, not the future of send")

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
