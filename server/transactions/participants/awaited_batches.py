"""The prepared batches of one coordinator partition that wait for their tables: soft state (X11).

A prepared batch holds back the last stable offset of its partitions until it is decided.  This
module only tells which ones have waited for too long; it ends none.

Times: `now_ms` is monotonic; `since_ms` and `wall_ms` are of the wall clock.

Invariants
  H1  A batch is late `prepared_max_ms` after it was prepared, by the wall clock, or by the
      monotonic clock since this coordinator has it.
  H2  A late batch is reported at most once in REPEAT_MS.
"""

from __future__ import annotations

from dataclasses import dataclass

from pk.server.transactions.commands import BatchAwaits

REPEAT_MS = 60_000


@dataclass(slots=True)
class _Awaited:
    event: BatchAwaits
    since_ms: int
    said_ms: int | None = None


class AwaitedBatches:
    """The batches that wait for a table, by job.

    longest_ms: prepared_max_ms
    """

    def __init__(self, longest_ms: int) -> None:
        self._longest_ms = longest_ms
        self._batches: dict[str, _Awaited] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def clear(self) -> None:
        """Forget every batch, before the prepared ones are taken up again."""
        self._batches.clear()

    def began(self, event: BatchAwaits, now_ms: int) -> None:
        """Note a prepared batch; one that is known goes on."""
        known = self._batches.get(event.job)
        if known is None or known.event.transaction != event.transaction:
            self._batches[event.job] = _Awaited(event, now_ms)

    def ended(self, job: str, transaction: int) -> None:
        """Drop a batch that was decided."""
        known = self._batches.get(job)
        if known is not None and known.event.transaction == transaction:
            del self._batches[job]

    def late(self, wall_ms: int, now_ms: int) -> list[BatchAwaits]:
        """Return the late batches that are to be reported now (H1, H2)."""
        found = []
        for each in self._batches.values():
            waited_ms = max(wall_ms - each.event.since_ms, now_ms - each.since_ms)
            said = each.said_ms is not None and now_ms - each.said_ms < REPEAT_MS
            if waited_ms > self._longest_ms and not said:
                each.said_ms = now_ms
                found.append(each.event)
        return found
