"""Conversion of decoded rows to `Record` objects: whole columns at a time, in C.

A column becomes a list of Python objects in one call, and `map` draws the records from the columns:
no Python code runs per record.  Iteration draws records one by one, so that a used record is freed
before the next one is made; `poll` makes them all at once.  Neither makes work for the garbage
collector, which does not look into records (`pk.types.Record`).

Invariants
  D1  Records come in offset order, each once.  Records that were not drawn yet can be removed
      (`drop`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from operator import length_hint
from typing import Any

import pyarrow as pa

from pk.client.serializers import Deserializer
from pk.log.encoding import numbers
from pk.types import NONE, Record, TopicPartition

_INT64 = pa.int64()


class ConsumerRecords:
    """Rows of one partition, drawn record by record.

    Its length says how many are left, so that a list of them is allocated once.
    """

    __slots__ = ("_left", "_offsets", "_records", "place", "position_id")

    def __init__(
        self,
        place: TopicPartition,
        rows: pa.RecordBatch,
        key_deserializer: Deserializer | None,
        value_deserializer: Deserializer | None,
        position_id: int = NONE,
    ) -> None:
        """Deserialise the columns.  Raises what the deserialisers raise.

        position_id: of the fetched rows (client/fetcher F4)
        """
        topic, partition = place
        keys = _objects(rows.column("key"), key_deserializer, topic)
        values = _objects(rows.column("value"), value_deserializer, topic)
        self.place = place
        self.position_id = position_id
        self._offsets: list[int] = numbers(rows.column("offset")).tolist()
        self._left = iter(self._offsets)
        self._records: Iterator[Record] = map(
            Record, repeat(topic), repeat(partition), self._left, _stamps(rows.column("timestamp")),
            keys, values, _headers(rows.column("headers")),
        )  # fmt: skip

    @classmethod
    def of(
        cls, place: TopicPartition, row: pa.RecordBatch, record: Record, position_id: int
    ) -> ConsumerRecords:
        """Return one row as a record that was made elsewhere."""
        found = cls(place, row, None, None, position_id)
        found._records = map(_first_of, repeat(record), found._left)
        return found

    def __iter__(self) -> Iterator[Record]:
        """Return the iterator over the remaining records.  Every call returns the same iterator."""
        return self._records

    def __len__(self) -> int:
        return length_hint(self._left)

    @property
    def next_offset(self) -> int | None:
        """Return the offset of the next record; None if all were drawn."""
        left = length_hint(self._left)
        return self._offsets[-left] if left else None

    def drop(self) -> None:
        """Remove the records that were not drawn yet."""
        self._offsets.clear()


def _first_of(record: Record, offset: int) -> Record:
    return record


def _objects(column: pa.Array, function: Deserializer | None, topic: str) -> Iterable[Any]:
    if column.null_count == len(column) and function is None:
        return repeat(None)
    items: list[Any] = column.to_pylist()
    return items if function is None else [function(topic, item) for item in items]


def _stamps(column: pa.Array) -> Iterable[int]:
    stamps = numbers(column.view(_INT64))
    same = len(stamps) and stamps[0] == stamps[-1]
    if same and (len(stamps) <= 2 or bool((stamps == stamps[0]).all())):
        return repeat(int(stamps[0]))  # of one chunk: the usual case
    found: list[int] = stamps.tolist()
    return found


def _headers(column: pa.Array) -> Iterable[tuple[tuple[str, bytes | None], ...]]:
    if column.null_count == len(column) or not len(column.values):
        return repeat(())
    bounds = numbers(column.offsets)
    first, last = int(bounds[0]), int(bounds[-1])
    items = column.values.slice(first, last - first)
    pairs = list(zip(items.field("key").to_pylist(), items.field("value").to_pylist(), strict=True))
    starts = (bounds - first).tolist()
    return map(tuple, map(pairs.__getitem__, map(slice, starts, starts[1:])))
