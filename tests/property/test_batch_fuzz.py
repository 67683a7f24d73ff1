"""Batches with hypothesis: decoding returns the encoded rows, and any byte string leads to a typed
error at worst (rule L13).
"""

from __future__ import annotations

import random
import struct

import pyarrow as pa
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from pk import errors
from pk.log import batch, columns

CODECS = st.sampled_from(["none", "lz4", "zstd"])
BYTES = st.none() | st.binary(max_size=20)
HEADERS = st.none() | st.lists(st.tuples(st.text(max_size=4), BYTES), max_size=3)
STAMPS = st.integers(-(2**40), 2**45)
ROWS = st.lists(st.tuples(BYTES, BYTES, STAMPS, HEADERS), min_size=1, max_size=20)


@given(rows=ROWS, codec=CODECS, base=st.integers(0, 2**50))
def test_lists_come_back(
    rows: list[tuple[bytes | None, bytes | None, int, list[tuple[str, bytes | None]] | None]],
    codec: str,
    base: int,
) -> None:
    values, keys, stamps, headers = (list(column) for column in zip(*rows, strict=True))
    raw = b"".join(columns.encode_lists(values, keys, stamps, headers, codec=codec))
    raw = b"".join(batch.patched(raw, base, 1))
    header = batch.check(raw)
    columns.validate_body(raw, header, 10**6)
    found = columns.decode(raw, decoded_bytes_max=10**6)
    found.validate(full=True)
    assert found.column("value").to_pylist() == values
    assert found.column("key").to_pylist() == keys
    assert found.column("timestamp").view("int64").to_pylist() == stamps
    assert found.column("offset").to_pylist() == list(range(base, base + len(rows)))
    expected = [[{"key": k, "value": v} for k, v in row or ()] for row in headers]
    assert found.column("headers").to_pylist() == expected
    assert (header.base_timestamp, header.max_timestamp) == (min(stamps), max(stamps))
    assert header.has_null_keys == (None in keys)


def hostile(raw: bytes) -> None:
    """Feed these bytes to every reader: each ends with rows that Arrow finds valid, or a typed
    error.
    """
    try:
        header = batch.check(raw)
        columns.validate_body(raw, header, 10**5)
        valid = True
    except errors.PkError:
        valid = False
    try:
        rows = columns.decode(raw, decoded_bytes_max=10**5)
    except errors.PkError:
        assert not valid, "the broker accepted what a reader refuses"
        return
    rows.validate(full=True)
    rows.to_pylist()


@given(seed=st.integers(0, 2**32 - 1), codec=CODECS, rows=ROWS)
def test_flipped_bits_with_a_right_checksum(
    seed: int, codec: str, rows: list[tuple[bytes | None, bytes | None, int, None]]
) -> None:
    """The checksum protects from accidents; a hostile peer computes a valid one."""
    rng = random.Random(seed)
    values, keys, stamps, headers = (list(column) for column in zip(*rows, strict=True))
    good = b"".join(columns.encode_lists(values, keys, stamps, headers, codec=codec))
    for _ in range(20):
        raw = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            at = (
                rng.randrange(len(raw))
                if rng.random() < 0.5
                else rng.randrange(20, min(len(raw), 110))
            )
            raw[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        if rng.random() < 0.2:
            del raw[rng.randrange(64, len(raw) + 1) :]
        if len(raw) >= 64:
            if rng.random() < 0.9:
                struct.pack_into("<i", raw, 8, len(raw))
            struct.pack_into("<I", raw, 20, crc32c(bytes(raw[24:])))
        hostile(bytes(raw))


@given(
    body=st.binary(max_size=200),
    attributes=st.integers(0, 2**15 - 1),
    count=st.integers(0, 30),
    extra=st.integers(0, 9),
)
def test_any_body_under_any_flags(body: bytes, attributes: int, count: int, extra: int) -> None:
    header = batch.Header(
        0, 0, -1, batch.MAGIC, 0, attributes, -1, max(0, count - 1 + extra), 0, 500, -1, -1, count
    )
    hostile(b"".join(batch.seal(header, [body])))


@given(raw=st.binary(max_size=300))
def test_any_bytes(raw: bytes) -> None:
    hostile(raw)
    for step in (lambda: list(batch.iter_headers(raw)), lambda: batch.check(raw)):
        try:
            step()
        except errors.PkError:
            pass


@given(rows=ROWS, codec=CODECS, at=st.integers(0, 19), size=st.integers(1, 20))
def test_slices_encode_like_copies(
    rows: list[tuple[bytes | None, bytes | None, int, None]], codec: str, at: int, size: int
) -> None:
    """An Arrow slice shares its parent's buffers; no other row may get into the batch."""
    values, keys, _, headers = (list(column) for column in zip(*rows, strict=True))
    lists = [None if row is None else [{"key": k, "value": v} for k, v in row] for row in headers]
    table = pa.record_batch(
        {
            "value": pa.array(values, pa.binary()),
            "key": pa.array(keys, pa.large_binary()),
            "headers": pa.array(lists, columns.HEADER_TYPE),
        }
    )
    at = min(at, len(rows) - 1)
    part = table.slice(at, size)
    copy = pa.record_batch(
        [pa.array(c.to_pylist(), c.type) for c in part.columns], names=part.schema.names
    )
    assert b"".join(columns.encode(part, codec=codec)) == b"".join(
        columns.encode(copy, codec=codec)
    )
