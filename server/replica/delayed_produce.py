"""One entry of a produce request between its append and its answer.

Kafka's `DelayedProduce`.  The partition answers an entry exactly once (replica/partition H1).
"""

from __future__ import annotations

from collections.abc import Callable

from pk import errors
from pk.server.replica.purgatory import LEAVES_OPEN, Parked
from pk.server.replica.watchers import Credit
from pk.types import NONE, Epoch, Offset


class ProduceTiming:
    """When an entry passed from one stage to the next, in seconds of the loop's time."""

    __slots__ = ("_now_s", "appended_s", "received_s", "written_s")

    def __init__(self, now_s: Callable[[], float], received_s: float) -> None:
        self._now_s = now_s
        self.received_s = received_s
        self.appended_s: float | None = None
        self.written_s: float | None = None

    def appended(self) -> None:
        """Note that the batch was decided and waits for its write."""
        self.appended_s = self._now_s()

    def written(self) -> None:
        """Note that the batch is written here."""
        self.written_s = self._now_s()


class DelayedProduce:
    """An entry of a produce request whose reply was not sent yet."""

    __slots__ = (
        "acks",
        "append_time_ms",
        "base_offset",
        "correlation_id",
        "credit",
        "deadline_ms",
        "index",
        "last_offset",
        "leader_epoch",
        "log_start",
        "parked",
        "sink",
        "size",
        "timing",
    )

    def __init__(
        self,
        sink: Callable[[DelayedProduce, errors.PkError | None], None] | None,
        correlation_id: int,
        index: int,
        acks: int,
        deadline_ms: int,
        credit: Credit | None = None,
    ) -> None:
        self.credit = credit  #: of the fetch stream on which the batches came; None = a client's
        self.sink = sink  #: receives the reply; None = no client waits, the entry only counts bytes
        self.correlation_id = correlation_id
        self.index = index
        self.acks = acks
        self.deadline_ms = deadline_ms
        self.timing: ProduceTiming | None = None  #: of a client's request
        self.size = 0
        self.base_offset = NONE
        self.last_offset = NONE
        self.leader_epoch: Epoch = NONE
        self.append_time_ms = NONE
        self.log_start: Offset = NONE
        self.parked: Parked[DelayedProduce] | None = None

    def completed(self) -> int:
        """Return the credit of batches that are written or undone; returns their bytes."""
        if self.timing is not None:
            self.timing.written()
        if self.credit is not None:
            self.credit.written(self.size)
        return self.size

    def answer(self, error: errors.PkError | None) -> None:
        """Send the reply; only the first call does (replica/partition H1).

        After a change of leader, or a failed disk, an appended batch may still be stored.  The
        detail `appended` of the error reports this to the producer.
        """
        if self.last_offset != NONE and isinstance(error, LEAVES_OPEN):
            error = type(error)(error.message, **error.details, appended="true")
        sink, self.sink, self.parked = self.sink, None, None
        if sink is not None:
            sink(self, error)
