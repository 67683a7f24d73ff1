"""Appends the markers that end transactions to a partition that this broker leads (rules X1, X5).

World-generic, on the loop.

Invariants
  M1  The markers of one call that the log does not have yet are one control batch.  A marker that
      the log has is not appended again (log/validate: n).
  M2  A marker counts as written once it, or the earlier one that it repeats, is below the high
      watermark of the leader epoch in which the call was made (replica/partition H2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pk import errors
from pk.log.control_rows import Marker, encode_markers
from pk.log.plan import Now
from pk.log.validate import MarkerResult
from pk.server.replica.delayed_produce import DelayedProduce
from pk.server.replica.leader import ACKS_ALL
from pk.server.replica.partition import Partition
from pk.types import Epoch

#: Most markers of one call, hence rows of one control batch.
MARKERS_MAX = 10_000

Refusals = Sequence[errors.PkError | None]


def write_markers(
    partition: Partition,
    markers: Sequence[Marker],
    epoch: Epoch,
    now: Now,
    deadline_ms: int,
) -> asyncio.Future[Refusals]:
    """Append markers; the future is done when they are committed (M2).

    epoch: the leader epoch that the caller believes to be current; -1 = whichever is
    deadline_ms: monotonic time at which the future fails with `RequestTimedOut`

    The result is parallel to `markers`: None = written, or `InvalidProducerEpoch` for a marker of a
    former coordinator, which is not written.  The future fails, for all of them, with an error of
    the partition: `NotLeaderOrFollower`, `NotEnoughReplicas`, `ThrottledError`, `StorageFull`,
    `RequestTimedOut` and the like.  They are retriable: some of the markers may be written, and the
    caller asks the leader again.  Raises nothing.
    """
    written: asyncio.Future[Refusals] = asyncio.get_running_loop().create_future()
    refusals: Refusals = ()

    def answer(_: DelayedProduce, error: errors.PkError | None) -> None:
        if written.done():
            return
        if error is None:
            written.set_result(refusals)
        else:
            written.set_exception(error)

    delayed = DelayedProduce(answer, 0, 0, ACKS_ALL, deadline_ms)
    try:
        if len(markers) > MARKERS_MAX:
            raise errors.InvalidRequest(
                f"{len(markers)} markers in one call; {MARKERS_MAX} are allowed"
            )
        leader = partition.serving(epoch)
        checked = partition.log.check_markers(markers)
        refusals = [each if isinstance(each, errors.PkError) else None for each in checked]
        fresh = [
            marker
            for marker, each in zip(markers, checked, strict=True)
            if each is MarkerResult.APPEND
        ]
        if fresh:
            parts = encode_markers(fresh, now.wall_ms, leader.leader_epoch)
            partition.append_own(b"".join(parts), epoch, now, delayed)
            if partition.marker_listener is not None:
                partition.marker_listener.markers_appended(delayed.base_offset, fresh)
        elif MarkerResult.DONE in checked:
            partition.wait_for_decided(epoch, delayed)
        else:
            delayed.answer(None)
    except errors.PkError as refusal:
        delayed.answer(refusal)
    return written
