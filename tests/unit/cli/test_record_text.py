"""Records as lines, and lines as records (cli/record_text)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pk import Record, errors
from pk.cli import record_text

RECORD = Record("t", 3, 70, 1_795_780_800_123, b"k", None, (("h", b"1"), ("g", None)))
DATA = st.none() | st.binary(max_size=20) | st.text(max_size=20).map(lambda text: text.encode())


@given(DATA, DATA, st.lists(st.tuples(st.text(max_size=5), DATA), max_size=3), st.integers(0, 9))
def test_json_has_every_byte(
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes | None]],
    partition: int,
) -> None:
    line = record_text.json_line(Record("t", partition, 7, 1234, key, value, tuple(headers)))
    assert line.count(b"\n") == 1
    again = record_text.of_json(line, 1)
    assert again == (value, key, tuple(headers), partition, 1234)


def test_a_line_may_have_a_value_only() -> None:
    assert record_text.of_json(b'{"value": "v"}', 1) == (b"v", None, (), None, None)
    assert record_text.of_json(b'{"value": null, "timestamp_ms": -1}', 1)[4] is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"plain text", "line 7 is no record"),
        (b'["value"]', "line 7 is no record"),
        (b'{"key": "k"}', "null is a tombstone"),
        (b'{"value": 5}', "Expected `str | null`"),
        (b'{"value_base64": "%%%"}', "base64"),
        (b'{"value": "\\ud800"}', "line 7 is no record"),
        (b'{"value": "v", "headers": {"a": "b"}}', "Expected `array`"),
    ],
)
def test_other_lines_are_refused_by_number(line: bytes, words: str) -> None:
    with pytest.raises(errors.InvalidOption) as told:
        record_text.of_json(line, 7)
    assert words in str(told.value)
    assert told.value.details["line"] == "7"


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        (r"%t %p %o %k %v\n", b"t 3 70 k null\n"),
        (r"%s|%T|%d", b"null|1795780800123|2026-11-27T12:00:00.123Z"),
        (r"%h\t%K\t%S", b"h=1,g=null\t1\t-1"),
        (r"100%%\\\x00\0", b"100%\\\0\0"),
        ("é%k", "ék".encode()),
        ("", b""),
    ],
)
def test_formats(text: str, printed: bytes) -> None:
    assert record_text.format_of(text)(RECORD) == printed


@pytest.mark.parametrize(
    ("text", "what"), [("%x", "%x"), ("50%", "%"), ("a\\", "\\"), (r"\q", "q")]
)
def test_unknown_specifiers_are_refused(text: str, what: str) -> None:
    with pytest.raises(errors.InvalidOption, match="--format has no") as told:
        record_text.format_of(text)
    assert what in str(told.value)


def test_json_is_one_object() -> None:
    assert json.loads(record_text.json_line(RECORD)) == {
        "topic": "t",
        "partition": 3,
        "offset": 70,
        "timestamp_ms": 1_795_780_800_123,
        "key": "k",
        "value": None,
        "headers": [{"name": "h", "value": "1"}, {"name": "g", "value": None}],
    }


def test_a_separator_may_be_written_as_an_escape() -> None:
    assert record_text.unescaped("\\t") == b"\t"
    assert record_text.unescaped("\t") == b"\t"
    assert record_text.unescaped("a\\\\t·\\q") == "a\\t·\\q".encode()
