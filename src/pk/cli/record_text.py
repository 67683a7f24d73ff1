"""Records as lines of bytes, and lines of JSON as records: `pk consume` and `pk produce`.

`pk consume --json` prints what `pk produce --json` reads, so that a copied topic has the same keys,
values, headers, timestamps and partitions.  Bytes that are not UTF-8 are in `<name>_base64`.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pk import errors
from pk.types import Record

Headers = tuple[tuple[str, bytes | None], ...]

_SPECIFIER = re.compile(rb"%(.)|\\(x[0-9A-Fa-f]{2}|.)|([^%\\]+)|(.)", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"0": b"\0", b"\\": b"\\"}
_ESCAPE = re.compile(rb"\\([ntr0\\])")


def shown(data: bytes | None) -> bytes:
    """Return a key or value as it is printed."""
    return b"null" if data is None else data


def unescaped(text: str) -> bytes:
    r"""Return text in which `\n`, `\t`, `\r`, `\0` and `\\` stand for one character."""
    return _ESCAPE.sub(lambda found: _ESCAPES[found[1]], text.encode())


def headers_shown(record: Record) -> bytes:
    return b",".join(name.encode() + b"=" + shown(value) for name, value in record.headers)


#: The specifiers of --format: those of kcat, and %v as in rpk.
_FIELDS: dict[bytes, Callable[[Record], bytes]] = {
    b"t": lambda record: record.topic.encode(),
    b"p": lambda record: b"%d" % record.partition,
    b"o": lambda record: b"%d" % record.offset,
    b"k": lambda record: shown(record.key),
    b"v": lambda record: shown(record.value),
    b"s": lambda record: shown(record.value),
    b"h": headers_shown,
    b"T": lambda record: b"%d" % record.timestamp_ms,
    b"d": lambda record: iso(record.timestamp_ms).encode(),
    b"K": lambda record: b"%d" % (-1 if record.key is None else len(record.key)),
    b"S": lambda record: b"%d" % (-1 if record.value is None else len(record.value)),
}


def iso(time_ms: int) -> str:
    """Return a time in UTC as ISO 8601, the number itself if it has no date."""
    try:
        found = datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return str(time_ms)
    return found.replace("+00:00", "Z")


def format_of(text: str) -> Callable[[Record], bytes]:
    """Return a function that prints a record by `text`; no end of line is added.

    Raises `InvalidOption` for an unknown specifier.
    """
    parts: list[Callable[[Record], bytes]] = []
    for specifier, escape, literal, rest in _SPECIFIER.findall(text.encode()):
        if specifier == b"%":
            literal = b"%"
        elif specifier:
            field = _FIELDS.get(specifier)
            if field is None:
                raise _unknown("%" + specifier.decode(errors="replace"))
            parts.append(field)
            continue
        elif escape:
            literal = bytes([int(escape[1:], 16)]) if len(escape) == 3 else _ESCAPES.get(escape)
            if literal is None:
                raise _unknown("\\" + escape.decode(errors="replace"))
        elif rest:
            raise _unknown(rest.decode())
        parts.append(partial(_literal, literal))
    return lambda record: b"".join([part(record) for part in parts])


def _literal(text: bytes, _record: Record) -> bytes:
    return text


def _unknown(what: str) -> errors.InvalidOption:
    names = " ".join(f"%{name.decode()}" for name in _FIELDS)
    return errors.InvalidOption(
        f"--format has no {what}; there are {names} %% and \\n \\t \\r \\0 \\\\ \\xHH",
        option="format",
    )


# -- JSON ------------------------------------------------------------------------------------------


def json_line(record: Record) -> bytes:
    """Return a record as a JSON object on one line."""
    found: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        **_field("key", record.key),
        **_field("value", record.value),
        "headers": [{"name": name, **_field("value", value)} for name, value in record.headers],
    }
    return json.dumps(found, ensure_ascii=False).encode() + b"\n"


def _field(name: str, data: bytes | None) -> dict[str, Any]:
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


class NewRecord(NamedTuple):
    """A record to be sent, in the order of the arguments of `Producer.send`."""

    value: bytes | None
    key: bytes | None
    headers: Headers
    partition: int | None
    timestamp_ms: int | None


class _Header(msgspec.Struct):
    name: str
    value: str | msgspec.UnsetType | None = msgspec.UNSET
    value_base64: str | msgspec.UnsetType = msgspec.UNSET


class _Line(msgspec.Struct):
    value: str | msgspec.UnsetType | None = msgspec.UNSET
    value_base64: str | msgspec.UnsetType = msgspec.UNSET
    key: str | msgspec.UnsetType | None = msgspec.UNSET
    key_base64: str | msgspec.UnsetType = msgspec.UNSET
    headers: list[_Header] = []
    partition: int | None = None
    timestamp_ms: int | None = None


_decode = msgspec.json.Decoder(_Line).decode


def of_json(line: bytes, number: int) -> NewRecord:
    """Return the record of a line of JSON.  Raises `InvalidOption` with the number of the line."""
    try:
        found = _decode(line)
        if found.value is msgspec.UNSET and found.value_base64 is msgspec.UNSET:
            raise ValueError('it has neither "value" nor "value_base64"; null is a tombstone')
        headers = tuple((each.name, _data(each.value, each.value_base64)) for each in found.headers)
        stamp = found.timestamp_ms
        return NewRecord(
            _data(found.value, found.value_base64),
            _data(found.key, found.key_base64),
            headers,
            found.partition,
            None if stamp is None or stamp < 0 else stamp,
        )
    except (ValueError, msgspec.MsgspecError) as cause:
        raise errors.InvalidOption(
            f"line {number} is no record as `pk consume --json` prints it: {cause}",
            line=str(number),
        ) from None


def _data(text: str | msgspec.UnsetType | None, encoded: str | msgspec.UnsetType) -> bytes | None:
    if isinstance(encoded, str):
        if text is not msgspec.UNSET:
            raise ValueError("bytes are given twice, as text and in base64")
        try:
            return base64.b64decode(encoded, validate=True)
        except binascii.Error as cause:
            raise ValueError(f"base64: {cause}") from None
    return text.encode() if isinstance(text, str) else None
