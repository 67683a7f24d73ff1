"""Control rows: markers round trip, and rows of other builds fail closed (rule L20)."""

from __future__ import annotations

import struct

import pytest

from pk import errors
from pk.log import batch, columns, control_rows
from pk.log.control_rows import Marker

WHOLE = Marker(1, 2, True, 7, 3, 41, "sales")


def row(marker: Marker = WHOLE) -> bytes:
    (batch_of_one,) = [b"".join(control_rows.encode_markers([marker], 5))]
    value = columns.decode(batch_of_one, decoded_bytes_max=10_000).column("value")[0]
    return bytes(value.as_py())


def decoded(*rows: bytes | None) -> list[Marker]:
    return control_rows.decode_markers(b"".join(columns.encode_lists(list(rows))))


def test_markers_round_trip() -> None:
    markers = [WHOLE, Marker(3, 4, False), Marker(2**62, 32767, True, application="ü" * 500)]
    raw = b"".join(control_rows.encode_markers(markers, 55))
    header = batch.check(raw)
    assert header.control
    assert header.transactional
    assert header.max_timestamp == 55
    assert control_rows.decode_markers(raw) == markers


def test_an_older_row_lacks_fields_of_the_tail() -> None:
    head = row()[:20]
    assert decoded(head) == [Marker(1, 2, True, 7)]
    assert decoded(head + row()[20:24]) == [Marker(1, 2, True, 7, 3)]
    assert decoded(head + row()[20:32]) == [Marker(1, 2, True, 7, 3, 41)]


def test_a_newer_row_has_bytes_behind_the_tail() -> None:
    assert decoded(row() + b"fields of a later build") == [WHOLE]


@pytest.mark.parametrize("at", [0, 1])
def test_an_unknown_type_or_version_is_a_newer_format(at: int) -> None:
    changed = bytearray(row())
    changed[at] = 9
    with pytest.raises(errors.NewerFormat, match="use a newer pk"):
        decoded(row(), bytes(changed))


@pytest.mark.parametrize(
    "bad",
    [None, b"", b"\x01", b"\x01\x00" + bytes(18), row()[:19], row()[:22], row()[:30], row()[:33],
     row()[:-1], row()[:-5] + b"\xff" * 5],
)  # fmt: skip
def test_a_row_that_does_not_parse_is_refused(bad: bytes | None) -> None:
    with pytest.raises(errors.InvalidRecord):
        decoded(bad)


def test_the_head_has_fixed_places() -> None:
    """The bytes of format 1: other readers (Spark's JVM part, tools) rely on them."""
    assert row()[:20] == struct.pack("<BBhiqBxH", 1, 1, 2, 7, 1, 1, 0)


def test_an_application_id_is_bounded() -> None:
    with pytest.raises(errors.InvalidRecord, match="1024"):
        control_rows.encode_markers([Marker(1, 1, True, application="a" * 1025)], 0)
