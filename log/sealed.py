"""Small JSON files that carry their own checksum: one object whose last field is `crc32c`, the
CRC-32C of every byte before that field.

partition.json (identity.py), pk.json (directory.py) and quorum-state (server/raft/recovery.py) are
such files.  People can read them, and the checksum reveals a changed character.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from crc32c import crc32c

FIELD = "crc32c"
_TAIL = b', "crc32c": "%08x"}'
_TAIL_BYTES = len(_TAIL % 0)


class CorruptFile(ValueError):
    """The bytes of the file are not those that were written; the text says what is wrong with
    them.
    """


def encode(fields: Mapping[str, Any]) -> bytes:
    """Encode the content of the file.  `fields` is not empty."""
    body = json.dumps(fields).encode()[:-1]
    return body + _TAIL % crc32c(body)


def decode(raw: bytes) -> dict[str, Any]:
    """Decode the fields, without the checksum.  Raises `CorruptFile`."""
    body, tail = raw[:-_TAIL_BYTES], raw[-_TAIL_BYTES:]
    if tail == _TAIL % crc32c(body):
        found: dict[str, Any] = json.loads(body + b"}")
        return found
    start, size = _TAIL.index(b"%"), len(b"%08x" % 0)
    noted = tail[start : start + size]
    if tail[:start] + tail[start + size :] != _TAIL.replace(b"%08x", b""):
        raise CorruptFile(f"it does not end with its checksum, the field {FIELD!r}")
    raise CorruptFile(
        f"its checksum does not match: {FIELD} is {noted.decode(errors='backslashreplace')}, the "
        f"content has {crc32c(body):08x}"
    )


def field(found: Mapping[str, Any], name: str, kind: type) -> Any:
    """Return a field of the given type.  Raises `CorruptFile` with its name."""
    if name not in found:
        raise CorruptFile(f"the field {name!r} is missing")
    if type(found[name]) is not kind:
        raise CorruptFile(f"the field {name!r} is {found[name]!r}, no {kind.__name__}")
    return found[name]
