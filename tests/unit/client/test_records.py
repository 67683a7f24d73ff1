"""Rows become records, a column at a time."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.client.records import ConsumerRecords
from pk.client.serializers import deserializer
from pk.log.columns import schema
from pk.types import Record, TopicPartition

PLACE = TopicPartition("t", 3)
BYTES = st.one_of(st.none(), st.binary(max_size=5))
HEADERS = st.one_of(st.none(), st.lists(st.tuples(st.text(max_size=3), BYTES), max_size=2))
ROW = st.tuples(st.integers(0, 3), BYTES, BYTES, HEADERS)


def batch_of(rows: list[Any]) -> pa.RecordBatch:
    """Return a batch in which every second offset is missing."""
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


def lines_of(rows: list[Any], **more: Any) -> ConsumerRecords:
    return ConsumerRecords(PLACE, batch_of(rows), more.get("key"), more.get("value"))


@given(st.lists(ROW, max_size=20))
def test_records_hold_what_the_columns_hold(rows: list[Any]) -> None:
    expected = [
        Record("t", 3, 2 * index, stamp, key, value, tuple(headers or ()))
        for index, (stamp, key, value, headers) in enumerate(rows)
    ]
    assert list(lines_of(rows)) == expected
    assert all(type(record) is Record for record in lines_of(rows))
    for at in range(0, len(rows), 7):
        part = ConsumerRecords(PLACE, batch_of(rows).slice(at, 7), None, None)
        assert list(part) == expected[at : at + 7], "of a slice"


def test_what_was_drawn_is_gone_and_what_was_not_can_be_dropped() -> None:
    lines = lines_of([(0, None, b"%d" % number, None) for number in range(5)])
    assert (len(lines), lines.next_offset) == (5, 0)
    assert next(iter(lines)).offset == 0
    assert (len(lines), lines.next_offset) == (4, 2)
    assert [record.offset for record in lines] == [2, 4, 6, 8]
    assert (len(lines), lines.next_offset) == (0, None)
    lines = lines_of([(0, None, b"%d" % number, None) for number in range(5)])
    next(iter(lines))
    lines.drop()
    assert (len(lines), lines.next_offset, list(lines)) == (0, None, [])


def test_deserialisers_see_every_value() -> None:
    seen: list[Any] = []
    lines = lines_of(
        [(0, b"k", b'{"a": 1}', None), (0, None, None, None)],
        key=lambda topic, data: seen.append((topic, data)) or data,
        value=deserializer("json", "value_deserializer"),
    )
    assert [record.value for record in lines] == [{"a": 1}, None]
    assert seen == [("t", b"k"), ("t", None)]
    with pytest.raises(errors.SerializationError):
        lines_of([(0, None, b"{", None)], value=deserializer("json", "value_deserializer"))


RECORD = Record("t", 3, 7, 1000, b"k", b"v", (("h", None),))


def test_equal_records_are_one_in_a_set_and_nothing_changes_them() -> None:
    twin = Record("t", 3, 7, 1000, b"k", b"v", (("h", None),))
    assert twin == RECORD
    assert len({RECORD, twin, Record("t", 3, 7, 1000, b"k", b"v")}) == 2
    with pytest.raises(TypeError):
        hash(Record("t", 3, 7, 1000, b"k", {"a": 1}))
    with pytest.raises(AttributeError):
        RECORD.value = b"other"  # type: ignore[misc]  # frozen, as mypy knows


def test_a_record_is_shown_matched_pickled_and_copied_by_its_fields() -> None:
    assert repr(RECORD) == (
        "Record(topic='t', partition=3, offset=7, timestamp_ms=1000, key=b'k', value=b'v', "
        "headers=(('h', None),))"
    )
    match RECORD:
        case Record("t", 3, offset, value=value):
            assert (offset, value) == (7, b"v")
        case _:
            pytest.fail("no match")
    assert pickle.loads(pickle.dumps(RECORD)) == RECORD
    assert msgspec.structs.replace(RECORD, value=b"w").value == b"w"
    assert msgspec.structs.asdict(RECORD)["headers"] == (("h", None),)


def test_the_collector_has_no_work_with_records_whatever_they_carry() -> None:
    lines = lines_of(
        [(0, None, b'{"a": []}', [("h", b"1")])] * 3,
        value=deserializer("json", "value_deserializer"),
    )
    assert not any(gc.is_tracked(record) for record in lines)
