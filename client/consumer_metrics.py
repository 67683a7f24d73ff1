"""The metrics of a consumer: counters, the fill of its buffer, and its lag.

The lag of a partition is the distance from the consumer's position to the last readable offset that
a broker named in a fetch: the last stable offset with read_committed, else the high watermark.  It
costs no request.  It is unknown until the first answer to a fetch (KIP-695).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pk.client import arguments
from pk.client.deserialization import RecordDeserializer
from pk.client.waiting import OneThread, one_thread
from pk.types import TopicPartition


@dataclass(slots=True)
class ConsumedCounts:
    """Totals since the consumer was opened."""

    records: int = 0
    polls: int = 0  #: those that returned something


class ConsumerMetrics:
    """The part of a consumer that concerns its metrics."""

    _counts: ConsumedCounts
    _deserializer: RecordDeserializer
    _engine: Any
    _fetch_buffer: Any
    _one_thread: OneThread

    def assignment(self) -> list[TopicPartition]:
        raise NotImplementedError

    def _next_record_of(self, place: TopicPartition) -> int | None:
        raise NotImplementedError

    @one_thread
    def current_lag(self, partition: TopicPartition) -> int | None:
        """Return how many offsets an assigned partition is behind; None = not known yet.

        As `currentLag` of Kafka's consumer (KIP-695): without a request.  Offsets of markers and of
        aborted records count, too.
        """
        place = arguments.place(partition)
        end = self._engine.fetcher.readable_end(place, committed=bool(self._engine.isolation))
        position = self._next_record_of(place)
        if position is None:
            position = self._fetch_buffer.position(place)
        return None if end is None or position is None else max(0, end - position)

    @one_thread
    def metrics(self) -> dict[str, Any]:
        """Return the metrics as numbers, and the lag of each assigned partition.

        records_consumed_total, polls_total (those that returned something),
        records_skipped_total (on_deserialize_error), fetch_buffer_bytes, records_lag_max
        (None = unknown), and `records_lag`: partition → offsets, None = unknown.
        """
        lags = {place: self.current_lag(place) for place in self.assignment()}
        known = [lag for lag in lags.values() if lag is not None]
        return {
            "records_consumed_total": self._counts.records,
            "polls_total": self._counts.polls,
            "records_skipped_total": self._deserializer.skipped,
            "fetch_buffer_bytes": self._engine.fetcher.buffered_bytes,
            "records_lag_max": max(known) if known else None,
            "records_lag": lags,
        }
