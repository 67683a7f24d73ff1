"""Frames, the units that travel on a stream: `u32le head length | Head | payload`.

The payload is raw record batches, and the head holds their lengths, so no record is copied into a
message object.  A frame from the network is not trusted: every length is checked before it is used.
A head that does not parse raises `CorruptBatch` and never crashes the process.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from google.protobuf.message import DecodeError

from pk import errors, limits
from pk.wire import pk_pb2 as wire
from pk.world import Buffer as Buffer

_LENGTH = struct.Struct("<I")


class Frame(NamedTuple):
    """A parsed frame; `payload` is a view into the received bytes."""

    head: wire.Head
    payload: memoryview


def encode(head: wire.Head, payload: Iterable[Buffer] = ()) -> bytes:
    """Return the frame as one bytes object; this copies the payload once."""
    return b"".join(pieces(head, payload))


def pieces(head: wire.Head, payload: Iterable[Buffer] = ()) -> list[Buffer]:
    """Return the same frame in pieces, without a copy, for `Stream.send`."""
    raw = head.SerializeToString()
    return [_LENGTH.pack(len(raw)) + raw, *payload]


def decode(frame: bytes | memoryview) -> Frame:
    """Parse a frame.  Raises `CorruptBatch` if it is cut short or its head does not parse."""
    if len(frame) < _LENGTH.size:
        raise errors.CorruptBatch(f"frame of {len(frame)} bytes has no head")
    (size,) = _LENGTH.unpack_from(frame)
    if size > limits.FRAME_HEAD_BYTES_MAX or size > len(frame) - _LENGTH.size:
        raise errors.CorruptBatch(f"frame of {len(frame)} bytes announces a head of {size}")
    end = _LENGTH.size + size
    try:
        head = wire.Head.FromString(bytes(frame[_LENGTH.size : end]))
    except (DecodeError, RuntimeError) as cause:
        raise errors.CorruptBatch(f"frame head does not parse: {cause}") from cause
    return Frame(head, memoryview(frame)[end:])


def error_of(error: errors.PkError) -> wire.Error:
    """Return `error` as a wire message."""
    return wire.Error(code=error.code, message=error.message, details=error.details)


def raise_error(error: wire.Error) -> errors.PkError:
    """Return the exception that a peer's `Error` stands for; the caller raises it."""
    return errors.from_wire(error.code, error.message, dict(error.details))
