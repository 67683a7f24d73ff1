"""Events and effects of `pk.client.fetcher`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pk import errors
from pk.types import NONE, AbortedTransaction, PartitionKey, TopicPartition

# -- events ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Assign:
    """Assign exactly these partitions.  `start` is where a newly assigned partition begins: an
    offset, LATEST, EARLIEST, or None for the policy.

    `keys`: the topic ids for which the starts are meant (rule L8).  A partition that is read under
    another id is assigned newly.  A partition without a key has the id of its name.
    """

    places: dict[TopicPartition, int | None]
    keys: Mapping[TopicPartition, PartitionKey] = field(default_factory=dict)


@dataclass(slots=True)
class Seek:
    """Continue at an offset, or at LATEST or EARLIEST."""

    place: TopicPartition
    offset: int


@dataclass(slots=True)
class Pause:
    places: Sequence[TopicPartition]
    paused: bool


@dataclass(slots=True)
class FetchedPartition:
    """One partition's part of a fetch frame."""

    node: int
    key: PartitionKey
    position_id: int
    payload: memoryview
    next_offset: int
    aborted: Sequence[AbortedTransaction] = ()
    error: errors.PkError | None = None
    diverging: tuple[int, int] | None = None  #: leader epoch, end offset
    high_watermark: int = NONE
    last_stable_offset: int = NONE
    log_start: int = NONE
    dense: bool = False  #: each batch begins where the one before it ends


@dataclass(slots=True)
class StreamClosed:
    """The fetch stream to a broker ended."""

    node: int


@dataclass(slots=True)
class Consumed:
    """The application consumed `size` bytes that broker `node` had sent."""

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
    """A timer expired or the metadata changed."""


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
    """The message of `Send`: what to send on a fetch stream; `open` begins a new stream."""

    positions: list[FetchPosition] = field(default_factory=list)
    forgotten: list[PartitionKey] = field(default_factory=list)
    credit: int = 0


@dataclass(slots=True)
class OffsetWanted:
    """`Publish("offset")`: ask the leader for its LATEST or EARLIEST offset."""

    node: int
    place: TopicPartition
    key: PartitionKey
    leader_epoch: int
    special: int
    position_id: int


@dataclass(slots=True)
class CompletedFetch:
    """`Publish("data")`: whole batches that cover `[position, next_offset)`; the first may begin
    before it.  An item without batches reports a position that was looked up.  With `loss` it
    reports a range that the broker cannot read, in order behind the data fetched before it.
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
    dense: bool = False
    loss: errors.DataLoss | None = None


@dataclass(slots=True)
class FetchError:
    """`Publish("error")`: an error to raise to the application while it is valid.

    `about` is the id of the position that the error concerns, or of the assignment if a seek does
    not settle the error.  `place` is None if a subscribed topic does not exist.
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
    report_after_ms: int  #: a retriable error that lasts this long is reported
