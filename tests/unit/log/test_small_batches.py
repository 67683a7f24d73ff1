"""Batches of a few records: `struct` writes and accepts what Arrow and numpy do."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pk import errors
from pk.log import batch, columns
from pk.log.encoding import encode_lists
from pk.log.small_batches import FEW_RECORDS, accepts, encode_few

ITEMS = st.one_of(st.none(), st.binary(max_size=40), st.sampled_from([b"", b"a" * 200]))
ROWS = st.one_of(
    st.lists(st.tuples(ITEMS, ITEMS), min_size=1, max_size=5),
    st.lists(st.tuples(ITEMS, ITEMS), min_size=FEW_RECORDS - 1, max_size=FEW_RECORDS + 2),
    st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)), min_size=1, max_size=120),
)
TIMES = st.one_of(
    st.integers(0, 10),
    st.integers(batch.TIMESTAMP_MS_MIN, batch.TIMESTAMP_MS_MAX),
)


@given(
    ROWS,
    st.booleans(),
    st.data(),
    st.sampled_from(batch.CODECS),
    st.sampled_from([(-1, -1, -1, False), (7, 3, 2**31 - 1, False), (2**40, 0, 0, True)]),
)
@settings(max_examples=400, deadline=None)
def test_few_records_have_the_bytes_of_many(
    rows: list[tuple[bytes | None, bytes | None]],
    keyed: bool,
    data: Any,
    codec: str,
    producer: tuple[int, int, int, bool],
) -> None:
    """log/small_batches M1, and with them: each reader takes them."""
    keys = [key for key, _ in rows] if keyed else None
    values = [value for _, value in rows]
    times = data.draw(st.one_of(TIMES, st.lists(TIMES, min_size=len(rows), max_size=len(rows))))
    names = ("producer_id", "producer_epoch", "base_sequence", "transactional")
    options: dict[str, Any] = dict(zip(names, producer, strict=True))
    found = b"".join(encode_few(values, keys, times, codec=codec, **options))
    stamps, default = (None, times) if isinstance(times, int) else (times, 0)
    many = encode_lists(values, keys, stamps, codec=codec, default_timestamp=default, **options)
    assert found == b"".join(many)
    header = batch.check(found)
    columns.validate_body(found, header, 10**6)
    assert columns.decode(found, decoded_bytes_max=10**6).column("value").to_pylist() == values


def test_few_records_are_refused_like_many() -> None:
    for values, times, kind in (
        ([], 0, errors.RecordTooLarge),
        ([b""], batch.TIMESTAMP_MS_MAX + 1, errors.SerializationError),
        ([b"", b""], [0, batch.TIMESTAMP_MS_MIN - 1], errors.SerializationError),
    ):
        with pytest.raises(kind) as found:
            encode_few(values, None, times)
        stamps = times if isinstance(times, list) else None
        default = times if isinstance(times, int) else 0
        with pytest.raises(kind) as expected:
            encode_lists(values, None, stamps, default_timestamp=default)
        assert str(found.value) == str(expected.value)


FLAGS = [
    batch.KEY, batch.VALUE, batch.TIMESTAMPS, batch.TIMESTAMPS_I64, batch.VALUE_NULLS,
    batch.OFFSET_DELTAS, batch.LOG_APPEND_TIME, batch.TRANSACTIONAL, batch.HEADERS,
    batch.DELETE_HORIZON, 1,
]  # fmt: skip


@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1)), max_size=8),
    st.integers(0, 12),
    st.sets(st.sampled_from(FLAGS), max_size=4),
    st.integers(0, 40),
    st.integers(0, 5),
)
@settings(max_examples=1500, deadline=None)
def test_what_is_accepted_is_sound(
    numbers: list[int], data: int, flags: set[int], count: int, span: int
) -> None:
    """log/small_batches M2: lengths that lie, times outside the bounds, and other kinds."""
    body = b"".join(number.to_bytes(4, "little") for number in numbers) + b"x" * data
    header = batch.Header(
        0, 64 + len(body), -1, batch.MAGIC, 0, sum(flags), -1, count - 1, 10, 10 + span, -1, -1,
        count,
    )  # fmt: skip
    raw = bytes(64) + body
    if accepts(header, raw):
        columns.parse(header, memoryview(body))


@pytest.mark.parametrize("count", [1, 2, FEW_RECORDS])
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("stamped", [False, True])
def test_the_plain_batches_of_producers_are_accepted(
    count: int, keyed: bool, stamped: bool
) -> None:
    values, keys = [b"v%d" % n for n in range(count)], [b"k"] * count if keyed else None
    raw = b"".join(encode_few(values, keys, list(range(count)) if stamped else 5))
    header = batch.check(raw)
    assert accepts(header, raw)
    longer = raw + b"x"
    assert not accepts(header._replace(length=len(longer)), longer)
    if stamped and count > 1:
        assert not accepts(header._replace(max_timestamp=header.max_timestamp - 1), raw)


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_a_body_is_compressed_if_that_saves_bytes(codec: str) -> None:
    alone, same = b"".join(encode_few([b"0123456789"], None, 5)), [b"same"] * 100
    assert b"".join(encode_few([b"0123456789"], None, 5, codec=codec)) == alone
    many = b"".join(encode_few(same, None, 5, codec=codec))
    assert batch.check(many).codec == codec
    assert len(many) < len(b"".join(encode_few(same, None, 5))) // 2
