"""`TableBatchCommitter`: ends one batch together with a Delta table (X11)."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pk import errors
from pk.client.batch_committer import BatchCommitter
from pk.client.participant import BatchOfRun, TableBatchCalls
from pk.client.table_driver import AwaitedBatch, DecidingTable, JobState
from pk.types import RowSums

T = TypeVar("T")


class TableBatchCommitter(BatchCommitter):
    """The driver's requests about one batch; see `BatchCommitter`."""

    def __init__(self, bootstrap: str | Iterable[str], batch: BatchOfRun, **options: Any) -> None:
        super().__init__(bootstrap, batch, **options)
        world, attempt_ms = self._thread.world, self._options["request_timeout_ms"]
        self._table_calls = TableBatchCalls(world, self._cluster, batch, attempt_ms)

    def job(self) -> JobState:
        """Return the highest committed batch of the job (-1 = none), and its prepared batch."""
        return self._ask(self._table_calls.job)

    def prepare(
        self,
        participants: Sequence[tuple[int, int]],
        sums: Mapping[str, RowSums],
        table: DecidingTable,
        *,
        accept_mismatch: bool = False,
    ) -> AwaitedBatch | None:
        """Prepare the named participants; None if the batch is committed already.

        Raises what `commit` raises.
        """
        return self._ask(
            lambda timeout_ms: self._table_calls.prepare(
                participants, sums, table, timeout_ms, accept_mismatch=accept_mismatch
            )
        )

    def decide(self, awaited: AwaitedBatch, *, commit: bool) -> str:
        """End a prepared batch by what its table has; return the coordinator's warning, or "".

        Raises `InvalidTxnState` if the batch does not wait in this transaction any more.
        """
        return self._ask(
            lambda timeout_ms: self._table_calls.decide(awaited, timeout_ms, commit=commit)
        )

    def _ask(self, call: Callable[[int], Coroutine[Any, Any, T]]) -> T:
        if self._closed:
            raise errors.ClosedError("the driver's connection was closed")
        seconds = self._seconds(None)
        return self._thread.run(call(max(1, int(seconds * 1000))), seconds)
