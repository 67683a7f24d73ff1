"""What the sender is told, and what it asks for: the events and effects of `pk.client.sender`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pk import errors, limits
from pk.client.producer_batch import Piece, ProducerBatch
from pk.types import NONE, PartitionKey

# -- events ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Add:
    """A piece for a partition."""

    topic: str
    key: PartitionKey
    piece: Piece
    batch_size: int


@dataclass(slots=True)
class Result:
    """What became of a batch: the broker's answer for entry `index` of a request, or `Respond`'s
    reply.
    """

    index: int = NONE
    error: errors.PkError | None = None
    base_offset: int = NONE
    append_time_ms: int = NONE
    log_start: int = NONE


@dataclass(slots=True)
class Replied:
    """Answers to entries of a frame; several may come for one frame (rule L7)."""

    correlation_id: int
    results: Sequence[Result]


@dataclass(slots=True)
class Broken:
    """The stream to a broker is gone; `unsent` frames were never handed to it."""

    node: int
    error: errors.PkError
    unsent: frozenset[int] = frozenset()


@dataclass(slots=True)
class Written:
    """A frame was handed to the stream: with acks=0 that is all there is to know."""

    correlation_id: int


@dataclass(slots=True)
class IdGranted:
    """An answer to `Publish("producer_id")`."""

    producer_id: int
    epoch: int


@dataclass(slots=True)
class Fail:
    """Nothing more can be sent (closing, or an error that is nobody's batch's)."""

    error: errors.PkError


@dataclass(slots=True)
class Wake:
    """A timer fired, metadata changed, a flush began."""

    flush: bool = False


Event = Add | Replied | Broken | Written | IdGranted | Fail | Wake


# -- effects' values -------------------------------------------------------------------------------


@dataclass(slots=True)
class InFlightRequest:
    """`Send`'s message: batches of partitions led by one broker."""

    correlation_id: int
    node: int
    batches: list[ProducerBatch]
    epochs: list[int]  #: leader epoch of each entry
    deadline_ms: int
    open: set[int] = field(default_factory=set)  #: entries not yet answered


@dataclass(slots=True)
class SenderOptions:
    acks: int  #: -1 = all
    idempotent: bool
    max_in_flight: int
    batch_size: int
    delivery_timeout_ms: int
    request_timeout_ms: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    frame_bytes: int = limits.FRAME_BYTES
