"""What the fetcher is told, and what it asks for: events and effects of `pk.client.fetcher`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pk import errors
from pk.types import NONE, AbortedTransaction, PartitionKey, TopicPartition

# -- events ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Assign:
    """These partitions, no others; `start` says where to begin those that are new (offset, LATEST,
    EARLIEST, None = policy).
    """

    places: dict[TopicPartition, int | None]


@dataclass(slots=True)
class Seek:
    """Go on at an offset, or at LATEST or EARLIEST."""

    place: TopicPartition
    offset: int


@dataclass(slots=True)
class Pause:
    places: Sequence[TopicPartition]
    paused: bool


@dataclass(slots=True)
class FetchedPartition:
    """One partition's share of a frame."""

    node: int
    key: PartitionKey
    position_id: int
    payload: memoryview
    next_offset: int
    aborted: Sequence[AbortedTransaction] = ()
    error: errors.PkError | None = None
    diverging: tuple[int, int] | None = None  #: epoch, end offset
    high_watermark: int = NONE
    last_stable_offset: int = NONE
    log_start: int = NONE


@dataclass(slots=True)
class StreamClosed:
    """The stream to a broker is gone."""

    node: int


@dataclass(slots=True)
class Consumed:
    """The application took `size` bytes that came from `node`."""

    node: int
    size: int


@dataclass(slots=True)
class OffsetFound:
    """The answer to an `OffsetWanted`."""

    place: TopicPartition
    position_id: int
    offset: int = NONE
    error: errors.PkError | None = None


@dataclass(slots=True)
class Refresh:
    """A timer fired or metadata changed."""


FetcherEvent = (
    Assign | Seek | Pause | FetchedPartition | StreamClosed | Consumed | OffsetFound | Refresh
)


# -- effects' values -------------------------------------------------------------------------------


@dataclass(slots=True)
class FetchPosition:
    """A position to set on a fetch stream."""

    key: PartitionKey
    leader_epoch: int
    offset: int
    last_fetched_epoch: int
    position_id: int


@dataclass(slots=True)
class FetchRequestData:
    """`Send`'s message: what to tell a broker; `open` begins a new stream."""

    positions: list[FetchPosition] = field(default_factory=list)
    forgotten: list[PartitionKey] = field(default_factory=list)
    credit: int = 0


@dataclass(slots=True)
class OffsetWanted:
    """`Publish("offset")`: ask the leader for LATEST or EARLIEST."""

    node: int
    place: TopicPartition
    key: PartitionKey
    leader_epoch: int
    special: int
    position_id: int


@dataclass(slots=True)
class CompletedFetch:
    """`Publish("data")`: whole batches that cover `[position, next_offset)`; the first may begin
    before it.  A position that was looked up is said by one without batches, and so is a range that
    the broker cannot read: `loss`, in its place behind what was fetched before it.
    """

    place: TopicPartition
    position_id: int
    node: int
    payload: memoryview
    position: int
    next_offset: int
    aborted: Sequence[AbortedTransaction]
    high_watermark: int
    last_stable_offset: int
    loss: errors.DataLoss | None = None


@dataclass(slots=True)
class FetchError:
    """`Publish("error")`: what the application must be told, as long as it stands.

    `about` is the id of the position it is said of, or of the assignment if no seek settles it.
    Whoever subscribed to a topic that is not there has no `place` to be told of.
    """

    place: TopicPartition | None
    about: int
    error: errors.PkError


@dataclass(slots=True)
class FetcherOptions:
    auto_offset_reset: str
    buffer_bytes: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    report_after_ms: int  #: a retriable error that lasts so long is told to the application
