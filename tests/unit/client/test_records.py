"""Rows become records a column at a time."""

from __future__ import annotations

import gc
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.client.records import Lines
from pk.client.serializers import deserializer
from pk.log.columns import schema
from pk.types import Record, TopicPartition

PLACE = TopicPartition("t", 3)
BYTES = st.one_of(st.none(), st.binary(max_size=5))
HEADERS = st.one_of(st.none(), st.lists(st.tuples(st.text(max_size=3), BYTES), max_size=2))
ROW = st.tuples(st.integers(0, 3), BYTES, BYTES, HEADERS)


def batch_of(rows: list[Any]) -> pa.RecordBatch:
    """Every second offset is missing."""
    return pa.RecordBatch.from_pylist(
        [
            {
                "offset": 2 * index, "timestamp": stamp, "key": key, "value": value,
                "headers": headers and [{"key": k, "value": v} for k, v in headers],
            }
            for index, (stamp, key, value, headers) in enumerate(rows)
        ],
        schema=schema(),
    )  # fmt: skip


def lines_of(rows: list[Any], **more: Any) -> Lines:
    return Lines(PLACE, batch_of(rows), more.get("key"), more.get("value"))


@given(st.lists(ROW, max_size=20))
def test_records_hold_what_the_columns_hold(rows: list[Any]) -> None:
    expected = [
        Record("t", 3, 2 * index, stamp, key, value, tuple(headers or ()))
        for index, (stamp, key, value, headers) in enumerate(rows)
    ]
    assert lines_of(rows).rest() == expected
    assert list(lines_of(rows).iterator) == expected
    assert all(type(record) is Record for record in lines_of(rows).rest())


def test_what_was_drawn_is_gone_and_what_was_not_can_be_dropped() -> None:
    lines = lines_of([(0, None, b"%d" % number, None) for number in range(5)])
    assert (len(lines), lines.next_offset) == (5, 0)
    assert next(lines.iterator).offset == 0
    assert (len(lines), lines.next_offset) == (4, 2)
    assert [record.offset for record in lines.rest()] == [2, 4, 6, 8]
    assert (len(lines), lines.next_offset) == (0, None)
    lines = lines_of([(0, None, b"%d" % number, None) for number in range(5)])
    next(lines.iterator)
    lines.drop()
    assert (len(lines), lines.next_offset, lines.rest()) == (0, None, [])


def test_deserialisers_see_every_value() -> None:
    seen: list[Any] = []
    lines = lines_of(
        [(0, b"k", b'{"a": 1}', None), (0, None, None, None)],
        key=lambda topic, data: seen.append((topic, data)) or data,
        value=deserializer("json", "value_deserializer"),
    )
    assert [record.value for record in lines.rest()] == [{"a": 1}, None]
    assert seen == [("t", b"k"), ("t", None)]
    with pytest.raises(errors.SerializationError):
        lines_of([(0, None, b"{", None)], value=deserializer("json", "value_deserializer"))


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_the_application_had_it(enabled: bool) -> None:
    was = gc.isenabled()
    lines = lines_of([(0, None, b"x", None)])
    broken = lines_of([(0, None, b"x", None)])
    broken.iterator = map(int, ["no number"])  # type: ignore[assignment]
    try:
        (gc.enable if enabled else gc.disable)()
        lines.rest()
        assert gc.isenabled() == enabled
        with pytest.raises(ValueError, match="no number"):
            broken.rest()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was else gc.disable)()
