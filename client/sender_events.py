"""The events of the `Sender`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pk import errors
from pk.client.producer_batch import PartitionResponse


@dataclass(slots=True)
class ProduceResponse:
    """Responses for batches of a request; several may come for one request (rule L7)."""

    correlation_id: int
    partitions: Sequence[PartitionResponse]


@dataclass(slots=True)
class ConnectionLost:
    """The stream to a broker ended; the requests `unsent` were never written to it."""

    node: int
    error: errors.PkError
    unsent: frozenset[int] = frozenset()


@dataclass(slots=True)
class ProducerIdGranted:
    """The answer to `Publish("producer_id")`."""

    producer_id: int
    epoch: int


@dataclass(slots=True)
class BeginTransaction:
    """The batches that come now belong to the transaction of this pair."""

    producer_id: int
    epoch: int


@dataclass(slots=True)
class FailTransaction:
    """The transaction will be aborted: fail every batch that is not in a request."""

    error: errors.PkError


@dataclass(slots=True)
class ForceClose:
    """Nothing more can be sent: the producer closes, or met an error that concerns all batches."""

    error: errors.PkError


@dataclass(slots=True)
class Wakeup:
    """A timer expired, the metadata changed, or a flush began."""

    flush: bool = False


SenderEvent = (
    ProduceResponse
    | ConnectionLost
    | ProducerIdGranted
    | BeginTransaction
    | FailTransaction
    | ForceClose
    | Wakeup
)
