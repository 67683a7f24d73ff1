"""Log batches in Spark's columns: sparkconnector/rows A1–A3."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pk import errors
from pk.log import batch as batches
from pk.log import columns, control_rows
from pk.sparkconnector import options, rows
from pk.sparkconnector.offsets import Range

NAMES = tuple(options.COLUMNS)
MAX = 1 << 26


def joined(parts) -> bytes:
    return b"".join(bytes(part) for part in parts)


def at(raw: bytes, offset: int) -> bytes:
    return joined(batches.patched(raw, offset, 3))


def log_of(counts: list[int], **options) -> bytes:
    """Batches of so many records; values say their offset."""
    found, offset = [], 0
    for count in counts:
        values = [str(offset + n).encode() for n in range(count)]
        raw = joined(columns.encode_lists(values, default_timestamp=1000 + offset, **options))
        found.append(at(raw, offset))
        offset += count
    return b"".join(found)


def read(
    payload: bytes, start: int, end: int, names=NAMES, aborted=(), until: int = -1
) -> list[pa.RecordBatch]:
    """`until`: where the payload ends, if not where its last batch says."""
    if until < 0:
        until = [header for header, _ in batches.iter_batches(payload)][-1].next_offset
    one = Range("flights", "id", 2, start, end)
    shape = rows.Shape(options.columns_of(names))
    found = rows.from_log(memoryview(payload), aborted, one, MAX, until)
    return [shape.joined([each]) for each in found]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 60), st.integers(0, 80))
def test_exactly_the_range_comes_out(counts, start, length):
    payload = log_of(counts)
    end = min(start + length, sum(counts))
    found = read(payload, start, end, ("offset", "value"))
    offsets = [o for one in found for o in one.column("offset").to_pylist()]
    assert offsets == list(range(start, end))
    assert [v for one in found for v in one.column("value").to_pylist()] == [
        str(o).encode() for o in offsets
    ]


@pytest.mark.parametrize("number", [1, 2], ids=["between others", "the last"])
def test_no_row_is_left_out_for_where_its_batch_says_it_begins(number):
    """No checksum covers it (rule L9); below the range or above it, it was passed over."""
    good = log_of([2, 2, 2])
    begin = len(good) // 3 * number
    for bit in range(63):
        bad = bytearray(good)
        bad[begin + bit // 8] ^= 1 << bit % 8
        with pytest.raises(errors.CorruptBatch):
            read(bytes(bad), 0, 6, ("offset", "value"), until=6)


def test_rows_whose_batches_are_moved_up_together_do_not_continue_a_dense_log():
    good = log_of([2, 2, 2, 2])
    size = len(good) // 4
    moved = bytearray(good)
    moved[size] ^= 4  # offset 2 becomes 6
    moved[size * 2] ^= 8  # offset 4 becomes 12
    payload, one = memoryview(bytes(moved[: size * 3])), Range("flights", "id", 2, 0, 14)
    with pytest.raises(errors.CorruptBatch) as told:
        list(rows.from_log(payload, (), one, MAX, 14, dense=True))
    assert told.value.details["position"] == "2"


def test_all_columns_have_sparks_types():
    to_arrow_schema = pytest.importorskip("pyspark.sql.pandas.types").to_arrow_schema
    from pyspark.sql.types import (
        ArrayType,
        BinaryType,
        IntegerType,
        LongType,
        StringType,
        StructField,
        StructType,
        TimestampType,
        _parse_datatype_string,  # noqa: F401 - needs no session for DDL below
    )

    pair = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
    kinds = {
        "key": BinaryType(), "value": BinaryType(), "topic": StringType(),
        "partition": IntegerType(), "offset": LongType(), "timestamp": TimestampType(),
        "timestampType": IntegerType(),
        "headers": ArrayType(pair),
    }  # fmt: skip
    expected = to_arrow_schema(
        StructType([StructField(n, kinds[n], n in options.MAY_BE_NULL) for n in NAMES]),
        timezone="UTC",
    )
    raw = joined(
        columns.encode_lists(
            [b"v", None], [None, b"k"], [1000, 2500], [None, [("h", b"x"), ("h", None)]]
        )
    )
    (found,) = read(at(raw, 7), 0, 100)
    assert expected.equals(found.schema)
    found.validate(full=True)
    assert found.to_pylist() == [
        {"key": None, "value": b"v", "topic": "flights", "partition": 2, "offset": 7,
         "timestamp": _utc(1.0), "timestampType": 0, "headers": None},
        {"key": b"k", "value": None, "topic": "flights", "partition": 2, "offset": 8,
         "timestamp": _utc(2.5), "timestampType": 0,
         "headers": [{"key": "h", "value": b"x"}, {"key": "h", "value": None}]},
    ]  # fmt: skip


def _utc(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def test_a_subset_in_another_order():
    (found,) = read(log_of([3]), 1, 3, ("Value", "PARTITION"))
    assert found.schema.names == ["Value", "PARTITION"]
    assert found.to_pylist() == [{"Value": b"1", "PARTITION": 2}, {"Value": b"2", "PARTITION": 2}]


def test_only_what_may_lack_is_nullable():
    (found,) = read(log_of([3]), 0, 3, ("VALUE", "Offset", "timestampType", "headers"))
    assert [field.nullable for field in found.schema] == [True, False, False, True]


def test_a_row_without_what_every_row_has_is_refused():
    shape = rows.Shape(options.columns_of(["offset", "timestamp"]))
    stamps = pa.array([1, None], pa.timestamp("us", tz="UTC"))
    found = pa.record_batch({"offset": pa.array([0, 1], pa.int64()), "timestamp": stamps})
    with pytest.raises(errors.InvalidRecord, match="flights: a row has no timestamp"):
        rows.from_tier(found, shape, Range("flights", "id", 0, 0, 9))


PIECES = st.tuples(
    st.sampled_from(["a", "bb"]),
    st.integers(0, 3),
    st.integers(1, 5),
    st.booleans(),
    st.sampled_from(["none", "zstd"]),
    st.sampled_from([None, [("h", b"1")], [("h", None), ("i", b"")]]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=6), st.sets(st.sampled_from(NAMES), min_size=1))
def test_joined_rows_are_those_of_each_piece(drawn, names):
    pieces = []
    for topic, partition, count, server_time, codec, headers in drawn:
        keys = [None if n % 2 else b"k" for n in range(count)]
        given_headers = [headers if n else None for n in range(count)]
        raw = joined(columns.encode_lists([b"v"] * count, keys, headers=given_headers, codec=codec))
        stamped = joined(batches.patched(raw, 7, 3, 5000)) if server_time else at(raw, 7)
        one = Range(topic, "id", partition, 7, 7 + max(1, count - 1))
        pieces += rows.from_log(memoryview(stamped), (), one, MAX, 7 + count)
    shape = rows.Shape(options.columns_of(sorted(names)))
    found = shape.joined(pieces)
    found.validate(full=True)
    assert found.schema == shape.schema
    assert found.to_pylist() == [row for one in pieces for row in shape.joined([one]).to_pylist()]
    (sized,) = rows.right_sized(iter([*pieces, found]), shape)
    assert sized.to_pylist() == found.to_pylist() * 2


def test_the_cached_constants_of_a_read_are_bounded():
    shape = rows.Shape(options.columns_of(["partition"]))
    for partition in range(100):
        assert shape.constant("partition", partition, 3).to_pylist() == [partition] * 3
    assert len(shape._constants) <= rows.CONSTANTS_MAX


def test_headers_of_a_clipped_batch():
    headers = [[("a", b"1")], None, [("b", b"2"), ("c", b"3")], [("d", None)]]
    raw = joined(columns.encode_lists([b""] * 4, headers=headers))
    (found,) = read(raw, 1, 4, ("headers",))
    found.validate(full=True)
    assert found.column("headers").to_pylist() == [
        None,
        [{"key": "b", "value": b"2"}, {"key": "c", "value": b"3"}],
        [{"key": "d", "value": None}],
    ]  # fmt: skip


def test_log_append_time_is_told():
    raw = joined(batches.patched(log_of([2]), 0, 1, 5000))
    (found,) = read(raw, 0, 2, ("timestamp", "timestampType"))
    assert found.to_pylist() == [{"timestamp": _utc(5), "timestampType": 1}] * 2


def test_control_batches_and_aborted_transactions_are_dropped():
    mine = joined(
        columns.encode_lists(
            [b"a"], producer_id=7, producer_epoch=0, base_sequence=0, transactional=True
        )
    )
    other = joined(
        columns.encode_lists(
            [b"b"], producer_id=8, producer_epoch=0, base_sequence=0, transactional=True
        )
    )
    marker = joined(control_rows.encode_markers([control_rows.Marker(7, 0, False)], 1))
    payload = at(mine, 0) + at(other, 1) + at(marker, 2) + at(mine, 3)

    def values(found):
        return [v for one in found for v in one.column("value").to_pylist()]

    assert values(read(payload, 0, 9, aborted=[(7, 0, 2)])) == [b"b", b"a"]
    assert values(read(payload, 0, 9)) == [b"a", b"b", b"a"]


def test_damage_is_noticed():
    payload = bytearray(log_of([5]))
    payload[-1] ^= 1
    with pytest.raises(errors.CorruptBatch, match="checksum"):
        read(bytes(payload), 0, 5)


def test_no_bit_of_a_header_may_hide_a_batch():
    """Rule L9: one that says it is a marker, or empty, or out of the range."""
    good = log_of([2, 2, 2])
    begin = len(good) // 3
    for position in range(begin + batches.CRC_START, begin + batches.HEADER_BYTES):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            with pytest.raises(errors.CorruptBatch):
                read(bytes(bad), 0, 6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 70_000), st.integers(0, 40)), min_size=1, max_size=8))
def test_batches_for_spark_are_neither_tiny_nor_huge(drawn):
    given_batches = [
        pa.record_batch({"value": pa.repeat(pa.scalar(b"x" * width, pa.binary()), count)})
        for count, width in drawn
    ]
    sized = list(rows.right_sized(iter(given_batches), rows.Shape(options.columns_of(["value"]))))
    assert sum(one.num_rows for one in sized) == sum(count for count, _ in drawn)
    assert all(0 < one.num_rows <= rows.BATCH_ROWS_MOST for one in sized)
    assert all(one.num_rows >= rows.BATCH_ROWS_LEAST // 2 for one in sized[:-1])
