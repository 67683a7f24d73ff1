"""Frames: what travels on a stream.  `u32le head length | Head | payload`.

The payload is raw batches; the head says how long each is, so a record is never copied into a
message object.  A frame from the network is hostile: every length is checked before it is used, and
a head that does not parse is a `CorruptBatch`, never a crash.
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
    """One copy: the pieces of the payload are joined behind the head."""
    return b"".join(pieces(head, payload))


def pieces(head: wire.Head, payload: Iterable[Buffer] = ()) -> list[Buffer]:
    """No copy: the same frame in pieces, for `Stream.send`."""
    raw = head.SerializeToString()
    return [_LENGTH.pack(len(raw)) + raw, *payload]


def decode(frame: bytes | memoryview) -> Frame:
    """Raises `CorruptBatch` if the frame is cut short or its head does not parse."""
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
    """`error` as it travels."""
    return wire.Error(code=error.code, message=error.message, details=error.details)


def raise_error(error: wire.Error) -> errors.PkError:
    """The exception a peer's `Error` stands for (to be raised by the caller)."""
    return errors.from_wire(error.code, error.message, dict(error.details))
