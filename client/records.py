"""Decoded rows as `Record` objects: whole columns at a time, in C.

A column becomes a list of Python objects in one call, and the records are drawn from the columns by
`map` and `zip`: no Python code runs per record.  Iteration draws them one by one, so that a record
that was looked at is freed before the next one is made; `poll` makes them all at once, with the
garbage collector paused, which would otherwise walk the growing list again and again and find
nothing.

Invariants
  R1  records come in offset order, each once; what was not drawn yet can be taken away (`drop`).
  R2  the collector is as the application had it afterwards, whatever was raised.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from itertools import repeat
from operator import length_hint
from typing import Any

import numpy as np
import pyarrow as pa

from pk.client.serializers import Deserializer
from pk.types import Record, TopicPartition

_INT64 = pa.int64()


class Lines:
    """Rows of one partition, drawn record by record."""

    __slots__ = ("_left", "_offsets", "iterator", "place")

    def __init__(
        self,
        place: TopicPartition,
        rows: pa.RecordBatch,
        key_deserializer: Deserializer | None,
        value_deserializer: Deserializer | None,
    ) -> None:
        """Raises what the deserialisers raise."""
        topic, partition = place
        keys = _objects(rows.column("key"), key_deserializer, topic)
        values = _objects(rows.column("value"), value_deserializer, topic)
        self.place = place
        self._offsets: list[int] = rows.column("offset").to_numpy().tolist()
        self._left = iter(self._offsets)
        columns = (
            repeat(topic), repeat(partition), self._left, _stamps(rows.column("timestamp")),
            keys, values, _headers(rows.column("headers")),
        )  # fmt: skip
        #: The records that were not drawn yet.
        self.iterator: Iterator[Record] = map(
            tuple.__new__, repeat(Record), zip(*columns, strict=False)
        )

    def __len__(self) -> int:
        return length_hint(self._left)

    @property
    def next_offset(self) -> int | None:
        """The offset of the next record; None if all were drawn."""
        left = length_hint(self._left)
        return self._offsets[-left] if left else None

    def drop(self) -> None:
        """Nothing more comes."""
        self._offsets.clear()

    def rest(self) -> list[Record]:
        """All that were not drawn yet."""
        if not gc.isenabled():
            return list(self.iterator)
        gc.disable()
        try:
            return list(self.iterator)
        finally:
            gc.enable()


def _objects(column: pa.Array, function: Deserializer | None, topic: str) -> Iterable[Any]:
    if column.null_count == len(column) and function is None:
        return repeat(None)
    items: list[Any] = column.to_pylist()
    return items if function is None else [function(topic, item) for item in items]


def _stamps(column: pa.Array) -> Iterable[int]:
    stamps = column.view(_INT64).to_numpy()
    if len(stamps) and stamps[0] == stamps[-1] and bool(np.all(stamps == stamps[0])):
        return repeat(int(stamps[0]))  # of one chunk: the usual case
    found: list[int] = stamps.tolist()
    return found


def _headers(column: pa.Array) -> Iterable[tuple[tuple[str, bytes | None], ...]]:
    if column.null_count == len(column) or not len(column.values):
        return repeat(())
    return [tuple((item["key"], item["value"]) for item in row or ()) for row in column.to_pylist()]
