"""Decoding of fetched bytes to rows: damage is noticed in whatever field it is."""

from __future__ import annotations

import pytest

from pk import errors, limits
from pk.client.completed_fetch import rows_of
from pk.client.fetcher_events import CompletedFetch
from pk.log import batch as batches
from pk.log import columns
from pk.types import TopicPartition


def log(count: int) -> bytearray:
    """Return batches of one record each."""
    found = bytearray()
    for offset in range(count):
        raw = b"".join(columns.encode_lists([b"v%d" % offset], default_timestamp=1000))
        found += b"".join(batches.patched(raw, offset, 3))
    return found


def values(raw: bytes) -> list[bytes]:
    fetched = CompletedFetch(TopicPartition("t", 0), 1, 1, memoryview(raw), 0, 3, [], 3, 3)
    found: list[bytes] = []
    for _, rows in rows_of(fetched, committed=True, check_crcs=True, decoded_bytes_max=1 << 28):
        if rows is not None:
            found += rows.column("value").to_pylist()
    return found


def test_no_bit_of_what_a_checksum_covers_may_hide_a_batch() -> None:
    """Rule L9: a damaged header may claim a control batch, no records, or an offset that was read
    already.
    """
    good = log(3)
    assert values(bytes(good)) == [b"v0", b"v1", b"v2"]
    begin = len(good) // 3
    for position in range(begin + batches.CRC_START, begin + limits.HEADER_BYTES):
        for bit in range(8):
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            with pytest.raises(errors.CorruptBatch):
                values(bytes(bad))


@pytest.mark.parametrize("number", [1, 2], ids=["between others", "the last"])
def test_no_bit_of_where_a_batch_begins_may_hide_or_move_it(number: int) -> None:
    """No checksum covers the base offset; a reader that goes back is at that very batch, and its
    broker checks it.
    """
    good = log(3)
    begin = len(good) // 3 * number
    for bit in range(63):
        bad = bytearray(good)
        bad[begin + bit // 8] ^= 1 << bit % 8
        fetched = CompletedFetch(
            TopicPartition("t", 0), 1, 1, memoryview(bytes(bad)), 0, 3, [], 3, 3
        )
        found = rows_of(fetched, committed=True, check_crcs=True, decoded_bytes_max=1 << 28)
        position = 0
        with pytest.raises(errors.CorruptBatch, match="stands between"):
            for position, _rows in found:  # noqa: B007
                pass
        assert position == number


def test_batches_that_are_moved_up_together_do_not_continue_a_dense_log() -> None:
    """Each of them is above the one before it, as in a compacted log."""
    good = log(4)
    size = len(good) // 4
    moved = bytearray(good)
    moved[size * 1] ^= 4  # offset 1 becomes 5
    moved[size * 2] ^= 8  # offset 2 becomes 10
    raw = memoryview(bytes(moved[: size * 3]))
    for dense, seen in ((False, [1, 6, 11]), (True, [1])):
        fetched = CompletedFetch(TopicPartition("t", 0), 1, 1, raw, 0, 11, [], 11, 11, dense)
        positions: list[int] = []
        found = rows_of(fetched, committed=True, check_crcs=True, decoded_bytes_max=1 << 28)
        try:
            positions.extend(position for position, _ in found)
        except errors.CorruptBatch:
            assert dense
        assert positions == seen
