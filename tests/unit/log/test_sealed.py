"""JSON files with a checksum of their own."""

from __future__ import annotations

import json

import pytest

from pk.log import sealed

FIELDS = {"format": 0, "name": "a", "epoch": 12}


def test_a_file_is_one_json_object_and_says_what_was_written() -> None:
    raw = sealed.encode(FIELDS)
    assert sealed.decode(raw) == FIELDS
    known = json.loads(raw)
    assert list(known) == [*FIELDS, sealed.FIELD]


def test_every_flipped_bit_is_noticed() -> None:
    whole = sealed.encode(FIELDS)
    for at in range(len(whole)):
        for bit in range(8):
            raw = bytearray(whole)
            raw[at] ^= 1 << bit
            with pytest.raises(sealed.CorruptFile):
                sealed.decode(bytes(raw))


def test_so_is_every_cut() -> None:
    whole = sealed.encode(FIELDS)
    for size in range(len(whole)):
        with pytest.raises(sealed.CorruptFile):
            sealed.decode(whole[:size])
    with pytest.raises(sealed.CorruptFile):
        sealed.decode(whole + b"\n")


def test_the_error_names_what_is_wrong() -> None:
    whole = sealed.encode(FIELDS)
    noted = json.loads(whole)[sealed.FIELD]
    with pytest.raises(
        sealed.CorruptFile, match=f"crc32c is {noted}, the content has [0-9a-f]{{8}}"
    ):
        sealed.decode(whole.replace(b"12", b"13", 1))
    with pytest.raises(sealed.CorruptFile, match="does not end with its checksum"):
        sealed.decode(json.dumps(FIELDS).encode())
    with pytest.raises(sealed.CorruptFile, match="the field 'term' is missing"):
        sealed.field(FIELDS, "term", int)
    with pytest.raises(sealed.CorruptFile, match="the field 'name' is 'a', no int"):
        sealed.field(FIELDS, "name", int)
