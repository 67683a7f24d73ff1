"""A batch with a codec of a later build is refused by name wherever it is met (rule L19)."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c

from pk import errors
from pk.log import batch, columns
from pk.log.dump import dump_log
from tests.unit.log.conftest import Bench, make_batch

NUMBERS = range(len(batch.CODECS), batch.CODEC_NUMBERS)


def renumbered(raw: bytes, number: int) -> bytes:
    """`raw` with another codec number and a checksum that matches."""
    (attributes,) = struct.unpack_from("<H", raw, 24)
    attributes = attributes & ~batch.CODEC_MASK | number & 0b11 | (number & 0b100) << 13
    changed = bytearray(raw)
    struct.pack_into("<H", changed, 24, attributes)
    struct.pack_into("<I", changed, 20, crc32c(bytes(changed[batch.CRC_START :])))
    return bytes(changed)


@pytest.mark.parametrize("number", NUMBERS)
def test_an_intact_batch_of_an_unknown_codec_is_a_newer_format(number: int) -> None:
    raw = renumbered(make_batch(3), number)
    with pytest.raises(errors.NewerFormat, match=f"codec {number}"):
        batch.check(raw)
    with pytest.raises(errors.NewerFormat, match=f"codec {number}"):
        columns.decode(raw, decoded_bytes_max=10_000)


def test_damage_is_damage_whatever_the_number_says() -> None:
    raw = bytearray(renumbered(make_batch(3), 3))
    raw[-1] ^= 1
    with pytest.raises(errors.CorruptBatch, match="checksum"):
        batch.check(bytes(raw))


@pytest.mark.parametrize("number", [3, 4])
def test_headers_can_be_walked_over(number: int) -> None:
    newer = b"".join(batch.patched(renumbered(make_batch(2), number), 2, 0))
    payload = newer + b"".join(batch.patched(make_batch(1), 4, 0))
    found = [(h.base_offset, h.codec_number) for _, h in batch.iter_headers(payload)]
    assert found == [(2, number), (4, 0)]


@pytest.mark.parametrize("clean", [True, False])
def test_a_log_that_holds_one_is_opened_and_never_cut(clean: bool) -> None:
    """A scan counts the batch as whole, so nothing behind it is lost.  A reader is refused."""
    b = Bench()
    b.append(make_batch(2), make_batch(2), make_batch(2))
    path = f"topics/t-0/{0:020}.log"
    stored = b.storage.peek(path)
    third = len(stored) // 3
    newer = stored[:third] + renumbered(stored[third : 2 * third], 3) + stored[2 * third :]
    b.log.close()
    b.storage.open(path).write_at(0, newer)
    b.open(clean=clean)
    assert b.log.log_end == 6
    assert b.storage.peek(path) == newer
    assert b.values(4) == [4, 5]
    with pytest.raises(errors.NewerFormat, match="offset 2 is encoded with codec 3"):
        b.values(2)


def test_a_dump_shows_the_number() -> None:
    raw = renumbered(make_batch(1), 5)
    (row,) = dump_log(lambda at, size: raw[at : at + size], len(raw), records=True)
    assert row["codec"] == "5 (a newer pk's)"
    assert "corrupt" not in row
