"""Small text files that survive torn writes: a title, lines, a checksum.  People can read them.
The first line and the last one keep their form in every version (rule L21).

pk recovery-point-offset-checkpoint 0
5f0c… 0 1200
crc32c 1a2b3c4d
"""

from __future__ import annotations

from collections.abc import Iterable

from crc32c import crc32c

from pk import formats

VERSION = 0


class CorruptCheckpoint(ValueError):
    """The file is not as it was written; its content can be rebuilt."""


def encode(title: str, lines: Iterable[str], version: int | None = None) -> bytes:
    """Encode a file.  version: of its lines; None = that of the checkpoints."""
    version = VERSION if version is None else version
    body = "".join(f"{line}\n" for line in (f"pk {title} {version}", *lines)).encode()
    return body + f"crc32c {crc32c(body):08x}\n".encode()


def decode(title: str, raw: bytes, known: int | None = None) -> list[str]:
    """Decode the lines of the file.  Raises `CorruptCheckpoint`, and `NewerFormat` for a whole file
    of another version.

    known: the version of the lines; None = that of the checkpoints
    """
    body, found, tail = raw.rpartition(b"crc32c ")
    if not found or tail != f"{crc32c(body):08x}\n".encode():
        raise CorruptCheckpoint(f"{title}: the checksum does not match")
    head, *lines = body.decode().splitlines()
    name, _, version = head.rpartition(" ")
    if name != f"pk {title}" or not version.isdigit():
        raise CorruptCheckpoint(f"{title}: begins with {head!r}")
    formats.require_version(title, int(version), VERSION if known is None else known)
    return lines
