"""The most recent batches of the logs of a directory, in memory, so that a reader at a log's end
needs no disk.

Sans-IO, on the loop.  Only small appends are kept.  Readers wait for each of these, and passing one
to a thread and back costs more than reading it.  For a large append that cost does not matter, and
reading it from the page cache is better than holding its bytes twice.

Invariants
  K1  The cache holds at most `bytes_max`, objects included, and at most LOG_BYTES_MAX of one log.
      Within a log the oldest batch is removed first; among the logs, the one whose last append is
      the oldest is removed first.
  K2  Of each log it holds one run of whole batches, as stored on the disk, up to the written end.
      A batch is added when its write is completed.  An append that is not kept ends the run, and a
      log that was cut back, or whose files a cleaning replaced (`cuts` counts both), has no run: a
      reader that mixes it with the files would miss the tombstone of a record that it got.
  K3  The batches are copied into memory of their own.  A view would keep the whole network frame
      that they came in.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from pk import limits
from pk.log.plan import Appended, AppendOp, Read, WritePlan
from pk.types import Epoch, Offset

#: Larger appends are not kept.  Copying this many bytes takes 5 µs, and the allocator has blocks of
#: this size ready.
APPEND_BYTES_MAX = 32 * limits.KIB
LOG_BYTES_MAX = 128 * limits.KIB
BYTES_MAX = 16 * limits.MIB
#: The approximate memory of the objects that hold a batch, beside its bytes.
BATCH_OVERHEAD_BYTES = 256


class _Batch(NamedTuple):
    next_offset: Offset
    base_offset: Offset
    leader_epoch: Epoch
    data: bytes

    @property
    def cost(self) -> int:
        return len(self.data) + BATCH_OVERHEAD_BYTES


class _Run:
    """The last batches of one log (K2)."""

    __slots__ = ("batches", "cuts", "end", "size")

    def __init__(self, cuts: int) -> None:
        self.cuts = cuts
        self.batches: list[_Batch] = []
        self.end: Offset = 0
        self.size = 0


class BatchCache:
    """The ends of the logs of one directory.  The key of a log is the log itself or any lasting
    key.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._runs: OrderedDict[Any, _Run] = OrderedDict()

    def keep(self, log: Any, cuts: int, plan: WritePlan) -> None:
        """Add the batches of a completed `plan` of `log`; `cuts` counts how often the log was cut
        back.
        """
        if not plan.appended:
            return
        if plan.size + BATCH_OVERHEAD_BYTES * len(plan.appended) > APPEND_BYTES_MAX:
            self.forget(log)
            return
        run = self._runs.get(log)
        if run is None or run.cuts != cuts or run.end != plan.start:
            self.forget(log)
            run = self._runs[log] = _Run(cuts)
        added = _batches(plan.appended, plan)
        run.batches += added
        run.end = plan.end
        self._grow(run, sum(batch.cost for batch in added))
        gone = 0
        while run.size > LOG_BYTES_MAX:
            self._grow(run, -run.batches[gone].cost)
            gone += 1
        del run.batches[:gone]
        self._runs.move_to_end(log)
        while self.bytes > self._bytes_max:
            self.forget(next(iter(self._runs)))

    def _grow(self, run: _Run, size: int) -> None:
        run.size += size
        self.bytes += size

    def forget(self, log: Any) -> None:
        run = self._runs.pop(log, None)
        if run is not None:
            self.bytes -= run.size

    def read(
        self, log: Any, cuts: int, offset: Offset, bound: Offset, max_bytes: int, min_one: bool
    ) -> Read | None:
        """Return whole batches from the batch that holds `offset` on, below `bound` and at
        most `max_bytes`; with `min_one` the first batch in any case.  None = not in the cache: the
        caller must read the log.
        """
        run = self._runs.get(log)
        if run is None or run.cuts != cuts or offset < run.batches[0].base_offset:
            return None
        first = end = bisect_right(run.batches, offset, key=lambda batch: batch.next_offset)
        size = 0
        for batch in run.batches[first:]:
            size += len(batch.data)
            if batch.next_offset > bound or (size > max_bytes and not (min_one and end == first)):
                break
            end += 1
        found = run.batches[first:end]
        if not found:
            return None
        data = found[0].data if len(found) == 1 else b"".join(batch.data for batch in found)
        last = found[-1]
        return Read(data, last.next_offset, found[0].base_offset, last.leader_epoch)


def _batches(appended: Sequence[Appended], plan: WritePlan) -> list[_Batch]:
    """Return the plan's batches, each in memory of its own (K3)."""
    raw = b"".join([part for op in plan.ops if isinstance(op, AppendOp) for part in op.buffers])
    assert len(raw) == plan.size, (len(raw), plan.size)
    found, at = [], 0
    for each in appended:
        data = raw if len(appended) == 1 else raw[at : at + each.size]
        found.append(_Batch(each.last_offset + 1, each.base_offset, each.leader_epoch, data))
        at += each.size
    return found
