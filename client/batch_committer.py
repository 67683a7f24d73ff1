"""The driver's requests about a batch: commit the named participants, or abort it (X5, X7, X9)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from pk import errors
from pk.client import arguments, connection
from pk.client.network_client import NetworkClient
from pk.client.options import network_options, producer_options
from pk.client.participant import BatchCalls, BatchOfRun
from pk.types import RowSums


class BatchCommitter:
    """Ends one batch.  options: as for `Producer`; those that concern records have no effect.

    >>> driver = BatchCommitter("localhost:9092", BatchOfRun("job", "query", "run", 7))
    >>> driver.commit([participant], {topic_id: sums})
    False
    """

    def __init__(self, bootstrap: str | Iterable[str], batch: BatchOfRun, **options: Any) -> None:
        self._options, _ = producer_options(options)
        self._closed = False
        with connection.opening() as self._thread:
            world = self._thread.world
            self._cluster = NetworkClient(world, bootstrap, **network_options(self._options))
            attempt_ms: int = self._options["request_timeout_ms"]
            self._calls = BatchCalls(world, self._cluster, batch, attempt_ms)

    def commit(
        self,
        participants: Sequence[tuple[int, int]],
        sums: Mapping[str, RowSums],
        *,
        accept_mismatch: bool = False,
        timeout_s: float | None = None,
    ) -> bool:
        """Commit the named participants of the batch, and abort its others.

        participants: (producer id, epoch) of each.  sums: by topic id, of all named participants;
        or of the whole batch if it is committed already.  accept_mismatch: take a committed batch
        with other sums for the same, if it is the newest one.  timeout_s: seconds; None =
        max_block_ms.

        Returns whether the batch was committed before.  Raises `ReplayDiffers`, `InvalidTxnState`
        (nothing was committed), `TransactionAborted`, `TransactionTimedOut`, `ProducerFenced`,
        `RequestTimedOut` (call it again: the decision is made once).
        """
        seconds = self._seconds(timeout_s)
        work = self._calls.commit(
            participants, sums, max(1, int(seconds * 1000)), accept_mismatch=accept_mismatch
        )
        return self._run(work, seconds)

    def abort(self, timeout_s: float | None = None) -> bool:
        """Abort the batch if it is open in this run; returns whether it is committed instead."""
        seconds = self._seconds(timeout_s)
        return self._run(self._calls.abort(max(1, int(seconds * 1000))), seconds)

    def _run(self, work: Any, seconds: float) -> bool:
        if self._closed:
            work.close()
            raise errors.ClosedError("the driver's connection was closed")
        return bool(self._thread.run(work, seconds))

    def _seconds(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return max(1, int(self._options["max_block_ms"])) / 1000
        return arguments.seconds(timeout_s)

    def close(self) -> None:
        """Disconnect.  An open batch stays open until another call or its lease ends it."""
        if not self._closed:
            self._closed = True
            connection.end(self, self._thread, self._cluster.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
