"""The 64-byte header of a batch: every field, and every refusal."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c

from pk import errors
from pk.log import batch, columns
from pk.log.batch import HEADER_BYTES

RAW = b"".join(
    columns.encode_lists(
        [b"a", b"bb", b"ccc"],
        keys=[b"k", None, b"l"],
        timestamps=[1000, 1005, 1002],
        producer_id=7,
        producer_epoch=2,
        base_sequence=40,
    )
)


def damaged(at: int, kind: str, value: int, *, seal: bool = True) -> bytes:
    """Return RAW with one field replaced; `seal` recomputes the checksum."""
    raw = bytearray(RAW)
    struct.pack_into("<" + kind, raw, at, value)
    if seal:
        struct.pack_into("<I", raw, 20, crc32c(bytes(raw[24:])))
    return bytes(raw)


def test_header_says_what_was_encoded() -> None:
    header = batch.check(RAW)
    assert (header.record_count, header.last_offset_delta) == (3, 2)
    assert (header.base_timestamp, header.max_timestamp) == (1000, 1005)
    assert (
        header.producer_id,
        header.producer_epoch,
        header.base_sequence,
        header.last_sequence,
    ) == (7, 2, 40, 42)
    assert header.length == len(RAW)
    assert header.codec == "none"
    assert header.has_null_keys
    assert header.idempotent
    assert not header.transactional | header.control | header.sparse | header.log_append_time


def test_layout_is_the_documented_one() -> None:
    """docs/design/0001: the positions of the fields are part of the format."""
    patched = b"".join(batch.patched(RAW, 0x0102030405060708, 0x0A0B0C0D))
    assert patched[0:8] == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    assert struct.unpack_from("<i", patched, 8) == (len(RAW),)
    assert patched[12:16] == bytes([0x0D, 0x0C, 0x0B, 0x0A])
    assert patched[16:20] == b"\x50\0\0\0"
    assert struct.unpack_from("<q", patched, 32) == (1000,)
    assert struct.unpack_from("<i", patched, 60) == (3,)


@pytest.mark.parametrize(
    ("at", "kind", "value"),
    [
        (16, "B", 0x51),
        (17, "B", 1),
        (8, "i", 63),
        (8, "i", -1),
        (24, "H", batch.KEY_NULLS | batch.VALUE),
        (24, "H", batch.TIMESTAMPS_I64 | batch.VALUE),
        (60, "i", -1),
        (60, "i", 2_000_000),
        (60, "i", 4),
        (28, "i", 7),
        (28, "i", -1),
        (60, "i", 0),
        (32, "q", 2**62),
        (40, "q", 999),
        (48, "q", -2),
        (26, "h", -2),
        (56, "i", -2),
        (26, "h", -1),
        (0, "q", -1),
        (0, "q", 2**63 - 1),
        (24, "H", batch.DELETE_HORIZON | batch.VALUE),
    ],
)
def test_nonsense_is_corrupt(at: int, kind: str, value: int) -> None:
    with pytest.raises(errors.CorruptBatch):
        batch.check(damaged(at, kind, value))


def test_sequence_without_producer_is_corrupt() -> None:
    with pytest.raises(errors.CorruptBatch, match="sequence"):
        batch.check(damaged(48, "q", -1))


def test_checksum_covers_everything_behind_it() -> None:
    for at in (24, 40, HEADER_BYTES, len(RAW) - 1):
        raw = bytearray(RAW)
        raw[at] ^= 1
        with pytest.raises(errors.CorruptBatch):
            batch.check(bytes(raw))


def test_length_and_size_bound() -> None:
    for raw in (b"", RAW[:63], RAW[:-1], RAW + b"x"):
        with pytest.raises(errors.CorruptBatch):
            batch.check(raw)
    with pytest.raises(errors.RecordTooLarge):
        batch.check(RAW, len(RAW) - 1)
    assert batch.check(memoryview(RAW), len(RAW)).length == len(RAW)


def test_patching_keeps_the_checksum_and_the_body() -> None:
    head, rest = batch.patched(RAW, 500, 3)
    header = batch.check(b"".join((head, rest)))
    assert (header.base_offset, header.last_offset, header.next_offset, header.leader_epoch) == (
        500,
        502,
        503,
        3,
    )
    assert isinstance(rest, memoryview)
    assert rest.obj is RAW


def test_append_time_is_the_one_rewrite() -> None:
    raw = b"".join(batch.patched(RAW, 5, 1, append_time_ms=77))
    header = batch.check(raw)
    assert header.log_append_time
    assert (header.base_timestamp, header.max_timestamp) == (77, 77)
    rows = columns.decode(raw, decoded_bytes_max=1000)
    assert rows.column("timestamp").view("int64").to_pylist() == [77] * 3


def test_empty_batch_keeps_the_producer() -> None:
    # rule L14
    header = batch.read_header(RAW)
    bare = batch.check(batch.empty(header))
    assert (bare.record_count, bare.last_offset_delta, bare.length) == (0, 2, HEADER_BYTES)
    assert (bare.producer_id, bare.producer_epoch, bare.last_sequence) == (7, 2, 42)
    assert columns.decode(batch.empty(header), decoded_bytes_max=0).num_rows == 0
    assert not bare.has_null_keys


def test_sequence_wraps() -> None:
    """KIP-98: after 2^31 - 1 comes 0."""
    header = batch.read_header(RAW)._replace(base_sequence=2**31 - 1)
    assert header.last_sequence == 1


def test_iterating_names_the_place_of_damage() -> None:
    both = RAW + b"".join(batch.patched(RAW, 3, 0))
    assert [(at, h.base_offset) for at, h in batch.iter_headers(both)] == [(0, 0), (len(RAW), 3)]
    assert [bytes(raw) for _, raw in batch.iter_batches(both)] == [RAW, both[len(RAW) :]]
    for cut in (both[:-1], both + b"x", both[: len(RAW) + 10]):
        with pytest.raises(errors.CorruptBatch, match=r"at \d+"):
            list(batch.iter_headers(cut))
