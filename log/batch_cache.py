"""What the logs of a directory were given last, in memory: a reader at a log's end needs no disk.

Sans-IO, on the loop.  Small appends only.  Of those a reader waits for every one, and handing each
to a thread and back costs more than reading it; a large one pays for its trip, and its bytes are
better read from the page cache than held twice.

Invariants
  K1  what is held, objects included, is at most `bytes_max`, and LOG_BYTES_MAX of one log: of a log
      the oldest batch goes first, of the logs the one that was appended to longest ago
  K2  what is held of a log is one run of whole batches, as they lie on the disk, up to its written
      end: it enters when its write is completed, an append that is not kept ends the run, and a log
      that was cut back (`cuts`) has none
  K3  it is held in memory of its own: a view would keep the whole frame that it came in
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from pk import limits
from pk.log.plan import Appended, AppendOp, Read, WritePlan
from pk.types import Epoch, Offset

#: Larger appends are not kept; copying this much takes 5 µs, and the allocator has it at hand.
APPEND_BYTES_MAX = 32 * limits.KIB
LOG_BYTES_MAX = 128 * limits.KIB
BYTES_MAX = 16 * limits.MIB
#: What a batch takes beside its bytes: the objects that hold it, about.
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
    """The ends of the logs of one directory.  A log is named by itself, or any key that lasts."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._runs: OrderedDict[Any, _Run] = OrderedDict()

    def keep(self, log: Any, cuts: int, plan: WritePlan) -> None:
        """`plan` of `log` was completed; `cuts` counts how often the log was cut back."""
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
        """Whole batches from the one that holds `offset` on, below `bound` and of `max_bytes`, the
        first in any case with `min_one`; None = not here, the log must be asked.
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
    """The plan's batches, each in memory of its own (K3)."""
    raw = b"".join([part for op in plan.ops if isinstance(op, AppendOp) for part in op.buffers])
    assert len(raw) == plan.size, (len(raw), plan.size)
    found, at = [], 0
    for each in appended:
        data = raw if len(appended) == 1 else raw[at : at + each.size]
        found.append(_Batch(each.last_offset + 1, each.base_offset, each.leader_epoch, data))
        at += each.size
    return found
