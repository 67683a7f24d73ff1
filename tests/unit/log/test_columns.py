"""Encoding and decoding of rows: types, nulls, slices, codecs and refusals."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pk import errors
from pk.log import batch, columns
from pk.log.columns import HEADER_TYPE

CODECS = ("none", "lz4", "zstd")


def roundtrip(rows: pa.RecordBatch, **options: Any) -> pa.RecordBatch:
    raw = b"".join(columns.encode(rows, **options))
    header = batch.check(raw)
    columns.validate_body(raw, header, 10**7)
    found = columns.decode(raw, decoded_bytes_max=10**7)
    found.validate(full=True)
    assert found.schema == columns.schema("ms")
    same_values(raw, found)
    return found


def same_values(raw: bytes, rows: pa.RecordBatch) -> None:
    """Check that `values_of` returns what `decode` does."""
    header = batch.read_header(raw)
    expected = zip(*(rows.column(name).to_pylist() for name in ("offset", "value")), strict=True)
    assert columns.values_of(raw, header, 10**7) == list(expected)


def sample(count: int) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "key": pa.array([b"k%d" % i if i % 3 else None for i in range(count)], pa.binary()),
            "value": pa.array(
                [b"v" * (i % 7) if i % 5 else None for i in range(count)], pa.binary()
            ),
            "timestamp": pa.array([1000 + 7 * i for i in range(count)], pa.int64()),
            "headers": pa.array(
                [
                    [{"key": "a", "value": b"1"}, {"key": "a", "value": None}] if i % 2 else []
                    for i in range(count)
                ],
                HEADER_TYPE,
            ),
        }
    )


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("count", [1, 2, 8, 9, 1000])
def test_rows_come_back(codec: str, count: int) -> None:
    rows = sample(count)
    for part in (rows, rows.slice(count // 2), rows.slice(0, max(1, count // 2))):
        found = roundtrip(part, codec=codec)
        for name in ("key", "value", "headers"):
            assert found.column(name).to_pylist() == part.column(name).to_pylist()
        assert (
            found.column("timestamp").view("int64").to_pylist()
            == part.column("timestamp").to_pylist()
        )


PLAIN = pa.record_batch({"key": [b"k", b"", b"key"], "value": [b"", b"v", b"w"]})


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [PLAIN, PLAIN.slice(1)],
        [PLAIN, sample(100), PLAIN],
        [PLAIN.select(["value"]), sample(3)],
        [PLAIN.select(["key"]), PLAIN],
        [PLAIN.select(["value"])],
    ],
)
def test_columns_of_several_batches(parts: list[pa.RecordBatch]) -> None:
    """They are those of the decoded batches, one after the other."""
    sealed = [b"".join(columns.encode(part, base_offset=7 * at)) for at, part in enumerate(parts)]
    if parts:
        sparse = parts[0].append_column("offset", pa.array([900 + 4 * n for n in range(3)]))
        sealed.append(b"".join(columns.encode(sparse, keep_offsets=True, codec="lz4")))
    headers = [batch.check(raw) for raw in sealed]
    found = [
        (header, columns.body_of(raw, header, 10**7))
        for header, raw in zip(headers, sealed, strict=True)
    ]
    rows = [
        row for raw in sealed for row in columns.decode(raw, decoded_bytes_max=10**7).to_pylist()
    ]
    assert columns.joined_offsets(found).tolist() == [row["offset"] for row in rows]
    assert columns.joined_keys(found).to_pylist() == [row["key"] for row in rows]
    assert columns.joined_tombstones(found).tolist() == [row["value"] is None for row in rows]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([b"a", None, b"cc"], pa.large_binary()),
        pa.array(["a", None, "cc"], pa.string()),
        pa.array(["a", None, "cc"], pa.large_string()),
        pa.array([b"a", None, b"cc"], pa.binary_view()),
        pa.array(["a", None, "cc"], pa.string_view()),
        pa.array([b"a", None, b"cc"]).dictionary_encode(),
    ],
    ids=lambda array: str(array.type),
)
def test_every_type_of_bytes_is_taken(array: pa.Array) -> None:
    assert roundtrip(pa.record_batch({"value": array})).column("value").to_pylist() == [
        b"a",
        None,
        b"cc",
    ]


def test_fixed_size_bytes_and_all_null() -> None:
    fixed = pa.array([b"ab", None], pa.binary(2))
    assert roundtrip(pa.record_batch({"value": fixed})).column("value").to_pylist() == [b"ab", None]
    for nothing in (pa.nulls(2), pa.nulls(2, pa.binary())):
        found = roundtrip(pa.record_batch({"value": nothing, "key": nothing}))
        assert found.column("value").to_pylist() == [None, None]
        assert found.column("key").null_count == 2


def test_null_rows_that_cover_bytes_are_emptied() -> None:
    """Arrow allows a null slot to span data; on the wire a null has length 0."""
    array = pa.Array.from_buffers(
        pa.binary(),
        3,
        [
            pa.py_buffer(b"\x05"),
            pa.py_buffer(np.array([0, 2, 4, 6], np.int32)),
            pa.py_buffer(b"aaXXbb"),
        ],
    )
    assert array.to_pylist() == [b"aa", None, b"bb"]
    assert roundtrip(pa.record_batch({"value": array})).column("value").to_pylist() == [
        b"aa",
        None,
        b"bb",
    ]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([5, 6], pa.int32()), [5, 6]),
        (pa.array([-1_500, 1_500], pa.timestamp("us")), [-2, 1]),
        (pa.array([-1, 1_999_999], pa.timestamp("ns", "UTC")), [-1, 1]),
        (pa.array([2, 3], pa.timestamp("s")), [2000, 3000]),
        (pa.array([None, 3], pa.timestamp("ms")), [42, 3]),
        (pa.array([None, 3], pa.timestamp("s")), [0, 3000]),
        (pa.array([0, 2**40], pa.int64()), [0, 2**40]),
        (pa.nulls(2), [42, 42]),
    ],
)
def test_timestamps(column: pa.Array, expected: list[int]) -> None:
    rows = pa.record_batch({"value": pa.array([b"", b""]), "timestamp": column})
    assert (
        roundtrip(rows, default_timestamp=42).column("timestamp").view("int64").to_pylist()
        == expected
    )
    raw = b"".join(columns.encode(rows, default_timestamp=42))
    micros = columns.decode(raw, decoded_bytes_max=1000, timestamp_unit="us").column("timestamp")
    assert micros.type == pa.timestamp("us", "UTC")
    assert micros.view("int64").to_pylist() == [1000 * ms for ms in expected]


@pytest.mark.parametrize(
    "rows",
    [
        {"value": pa.array([1])},
        {"value": pa.array([b""]), "key": pa.array([1.5])},
        {"value": pa.array([b""]), "timestamp": pa.array(["now"])},
        {"value": pa.array([b""]), "timestamp": pa.array([2**62], pa.int64())},
        {"value": pa.array([b""]), "timestamp": pa.array([2**60], pa.timestamp("s"))},
        {"value": pa.array([b""]), "headers": pa.array([1])},
        {"value": pa.array([b""]), "headers": pa.array([[{"k": "a"}]])},
        {
            "value": pa.array([b""]),
            "headers": pa.array(
                [[{"key": None, "value": b""}]],
                pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
            ),
        },
        {"value": pa.array([b""]), "headers": pa.array([[{"key": b"\xff", "value": b""}]])},
    ],
)
def test_what_is_not_bytes_is_refused(rows: dict[str, pa.Array]) -> None:
    with pytest.raises(errors.SerializationError):
        columns.encode(pa.record_batch(rows))


def test_no_rows_are_no_batch() -> None:
    with pytest.raises(errors.RecordTooLarge):
        columns.encode(pa.record_batch({"value": pa.array([], pa.binary())}))
    with pytest.raises(errors.RecordTooLarge):
        columns.encode_lists([])


def test_maps_and_null_lists_are_headers_too() -> None:
    maps = pa.array([[("a", b"1"), ("b", None)], None, []], pa.map_(pa.string(), pa.binary()))
    rows = pa.record_batch({"value": pa.array([b"", b"", b""]), "headers": maps})
    assert roundtrip(rows).column("headers").to_pylist() == [
        [{"key": "a", "value": b"1"}, {"key": "b", "value": None}],
        [],
        [],
    ]
    nulls = pa.array([[{"key": "a", "value": None}]], HEADER_TYPE)
    rows = pa.record_batch({"value": pa.array([b""]), "headers": nulls})
    assert roundtrip(rows).column("headers").to_pylist() == nulls.to_pylist()


@pytest.mark.parametrize("codec", CODECS)
def test_lists_and_columns_give_the_same_bytes(codec: str) -> None:
    values = [b"a", None, b"", b"dd"]
    keys = [None, b"k", b"l", b""]
    headers = [[("h", b"1"), ("h", None)], None, [], [("ü", b"")]]
    from_lists = columns.encode_lists(values, keys, [4, 3, 2, 9], headers, codec=codec)
    rows = pa.record_batch(
        {
            "value": pa.array(values, pa.binary()),
            "key": pa.array(keys, pa.binary()),
            "timestamp": pa.array([4, 3, 2, 9]),
            "headers": pa.array(
                [[{"key": k, "value": v} for k, v in row or ()] for row in headers], HEADER_TYPE
            ),
        }
    )
    assert b"".join(from_lists) == b"".join(columns.encode(rows, codec=codec))


def test_lists_of_the_wrong_things_are_refused() -> None:
    wide = memoryview(np.array([1, 2], np.int32).tobytes()).cast("i")
    for wrong in ([1], [b"", 5], [wide]):
        with pytest.raises(errors.SerializationError):
            columns.encode_lists(wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.SerializationError):
        columns.encode_lists([b""], headers=[[(1, b"")]])  # type: ignore[list-item]


def test_plain_values_are_not_copied() -> None:
    data = b"x" * 1000
    array = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(np.array([0, 400, 1000], np.int32)), pa.py_buffer(data)]
    )
    parts = columns.encode(pa.record_batch({"value": array}))
    assert isinstance(parts[-1], memoryview)
    raw = b"".join(parts)
    value = columns.decode(raw, decoded_bytes_max=2000).column("value")
    start = pa.py_buffer(raw).address
    assert start <= value.buffers()[2].address < start + len(raw)


def test_offsets_may_be_kept_with_gaps() -> None:
    rows = pa.record_batch({"value": pa.array([b"a", b"b"]), "offset": pa.array([10, 15])})
    raw = b"".join(columns.encode(rows, keep_offsets=True))
    header = batch.check(raw)
    assert (header.base_offset, header.last_offset, header.sparse) == (10, 15, True)
    moved = b"".join(batch.patched(raw, 100, 1))
    found = columns.decode(moved, decoded_bytes_max=1000)
    assert found.column("offset").to_pylist() == [100, 105]
    same_values(moved, found)


@pytest.mark.parametrize("codec", CODECS)
def test_values_alone_are_those_of_the_rows(codec: str) -> None:
    for values in ([b"a"], [b"", b"bc", b""], [None, b"x"], [None, None], [b"x"] * 100):
        raw = b"".join(columns.encode_lists(values, codec=codec, default_timestamp=5))
        same_values(raw, columns.decode(raw, decoded_bytes_max=10**6))


@pytest.mark.parametrize("codec", CODECS)
def test_keys_and_values_are_those_of_the_rows(codec: str) -> None:
    pairs: list[list[tuple[bytes | None, bytes | None]]] = [
        [(b"k", b"v")],
        [(b"k", None)],
        [(b"k", None), (b"", b"value")],
        [(None, b"v"), (b"k", b"")],
        [(None, None)],
        [(None, b"a"), (None, b"bc")],
        [(b"%d" % n, b"v" * n) for n in range(100)],
    ]
    for rows in pairs:
        keys, values = zip(*rows, strict=True)
        raw = b"".join(columns.encode_lists(values, keys, codec=codec))
        found = columns.key_values_of(raw, batch.read_header(raw), 10**6)
        assert found == [(offset, *row) for offset, row in enumerate(rows)]


# -- hostile bodies (rule L13) ---------------------------------------------------------------------


def forged(body: bytes, attributes: int, count: int = 2, **fields: int) -> bytes:
    header = batch.Header(0, 0, -1, batch.MAGIC, 0, attributes, -1, count - 1, 0, 0, -1, -1, count)
    return b"".join(batch.seal(header._replace(**fields), [body]))


def refused(
    raw: bytes, kind: type[errors.PkError] = errors.InvalidRecord, most: int = 10**6
) -> None:
    header = batch.check(raw)
    with pytest.raises(kind):
        columns.validate_body(raw, header, most)
    with pytest.raises(kind):
        columns.decode(raw, decoded_bytes_max=most)
    with pytest.raises(kind):
        columns.values_of(raw, header, most)


def u32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def test_lengths_that_lie() -> None:
    refused(forged(u32(1, 2) + b"ab", batch.VALUE))
    refused(forged(u32(1, 0) + b"ab", batch.VALUE))
    refused(forged(u32(2**32 - 1, 2) + b"a", batch.VALUE))
    refused(forged(u32(2**31, 2**31) + b"", batch.VALUE))
    refused(forged(u32(1), batch.VALUE))
    refused(forged(b"x", 0))


def test_header_counts_that_lie() -> None:
    flags = batch.HEADERS
    refused(forged(u32(2**32 - 1, 2**32 - 1), flags))
    refused(forged(u32(1, 0) + u32(5) + u32(0) + b"abcd", flags))
    refused(forged(u32(1, 0) + u32(1) + u32(0) + b"\xff", flags))
    refused(forged(u32(1, 1) + u32(1, 1) + u32(0, 0) + "é".encode(), flags))
    good = forged(u32(1, 0) + u32(2) + u32(1) + "é".encode() + b"v", flags)
    assert columns.decode(good, decoded_bytes_max=100).column("headers").to_pylist()[0] == [
        {"key": "é", "value": b"v"}
    ]


@pytest.mark.parametrize("count", [3, 1000])
def test_the_last_null_with_bytes_is_found_among_few_rows_and_many(count: int) -> None:
    lengths, flags = u32(*[1] * count), batch.VALUE | batch.VALUE_NULLS
    valid = bytearray(-(-count // 8) * b"\xff")
    good = forged(lengths + valid + b"x" * count, flags, count)
    values = columns.decode(good, decoded_bytes_max=10**6).column("value").to_pylist()
    assert values == [b"x"] * count
    valid[-1] ^= 1 << (count - 1) % 8
    refused(forged(lengths + valid + b"x" * count, flags, count))


@pytest.mark.parametrize("count", [31, 32, 33])
def test_few_rows_and_many_say_the_same(count: int) -> None:
    roundtrip(sample(count))


def test_null_with_bytes_and_offsets_that_fall() -> None:
    refused(forged(u32(1, 1) + b"\x01" + b"ab", batch.VALUE | batch.VALUE_NULLS))
    refused(forged(u32(1, 1), batch.OFFSET_DELTAS))
    refused(forged(u32(0, 9), batch.OFFSET_DELTAS, last_offset_delta=5))
    good = forged(u32(0, 5), batch.OFFSET_DELTAS, last_offset_delta=5)
    assert columns.decode(good, decoded_bytes_max=100).column("offset").to_pylist() == [0, 5]


def test_timestamps_beyond_the_header() -> None:
    refused(forged(u32(0, 9), batch.TIMESTAMPS, max_timestamp=8))
    wide = batch.TIMESTAMPS | batch.TIMESTAMPS_I64
    refused(forged(struct.pack("<qq", -1, 5), wide, max_timestamp=5))
    refused(forged(struct.pack("<qq", 0, 6), wide, max_timestamp=5))
    horizon = wide | batch.DELETE_HORIZON
    refused(forged(struct.pack("<qq", -(2**63), 5), horizon, base_timestamp=99, max_timestamp=5))
    good = forged(struct.pack("<qq", 3, 5), horizon, base_timestamp=99, max_timestamp=5)
    assert batch.check(good).delete_horizon_ms == 99
    assert columns.decode(good, decoded_bytes_max=100).column("timestamp").view(
        "int64"
    ).to_pylist() == [3, 5]


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_size_that_lies(codec: str) -> None:
    """The announced size must be exact: a greater one would serve uninitialised memory, a smaller
    one would cut the data off.
    """
    number = batch.CODECS.index(codec)
    body = u32(3, 5) + b"abcdefgh"
    blob = pa.Codec(codec).compress(body, asbytes=True)
    good = forged(u32(len(body)) + blob, batch.VALUE | number)
    assert columns.decode(good, decoded_bytes_max=100).column("value").to_pylist() == [
        b"abc",
        b"defgh",
    ]
    for size in (len(body) - 1, len(body) + 1, len(body) + 4000, 0):
        refused(forged(u32(size) + blob, batch.VALUE | number))
    refused(forged(u32(2**32 - 1) + blob, batch.VALUE | number), errors.RecordTooLarge)
    refused(forged(u32(len(body)) + blob[:-3], batch.VALUE | number))
    refused(forged(b"\x01\0", batch.VALUE | number))
    refused(forged(u32(4) + b"garbage!", batch.VALUE | number))


def test_a_bomb_is_stopped_by_its_bound() -> None:
    bomb = pa.Codec("zstd").compress(bytes(10**7), asbytes=True)
    raw = forged(u32(10**7) + bomb, batch.VALUE | 2)
    assert len(raw) < 2000
    refused(raw, errors.RecordTooLarge, most=10**6)
    refused(forged(u32(100) + bomb, batch.VALUE | 2))
    refused(forged(bytes(2000), 0), errors.RecordTooLarge, most=1999)
